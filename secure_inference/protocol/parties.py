"""The two parties of a garbled-circuit session over a channel: labels by oblivious transfer, tables streamed.

Semi-honest: each party learns no more than its output, if the other follows the protocol. Labels are uint8 arrays whose
last dimension is 16 bytes; bits are uint8 arrays of 0 and 1.

Both parties must make the same calls in the same order: the counters of gates and of oblivious transfers, from which
every tweak is made, go on through the whole session and never back.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from deepseal import _native
from deepseal.errors import InputError, ProtocolError
from deepseal.secure_inference.netlist import Netlist
from deepseal.secure_inference.protocol.base_ot import BaseOt, ChouOrlandi
from deepseal.secure_inference.transport import Channel, Hello, Kind, handshake

Array = NDArray[np.uint8]
BLOCK = 16
TABLE = 32
_FRAME = 1 << 18  # bytes of tables in a frame: stays in the cache from garbling to sending
_LABELS = 1 << 17  # bytes of labels that a replay keeps in the cache
_WIDE = 16  # lanes from which the netlist's own order keeps the processor busy
_TRANSFERS = 1 << 20  # oblivious transfers in a frame
HASH = "tmmo-aes128"


@dataclass(frozen=True)
class Settings:
    """What both parties must agree on.

    Args:
        ot_k: bits of the offset that each tree of SoftSpoken takes, 1 to 8; 1 is IKNP.
        base_ot: where the first 128 oblivious transfers come from.
        kernels: AES kernels to use; empty takes the fastest that this processor has. The bytes are the same.
    """

    ot_k: int = 2
    base_ot: BaseOt = field(default_factory=ChouOrlandi)
    kernels: str = ""

    def parameters(self) -> dict[str, int | str]:
        """What goes into the handshake."""
        return {"hash": HASH, "ot": f"softspoken-{self.ot_k}", "base_ot": self.base_ot.name}


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

    def chunks(self, lanes: int) -> list[tuple[int, int]]:
        """The lanes that are replayed together, as (start, stop): as many as keep the labels in the cache."""
        size = max(_WIDE, _LABELS // (BLOCK * max(1, self.plan(lanes).slots)) // _WIDE * _WIDE)
        return [(start, min(start + size, lanes)) for start in range(0, lanes, size)]


class GarblerParty:
    """Garbles, and holds the offset. Made by ``start_garbler``."""

    def __init__(self, channel: Channel, session: bytes, settings: Settings) -> None:
        self.channel, self.session_id = channel, session
        self._keys = _native.Session(_seed(session), settings.kernels)
        self._delta = _native.Delta()
        self._garbler = _native.Garbler(self._delta, self._keys)
        self._frame = np.empty(_FRAME, dtype=np.uint8)
        with channel.phase("base-ot"):
            chosen = settings.base_ot.choose(channel, session, self._delta.choose)
            opening = channel.receive(Kind.BASE_OT, at_most=1 << 16)
        with _checked(channel):
            self._sender = _native.CotSender(self._keys, settings.ot_k, self._delta, chosen, _array(opening))

    @property
    def and_gates(self) -> int:
        """AND gates garbled in this session."""
        return self._garbler.gates

    def own_labels(self, bits: Array) -> Array:
        """Zero labels (n, 16) of our bits. Costs 16 bytes, however many bits there are."""
        seed = os.urandom(BLOCK)
        with self.channel.phase("inputs"):
            self.channel.send(Kind.INPUT, seed)
        return self._garbler.own_labels(seed, bits)

    def peer_labels(self, n: int) -> Array:
        """Zero labels (n, 16) of the evaluator's bits, by correlated oblivious transfer."""
        labels = np.empty((n, BLOCK), dtype=np.uint8)
        with self.channel.phase("inputs"), _checked(self.channel):
            for start in range(0, n, _TRANSFERS):
                count = min(_TRANSFERS, n - start)
                size = self._sender.correction_bytes(count)
                corrections = self.channel.receive(Kind.OT, at_most=size)
                labels[start : start + count] = self._sender.extend(_array(corrections), count)
        return labels

    def garble(self, program: Program, zero: Array) -> Array:
        """Send the tables of a netlist; its outputs' zero labels, (output bits, lanes, 16).

        Args:
            program: what to garble.
            zero: (input bits, lanes, 16), the inputs' zero labels.
        """
        lanes = zero.shape[1]
        plan = program.plan(lanes)
        results = []
        with self.channel.phase("tables"):
            for start, stop in program.chunks(lanes):
                run = self._garbler.garbling(plan, stop - start, np.ascontiguousarray(zero[:, start:stop]))
                while count := run.next(self._frame):
                    self.channel.send(Kind.TABLES, self._frame[:count])
                results.append(run.outputs())
            self.channel.flush()
        return np.concatenate(results, axis=1)

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
            for start in range(0, len(flat), _TRANSFERS // 2):
                part = active[start : start + _TRANSFERS // 2]
                if self.channel.receive_into(Kind.OUTPUT, part) != part.nbytes:
                    _refuse(self.channel, "an active label for each output", "fewer")
        bits = self._garbler.decode(flat, active)
        if bits is None:
            _refuse(self.channel, "active labels of this circuit", "others")
        return bits


class EvaluatorParty:
    """Evaluates. Made by ``start_evaluator``."""

    def __init__(self, channel: Channel, session: bytes, settings: Settings) -> None:
        self.channel, self.session_id = channel, session
        self._keys = _native.Session(_seed(session), settings.kernels)
        self._evaluator = _native.Evaluator(self._keys)
        self._frame = np.empty(_FRAME, dtype=np.uint8)
        with channel.phase("base-ot"):
            pairs = settings.base_ot.offer(channel, session)
            self._receiver = _native.CotReceiver(self._keys, settings.ot_k, pairs)
            channel.send(Kind.BASE_OT, self._receiver.opening)
            channel.flush()

    @property
    def and_gates(self) -> int:
        """AND gates evaluated in this session."""
        return self._evaluator.gates

    def peer_labels(self, n: int) -> Array:
        """Active labels (n, 16) of the garbler's bits."""
        with self.channel.phase("inputs"):
            seed = self.channel.receive(Kind.INPUT, at_most=BLOCK)
        if len(seed) != BLOCK:
            _refuse(self.channel, f"a seed of {BLOCK} bytes", f"{len(seed)}")
        return _native.active_labels(self._keys, seed, n)

    def own_labels(self, bits: Array) -> Array:
        """Active labels (n, 16) of our bits, by correlated oblivious transfer: 128 / k bits sent for each."""
        labels = np.empty((len(bits), BLOCK), dtype=np.uint8)
        with self.channel.phase("inputs"):
            for start in range(0, len(bits), _TRANSFERS):
                part = np.ascontiguousarray(bits[start : start + _TRANSFERS])
                labels[start : start + len(part)], corrections = self._receiver.extend(part)
                self.channel.send(Kind.OT, corrections)
            self.channel.flush()
        return labels

    def evaluate(self, program: Program, active: Array) -> Array:
        """Take the tables of a netlist; its outputs' active labels, (output bits, lanes, 16).

        Args:
            program: the garbler's.
            active: (input bits, lanes, 16), the inputs' active labels.
        """
        lanes = active.shape[1]
        plan = program.plan(lanes)
        results = []
        with self.channel.phase("tables"):
            for start, stop in program.chunks(lanes):
                run = self._evaluator.evaluation(plan, stop - start, np.ascontiguousarray(active[:, start:stop]))
                while run.tables_left:
                    count = self.channel.receive_into(Kind.TABLES, self._frame)
                    if count == 0 or count % TABLE or count // TABLE > run.tables_left:
                        _refuse(self.channel, f"up to {run.tables_left} tables of {TABLE} bytes", f"{count} bytes")
                    run.next(self._frame[:count])
                results.append(run.outputs())
        return np.concatenate(results, axis=1)

    def reveal(self, active: Array) -> Array:
        """Bits (n,) of these wires, from the colour bits that the garbler sends."""
        colours: Array = active.reshape(-1, BLOCK)[:, 0] & np.uint8(1)
        size = -(-len(colours) // 8)
        with self.channel.phase("outputs"):
            packed = self.channel.receive(Kind.OUTPUT, at_most=size)
        if len(packed) != size:
            _refuse(self.channel, f"{size} bytes of colour bits", f"{len(packed)}")
        bits: Array = colours ^ np.unpackbits(_array(packed), count=len(colours))
        return bits

    def tell(self, active: Array) -> None:
        """Let the garbler read these wires: send the active labels, which nobody can make up."""
        flat = np.ascontiguousarray(active.reshape(-1, BLOCK))
        with self.channel.phase("outputs"):
            for start in range(0, len(flat), _TRANSFERS // 2):
                self.channel.send(Kind.OUTPUT, flat[start : start + _TRANSFERS // 2])
            self.channel.flush()


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


def _array(data: bytes) -> Array:
    return np.frombuffer(data, dtype=np.uint8)


@contextlib.contextmanager
def _checked(channel: Channel) -> Iterator[None]:
    """The engine refuses what has the wrong length: then the other party is told, and the user."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        _refuse(channel, "a message of the right length", str(error))


def _refuse(channel: Channel, expected: str, found: str) -> NoReturn:
    channel.refuse(f"expected {expected}, found {found}")
    do = "use the same DeepSeal on both sides and start again"
    raise ProtocolError(f"{expected} from the other party", found=found, do=do)
