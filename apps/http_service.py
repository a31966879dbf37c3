"""What our HTTP services share: limits, body, question and error of the protocol.

The protocol is the Open Inference Protocol (KServe v2); its errors are JSON, ``{"error": "…"}``.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import torch
from torch import Tensor

from deepseal.adapter.inference_protocol import TensorInfo, decode, listed, parse, shown
from deepseal.errors import InputError, one_line

try:
    from fastapi import FastAPI, HTTPException, Request, Response
    from fastapi.responses import JSONResponse
    from starlette.concurrency import run_in_threadpool
    from starlette.exceptions import HTTPException as AnyHTTPException
except ImportError as error:
    raise InputError(
        "the packages fastapi and uvicorn for a server", found="none", do="install them: pip install 'deepseal[serve]'"
    ) from error

__all__ = [
    "FastAPI",
    "Gate",
    "HTTPException",
    "JSONResponse",
    "Limits",
    "Question",
    "Request",
    "Response",
    "error_reply",
    "question",
    "read_body",
    "run_in_threadpool",
    "service",
]
_LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")


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


@dataclasses.dataclass(frozen=True)
class Question:
    """What one request asks: its tensors by name, its id, and the outputs that it wants (all, if it names none)."""

    tensors: dict[str, Tensor]
    request_id: str | None
    outputs: tuple[str, ...]


def service(name: str, *, local: bool, refused: Callable[[int], None]) -> FastAPI:
    """An application without pages of its own that answers every failure with the protocol's error.

    Args:
        name: what the model is called in the paths.
        local: refuse requests that were meant for another host (a web page that has its own name lead to us).
        refused: called with the status of every request that was refused.

    Raises:
        InputError: a name that cannot stand in a path.
    """
    if not name or not name.isprintable() or "/" in name:
        raise InputError("a printable name without slashes", found=shown(name), do="choose another --name")
    app = FastAPI(title="DeepSeal", openapi_url=None, docs_url=None, redoc_url=None)

    async def refuse(_request: Request, error: Exception) -> JSONResponse:
        answer = error_reply(error)
        refused(answer.status_code)
        return answer

    for kind in (AnyHTTPException, InputError, Exception):
        app.add_exception_handler(kind, refuse)
    if local:
        app.add_middleware(_MeantForUs)
    return app


class _MeantForUs:
    """Passes on what names this machine as its host."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and Request(scope).url.hostname not in _LOCAL_NAMES:
            text = "expected a request to this machine; found another host"
            await error_reply(AnyHTTPException(403, text))(scope, receive, send)
            return
        await self._app(scope, receive, send)


class Gate:
    """Room for so many requests; there is no queue before it."""

    def __init__(self, room: int) -> None:
        self._room = room

    @asynccontextmanager
    async def held(self) -> AsyncIterator[None]:
        """A place among the requests under way.

        Raises:
            HTTPException: 503, there is none.
        """
        if self._room < 1:
            raise HTTPException(503, "expected fewer requests at a time; try again", headers={"Retry-After": "1"})
        self._room -= 1
        try:
            yield
        finally:
            self._room += 1


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body, if it comes in time and is not too long.

    Raises:
        HTTPException: 400, 408 or 413.
    """
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


def question(body: bytes, entries: Mapping[str, TensorInfo], outputs: Sequence[str], limits: Limits) -> Question:
    """What a request asks, checked against what the model takes and gives.

    Raises:
        InputError: anything that does not fit.
    """
    request = parse(body, "the request")
    request_id = request.get("id")
    if request_id is not None and not (isinstance(request_id, str) and len(request_id) <= 256):
        raise InputError("a short text as the id", found=type(request_id).__name__, do="correct it or leave it out")
    inputs = listed(request, "inputs", "the request")
    if len(inputs) != len(entries):
        wanted = "one input" if len(entries) == 1 else f"{len(entries)} inputs"
        raise InputError(f"{wanted}, {', '.join(map(repr, entries))}", found=str(len(inputs)), do="send what it takes")
    asked = []
    for wish in listed(request, "outputs", "the request"):
        if not isinstance(wish, dict) or wish.get("name") not in outputs:
            expected = f"no other output than {' or '.join(map(repr, outputs))}"
            raise InputError(expected, found=shown(wish), do="ask for that")
        asked.append(str(wish["name"]))
    tensors: dict[str, Tensor] = {}
    for entry, tensor in _matched(inputs, entries):
        if tensor.ndim == 0 or not 1 <= len(tensor) <= limits.batch:
            found = str(len(tensor) if tensor.ndim else 0)
            raise InputError(f"1 to {limits.batch} inputs a request", found=found, do="split the batch")
        varying = [a for a, b in zip(tensor.shape[1:], entry.shape[1:], strict=False) if b == -1]
        longest = max(varying, default=0)
        if longest > limits.length:
            raise InputError(f"sizes up to {limits.length} in {entry.name!r}", found=str(longest), do="cut the inputs")
        tensors[entry.name] = tensor
    return Question(tensors, request_id, tuple(dict.fromkeys(asked)) or tuple(outputs))


def _matched(inputs: list[Any], entries: Mapping[str, TensorInfo]) -> Iterator[tuple[TensorInfo, Tensor]]:
    """The tensors of a request, each with what the model takes under that name."""
    left = dict(entries)
    for item in inputs:
        name, datatype, values = decode(item, "the input")
        entry = left.pop(name, None)
        if entry is None or datatype != entry.datatype:
            of = " or ".join(f"{known.name!r} of {known.datatype}" for known in ([entry] if entry else left.values()))
            raise InputError(f"the input {of}", found=f"{shown(name)} of {datatype}", do="correct the request")
        yield entry, torch.from_numpy(values)


def error_reply(error: Exception) -> JSONResponse:
    """The protocol's error: what was wrong, or nothing at all of a fault of our own."""
    if isinstance(error, AnyHTTPException):
        return JSONResponse({"error": str(error.detail)}, error.status_code, headers=error.headers)
    if isinstance(error, InputError):
        return JSONResponse({"error": one_line(str(error))[:500]}, 400)
    return JSONResponse({"error": "the model failed on this request"}, 500)
