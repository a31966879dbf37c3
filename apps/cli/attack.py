"""``deepseal attack list | show | run``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from deepseal.apps.cli.common import (
    Arch,
    Data,
    Force,
    Json,
    ModelFile,
    Out,
    Params,
    Pickle,
    RecordFile,
    Seed,
    parameters,
    progress,
    running,
)
from deepseal.errors import InputError

app = typer.Typer(help="Attack a model as a thief would.", no_args_is_help=True)


@app.command("list")
def list_(json: Json = False) -> None:
    """The attacks there are."""
    with running("attack.list", json=json, record=None) as (run, _):
        from deepseal.attacks import EVASION, QUERY, REMOVAL

        run.results["attacks"] = [
            {"name": name, "family": family, "what": (registry.get(name).__doc__ or "").partition("\n")[0]}
            for family, registry in (("removal", REMOVAL), ("query", QUERY), ("evasion", EVASION))
            for name in registry.names()
        ]


@app.command()
def show(name: Annotated[str, typer.Argument(help="Name of the attack.")], json: Json = False) -> None:
    """An attack's parameters with their defaults and ranges."""
    with running("attack.show", json=json, record=None) as (run, _):
        import inspect
        from typing import cast

        from deepseal.attacks import EVASION, QUERY, REMOVAL

        registries = (QUERY, EVASION, REMOVAL)
        attack = cast("Any", next((r for r in registries if name in r.names()), REMOVAL).get(name))
        run.results.update(
            name=name, what=inspect.getdoc(attack), parameters=attack.table(), source=inspect.getmodule(attack).__doc__
        )


@app.command("run")
def run_(
    name: Annotated[str, typer.Argument(help="Name of the attack (see attack list).")],
    model: ModelFile,
    data: Data,
    out: Out,
    param: Params = None,
    arch: Arch = None,
    seed: Seed = 0,
    force: Force = False,
    json: Json = False,
    record: RecordFile = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, help="Evasion attacks: only the first so many test inputs.")
    ] = None,
    insecure_allow_pickle: Pickle = False,
) -> None:
    """Run an attack on a copy of a model. It never sees the owner's key.

    A removal attack works with the data set's training split and writes the attacked model; an evasion attack changes
    the inputs of the test split and writes them (.npz with x, y, fooled).
    """
    with running("attack.run", json=json, record=record, force=force, seed=seed, out=out, inputs=(model,)) as (run, _):
        from deepseal.adapter import load_data
        from deepseal.apps.workflow import load_model, run_attack, run_evasion
        from deepseal.attacks import EVASION

        if limit is not None and name not in EVASION.names():
            raise InputError("an evasion attack with --limit", found=name, do="leave out --limit")
        dataset = load_data(data)
        loaded = load_model(model, arch=arch, insecure_allow_pickle=insecure_allow_pickle, dataset=dataset)
        run.params.update(model=str(model))
        given: dict[str, Any] = {"name": name, "params": parameters(param), "model": loaded, "dataset": dataset}
        given |= {"seed": seed, "out": out, "force": force, "report": progress}
        if name in EVASION.names():
            run_evasion(run, limit=limit, **given)
        else:
            run_attack(run, **given)
