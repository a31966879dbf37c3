"""``deepseal private proxy | delegate``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepseal.apps.cli.circuit import tls_of
from deepseal.apps.cli.common import Json, RecordFile, remark, running
from deepseal.apps.cli.inference import (
    Authority,
    Certificate,
    CheckOt,
    Key,
    OtK,
    Plain,
    Timeout,
    answered,
    line_of,
    read_samples,
)

if TYPE_CHECKING:
    from deepseal.secure_inference.roles.reception import Served

Public = Annotated[Path, typer.Argument(help="The public program.", show_default=False)]
ServerName = Annotated[
    str | None, typer.Option("--server-name", help="Name in the server's certificate. [default: any of the CA]")
]


def proxy(
    program: Public,
    connect: Annotated[str, typer.Option("--connect", help="The server's HOST:PORT.", show_default=False)],
    listen: Annotated[str, typer.Option("--listen", help="Wait for clients on HOST:PORT.")] = "127.0.0.1:9003",
    most_clients: Annotated[int, typer.Option("--most-clients", help="Clients at a time.", min=1)] = 16,
    most_sessions: Annotated[int, typer.Option("--most-sessions", help="Sessions with the server.", min=1)] = 4,
    ot_k: OtK = 2,
    check_ot: CheckOt = False,
    server_name: ServerName = None,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_ca: Authority = None,
    allow_plain: Plain = False,
    timeout: Timeout = 60.0,
    json: Json = False,
    record: RecordFile = None,
) -> None:
    """Evaluate for constrained clients until Ctrl-C, without learning inputs or answers.

    All must be semi-honest, and the proxy must not work together with the server: both together could read the inputs.
    """
    with running("private.proxy", json=json, record=record) as (run, _):
        from deepseal.secure_inference.compile.program import Program
        from deepseal.secure_inference.protocol.extension import TransferSettings
        from deepseal.secure_inference.protocol.parties import Settings
        from deepseal.secure_inference.roles.proxy import Proxy
        from deepseal.secure_inference.roles.reception import Tally

        loaded = Program.load(program)
        found = Tally()

        def note(served: Served) -> None:
            found.add(served)
            remark(line_of(served))

        settings = Settings(TransferSettings(k=ot_k, checks=check_ot))
        running_proxy = Proxy(
            loaded,
            connect,
            settings=settings,
            tls=tls_of(tls_cert, tls_key, tls_ca),
            server_name=server_name,
            allow_plain=allow_plain,
            most_clients=most_clients,
            most_sessions=most_sessions,
            timeout=timeout,
            report=note,
        )
        run.params.update(permits=loaded.permits)
        run.fingerprints.update(program=loaded.digest())
        remark("secure only if we do not work together with the server: both together could read the clients' inputs")
        try:
            running_proxy.serve(listen, ready=lambda where: remark(f"proxy on {where}; Ctrl-C ends it"))
        except KeyboardInterrupt:
            running_proxy.stop()
        run.results.update(
            clients=found.clients,
            questions=found.questions,
            failures=found.failures,
            security=settings.transfer.security,
        )


def delegate(
    program: Public,
    server: Annotated[str, typer.Option("--server", help="Where the server takes constrained clients.")],
    proxy: Annotated[str, typer.Option("--proxy", help="The proxy's HOST:PORT.")],
    input: Annotated[Path, typer.Option("--input", help="Samples in data space (.npy).", show_default=False)],
    refuse_out_of_range: Annotated[
        bool, typer.Option("--refuse-out-of-range", help="Do not take the nearest value inside the range.")
    ] = False,
    server_name: ServerName = None,
    proxy_name: Annotated[
        str | None, typer.Option("--proxy-name", help="Name in the proxy's certificate. [default: any of the CA]")
    ] = None,
    tls_cert: Certificate = None,
    tls_key: Key = None,
    tls_ca: Authority = None,
    timeout: Timeout = 60.0,
    json: Json = False,
    record: RecordFile = None,
) -> None:
    """Ask as a constrained client: a proxy evaluates, we only XOR and receive.

    Nobody else learns the input or the answer, if all are semi-honest and the proxy and the server do not work
    together; both together could read the input.
    """
    with running("private.delegate", json=json, record=record, inputs=(input,)) as (run, _):
        from deepseal.secure_inference.compile.program import Program
        from deepseal.secure_inference.roles.delegate import DelegatedClient
        from deepseal.secure_inference.roles.halves import SECURITY

        loaded = Program.load(program)
        x = read_samples(input)
        tls = tls_of(tls_cert, tls_key, tls_ca)
        run.params.update(permits=loaded.permits, tls=tls is not None)
        run.fingerprints.update(program=loaded.digest())
        remark("secure only if the proxy and the server do not work together: both together could read the input")
        with DelegatedClient.connect(
            loaded,
            server=server,
            proxy=proxy,
            tls=tls,
            server_name=server_name,
            proxy_name=proxy_name,
            timeout=timeout,
        ) as client:
            answer = client.ask(x, clamp=not refuse_out_of_range)
        run.results.update(
            answered(loaded.permits, answer),
            seconds_setup=client.setup_seconds,
            seconds=client.setup_seconds + answer.seconds,
            security=SECURITY,
        )
