"""Run a program on integers in the clear: bit for bit what the two parties compute."""

from __future__ import annotations

import dataclasses
import math
from typing import Literal, overload

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from deepseal.errors import InputError
from deepseal.secure_inference.compile import gadgets
from deepseal.secure_inference.compile.arrays import LinearWeights
from deepseal.secure_inference.compile.program import Circuit, Linear, Program
from deepseal.secure_inference.compile.weights import Weights, layer_weights

Ints = NDArray[np.int64]
_EXACT = 2.0**52  # integers up to twice this are exact in float64
_BATCH = 1 << 23  # elements of the widest wire in one batch


@dataclasses.dataclass(frozen=True, eq=False)
class Encoded:
    """Integers of the input wire.

    Attributes:
        values: (N, …) int64.
        clamped: number of values that were outside the bounds or the format and became the nearest value inside.
    """

    values: Ints
    clamped: int


def encode_input(program: Program, x: ArrayLike, *, clamp: bool = True) -> Encoded:
    """Samples in data space as integers: normalised, projected, divided by the unit, rounded (halves to even).

    Args:
        program: gives shape, bounds, normalisation and format.
        x: (N, …) samples, or one sample without N.
        clamp: take the nearest value inside the bounds; else refuse values outside.

    Raises:
        InputError: another shape, NaN, or a value outside the bounds with ``clamp=False``.
    """
    wire, encoding = program.wires[program.input], program.encoding
    array = np.asarray(x.detach().cpu() if isinstance(x, torch.Tensor) else x)
    if array.dtype.kind not in "fiub":
        raise InputError("numbers as input", found=str(array.dtype), do="convert the input")
    values = array.astype(np.float64)
    shape = program.sample_shape
    if values.shape == shape:
        values = values[None]
    if values.shape[1:] != shape:
        expected = f"inputs of shape (N, {', '.join(map(str, shape))})"
        raise InputError(expected, found=str(values.shape), do="use the data that the model was trained for")
    if not np.isfinite(values).all():
        raise InputError("finite inputs", found="NaN or infinite values", do="clean the data")
    low, high = encoding.bounds
    slack = 1e-6 * (high - low) if math.isfinite(high - low) else 0.0
    outside = (values < low - slack) | (values > high + slack)
    count = int(outside.sum())
    if count and not clamp:
        found = f"{count} values outside, from {values.min():g} to {values.max():g}"
        raise InputError(f"inputs in [{low:g}, {high:g}]", found=found, do="scale the data, or let them be clamped")
    values = np.clip(values, low, high)
    for part, scale in ((encoding.mean, False), (encoding.std, True)):
        if part is not None:
            numbers = np.array(part).reshape(-1, *(1,) * (len(shape) - 1))
            values = values / numbers if scale else values - numbers
    if encoding.projection is not None:
        matrix = encoding.projection.array
        values = values.reshape(len(values), -1) @ matrix.reshape(len(matrix), -1).T
    exact = np.rint(values / encoding.unit * 2.0**wire.number.fraction)
    clipped = np.clip(exact, *program.input_range)
    far = np.abs(clipped - exact) > 1
    if encoding.projection is not None:
        if far.any() and not clamp:
            found = f"{int(far.sum())} projected values outside"
            do = "use inputs like those of the calibration set, or let them be clamped"
            raise InputError("inputs whose projection is in the calibrated range", found=found, do=do)
        outside = np.zeros_like(far)
    count += int((far & ~outside).sum())
    return Encoded(clipped.astype(np.int64), count)


def decode_output(program: Program, values: ArrayLike) -> NDArray[np.int64] | NDArray[np.float64]:
    """Labels (N,) as integers, or logits (N, …) as real numbers."""
    integers = np.asarray(values, dtype=np.int64)
    if program.permits == "label":
        return integers.reshape(len(integers))
    return np.asarray(integers * 2.0 ** -program.wires[program.output].number.fraction, dtype=np.float64)


@overload
def simulate(program: Program, weights: Weights | None, x: Ints, *, intermediates: Literal[False] = False) -> Ints: ...


@overload
def simulate(
    program: Program, weights: Weights | None, x: Ints, *, intermediates: Literal[True]
) -> dict[int, Ints]: ...


def simulate(
    program: Program, weights: Weights | None, x: Ints, *, intermediates: bool = False
) -> Ints | dict[int, Ints]:
    """Run a program on a batch.

    Args:
        program: what to run.
        weights: of its secret steps; None if there are none.
        x: (N, …) integers of the input wire, from ``encode_input``.
        intermediates: give all wires instead of the output.

    Returns:
        (N, …) int64 of the output wire, or of every wire by its number. Accumulators are signed.

    Raises:
        InputError: inputs or weights that do not fit the program.
    """
    wire = program.wires[program.input]
    x = np.asarray(x)
    if x.dtype.kind not in "iu" or x.shape[1:] != wire.shape:
        found = f"{x.dtype} of shape {x.shape}"
        raise InputError(f"integers of shape (N, {wire.shape})", found=found, do="use encode_input")
    low, high = program.input_range
    if len(x) and (int(x.min()) < low or int(x.max()) > high):
        found = f"values from {x.min()} to {x.max()}"
        raise InputError(f"integers {low} … {high}", found=found, do="use encode_input")
    if weights is not None:
        weights.check(program)
    wanted = range(len(program.wires)) if intermediates else (program.output,)
    size = max(1, _BATCH // max(w.size for w in program.wires))
    parts = [_run(program, weights, x[i : i + size].astype(np.int64), wanted) for i in range(0, len(x), size)]
    empty = {i: np.zeros((0, *program.wires[i].shape), dtype=np.int64) for i in wanted}
    joined = {i: np.concatenate([part[i] for part in parts]) if parts else empty[i] for i in wanted}
    return joined if intermediates else joined[program.output]


def _run(program: Program, weights: Weights | None, x: Ints, wanted: range | tuple[int, ...]) -> dict[int, Ints]:
    values = {program.input: x}
    last = {source: i for i, step in enumerate(program.steps) for source in _sources(step)}
    for i, step in enumerate(program.steps):
        if isinstance(step, Linear):
            values[step.target] = run_linear(program, step, layer_weights(program, weights, i), values[step.source])
        else:
            values[step.target] = run_circuit(program, step, [values[o.source] for o in step.operands])
        for source in _sources(step):
            if last[source] == i and source not in wanted:
                values.pop(source, None)
    return {i: values[i] for i in wanted}


def _sources(step: Linear | Circuit) -> list[int]:
    return [step.source] if isinstance(step, Linear) else [operand.source for operand in step.operands]


def run_linear(program: Program, step: Linear, weights: LinearWeights, x: Ints) -> Ints:
    """One linear step on a batch: (N, source) to (N, target), as signed numbers modulo 2^l."""
    tensor = x
    if step.window is not None:
        tensor = gather(x, step.window.index(), 0).reshape(len(x), *step.window.shape)
    total = _product(step, weights, tensor)
    number = program.wires[step.target].number
    half = 1 << (number.bits - 1)
    return total if number.bits == 64 else ((total + half) & ((1 << number.bits) - 1)) - half


def _product(step: Linear, weights: LinearWeights, x: Ints) -> Ints:
    """W x + b in integers: by floating point where no partial sum can leave the exact range, else modulo 2^64."""
    largest = max(float(np.abs(x).max(initial=0)), 1.0)
    rows = np.abs(weights.weight.astype(np.float64)).reshape(len(weights.weight), -1).sum(axis=1)
    exact = float((rows * largest + np.abs(weights.bias)).max(initial=0.0)) < _EXACT
    dtype = torch.float64 if exact else torch.int64
    w, b, v = (torch.tensor(part, dtype=dtype) for part in (weights.weight, weights.bias, x))
    if step.op == "linear":
        result = v @ w.T + b
    elif exact:
        convolve = torch.nn.functional.conv1d if step.op == "conv1d" else torch.nn.functional.conv2d
        result = convolve(v, w, b, step.stride, step.padding, step.dilation, step.groups)
    else:
        return _convolved(step, weights, x)
    return result.to(torch.int64).numpy()


def _convolved(step: Linear, weights: LinearWeights, x: Ints) -> Ints:
    """A convolution in 64-bit integers, one kernel place after the other."""
    shape = step.target_shape(x.shape[1:])
    padded = np.pad(x, [(0, 0), (0, 0), *((p, p) for p in step.padding)])
    total = np.zeros((len(x), *shape), dtype=np.int64)
    out, groups = shape[0] // step.groups, step.groups
    for place in np.ndindex(*step.weight_shape[2:]):
        window = tuple(
            slice(k * d, k * d + (n - 1) * s + 1, s)
            for k, d, n, s in zip(place, step.dilation, shape[1:], step.stride, strict=True)
        )
        everything = (slice(None), slice(None))
        part = padded[everything + window].reshape(len(x), groups, -1, math.prod(shape[1:]))
        w = weights.weight[everything + place].reshape(groups, out, -1)
        total += np.einsum("ngip,goi->ngop", part, w).reshape(total.shape)
    return total + weights.bias.reshape(-1, *(1,) * (len(shape) - 1))


def run_circuit(program: Program, step: Circuit, sources: list[Ints]) -> Ints:
    """One circuit step on a batch: a list of (N, …) operands' sources to (N, target)."""
    numbers = step.numbers(program)
    wanted = gadgets.gadget(step.gadget)
    words = []
    for operand, number, source in zip(step.operands, numbers, sources, strict=False):
        flat = source.reshape(len(source), -1)
        words.append(
            flat if operand.window is None else gather(flat, operand.window.index(), wanted.padding_value(number))
        )
    result = gadgets.evaluate(step.gadget, words, step.options, numbers)
    return result.reshape(len(result), *program.wires[step.target].shape)


def gather(x: Ints, index: Ints, padding: int) -> Ints:
    """(N, …) to (N, lanes): the elements with these flat indices, ``padding`` for -1."""
    flat = x.reshape(len(x), -1)
    result = flat[:, index]
    if index.min() < 0:
        result[:, index < 0] = padding
    return result
