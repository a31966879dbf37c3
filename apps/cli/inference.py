"""``deepseal private serve | query``."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepseal.apps.cli.circuit import tls_of
from deepseal.apps.cli.common import Json, RecordFile, remark, running
from deepseal.errors import InputError

if TYPE_CHECKING:
    from deepseal.secure_inference.roles.server import Served

Certificate = Annotated[Path | None, typer.Option("--tls-cert", help="Our certificate (PEM).")]
Key = Annotated[Path | None, typer.Option("--tls-key", help="Its private key (PEM).")]
Authority = Annotated[Path | None, typer.Option("--tls-ca", help="The CA of both certificates (PEM).")]
Plain = Annotated[bool, typer.Option("--allow-plain", help="Allow no encryption also beyond this machine.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Longest wait for the other party, in seconds.")]
OtK = Annotated[int, typer.Option("--ot-k", help="SoftSpoken: 128/k bits are sent an OT.", min=1, max=8)]
CheckOt = Annotated[bool, typer.Option("--check-ot", help="Catch a client that deviates in the OT extension.")]


def serve(
    program: Annotated[Path, typer.Argument(help="Folder that compile wrote.", show_default=False)],
    listen: Annotated[str, typer.Option("--listen", help="Wait for clients on HOST:PORT.")] = "127.0.0.1:9001",
    protocol: Annotated[str, typer.Option("--protocol", help="mixed.")] = "mixed",
    accept_public: Annotated[
        bool, typer.Option("--accept-public", help="Do not ask whether what becomes public may.")
    ] = False,
    most_clients: Annotated[int, typer.Option("--most-clients", help="Sessions at a time.", min=1)] = 16,
    most_questions: Annotated[int, typer.Option("--most-questions", help="Questions in a session.", min=1)] = 100_000,
    ot_k: OtK = 2,
    check_ot: CheckOt = False,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_ca: Authority = None,
    allow_plain: Plain = False,
    timeout: Timeout = 60.0,
    json: Json = False,
    record: RecordFile = None,
) -> None:
    """Answer clients until Ctrl-C; neither learns more than the answer. Both must be semi-honest."""
    with running("private.serve", json=json, record=record) as (run, _):
        from deepseal.secure_inference.compile.program import Program
        from deepseal.secure_inference.compile.weights import Weights
        from deepseal.secure_inference.protocol.extension import TransferSettings
        from deepseal.secure_inference.protocol.parties import Settings
        from deepseal.secure_inference.roles.server import Server

        _check_protocol(protocol)
        loaded = Program.load(program)
        weights = Weights.load(program, loaded) if loaded.secret_steps else None
        remark(
            f"public to every client: the architecture ({len(loaded.steps)} steps), the number formats, and the "
            f"{'logits' if loaded.permits == 'logits' else 'label'} of each question. Secure against semi-honest "
            "clients only: a malicious one could learn weights (docs/private-inference.md)"
        )
        if not accept_public and sys.stdin.isatty():
            typer.confirm("Serve it?", abort=True, err=True)
        found: list[Served] = []
        settings = Settings(TransferSettings(k=ot_k, checks=check_ot))
        server = Server(
            loaded,
            weights,
            settings=settings,
            most_clients=most_clients,
            most_questions=most_questions,
            timeout=timeout,
            report=lambda served: _note(found, served),
        )
        run.params.update(protocol=protocol, permits=loaded.permits)
        run.fingerprints.update(program=loaded.digest())
        try:
            server.serve(
                listen,
                tls=tls_of(tls_cert, tls_key, tls_ca),
                allow_plain=allow_plain,
                ready=lambda address: remark(f"serving on {address}; Ctrl-C ends it"),
            )
        except KeyboardInterrupt:
            server.stop()
        run.results.update(
            clients=len(found),
            questions=sum(served.questions for served in found),
            failures=sum(served.error is not None for served in found),
            bytes_sent=sum(served.bytes_sent for served in found),
            security=settings.transfer.security,
        )


def query(
    program: Annotated[Path, typer.Argument(help="The public program.", show_default=False)],
    connect: Annotated[str, typer.Option("--connect", help="The server's HOST:PORT.", show_default=False)],
    input: Annotated[Path, typer.Option("--input", help="Samples in data space (.npy).", show_default=False)],
    protocol: Annotated[str, typer.Option("--protocol", help="mixed.")] = "mixed",
    refuse_out_of_range: Annotated[
        bool, typer.Option("--refuse-out-of-range", help="Do not take the nearest value inside the range.")
    ] = False,
    ot_k: OtK = 2,
    check_ot: CheckOt = False,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_ca: Authority = None,
    allow_plain: Plain = False,
    timeout: Timeout = 60.0,
    json: Json = False,
    record: RecordFile = None,
) -> None:
    """Ask a server for its model's answer; it does not see the input."""
    with running("private.query", json=json, record=record, inputs=(input,)) as (run, _):
        from deepseal.secure_inference.compile.program import Program
        from deepseal.secure_inference.protocol.extension import TransferSettings
        from deepseal.secure_inference.protocol.parties import Settings
        from deepseal.secure_inference.roles.client import Client

        _check_protocol(protocol)
        loaded = Program.load(program)
        x = _samples(input)
        settings = Settings(TransferSettings(k=ot_k, checks=check_ot))
        tls = tls_of(tls_cert, tls_key, tls_ca)
        run.params.update(protocol=protocol, permits=loaded.permits, tls=tls is not None)
        run.fingerprints.update(program=loaded.digest())
        with Client.connect(
            loaded, connect, tls=tls, settings=settings, timeout=timeout, allow_plain=allow_plain
        ) as client:
            answer = client.ask(x, clamp=not refuse_out_of_range)
            counters = client.counters
        name = "label" if loaded.permits == "label" else "logits"
        values = answer.values.tolist()
        if answer.clamped:
            remark(f"{answer.clamped} input values were out of range and became the nearest value inside")
        run.results.update(
            {name: values[0] if len(values) == 1 else values},
            samples=len(values),
            clamped=answer.clamped,
            bytes_sent=answer.bytes_sent,
            bytes_received=answer.bytes_received,
            seconds_setup=client.setup_seconds,
            seconds_online=answer.seconds,
            setup_bytes_sent=counters.bytes_sent - answer.bytes_sent,
            setup_bytes_received=counters.bytes_received - answer.bytes_received,
            layers={phase: dict(found) for phase, found in counters.phases.items()},
            security=settings.transfer.security,
        )


def _check_protocol(protocol: str) -> None:
    if protocol != "mixed":
        raise InputError("the protocol mixed", found=repr(protocol), do="use mixed, which is what there is yet")


def _samples(path: Path) -> Any:
    import io

    import numpy as np

    from deepseal.errors import understood
    from deepseal.files import read_bytes

    data = read_bytes(path, "samples in a .npy file", limit=1 << 32)
    with understood(f"an array in {path} (.npy, without pickles)", "save it with numpy.save"):
        return np.load(io.BytesIO(data), allow_pickle=False)


def _note(found: list[Served], served: Served) -> None:
    found.append(served)
    remark(_line(served))


def _line(served: Served) -> str:
    end = f"stopped: {served.error}" if served.error else "done"
    return f"client {served.client}: {served.questions} questions in {served.seconds:.2f} s, {end}"
