"""The server under our HTTP services: its socket, its patience and its end.

It writes no log of its own, says nothing of itself, believes no proxy's headers, and waits for nobody for ever.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from deepseal.adapter.inference_protocol import shown
from deepseal.apps.http_service import FastAPI
from deepseal.errors import InputError
from deepseal.secure_inference.transport.sockets import parse_address

try:
    import h11
    import uvicorn
    from uvicorn.protocols.http.h11_impl import H11Protocol
except ImportError as error:
    raise InputError(
        "the package uvicorn for a server", found="none", do="install it: pip install 'deepseal[serve]'"
    ) from error

_SILENT = logging.CRITICAL + 1
_GRACE = 5  # seconds that requests under way have when the server ends
_IDLE = 15.0  # seconds after which a connection that says nothing, or takes no answer, is looked at again


def run_service(
    app: FastAPI,
    sock: socket.socket,
    *,
    certificate: tuple[Path, Path] | None = None,
    ready: Callable[[str], None] = lambda _url: None,
    lifespan: bool = False,
) -> None:
    """Answer until Ctrl-C or SIGTERM, then finish what is under way.

    Args:
        app: the application.
        sock: bound and listening.
        certificate: files (PEM) of a certificate and its key, for https.
        ready: called with the service's URL.
        lifespan: whether the application has a beginning and an end of its own.
    """
    config = server_config(app, certificate, lifespan=lifespan)
    host, port = sock.getsockname()[:2]
    with suppress(KeyboardInterrupt):  # uvicorn raises it again after its clean end
        ready(f"{'https' if certificate else 'http'}://{f'[{host}]' if ':' in host else host}:{port}")
        uvicorn.Server(config).run(sockets=[sock])


def server_config(
    app: FastAPI, certificate: tuple[Path, Path] | None = None, *, lifespan: bool = False
) -> uvicorn.Config:
    """How the server runs: it writes no log, says nothing of itself, and believes no proxy's headers.

    Raises:
        InputError: unreadable certificate files.
    """
    config = uvicorn.Config(
        app,
        http=_Impatient,
        ws="none",
        loop="asyncio",
        lifespan="on" if lifespan else "off",
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


class _Impatient(H11Protocol):
    """Closes a connection that sends no whole request head, or takes no answer, between two looks at it."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._seen: tuple[object, bool] | None = None
        self._look = self.loop.call_later(_IDLE, self._again)

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    def _again(self) -> None:
        waiting = self.conn.their_state is h11.IDLE
        stuck = self.flow.write_paused
        now = (self.cycle, stuck) if waiting or stuck else None
        if now is not None and self._seen == now:
            self.transport.abort()
            return
        self._seen = now
        self._look = self.loop.call_later(_IDLE, self._again)


def listening(listen: str, *, allow_remote: bool) -> tuple[socket.socket, bool]:
    """A bound socket, and whether only this machine reaches it.

    Raises:
        InputError: an address beyond this machine without ``allow_remote``, or one that cannot be listened on.
    """
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
