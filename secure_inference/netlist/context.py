"""Contexts: what a wire is and what the four operations on wires do. Gadgets are written once over any of them.

A context offers a public constant, XOR, AND and NOT. ``Clear`` computes, ``Count`` counts, ``Record`` writes the
gates down as a netlist. In ``Count`` and ``Record`` public constants cost nothing, by the same rules: x+x = 0 (XOR),
xx = x, constants are carried through; XOR with 1 is a NOT. NOT of NOT stays.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import InputError
from deepseal.secure_inference.netlist.netlist import MAX_WIRES, Netlist, Op

W = TypeVar("W")
Word: TypeAlias = tuple[W, ...]
Bit: TypeAlias = "bool | NDArray[np.bool_]"


class Context(Protocol[W]):
    """The four operations; W is the type of a wire."""

    def constant(self, bit: bool) -> W:
        """A public bit."""

    def xor(self, x: W, y: W) -> W:
        """The exclusive or of two wires; costs no bytes."""

    def and_(self, x: W, y: W) -> W:
        """The conjunction of two wires; the only operation that costs something."""

    def not_(self, x: W) -> W:
        """The negation of a wire; costs nothing."""


class Clear:
    """Computes: a wire is a ``bool``, or an array of them with one value a lane."""

    def constant(self, bit: bool) -> Bit:
        return bool(bit)

    def xor(self, x: Bit, y: Bit) -> Bit:
        return x ^ y

    def and_(self, x: Bit, y: Bit) -> Bit:
        return x & y

    def not_(self, x: Bit) -> Bit:
        return x ^ True


@dataclasses.dataclass(frozen=True, eq=False)
class Tally:
    """A wire of ``Count``: the AND gates on the longest path to it, and its value when that is public."""

    depth: int = 0
    public: bool | None = None


class Count:
    """Counts the gates that are asked for, whether or not their results are used.

    Attributes:
        and_gates: so far; likewise ``xor_gates`` and ``not_gates``.
        depth: the largest number of AND gates on any path so far.
    """

    def __init__(self) -> None:
        self.and_gates = self.xor_gates = self.not_gates = self.depth = 0
        self._constants = (Tally(public=False), Tally(public=True))

    def inputs(self, width: int) -> Word[Tally]:
        """A word of ``width`` new input wires."""
        return tuple(Tally() for _ in range(width))

    def constant(self, bit: bool) -> Tally:
        return self._constants[bool(bit)]

    def xor(self, x: Tally, y: Tally) -> Tally:
        if x is y:
            return self.constant(False)
        for public, other in ((x.public, y), (y.public, x)):
            if public is not None:
                return self.not_(other) if public else other
        self.xor_gates += 1
        return Tally(max(x.depth, y.depth))

    def and_(self, x: Tally, y: Tally) -> Tally:
        if x is y:
            return x
        for public, other in ((x.public, y), (y.public, x)):
            if public is not None:
                return other if public else self.constant(False)
        self.and_gates += 1
        depth = 1 + max(x.depth, y.depth)
        self.depth = max(self.depth, depth)
        return Tally(depth)

    def not_(self, x: Tally) -> Tally:
        if x.public is not None:
            return self.constant(not x.public)
        self.not_gates += 1
        return Tally(x.depth)


ZERO, ONE = -2, -1  # the public constants among the wires of Record


class Record:
    """Writes gates down. A wire is an integer that means something to this recorder only.

    ``netlist`` gives what was recorded; gates from which no path leads to an output are left out there.
    """

    def __init__(self) -> None:
        self._ops: list[int] = []  # of each wire; COPY marks an input
        self._a: list[int] = []
        self._b: list[int] = []
        self._inputs: list[int] = []

    def inputs(self, width: int) -> Word[int]:
        """A word of ``width`` new input wires: the next input value.

        Raises:
            InputError: no bit at all, or too many.
        """
        if not 1 <= width < MAX_WIRES - len(self._ops):
            raise InputError("an input of at least 1 bit", found=str(width), do="choose another width")
        self._inputs.append(width)
        return tuple(self._gate(Op.COPY, 0, 0) for _ in range(width))

    def constant(self, bit: bool) -> int:
        return ONE if bit else ZERO

    def xor(self, x: int, y: int) -> int:
        if x == y:
            return ZERO
        low, high = min(x, y), max(x, y)  # a constant is below every other wire
        if low == ZERO:
            return high
        return self.not_(high) if low == ONE else self._gate(Op.XOR, x, y)

    def and_(self, x: int, y: int) -> int:
        if x == y:
            return x
        low, high = min(x, y), max(x, y)
        if low == ZERO:
            return ZERO
        return high if low == ONE else self._gate(Op.AND, x, y)

    def not_(self, x: int) -> int:
        if x < 0:
            return ZERO if x == ONE else ONE
        return self._gate(Op.NOT, x, 0)

    def _gate(self, op: int, x: int, y: int) -> int:
        self._ops.append(op)
        self._a.append(x)
        self._b.append(y)
        return len(self._ops) - 1

    def netlist(self, *outputs: Word[int]) -> Netlist:
        """What was recorded so far, with these output values; the recorder can go on.

        Raises:
            InputError: no output, or a wire of another recorder.
        """
        wanted = [wire for word in outputs for wire in word]
        if not all(ZERO <= wire < len(self._ops) for wire in wanted):
            raise InputError("outputs that this recorder made", found="another wire", do="use one recorder throughout")
        live = bytearray(len(self._ops))
        for wire in wanted:
            if wire >= 0:
                live[wire] = 1
        for wire in range(len(self._ops) - 1, -1, -1):
            if live[wire] and self._ops[wire] != Op.COPY:
                live[self._a[wire]] = 1
                if self._ops[wire] != Op.NOT:
                    live[self._b[wire]] = 1
        number: dict[int, int] = {}
        for wire, op in enumerate(self._ops):
            if op == Op.COPY:
                number[wire] = len(number)
        ops: list[int] = []
        a: list[int] = []
        b: list[int] = []
        for wire, op in enumerate(self._ops):
            if live[wire] and op != Op.COPY:
                number[wire] = len(number)
                ops.append(op)
                a.append(number[self._a[wire]])
                b.append(0 if op == Op.NOT else number[self._b[wire]])
        for public in (ZERO, ONE):
            if public in wanted:
                number[public] = len(number)
                ops.append(Op.CONST)
                a.append(int(public == ONE))
                b.append(0)
        wires = np.array([number[wire] for wire in wanted], dtype=np.uint32)
        gates = (np.array(ops, np.uint8), np.array(a, np.uint32), np.array(b, np.uint32))
        return Netlist(tuple(self._inputs), tuple(len(word) for word in outputs), *gates, wires)


def replay(netlist: Netlist, context: Context[W], inputs: Sequence[W]) -> list[W]:
    """Run a netlist in any context.

    Args:
        netlist: what to run.
        context: what the operations do.
        inputs: the input wires, one a bit.

    Returns:
        The output wires, one a bit.

    Raises:
        InputError: another number of input wires than the netlist has.
    """
    if len(inputs) != netlist.input_bits:
        raise InputError(f"{netlist.input_bits} input wires", found=str(len(inputs)), do="pass one for each bit")
    wires = list(inputs)
    for op, x, y in zip(netlist.ops.tolist(), netlist.a.tolist(), netlist.b.tolist(), strict=True):
        if op == Op.XOR:
            wires.append(context.xor(wires[x], wires[y]))
        elif op == Op.AND:
            wires.append(context.and_(wires[x], wires[y]))
        elif op == Op.NOT:
            wires.append(context.not_(wires[x]))
        else:
            wires.append(wires[x] if op == Op.COPY else context.constant(bool(x)))
    return [wires[wire] for wire in netlist.output_wires.tolist()]


def simplify(netlist: Netlist) -> Netlist:
    """The same function without constants, copies and gates that no output needs; the order of the gates is kept."""
    recorder = Record()
    wires = [wire for width in netlist.inputs for wire in recorder.inputs(width)]
    outputs = iter(replay(netlist, recorder, wires))
    return recorder.netlist(*(tuple(next(outputs) for _ in range(width)) for width in netlist.outputs))


def to_word(value: int, width: int) -> Word[Bit]:
    """The ``width`` low bits of an integer (two's complement when negative), least significant first."""
    return tuple(bool(value >> i & 1) for i in range(width))


def from_word(word: Sequence[Bit], *, signed: bool = False) -> int:
    """The integer whose bits these are, least significant first; ``signed``: in two's complement."""
    value = sum(int(bit) << i for i, bit in enumerate(word))
    return value - (1 << len(word)) if signed and word and word[-1] else value
