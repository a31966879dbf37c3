"""Bristol Fashion: circuits as text files (https://nigelsmart.github.io/MPC-Circuits/).

The first three lines hold the numbers of gates and wires; the number of inputs and the width of each; the same for
outputs. Then one gate a line: numbers of its inputs and outputs, their wires, its kind. Inputs are the first wires,
outputs the last. XOR, AND, INV, EQ (a constant), EQW (a copy) and MAND (several AND at once) are read.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from deepseal.errors import InputError
from deepseal.files import read_bytes
from deepseal.secure_inference.netlist.netlist import Netlist, Op

MAX_BYTES = 1 << 28
MAX_LINE = 1 << 24
MAX_WIRES = 1 << 25
MAX_INPUT_BITS = 1 << 22
SHORTEST_GATE = 10  # bytes of "1 1 0 1 EQ"
SHORTEST_OUTPUT = 6  # bytes that one more AND adds to a MAND: three wires and three spaces
DIGITS = 10
KINDS = {"XOR": (Op.XOR, 2), "AND": (Op.AND, 2), "INV": (Op.NOT, 1), "EQ": (Op.CONST, 1), "EQW": (Op.COPY, 1)}


def read_bristol(source: str | Path) -> Netlist:
    """Read a circuit.

    Args:
        source: the text itself (str), or a file (Path); at most 2^28 bytes.

    Returns:
        The circuit, its gates in the order of the file; a MAND becomes several AND. Gate kinds and constants are kept.

    Raises:
        InputError: anything that is not strictly Bristol Fashion, with the number of the line, or a circuit of more
            than 2^25 wires or 2^22 input bits. What is allocated is in proportion to the text, not to what it promises.
    """
    if isinstance(source, Path):
        data = read_bytes(source, "a Bristol Fashion file", limit=MAX_BYTES)
        text = data.decode("ascii", errors="replace")
    else:
        text = source
    if len(text) > MAX_BYTES:
        raise InputError(f"a circuit of at most {MAX_BYTES} bytes", found=f"{len(text)} bytes", do="check the file")
    return _Reader(text).netlist()


class _Reader:
    """One pass over the lines; ``line`` is the number of the present one."""

    def __init__(self, text: str) -> None:
        self.size, self.line = len(text), 0
        self.lines = self._tokens(text)
        self.ops, self.a, self.b, self.place = array("B"), array("I"), array("I"), array("I")

    def _tokens(self, text: str) -> Iterator[list[str]]:
        start = 0
        while start < len(text):
            self.line += 1
            end = text.find("\n", start)
            end = len(text) if end < 0 else end
            if end - start > MAX_LINE:
                raise self._error(f"at most {MAX_LINE} bytes", f"{end - start}", "split the gate")
            raw = text[start:end]
            if not raw.isascii():
                raise self._error("plain ASCII text", "other characters", "check that this is a Bristol Fashion file")
            tokens = raw.split()
            if tokens:
                yield tokens
            start = end + 1
        self.line += 1

    def _error(self, expected: str, found: str, do: str = "correct the file") -> InputError:
        return InputError(f"{expected} in line {self.line} of the circuit", found=found, do=do)

    def netlist(self) -> Netlist:
        gates, wires = self._header_numbers("the numbers of gates and wires")
        inputs = self._header_widths("inputs")
        outputs = self._header_widths("outputs")
        first = sum(inputs)
        if not outputs:
            raise self._error("at least one output", "none")
        if first > MAX_INPUT_BITS:
            raise self._error(f"inputs of at most {MAX_INPUT_BITS} bits together", str(first))
        if wires > MAX_WIRES or first > wires or sum(outputs) > wires:
            found = f"{wires} for inputs of {first} and outputs of {sum(outputs)} bits"
            raise self._error(f"at most {MAX_WIRES} wires, and as many as inputs and outputs have", found)
        if gates * SHORTEST_GATE > self.size or (wires - first) * SHORTEST_OUTPUT > self.size:
            found = f"{gates} gates that write {wires - first} wires in {self.size} bytes"
            raise InputError("no more gates than the circuit's text has room for", found=found, do="correct line 1")
        self._gates(gates, wires, first)
        if next(self.lines, None) is not None:
            raise self._error(f"nothing after the {gates} gates that line 1 promises", "more text")
        written = first + len(self.ops)
        if written != wires:
            raise self._error(f"all {wires} wires written at the end", f"{written} of them", "correct the file")
        last = np.arange(wires - sum(outputs), wires, dtype=np.int64)
        place = np.frombuffer(self.place, dtype=np.uint32).astype(np.int64) - 1
        output_wires = np.concatenate([last[last < first], place[last[last >= first] - first]])
        arrays = (np.frombuffer(self.ops, np.uint8), np.frombuffer(self.a, np.uint32), np.frombuffer(self.b, np.uint32))
        return Netlist(inputs, outputs, *arrays, output_wires)

    def _header_numbers(self, what: str) -> list[int]:
        tokens = next(self.lines, [])
        if len(tokens) != 2:
            raise self._error(what, _shown(" ".join(tokens)), "use Bristol Fashion")
        return [self._number(token) for token in tokens]

    def _header_widths(self, what: str) -> tuple[int, ...]:
        tokens = next(self.lines, [])
        if not tokens or self._number(tokens[0]) != len(tokens) - 1:
            raise self._error(
                f"the number of {what} and then the width of each",
                _shown(" ".join(tokens[:8])),
                "use Bristol Fashion; the older Bristol format is not read",
            )
        widths = tuple(self._number(token) for token in tokens[1:])
        if 0 in widths:
            raise self._error(f"{what} of at least 1 bit", "0")
        return widths

    def _number(self, token: str) -> int:
        if not token.isdigit() or len(token) > DIGITS:
            raise self._error(f"a number of at most {DIGITS} digits", _shown(token))
        return int(token)

    def _numbers(self, tokens: list[str]) -> list[int]:
        if "".join(tokens).isdigit() and max(map(len, tokens)) <= DIGITS:
            return list(map(int, tokens))
        return [self._number(token) for token in tokens]

    def _gates(self, gates: int, wires: int, first: int) -> None:
        """Read the gates; ``place`` holds 1 + our wire for each one of the file after the inputs, 0 if not written."""
        self.place = place = array("I", bytes(4 * (wires - first)))
        ops, a, b = self.ops, self.a, self.b
        for done in range(gates):
            tokens = next(self.lines, None)
            if tokens is None:
                raise self._error(f"{gates} gates", f"the end after {done}", "get the whole file")
            kind = tokens[-1]
            if kind == "MAND":
                self._several(tokens, wires, first)
                continue
            op, operands = KINDS.get(kind, (None, 0))
            if op is None:
                raise self._error("a gate XOR, AND, INV, EQ, EQW or MAND", _shown(kind))
            if len(tokens) != operands + 4 or tokens[0] != str(operands) or tokens[1] != "1":
                raise self._error(f"{kind} as {operands} 1, {operands + 1} wires, {kind}", _shown(" ".join(tokens[:8])))
            numbers = self._numbers(tokens[2:-1])
            if op == Op.CONST:
                if numbers[0] > 1:
                    raise self._error("the constant 0 or 1", str(numbers[0]))
                x = numbers[0]
            else:
                x = self._read(numbers[0], first, place)
            y = self._read(numbers[1], first, place) if operands == 2 else 0
            self._write(numbers[-1], wires, first, place)
            ops.append(op)
            a.append(x)
            b.append(y)

    def _several(self, tokens: list[str], wires: int, first: int) -> None:
        """MAND: n first operands, n second ones, n results; all are read before any is written."""
        count = (len(tokens) - 3) // 3
        if count < 1 or len(tokens) != 3 * count + 3 or tokens[:2] != [str(2 * count), str(count)]:
            raise self._error("MAND as 2n n, 3n wires, MAND", _shown(" ".join(tokens[:8])))
        numbers = self._numbers(tokens[2:-1])
        operands = [self._read(wire, first, self.place) for wire in numbers[: 2 * count]]
        for x, y, wire in zip(operands[:count], operands[count:], numbers[2 * count :], strict=True):
            self._write(wire, wires, first, self.place)
            self.ops.append(Op.AND)
            self.a.append(x)
            self.b.append(y)

    def _read(self, wire: int, first: int, place: array[int]) -> int:
        if wire < first:
            return wire
        known = place[wire - first] if wire - first < len(place) else 0
        if not known:
            raise self._error("operands that have a value already", f"wire {wire}", "order the gates")
        return known - 1

    def _write(self, wire: int, wires: int, first: int, place: array[int]) -> None:
        """Give the wire to the gate that comes next."""
        if not first <= wire < wires or place[wire - first]:
            found = f"{'input ' if wire < first else ''}wire {wire}"
            raise self._error(f"a result on a wire from {first} to {wires - 1} that is still free", found)
        place[wire - first] = first + len(self.ops) + 1


def _shown(text: str) -> str:
    """A short, printable form of what stands in the file."""
    return repr(text if len(text) <= 40 else text[:40] + "...")


def write_bristol(netlist: Netlist) -> str:
    """The netlist as text.

    An output bit that is an input or that is wanted twice gets a copy (EQW) of its own, since outputs are the last
    wires. Reading the text gives the same function; the order of the gates is kept, copies come last.
    """
    first = netlist.input_bits
    wanted = netlist.output_wires.tolist()
    result_of = {wire: k for k, wire in reversed(list(enumerate(wanted))) if wire >= first}  # its first use
    copies = [k for k, wire in enumerate(wanted) if result_of.get(wire) != k]
    total = netlist.wires + len(copies)
    number = list(range(first))
    inner = first
    for wire in range(first, netlist.wires):
        if wire in result_of:
            number.append(total - len(wanted) + result_of[wire])
        else:
            number.append(inner)
            inner += 1
    lines = [f"{netlist.gates + len(copies)} {total}"]
    lines += [" ".join(map(str, (len(widths), *widths))) for widths in (netlist.inputs, netlist.outputs)]
    lines.append("")
    gates = zip(netlist.ops.tolist(), netlist.a.tolist(), netlist.b.tolist(), number[first:], strict=True)
    for op, x, y, result in gates:
        if op == Op.CONST:
            lines.append(f"1 1 {x} {result} EQ")
        elif op in (Op.NOT, Op.COPY):
            lines.append(f"1 1 {number[x]} {result} {'INV' if op == Op.NOT else 'EQW'}")
        else:
            lines.append(f"2 1 {number[x]} {number[y]} {result} {'AND' if op == Op.AND else 'XOR'}")
    lines += [f"1 1 {number[wanted[k]]} {total - len(wanted) + k} EQW" for k in copies]
    return "\n".join(lines) + "\n"
