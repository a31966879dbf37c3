"""``deepseal defense list | fit | calibrate | evaluate | detect | customise | serve | export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepseal.apps.cli import defense_service
from deepseal.apps.cli.common import Arch, Data, Force, Json, ModelFile, Pickle, RecordFile, Seed, progress, running
from deepseal.apps.cli.exits import Exit

app = typer.Typer(help="Watch a deployed model for adversarial inputs.", no_args_is_help=True)
app.command()(defense_service.customise)
app.command()(defense_service.serve)
app.command()(defense_service.export)
MonitorFolder = Annotated[Path, typer.Argument(help="The monitor's folder (see defense fit).")]


@app.command("list")
def list_(json: Json = False) -> None:
    """The detectors and presets there are."""
    with running("defense.list", json=json, record=None) as (run, _):
        from deepseal.defense.base import DETECTORS
        from deepseal.defense.presets import PRESETS

        built = {name: DETECTORS.build(name, {}) for name in DETECTORS.names()}
        run.results["detectors"] = [
            {
                "name": name,
                "access": detector.needs.access,
                "passes": detector.needs.passes,
                "what": (type(detector).__doc__ or "").partition("\n")[0],
            }
            for name, detector in built.items()
        ]
        run.results["presets"] = [{"name": name, "members": ", ".join(members)} for name, members in PRESETS.items()]


@app.command()
def fit(
    model: ModelFile,
    data: Data,
    out: Annotated[Path, typer.Option("--out", help="Folder to write the monitor to.", show_default=False)],
    detector: Annotated[
        list[str] | None,
        typer.Option("--detector", help="A preset (deepfense, full, fast, latent) or name?param=value; repeatable."),
    ] = None,
    arch: Arch = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=20, help="Only the first so many training samples.")
    ] = None,
    seed: Seed = 0,
    force: Force = False,
    json: Json = False,
    record: RecordFile = None,
    insecure_allow_pickle: Pickle = False,
) -> None:
    """Fit detectors on clean training data. The monitor is to be calibrated next."""
    with running("defense.fit", json=json, record=record, force=force, seed=seed, inputs=(model,)) as (run, _):
        from deepseal.adapter import load_data
        from deepseal.apps import monitoring
        from deepseal.apps.workflow import load_model

        dataset = load_data(data)
        loaded = load_model(model, arch=arch, insecure_allow_pickle=insecure_allow_pickle, dataset=dataset)
        run.params.update(model=str(model))
        monitoring.fit(
            run,
            model=loaded,
            dataset=dataset,
            words=detector or ["deepfense"],
            seed=seed,
            out=out,
            force=force,
            report=progress,
            limit=limit,
        )


@app.command()
def calibrate(
    monitor: MonitorFolder,
    data: Data,
    false_positive: Annotated[float, typer.Option("--false-positive", help="Rate that is promised.")] = 0.01,
    confidence: Annotated[float, typer.Option("--confidence", help="Confidence of the promise.")] = 0.95,
    per_class: Annotated[bool, typer.Option("--per-class", help="Also a threshold for each predicted class.")] = False,
    traffic: Annotated[
        float, typer.Option("--traffic", min=0.0, help="Clean requests a day, for alarms a day.")
    ] = 100_000.0,
    arch: Arch = None,
    seed: Seed = 0,
    json: Json = False,
    record: RecordFile = None,
    force: Force = False,
) -> None:
    """Set the threshold from clean data that nothing was fitted on: the held-out split, with its wrong answers.

    The monitor's folder is written again. Refused where the data are too few for the promise.
    """
    with running("defense.calibrate", json=json, record=record, force=force, seed=seed) as (run, _):
        from deepseal.adapter import load_data
        from deepseal.apps import monitoring
        from deepseal.defense.monitor_file import load_monitor

        run.params.update(monitor=str(monitor))
        monitoring.calibrate_monitor(
            run,
            monitor=load_monitor(monitor, architecture=arch),
            dataset=load_data(data),
            false_positive=false_positive,
            confidence=confidence,
            per_class=per_class,
            traffic=traffic,
            seed=seed,
            out=monitor,
        )


@app.command()
def evaluate(
    monitor: MonitorFolder,
    data: Data,
    attack: Annotated[
        list[str] | None,
        typer.Option("--attack", help="An evasion attack as name:param=value,param=value; repeatable."),
    ] = None,
    limit: Annotated[int | None, typer.Option("--limit", min=1, help="Attack only the first so many inputs.")] = None,
    cost_ratio: Annotated[
        float, typer.Option("--cost-ratio", min=1e-6, help="Cost of a missed attack in costs of a false alarm.")
    ] = 100.0,
    arch: Arch = None,
    seed: Seed = 0,
    json: Json = False,
    record: RecordFile = None,
    force: Force = False,
) -> None:
    """How well the monitor works on the test split, which it must not have seen.

    All clean test inputs give the false-positive rates; the first --limit of them are attacked.
    """
    with running("defense.evaluate", json=json, record=record, force=force, seed=seed) as (run, _):
        from deepseal.adapter import load_data
        from deepseal.apps import monitoring
        from deepseal.defense.evaluation import parse_attack
        from deepseal.defense.monitor_file import load_monitor

        attacks = [parse_attack(text) for text in attack or []]
        run.params.update(monitor=str(monitor))
        monitoring.evaluate(
            run,
            monitor=load_monitor(monitor, architecture=arch),
            dataset=load_data(data),
            attacks=attacks,
            limit=limit,
            cost_ratio=cost_ratio,
            seed=seed,
            report=progress,
        )


@app.command()
def detect(
    monitor: MonitorFolder,
    input: Annotated[Path, typer.Option("--input", help="Inputs as .npy, or x of a .npz.", show_default=False)],
    arch: Arch = None,
    json: Json = False,
    record: RecordFile = None,
    force: Force = False,
) -> None:
    """Judge inputs. Exit code 1 when any raises the alarm."""
    with running("defense.detect", json=json, record=record, force=force, inputs=(input,)) as (run, finished):
        from deepseal.apps import monitoring
        from deepseal.defense.monitor_file import load_monitor

        loaded = load_monitor(monitor, architecture=arch)
        loaded.calibrated_on()
        run.params.update(monitor=str(monitor), input=str(input))
        if monitoring.detect(run, monitor=loaded, x=monitoring.read_inputs(input, loaded.model.spec)):
            finished.code = Exit.NEGATIVE
