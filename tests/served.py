"""Servers for the tests of the remote oracle: the real one in a thread, and one that answers from a script."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import uvicorn
from fastapi import FastAPI

from deepseal.adapter import InputSpec, Oracle
from deepseal.apps.http_server import server_config
from deepseal.apps.model_server import Counts, Limits, model_app

Answer = tuple[int, dict[str, str], bytes]
Infer = Callable[[dict[str, Any], int], Answer]


@contextmanager
def running(app: FastAPI, *, port: int = 0, lifespan: bool = False) -> Iterator[str]:
    """A real server in a thread; its URL."""
    server = uvicorn.Server(server_config(app, lifespan=lifespan))
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        limit = time.monotonic() + 20
        while not server.started:
            assert thread.is_alive() and time.monotonic() < limit
            time.sleep(0.01)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(20)
        sock.close()


@contextmanager
def serving(
    oracle: Oracle, name: str = "suspect", *, limits: Limits | None = None, port: int = 0, counts: Counts | None = None
) -> Iterator[str]:
    """The model server in a thread; its URL."""
    with running(model_app(oracle, name, limits=limits or Limits(), counts=counts), port=port) as url:
        yield url


def description(spec: InputSpec, output: str = "logits", **fields: Any) -> dict[str, Any]:
    """A model's description as the protocol has it."""
    return {
        "name": "suspect",
        "platform": "test",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, *spec.shape]}],
        "outputs": [{"name": output, "datatype": "FP32", "shape": [-1, spec.num_classes]}],
        **fields,
    }


def scores(data: Any, shape: list[int], **fields: Any) -> Answer:
    """A successful reply with one tensor."""
    tensor = {"name": "logits", "shape": shape, "datatype": "FP32", "data": data} | fields
    return 200, {}, json.dumps({"model_name": "suspect", "outputs": [tensor]}).encode()


@contextmanager
def scripted(described: dict[str, Any], infer: Infer, *, ready: Callable[[], int] = lambda: 200) -> Iterator[str]:
    """A server that answers a question with ``infer(request, number of earlier questions)``; its URL."""
    asked: list[bytes] = []
    open_: list[socket.socket] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def setup(self) -> None:
            super().setup()
            open_.append(self.connection)

        def do_GET(self) -> None:
            if self.path == "/v2/health/ready":
                self._send(ready(), {}, b"")
            else:
                self._send(200, {}, json.dumps(described).encode())

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            asked.append(body)
            self._send(*infer(json.loads(body), len(asked) - 1))

        def _send(self, status: int, headers: dict[str, str], body: bytes) -> None:
            if status == 0:
                self.close_connection = True
                return
            self.send_response(status)
            for name, value in ({"Content-Length": str(len(body))} | headers).items():
                if value:
                    self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        for sock in open_:
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        server.server_close()
        thread.join(10)
