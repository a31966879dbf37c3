"""The proxy of constrained clients: it evaluates for them, and learns neither their inputs nor their answers.

It holds y = b xor s for each input bit b, which is uniform, takes the evaluator's part towards the server, and gives
what it has in the end to the client alone. Semi-honest, and only while it does not work together with the server:
the two of them could put an input together.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NoReturn

from deepseal.errors import InputError, ProtocolError, TransportError
from deepseal.secure_inference.compile.program import Program
from deepseal.secure_inference.protocol import base_ot
from deepseal.secure_inference.protocol.parties import Settings
from deepseal.secure_inference.roles.halves import Question, greet, receive_question, send_half
from deepseal.secure_inference.roles.layers import Prepared, prepare
from deepseal.secure_inference.roles.memory import Memory
from deepseal.secure_inference.roles.mixed import ClientSession
from deepseal.secure_inference.roles.reception import Reception, Served
from deepseal.secure_inference.transport import Channel, Tls, connect

_BEAT = 0.5  # seconds between looks at idle sessions
_LONGEST_IDLE = 20.0  # seconds; servers give up idle sessions later


@dataclass
class Proxy:
    """Evaluates for constrained clients against one server.

    Args:
        program: the public program.
        server: the server's HOST:PORT, where ordinary clients come.
        settings: the engine's; the server's must agree.
        tls: our certificate, key and CA, towards the server and the clients.
        server_name: DNS name that must be in the server's certificate; None: any certificate of the CA will do.
        allow_plain: allow no encryption beyond this machine.
        most_clients: clients at a time.
        most_sessions: sessions with the server at a time; more questions wait.
        timeout: seconds of the longest wait for a client or the server.
        report: called when a client is done, from its thread.
    """

    program: Program
    server: str
    settings: Settings = field(default_factory=Settings)
    tls: Tls | None = None
    server_name: str | None = None
    allow_plain: bool = False
    most_clients: int = 16
    most_sessions: int = 4
    timeout: float = 60.0
    report: Callable[[Served], None] | None = None

    def __post_init__(self) -> None:
        base_ot.load()
        self._ready = prepare(self.program)
        self._sessions, self._memory = _Sessions(self, self._ready), Memory()
        self._reception = Reception(self._client, most=self.most_clients, timeout=self.timeout, report=self.report)
        self._stopping = threading.Event()

    def serve(self, address: str, *, ready: Callable[[str], None] | None = None) -> None:
        """Evaluate until ``stop``.

        Args:
            address: HOST:PORT; loopback unless written out.
            ready: called with the address once clients can come.

        Raises:
            InputError: an address that cannot be used.
        """
        try:
            with self._reception.open(address, tls=self.tls, allow_plain=self.allow_plain) as where:
                if ready is not None:
                    ready(where)
                while not self._stopping.wait(_BEAT):
                    self._sessions.sweep(min(_LONGEST_IDLE, self.timeout / 3))
        finally:
            self._sessions.sweep(0.0)

    def stop(self) -> None:
        """Take no further clients; ``serve`` returns once the present ones are done."""
        self._stopping.set()

    def _client(self, channel: Channel, count: Callable[[], None]) -> None:
        greet(channel, self._ready.digest, "proxy", "client")
        while True:
            channel.wait(self.timeout)
            question = receive_question(channel, self.program)
            if question is None:
                return
            try:
                with self._memory.hold(channel, question.samples, self._ready.label_bytes):
                    half = self._sessions.ask(question)
            except InputError:
                channel.refuse("the proxy got no answer from the server; ask again later")
                raise
            if half is None:
                _refuse(channel)
            send_half(channel, half)
            count()


class _Sessions:
    """Sessions with the server: so many at a time, used again and again."""

    def __init__(self, proxy: Proxy, ready: Prepared) -> None:
        self._proxy, self._ready = proxy, ready
        if proxy.most_sessions < 1:
            raise InputError("at least one session with the server", found=str(proxy.most_sessions), do="allow one")
        self._places = threading.BoundedSemaphore(proxy.most_sessions)
        self._idle: deque[_Session] = deque()

    def ask(self, question: Question) -> bytes | None:
        """Our half of the answer; None where the server does not know the ticket.

        Raises:
            InputError: the server cannot be reached, breaks the protocol or leaves, or all sessions are in use.
        """
        if not self._places.acquire(timeout=self._proxy.timeout):
            do = "allow more sessions (--most-sessions)"
            raise TransportError(f"a free session within {self._proxy.timeout:g} s", found="none", do=do)
        try:
            stale: TransportError | None = None
            try:
                session = self._idle.pop()
            except IndexError:
                session = _Session(self._proxy, self._ready)
            else:
                try:
                    return self._asked(session, question)
                except TransportError as error:  # the server may have left since; it takes a ticket once
                    stale = error
                    session = _Session(self._proxy, self._ready)
            half = self._asked(session, question)
            if half is None and stale is not None:
                raise stale
            return half
        finally:
            self._places.release()

    def sweep(self, seconds: float) -> None:
        """Close sessions that nobody used for so long."""
        while True:
            try:
                session = self._idle.popleft()  # the longest idle
            except IndexError:
                return
            if time.monotonic() - session.used < seconds:
                self._idle.appendleft(session)
                return
            session.close()

    def _asked(self, session: _Session, question: Question) -> bytes | None:
        half = session.ask(question)
        session.used = time.monotonic()
        self._idle.append(session)
        return half


class _Session:
    def __init__(self, proxy: Proxy, ready: Prepared) -> None:
        tls = proxy.tls if proxy.tls is None else proxy.tls.expecting(proxy.server_name)
        self._program, self.used = proxy.program, time.monotonic()
        self._channel = connect(
            proxy.server, tls=tls, timeout=proxy.timeout, retry_for=0.0, allow_plain=proxy.allow_plain
        )
        try:
            self._session = ClientSession(self._channel, ready, proxy.settings)
        except BaseException:
            self._channel.refuse("the proxy stopped early")
            raise

    def ask(self, question: Question) -> bytes | None:
        try:
            return self._session.delegated(question.ticket, question.bits(self._program), question.samples)
        except BaseException:
            self._channel.refuse("the proxy stopped early")
            raise

    def close(self) -> None:
        try:
            self._session.close()
            self._channel.close()
        except TransportError:
            self._channel.refuse("the proxy stopped early")


def _refuse(channel: Channel) -> NoReturn:
    channel.refuse("the server does not know this ticket: it expired or was used, or the server takes no delegation")
    do = "let the client ask again, and check that the server was started for delegation (--delegates)"
    raise ProtocolError("a ticket that the server knows", found="another one", do=do)
