"""``deepseal private serve | query``."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepseal.apps.cli.circuit import tls_of
from deepseal.apps.cli.common import Force, Json, RecordFile, progress, remark, running

if TYPE_CHECKING:
    from deepseal.secure_inference.roles.answers import Answer
    from deepseal.secure_inference.roles.reception import Served, Tally

Certificate = Annotated[Path | None, typer.Option("--tls-cert", help="Our certificate (PEM).")]
Key = Annotated[Path | None, typer.Option("--tls-key", help="Its private key (PEM).")]
Authority = Annotated[Path | None, typer.Option("--tls-ca", help="The CA of both certificates (PEM).")]
Plain = Annotated[bool, typer.Option("--allow-plain", help="Allow no encryption also beyond this machine.")]
Timeout = Annotated[float, typer.Option("--timeout", help="Longest wait for the other party, in seconds.")]
Protocol = Annotated[
    str, typer.Option("--protocol", help="mixed; yao: everything garbled by the server; yao-client: by the client.")
]
Ahead = Annotated[bool, typer.Option("--ahead", help="First whatever does not depend on the input; timed apart.")]
OtK = Annotated[int, typer.Option("--ot-k", help="SoftSpoken: 128/k bits are sent an OT.", min=1, max=8)]
CheckOt = Annotated[bool, typer.Option("--check-ot", help="Catch a client that deviates in the OT extension.")]


def serve(
    program: Annotated[Path, typer.Argument(help="Folder that compile wrote.", show_default=False)],
    listen: Annotated[str, typer.Option("--listen", help="Wait for clients on HOST:PORT.")] = "127.0.0.1:9001",
    protocol: Protocol = "mixed",
    delegates: Annotated[
        str | None, typer.Option("--delegates", help="Also take constrained clients, which use a proxy, on HOST:PORT.")
    ] = None,
    accept_public: Annotated[
        bool, typer.Option("--accept-public", help="Do not ask whether what becomes public may.")
    ] = False,
    most_clients: Annotated[
        int, typer.Option("--most-clients", help="Sessions at a time; a quarter for one certificate.", min=1)
    ] = 16,
    most_questions: Annotated[int, typer.Option("--most-questions", help="Questions in a session.", min=1)] = 100_000,
    most_samples: Annotated[
        int | None,
        typer.Option(
            "--most-samples", help="Samples of one client (certificate), over all sessions. [default: any]", min=1
        ),
    ] = None,
    ot_k: OtK = 2,
    check_ot: CheckOt = False,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_ca: Authority = None,
    allow_plain: Plain = False,
    timeout: Timeout = 60.0,
    json: Json = False,
    record: RecordFile = None,
    force: Force = False,
) -> None:
    """Answer clients until Ctrl-C; neither learns more than the answer. Both must be semi-honest."""
    with running("private.serve", json=json, record=record, force=force) as (run, _):
        from deepseal.secure_inference.compile.program import Program
        from deepseal.secure_inference.compile.weights import Weights
        from deepseal.secure_inference.protocol.extension import TransferSettings
        from deepseal.secure_inference.protocol.parties import Settings
        from deepseal.secure_inference.roles.desk import Desk
        from deepseal.secure_inference.roles.modes import check_protocol, security
        from deepseal.secure_inference.roles.reception import Tally
        from deepseal.secure_inference.roles.server import Server

        check_protocol(protocol)
        loaded = Program.load(program)
        weights = Weights.load(program, loaded) if loaded.secret_steps else None
        settings = Settings(TransferSettings(k=ot_k, checks=check_ot))
        remark(
            f"public to every client: {'; '.join(loaded.disclosed)}. Security: "
            f"{security(protocol, settings.transfer.security)} (docs/private-inference.md)"
        )
        if not accept_public and sys.stdin.isatty():
            typer.confirm("Serve it?", abort=True, err=True)
        found = Tally()
        tls = tls_of(tls_cert, tls_key, tls_ca)
        desk = (
            None if delegates is None else Desk(loaded, most_clients=most_clients, timeout=timeout, report=_delegated)
        )
        server = Server(
            loaded,
            weights,
            protocol=protocol,
            settings=settings,
            most_clients=most_clients,
            most_questions=most_questions,
            most_samples=most_samples,
            timeout=timeout,
            report=lambda served: _note(found, served),
            halves=desk,
        )
        run.params.update(protocol=protocol, permits=loaded.permits)
        run.fingerprints.update(program=loaded.digest())
        try:
            with (
                desk.open(delegates, tls=tls, allow_plain=allow_plain) if desk and delegates else nullcontext() as where
            ):
                if desk is not None:
                    remark(f"constrained clients on {where}: secure only if their proxy does not work together with us")
                server.serve(
                    listen,
                    tls=tls,
                    allow_plain=allow_plain,
                    ready=lambda address: remark(f"serving on {address}; Ctrl-C ends it"),
                )
        except KeyboardInterrupt:
            server.stop()
        run.results.update(
            clients=found.clients,
            questions=found.questions,
            failures=found.failures,
            bytes_sent=found.bytes_sent,
            bytes_received=found.bytes_received,
            security=security(protocol, settings.transfer.security),
        )


def query(
    program: Annotated[Path, typer.Argument(help="The public program.", show_default=False)],
    connect: Annotated[str, typer.Option("--connect", help="The server's HOST:PORT.", show_default=False)],
    input: Annotated[Path, typer.Option("--input", help="Samples in data space (.npy).", show_default=False)],
    protocol: Protocol = "mixed",
    refuse_out_of_range: Annotated[
        bool, typer.Option("--refuse-out-of-range", help="Do not take the nearest value inside the range.")
    ] = False,
    ahead: Ahead = False,
    ot_k: OtK = 2,
    check_ot: CheckOt = False,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_ca: Authority = None,
    allow_plain: Plain = False,
    timeout: Timeout = 60.0,
    json: Json = False,
    record: RecordFile = None,
    force: Force = False,
) -> None:
    """Ask a server for its model's answer; it does not see the input."""
    with running("private.query", json=json, record=record, force=force, inputs=(input,)) as (run, _):
        from deepseal.secure_inference.compile.program import Program
        from deepseal.secure_inference.protocol.extension import TransferSettings
        from deepseal.secure_inference.protocol.parties import Settings
        from deepseal.secure_inference.roles.client import Client
        from deepseal.secure_inference.roles.modes import check_protocol, security

        check_protocol(protocol)
        loaded = Program.load(program)
        x = read_samples(input)
        settings = Settings(TransferSettings(k=ot_k, checks=check_ot))
        tls = tls_of(tls_cert, tls_key, tls_ca)
        run.params.update(protocol=protocol, permits=loaded.permits, tls=tls is not None)
        run.fingerprints.update(program=loaded.digest())
        with (
            progress("layers") as tell,
            Client.connect(
                loaded,
                connect,
                protocol=protocol,
                tls=tls,
                settings=settings,
                progress=tell,
                timeout=timeout,
                allow_plain=allow_plain,
            ) as client,
        ):
            offline = client.prepare(client.samples_of(x)) if ahead else None
            answer = client.ask(x, clamp=not refuse_out_of_range)
            counters = client.counters
        ahead_bytes = (offline.bytes_sent, offline.bytes_received) if offline else (0, 0)
        run.results.update(
            answered(loaded.permits, answer),
            seconds_setup=client.setup_seconds,
            setup_bytes_sent=counters.bytes_sent - answer.bytes_sent - ahead_bytes[0],
            setup_bytes_received=counters.bytes_received - answer.bytes_received - ahead_bytes[1],
            offline=None if offline is None else asdict(offline),
            layers={phase: dict(found) for phase, found in counters.phases.items()},
            security=security(protocol, settings.transfer.security),
        )


def estimate(
    program: Annotated[Path, typer.Argument(help="The public program.", show_default=False)],
    bandwidth: Annotated[float, typer.Option("--bandwidth", help="Bits a second, each way.")] = 1e9,
    latency: Annotated[float, typer.Option("--latency", help="Seconds of a round trip.")] = 0.001,
    samples: Annotated[int, typer.Option("--samples", help="Samples of a question.", min=1, max=4096)] = 1,
    protocol: Protocol = "mixed",
    ahead: Ahead = False,
    ot_k: OtK = 2,
    check_ot: CheckOt = False,
    json: Json = False,
    record: RecordFile = None,
    force: Force = False,
) -> None:
    """Bytes and seconds of a question before anybody asks it, with this machine's speed for both parties."""
    with running("private.estimate", json=json, record=record, force=force) as (run, _):
        from deepseal.secure_inference.compile.program import Program
        from deepseal.secure_inference.protocol.extension import TransferSettings
        from deepseal.secure_inference.roles.estimate import estimate
        from deepseal.secure_inference.roles.modes import check_protocol, client_ready
        from deepseal.secure_inference.roles.rates import measure

        check_protocol(protocol)
        loaded = Program.load(program)
        rates = measure(yao=protocol != "mixed")
        found = estimate(
            client_ready(loaded, protocol),
            bandwidth=bandwidth,
            latency=latency,
            samples=samples,
            transfer=TransferSettings(k=ot_k, checks=check_ot),
            ahead=ahead,
            rates=rates,
        )
        run.params.update(protocol=protocol, bandwidth=bandwidth, latency=latency, samples=samples, ahead=ahead)
        run.fingerprints.update(program=loaded.digest())
        run.results.update(
            bytes=found.bytes_sent + found.bytes_received,
            bytes_sent=found.bytes_sent,
            bytes_received=found.bytes_received,
            seconds=found.seconds,
            rounds=found.rounds,
            offline_bytes=found.offline_bytes,
            offline_seconds=found.offline_seconds,
            layers=[asdict(layer) for layer in found.layers],
            rates=asdict(rates),
        )
        run.notes.append("without the set-up of a session, TLS (0.2 % more bytes) and TCP's slow start")


def answered(permits: str, answer: Answer) -> dict[str, Any]:
    """What an answer adds to a record; says on stderr that input values were clamped."""
    values = answer.values.tolist()
    if answer.clamped:
        remark(f"{answer.clamped} input values were out of range and became the nearest value inside")
    return {
        "label" if permits == "label" else "logits": values[0] if len(values) == 1 else values,
        "samples": len(values),
        "clamped": answer.clamped,
        "bytes_sent": answer.bytes_sent,
        "bytes_received": answer.bytes_received,
        "seconds_online": answer.seconds,
    }


def read_samples(path: Path) -> Any:
    """The array in a .npy file.

    Raises:
        InputError: a file that cannot be read, or something else in it.
    """
    import io

    import numpy as np

    from deepseal.errors import understood
    from deepseal.files import read_bytes

    data = read_bytes(path, "samples in a .npy file", limit=1 << 32)
    with understood(f"an array in {path} (.npy, without pickles)", "save it with numpy.save"):
        return np.load(io.BytesIO(data), allow_pickle=False)


def _note(found: Tally, served: Served) -> None:
    found.add(served)
    remark(line_of(served))


def _delegated(served: Served) -> None:
    remark(f"delegated {line_of(served)}")


def line_of(served: Served) -> str:
    """How a client's session went."""
    end = f"stopped: {served.error}" if served.error else "done"
    return f"client {served.client}: {served.questions} questions in {served.seconds:.2f} s, {end}"
