"""``deepseal private``: compile, serve and ask, alone or through a proxy, and what belongs to it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepseal.apps.cli import circuit, compress, delegate, inference
from deepseal.apps.cli.common import (
    Arch,
    Data,
    Force,
    Json,
    ModelFile,
    Params,
    Pickle,
    RecordFile,
    parameters,
    remark,
    running,
)

app = typer.Typer(help="Compute together with another party that sees none of our inputs.", no_args_is_help=True)

_PARTIES = ("garbler", "evaluator")


app.add_typer(circuit.app, name="circuit")
app.command()(inference.serve)
app.command()(inference.query)
app.command()(delegate.proxy)
app.command()(delegate.delegate)
app.command()(inference.estimate)
app.command()(compress.compress)


@app.command("compile")
def compile_(
    model: ModelFile,
    data: Data,
    out: Annotated[Path, typer.Option("--out", help="Folder to write to: public/ and secret/.", show_default=False)],
    permits: Annotated[str, typer.Option("--permits", help="What the client learns: label or logits.")] = "label",
    accept_overflow: Annotated[
        bool, typer.Option("--accept-overflow", help="Rings from the calibration set: rarer inputs may wrap around.")
    ] = False,
    param: Params = None,
    arch: Arch = None,
    force: Force = False,
    json: Json = False,
    record: RecordFile = None,
    insecure_allow_pickle: Pickle = False,
) -> None:
    """Compile a model for private inference. Parameters (-p): activation_bits, weight_bits, input_bits, activations."""
    with running("private.compile", json=json, record=record, force=force, out=out, inputs=(model,)) as (run, _):
        from deepseal.adapter import load_data
        from deepseal.apps.private_models import check_free, compile_program
        from deepseal.apps.workflow import load_model
        from deepseal.secure_inference.compile.calibrate import CompileSettings

        check_free(out, force=force)
        given = {"permits": permits, "accept_overflow": accept_overflow, **parameters(param)}
        settings = CompileSettings.from_mapping(given)
        dataset = load_data(data)
        loaded = load_model(model, arch=arch, insecure_allow_pickle=insecure_allow_pickle, dataset=dataset)
        run.params.update(model=str(model))
        compile_program(run, model=loaded, dataset=dataset, settings=settings, out=out, force=force)
        remark(f"give {out / 'public'} to clients; {out / 'secret'} stays with the server")


@app.command()
def simulate(
    program: Annotated[Path, typer.Argument(help="Folder that compile wrote.", show_default=False)],
    data: Data,
    limit: Annotated[
        int | None, typer.Option("--limit", help="Only the first test samples. [default: all]", min=1)
    ] = None,
    arch: Arch = None,
    json: Json = False,
    record: RecordFile = None,
    force: Force = False,
) -> None:
    """Accuracy of a compiled program in the clear: bit for bit what the protocol computes."""
    with running("private.simulate", json=json, record=record, force=force) as (run, _):
        from deepseal.apps.private_models import simulate_program

        simulate_program(run, folder=program, data=data, limit=limit, arch=arch)


@app.command()
def certs(
    out: Annotated[Path, typer.Option("--out", help="Folder to write to.", show_default=False)],
    name: Annotated[
        list[str] | None, typer.Option("--name", help="Name of a party; repeatable. [default: garbler, evaluator]")
    ] = None,
    days: Annotated[int, typer.Option("--days", help="How long the certificates are valid.")] = 365,
    keep_ca_key: Annotated[
        bool, typer.Option("--keep-ca-key", help="Write ca.key too, for further parties later; guard it.")
    ] = False,
    force: Force = False,
    json: Json = False,
) -> None:
    """Make a small CA, and for each party a certificate and a key, for TLS with certificates on both sides."""
    with running("private.certs", json=json, record=None, force=force) as (run, _):
        from deepseal.secure_inference.transport.certificates import make_certificates

        made = make_certificates(out, name or _PARTIES, days=days, keep_ca_key=keep_ca_key, force=force)
        run.params.update(out=str(out), names=list(made.certificates), days=days, keep_ca_key=keep_ca_key)
        run.fingerprints.update(made.fingerprints)
        run.results.update(
            ca=str(made.ca),
            ca_key=None if made.ca_key is None else str(made.ca_key),
            certificates={party: str(path) for party, path in made.certificates.items()},
            keys={party: str(path) for party, path in made.keys.items()},
            expires=made.expires.isoformat(),
        )
        remark("give each party ca.pem, its own .pem and its own .key, and delete the others' keys from its machine")


@app.command()
def bench(
    kernels: Annotated[str, typer.Option("--kernels", help="AES kernels; empty takes the fastest here.")] = "",
    gates: Annotated[int, typer.Option("--gates", help="AND gates between the two processes.", min=1)] = 50_000_000,
    seconds: Annotated[float, typer.Option("--seconds", help="Length of each run in memory.")] = 0.5,
    json: Json = False,
    record: RecordFile = None,
) -> None:
    """Measure the garbling engine on this machine: in memory, and between two processes over loopback."""
    with running("private.bench", json=json, record=record) as (run, _):
        from deepseal.apps.engine import bench_engine

        bench_engine(run, kernels=kernels, gates=gates, seconds=seconds)
