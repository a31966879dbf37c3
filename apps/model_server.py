"""A local model behind the Open Inference Protocol (KServe v2): what ``deepseal model serve`` runs.

Only answers leave: the server holds an ``Oracle``. Errors are the protocol's JSON, ``{"error": "…"}``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import logging
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import torch

import deepseal
from deepseal.adapter import Batch, Inputs, Oracle
from deepseal.adapter.inference_protocol import INPUT, TensorInfo, decode, encode, listed, parse, shown
from deepseal.adapter.remote_model import datatype_of
from deepseal.errors import InputError, one_line
from deepseal.secure_inference.transport.sockets import parse_address

try:
    import uvicorn
    from fastapi import FastAPI, HTTPException, Request
    from fastapi.responses import JSONResponse
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException as AnyHTTPException
except ImportError as error:
    raise InputError(
        "the packages fastapi and uvicorn for a server", found="none", do="install them: pip install 'deepseal[serve]'"
    ) from error

_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
_SILENT = logging.CRITICAL + 1
_GRACE = 5  # seconds that requests under way have when the server ends


@dataclasses.dataclass(frozen=True, kw_only=True)
class Limits:
    """What one client may ask of the server.

    Attributes:
        batch: most samples in a request.
        length: largest size of a dimension that may vary, such as the number of tokens.
        body: most bytes of a request.
        requests: most requests at a time; 503 beyond it.
        seconds: longest wait for the body of a request.
    """

    batch: int = 256
    length: int = 4096
    body: int = 1 << 26
    requests: int = 16
    seconds: float = 30.0


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
    if not name or not name.isprintable() or "/" in name:
        raise InputError("a printable name without slashes", found=shown(name), do="choose another --name")
    made, gate, turn = counts if counts is not None else Counts(), _Gate(limits.requests), threading.Lock()
    spec, output = oracle.spec, oracle.output
    datatype, columns = ("INT64", ()) if output == "labels" else ("FP32", (spec.num_classes or -1,))
    fields, answer = spec.named_fields(INPUT), TensorInfo(output, datatype, (-1, *columns))
    entries = {field: TensorInfo(field, datatype_of(kind), (-1, *kind.shape)) for field, kind in fields.items()}
    app = FastAPI(title="DeepSeal", openapi_url=None, docs_url=None, redoc_url=None)

    def reply(body: bytes) -> dict[str, Any]:
        tensors, request_id = _question(body, entries, answer, limits)
        x: Batch = Inputs(tensors) if spec.fields else tensors[INPUT]
        with turn:
            values = oracle.query(x).numpy()
        result: dict[str, Any] = {"model_name": name}
        if request_id is not None:
            result["id"] = request_id
        return {**result, "outputs": [encode(answer.name, values, answer.datatype)]}

    def known(asked: str) -> None:
        if asked != name:
            raise HTTPException(404, f"expected the model {name!r}; found {shown(asked)}; correct the path")

    @app.middleware("http")
    async def meant_for_us(request: Request, call: Callable[[Request], Any]) -> Any:
        if local and request.url.hostname not in _LOCAL_NAMES:
            return _error(request, AnyHTTPException(403, "expected a request to this machine; found another host"))
        return await call(request)

    async def refuse(request: Request, error: Exception) -> JSONResponse:
        made.refused += 1
        return _error(request, error)

    for kind in (AnyHTTPException, InputError, Exception):
        app.add_exception_handler(kind, refuse)

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
            body = await _read(request, limits)
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
    sock, local = _listening(listen, allow_remote=allow_remote)
    with sock:
        app = model_app(oracle, name, limits=limits, counts=counts, local=local)
        config = server_config(app, certificate)
        host, port = sock.getsockname()[:2]
        with suppress(KeyboardInterrupt):  # uvicorn raises it again after its clean end
            ready(f"{'https' if certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{port}")
            uvicorn.Server(config).run(sockets=[sock])
    return counts


def server_config(app: FastAPI, certificate: tuple[Path, Path] | None = None) -> uvicorn.Config:
    """How the server runs: it writes no log, says nothing of itself, and believes no proxy's headers.

    Raises:
        InputError: unreadable certificate files.
    """
    config = uvicorn.Config(
        app,
        http="h11",
        ws="none",
        loop="asyncio",
        lifespan="off",
        log_config=None,
        log_level=_SILENT,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_graceful_shutdown=_GRACE,
        ssl_certfile=certificate and str(certificate[0]),
        ssl_keyfile=certificate and str(certificate[1]),
    )
    try:
        config.load()
    except OSError as error:
        raise InputError("a certificate and its key (PEM)", found=str(error)[:120], do="check the files") from error
    return config


class _Gate:
    """Room for so many requests; there is no queue."""

    def __init__(self, room: int) -> None:
        self._room = room

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        if self._room < 1:
            raise HTTPException(503, "expected fewer requests at a time; try again", headers={"Retry-After": "1"})
        self._room -= 1
        try:
            yield
        finally:
            self._room += 1


async def _read(request: Request, limits: Limits) -> bytes:
    """The body, if it comes in time and is not too long."""
    too_long = HTTPException(413, f"expected at most {limits.body} bytes; found more; send fewer inputs a request")
    stated = request.headers.get("content-length", "0")
    if "inference-header-content-length" in request.headers:
        raise HTTPException(400, "expected JSON; found the binary extension; send the data as JSON")
    if not stated.isdecimal() or int(stated) > limits.body:
        raise too_long

    async def whole() -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > limits.body:
                raise too_long
        return bytes(body)

    try:
        return await asyncio.wait_for(whole(), limits.seconds)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"expected the whole request within {limits.seconds:g} s") from None


def _question(
    body: bytes, entries: Mapping[str, TensorInfo], answer: TensorInfo, limits: Limits
) -> tuple[dict[str, torch.Tensor], str | None]:
    """The inputs and the id of a request, checked against what the model takes and gives."""
    request = parse(body, "the request")
    request_id = request.get("id")
    if request_id is not None and not (isinstance(request_id, str) and len(request_id) <= 256):
        raise InputError("a short text as the id", found=type(request_id).__name__, do="correct it or leave it out")
    inputs = listed(request, "inputs", "the request")
    if len(inputs) != len(entries):
        wanted = "one input" if len(entries) == 1 else f"{len(entries)} inputs"
        raise InputError(f"{wanted}, {', '.join(map(repr, entries))}", found=str(len(inputs)), do="send what it takes")
    for wanted in listed(request, "outputs", "the request"):
        if not isinstance(wanted, dict) or wanted.get("name") != answer.name:
            raise InputError(f"no other output than {answer.name!r}", found=shown(wanted), do="ask for that")
    tensors: dict[str, torch.Tensor] = {}
    for entry, tensor in _matched(inputs, entries):
        if tensor.ndim == 0 or not 1 <= len(tensor) <= limits.batch:
            found = str(len(tensor) if tensor.ndim else 0)
            raise InputError(f"1 to {limits.batch} inputs a request", found=found, do="split the batch")
        varying = [a for a, b in zip(tensor.shape[1:], entry.shape[1:], strict=False) if b == -1]
        longest = max(varying, default=0)
        if longest > limits.length:
            raise InputError(f"sizes up to {limits.length} in {entry.name!r}", found=str(longest), do="cut the inputs")
        tensors[entry.name] = tensor
    return tensors, request_id


def _matched(inputs: list[Any], entries: Mapping[str, TensorInfo]) -> Iterator[tuple[TensorInfo, torch.Tensor]]:
    """The tensors of a request, each with what the model takes under that name."""
    left = dict(entries)
    for item in inputs:
        name, datatype, values = decode(item, "the input")
        entry = left.pop(name, None)
        if entry is None or datatype != entry.datatype:
            of = " or ".join(f"{known.name!r} of {known.datatype}" for known in ([entry] if entry else left.values()))
            raise InputError(f"the input {of}", found=f"{shown(name)} of {datatype}", do="correct the request")
        yield entry, torch.from_numpy(values)


def _error(_request: Request, error: Exception) -> JSONResponse:
    if isinstance(error, AnyHTTPException):
        return JSONResponse({"error": str(error.detail)}, error.status_code, headers=error.headers)
    if isinstance(error, InputError):
        return JSONResponse({"error": one_line(str(error))[:500]}, 400)
    return JSONResponse({"error": "the model failed on this request"}, 500)


def _listening(listen: str, *, allow_remote: bool) -> tuple[socket.socket, bool]:
    """A bound socket, and whether only this machine reaches it."""
    host, port = parse_address(listen)
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
    except (OSError, UnicodeError) as error:
        raise InputError("the name or address of a host", found=shown(host), do="write its IP address") from error
    local = ipaddress.ip_address(str(where[0]).partition("%")[0]).is_loopback
    if not local and not allow_remote:
        do = "listen on 127.0.0.1, or give --allow-remote"
        raise InputError("an address of this machine only", found=f"{shown(host)}, where others can ask", do=do)
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(where)
        sock.listen(128)
    except OSError as error:
        sock.close()
        found = error.strerror or str(error)
        raise InputError(f"a free address, not {listen}", found=found, do="choose another port") from error
    return sock, local
