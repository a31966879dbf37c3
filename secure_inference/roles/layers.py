"""A program made ready for the mixed protocol: what both parties derive from it alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from deepseal import _native
from deepseal.secure_inference.compile.gadgets import build, gadget
from deepseal.secure_inference.compile.program import Circuit, Linear, Number, Program
from deepseal.secure_inference.compile.weights import Weights, layer_weights
from deepseal.secure_inference.netlist import Netlist, Record, Word, add
from deepseal.secure_inference.protocol.parties import Program as Replayed
from deepseal.secure_inference.roles.memory import label_bytes

Array = NDArray[np.uint8]
Words = NDArray[np.uint64]
_MESSAGE = 1 << 19  # bytes of a linear layer's message in a frame, about


@dataclass(frozen=True)
class LinearLayer:
    """A linear step: which elements meet, and how its message is cut into frames.

    Attributes:
        step: its number in the program.
        name: for messages and counters.
        source: wire, labelled.
        target: wire, shared.
        connections: source and target of each multiplication.
        weights: (connections,) index of each one's weight.
        channels: (outputs,) the bias of each output.
        outputs: elements of the target.
        bits: l of the ring Z_2^l.
        source_bits: k of a source element; the highest is negative where ``signed``.
        signed: as the source.
        ranges: source elements of each frame, as (first, last).
        frames: bytes of each frame.
    """

    step: int
    name: str
    source: int
    target: int
    connections: _native.Connections
    weights: NDArray[np.int64]
    channels: NDArray[np.int64]
    outputs: int
    bits: int
    source_bits: int
    signed: bool
    ranges: tuple[tuple[int, int], ...]
    frames: tuple[int, ...]

    @property
    def multiplications(self) -> int:
        """Multiplications of one sample."""
        return len(self.weights)

    def start(self, session: _native.Session) -> _native.LinearOt:
        """The layer in one session; its tweaks are apart from every other layer's."""
        return _native.LinearOt(session, self.connections, self.bits, self.source_bits, self.signed, self.step)


@dataclass(frozen=True)
class Read:
    """One operand of a circuit: a word of a wire, its elements by lane, and what stands at -1."""

    wire: int
    index: NDArray[np.int64]
    shared: bool
    padding: tuple[int, ...]
    whole: bool  # lane j reads element j


@dataclass(frozen=True)
class CircuitLayer:
    """A circuit step: the gadget behind an adder for each operand that is secret-shared.

    Attributes:
        name: for messages and counters.
        target: wire, labelled.
        reads: the operands.
        program: the netlist.
        lanes: of one sample.
        target_bits: of each element of the target.
    """

    name: str
    target: int
    reads: tuple[Read, ...]
    program: Replayed
    lanes: int
    target_bits: int


@dataclass(frozen=True)
class Prepared:
    """A program made ready once, for all sessions of a party.

    Attributes:
        program: what it was.
        digest: of the program.
        layers: its steps, in order.
        label_bytes: that a party holds for a sample, at most.
        weights: by step, at the server: (connections,) a weight each.
        biases: by step, at the server: (outputs,).
    """

    program: Program
    digest: str
    layers: tuple[LinearLayer | CircuitLayer, ...]
    label_bytes: int
    weights: Mapping[int, NDArray[np.int64]] = field(default_factory=dict, repr=False)
    biases: Mapping[int, NDArray[np.int64]] = field(default_factory=dict, repr=False)


def prepare(program: Program) -> Prepared:
    """For the client."""
    layers = tuple(
        _linear(program, number, step) if isinstance(step, Linear) else _circuit(program, step)
        for number, step in enumerate(program.steps)
    )
    return Prepared(program, program.digest(), layers, label_bytes(program, shares=True))


def prepare_server(program: Program, weights: Weights | None) -> Prepared:
    """For the server.

    Raises:
        InputError: weights of another program, or none where there are secret ones.
    """
    if weights is not None:
        weights.check(program)
    ready = prepare(program)
    flat, biases = {}, {}
    for layer in ready.layers:
        if isinstance(layer, LinearLayer):
            found = layer_weights(program, weights, layer.step)
            flat[layer.step] = found.weight.reshape(-1).astype(np.int64)[layer.weights]
            biases[layer.step] = found.bias.astype(np.int64)[layer.channels]
    return replace(ready, weights=flat, biases=biases)


def _linear(program: Program, number: int, step: Linear) -> LinearLayer:
    met = step.connections(program)
    source, target = program.wires[step.source], program.wires[step.target]
    width, ring = source.number.bits, target.number.bits
    degrees = np.diff(met.starts)
    sizes = np.sum([-(-degrees * (ring - bit) // 8) for bit in range(width)], axis=0)
    frame = np.cumsum(sizes) // _MESSAGE
    edges = [0, *(np.flatnonzero(np.diff(frame)) + 1).tolist(), source.size]
    ranges = tuple(zip(edges[:-1], edges[1:], strict=True))
    return LinearLayer(
        number,
        step.name or step.op,
        step.source,
        step.target,
        _native.Connections(met.starts.astype(np.uint64), met.outputs.astype(np.uint32), target.size),
        met.weights,
        step.channel_of(target.shape),
        target.size,
        ring,
        width,
        source.number.signed,
        ranges,
        tuple(int(sizes[first:last].sum()) for first, last in ranges),
    )


def _circuit(program: Program, step: Circuit) -> CircuitLayer:
    numbers = step.numbers(program)
    reads = []
    for operand, number in zip(step.operands, numbers, strict=False):
        low = gadget(step.gadget).padding_value(number)
        bits = tuple(low >> bit & 1 for bit in range(number.bits))
        shared = program.wires[operand.source].kind == "accumulator"
        index = operand.index(program)
        whole = np.array_equal(index, np.arange(program.wires[operand.source].size))
        reads.append(Read(operand.source, index, shared, bits, whole))
    netlist = _netlist(step, numbers, tuple(read.shared for read in reads))
    return CircuitLayer(
        step.name or step.gadget,
        step.target,
        tuple(reads),
        Replayed(netlist),
        program.wires[step.target].size,
        program.wires[step.target].number.bits,
    )


def _netlist(step: Circuit, numbers: tuple[Number, ...], shared: tuple[bool, ...]) -> Netlist:
    context = Record()
    words: list[Word[int]] = []
    for number, is_shared in zip(numbers, shared, strict=False):
        word = context.inputs(number.bits)
        words.append(add(context, word, context.inputs(number.bits)) if is_shared else word)
    return context.netlist(build(context, step.gadget, words, step.options, numbers))


def gather(labels: Array, read: Read, batch: int, constant: Callable[[tuple[int, ...]], Array]) -> Array:
    """Labels of an operand, (rows, batch x lanes, 16), from a wire's (rows, batch, elements, 16).

    ``constant`` gives the labels of public bits, (n, 16), for the padding; of two shares, the first one is padded.
    """
    rows, _, elements, size = labels.shape
    if read.whole:
        return labels.reshape(rows, batch * elements, size)
    taken = labels[:, :, np.maximum(read.index, 0)]
    padded = read.index < 0
    if padded.any():
        bits = read.padding + (0,) * (rows - len(read.padding))
        taken[:, :, padded] = constant(bits)[:, None, None]
    return taken.reshape(rows, batch * len(read.index), size)
