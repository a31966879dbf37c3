"""A port where callers come, each answered in a thread of its own; it outlives every one of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from deepseal.errors import DeepSealError, InputError, TransportError
from deepseal.secure_inference.transport import Channel, Counters, Listener, Tls, listen
from deepseal.secure_inference.transport.sockets import Caller

Answers = Callable[[Channel, Callable[[], None]], None]
_BEAT = 0.5  # seconds between looks at whether to stop
_LOBBY = 64  # callers that have no place yet: they greet, or are told that we are busy


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


class Reception:
    """Takes callers until it closes.

    Args:
        answer: serves one caller on its channel, and calls its second argument for each question that it answered.
        most: callers at a time; further ones are told that we are busy.
        timeout: seconds of the longest wait for a caller.
        report: called when a caller is done, from its thread.

    Raises:
        InputError: no callers at all.
    """

    def __init__(
        self, answer: Answers, *, most: int, timeout: float, report: Callable[[Served], None] | None = None
    ) -> None:
        if most < 1:
            raise InputError("at least one client at a time", found=str(most), do="allow one")
        self._answer, self._most, self._timeout, self._report = answer, most, timeout, report
        self._places = threading.BoundedSemaphore(most)
        self._room = threading.BoundedSemaphore(most + _LOBBY)
        self._threads: set[threading.Thread] = set()
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
                for thread in tuple(self._threads):
                    thread.join(max(0.0, end - time.monotonic()))

    def _loop(self, listener: Listener, stopping: threading.Event) -> None:
        while not stopping.is_set():
            try:
                caller = listener.caller(wait=_BEAT)
            except TransportError as error:
                if not isinstance(error.__cause__, TimeoutError):  # else nobody came yet
                    self._tell(Served(0, 0, 0.0, 0, 0, str(error)))
                continue
            self._count += 1
            if not self._room.acquire(blocking=False):
                caller.close()
                self._tell(Served(self._count, 0, 0.0, 0, 0, "turned away without a word: far too many at once"))
                continue
            thread = threading.Thread(target=self._serve, args=(caller, self._count), daemon=True)
            self._threads.add(thread)
            thread.start()

    def _serve(self, caller: Caller, number: int) -> None:
        clock, error, answered = time.perf_counter(), None, [0]
        counters: Counters | None = None

        def count() -> None:
            answered[0] += 1

        try:
            channel = caller.greet()
            try:
                self._serve_greeted(channel, count)
            finally:
                counters = channel.counters
        except DeepSealError as failure:
            error = str(failure)
        except Exception as failure:
            error = f"a fault of ours: {type(failure).__name__}"
        finally:
            self._room.release()
            sent, received = (counters.bytes_sent, counters.bytes_received) if counters else (0, 0)
            self._tell(Served(number, answered[0], time.perf_counter() - clock, sent, received, error))
            self._threads.discard(threading.current_thread())

    def _serve_greeted(self, channel: Channel, count: Callable[[], None]) -> None:
        if not self._places.acquire(blocking=False):
            channel.refuse(f"busy with {self._most} clients; try again later")
            do = "allow more, or let it try again"
            raise TransportError(f"at most {self._most} clients at once", found="one more", do=do)
        try:
            with channel:
                self._answer(channel, count)
        finally:
            self._places.release()

    def _tell(self, served: Served) -> None:
        if self._report is not None:
            self._report(served)
