"""The two parties of a garbled-circuit session over a channel: labels by oblivious transfer, tables streamed.

Semi-honest: each party learns no more than its output, if the other follows the protocol. Labels are uint8 arrays whose
last dimension is 16 bytes; bits are uint8 arrays of 0 and 1.

Both parties must make the same calls in the same order: the counters of gates and of oblivious transfers, from which
every tweak is made, go on through the whole session and never back.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from deepseal import _native
from deepseal.errors import InputError
from deepseal.secure_inference.netlist import Netlist
from deepseal.secure_inference.protocol.extension import (
    BLOCK,
    Array,
    TransferReceiver,
    TransferSender,
    TransferSettings,
    array,
    refuse,
)
from deepseal.secure_inference.transport import Channel, Hello, Kind, handshake

TABLE = 32
TABLE_FRAME = 1 << 19  # bytes of tables in a frame
_LABELS = 1 << 18  # bytes of labels that a replay keeps in the cache
_WIDE = 16  # lanes from which the netlist's own order keeps the processor busy
_REVEALED = 1 << 19  # labels in a frame
HASH = "tmmo-aes128"


@dataclass(frozen=True)
class Settings:
    """The engine's settings.

    Args:
        transfer: how labels get to the evaluator; both parties must agree.
        kernels: AES kernels to use; empty takes the fastest that this processor has. The bytes are the same.
    """

    transfer: TransferSettings = field(default_factory=TransferSettings)
    kernels: str = ""

    def __post_init__(self) -> None:
        names = _native.kernels()
        if self.kernels and self.kernels not in names:
            found = repr(self.kernels)
            raise InputError(f"kernels that run here, {', '.join(names)}", found=found, do="choose one of them")

    def parameters(self) -> dict[str, int | str]:
        """What goes into the handshake."""
        return {"hash": HASH, **self.transfer.parameters()}


class Program:
    """A netlist made ready for one lane and for many. Both parties make it from the same netlist."""

    def __init__(self, netlist: Netlist) -> None:
        self.netlist = netlist
        self._plans: dict[str, _native.Plan] = {}

    def plan(self, lanes: int) -> _native.Plan:
        """The plan for that many lanes."""
        order = "given" if lanes >= _WIDE else "depth"
        if order not in self._plans:
            n = self.netlist
            self._plans[order] = _native.Plan(n.input_bits, n.ops, n.a, n.b, n.output_wires, order)
        return self._plans[order]

    def chunk(self, lanes: int) -> int:
        """How many lanes are replayed together: as many as keep the labels in the cache."""
        return max(_WIDE, _LABELS // (BLOCK * max(1, self.plan(lanes).temporaries)) // _WIDE * _WIDE)


class GarblerParty:
    """Garbles, and holds the offset. Made by ``start_garbler``."""

    def __init__(self, channel: Channel, session: bytes, settings: Settings) -> None:
        self.channel, self.session_id = channel, session
        self.keys = _native.Session(_seed(session), settings.kernels)
        self._delta = _native.Delta()
        self._garbler = _native.Garbler(self._delta, self.keys)
        self._frame = np.empty(TABLE_FRAME, dtype=np.uint8)
        self.transfer = TransferSender(channel, session, self.keys, self._delta, settings.transfer)

    @property
    def and_gates(self) -> int:
        """AND gates garbled in this session."""
        return self._garbler.gates

    def offset(self, labels: Array, bits: Array) -> Array:
        """Each label, with the offset added where its bit is 1; the same shape."""
        flat = np.ascontiguousarray(labels).reshape(-1, BLOCK)
        return self._garbler.offset(flat, np.ascontiguousarray(bits).reshape(-1)).reshape(labels.shape)

    def constants(self, bits: Sequence[int]) -> Array:
        """Zero labels (n, 16) of public bits, whose active labels are 0: they cost nothing."""
        return self.offset(np.zeros((len(bits), BLOCK), dtype=np.uint8), np.array(bits, dtype=np.uint8))

    def linear(
        self,
        layer: _native.LinearOt,
        weights: NDArray[np.int64],
        first: int,
        last: int,
        labels: Array,
        sample: int,
        share: NDArray[np.uint64],
        message: Array,
    ) -> int:
        """Some elements of a linear layer: see ``LinearOt.send``; the number of bytes to send."""
        return layer.send(self._delta, weights, first, last, labels, sample, share, message)

    def own_labels(self, bits: Array) -> Array:
        """Zero labels (n, 16) of our bits. Costs 16 bytes, however many bits there are."""
        seed = os.urandom(BLOCK)
        with self.channel.phase("inputs"):
            self.channel.send(Kind.INPUT, seed)
        return self._garbler.own_labels(seed, bits)

    def peer_labels(self, n: int, *, out: Array | None = None) -> Array:
        """Zero labels (n, 16) of the evaluator's bits, by correlated oblivious transfer."""
        with self.channel.phase("inputs"):
            return self.transfer.correlated(n, out=out)

    def garble(self, program: Program, zero: Array, *, out: Array | None = None) -> Array:
        """Send the tables of a netlist; its outputs' zero labels, (output bits, lanes, 16).

        Args:
            program: what to garble.
            zero: (input bits, lanes, 16), the inputs' zero labels.
            out: where to put the result; fresh memory costs more time than garbling does.
        """
        lanes = zero.shape[1]
        with self.channel.phase("tables"):
            labels = np.ascontiguousarray(zero)
            run = self._garbler.garbling(program.plan(lanes), lanes, labels, program.chunk(lanes), out)
            while count := run.next(self._frame):
                self.channel.send(Kind.TABLES, self._frame[:count])
            self.channel.flush()
        return run.outputs()

    def and_own(self, a: Array, bits: Array, out: Array) -> None:
        """Zero labels (n, 16) of a and our bits, which need no labels, into ``out``: 16 bytes sent for each gate."""
        with self.channel.phase("tables"):
            for part in _half_frames(len(a)):
                tables = self._frame[: BLOCK * (part.stop - part.start)]
                self._garbler.and_own(a[part], bits[part], tables, out[part])
                self.channel.send(Kind.TABLES, tables)

    def and_peer(self, a: Array, b: Array, out: Array) -> None:
        """Zero labels (n, 16) of a and b, whose bits the evaluator knows, into ``out``: 16 bytes for each gate."""
        with self.channel.phase("tables"):
            for part in _half_frames(len(a)):
                tables = self._frame[: BLOCK * (part.stop - part.start)]
                self._garbler.and_peer(a[part], b[part], tables, out[part])
                self.channel.send(Kind.TABLES, tables)

    def reveal(self, zero: Array) -> None:
        """Let the evaluator read these wires: send their colour bits."""
        with self.channel.phase("outputs"):
            self.channel.send(Kind.OUTPUT, np.packbits(zero.reshape(-1, BLOCK)[:, 0] & 1))
            self.channel.flush()

    def learn(self, zero: Array) -> Array:
        """Bits (n,) of these wires, from the active labels that the evaluator sends.

        Raises:
            ProtocolError: a label that is neither of its wire's two.
        """
        flat = zero.reshape(-1, BLOCK)
        active = np.empty_like(flat)
        with self.channel.phase("outputs"):
            for start in range(0, len(flat), _REVEALED):
                part = active[start : start + _REVEALED]
                if self.channel.receive_into(Kind.OUTPUT, part) != part.nbytes:
                    refuse(self.channel, "an active label for each output", "fewer")
        bits = self._garbler.decode(flat, active)
        if bits is None:
            refuse(self.channel, "active labels of this circuit", "others")
        return bits


class EvaluatorParty:
    """Evaluates. Made by ``start_evaluator``."""

    def __init__(self, channel: Channel, session: bytes, settings: Settings) -> None:
        self.channel, self.session_id = channel, session
        self.keys = _native.Session(_seed(session), settings.kernels)
        self._evaluator = _native.Evaluator(self.keys)
        self._frame = np.empty(TABLE_FRAME, dtype=np.uint8)
        self.transfer = TransferReceiver(channel, session, self.keys, settings.transfer)

    @property
    def and_gates(self) -> int:
        """AND gates evaluated in this session."""
        return self._evaluator.gates

    def constants(self, bits: Sequence[int]) -> Array:
        """Active labels (n, 16) of public bits."""
        return np.zeros((len(bits), BLOCK), dtype=np.uint8)

    def peer_labels(self, n: int) -> Array:
        """Active labels (n, 16) of the garbler's bits."""
        return _native.active_labels(self.keys, self.seed().tobytes(), n)

    def seed(self) -> Array:
        """The seed of active labels of the garbler's bits, (16,)."""
        seed = np.empty(BLOCK, dtype=np.uint8)
        with self.channel.phase("inputs"):
            if (size := self.channel.receive_into(Kind.INPUT, seed)) != BLOCK:
                refuse(self.channel, f"a seed of {BLOCK} bytes", f"{size}")
        return seed

    def own_labels(self, bits: Array, *, out: Array | None = None) -> Array:
        """Active labels (n, 16) of our bits, by correlated oblivious transfer: 128 / k bits sent for each."""
        with self.channel.phase("inputs"):
            return self.transfer.correlated(bits, out=out)

    def evaluate(
        self, program: Program, active: Array, *, out: Array | None = None, tables: Iterable[Array] | None = None
    ) -> Array:
        """Take the tables of a netlist; its outputs' active labels, (output bits, lanes, 16).

        Args:
            program: the garbler's.
            active: (input bits, lanes, 16), the inputs' active labels.
            out: where to put the result.
            tables: frames of tables that came before; otherwise they are received now.
        """
        lanes = active.shape[1]
        with self.channel.phase("tables"):
            labels = np.ascontiguousarray(active)
            run = self._evaluator.evaluation(program.plan(lanes), lanes, labels, program.chunk(lanes), out)
            for frame in self.tables(program, lanes) if tables is None else tables:
                run.next(frame)
        return run.outputs()

    def tables(self, program: Program, lanes: int) -> Iterator[Array]:
        """Receive the tables of a netlist, frame by frame; each is good until the next one."""
        left = program.plan(lanes).and_gates * lanes
        while left:
            wanted = min(TABLE * left, TABLE_FRAME)
            if (count := self.channel.receive_into(Kind.TABLES, self._frame)) != wanted:
                refuse(self.channel, f"{wanted} bytes of tables", f"{count}")
            left -= count // TABLE
            yield self._frame[:count]

    def and_peer(self, a: Array, out: Array) -> None:
        """Active labels (n, 16) of a and the garbler's bits into ``out``; a: (n, 16)."""
        with self.channel.phase("tables"):
            for part in _half_frames(len(a)):
                self._evaluator.and_peer(a[part], self._half_tables(part), out[part])

    def and_own(self, a: Array, b: Array, bits: Array, out: Array) -> None:
        """Active labels (n, 16) of a and b, whose bits we know, into ``out``."""
        with self.channel.phase("tables"):
            for part in _half_frames(len(a)):
                self._evaluator.and_own(a[part], b[part], bits[part], self._half_tables(part), out[part])

    def _half_tables(self, part: slice) -> Array:
        tables = self._frame[: BLOCK * (part.stop - part.start)]
        if self.channel.receive_into(Kind.TABLES, tables) != len(tables):
            refuse(self.channel, f"{len(tables)} bytes of half gates", "fewer")
        return tables

    def reveal(self, active: Array) -> Array:
        """Bits (n,) of these wires, from the colour bits that the garbler sends."""
        colours: Array = active.reshape(-1, BLOCK)[:, 0] & np.uint8(1)
        size = -(-len(colours) // 8)
        with self.channel.phase("outputs"):
            packed = self.channel.receive(Kind.OUTPUT, at_most=size)
        if len(packed) != size:
            refuse(self.channel, f"{size} bytes of colour bits", f"{len(packed)}")
        bits: Array = colours ^ np.unpackbits(array(packed), count=len(colours))
        return bits

    def tell(self, active: Array) -> None:
        """Let the garbler read these wires: send the active labels, which nobody can make up."""
        flat = np.ascontiguousarray(active.reshape(-1, BLOCK))
        with self.channel.phase("outputs"):
            for start in range(0, len(flat), _REVEALED):
                self.channel.send(Kind.OUTPUT, flat[start : start + _REVEALED])
            self.channel.flush()


def _half_frames(n: int) -> Iterator[slice]:
    """The half gates whose tables make a frame."""
    for start in range(0, n, TABLE_FRAME // BLOCK):
        yield slice(start, min(start + TABLE_FRAME // BLOCK, n))


def start_garbler(
    channel: Channel,
    *,
    program: str,
    number: str | None = None,
    parameters: Mapping[str, int | str],
    settings: Settings,
) -> GarblerParty:
    """Handshake and base oblivious transfer, as garbler.

    Args:
        channel: a fresh channel.
        program: digest of what both will run.
        number: the number format.
        parameters: further settings that must agree.
        settings: the engine's.

    Raises:
        ProtocolError: the other party runs something else, or breaks the protocol.
        TransportError: it hangs up or stalls.
    """
    hello = Hello("garbler", program, "native", number, {**parameters, **settings.parameters()})
    return GarblerParty(channel, handshake(channel, hello).id, settings)


def start_evaluator(
    channel: Channel,
    *,
    program: str,
    number: str | None = None,
    parameters: Mapping[str, int | str],
    settings: Settings,
) -> EvaluatorParty:
    """Handshake and base oblivious transfer, as evaluator; see ``start_garbler``."""
    hello = Hello("evaluator", program, "native", number, {**parameters, **settings.parameters()})
    return EvaluatorParty(channel, handshake(channel, hello).id, settings)


def _seed(session: bytes) -> bytes:
    return hashlib.sha256(b"deepseal engine 1" + session).digest()[:BLOCK]
