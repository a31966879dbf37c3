"""A boolean netlist as data: arrays of gates in single-assignment form, which can count and evaluate themselves."""

from __future__ import annotations

import dataclasses
import enum
import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepseal.errors import InputError

MAX_WIRES = 1 << 31


class Op(enum.IntEnum):
    """What a gate does. NOT and COPY read ``a``; CONST holds its bit in ``a``; unused operands are 0."""

    XOR = 0
    AND = 1
    NOT = 2
    CONST = 3
    COPY = 4


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Netlist:
    """Gates over wires that are numbered in the order in which they get their value.

    Wires 0 … n-1 are the input bits: the input values one after another, each least significant bit first. Gate i
    writes wire n+i and reads only smaller wires. Two netlists are equal when all their fields are.

    Args:
        inputs: width in bits of each input value, each at least 1; may be empty.
        outputs: width in bits of each output value, each at least 1; at least one.
        ops: (gates,) uint8, see ``Op``.
        a: (gates,) uint32, first operands.
        b: (gates,) uint32, second operands.
        output_wires: (sum of outputs,) uint32, the wire of each output bit, output values one after another.

    Raises:
        InputError: lengths that do not fit together, an unknown gate, or a wire that is read before it is written.
    """

    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    ops: NDArray[np.uint8]
    a: NDArray[np.uint32]
    b: NDArray[np.uint32]
    output_wires: NDArray[np.uint32]

    def __post_init__(self) -> None:
        object.__setattr__(self, "inputs", _widths(self.inputs, "input"))
        object.__setattr__(self, "outputs", _widths(self.outputs, "output"))
        object.__setattr__(self, "ops", _frozen(self.ops, np.uint8, "gate kinds"))
        for name in ("a", "b", "output_wires"):
            object.__setattr__(self, name, _frozen(getattr(self, name), np.uint32, f"wires in {name}"))
        if not len(self.ops) == len(self.a) == len(self.b):
            found = f"{len(self.ops)} kinds, {len(self.a)} first and {len(self.b)} second operands"
            raise InputError("one kind and two operands for each gate", found=found, do="pass arrays of one length")
        if not self.outputs or len(self.output_wires) != sum(self.outputs):
            found = f"{len(self.output_wires)} wires for outputs of {sum(self.outputs)} bits"
            raise InputError("at least one output, with one wire for each bit", found=found, do="correct the outputs")
        if self.wires > MAX_WIRES:
            raise InputError(f"at most {MAX_WIRES} wires", found=str(self.wires), do="split the netlist")
        self._check_gates()

    def _check_gates(self) -> None:
        kind, first = self.ops, self.input_bits
        if len(kind) and int(kind.max()) > max(Op):
            raise InputError(f"gates of kind 0 to {max(Op)}", found=f"kind {kind.max()}", do="correct the gate kinds")
        own = np.arange(first, self.wires, dtype=np.uint32)
        limit = np.where(kind == Op.CONST, np.uint32(2), own)
        two = (kind == Op.XOR) | (kind == Op.AND)
        wrong = np.flatnonzero((self.a >= limit) | (two & (self.b >= own)) | (~two & (self.b != 0)))
        if len(wrong):
            i = int(wrong[0])
            found = f"operands {self.a[i]} and {self.b[i]} of the {Op(int(kind[i])).name} gate on wire {first + i}"
            raise InputError(
                "operands that are earlier wires (0 where unused)", found=found, do="order the gates by their wires"
            )
        if int(self.output_wires.max()) >= self.wires:
            found = f"wire {self.output_wires.max()}"
            raise InputError(f"output wires below {self.wires}", found=found, do="correct the outputs")

    @property
    def input_bits(self) -> int:
        """Number of input wires."""
        return sum(self.inputs)

    @property
    def gates(self) -> int:
        """Number of gates of all kinds."""
        return len(self.ops)

    @property
    def wires(self) -> int:
        """Number of wires: input bits and gates."""
        return self.input_bits + len(self.ops)

    @property
    def and_gates(self) -> int:
        """Number of AND gates: the ones that cost something."""
        return self._count(Op.AND)

    @property
    def xor_gates(self) -> int:
        """Number of XOR gates."""
        return self._count(Op.XOR)

    @property
    def not_gates(self) -> int:
        """Number of NOT gates."""
        return self._count(Op.NOT)

    def _count(self, op: Op) -> int:
        return int(np.count_nonzero(self.ops == op))

    @cached_property
    def and_depths(self) -> NDArray[np.uint32]:
        """(wires,): the largest number of AND gates on a path from an input to each wire, its own gate included."""
        depths = [0] * self.input_bits
        for op, x, y in zip(self.ops.tolist(), self.a.tolist(), self.b.tolist(), strict=True):
            if op == Op.CONST:
                depths.append(0)
            elif op >= Op.NOT:
                depths.append(depths[x])
            else:
                deeper = depths[x] if depths[x] > depths[y] else depths[y]
                depths.append(deeper + op)  # XOR is 0, AND is 1
        return _frozen(depths, np.uint32, "depths")

    @property
    def depth(self) -> int:
        """The largest number of AND gates on any path."""
        return int(self.and_depths.max(initial=0))

    @cached_property
    def _sha256(self) -> str:
        head = [len(self.inputs), *self.inputs, len(self.outputs), *self.outputs, self.gates]
        state = hashlib.sha256(b"deepseal netlist v1\0" + np.array(head, dtype="<u8").tobytes())
        for part in (self.ops, self.a.astype("<u4"), self.b.astype("<u4"), self.output_wires.astype("<u4")):
            state.update(part.tobytes())
        return state.hexdigest()

    def digest(self) -> str:
        """SHA-256 in hexadecimal over all fields, the same on every machine.

        The bytes: the label ``deepseal netlist v1`` and a zero byte; number of inputs, their widths, number of
        outputs, their widths, number of gates, each as 64 bits little-endian; then ``ops``, and ``a``, ``b``,
        ``output_wires`` as 32 bits little-endian.
        """
        return self._sha256

    def __eq__(self, other: object) -> bool:
        return self.digest() == other.digest() if isinstance(other, Netlist) else NotImplemented

    def __hash__(self) -> int:
        return hash(self.digest())

    def __repr__(self) -> str:
        return f"Netlist(inputs={self.inputs}, outputs={self.outputs}, gates={self.gates}, and_gates={self.and_gates})"

    def evaluate(self, values: Sequence[int]) -> list[int]:
        """The output values for input values, all as non-negative integers.

        Raises:
            InputError: another number of values than ``inputs``, or one that does not fit its width.
        """
        if len(values) != len(self.inputs):
            found = f"{len(values)}"
            raise InputError(f"{len(self.inputs)} input values", found=found, do="pass one integer for each input")
        bits: list[int] = []
        for value, width in zip(values, self.inputs, strict=True):
            if not 0 <= value < 1 << width:
                found = "a negative one" if value < 0 else f"one of {value.bit_length()} bits"
                raise InputError(f"an input value of {width} bits", found=found, do="reduce it to its width")
            bits += [value >> i & 1 for i in range(width)]
        wires = iter(self._run(bits, 1))
        return [sum(next(wires) << i for i in range(width)) for width in self.outputs]

    def evaluate_bits(self, bits: NDArray[np.bool_]) -> NDArray[np.bool_]:
        """Evaluate many independent inputs at once.

        Args:
            bits: (input bits, lanes) of bool; one column is one input.

        Returns:
            (output bits, lanes) of bool.

        Raises:
            InputError: another shape or type.
        """
        if bits.ndim != 2 or bits.shape[0] != self.input_bits or bits.dtype != np.bool_:
            found = f"{bits.dtype} of shape {bits.shape}"
            raise InputError(f"bool of shape ({self.input_bits}, lanes)", found=found, do="pass one row for each bit")
        lanes = bits.shape[1]
        if lanes == 0:
            return np.zeros((len(self.output_wires), 0), dtype=np.bool_)
        size = (lanes + 7) // 8
        packed = np.packbits(bits, axis=1, bitorder="little")
        wires = self._run([int.from_bytes(row.tobytes(), "little") for row in packed], (1 << lanes) - 1)
        data = np.frombuffer(b"".join(wire.to_bytes(size, "little") for wire in wires), dtype=np.uint8)
        rows = data.reshape(len(wires), size)
        return np.unpackbits(rows, axis=1, count=lanes, bitorder="little").astype(np.bool_)

    def _run(self, wires: list[int], ones: int) -> list[int]:
        """The output wires; a wire is an integer that holds one bit a lane, ``ones`` has all of them set."""
        for op, x, y in zip(self.ops.tolist(), self.a.tolist(), self.b.tolist(), strict=True):
            if op == Op.XOR:
                wires.append(wires[x] ^ wires[y])
            elif op == Op.AND:
                wires.append(wires[x] & wires[y])
            elif op == Op.NOT:
                wires.append(wires[x] ^ ones)
            else:
                wires.append(wires[x] if op == Op.COPY else x * ones)
        return [wires[wire] for wire in self.output_wires.tolist()]


def _widths(widths: Sequence[int], what: str) -> tuple[int, ...]:
    try:
        plain = tuple(int(width) for width in widths)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"integers as {what} widths", found=type(error).__name__, do="pass a tuple of int") from error
    if any(width < 1 for width in plain):
        raise InputError(f"{what} widths of at least 1 bit", found=str(min(plain)), do=f"leave the empty {what} out")
    return plain


def _frozen(values: ArrayLike, dtype: type[np.uint8] | type[np.uint32], what: str) -> NDArray[Any]:
    """A read-only copy; every value must fit."""
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iub"):
        found = f"{array.dtype} of shape {array.shape}"
        raise InputError(f"{what} as a list of integers", found=found, do="pass a one-dimensional array")
    copy = array.astype(dtype)
    if array.size and not np.array_equal(copy, array):
        found = f"values from {array.min()} to {array.max()}"
        raise InputError(f"{what} as {np.dtype(dtype).name}", found=found, do="correct the values")
    copy.flags.writeable = False
    return copy
