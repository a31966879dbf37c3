"""Starting the dashboard's server: loopback, limits, one cookie that tells browsers apart, and no traces elsewhere."""

from __future__ import annotations

import importlib
import os
import re
import secrets
import sys
import threading
import urllib.request
import webbrowser
from collections.abc import Callable, Sequence
from http.cookies import SimpleCookie
from pathlib import Path
from typing import Any

from deepseal.apps.dashboard import settings
from deepseal.errors import InputError

try:
    import streamlit  # noqa: F401
    from streamlit.starlette import App
except ImportError as error:
    found, do = "none, or an older one", "install it: pip install 'deepseal[dashboard]'"
    raise InputError("the package streamlit (1.67 or newer) for the dashboard", found=found, do=do) from error

from starlette.middleware import Middleware
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse

_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_SCRIPT = Path(__file__).with_name("app.py")
_READY_SECONDS = 60.0
_NAME = re.compile(r"[A-Za-z0-9_-]{43}")


def launch(
    folder: Path | None,
    *,
    host: str,
    port: int,
    archs: Sequence[str],
    upload_mib: int,
    browser: bool,
    allow_remote: bool,
    ready: Callable[[str], None],
) -> None:
    """Serve until Ctrl-C.

    Args:
        folder: whose records the overview lists, read only; None for none.
        host: address to listen on.
        port: and its port.
        archs: architectures beside ours and torchvision's that uploaded weights may have; their code is run.
        upload_mib: largest upload.
        browser: open the page when it answers.
        allow_remote: allow addresses that other machines reach: whoever reaches the port may use the machine.
        ready: called with the page's address once it answers.

    Raises:
        InputError: a folder that is none, an address that is not ours to take.
    """
    if folder is not None and not folder.is_dir():
        raise InputError("a folder of records", found=f"none at {folder}", do="check the name")
    if host not in _LOOPBACK and not allow_remote:
        do = "leave out --host, or add --allow-remote: whoever reaches the port may then use this machine"
        raise InputError("an address of this machine alone", found=host, do=do)
    _check_free(host, port)
    settings.Settings(str(folder.resolve()) if folder else None, tuple(archs), upload_mib).publish()
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    threading.Thread(target=_announce, args=(url, browser, ready), daemon=True).start()
    sys.argv = [str(_SCRIPT)]  # nothing of our command line is the script's
    App(_SCRIPT, middleware=[Middleware(_Browser, hosts=() if allow_remote else _LOOPBACK)]).run(
        config=_options(host, port, upload_mib, local=not allow_remote)
    )


def _options(host: str, port: int, upload_mib: int, *, local: bool) -> dict[str, Any]:
    options: dict[str, Any] = {
        "server.address": host,
        "server.port": port,
        "server.headless": True,
        "server.maxUploadSize": upload_mib,
        "server.fileWatcherType": "none",
        "server.enableXsrfProtection": True,
        "server.enableCORS": True,
        "server.enableStaticServing": False,
        "server.enableAgentApi": False,
        "browser.gatherUsageStats": False,
        "client.toolbarMode": "viewer",
        "client.showErrorDetails": "none",
        "global.developmentMode": False,
        "logger.level": "warning",
        **settings.THEME,
    }
    if local:
        options["server.allowedHosts"] = [*_LOOPBACK, "[::1]"]
    return options


def _check_free(host: str, port: int) -> None:
    import socket

    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
    except (OSError, OverflowError) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise InputError(f"to listen on {host}:{port}", found=found, do="choose another --port") from error


def _announce(url: str, browser: bool, ready: Callable[[str], None]) -> None:
    import time

    end = time.monotonic() + _READY_SECONDS
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"{url}/_stcore/health", timeout=2.0):  # noqa: S310
                break
        except OSError:
            time.sleep(0.05)
    else:
        return
    threading.Thread(target=_preload, daemon=True).start()
    ready(url)
    if browser and (sys.platform != "linux" or os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")):
        webbrowser.open(url)


def _preload() -> None:
    """What the first page needs, while the browser loads its own part."""
    for name in ("pandas", "pyarrow", "deepseal.apps.dashboard.overview"):
        importlib.import_module(name)


class _Browser:
    """Gives a browser a random name, in a cookie that its scripts cannot read and that no other site makes it send.

    A request meant for another host than ``hosts`` is refused (none: whatever host), and so is one from a page of
    another origin, also of another port of this machine, that would change something or listen. Answers also say what
    a page of ours never needs: to be framed, sniffed or referred to.
    """

    def __init__(self, app: Any, hosts: Sequence[str]) -> None:
        self._app, self._hosts = app, hosts

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        found = self._foreign(HTTPConnection(scope), reads=scope.get("method") in ("GET", "HEAD", "OPTIONS"))
        if found and scope["type"] == "http":
            await PlainTextResponse(f"expected a request to this machine; found {found}", 403)(scope, receive, send)
            return
        if found:
            await send({"type": "websocket.close", "code": 1008, "reason": found})
            return
        if scope["type"] == "websocket":
            await self._app(scope, receive, send)
            return
        given = HTTPConnection(scope).cookies.get(settings.COOKIE, "")
        begins = str(scope["path"]).endswith("/_stcore/health")  # asked once a page

        async def answered(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *_headers(given, begins)]}
            await send(message)

        await self._app(scope, receive, answered)

    def _foreign(self, asked: HTTPConnection, *, reads: bool) -> str:
        """What is foreign in a request; empty for nothing."""
        if self._hosts and asked.url.hostname not in self._hosts:
            return "another host"
        origin = asked.headers.get("origin")
        if origin is None or reads or origin.partition("://")[2] == asked.headers.get("host"):
            return ""
        return "a page of another origin"


def _headers(name: str, begins: bool) -> list[tuple[bytes, bytes]]:
    """What every answer carries; a new name where there is none, and the old one for longer when a page begins."""
    found = [
        (b"x-content-type-options", b"nosniff"),
        (b"x-frame-options", b"SAMEORIGIN"),
        (b"referrer-policy", b"no-referrer"),
    ]
    known = _NAME.fullmatch(name) is not None
    if begins or not known:
        cookie: SimpleCookie = SimpleCookie()
        cookie[settings.COOKIE] = name if known else secrets.token_urlsafe(32)
        about = {"path": "/", "httponly": True, "samesite": "Strict", "max-age": settings.KEPT_SECONDS}
        for attribute, value in about.items():
            cookie[settings.COOKIE][attribute] = value
        found.append((b"set-cookie", cookie[settings.COOKIE].OutputString().encode("latin-1")))
    return found
