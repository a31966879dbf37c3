"""A port where callers come, each answered in a thread of its own; it outlives every one of them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from deepseal.errors import DeepSealError, InputError, TransportError
from deepseal.secure_inference.transport import Channel, Counters, Listener, Tls, listen
from deepseal.secure_inference.transport.sockets import Caller

Answers = Callable[[Channel, Callable[[], None]], None]
_BEAT = 0.5  # seconds between looks at whether to stop
_LOBBY = 64  # callers that have no place yet: they greet, or are told that we are busy
_SHARE = 4  # one certificate gets at most one in so many places, and at least one
_MOMENT = 1.0  # seconds in which the end of a session makes room for the next one of the same certificate


@dataclass(frozen=True)
class Served:
    """How one caller fared. Nothing in it depends on inputs or weights.

    Args:
        client: number of the caller, from 1.
        questions: that were answered.
        seconds: from its connection to its end.
        bytes_sent: by us.
        bytes_received: by us.
        error: one line, or None where all went well.
    """

    client: int
    questions: int
    seconds: float
    bytes_sent: int
    bytes_received: int
    error: str | None


@dataclass
class Tally:
    """Sums over callers; any thread may add to it."""

    clients: int = 0
    questions: int = 0
    failures: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def add(self, served: Served) -> None:
        """Count one more."""
        with self._lock:
            self.clients += 1
            self.questions += served.questions
            self.failures += served.error is not None
            self.bytes_sent += served.bytes_sent
            self.bytes_received += served.bytes_received


@dataclass(eq=False)
class _Guest:
    """A caller inside. ``settled``: it may not be dropped for a newer one any more."""

    caller: Caller
    number: int
    settled: bool = False
    dropped: bool = False


class Reception:
    """Takes callers until it closes.

    A caller gets a place when it has said the first word of its session, behind the greeting of TLS. Until then it
    waits in a lobby of 64; where that is full, who has waited longest without a greeting goes.

    Args:
        answer: serves one caller on its channel, and calls its second argument for each question that it answered.
        most: callers at a time; further ones are told that we are busy. One certificate gets a quarter of the places,
            at least one; callers without certificates may take all of them.
        timeout: seconds of the longest wait for a caller.
        report: called when a caller is done, from its thread; what it raises is dropped.

    Raises:
        InputError: no callers at all.
    """

    def __init__(
        self, answer: Answers, *, most: int, timeout: float, report: Callable[[Served], None] | None = None
    ) -> None:
        if most < 1:
            raise InputError("at least one client at a time", found=str(most), do="allow one")
        self._answer, self._most, self._timeout, self._report = answer, most, timeout, report
        self._share = max(1, most // _SHARE)
        self._places = threading.BoundedSemaphore(most)
        self._changed = threading.Condition()  # guards the next three
        self._inside: dict[_Guest, None] = {}  # in the order of their coming
        self._threads: set[threading.Thread] = set()
        self._sessions: dict[bytes, int] = {}  # by certificate
        self._count = 0

    @contextmanager
    def open(self, address: str, *, tls: Tls | None = None, allow_plain: bool = False) -> Iterator[str]:
        """Take callers on HOST:PORT during the block, which gets the address; then let the present ones finish.

        Raises:
            InputError: an address that cannot be used.
        """
        stopping = threading.Event()
        with listen(address, tls=tls, timeout=self._timeout, allow_plain=allow_plain) as listener:
            loop = threading.Thread(target=self._loop, args=(listener, stopping), daemon=True)
            loop.start()
            try:
                yield listener.address
                end = time.monotonic() + self._timeout
            except BaseException:
                end = time.monotonic()
                raise
            finally:
                stopping.set()
                loop.join(_BEAT + self._timeout)
                with self._changed:
                    present = tuple(self._threads)
                for thread in present:
                    thread.join(max(0.0, end - time.monotonic()))

    def _loop(self, listener: Listener, stopping: threading.Event) -> None:
        while not stopping.is_set():
            try:
                caller = listener.caller(wait=_BEAT)
            except TransportError as error:
                if not isinstance(error.__cause__, TimeoutError):  # else nobody came yet
                    self._tell(Served(0, 0, 0.0, 0, 0, str(error)))
                    stopping.wait(_BEAT)  # no descriptors left, say: it would fail again at once
                continue
            self._count += 1
            self._welcome(_Guest(caller, self._count))

    def _welcome(self, guest: _Guest) -> None:
        """Start a thread for a caller, or hang up."""
        thread = threading.Thread(target=self._serve, args=(guest,), daemon=True)
        error = "turned away without a word: far too many at once"
        with self._changed:
            room = self._has_room()
            if room:
                self._inside[guest] = None
                self._threads.add(thread)
        if room:
            try:
                thread.start()
                return
            except (RuntimeError, MemoryError) as failure:
                error = f"turned away without a word: no thread for it ({type(failure).__name__})"
                with self._changed:
                    del self._inside[guest]
                    self._threads.discard(thread)
        guest.caller.close()
        self._tell(Served(guest.number, 0, 0.0, 0, 0, error))

    def _has_room(self) -> bool:
        """Whether one more caller can come in; drops one for it where that helps."""
        if len(self._inside) < self._most + _LOBBY:
            return True
        oldest = next((guest for guest in self._inside if not guest.settled), None)
        if oldest is None:
            return False
        oldest.dropped = True
        del self._inside[oldest]
        oldest.caller.hang_up()
        return True

    def _serve(self, guest: _Guest) -> None:
        clock, error, answered = time.perf_counter(), None, [0]
        counters: Counters | None = None

        def count() -> None:
            answered[0] += 1

        try:
            channel = guest.caller.greet()
            try:
                self._serve_greeted(guest, channel, count)
            finally:
                counters = channel.counters
        except DeepSealError as failure:
            error = str(failure)
        except Exception as failure:
            error = f"a fault of ours: {type(failure).__name__}"
        finally:
            if guest.dropped:
                error = "dropped for a newer caller before it greeted: far too many at once"
            with self._changed:
                self._inside.pop(guest, None)
            sent, received = (counters.bytes_sent, counters.bytes_received) if counters else (0, 0)
            self._tell(Served(guest.number, answered[0], time.perf_counter() - clock, sent, received, error))
            with self._changed:
                self._threads.discard(threading.current_thread())

    def _serve_greeted(self, guest: _Guest, channel: Channel, count: Callable[[], None]) -> None:
        with channel, self._share_of(channel):
            guest.settled = channel.peer_certificate is not None
            channel.wait(self._timeout)
            guest.settled = True
            if not self._places.acquire(blocking=False):
                channel.refuse(f"busy with {self._most} clients; try again later")
                do = "allow more, or let it try again"
                raise TransportError(f"at most {self._most} clients at once", found="one more", do=do)
            try:
                self._answer(channel, count)
            finally:
                self._places.release()

    @contextmanager
    def _share_of(self, channel: Channel) -> Iterator[None]:
        """Count a session of the caller's certificate while the block runs.

        Raises:
            TransportError: it has too many; the caller is told.
        """
        if channel.peer_certificate is None:
            yield
            return
        who = hashlib.sha256(channel.peer_certificate).digest()
        with self._changed:
            free = self._changed.wait_for(lambda: self._sessions.get(who, 0) < self._share, min(_MOMENT, self._timeout))
            if free:
                self._sessions[who] = self._sessions.get(who, 0) + 1
        if not free:
            channel.refuse(f"busy with {self._share} sessions of your certificate; close one, or try again later")
            do = "allow more clients, or let it try again"
            raise TransportError(f"at most {self._share} sessions of one certificate", found="one more", do=do)
        try:
            yield
        finally:
            with self._changed:
                self._sessions[who] -= 1
                if not self._sessions[who]:
                    del self._sessions[who]
                self._changed.notify_all()

    def _tell(self, served: Served) -> None:
        if self._report is not None:
            with suppress(Exception):
                self._report(served)
