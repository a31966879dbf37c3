"""``deepseal info`` and ``deepseal demo``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepseal.apps.cli.common import Force, Json, Seed, progress, remark, running


def register(app: typer.Typer) -> None:
    """Add the commands that have no noun."""
    app.command()(info)
    app.command()(demo)


def info(json: Json = False) -> None:
    """Versions, devices, CPU features, data sets found, and what is registered."""
    with running("info", json=json, record=None) as (run, _):
        import torch

        from deepseal import _native
        from deepseal.attacks import EVASION, QUERY, REMOVAL
        from deepseal.defense.base import DETECTORS
        from deepseal.files import data_folders
        from deepseal.watermark import SCHEMES

        run.results.update(
            cpu={"architecture": _native.architecture(), **_native.cpu_features()},
            compiler=_native.compiler(),
            devices=["cpu", *(torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count()))],
            torch_threads=torch.get_num_threads(),
            data_folders=[str(folder) for folder in data_folders() if folder.is_dir()],
            schemes=SCHEMES.names(),
            removal_attacks=REMOVAL.names(),
            query_attacks=QUERY.names(),
            evasion_attacks=EVASION.names(),
            detectors=DETECTORS.names(),
        )


def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for models, key, records and report.")] = Path(
        "deepseal-demo"
    ),
    seed: Seed = 0,
    force: Force = False,
    json: Json = False,
) -> None:
    """The whole story on real digits in a few minutes: train, mark, attack, prove, report."""
    with running("demo", json=json, record=None, seed=seed) as (run, _):
        from deepseal.apps.demo import run_demo

        run_demo(run, out=out, seed=seed, force=force, report=progress, say=remark)
