"""A client that asks a server about inputs that the server does not see."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from deepseal.secure_inference.compile.program import Program
from deepseal.secure_inference.compile.simulate import decode_output, encode_input
from deepseal.secure_inference.protocol import base_ot
from deepseal.secure_inference.protocol.parties import Settings
from deepseal.secure_inference.roles.answers import MOST_SAMPLES, Answer
from deepseal.secure_inference.roles.memory import MOST
from deepseal.secure_inference.roles.modes import Ready, client_ready, start_client
from deepseal.secure_inference.roles.walk import Progress
from deepseal.secure_inference.transport import Channel, Counters, Tls, connect

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True)
class Cost:
    """What a part of a session took."""

    seconds: float
    bytes_sent: int
    bytes_received: int


class Client:
    """A session with a server; use it in a ``with`` block.

    Args:
        program: the public program, the same as the server's, or what ``modes.client_ready`` made of it.
        channel: a fresh channel.
        protocol: the server's: ``mixed``, ``yao`` or ``yao-client``.
        settings: the engine's; the server's must agree.
        progress: called with the number of layers that are done, and of all, during each question.

    Raises:
        ProtocolError: the server runs another program, or breaks the protocol.
        TransportError: it hangs up or stalls.
    """

    def __init__(
        self,
        program: Program | Ready,
        channel: Channel,
        *,
        protocol: str = "mixed",
        settings: Settings | None = None,
        progress: Progress | None = None,
    ) -> None:
        base_ot.load()
        ready = client_ready(program, protocol)
        clock = time.perf_counter()
        self._program, self._channel = ready.program, channel
        self._session = start_client(channel, ready, settings or Settings(), protocol, progress)
        self._at_once = max(1, min(MOST_SAMPLES, MOST // 2 // ready.label_bytes))
        self._prepared = 0
        self.setup_seconds = time.perf_counter() - clock

    @classmethod
    def connect(
        cls,
        program: Program | Ready,
        address: str,
        *,
        protocol: str = "mixed",
        tls: Tls | None = None,
        settings: Settings | None = None,
        progress: Progress | None = None,
        timeout: float = 60.0,
        retry_for: float = 10.0,
        allow_plain: bool = False,
    ) -> Client:
        """Connect to a server; ``setup_seconds`` then holds the connection, too."""
        base_ot.load()
        ready = client_ready(program, protocol)
        clock = time.perf_counter()
        channel = connect(address, tls=tls, timeout=timeout, retry_for=retry_for, allow_plain=allow_plain)
        connected = time.perf_counter() - clock
        try:
            client = cls(ready, channel, protocol=protocol, settings=settings, progress=progress)
        except BaseException:
            channel.refuse("the client stopped early")
            raise
        client.setup_seconds += connected
        return client

    @property
    def counters(self) -> Counters:
        """Bytes and seconds up to now, by layer."""
        return self._channel.counters

    def samples_of(self, x: ArrayLike) -> int:
        """How many samples these are: N of (N, …), or 1 without N."""
        shape = np.shape(x)
        return 1 if shape == self._program.sample_shape else (shape[0] if shape else 1)

    def prepare(self, samples: int = 1) -> Cost:
        """The offline phase of one question of that many samples: whatever does not depend on its input.

        Prepared questions are asked in the same order; all of them before one that is not prepared. What was prepared
        stays in memory (about the bytes of the answer's ``bytes_received``) until it is used or the session ends.

        Raises:
            InputError: too many samples at a time, or a protocol that cannot.
        """
        with _Measured(self._channel) as measured:
            self._session.prepare(samples)
        self._prepared += 1
        return measured.cost

    def ask(self, x: ArrayLike, *, clamp: bool = True) -> Answer:
        """The model's answer on samples in data space, (N, …) or one without N.

        More samples than fit into memory are several questions, one after the other.

        Raises:
            InputError: another shape, NaN, or values out of range with ``clamp=False``.
        """
        encoded = encode_input(self._program, x, clamp=clamp)
        at_once = len(encoded.values) if self._prepared else self._at_once
        with _Measured(self._channel) as measured:
            parts = [
                self._session.ask(encoded.values[start : start + at_once])
                for start in range(0, max(1, len(encoded.values)), at_once)
            ]
        self._prepared = max(0, self._prepared - 1)
        values = np.concatenate(parts)
        cost = measured.cost
        decoded = decode_output(self._program, values)
        return Answer(decoded, encoded.clamped, cost.seconds, cost.bytes_sent, cost.bytes_received)

    def close(self) -> None:
        """End the session."""
        self._session.close()
        self._channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._session.erase()
            self._channel.refuse("the client stopped early")


class _Measured:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def __enter__(self) -> Self:
        self._before, self._clock = self._channel.counters, time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        seconds, after = time.perf_counter() - self._clock, self._channel.counters
        sent, received = (after.bytes_sent, after.bytes_received)
        self.cost = Cost(seconds, sent - self._before.bytes_sent, received - self._before.bytes_received)
