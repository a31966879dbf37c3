"""A third party on the line that sees whole frames and may change, drop, repeat or swap them; and a dealt base OT."""

from __future__ import annotations

import contextlib
import os
import select
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from parties import together

from deepseal.secure_inference.protocol.circuit import run_circuit
from deepseal.secure_inference.transport import Channel, Kind
from deepseal.secure_inference.transport.frames import HEADER, MAGIC

ROLES = ("garbler", "evaluator")


@dataclass(frozen=True)
class Frame:
    """A frame as its sender wrote it."""

    kind: int
    payload: bytes
    number: int

    def packed(self) -> bytes:
        return HEADER.pack(MAGIC, self.kind, 0, len(self.payload), self.number) + self.payload


Change = Callable[[str, int, Frame], Sequence[Frame | bytes]]


def honest(_sender: str, _index: int, frame: Frame) -> list[Frame | bytes]:
    return [frame]


@dataclass
class Relay:
    """Passes on what each side sends: ``change(sender, index, frame)`` says what becomes of a frame.

    Frames get new numbers, as an attacker would give them, unless ``numbers`` is False; bytes go as they are.
    """

    change: Change = honest
    numbers: bool = True
    seen: dict[str, list[Frame]] = field(default_factory=lambda: {role: [] for role in ROLES})

    def run(self, garbler: socket.socket, evaluator: socket.socket) -> None:
        ends = dict(zip(ROLES, (garbler, evaluator), strict=True))
        waiting, sent = {role: b"" for role in ROLES}, dict.fromkeys(ROLES, 0)
        reading = set(ROLES)
        while reading:
            ready, _, _ = select.select([ends[role] for role in reading], [], [], 20)
            assert ready, "a side hangs"
            for sender in [role for role in reading if ends[role] in ready]:
                other = ends[ROLES[1 - ROLES.index(sender)]]
                data = _received(ends[sender])
                if not data:
                    reading.discard(sender)
                    with contextlib.suppress(OSError):
                        other.shutdown(socket.SHUT_WR)
                waiting[sender] += data
                out = b""
                while (taken := self._take(sender, waiting[sender])) is not None:
                    items, waiting[sender] = taken
                    for item in items:
                        if isinstance(item, Frame):
                            number = sent[sender] if self.numbers else item.number
                            item = Frame(item.kind, item.payload, number).packed()
                            sent[sender] += 1
                        out += item
                with contextlib.suppress(OSError):
                    other.sendall(out)

    def _take(self, sender: str, data: bytes) -> tuple[Sequence[Frame | bytes], bytes] | None:
        if len(data) < HEADER.size:
            return None
        _, kind, _, length, number = HEADER.unpack_from(data)
        end = HEADER.size + length
        if len(data) < end:
            return None
        frame = Frame(kind, data[HEADER.size : end], number)
        self.seen[sender].append(frame)
        return self.change(sender, len(self.seen[sender]) - 1, frame), data[end:]


def _received(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except OSError:
        return b""


def meddled(relay: Relay, garbler: Callable, evaluator: Callable, *, timeout: float = 10) -> list[object]:
    """What both sides return or raise when they talk through the relay. Channels are closed at the end."""
    pairs = [socket.socketpair() for _ in ROLES]
    channels = [Channel(pair[0], timeout=timeout) for pair in pairs]

    def passing() -> None:
        try:
            relay.run(pairs[0][1], pairs[1][1])
        finally:
            for pair in pairs:
                pair[1].close()

    def side(part: Callable, channel: Channel) -> Callable[[], object]:
        def run() -> object:
            with channel:
                return part(channel)

        return run

    one, done, two = together(side(garbler, channels[0]), passing, side(evaluator, channels[1]))
    if isinstance(done, BaseException):
        raise done
    return [one, two]


def party_of(role: str, netlist, values, **options) -> Callable[[Channel], object]:
    """One side of a circuit, for a channel."""
    return lambda channel: run_circuit(channel, role, netlist, values, **options)


class Dealt:
    """A base OT without security, for tests that need thousands of sessions: the sender tells both keys."""

    name = "dealt-in-tests"

    def offer(self, channel: Channel, session: bytes) -> NDArray[np.uint8]:
        pairs = np.frombuffer(os.urandom(128 * 32), dtype=np.uint8).reshape(128, 2, 16)
        channel.send(Kind.BASE_OT, pairs)
        channel.flush()
        return pairs

    def choose(self, channel: Channel, session: bytes, select: Callable) -> NDArray[np.uint8]:
        data = channel.receive(Kind.BASE_OT, at_most=128 * 32)
        if len(data) != 128 * 32:
            channel.refuse("expected 128 pairs of keys, found another number of them")
            raise ValueError("expected 128 pairs of keys")
        pairs = np.frombuffer(data, dtype=np.uint8).reshape(128, 2, 16)
        return select(np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1]))
