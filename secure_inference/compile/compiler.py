"""``compile_model``: a trained classifier to a program of integers, and a report of what that costs in accuracy."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import torch

from deepseal.adapter import Classifier, Split
from deepseal.secure_inference.compile.assemble import Assembled, Assembler
from deepseal.secure_inference.compile.calibrate import (
    SAMPLES,
    CompileSettings,
    choose_numbers,
    input_format,
    measure,
)
from deepseal.secure_inference.compile.folding import without_last_curve
from deepseal.secure_inference.compile.graph import Graph, run
from deepseal.secure_inference.compile.lower import lower
from deepseal.secure_inference.compile.program import Linear, Number, Program
from deepseal.secure_inference.compile.projected import project, projected, projection_of
from deepseal.secure_inference.compile.simulate import encode_input, simulate
from deepseal.secure_inference.compile.weights import Weights

_REPORTED = 64  # samples for the errors of layers


@dataclasses.dataclass(frozen=True)
class LayerReport:
    """What compilation did to one wire.

    Attributes:
        name: of the layer in the model.
        step: ``linear``, ``conv1d``, ``conv2d`` or the gadget.
        shape: of the wire.
        bits: of each element; for sums, of the ring.
        fraction: of each element.
        low: smallest integer that any input can give; likewise ``high``.
        seen_low: smallest integer on the calibration set; likewise ``seen_high``.
        error: root mean square difference from the real-valued network, relative to its root mean square; None
            where no layer of the network corresponds.
        and_gates: of all lanes together; the addition of the parties' shares is not counted.
        products: multiplications with weights; in a program with masks only those that the output depends on.
    """

    name: str
    step: str
    shape: tuple[int, ...]
    bits: int
    fraction: int
    low: int
    high: int
    seen_low: int
    seen_high: int
    error: float | None
    and_gates: int
    products: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {**dataclasses.asdict(self), "shape": list(self.shape)}


@dataclasses.dataclass(frozen=True, eq=False)
class Compiled:
    """What ``compile_report`` gives."""

    program: Program
    weights: Weights
    layers: tuple[LayerReport, ...]


def compile_model(
    model: Classifier,
    calibration: Split,
    *,
    activation_bits: int = 8,
    weight_bits: int = 8,
    accept_overflow: bool = False,
    permits: str = "label",
    activations: str = "piecewise_linear",
    **further: Any,
) -> tuple[Program, Weights]:
    """Compile a classifier.

    Normalisation belongs to the encoding of the input: it is done in real numbers before rounding, so that zero padding
    of a first convolution stays exact.

    Args:
        model: stays as it is.
        calibration: samples that formats are chosen on (the first 512).
        activation_bits: of the words between layers.
        weight_bits: of the weights.
        accept_overflow: take rings that hold what the calibration set needs and one bit more, instead of rings that no
            input can overflow.
        permits: ``label``, or ``logits`` for the client to learn them all.
        activations: form of sigmoid, tanh, SiLU and GELU; see ``curves``.
        further: other fields of ``CompileSettings``.

    Returns:
        The public program and the secret weights.

    Raises:
        InputError: unsupported layers (all are named), samples that do not fit, or a layer that can overflow.
    """
    settings = CompileSettings.from_mapping(
        {
            "activation_bits": activation_bits,
            "weight_bits": weight_bits,
            "accept_overflow": accept_overflow,
            "permits": permits,
            "activations": activations,
            **further,
        }
    )
    _, assembled = _compile(model, calibration, settings)
    return assembled.program, assembled.weights


def compile_report(model: Classifier, calibration: Split, settings: CompileSettings) -> Compiled:
    """The same as ``compile_model``, with a report for each wire."""
    graph, assembled = _compile(model, calibration, settings)
    x = calibration.tensor[:_REPORTED]
    values = simulate(assembled.program, assembled.weights, encode_input(assembled.program, x).values,
                      intermediates=True)  # fmt: skip
    with torch.no_grad():
        real = run(graph, _entering(model, x))
    return Compiled(assembled.program, assembled.weights, _layers(assembled, values, real))


def _compile(model: Classifier, calibration: Split, settings: CompileSettings) -> tuple[Graph, Assembled]:
    calibration.check(model.spec)
    graph, projection = lower(model), projection_of(model)
    if projection is not None:
        graph = projected(graph, projection)
    if settings.permits == "label":
        graph = without_last_curve(graph)
    samples = calibration.tensor[:SAMPLES]
    seen = measure(graph, _entering(model, samples))
    numbers = choose_numbers(graph, seen, settings)
    entry = input_format(graph, model.spec, seen[0], settings, projected=projection is not None)
    assembler = Assembler(graph, numbers, entry, settings, projection)
    assembler.assemble()
    name = model.architecture or type(model.module).__name__
    if not settings.accept_overflow:
        return graph, assembler.finish(model.spec, name)
    wide = Assembler(graph, numbers, entry, dataclasses.replace(settings, ring_bits=62), projection)
    wide.assemble()
    sound = wide.finish(model.spec, name)
    x = encode_input(sound.program, samples).values
    values = simulate(sound.program, sound.weights, x, intermediates=True)
    intervals = [(int(values[i].min()), int(values[i].max())) for i in range(len(sound.program.wires))]
    return graph, assembler.finish(model.spec, name, intervals)


def _entering(model: Classifier, x: torch.Tensor) -> torch.Tensor:
    """What the graph's input is for samples in data space: normalised, and projected if the model has a projection."""
    normalised, projection = model.spec.normalise(x.double()), projection_of(model)
    return normalised if projection is None else project(normalised, projection)


def _layers(assembled: Assembled, values: dict[int, Any], real: list[torch.Tensor]) -> tuple[LayerReport, ...]:
    from deepseal.secure_inference.compile.gadgets import netlist

    program = assembled.program
    rows = []
    for step in program.steps:
        wire = program.wires[step.target]
        got = values[step.target]
        node = assembled.origin[step.target]
        error = None if node is None else _error(got, wire.number, real[node].numpy())
        gates = 0 if isinstance(step, Linear) else netlist(step.gadget, step.options, step.numbers(program)).and_gates
        products = 0
        if isinstance(step, Linear):
            products = wire.size * int(np.prod(step.weight_shape[1:]))
            if program.live is not None:
                products = len(step.connections(program).weights)
        rows.append(
            LayerReport(
                step.name,
                step.op if isinstance(step, Linear) else step.gadget,
                wire.shape,
                wire.number.bits,
                wire.number.fraction,
                *assembled.intervals[step.target],
                int(got.min()),
                int(got.max()),
                error,
                gates * wire.size,
                products,
            )
        )
    return tuple(rows)


def _error(got: Any, number: Number, real: Any) -> float:
    difference = got.reshape(len(got), -1) * 2.0**-number.fraction - real.reshape(len(real), -1)
    size = float(np.sqrt(np.mean(real**2)))
    return float(np.sqrt(np.mean(difference**2))) / size if size > 0 else 0.0
