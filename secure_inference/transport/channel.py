"""A channel: frames between two parties, in order, with limits and time-outs, counted by phase."""

from __future__ import annotations

import contextlib
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, cast

from deepseal.errors import DeepSealError, InputError, ProtocolError, TransportError
from deepseal.secure_inference.transport import frames, tls
from deepseal.secure_inference.transport.frames import HEADER, Counters, Kind, Phase, name_of, readable

if TYPE_CHECKING:
    from typing import Any, TypeAlias

    from numpy.typing import NDArray
    from typing_extensions import Buffer, Self

    Memory: TypeAlias = Buffer | NDArray[Any]

_SMALL = 4096  # payloads up to this size wait for company
_BATCH = 16384  # what waits is sent from this size on; also the size of a TLS record
_TLS_SLICE = 8 * _BATCH
_PINGS = 10_000  # in a row, without a frame between them
_LAST_WORDS = 1.0  # seconds that a refusal may take


class Channel:
    """One end of a connection. Use it from one thread at a time; every error closes it.

    Args:
        sock: a connected stream socket (plain or TLS), which the channel closes in the end.
        timeout: seconds without any progress after which a read or a write gives up.
        limit: greatest length of a payload in bytes, in both directions.
        own_certificate: our certificate (DER), None without TLS.
        peer_certificate: the other party's certificate (DER), None without TLS.

    All methods that wait raise ``TransportError`` when the other party hangs up or stalls, and its kind
    ``ProtocolError`` when it sends what is not allowed, or refuses to go on.
    """

    def __init__(
        self,
        sock: socket.socket | tls.TlsSocket,
        *,
        timeout: float,
        limit: int = frames.LIMIT,
        own_certificate: bytes | None = None,
        peer_certificate: bytes | None = None,
    ) -> None:
        if not timeout > 0:
            raise InputError("a finite time-out of more than 0 seconds", found=str(timeout), do="choose a longer one")
        self.own_certificate, self.peer_certificate = own_certificate, peer_certificate
        self.timeout = float(timeout)
        self._sock, self._limit = sock, limit
        self._until: float | None = None
        self._met: tuple[int, int] | None = None  # kind and length of a frame that ``wait`` found
        self._open, self._torn, self._exact = True, False, False
        self._pending = bytearray()
        self._ahead = bytearray(_BATCH)
        self._ahead_view = memoryview(self._ahead)
        self._start = self._end = 0
        self._frames_sent = self._frames_received = 0  # what a caller sees; without PING
        self._number_sent = self._number_received = 0
        self._bytes_sent = self._bytes_received = 0
        self._phases: dict[str, Phase] = {}
        sock.settimeout(self.timeout)

    def __repr__(self) -> str:
        kind = "plain" if isinstance(self._sock, socket.socket) else "TLS"
        return f"<Channel {kind}, {'open' if self._open else 'closed'}>"

    # Sending

    def send(self, kind: Kind, payload: Memory = b"") -> None:
        """Send one frame. A small one may wait until ``flush``, ``receive`` or ``close``; a large one is not copied.

        Args:
            kind: what the frame carries.
            payload: contiguous bytes, such as bytes, a memoryview or a NumPy array; free again when this returns.

        Raises:
            InputError: the payload is larger than the limit.
        """
        view = _bytes_of(payload)
        size = len(view)
        if size > self._limit:
            do = "split it into several frames"
            raise InputError(f"a payload of at most {self._limit} bytes", found=f"{size} bytes", do=do)
        self._check_open()
        self._pending += HEADER.pack(frames.MAGIC, kind, 0, size, self._number_sent)
        self._number_sent += 1
        if kind is not Kind.PING:
            self._frames_sent += 1
        self._bytes_sent += HEADER.size + size
        if size > _SMALL:
            self._write(view)
            return
        self._pending += view
        if len(self._pending) >= _BATCH:
            self._write()

    def flush(self) -> None:
        """Send what waits."""
        if self._pending:
            self._check_open()
            self._write()

    def ping(self) -> None:
        """Tell the other party at once that we are alive, during a long computation."""
        self.send(Kind.PING)
        self.flush()

    def refuse(self, reason: str) -> None:
        """Tell the other party why we stop (short, ASCII, nothing secret), and close. Never fails."""
        if not self._open:
            return
        try:
            if not self._torn:
                text = readable(reason, frames.REASON_LIMIT).encode("ascii")
                self._until = time.monotonic() + min(_LAST_WORDS, self.timeout)
                self._pending += HEADER.pack(frames.MAGIC, Kind.REFUSED, 0, len(text), self._number_sent) + text
                self._put(memoryview(b""))
        except (OSError, ValueError):
            pass
        finally:
            self._drop(linger=True)

    # Receiving

    def receive(self, kind: Kind, *, at_most: int) -> bytes:
        """The payload of the next frame, which must be of this kind and of at most ``at_most`` bytes.

        What waits to be sent is sent first. Lengths are checked before anything is allocated.
        """
        length = self._next(kind, at_most)
        payload = bytearray(length)
        self._read(memoryview(payload))
        return bytes(payload)

    def receive_into(self, kind: Kind, buffer: Memory) -> int:
        """Write the payload of the next frame to the start of ``buffer``, without copies, and return its length.

        A frame longer than the buffer is refused. ``buffer``: writable, contiguous.
        """
        view = _bytes_of(buffer)
        if view.readonly:
            raise InputError("a writable buffer", found="a read-only one", do="pass a bytearray or an array")
        length = self._next(kind, len(view))
        self._read(view[:length])
        return length

    def wait(self, seconds: float) -> None:
        """Wait for the next frame, and leave it to ``receive``. PING does not prolong this.

        What waits to be sent is sent first. Nothing is read of the frame but its header.
        """
        if self._met is None:
            with self.within(seconds):
                self.flush()
                self._check_open()
                self._met = self._coming("a frame")

    # The rest

    @property
    def counters(self) -> Counters:
        """Bytes and frames up to now, and the phases that have ended."""
        phases: dict[str, Phase] = {name: phase.copy() for name, phase in self._phases.items()}
        return Counters(self._bytes_sent, self._bytes_received, self._frames_sent, self._frames_received, phases)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the bytes and seconds of the block to the phase ``name``."""
        sent, received, clock = self._bytes_sent, self._bytes_received, time.perf_counter()
        try:
            yield
        finally:
            total = self._phases.setdefault(name, Phase(bytes_sent=0, bytes_received=0, seconds=0.0))
            total["bytes_sent"] += self._bytes_sent - sent
            total["bytes_received"] += self._bytes_received - received
            total["seconds"] += time.perf_counter() - clock

    @contextlib.contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """Bound the waiting of the whole block, so that a peer cannot stretch it byte by byte.

        A block inside a block has no longer than the outer one.
        """
        outer, end = self._until, time.monotonic() + seconds
        self._until = end if outer is None else min(outer, end)
        try:
            yield
        finally:
            self._until = outer
            if self._open:
                self._sock.settimeout(self.timeout)

    def detach(self) -> socket.socket:
        """Give the plain connection away, at a point where neither party has sent what the other has not read.

        Both parties must call this. The channel is closed then, but the socket is not.

        Raises:
            InputError: a channel with TLS, whose bytes mean nothing without it.
        """
        sock = self._sock
        if not isinstance(sock, socket.socket):
            do = "use DeepSeal's own engine, or a connection without TLS (loopback or a tunnel)"
            raise InputError("a plain connection", found="TLS", do=do)
        self._exact = True  # whatever the other party sends after its DONE is not ours
        self.send(Kind.DONE)
        self._next(Kind.DONE, 0)
        if self._start != self._end:
            self._fail("nothing after DONE", "more")
        self._open = False
        return sock

    def close(self) -> None:
        """Send what waits, and close. Closing twice is fine."""
        if not self._open:
            return
        try:
            self.flush()
        finally:
            self._drop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self.refuse("the other party stopped early because of an error on its side")

    # Inside

    def _next(self, expected: Kind, at_most: int) -> int:
        """Read headers up to the next frame that is no PING, check it, and return its length."""
        self.flush()
        self._check_open()
        (kind, length), self._met = self._met or self._coming(f"a frame {expected.name}"), None
        if kind != expected:
            self._fail(f"a frame {expected.name}", f"a frame {name_of(kind)}")
        if length > min(at_most, self._limit):
            self._fail(f"a frame {expected.name} of at most {min(at_most, self._limit)} bytes", f"{length} bytes")
        self._frames_received += 1
        self._bytes_received += HEADER.size + length
        return length

    def _coming(self, expected: str) -> tuple[int, int]:
        """Kind and length of the next frame that is no PING."""
        longest = tls.PATIENCE * self.timeout
        end = time.monotonic() + longest
        for _ in range(_PINGS):
            kind, length = self._header()
            if kind == Kind.REFUSED and length <= frames.REASON_LIMIT:
                self._refused(length)
            if kind != Kind.PING or length:
                return kind, length
            self._bytes_received += HEADER.size
            if time.monotonic() > end:
                self._fail(expected, f"only frames PING for {longest:g} s")
        return self._fail(expected, f"{_PINGS} frames PING in a row")

    def _header(self) -> tuple[int, int]:
        while self._end - self._start < HEADER.size:
            self._fill()
            if self._ahead[self._start : min(self._start + 2, self._end)] != frames.MAGIC[: self._end - self._start]:
                self._stranger()
        magic, kind, zero, length, number = HEADER.unpack_from(self._ahead, self._start)
        if magic != frames.MAGIC or zero:
            self._stranger()
        if number != self._number_received:
            self._fail(f"frame {self._number_received}", f"frame {number}, so one was lost, repeated or swapped")
        self._start += HEADER.size
        self._number_received += 1
        return kind, length

    def _fill(self) -> None:
        """Read ahead whatever is there."""
        if self._start:
            rest = self._end - self._start
            self._ahead[:rest] = self._ahead[self._start : self._end]
            self._start, self._end = 0, rest
        stop = self._start + HEADER.size if self._exact else len(self._ahead)
        count = self._receive_some(self._ahead_view[self._end : stop])
        if not count:
            self._hung_up("half a frame" if self._end else "a connection that it closed")
        self._end += count

    def _read(self, target: memoryview) -> None:
        done = min(len(target), self._end - self._start)
        target[:done] = self._ahead_view[self._start : self._start + done]
        self._start += done
        while done < len(target):
            count = self._receive_some(target[done:])
            if not count:
                self._hung_up("half a frame")
            done += count

    def _receive_some(self, target: memoryview) -> int:
        try:
            self._arm()
            return self._sock.recv_into(target)
        except TimeoutError:
            self.refuse(f"nothing came for {self.timeout:g} s")
            self._stalled("nothing")
        except ssl.SSLError as error:
            self._drop()
            raise tls.explained(error) from error
        except OSError as error:
            self._hung_up(f"a broken connection ({error.strerror or error})", error)

    def _write(self, body: memoryview = memoryview(b"")) -> None:  # noqa: B008
        """Send what waits, then ``body``."""
        torn, self._torn = self._torn, True
        try:
            self._put(body)
        except TimeoutError:
            self._stalled("no bytes taken from us")
        except OSError as error:
            self._last_words()
            if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
                self._drop()
                raise tls.explained(error) from error
            self._hung_up(f"a broken connection ({error.strerror or error})", error)
        self._torn = torn

    def _put(self, body: memoryview) -> None:
        head, sock = bytes(self._pending), self._sock
        if isinstance(sock, socket.socket):
            self._arm()
            count = sock.sendmsg((head, body))
            if count < len(head):
                _send_all(self._send_some, memoryview(head)[count:], self._limit)
            _send_all(self._send_some, body[max(0, count - len(head)) :], self._limit)
        else:
            offset = min(len(body), -len(head) % _BATCH)  # whole records, the first one with the header
            _send_all(self._send_some, memoryview(head + body[:offset]), _TLS_SLICE)
            _send_all(self._send_some, body[offset:], _TLS_SLICE)
        self._pending.clear()

    def _send_some(self, view: memoryview) -> int:
        self._arm()
        return self._sock.send(view)

    def _arm(self) -> None:
        """Set the time-out of the next step, which must not pass the deadline of ``within``."""
        if self._until is None:
            return
        left = tls.remaining(self.timeout, self._until)
        if isinstance(self._sock, socket.socket):
            self._sock.settimeout(left)
        else:
            self._sock.settimeout(self.timeout, self._until)

    def _last_words(self) -> None:
        """A write has failed: raise the other party's reason if it sent one before it closed."""
        end, scrap = time.monotonic() + min(_LAST_WORDS, self.timeout), memoryview(bytearray(_BATCH))
        self._until = end
        while self._open and time.monotonic() < end:
            try:
                (kind, length), self._met = self._met or self._header(), None
                if kind == Kind.REFUSED and length <= frames.REASON_LIMIT:
                    self._refused(length)
                while length and time.monotonic() < end:
                    step = min(length, len(scrap))
                    self._read(scrap[:step])
                    length -= step
            except TransportError as error:
                if isinstance(error, ProtocolError) or isinstance(error.__cause__, ssl.SSLError):
                    raise
                return

    def _refused(self, length: int) -> NoReturn:
        text = bytearray(length)
        self._read(memoryview(text))
        self._drop()
        reason = readable(text.decode("ascii", "replace"), frames.REASON_LIMIT)
        do = "settle this with the other party and start again"
        raise ProtocolError("the other party to go on", found=f"that it stopped: {reason}", do=do)

    def _stranger(self) -> NoReturn:
        found = frames.stranger(bytes(self._ahead[self._start : self._end]))
        self._fail("a DeepSeal party", found, "check the address and port, and use TLS on both sides or on neither")

    def _fail(
        self, expected: str, found: str, do: str = "use the same DeepSeal on both sides and start again"
    ) -> NoReturn:
        self.refuse(f"expected {expected}, found {found}")
        raise ProtocolError(f"{expected} from the other party", found=found, do=do)

    def _stalled(self, found: str) -> NoReturn:
        self._torn = True
        self._drop()
        do = "check that it runs and is reachable, or use a longer time-out"
        raise TransportError(f"the other party to go on within {self.timeout:g} s", found=found, do=do)

    def _hung_up(self, found: str, cause: BaseException | None = None) -> NoReturn:
        self._drop()
        do = "look at its error message and start both sides again"
        raise TransportError("the other party to stay until the end", found=found, do=do) from cause

    def _check_open(self) -> None:
        if not self._open:
            raise TransportError("an open channel", found="one that is closed", do="start a new session")

    def _drop(self, *, linger: bool = False) -> None:
        """Close the socket; with ``linger``, wait a moment for the other party to read our last frame."""
        if not self._open:
            return
        self._open = False
        self._pending.clear()
        sock = self._sock
        try:
            if isinstance(sock, tls.TlsSocket) and not self._torn:
                sock.farewell()
        finally:
            raw = sock if isinstance(sock, socket.socket) else sock.sock
            tls.wind_down(raw, seconds=min(_LAST_WORDS, self.timeout) if linger else 0)


def memory_pair(*, timeout: float, limit: int = frames.LIMIT) -> tuple[Channel, Channel]:
    """Two connected channels inside one process, for two threads."""
    left, right = socket.socketpair()
    try:
        return Channel(left, timeout=timeout, limit=limit), Channel(right, timeout=timeout, limit=limit)
    except DeepSealError:
        left.close()
        right.close()
        raise


def _bytes_of(buffer: Memory) -> memoryview:
    view = memoryview(cast("Buffer", buffer))
    if view.ndim == 1 and view.format == "B" and view.contiguous:
        return view
    return view.cast("B") if view.nbytes else memoryview(bytearray())


def _send_all(send: Callable[[memoryview], int], view: memoryview, step: int) -> None:
    done = 0
    while done < len(view):
        done += send(view[done : done + step])
