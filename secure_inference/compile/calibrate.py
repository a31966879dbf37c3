"""Number formats of a graph from a calibration set: what each layer's words stand for, with power-of-two scales."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepseal.adapter.spec import InputSpec
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.secure_inference.compile.curves import FORMS
from deepseal.secure_inference.compile.graph import Graph, Node, run
from deepseal.secure_inference.compile.program import Number

Reals = NDArray[np.float64]
SPARSITY = ("secret", "public")
SAMPLES = 512  # of the calibration set
_KEPT = 100_000  # values of each layer
_BATCH = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompileSettings(Parameters):
    """How a model becomes a program."""

    activation_bits: int = parameter(8, "bits of the values between layers", minimum=2, maximum=16)
    weight_bits: int = parameter(8, "bits of the weights", minimum=2, maximum=16)
    input_bits: int | None = parameter(None, "bits of the input; as activation_bits when none", minimum=1, maximum=16)
    state_bits: int = parameter(4, "further bits of sums and states that no linear layer reads", minimum=0, maximum=8)
    ring_bits: int = parameter(62, "largest ring", minimum=8, maximum=62)
    accept_overflow: bool = parameter(False, "rings from the calibration set only: rarer inputs may wrap around")
    permits: str = parameter("label", "what the client learns", choices=("label", "logits"))
    sparsity: str = parameter("secret", "public: the map of zero weights, whose work is left out", choices=SPARSITY)
    activations: str = parameter("piecewise_linear", "form of sigmoid, tanh, SiLU, GELU", choices=FORMS)


@dataclasses.dataclass(frozen=True, eq=False)
class Statistics:
    """What a layer gave on the calibration set: a sample of its values, and their range."""

    sample: Reals
    low: float
    high: float


def measure(graph: Graph, x: Tensor) -> list[Statistics]:
    """Statistics of every node on normalised inputs (N, …).

    Raises:
        InputError: a layer that gives infinite values or NaN.
    """
    parts: list[list[Reals]] = [[] for _ in graph.nodes]
    ranges = [(math.inf, -math.inf)] * len(graph.nodes)
    kept = max(1, _KEPT * _BATCH // max(len(x), 1))
    with torch.no_grad():
        for batch in x.split(_BATCH):
            for i, value in enumerate(run(graph, batch)):
                flat = value.reshape(-1)
                low, high = float(flat.min()), float(flat.max())
                if not math.isfinite(low + high):
                    found, do = f"infinite values or NaN in {graph.nodes[i].name!r}", "train the model again"
                    raise InputError("finite values in every layer", found=found, do=do)
                ranges[i] = (min(ranges[i][0], low), max(ranges[i][1], high))
                parts[i].append(flat[:: max(1, len(flat) // kept)].numpy())
    return [Statistics(np.concatenate(part), *limits) for part, limits in zip(parts, ranges, strict=True)]


def best_fraction(sample: Reals, bits: int, *, signed: bool) -> int:
    """The binary point with the smallest mean square error of rounding and saturation."""
    largest = float(np.abs(sample).max(initial=0.0))
    if largest == 0:
        return bits - int(signed)
    top = bits - int(signed) - math.frexp(largest)[1]
    low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
    best, least = top, math.inf
    for fraction in range(top - 1, top + 5):
        scaled = sample * 2.0**fraction
        error = float(np.mean((np.clip(np.floor(scaled + 0.5), low, high) - scaled) ** 2)) * 4.0**-fraction
        if error < least * (1 - 1e-9):
            best, least = fraction, error
    return best


def choose_numbers(graph: Graph, statistics: list[Statistics], settings: CompileSettings) -> list[Number]:
    """The format of each node's activations. For linear layers: the one of their sums, where those are cut to words."""
    bits = settings.activation_bits
    numbers: list[Number] = []
    readers = graph.consumers()
    for i, (node, seen) in enumerate(zip(graph.nodes, statistics, strict=True)):
        if node.kind == "max":
            numbers.append(numbers[node.inputs[0].node])
        elif node.kind == "activation":
            numbers.append(_of_activation(node, seen, bits))
        elif node.kind == "concat" and len({numbers[ref.node] for ref in node.inputs}) == 1:
            numbers.append(numbers[node.inputs[0].node])
        else:
            inner = node.kind in ("add", "multiply") and not _reaches_linear(graph, readers, i)
            numbers.append(_fitted(seen, bits + settings.state_bits * inner))
    return numbers


def _reaches_linear(graph: Graph, readers: list[list[int]], node: int) -> bool:
    """Whether a linear layer reads the words of a node, perhaps behind pooling or concatenation."""
    for reader in readers[node]:
        if reader < 0:
            continue
        kind = graph.nodes[reader].kind
        if kind == "affine" or (kind in ("max", "concat") and _reaches_linear(graph, readers, reader)):
            return True
    return False


def _fitted(seen: Statistics, bits: int) -> Number:
    signed = seen.low < 0
    return Number(bits, signed, best_fraction(seen.sample, bits, signed=signed))


def _of_activation(node: Node, seen: Statistics, bits: int) -> Number:
    function = node.settings["function"]
    if function == "sigmoid":
        return Number(bits, False, bits)
    if function == "tanh":
        return Number(bits, True, bits - 1)
    if function == "relu" or (function == "clamp" and node.settings["low"] >= 0):
        return Number(bits, False, best_fraction(np.maximum(seen.sample, 0), bits, signed=False))
    return Number(bits, True, best_fraction(seen.sample, bits, signed=True))


@dataclasses.dataclass(frozen=True)
class InputFormat:
    """Format of the input wire, its unit (see ``program.Encoding``), and its smallest and largest integer."""

    number: Number
    unit: float
    low: int
    high: int


def input_format(
    graph: Graph, spec: InputSpec, seen: Statistics, settings: CompileSettings, *, projected: bool = False
) -> InputFormat:
    """The input's format: over its bounds, exactly for evenly spaced values where only secret linear layers read it.

    A projected input has no bounds: the format holds what the calibration set gave.
    """
    bits = settings.input_bits or settings.activation_bits
    if projected:
        ends = torch.tensor([seen.low, seen.high], dtype=torch.float64)
    else:
        ends = spec.normalise(torch.tensor([spec.bounds] * spec.shape[0], dtype=torch.float64).T.reshape(
            2, spec.shape[0], *(1,) * (len(spec.shape) - 1)).expand(2, *spec.shape))  # fmt: skip
    low, high = float(ends.min()), float(ends.max())
    signed = low < 0
    if bits < 1 + int(signed):
        raise InputError("at least 2 bits of an input that can be negative", found=f"{bits}", do="raise input_bits")
    readers = [graph.nodes[reader].affine if reader >= 0 else None for reader in graph.consumers()[0]]
    linear = all(affine is not None and not affine.public for affine in readers)
    if linear:
        number = Number(bits, signed, bits - int(signed))
        unit = max(abs(low), abs(high)) / (number.high * 2.0**-number.fraction)
    else:
        number, unit = Number(bits, signed, best_fraction(seen.sample, bits, signed=signed)), 1.0
    scale = 2.0**number.fraction / unit
    limits = (max(min(round(end * scale), number.high), number.low) for end in (low, high))
    return InputFormat(number, unit, *limits)
