"""Where constrained clients leave one half of their questions with the server, until their proxy asks for them.

A ticket is taken once: by the first session that names it, or by the clock. It never appears in a message.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import ProtocolError
from deepseal.secure_inference.compile.program import Program
from deepseal.secure_inference.roles.halves import Question, greet, receive_question, send_half
from deepseal.secure_inference.roles.reception import Reception, Served
from deepseal.secure_inference.transport import Channel, Kind, Tls

if TYPE_CHECKING:
    from typing_extensions import Self

_REMEMBERED = 1 << 16  # tickets that were used
_BEAT = 1.0  # seconds between signs of life for a client that waits


class Half:
    """A client's half that a proxy's session has taken; the client is told of a failure unless ``tell`` was called.

    Args:
        samples: of the question.
        bits: (n,) the server's share s of each input bit.
    """

    def __init__(self, samples: int, bits: NDArray[np.uint8]) -> None:
        self.samples, self.bits = samples, bits
        self.done = threading.Event()
        self.answer: bytes | None = None
        self.reason = "the proxy's session ended early"

    def tell(self, answer: bytes) -> None:
        """The server's half of the answer, for the client alone."""
        self.answer = answer
        self.done.set()

    def fail(self, reason: str) -> None:
        """Tell the client why there is no answer."""
        self.reason = reason
        self.done.set()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.done.set()


class Desk:
    """Takes the server's halves of constrained clients' questions. Pass it to ``Server`` as ``halves``.

    Args:
        program: the public program, the same as the server's.
        most_clients: clients at a time.
        timeout: seconds of the longest wait for a client, and for the proxy to come with a ticket.
        report: called when a client is done, from its thread.
    """

    def __init__(
        self,
        program: Program,
        *,
        most_clients: int = 16,
        timeout: float = 60.0,
        report: Callable[[Served], None] | None = None,
    ) -> None:
        self._program, self._digest, self._timeout = program, program.digest(), timeout
        self._reception = Reception(self._client, most=most_clients, timeout=timeout, report=report)
        self._lock = threading.Lock()
        self._waiting: dict[bytes, Half] = {}
        self._used: OrderedDict[bytes, None] = OrderedDict()

    def open(self, address: str, *, tls: Tls | None = None, allow_plain: bool = False) -> AbstractContextManager[str]:
        """Take clients on HOST:PORT during a ``with`` block, which gets the address; see ``Reception.open``."""
        return self._reception.open(address, tls=tls, allow_plain=allow_plain)

    def take(self, ticket: bytes, samples: int) -> Half | None:
        """The half that belongs to a ticket, once; None if there is none."""
        with self._lock:
            half = self._waiting.pop(ticket, None)
        if half is not None and half.samples != samples:
            half.fail("the proxy's half has another number of samples")
            return None
        return half

    def _client(self, channel: Channel, count: Callable[[], None]) -> None:
        greet(channel, self._digest, "server", "client")
        for question in _questions(channel, self._program, self._timeout):
            half = self._register(channel, question)
            try:
                channel.send(Kind.READY)
                channel.flush()
                self._wait(channel, question.ticket, half)
            finally:
                self._withdraw(question.ticket)
            if half.answer is None:
                _refuse(channel, "the server's half of the answer", half.reason)
            else:
                send_half(channel, half.answer)
                count()

    def _register(self, channel: Channel, question: Question) -> Half:
        half = Half(question.samples, question.bits(self._program))
        with self._lock:
            fresh = question.ticket not in self._used
            if fresh:
                self._used[question.ticket] = None
                self._waiting[question.ticket] = half
                if len(self._used) > _REMEMBERED:
                    self._used.popitem(last=False)
        if not fresh:
            _refuse(channel, "a fresh ticket", "one that was used before")
        return half

    def _wait(self, channel: Channel, ticket: bytes, half: Half) -> None:
        end = time.monotonic() + self._timeout
        while not half.done.wait(min(_BEAT, self._timeout / 4)):
            channel.ping()  # fails when the client is gone
            if time.monotonic() > end and self._withdraw(ticket):
                half.fail(f"no proxy with this ticket within {self._timeout:g} s")

    def _withdraw(self, ticket: bytes) -> bool:
        """Whether nobody had taken it."""
        with self._lock:
            return self._waiting.pop(ticket, None) is not None


def _questions(channel: Channel, program: Program, seconds: float) -> Iterator[Question]:
    while True:
        channel.wait(seconds)
        question = receive_question(channel, program)
        if question is None:
            return
        yield question


def _refuse(channel: Channel, expected: str, found: str) -> NoReturn:
    channel.refuse(f"expected {expected}, found {found}")
    raise ProtocolError(expected, found=found, do="look at the proxy's messages, and ask again")
