"""The offline phase: what the server sends does not depend on the client's input, so it can go ahead of the question.

The server garbles with labels k of its own choice for every bit of the client, and keeps them masked, k xor q, with
the labels q of a correlated OT on random bits r, of which the client has t = q xor r delta (Beaver, "Precomputing
oblivious transfer", CRYPTO 1995). Online the client says d = b xor r for its bit b, the server answers k xor q xor d
delta, and with t that is the label k xor b delta. What decodes the answer, colours or the server's share of the
logits, stays with the server until the end. To whoever has no label yet, tables and payloads are uniform (in the
ideal-cipher model, where labels are hashed before they are given), so an input that is chosen after seeing them gains
nothing; for garbling in general this needs proof (Bellare, Hoang, Rogaway, "Adaptively secure garbling", ASIACRYPT
2012).

A bundle belongs to one session and its offset, stays in memory, serves one question, and is overwritten then.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from deepseal import _native
from deepseal.secure_inference.compile.program import Circuit, Program
from deepseal.secure_inference.protocol.extension import BLOCK, Array, array, refuse
from deepseal.secure_inference.protocol.parties import EvaluatorParty, GarblerParty
from deepseal.secure_inference.roles.layers import CircuitLayer, LinearLayer, Prepared, Words
from deepseal.secure_inference.transport import Channel, Kind

FRAME_LABELS = 1 << 18  # labels in a frame
FRAME_BYTES = 1 << 20  # of differences in a frame


def bundle_bytes(program: Program) -> int:
    """Bytes of masks that the server keeps for a sample that was prepared, and of labels of its answer."""
    wires, read = program.wires, {program.input, program.output}
    for step in program.steps:
        if isinstance(step, Circuit):
            read.update(operand.source for operand in step.operands if wires[operand.source].kind == "accumulator")
    return sum(BLOCK * wires[wire].number.bits * wires[wire].size for wire in read)


@dataclass(eq=False)
class ServerBundle:
    """What the server keeps of a question that was prepared.

    Args:
        samples: of the question.
        masks: for each group of the client's bits, in the order of the layers: k xor q, (n, 16).
        zero: zero labels of the output, if it is labelled.
        share: our share of the output, if it is shared.
    """

    samples: int
    masks: list[Array] = field(default_factory=list, repr=False)
    zero: Array = field(default_factory=lambda: np.empty((0, BLOCK), dtype=np.uint8), repr=False)
    share: Words | None = field(default=None, repr=False)
    held: int = 0  # bytes of the memory that sessions share

    def labels(self, party: GarblerParty, n: int, out: Array | None = None) -> Array:
        """Zero labels (n, 16) of bits that the client will name later."""
        mask = party.peer_labels(n)
        zero = np.empty((n, BLOCK), dtype=np.uint8) if out is None else out
        zero[:] = _native.active_labels(party.keys, os.urandom(BLOCK), n)
        mask ^= zero
        self.masks.append(mask)
        return zero

    def answer(self, party: GarblerParty) -> None:
        """Online: give the labels of the client's bits, group by group, and overwrite what they were masked with."""
        channel = party.channel
        for mask in self.masks:
            said = np.empty(-(-len(mask) // 8), dtype=np.uint8)
            for start in range(0, len(said), FRAME_BYTES):
                part = said[start : start + FRAME_BYTES]
                if (size := channel.receive_into(Kind.OT, part)) != len(part):
                    refuse(channel, f"{len(part)} bytes of differences", f"{size}")
            differences = np.unpackbits(said, count=len(mask), bitorder="little")
            for start in range(0, len(mask), FRAME_LABELS):
                some = slice(start, start + FRAME_LABELS)
                channel.send(Kind.OT, party.offset(mask[some], differences[some]))
            channel.flush()

    def erase(self) -> None:
        """Overwrite what is secret."""
        for kept in (*self.masks, self.zero):
            kept.fill(0)
        if self.share is not None:
            self.share.fill(0)
        self.masks.clear()


@dataclass(eq=False)
class ClientBundle:
    """What the client keeps of a question that was prepared; it is read once, in the order of the layers."""

    party: EvaluatorParty = field(repr=False)
    samples: int
    frames: list[Array] = field(default_factory=list, repr=False)
    seeds: list[Array] = field(default_factory=list, repr=False)
    transfers: list[tuple[Array, Array]] = field(default_factory=list, repr=False)  # r (n,) and t (n, 16)
    _read: list[int] = field(default_factory=lambda: [0, 0, 0], repr=False)  # how many of each

    @classmethod
    def collect(cls, ready: Prepared, party: EvaluatorParty, live: Live, samples: int) -> ClientBundle:
        """Take everything that the server sends ahead for a question of that many samples."""
        bundle = cls(party, samples)
        try:
            bundle._collect(ready, live)
        except BaseException:
            bundle.erase()
            raise
        return bundle

    def _collect(self, ready: Prepared, live: Live) -> None:
        seen, program, samples = set[int](), ready.program, self.samples
        wire = program.wires[program.input]
        self._transfer(wire.number.bits * samples * wire.size)
        for layer in ready.layers:
            if isinstance(layer, LinearLayer):
                self.frames += [message.copy() for message in live.messages(layer, samples)]
                continue
            for read in layer.reads:
                if read.shared and read.wire not in seen:
                    seen.add(read.wire)
                    bits = program.wires[read.wire].number.bits * samples * program.wires[read.wire].size
                    self.seeds.append(self.party.seed())
                    self._transfer(bits)
            self.frames += [frame.copy() for frame in live.tables(layer, samples * layer.lanes)]

    def _transfer(self, n: int) -> None:
        choices = np.unpackbits(array(os.urandom(-(-n // 8))), count=n)
        self.transfers.append((choices, self.party.own_labels(choices)))

    def messages(self, layer: LinearLayer, batch: int) -> Iterator[Array]:
        """See ``Live``."""
        for _ in range(batch * len(layer.ranges)):
            yield self.frames[self._next(0)]

    def tables(self, layer: CircuitLayer, lanes: int) -> Iterator[Array]:
        """See ``Live``."""
        left = 2 * BLOCK * lanes * layer.program.plan(lanes).and_gates
        while left:
            frame = self.frames[self._next(0)]
            left -= len(frame)
            yield frame

    def theirs(self, n: int) -> Array:
        """See ``Live``."""
        return _native.active_labels(self.party.keys, self.seeds[self._next(1)].tobytes(), n)

    def ours(self, bits: Array, out: Array) -> None:
        """See ``Live``."""
        channel = self.party.channel
        choices, labels = self.transfers[self._next(2)]
        differences = np.packbits(bits ^ choices, bitorder="little")
        for start in range(0, len(differences), FRAME_BYTES):
            channel.send(Kind.OT, differences[start : start + FRAME_BYTES])
        for start in range(0, len(bits), FRAME_LABELS):
            part = out[start : start + FRAME_LABELS]
            if channel.receive_into(Kind.OT, part) != part.nbytes:
                refuse(channel, "a masked label for each bit", "fewer")
        out ^= labels

    def erase(self) -> None:
        """Overwrite everything."""
        for kept in (*self.frames, *self.seeds, *(part for transfer in self.transfers for part in transfer)):
            kept.fill(0)
        for kept_list in (self.frames, self.seeds, self.transfers):
            kept_list.clear()

    def _next(self, what: int) -> int:
        self._read[what] += 1
        return self._read[what] - 1


class Live:
    """What the server sends, from the channel, as it comes."""

    def __init__(self, channel: Channel, party: EvaluatorParty, buffer: Array) -> None:
        self._channel, self._party, self._buffer = channel, party, buffer

    def messages(self, layer: LinearLayer, batch: int) -> Iterator[Array]:
        """The messages of a linear layer, for each sample and range; each is good until the next one."""
        for _ in range(batch):
            for size in layer.frames:
                message = self._buffer[:size]
                if self._channel.receive_into(Kind.LINEAR, message) != size:
                    refuse(self._channel, f"{size} bytes of a linear layer", "fewer")
                yield message

    def tables(self, layer: CircuitLayer, lanes: int) -> Iterator[Array]:
        """The tables of a circuit, frame by frame."""
        return self._party.tables(layer.program, lanes)

    def theirs(self, n: int) -> Array:
        """Active labels (n, 16) of the server's bits."""
        return self._party.peer_labels(n)

    def ours(self, bits: Array, out: Array) -> None:
        """Active labels (n, 16) of our bits, into ``out``."""
        self._party.own_labels(bits, out=out)
