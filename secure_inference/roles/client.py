"""A client that asks a server about inputs that the server does not see."""

from __future__ import annotations

import time
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepseal.secure_inference.compile.program import Program
from deepseal.secure_inference.compile.simulate import decode_output, encode_input
from deepseal.secure_inference.protocol import base_ot
from deepseal.secure_inference.protocol.parties import Settings
from deepseal.secure_inference.roles.layers import prepare
from deepseal.secure_inference.roles.mixed import ClientSession
from deepseal.secure_inference.transport import Channel, Counters, Tls, connect

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclass(frozen=True, eq=False)
class Answer:
    """What the client learns.

    Args:
        values: labels (N,) as integers, or logits (N, classes).
        clamped: input values that were outside the program's range and became the nearest value inside.
        seconds: from the question to the answer, without the set-up of the session.
        bytes_sent: for this question.
        bytes_received: for this question.
    """

    values: NDArray[np.int64] | NDArray[np.float64]
    clamped: int
    seconds: float
    bytes_sent: int
    bytes_received: int


class Client:
    """A session with a server; use it in a ``with`` block.

    Args:
        program: the public program, the same as the server's.
        channel: a fresh channel.
        settings: the engine's; the server's must agree.

    Raises:
        ProtocolError: the server runs another program, or breaks the protocol.
        TransportError: it hangs up or stalls.
    """

    def __init__(self, program: Program, channel: Channel, *, settings: Settings | None = None) -> None:
        base_ot.load()
        ready = prepare(program)
        clock = time.perf_counter()
        self._program, self._channel = program, channel
        self._session = ClientSession(channel, ready, settings or Settings())
        self.setup_seconds = time.perf_counter() - clock

    @classmethod
    def connect(
        cls,
        program: Program,
        address: str,
        *,
        tls: Tls | None = None,
        settings: Settings | None = None,
        timeout: float = 60.0,
        retry_for: float = 10.0,
        allow_plain: bool = False,
    ) -> Client:
        """Connect to a server; ``setup_seconds`` then holds the connection, too."""
        base_ot.load()
        clock = time.perf_counter()
        channel = connect(address, tls=tls, timeout=timeout, retry_for=retry_for, allow_plain=allow_plain)
        connected = time.perf_counter() - clock
        try:
            client = cls(program, channel, settings=settings)
        except BaseException:
            channel.refuse("the client stopped early")
            raise
        client.setup_seconds += connected
        return client

    @property
    def counters(self) -> Counters:
        """Bytes and seconds up to now, by layer."""
        return self._channel.counters

    def ask(self, x: ArrayLike, *, clamp: bool = True) -> Answer:
        """The model's answer on samples in data space, (N, …) or one without N.

        Raises:
            InputError: another shape, NaN, or values out of range with ``clamp=False``.
        """
        encoded = encode_input(self._program, x, clamp=clamp)
        before, clock = self._channel.counters, time.perf_counter()
        values = self._session.ask(encoded.values)
        seconds, after = time.perf_counter() - clock, self._channel.counters
        return Answer(
            decode_output(self._program, values),
            encoded.clamped,
            seconds,
            after.bytes_sent - before.bytes_sent,
            after.bytes_received - before.bytes_received,
        )

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
            self._channel.refuse("the client stopped early")
