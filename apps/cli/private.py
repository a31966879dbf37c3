"""``deepseal private certs | bench | circuit``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepseal.apps.cli import circuit
from deepseal.apps.cli.common import Force, Json, RecordFile, remark, running

app = typer.Typer(help="Compute together with another party that sees none of our inputs.", no_args_is_help=True)

_PARTIES = ("garbler", "evaluator")


app.add_typer(circuit.app, name="circuit")


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
