"""What a constrained client, the server and the proxy send each other, and how large it is.

The client's bits b go as b xor s to the proxy and as s to the server, each with the same ticket; each answers with its
half: colour bits of the output's labels to be XORed, or a share of the output to be added.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import Literal, NoReturn

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import ProtocolError
from deepseal.secure_inference.compile.program import Program
from deepseal.secure_inference.roles.answers import MOST_SAMPLES, from_bits, from_shares
from deepseal.secure_inference.transport import Channel, Hello, Kind, handshake

PROTOCOL = "delegated-1"
SECURITY = "semi-honest, if the proxy and the server do not work together"
TICKET = 16
_QUESTION = struct.Struct(f"<{TICKET}sI")  # and the number of samples, 0 for no more questions
_FRAME = 1 << 20


@dataclass(frozen=True)
class Question:
    """One half of a question.

    Args:
        ticket: 16 random bytes, the same in both halves, never used again.
        samples: of the question.
        share: this half's share of the input bits, packed from the lowest bit, in the order of the labels.
    """

    ticket: bytes = field(repr=False)
    samples: int
    share: bytes = field(repr=False)

    def bits(self, program: Program) -> NDArray[np.uint8]:
        """The share's bits, (n,)."""
        packed = np.frombuffer(self.share, dtype=np.uint8)
        return np.unpackbits(packed, count=input_bits(program, self.samples), bitorder="little")


def input_bits(program: Program, samples: int) -> int:
    """Bits of the input."""
    wire = program.wires[program.input]
    return wire.number.bits * samples * wire.size


def pack_input(program: Program, x: NDArray[np.int64]) -> bytes:
    """Bits of (N, …) integers of the input wire, the lowest bit of every element first, eight in a byte."""
    places = np.arange(program.wires[program.input].number.bits).reshape(-1, 1)
    return np.packbits((x.reshape(1, -1) >> places & 1).astype(np.uint8), bitorder="little").tobytes()


def join(program: Program, one: bytes, other: bytes, samples: int) -> NDArray[np.int64]:
    """The output wire's integers, (N, …), from both halves of the answer."""
    if _is_shared(program):
        return from_shares(program, np.frombuffer(one, "<u8"), np.frombuffer(other, "<u8"), samples)
    wire = program.wires[program.output]
    packed = np.frombuffer(one, np.uint8) ^ np.frombuffer(other, np.uint8)
    bits = np.unpackbits(packed, count=wire.number.bits * samples * wire.size, bitorder="little")
    return from_bits(program, bits, samples)


def greet(channel: Channel, program: str, role: Literal["server", "proxy", "client"], partner: str) -> None:
    """The handshake between a constrained client and one of its two sides.

    Args:
        channel: a fresh channel.
        program: its digest.
        role: ours.
        partner: the other party's.

    Raises:
        ProtocolError: another role, or another program.
        TransportError: it hangs up or stalls.
    """
    handshake(channel, Hello(role, program, "delegated", None, {"protocol": PROTOCOL}), partner=partner)


def send_question(channel: Channel, question: Question) -> None:
    """Send one half of a question."""
    channel.send(Kind.INPUT, _QUESTION.pack(question.ticket, question.samples))
    _send(channel, Kind.INPUT, question.share)


def send_end(channel: Channel) -> None:
    """Tell that no more questions come."""
    channel.send(Kind.INPUT, _QUESTION.pack(bytes(TICKET), 0))
    channel.flush()


def receive_question(channel: Channel, program: Program) -> Question | None:
    """The next half of a question; None when no more come.

    Raises:
        ProtocolError: a question that is not allowed.
    """
    head = channel.receive(Kind.INPUT, at_most=_QUESTION.size)
    if len(head) != _QUESTION.size:
        _refuse(channel, f"a question of {_QUESTION.size} bytes", f"{len(head)}")
    ticket, samples = _QUESTION.unpack(head)
    if samples == 0:
        return None
    if samples > MOST_SAMPLES:
        _refuse(channel, f"a question of 1 to {MOST_SAMPLES} samples", f"{samples}")
    return Question(ticket, samples, _receive(channel, Kind.INPUT, -(-input_bits(program, samples) // 8)))


def send_half(channel: Channel, half: bytes) -> None:
    """Send one half of an answer."""
    _send(channel, Kind.OUTPUT, half)


def receive_half(channel: Channel, program: Program, samples: int) -> bytes:
    """One half of an answer.

    Raises:
        ProtocolError: of another size.
    """
    wire = program.wires[program.output]
    size = 8 * samples * wire.size if _is_shared(program) else -(-wire.number.bits * samples * wire.size // 8)
    return _receive(channel, Kind.OUTPUT, size)


def _is_shared(program: Program) -> bool:
    return program.wires[program.output].kind == "accumulator"


def _send(channel: Channel, kind: Kind, data: bytes) -> None:
    for start in range(0, len(data), _FRAME):
        channel.send(kind, data[start : start + _FRAME])
    channel.flush()


def _receive(channel: Channel, kind: Kind, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        wanted = min(_FRAME, size - len(data))
        part = channel.receive(kind, at_most=wanted)
        if len(part) != wanted:
            _refuse(channel, f"{wanted} bytes of a half", f"{len(part)}")
        data += part
    return bytes(data)


def _refuse(channel: Channel, expected: str, found: str) -> NoReturn:
    channel.refuse(f"expected {expected}, found {found}")
    do = "use the same DeepSeal on both sides and start again"
    raise ProtocolError(f"{expected} from the other party", found=found, do=do)
