"""``deepseal private compress``."""

from __future__ import annotations

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
    remark,
    running,
)


def compress(
    model: ModelFile,
    data: Data,
    out: Out,
    param: Params = None,
    arch: Arch = None,
    seed: Seed = 0,
    force: Force = False,
    json: Json = False,
    record: RecordFile = None,
    insecure_allow_pickle: Pickle = False,
) -> None:
    """Make a model cheaper to serve privately. Parameters (-p): method, fold, sparsity, error, max_loss and more.

    The method is both, projection (the client projects its input first) or pruning (connections go, the rest is
    retrained).
    """
    kind = "private.compress"
    with running(kind, json=json, record=record, force=force, seed=seed, out=out, inputs=(model,)) as (run, _):
        from deepseal.adapter import load_data
        from deepseal.apps.private_compress import compress_model
        from deepseal.apps.workflow import load_model
        from deepseal.secure_inference.compress import CompressSettings

        settings = CompressSettings.from_mapping(parameters(param))
        dataset = load_data(data)
        loaded = load_model(model, arch=arch, insecure_allow_pickle=insecure_allow_pickle, dataset=dataset)
        run.params.update(model=str(model))
        compress_model(run, model=loaded, dataset=dataset, settings=settings, seed=seed, out=out, force=force,
                       report=progress)  # fmt: skip
        for note in run.notes:
            remark(note)
        remark(run.results["reveals"])
        asked = " ".join(f"-p {entry}" for entry in run.results["compile_with"])
        remark(f"next: deepseal private compile --model {out} --data {data} --out program {asked}".rstrip())
