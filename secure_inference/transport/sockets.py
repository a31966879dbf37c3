"""Connections over TCP: addresses, a listener, and a connector that waits until the other side is up."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import re
import socket
import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Any

from deepseal.errors import InputError, TransportError
from deepseal.secure_inference.transport import tls as tls_
from deepseal.secure_inference.transport.channel import Channel
from deepseal.secure_inference.transport.frames import LIMIT, readable
from deepseal.secure_inference.transport.tls import Tls

if TYPE_CHECKING:
    from ssl import SSLContext

    from typing_extensions import Self

LOOPBACK = "127.0.0.1"
_GREETING = 5.0  # seconds that who connects to us has for the greeting of TLS
_WORTH_RETRYING = {
    errno.ECONNREFUSED,
    errno.ECONNRESET,
    errno.ECONNABORTED,
    errno.ETIMEDOUT,
    errno.EHOSTUNREACH,
    errno.ENETUNREACH,
    errno.EADDRNOTAVAIL,
}


@dataclass(frozen=True)
class _Place:
    family: int
    address: tuple[Any, ...]

    @property
    def loopback(self) -> bool:
        ip = ipaddress.ip_address(str(self.address[0]).partition("%")[0])
        mapped = getattr(ip, "ipv4_mapped", None)
        return (mapped or ip).is_loopback


def parse_address(text: str) -> tuple[str, int]:
    """Host and port of ``HOST:PORT``, ``[IPV6]:PORT``, ``:PORT`` or ``PORT``; the last two mean this machine only.

    Raises:
        InputError: anything else.
    """
    match = re.fullmatch(r"(?:(?:\[([0-9A-Fa-f:.%\w]+)\]|([^\s:\[\]/@]*)):)?([0-9]{1,5})", text, re.ASCII)
    if match is None or int(match[3]) > 65535:
        do = "write 127.0.0.1:9000, or [::1]:9000 for IPv6"
        raise InputError("an address HOST:PORT", found=repr(readable(text)), do=do)
    return match[1] or match[2] or LOOPBACK, int(match[3])


class Caller:
    """A party that has connected, before any byte of it was read."""

    def __init__(
        self, sock: socket.socket, context: SSLContext | None, tls: Tls | None, timeout: float, limit: int
    ) -> None:
        self._sock, self._context, self._tls, self._timeout, self._limit = sock, context, tls, timeout, limit

    def greet(self) -> Channel:
        """Its channel, after the greeting of TLS, which may take 5 s, or our time-out where that is shorter.

        Raises:
            TransportError: it stalls, hangs up, or is no party with the right certificate.
        """
        return _channel(self._sock, self._context, self._tls, server=True, timeout=self._timeout, limit=self._limit)

    def hang_up(self) -> None:
        """End the connection without a word, also while another thread waits in ``greet``, which then raises."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Hang up without a word, and give up the socket."""
        self._sock.close()


class Listener:
    """A port that waits for parties; see ``listen``. Closing it leaves accepted channels open."""

    def __init__(
        self, sock: socket.socket, *, context: SSLContext | None, tls: Tls | None, timeout: float, limit: int
    ) -> None:
        self._sock, self._context, self._tls, self.timeout, self._limit = sock, context, tls, timeout, limit
        host, port = sock.getsockname()[:2]
        self.address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def accept(self, *, wait: float | None = None) -> Channel:
        """The next party that connects, greeted.

        Args:
            wait: seconds to wait for one; the listener's time-out, if None.

        Raises:
            TransportError: nobody came in time, or who came is no party with the right certificate; the listener
                stays open and may accept again.
        """
        return self.caller(wait=wait).greet()

    def caller(self, *, wait: float | None = None) -> Caller:
        """The next party that connects, as it comes: it may still keep us waiting in ``greet``.

        Raises:
            TransportError: nobody came in time (then its cause is a ``TimeoutError``).
        """
        try:
            self._sock.settimeout(self.timeout if wait is None else wait)
            sock, _ = self._sock.accept()
        except TimeoutError as error:
            expected = f"a party to connect to {self.address} within {self.timeout:g} s"
            raise TransportError(expected, found="none", do="start the other side, or use a longer time-out") from error
        except OSError as error:
            found = error.strerror or str(error)
            raise TransportError(f"a party to connect to {self.address}", found=found, do="listen again") from error
        return Caller(sock, self._context, self._tls, self.timeout, self._limit)

    def close(self) -> None:
        """Stop listening."""
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def listen(address: str, *, tls: Tls | None, timeout: float, allow_plain: bool = False, limit: int = LIMIT) -> Listener:
    """Open a port for the other party.

    Args:
        address: see ``parse_address``; port 0 takes a free one, which ``Listener.address`` tells.
        tls: our certificate, key and CA; None: no encryption.
        timeout: seconds of the longest wait: for a party, for its greeting, for each read and write.
        allow_plain: allow no encryption also beyond this machine.
        limit: greatest payload of a frame in bytes.

    Raises:
        InputError: a bad address or file, or no encryption beyond this machine.
        TransportError: the port cannot be opened.
    """
    _check_timeout(timeout)
    place = _resolve(address, allow_plain or tls is not None, passive=True)[0]
    context = None if tls is None else tls_.context(tls, server=True)
    sock = socket.socket(place.family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if place.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind(place.address)
        sock.listen(64)
        return Listener(sock, context=context, tls=tls, timeout=timeout, limit=limit)
    except OSError as error:
        sock.close()
        found = error.strerror or str(error)
        do = "choose another port, or an address of this machine"
        raise TransportError(f"to listen on {readable(address)}", found=found, do=do) from error


def connect(
    address: str,
    *,
    tls: Tls | None,
    timeout: float,
    retry_for: float = 10.0,
    allow_plain: bool = False,
    limit: int = LIMIT,
) -> Channel:
    """Connect to a listener, which may come up a little later.

    Args:
        address: see ``parse_address``. A host name is looked up first, within the time-outs of the resolver.
        tls: our certificate, key and CA; None: no encryption.
        timeout: seconds of the longest wait: for one connection, for its greeting, for each read and write.
        retry_for: seconds during which a refused connection is tried again.
        allow_plain: allow no encryption also beyond this machine.
        limit: greatest payload of a frame in bytes.

    Raises:
        InputError: a bad address or file, or no encryption beyond this machine.
        TransportError: nobody answers there, or not with TLS 1.3 and the right certificate.
    """
    _check_timeout(timeout)
    places = _resolve(address, allow_plain or tls is not None, passive=False)
    context = None if tls is None else tls_.context(tls, server=False)
    end, pause = time.monotonic() + max(0.0, retry_for), 0.01
    while True:
        for place in places:
            try:
                sock = _dial(place, timeout)
            except OSError as error:
                last = error
                continue
            return _channel(sock, context, tls, server=False, timeout=timeout, limit=limit)
        left = end - time.monotonic()
        if left <= 0 or not (isinstance(last, TimeoutError) or last.errno in _WORTH_RETRYING):
            found = "no answer" if isinstance(last, TimeoutError) else (last.strerror or str(last)).lower()
            do = "start the other side, and check the address, the port and the firewall"
            raise TransportError(f"a party that listens on {readable(address)}", found=found, do=do) from last
        time.sleep(min(pause, left))
        pause = min(2 * pause, 0.25)


def _dial(place: _Place, timeout: float) -> socket.socket:
    sock = socket.socket(place.family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout)
        sock.connect(place.address)
        if sock.getsockname() == sock.getpeername():  # a free port can meet itself
            raise ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
        return sock
    except BaseException:
        sock.close()
        raise


def _channel(
    sock: socket.socket, context: SSLContext | None, tls: Tls | None, *, server: bool, timeout: float, limit: int
) -> Channel:
    try:
        _tune(sock)
        if context is None or tls is None:
            return Channel(sock, timeout=timeout, limit=limit)
        own = tls_.own_certificate(tls)
    except BaseException as error:
        sock.close()
        if isinstance(error, OSError):
            found = error.strerror or str(error)
            raise TransportError("a working connection", found=found, do="start both sides again") from error
        raise
    secured = tls_.secure(sock, context, server=server, timeout=min(_GREETING, timeout) if server else timeout)
    peer = secured.certificate()
    channel = Channel(secured, timeout=timeout, limit=limit, own_certificate=own, peer_certificate=peer)
    if tls.peer_name is not None:
        try:
            tls_.check_name(secured, tls.peer_name)
        except TransportError:
            channel.refuse("expected another name in your certificate")
            raise
    return channel


def _tune(sock: socket.socket) -> None:
    """No waiting for company, and signs of life while a party computes."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
        if hasattr(socket, name):
            sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _resolve(address: str, anywhere: bool, *, passive: bool) -> list[_Place]:
    host, port = parse_address(address)
    if not passive and port == 0:
        raise InputError("the port of a listener", found="port 0", do="pass the port that the other side names")
    try:
        flags = socket.AI_PASSIVE if passive else 0
        answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=flags)
    except (OSError, UnicodeError) as error:
        do = "check the spelling, or write its IP address"
        raise InputError("the name or address of a host", found=repr(readable(host)), do=do) from error
    places = [_Place(family, where) for family, _, _, _, where in answers]
    if not anywhere and not all(place.loopback for place in places):
        raise InputError(
            "TLS for an address beyond this machine",
            found=f"no encryption for {readable(address)}",
            do="pass certificates (--tls-cert, --tls-key, --tls-ca; deepseal private certs makes them), "
            "or allow_plain=True where the network itself is protected",
        )
    return places


def _check_timeout(timeout: float) -> None:
    if not 0 < timeout < 1e7:
        raise InputError("a finite time-out of more than 0 seconds", found=str(timeout), do="choose another one")
