"""A server that answers many clients at once, each in a session of its own, and outlives every one of them."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deepseal.errors import InputError
from deepseal.secure_inference.compile.program import Program
from deepseal.secure_inference.compile.weights import Weights
from deepseal.secure_inference.protocol import base_ot
from deepseal.secure_inference.protocol.parties import Settings
from deepseal.secure_inference.roles.memory import MOST, Memory
from deepseal.secure_inference.roles.modes import server_ready, start_server
from deepseal.secure_inference.roles.reception import Reception, Served
from deepseal.secure_inference.transport import Channel, Tls

if TYPE_CHECKING:
    from deepseal.secure_inference.roles.desk import Desk


@dataclass
class Server:
    """Serves one model to semi-honest clients.

    Args:
        program: the public half.
        weights: the secret half.
        protocol: ``mixed``, ``yao`` or ``yao-client``; see ``modes``.
        settings: the engine's.
        most_clients: sessions at a time, a quarter of them for one certificate; further clients are told that we are
            busy.
        most_questions: that one session may ask.
        most_samples: that one client may ask about while we run, in all its sessions; a client is its certificate, and
            all those without one are one client. Extracting a model takes many.
        most_memory: bytes of labels that all sessions hold together; larger questions are refused.
        timeout: seconds of the longest wait for a client.
        report: called when a session ends, from its thread.
        halves: where constrained clients leave the halves of their questions; see ``delegate``.

    Raises:
        InputError: weights of another program, or an unknown protocol.
    """

    program: Program
    weights: Weights | None = field(repr=False)
    protocol: str = "mixed"
    settings: Settings = field(default_factory=Settings)
    most_clients: int = 16
    most_questions: int = 100_000
    most_samples: int | None = None
    most_memory: int = MOST
    timeout: float = 60.0
    report: Callable[[Served], None] | None = None
    halves: Desk | None = None

    def __post_init__(self) -> None:
        if self.halves is not None and self.protocol != "mixed":
            raise InputError(
                "the protocol mixed for delegation", found=self.protocol, do="serve mixed, or no delegates"
            )
        self._ready = server_ready(self.program, self.weights, self.protocol)
        if self.most_clients < 1 or self.most_questions < 1 or (self.most_samples or 1) < 1:
            raise InputError("at least one client, question and sample", found="none", do="allow one")
        base_ot.load()
        self._stopping = threading.Event()
        self._reception = Reception(self._client, most=self.most_clients, timeout=self.timeout, report=self.report)
        self._memory = Memory(self.most_memory)
        self._lock = threading.Lock()
        self._asked: dict[bytes, int] = {}  # samples, by certificate

    def serve(
        self,
        address: str,
        *,
        tls: Tls | None = None,
        allow_plain: bool = False,
        ready: Callable[[str], None] | None = None,
    ) -> None:
        """Answer clients until ``stop``.

        Args:
            address: HOST:PORT; loopback unless written out.
            tls: our certificate, key and CA.
            allow_plain: allow no encryption beyond this machine.
            ready: called with the address once clients can come.

        Raises:
            InputError: an address that cannot be used.
        """
        with self._reception.open(address, tls=tls, allow_plain=allow_plain) as where:
            if ready is not None:
                ready(where)
            self._stopping.wait()

    def stop(self) -> None:
        """Take no further clients; ``serve`` returns once the present ones are done."""
        self._stopping.set()

    def _client(self, channel: Channel, count: Callable[[], None]) -> None:
        allows = self._allowance(channel)
        session = start_server(channel, self._ready, self.settings, self.protocol, allows, self.halves, self._memory)
        try:
            answered = 0
            channel.wait(self.timeout)  # for a request; PING does not prolong it
            while session.answer():
                for _ in range(session.questions - answered):
                    count()
                answered = session.questions
                if answered >= self.most_questions:
                    channel.refuse(f"a session may ask {self.most_questions} questions; start a new one")
                    break
                channel.wait(self.timeout)
        finally:
            session.erase()

    def _allowance(self, channel: Channel) -> Callable[[int], bool]:
        who = hashlib.sha256(channel.peer_certificate or b"").digest()

        def allows(samples: int) -> bool:
            with self._lock:
                asked = self._asked.get(who, 0) + samples
                if self.most_samples is not None and asked > self.most_samples:
                    return False
                self._asked[who] = asked
                return True

        return allows
