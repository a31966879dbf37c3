"""A program made ready for the mixed protocol: what both parties derive from it alike."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepseal import _native
from deepseal.secure_inference.compile.gadgets import build, gadget
from deepseal.secure_inference.compile.program import Circuit, Linear, Number, Program
from deepseal.secure_inference.netlist import Netlist, Record, Word, add
from deepseal.secure_inference.protocol.parties import Program as Replayed

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
        channels: (outputs,) the bias of each output.
        bits: l of the ring Z_2^l.
        source_bits: k of a source element; the highest is negative where ``signed``.
        ranges: source elements of each frame, as (first, last).
    """

    step: int
    name: str
    source: int
    target: int
    starts: NDArray[np.uint64]
    targets: NDArray[np.uint32]
    weights: NDArray[np.uint32]
    outputs: int
    weight_count: int
    channels: NDArray[np.int64]
    bits: int
    source_bits: int
    signed: bool
    ranges: tuple[tuple[int, int], ...]

    def start(self, session: _native.Session) -> _native.LinearOt:
        """The layer in one session; its tweaks are apart from every other layer's."""
        return _native.LinearOt(
            session,
            self.starts,
            self.targets,
            self.weights,
            self.outputs,
            self.weight_count,
            self.bits,
            self.source_bits,
            self.signed,
            self.step,
        )


@dataclass(frozen=True)
class Read:
    """One operand of a circuit: a word of a wire, its elements by lane, and what stands at -1."""

    wire: int
    index: NDArray[np.int64]
    shared: bool
    padding: tuple[int, ...]


@dataclass(frozen=True)
class CircuitLayer:
    """A circuit step: the gadget behind an adder for each operand that is secret-shared."""

    name: str
    target: int
    reads: tuple[Read, ...]
    program: Replayed
    target_bits: int


def prepare(program: Program) -> tuple[LinearLayer | CircuitLayer, ...]:
    """The steps, in order."""
    return tuple(
        _linear(program, number, step) if isinstance(step, Linear) else _circuit(program, step)
        for number, step in enumerate(program.steps)
    )


def _linear(program: Program, number: int, step: Linear) -> LinearLayer:
    met = step.connections(program)
    source, target = program.wires[step.source], program.wires[step.target]
    width, ring = source.number.bits, target.number.bits
    degrees = np.diff(met.starts)
    sizes = sum(-(-degrees * (ring - bit) // 8) for bit in range(width))
    frame = np.cumsum(sizes) // _MESSAGE
    edges = [0, *(np.flatnonzero(np.diff(frame)) + 1).tolist(), source.size]
    return LinearLayer(
        number,
        step.name or step.op,
        step.source,
        step.target,
        met.starts.astype(np.uint64),
        met.outputs.astype(np.uint32),
        met.weights.astype(np.uint32),
        target.size,
        int(np.prod(step.weight_shape)),
        step.channel_of(target.shape),
        ring,
        width,
        source.number.signed,
        tuple(zip(edges[:-1], edges[1:], strict=True)),
    )


def _circuit(program: Program, step: Circuit) -> CircuitLayer:
    numbers = step.numbers(program)
    reads = []
    for operand, number in zip(step.operands, numbers, strict=False):
        low = gadget(step.gadget).padding_value(number)
        bits = tuple(low >> bit & 1 for bit in range(number.bits))
        shared = program.wires[operand.source].kind == "accumulator"
        reads.append(Read(operand.source, operand.index(program), shared, bits))
    netlist = _netlist(step, numbers, tuple(read.shared for read in reads))
    return CircuitLayer(
        step.name or step.gadget, step.target, tuple(reads), Replayed(netlist), program.wires[step.target].number.bits
    )


def _netlist(step: Circuit, numbers: tuple[Number, ...], shared: tuple[bool, ...]) -> Netlist:
    context = Record()
    words: list[Word[int]] = []
    for number, is_shared in zip(numbers, shared, strict=False):
        word = context.inputs(number.bits)
        words.append(add(context, word, context.inputs(number.bits)) if is_shared else word)
    return context.netlist(build(context, step.gadget, words, step.options, numbers))


def gather(labels: Array, read: Read, batch: int, constant: Callable[[tuple[int, ...]], Array]) -> Array:
    """Labels of an operand, (bits, batch x lanes, 16), from a wire's (bits, batch, elements, 16).

    ``constant`` gives the labels of public bits, (bits, 16), for the padding.
    """
    bits, _, _, size = labels.shape
    taken = labels[:, :, np.maximum(read.index, 0)]
    padded = read.index < 0
    if padded.any():
        taken[:, :, padded] = constant(read.padding)[:, None, None]
    result: Array = taken.reshape(bits, batch * len(read.index), size)
    return result


def word_bits(values: Words, bits: int) -> Array:
    """Bits of integers, (bits, …), least significant first."""
    places = np.arange(bits, dtype=np.uint64).reshape(-1, *(1,) * values.ndim)
    found: Array = ((values[None] >> places) & np.uint64(1)).astype(np.uint8)
    return found
