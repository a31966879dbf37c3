"""A local model behind the Open Inference Protocol (KServe v2): what ``deepseal model serve`` runs.

Only answers leave: the server holds an ``Oracle``.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepseal
from deepseal.adapter import Batch, Inputs, Oracle
from deepseal.adapter.inference_protocol import INPUT, TensorInfo, encode, shown
from deepseal.adapter.remote_model import datatype_of
from deepseal.apps.http_server import listening, run_service
from deepseal.apps.http_service import (
    FastAPI,
    Gate,
    HTTPException,
    JSONResponse,
    Limits,
    Request,
    question,
    read_body,
    run_in_threadpool,
    service,
)

__all__ = ["Counts", "Limits", "model_app", "serve_model"]


@dataclasses.dataclass
class Counts:
    """What a server has answered, filled while it runs."""

    requests: int = 0
    refused: int = 0


def model_app(
    oracle: Oracle, name: str, *, limits: Limits = Limits(), counts: Counts | None = None, local: bool = True
) -> FastAPI:
    """The application that answers for one model.

    Args:
        oracle: gives the answers, one request at a time.
        name: what the model is called in the paths.
        limits: what a client may ask.
        counts: filled while the application runs.
        local: refuse requests that were meant for another host (a web page that has its own name lead to us).
    """
    made, gate, turn = counts if counts is not None else Counts(), Gate(limits.requests), threading.Lock()
    spec, output = oracle.spec, oracle.output
    datatype, columns = ("INT64", ()) if output == "labels" else ("FP32", (spec.num_classes or -1,))
    fields, answer = spec.named_fields(INPUT), TensorInfo(output, datatype, (-1, *columns))
    entries = {field: TensorInfo(field, datatype_of(kind), (-1, *kind.shape)) for field, kind in fields.items()}

    def refused(_status: int) -> None:
        made.refused += 1

    app = service(name, local=local, refused=refused)

    def reply(body: bytes) -> dict[str, Any]:
        asked = question(body, entries, (answer.name,), limits)
        x: Batch = Inputs(asked.tensors) if spec.fields else asked.tensors[INPUT]
        with turn:
            values = oracle.query(x).numpy()
        result: dict[str, Any] = {"model_name": name}
        if asked.request_id is not None:
            result["id"] = asked.request_id
        return {**result, "outputs": [encode(answer.name, values, answer.datatype)]}

    def known(asked: str) -> None:
        if asked != name:
            raise HTTPException(404, f"expected the model {name!r}; found {shown(asked)}; correct the path")

    @app.get("/v2")
    @app.get("/v2/", include_in_schema=False)
    async def server() -> dict[str, Any]:
        return {"name": "deepseal", "version": deepseal.__version__, "extensions": []}

    @app.get("/v2/health/live")
    async def live() -> dict[str, bool]:
        return {"live": True}

    @app.get("/v2/health/ready")
    async def ready() -> dict[str, bool]:
        return {"live": True, "ready": True}

    @app.get("/v2/models/{asked}/ready")
    async def model_ready(asked: str) -> dict[str, Any]:
        known(asked)
        return {"name": name, "ready": True}

    @app.get("/v2/models/{asked}")
    async def model(asked: str) -> dict[str, Any]:
        known(asked)
        inputs = [entry.as_dict() for entry in entries.values()]
        return {"name": name, "platform": "pytorch", "inputs": inputs, "outputs": [answer.as_dict()]}

    @app.post("/v2/models/{asked}/infer")
    async def infer(asked: str, request: Request) -> JSONResponse:
        known(asked)
        async with gate.held():
            body = await read_body(request, limits)
            content = await run_in_threadpool(reply, body)
        made.requests += 1
        return JSONResponse(content)

    return app


def serve_model(
    oracle: Oracle,
    name: str,
    listen: str,
    *,
    limits: Limits = Limits(),
    allow_remote: bool = False,
    certificate: tuple[Path, Path] | None = None,
    ready: Callable[[str], None] = lambda _url: None,
) -> Counts:
    """Answer until Ctrl-C or SIGTERM, then finish what is under way and return what was done.

    Args:
        oracle: gives the answers.
        name: what the model is called in the paths.
        listen: HOST:PORT; port 0 is any free one.
        limits: what a client may ask.
        allow_remote: listen beyond this machine, where everybody may ask.
        certificate: files (PEM) of a certificate and its key, for https.
        ready: called with the server's URL once it takes connections.

    Raises:
        InputError: an address beyond this machine without ``allow_remote``, or one that cannot be listened on.
    """
    counts = Counts()
    sock, local = listening(listen, allow_remote=allow_remote)
    with sock:
        app = model_app(oracle, name, limits=limits, counts=counts, local=local)
        run_service(app, sock, certificate=certificate, ready=ready)
    return counts
