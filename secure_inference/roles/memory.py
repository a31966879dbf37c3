"""How much memory questions take, and a bound on it: labels are 16 bytes for each bit of each wire and sample."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from deepseal.errors import InputError
from deepseal.secure_inference.compile.program import Linear, Program
from deepseal.secure_inference.protocol.extension import BLOCK, refuse
from deepseal.secure_inference.transport import Channel

MOST = 4 << 30  # bytes of labels that a party's sessions hold together
_COPIES = 3  # of a layer's labels, while it is worked on


def ends(program: Program) -> tuple[tuple[int, ...], ...]:
    """For each step, the wires that no later step reads and that are not the output."""
    last: dict[int, int] = {}
    for number, step in enumerate(program.steps):
        sources = [step.source] if isinstance(step, Linear) else [operand.source for operand in step.operands]
        last.update(dict.fromkeys(sources, number))
    found: list[list[int]] = [[] for _ in program.steps]
    for wire, number in last.items():
        if wire != program.output:
            found[number].append(wire)
    return tuple(map(tuple, found))


def label_bytes(program: Program, *, shares: bool) -> int:
    """Bytes of labels that one party holds for one sample, at most, as far as they depend on the number of samples.

    ``shares``: accumulators are two words, one for each party's share, as in ``mixed``.
    """

    def size(wire: int) -> int:
        found = program.wires[wire]
        words = 2 if shares and found.kind == "accumulator" else 1
        return BLOCK * found.number.bits * found.size * words

    live = {program.input: size(program.input)}
    most = live[program.input]
    for step, over in zip(program.steps, ends(program), strict=True):
        read = [step.source] if isinstance(step, Linear) else [operand.source for operand in step.operands]
        live[step.target] = size(step.target)
        most = max(most, sum(live.values()) + (_COPIES - 1) * (live[step.target] + sum(live[wire] for wire in read)))
        for wire in over:
            live.pop(wire, None)
    return most


class Memory:
    """A bound that all sessions of a party share.

    Args:
        most: bytes.

    Raises:
        InputError: no bytes at all.
    """

    def __init__(self, most: int = MOST) -> None:
        if most < 1:
            raise InputError("some memory for labels", found=f"{most} bytes", do="allow more")
        self.most = most
        self._held, self._lock = 0, threading.Lock()

    def take(self, amount: int) -> bool:
        """Hold so many bytes more, if there is room."""
        with self._lock:
            if self._held + amount > self.most:
                return False
            self._held += amount
            return True

    def give(self, amount: int) -> None:
        """They are free again."""
        with self._lock:
            self._held -= amount

    @contextmanager
    def hold(self, channel: Channel, samples: int, each: int) -> Iterator[None]:
        """Hold what a question takes during the block; the other party is refused where there is no room.

        Raises:
            ProtocolError: no room.
        """
        self.claim(channel, samples, each)
        try:
            yield
        finally:
            self.give(samples * each)

    def claim(self, channel: Channel, samples: int, each: int) -> None:
        """Hold what a question takes until ``give``.

        Raises:
            ProtocolError: no room.
        """
        if not self.take(samples * each):
            room = self.most // each
            expected = f"at most {room} samples at once, fewer while others ask" if room else "a smaller network"
            refuse(channel, f"{expected}, for the memory here", f"{samples}")
