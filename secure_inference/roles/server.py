"""A server that answers many clients at once, each in a session of its own, and outlives every one of them."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deepseal.errors import DeepSealError, InputError, TransportError
from deepseal.secure_inference.compile.program import Program
from deepseal.secure_inference.compile.weights import Weights
from deepseal.secure_inference.protocol import base_ot
from deepseal.secure_inference.protocol.parties import Settings
from deepseal.secure_inference.roles.layers import prepare_server
from deepseal.secure_inference.roles.mixed import ServerSession
from deepseal.secure_inference.transport import Channel, Tls, listen


@dataclass(frozen=True)
class Served:
    """How one client's session went. Nothing in it depends on inputs or weights.

    Args:
        client: number of the client, from 1.
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
class Server:
    """Serves one model (mixed mode, semi-honest clients).

    Args:
        program: the public half.
        weights: the secret half.
        settings: the engine's.
        most_clients: sessions at a time; further clients are told that we are busy.
        most_questions: that one session may ask.
        most_samples: that one client may ask about while we run, in all its sessions; a client is its certificate, and
            all those without one are one client. Extracting a model takes many.
        timeout: seconds of the longest wait for a client.
        report: called when a session ends, from its thread.

    Raises:
        InputError: weights of another program.
    """

    program: Program
    weights: Weights | None = field(repr=False)
    settings: Settings = field(default_factory=Settings)
    most_clients: int = 16
    most_questions: int = 100_000
    most_samples: int | None = None
    timeout: float = 60.0
    report: Callable[[Served], None] | None = None

    def __post_init__(self) -> None:
        self._ready = prepare_server(self.program, self.weights)
        if self.most_clients < 1 or self.most_questions < 1 or (self.most_samples or 1) < 1:
            raise InputError("at least one client, question and sample", found="none", do="allow one")
        base_ot.load()
        self._stopping = threading.Event()
        self._places = threading.BoundedSemaphore(self.most_clients)
        self._threads: set[threading.Thread] = set()
        self._count = 0
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
        with listen(address, tls=tls, timeout=self.timeout, allow_plain=allow_plain) as listener:
            if ready is not None:
                ready(listener.address)
            while not self._stopping.is_set():
                try:
                    channel = listener.accept(wait=0.5)
                except TransportError as error:
                    if error.__class__ is TransportError and isinstance(error.__cause__, TimeoutError):
                        continue  # nobody came yet
                    self._tell(Served(0, 0, 0.0, 0, 0, str(error)))
                    continue
                self._count += 1
                if not self._places.acquire(blocking=False):
                    channel.refuse(f"busy with {self.most_clients} clients; try again later")
                    self._tell(Served(self._count, 0, 0.0, 0, 0, "turned away: too many clients at once"))
                    continue
                thread = threading.Thread(target=self._session, args=(channel, self._count), daemon=True)
                self._threads.add(thread)
                thread.start()
        for thread in tuple(self._threads):
            thread.join(self.timeout)

    def stop(self) -> None:
        """Take no further clients; ``serve`` returns once the present ones are done."""
        self._stopping.set()

    def _session(self, channel: Channel, client: int) -> None:
        clock, session, error = time.perf_counter(), None, None
        try:
            with channel:
                session = ServerSession(channel, self._ready, self.settings, self._allowance(channel))
                while session.answer():
                    if session.questions == self.most_questions:
                        channel.refuse(f"a session may ask {self.most_questions} questions; start a new one")
                        break
        except DeepSealError as failure:
            error = str(failure)
        except Exception as failure:
            error = f"a fault of ours: {type(failure).__name__}"
        finally:
            self._places.release()
            questions = 0
            if session is not None:
                session.erase()
                questions = session.questions
            found = channel.counters
            seconds = time.perf_counter() - clock
            self._tell(Served(client, questions, seconds, found.bytes_sent, found.bytes_received, error))
            self._threads.discard(threading.current_thread())

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

    def _tell(self, served: Served) -> None:
        if self.report is not None:
            self.report(served)
