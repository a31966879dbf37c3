"""From a graph with formats to a program and its weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

import deepseal
from deepseal.adapter.spec import InputSpec
from deepseal.errors import InputError
from deepseal.secure_inference.compile.arrays import LinearWeights, PublicArray
from deepseal.secure_inference.compile.calibrate import CompileSettings, InputFormat, best_fraction
from deepseal.secure_inference.compile.graph import Affine, Graph, Ints, Node, Reals
from deepseal.secure_inference.compile.program import (
    Circuit,
    Encoding,
    Linear,
    Number,
    Operand,
    Option,
    Program,
    Step,
    Wire,
)
from deepseal.secure_inference.compile.ranges import Interval, bits_for, circuit_interval, linear_interval
from deepseal.secure_inference.compile.weights import Weights
from deepseal.secure_inference.compile.windows import view_of

_CURVES = ("sigmoid", "tanh", "silu", "gelu", "gelu_tanh")
_HALVES = ("relu", "clamp", "leaky_relu", "requantise", "silu", "gelu", "gelu_tanh")  # they round down
_ROUNDS = ("relu", "clamp", "requantise")  # these can also round in the circuit


@dataclasses.dataclass(frozen=True, eq=False)
class Assembled:
    """A program, its weights, and where it comes from.

    Attributes:
        program: public.
        weights: secret.
        origin: for each wire the graph's node that it stands for, or None.
        intervals: for each wire a range that no input can leave.
    """

    program: Program
    weights: Weights
    origin: tuple[int | None, ...]
    intervals: tuple[Interval, ...]


class Assembler:
    """Wires and steps under construction. Rings are wide until ``finish`` knows all sums."""

    def __init__(
        self, graph: Graph, numbers: Sequence[Number], entry: InputFormat, settings: CompileSettings,
        projection: Reals | None = None,
    ) -> None:  # fmt: skip
        self._projection = projection
        self._graph, self._numbers, self._entry, self._settings = graph, list(numbers), entry, settings
        self._numbers[0] = entry.number
        self._readers = graph.consumers()
        self.wires: list[Wire] = []
        self.steps: list[Step] = []
        self.origin: list[int | None] = []
        self._sums: dict[int, int] = {}  # node -> accumulator wire
        self._words: dict[tuple[int, Number], int] = {}  # node, format -> activation wire
        self._weights: dict[int, tuple[Ints, Ints]] = {}  # step -> weight, bias
        self._writer: dict[int, int] = {}  # wire -> step

    def assemble(self) -> None:
        """Translate all nodes."""
        for i, node in enumerate(self._graph.nodes):
            if node.kind == "input":
                self._words[i, self._entry.number] = self._wire(node.shape, self._entry.number, "activation", i)
            elif node.affine is not None:
                self._linear(i, node, node.affine)
            elif node.kind == "activation":
                self._activation(i, node)
            else:
                self._several(i, node)
        self._end()

    def _wire(self, shape: tuple[int, ...], number: Number, kind: Any, node: int | None) -> int:
        self.wires.append(Wire(shape, number, kind))
        self.origin.append(node)
        return len(self.wires) - 1

    def _circuit(self, operands: Sequence[Operand], gadget: str, options: dict[str, Option], shape: tuple[int, ...],
                 number: Number, node: int | None, name: str) -> int:  # fmt: skip
        target = self._wire(shape, number, "activation", node)
        self._writer[target] = len(self.steps)
        self.steps.append(Circuit(tuple(operands), target, gadget, options, name))
        return target

    def _operand(self, wire: int, index: Ints) -> Operand:
        shape = self.wires[wire].shape
        plain = index.size == math.prod(shape) and np.array_equal(index.reshape(-1), np.arange(index.size))
        return Operand(wire, None if plain else view_of(index, shape))

    def word(self, node: int, number: Number | None = None) -> int:
        """The wire with a node's output as words of a format, its own by default."""
        number = number or self._numbers[node]
        if (node, number) not in self._words:
            own = (node, self._numbers[node])
            source = self._sums[node] if node in self._sums else self._words[own]
            shape, name = self._graph.nodes[node].shape, self._graph.nodes[node].name
            options = self._rounding(source, "requantise", number)
            self._words[node, number] = self._circuit(
                [Operand(source)], "requantise", options, shape, number, node, name
            )
        return self._words[node, number]

    def _any(self, node: int) -> int:
        """A node's accumulator if it has one, else its words."""
        return self._sums[node] if node in self._sums else self.word(node)

    def _rounding(self, source: int, gadget: str, target: Number) -> dict[str, Option]:
        """Round to nearest: half a unit goes into the bias when this circuit alone reads the sums, else an option."""
        shift = self.wires[source].number.fraction - target.fraction
        if gadget not in _HALVES or shift < 1:
            return {}
        if self._alone(source):
            self._raise_bias(source, 1 << (shift - 1))
            return {}
        return {"round": True} if gadget in _ROUNDS else {}

    def _alone(self, wire: int) -> bool:
        """Whether one circuit only will read this accumulator."""
        node = self.origin[wire]
        if self.wires[wire].kind != "accumulator" or node is None:
            return False
        readers = self._readers[node]
        if len(readers) == 1:
            return readers[0] >= 0
        return all(r >= 0 and self._graph.nodes[r].kind in ("affine", "max", "multiply") for r in readers)

    def _raise_bias(self, wire: int, by: int) -> None:
        weight, bias = self._weights[self._writer[wire]]
        self._weights[self._writer[wire]] = (weight, bias + by)

    def _linear(self, i: int, node: Node, affine: Affine) -> None:
        ref = node.inputs[0]
        source = self.word(ref.node)
        number = self.wires[source].number
        real = affine.weight * (self._entry.unit if ref.node == 0 else 1.0)
        fraction = _weight_fraction(real, self._settings.weight_bits, public=affine.public)
        weight = Number(self._settings.weight_bits, True, fraction)
        integers = np.clip(np.rint(real * 2.0**fraction), weight.low, weight.high).astype(np.int64)
        total = Number(62, True, number.fraction + fraction)
        target = self._wire(node.shape, total, "accumulator", i)
        window = view_of(ref.index, self.wires[source].shape)
        mask = None
        if self._settings.sparsity == "public" and not affine.public and not integers.all():
            mask = PublicArray(integers != 0)
        step = Linear(source, target, affine.op, tuple(affine.weight.shape), weight, affine.stride, affine.padding,
                      affine.dilation, affine.groups, affine.public, window, node.name, mask)  # fmt: skip
        shape = step.target_shape(ref.shape)
        if shape != node.shape:  # a scaling of single elements, whose result has the source's shape
            self.wires[target] = dataclasses.replace(self.wires[target], shape=shape)
        bias = np.rint(affine.bias * 2.0**total.fraction)
        if float(np.abs(bias).max(initial=0)) > 2.0**60:
            do = "use fewer bits"
            raise InputError(f"biases that fit 60 bits in {node.name!r}", found="larger ones", do=do)
        self._weights[len(self.steps)] = (integers, bias.astype(np.int64))
        self._writer[target] = len(self.steps)
        self.steps.append(step)
        self._sums[i] = target

    def _activation(self, i: int, node: Node) -> None:
        ref, number = node.inputs[0], self._numbers[i]
        gadget = node.settings["function"]
        source = self._any(ref.node)
        options: dict[str, Option] = {}
        if gadget in _CURVES:
            options["form"] = self._settings.activations
            if gadget not in ("sigmoid", "tanh") and options["form"] == "cordic":
                options["form"] = "piecewise_linear"
        elif gadget == "clamp":
            for name, edge in (("low", number.low), ("high", number.high)):
                value = node.settings[name] * 2.0**number.fraction
                inside = math.isfinite(value) and number.low < round(value) < number.high
                options[name] = round(value) if inside else edge
        elif gadget == "leaky_relu":
            options.update(_slope(node.settings["slope"]))
        options.update(self._rounding(source, gadget, number))
        operand = self._operand(source, ref.index)
        self._words[i, number] = self._circuit([operand], gadget, options, node.shape, number, i, node.name)

    def _several(self, i: int, node: Node) -> None:
        number = self._numbers[i]
        options: dict[str, Option] = {}
        if node.kind == "add":
            sources = [self._any(ref.node) for ref in node.inputs]
            options["signs"] = node.settings["signs"]
            if node.settings.get("relu"):
                options["relu"] = True
            options.update(self._sum_rounding(sources, node.settings["signs"], number))
        elif node.kind == "concat":
            sources = [self.word(ref.node, number) for ref in node.inputs]
        else:
            sources = [self.word(ref.node) for ref in node.inputs]
            if node.kind == "multiply":
                options["round"] = True
            else:
                number = self._numbers[i] = self.wires[sources[0]].number
        operands = [self._operand(wire, ref.index) for wire, ref in zip(sources, node.inputs, strict=True)]
        gadget = {"concat": "join"}.get(node.kind, node.kind)
        self._words[i, number] = self._circuit(operands, gadget, options, node.shape, number, i, node.name)

    def _sum_rounding(self, sources: list[int], signs: str, number: Number) -> dict[str, Option]:
        fraction = max(self.wires[wire].number.fraction for wire in sources)
        shift = fraction - number.fraction
        if shift < 1:
            return {}
        for wire, sign in zip(sources, signs, strict=True):
            finest = self.wires[wire].number.fraction == fraction
            if finest and sign == "+" and sources.count(wire) == 1 and self._alone(wire):
                self._raise_bias(wire, 1 << (shift - 1))
                return {}
        return {"round": True}

    def _end(self) -> None:
        ref = self._graph.output
        source = self._any(ref.node)
        if self._settings.permits == "label":
            bits = max((len(ref.index) - 1).bit_length(), 1)
            operands = [self._operand(source, np.array(k)) for k in ref.index.tolist()]
            self.output = self._circuit(operands, "argmax", {}, (), Number(bits, False, 0), None, "argmax")
        elif self._operand(source, ref.index).window is None:
            self.output = source
        else:
            operand = self._operand(source, ref.index)
            exact = dataclasses.replace(self.wires[source].number, bits=62, signed=True)  # costs no AND gate
            self.output = self._circuit([operand], "requantise", {}, ref.shape, exact, None, "output")

    def finish(self, spec: InputSpec, name: str, seen: Sequence[Interval] | None = None) -> Assembled:
        """Choose the rings and build the program.

        Args:
            spec: of the model's input.
            name: of the program.
            seen: for each wire the range on the calibration set; rings then hold it and one bit more, instead of
                everything that any input could give.

        Raises:
            InputError: a layer that can overflow the largest ring.
        """
        intervals: list[Interval] = [(0, 0)] * len(self.wires)
        intervals[0] = (self._entry.low, self._entry.high)
        wires = list(self.wires)
        weights = {i: LinearWeights(*arrays) for i, arrays in self._weights.items()}
        for i, step in enumerate(self.steps):
            if isinstance(step, Linear):
                padded = any(step.padding) or (step.window is not None and bool((step.window.index() < 0).any()))
                interval = linear_interval(weights[i], intervals[step.source], padded=padded)
                bits = bits_for(interval)
                if seen is not None:
                    bits = min(bits, bits_for(seen[step.target]) + 1)
                if bits > self._settings.ring_bits and seen is None:
                    found = f"sums from {interval[0]} to {interval[1]} in layer {step.name!r}, which need {bits} bits"
                    do = "use fewer bits of weights or activations, a larger ring, or accept overflow"
                    raise InputError(f"sums that fit {self._settings.ring_bits} bits", found=found, do=do)
                bits = min(bits, self._settings.ring_bits)
                intervals[step.target] = interval
                number = dataclasses.replace(wires[step.target].number, bits=bits)
                wires[step.target] = dataclasses.replace(wires[step.target], number=number)
            else:
                numbers = tuple(wires[w].number for w in (*(o.source for o in step.operands), step.target))
                sources = [intervals[operand.source] for operand in step.operands]
                intervals[step.target] = circuit_interval(step, numbers, sources)
        public = {i: w for i, w in weights.items() if getattr(self.steps[i], "public", False)}
        entry = self._entry
        projection = None if self._projection is None else PublicArray(self._projection)
        encoding = Encoding(spec.bounds, spec.mean, spec.std, entry.unit, entry.low, entry.high, projection)
        program = Program(
            tuple(wires),
            tuple(self.steps),
            0,
            self.output,
            self._settings.permits,  # type: ignore[arg-type]
            encoding,
            name,
            {"deepseal": deepseal.__version__},
            public,
            spec.num_classes,
        )
        secret = Weights(program.digest(), {i: w for i, w in weights.items() if i not in public})
        secret.check(program)
        return Assembled(program, secret, tuple(self.origin), tuple(intervals))


def _weight_fraction(weight: Reals, bits: int, *, public: bool) -> int:
    """The binary point of weights; public ones that are all one power of two are exact, in one bit."""
    if public and np.ptp(weight) == 0:
        mantissa, exponent = math.frexp(float(weight.flat[0]))
        if mantissa == 0.5:
            return 1 - exponent
    return best_fraction(weight.reshape(-1), bits, signed=True)


def _slope(slope: float) -> dict[str, Option]:
    """The best m 2^-s with m of at most 3 bits; exact 0 and 1 too."""
    if slope == 0:
        return {"slope": 0, "slope_shift": 0}
    shift = 3 - math.frexp(slope)[1]
    m = round(slope * 2.0**shift)
    while m % 2 == 0 and shift > 0:
        m, shift = m // 2, shift - 1
    return {"slope": m, "slope_shift": shift}
