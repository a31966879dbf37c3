"""``deepseal model serve``, and the options of commands that ask a model behind the Open Inference Protocol."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from deepseal.apps.cli.common import Arch, Json, ModelFile, Pickle, RecordFile, remark, running
from deepseal.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from deepseal.adapter import InputSpec
    from deepseal.adapter.access import Output
    from deepseal.adapter.remote import RemoteOracle
    from deepseal.record import Run

TOKEN = "DEEPSEAL_REMOTE_TOKEN"  # noqa: S105

LocalModel = Annotated[Path | None, typer.Option("--model", help="Weights file (safetensors), or use --url.")]
Url = Annotated[
    str | None,
    typer.Option(
        "--url",
        "--remote",
        help="A model at a server of the Open Inference Protocol (KServe v2), http://HOST:PORT/v2/models/NAME, or the "
        f"server and --name; token: {TOKEN}.",
    ),
]
Name = Annotated[str | None, typer.Option("--name", help="The model's name, where --url ends at the server.")]
Answers = Annotated[
    str | None,
    typer.Option("--output", help="What --url answers: labels, probabilities or logits; only if it does not say."),
]
Batch = Annotated[int, typer.Option("--batch", help="Most inputs in a request to --url.", min=1)]
MaxQueries = Annotated[
    int | None, typer.Option("--max-queries", help="Most inputs to ask --url. [default: any number]", min=1)
]
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds for one attempt at a request to --url.")]
Authority = Annotated[Path | None, typer.Option("--tls-ca", help="CA (PEM) of the certificate of --url.")]
Plain = Annotated[bool, typer.Option("--allow-plain", help="Allow --url without encryption beyond this machine.")]


def check_source(model: Path | None, url: str | None, name: str | None) -> None:
    """Refuse none or both of a file and a server, and a server without the model's name.

    Raises:
        InputError: the options do not name one model.
    """
    from deepseal.adapter.remote_model import model_address

    if (model is None) == (url is None):
        found = "neither" if model is None else "both"
        raise InputError("either --model or --url", found=found, do="give one of them")
    if url is None and name is not None:
        raise InputError("--name with --url", found="--name alone", do="leave it out, or give the server's --url")
    if url is not None:
        model_address(url, name)


@contextmanager
def asking(
    run: Run,
    spec: InputSpec,
    *,
    url: str,
    name: str | None,
    output: str | None,
    batch: int,
    max_queries: int | None,
    timeout: float,
    tls_ca: Path | None,
    allow_plain: bool,
) -> Iterator[RemoteOracle]:
    """The model at the server; what was asked goes into the record, also after a failure."""
    from deepseal.adapter.access import Output
    from deepseal.adapter.http_client import HttpClient, Patience
    from deepseal.adapter.remote import RemoteOracle
    from deepseal.adapter.remote_model import model_address
    from deepseal.rng import Rng

    if output is not None and output not in get_args(Output):
        raise UnknownNameError("kind of answer", output, get_args(Output))
    server, model = model_address(url, name)
    client = HttpClient(
        server,
        patience=Patience(timeout=timeout),
        rng=Rng(secrets.randbits(63)),
        token=os.environ.get(TOKEN),
        ca=tls_ca,
        allow_plain=allow_plain,
    )
    meaning = cast("Output | None", output)
    run.params.update(remote=client.url, name=model)
    with RemoteOracle.connect(client, model, spec, output=meaning, max_queries=max_queries, batch=batch) as oracle:
        try:
            yield oracle
        finally:
            asked = oracle.as_dict()
            run.params.update(output=asked["output"], max_queries=asked["max_queries"])
            run.results.update(queries=asked["queries"], retries=asked["retries"], query_log=asked["log"])


def serve(
    model: ModelFile,
    name: Annotated[str, typer.Option("--name", help="What the model is called in the paths.", show_default=False)],
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT to listen on.")] = "127.0.0.1:8000",
    output: Annotated[
        str | None,
        typer.Option("--output", help="labels, probabilities or logits. [default: labels; without classes logits]"),
    ] = None,
    max_batch: Annotated[int, typer.Option("--max-batch", help="Most inputs in a request.", min=1)] = 256,
    max_length: Annotated[
        int, typer.Option("--max-length", help="Largest size of an input that varies, such as tokens.", min=1)
    ] = 4096,
    max_body: Annotated[int, typer.Option("--max-body", help="Longest request, in MiB.", min=1, max=1024)] = 64,
    max_requests: Annotated[int, typer.Option("--max-requests", help="Requests at a time.", min=1)] = 16,
    max_queries: Annotated[
        int | None, typer.Option("--max-queries", help="Most inputs that are answered. [default: any number]", min=1)
    ] = None,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Allow an address that other machines reach: everybody may ask.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="Our certificate (PEM): https.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Its private key (PEM).")] = None,
    arch: Arch = None,
    data: Annotated[str | None, typer.Option("--data", help="Gives the input spec to files without one.")] = None,
    json: Json = False,
    record: RecordFile = None,
    insecure_allow_pickle: Pickle = False,
) -> None:
    """Answer questions to a model over HTTP (Open Inference Protocol, KServe v2) until Ctrl-C."""
    with running("model.serve", json=json, record=record, inputs=(model, tls_cert, tls_key)) as (run, _):
        from deepseal.adapter import load_data
        from deepseal.adapter.access import Output
        from deepseal.apps.model_server import Limits, serve_model
        from deepseal.apps.workflow import load_model

        if output is not None and output not in get_args(Output):
            raise UnknownNameError("kind of answer", output, get_args(Output))
        if (tls_cert is None) != (tls_key is None):
            raise InputError("--tls-cert and --tls-key together", found="one of them", do="give both, or none")
        dataset = load_data(data) if data else None
        loaded = load_model(model, arch=arch, insecure_allow_pickle=insecure_allow_pickle, dataset=dataset)
        output = output or ("labels" if loaded.spec.num_classes else "logits")
        oracle = loaded.oracle(output=cast("Output", output), max_queries=max_queries)
        run.params.update(model=str(model), name=name, output=output, listen=listen, max_batch=max_batch)
        run.fingerprints.update(model=loaded.fingerprint())
        counts = serve_model(
            oracle,
            name,
            listen,
            limits=Limits(batch=max_batch, length=max_length, body=max_body << 20, requests=max_requests),
            allow_remote=allow_remote,
            certificate=(tls_cert, tls_key) if tls_cert and tls_key else None,
            ready=lambda url: remark(f"serving {name!r} on {url}; Ctrl-C ends it"),
        )
        run.results.update(requests=counts.requests, refused=counts.refused, queries=oracle.queries)
