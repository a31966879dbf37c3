"""``deepseal model train | evaluate | inspect | serve``."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from deepseal.apps.cli import remote as remote_
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

_SHOWN = 1000  # characters of a text in the metadata
app = typer.Typer(help="Train, evaluate, inspect and serve models.", no_args_is_help=True)
app.command()(remote_.serve)


@app.command()
def train(
    arch: Annotated[str, typer.Option("--arch", help="package.module:factory[?name=value] or torchvision:NAME.")],
    data: Data,
    out: Out,
    epochs: Annotated[int, typer.Option("--epochs", help="Passes over the training data.", min=0)] = 10,
    param: Params = None,
    seed: Seed = 0,
    force: Force = False,
    json: Json = False,
    record: RecordFile = None,
) -> None:
    """Train a model.

    Parameters (-p): optimizer, learning_rate, batch_size, momentum, weight_decay, schedule; steps (updates, in place of
    --epochs), restart, relative.
    """
    with running("model.train", json=json, record=record, force=force, seed=seed, out=out) as (run, _):
        from deepseal.adapter import Recipe, load_data
        from deepseal.apps.workflow import train_model
        from deepseal.errors import InputError

        given = parameters(param)
        if "epochs" in given:
            raise InputError("passes as --epochs", found="-p epochs", do="give --epochs instead")
        recipe = Recipe.from_mapping({"epochs": epochs, **given})
        dataset = load_data(data)
        train_model(run, arch=arch, dataset=dataset, recipe=recipe, seed=seed, out=out, force=force, report=progress)


@app.command()
def evaluate(
    data: Data,
    model: remote_.LocalModel = None,
    arch: Arch = None,
    url: remote_.Url = None,
    name: remote_.Name = None,
    output: remote_.Answers = None,
    batch: remote_.Batch = 64,
    max_queries: remote_.MaxQueries = None,
    timeout: remote_.Timeout = 30.0,
    tls_ca: remote_.Authority = None,
    allow_plain: remote_.Plain = False,
    json: Json = False,
    record: RecordFile = None,
    force: Force = False,
    insecure_allow_pickle: Pickle = False,
) -> None:
    """Accuracy on the test split, with its 95 % interval, of a file or of a model at a server."""
    with running("model.evaluate", json=json, record=record, force=force, inputs=(model,)) as (run, _):
        from deepseal.adapter import load_data
        from deepseal.apps.workflow import evaluate_model, load_model

        remote_.check_source(model, url, name)
        dataset = load_data(data)
        if model is not None:
            loaded = load_model(model, arch=arch, insecure_allow_pickle=insecure_allow_pickle, dataset=dataset)
            run.params.update(model=str(model))
            run.fingerprints.update(model=loaded.fingerprint())
            evaluate_model(run, model=loaded, dataset=dataset)
            return
        with remote_.asking(
            run,
            dataset.spec,
            url=str(url),
            name=name,
            output=output,
            batch=batch,
            max_queries=max_queries,
            timeout=timeout,
            tls_ca=tls_ca,
            allow_plain=allow_plain,
        ) as oracle:
            evaluate_model(run, model=oracle, dataset=dataset)


@app.command()
def inspect(
    model: ModelFile,
    arch: Arch = None,
    data: Annotated[str | None, typer.Option("--data", help="Gives the input spec to files without one.")] = None,
    json: Json = False,
    record: RecordFile = None,
    force: Force = False,
    insecure_allow_pickle: Pickle = False,
) -> None:
    """What a weights file holds: architecture, input, layers, training."""
    with running("model.inspect", json=json, record=record, force=force, inputs=(model,)) as (run, _):
        from deepseal.adapter import load_data
        from deepseal.adapter.capture import execution_order
        from deepseal.apps.workflow import load_model

        dataset = load_data(data) if data else None
        loaded = load_model(model, arch=arch, insecure_allow_pickle=insecure_allow_pickle, dataset=dataset)
        layers = execution_order(loaded.module, loaded.probe())
        run.params.update(model=str(model))
        run.fingerprints.update(model=loaded.fingerprint())
        run.results.update(
            architecture=loaded.architecture,
            spec=loaded.spec.as_dict(),
            dtype=str(loaded.dtype).removeprefix("torch."),
            parameters=sum(p.numel() for p in loaded.module.parameters()),
            layers=[
                {"layer": name, "kind": type(layer).__name__, "output_shape": list(shape)}
                for name, layer, shape in layers
            ],
            metadata=_shortened(dict(loaded.metadata)),
        )


def _shortened(value: Any) -> Any:
    """Metadata without texts that nobody reads, such as an encoded projection."""
    if isinstance(value, dict):
        return {name: _shortened(item) for name, item in value.items()}
    if isinstance(value, str) and len(value) > _SHOWN:
        return f"{value[:16]}… ({len(value)} characters)"
    return value
