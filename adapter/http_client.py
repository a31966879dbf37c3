"""HTTP for talking to a suspect: a deadline an attempt, bounded retries, limited replies; no redirect, no proxy.

``httpcore`` does the protocol. It follows no redirects and reads nothing from the environment. Its time-outs are one a
read, so that a peer which sends a byte now and then would keep us for ever; ``_Deadline`` makes them one an attempt.
"""

from __future__ import annotations

import dataclasses
import datetime
import email.utils
import ipaddress
import itertools
import math
import ssl
import time
from collections.abc import Collection, Iterable
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from deepseal.errors import InputError
from deepseal.rng import Rng

try:
    import httpcore
except ImportError as error:
    raise InputError(
        "the package httpcore for remote models", found="none", do="install it: pip install 'deepseal[remote]'"
    ) from error

if TYPE_CHECKING:
    from httpcore import SOCKET_OPTION

WORTH_RETRYING = frozenset({429, 502, 503, 504})
_DEADLINE: ContextVar[float] = ContextVar("deadline", default=math.inf)
_SLICE = 1 << 16


@dataclasses.dataclass(frozen=True, kw_only=True)
class Patience:
    """How long to wait and how often to try.

    Attributes:
        timeout: seconds for one attempt, from connecting to the last byte of the reply.
        attempts: most attempts for one request.
        first_wait: seconds before the second attempt; doubled for each further one, and then spread by a random
            factor between 1/2 and 1.
        longest_wait: most seconds between two attempts; a ``Retry-After`` beyond it ends the attempts.
    """

    timeout: float = 30.0
    attempts: int = 5
    first_wait: float = 0.25
    longest_wait: float = 30.0

    def __post_init__(self) -> None:
        if not 0 < self.timeout < 1e6 or self.attempts < 1 or not 0 <= self.first_wait <= self.longest_wait < 1e6:
            raise InputError(
                "a time-out above 0, at least one attempt, and waits of 0 <= first <= longest",
                found=str(self),
                do="correct them",
            )


@dataclasses.dataclass(frozen=True)
class Exchange:
    """What came of one request: a reply (``status`` and ``body``) or a ``failure``, after so many attempts.

    ``sent`` says whether the server may have seen the request.
    """

    attempts: int
    seconds: float
    sent: bool
    status: int | None = None
    body: bytes = dataclasses.field(default=b"", repr=False)
    failure: str | None = None


@dataclasses.dataclass(frozen=True)
class _Attempt:
    sent: bool
    again: bool
    status: int | None = None
    body: bytes = b""
    failure: str | None = None
    retry_after: float = 0.0


class HttpClient:
    """Requests to one server; several threads may use it.

    Args:
        url: ``http://HOST:PORT`` or ``https://…``, with a path in front of ``/v2`` if the server has one.
        patience: time-outs and retries.
        rng: seed of the random part of the waits.
        token: a secret for ``Authorization: Bearer``; never shown.
        ca: certificates (PEM) that the server's must chain to; the system's if None.
        allow_plain: allow ``http`` to other machines.
        max_reply_bytes: longest reply that is read.

    Raises:
        InputError: another kind of URL, no encryption to another machine, an unreadable ``ca``.
    """

    def __init__(
        self,
        url: str,
        *,
        patience: Patience = Patience(),
        rng: Rng = Rng(0),
        token: str | None = None,
        ca: Path | None = None,
        allow_plain: bool = False,
        max_reply_bytes: int = 1 << 24,
    ) -> None:
        self.url = _checked(url, allow_plain=allow_plain, secret=token is not None)
        self.patience = patience
        self._rng = rng
        self._limit = max_reply_bytes
        self._requests = itertools.count()
        self._headers = {"Accept": "application/json", "Accept-Encoding": "identity", "User-Agent": "deepseal"}
        if token is not None:
            if not token.isascii() or not token.isprintable():
                raise InputError("a token of printable ASCII", found="other characters", do="pass another token")
            self._headers["Authorization"] = f"Bearer {token}"
        self._pool = httpcore.ConnectionPool(ssl_context=_trusting(ca), network_backend=_Deadline())

    def send(self, method: str, path: str, content: bytes = b"", *, also_retry: Collection[int] = ()) -> Exchange:
        """One request, tried again after failed connections, time-outs, 429, 502, 503, 504 and ``also_retry``."""
        start, request, sent = time.monotonic(), next(self._requests), False
        codes = WORTH_RETRYING.union(also_retry)
        for number in itertools.count(1):
            last = self._attempt(method, path, content, codes)
            sent = sent or last.sent
            pause = max(last.retry_after, self._wait(request, number))
            if not last.again or number == self.patience.attempts or pause > self.patience.longest_wait:
                break
            time.sleep(pause)
        return Exchange(number, time.monotonic() - start, sent, last.status, last.body, last.failure)

    def close(self) -> None:
        """Close the connections."""
        self._pool.close()

    def _wait(self, request: int, number: int) -> float:
        patience = self.patience
        wait = min(patience.longest_wait, patience.first_wait * 2.0 ** min(number - 1, 60))
        return wait * float(self._rng.child("jitter", request, number).numpy().uniform(0.5, 1.0))

    def _attempt(self, method: str, path: str, content: bytes, codes: Collection[int]) -> _Attempt:
        headers: list[tuple[bytes | str, bytes | str]] = list(self._headers.items())
        headers += [("Content-Type", "application/json")] if content else []
        token = _DEADLINE.set(time.monotonic() + self.patience.timeout)
        try:
            with self._pool.stream(
                method,
                self.url + path,
                headers=headers,
                content=content,
                extensions={"timeout": {"pool": self.patience.timeout}},
            ) as reply:
                return self._read(reply, codes)
        except (httpcore.ConnectError, httpcore.ConnectTimeout, httpcore.PoolTimeout) as error:
            return _Attempt(sent=False, again=not _distrusted(error), failure=_said(error, "no connection"))
        except httpcore.TimeoutException:
            return _Attempt(sent=True, again=True, failure=f"no whole reply within {self.patience.timeout:g} s")
        except (httpcore.NetworkError, httpcore.ProtocolError) as error:
            return _Attempt(sent=True, again=True, failure=_said(error, "the connection ended"))
        finally:
            _DEADLINE.reset(token)

    def _read(self, reply: httpcore.Response, codes: Collection[int]) -> _Attempt:
        headers = {name.lower(): value.decode("latin-1") for name, value in reply.headers}
        body = bytearray()
        if headers.get(b"content-encoding", "identity").lower() != "identity":
            return _Attempt(sent=True, again=False, failure="a compressed reply, which was not asked for")
        stated = headers.get(b"content-length", "0")
        if stated.isdecimal() and int(stated) > self._limit:
            return _Attempt(sent=True, again=False, failure=f"a reply of over {self._limit} bytes")
        for chunk in reply.iter_stream():
            body += chunk
            if len(body) > self._limit:
                return _Attempt(sent=True, again=False, failure=f"a reply of over {self._limit} bytes")
        again = reply.status in codes
        wait = _seconds(headers.get(b"retry-after", "")) if again else 0.0
        return _Attempt(sent=True, again=again, status=reply.status, body=bytes(body), retry_after=wait)

    def __repr__(self) -> str:
        return f"HttpClient({self.url})"


class _Deadline(httpcore.NetworkBackend):
    """Connections that end with the attempt's deadline."""

    def __init__(self) -> None:
        self._inner = httpcore.SyncBackend()

    def connect_tcp(
        self,
        host: str,
        port: int,
        timeout: float | None = None,
        local_address: str | None = None,
        socket_options: Iterable[SOCKET_OPTION] | None = None,
    ) -> httpcore.NetworkStream:
        left = _left(httpcore.ConnectTimeout)
        return _Stream(
            self._inner.connect_tcp(host, port, left, local_address=local_address, socket_options=socket_options)
        )


class _Stream(httpcore.NetworkStream):
    def __init__(self, inner: httpcore.NetworkStream) -> None:
        self._inner = inner

    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        return self._inner.read(max_bytes, _left(httpcore.ReadTimeout))

    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        for start in range(0, len(buffer), _SLICE):
            self._inner.write(buffer[start : start + _SLICE], _left(httpcore.WriteTimeout))

    def close(self) -> None:
        self._inner.close()

    def start_tls(
        self, ssl_context: ssl.SSLContext, server_hostname: str | None = None, timeout: float | None = None
    ) -> httpcore.NetworkStream:
        return _Stream(self._inner.start_tls(ssl_context, server_hostname, _left(httpcore.ConnectTimeout)))

    def get_extra_info(self, info: str) -> Any:
        return self._inner.get_extra_info(info)


def _left(late: type[httpcore.TimeoutException]) -> float | None:
    """Seconds that the attempt has left."""
    deadline = _DEADLINE.get()
    left = deadline - time.monotonic()
    if left <= 0:
        raise late("the attempt's time is over")
    return None if math.isinf(left) else left


def _checked(url: str, *, allow_plain: bool, secret: bool) -> str:
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname, parts.port
    except ValueError:
        parts, host = urlsplit("http:"), None
    wrong = {
        "a blank, control or non-ASCII character": not (url.isascii() and url.isprintable() and " " not in url),
        "none of http:// and https:// in front": not parts.scheme,
        f"{parts.scheme!r} instead of http or https": parts.scheme not in ("http", "https"),
        "no host, or a bad port": not host,
        "a user name or password": "@" in parts.netloc,
        "a query or fragment": bool(parts.query or parts.fragment),
    }
    found = next((what for what, is_so in wrong.items() if is_so), None)
    if found is not None:
        do = "write http://127.0.0.1:8000 or https://host, without user, query and fragment"
        raise InputError("the URL of a server", found=found, do=do)
    if parts.scheme == "http" and not _loopback(str(host)) and (secret or not allow_plain):
        do = "use https" if secret else "use https, or allow_plain=True (--allow-plain) where the network is protected"
        raise InputError("https to another machine", found="http, which everybody on the way can read", do=do)
    return url.rstrip("/")


def _loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def _trusting(ca: Path | None) -> ssl.SSLContext:
    try:
        context = ssl.create_default_context(cafile=None if ca is None else str(ca))
    except (OSError, ValueError) as error:
        raise InputError(f"certificates (PEM) in {ca}", found=str(error)[:120], do="pass the CA's file") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    return context


def _distrusted(error: Exception) -> bool:
    """Whether TLS failed for a reason that stays; the pool keeps the reason in the arguments."""
    return any(isinstance(part, ssl.SSLError) and not isinstance(part, ssl.SSLEOFError) for part in error.args)


def _said(error: Exception, otherwise: str) -> str:
    return f"{otherwise}: {ascii(str(error))[1:160]}".rstrip("'\"") if str(error) else otherwise


def _seconds(text: str) -> float:
    """``Retry-After`` as seconds from now; 0 where there is none or it makes no sense."""
    if text.isascii() and text.isdecimal():
        return float(text[:12])
    try:
        when = email.utils.parsedate_to_datetime(text)
    except (TypeError, ValueError):
        return 0.0
    now = datetime.datetime.now(datetime.timezone.utc)
    return max(0.0, ((when if when.tzinfo else when.replace(tzinfo=datetime.timezone.utc)) - now).total_seconds())
