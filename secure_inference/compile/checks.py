"""What makes a program sound; also for programs that come from the other party."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from deepseal.errors import InputError
from deepseal.secure_inference.compile import gadgets
from deepseal.secure_inference.compile.windows import view_index

if TYPE_CHECKING:
    from deepseal.secure_inference.compile.program import Circuit, Linear, Program

_MOST_ELEMENTS = 1 << 26
_DO = "compile the model again"


def check_program(program: Program) -> None:
    """Refuse a program whose parts do not fit together.

    Raises:
        InputError: the first thing that is wrong.
    """
    from deepseal.secure_inference.compile.program import Circuit, Linear

    for place, wire in enumerate(program.wires):
        if wire.kind not in ("activation", "accumulator") or any(n < 1 for n in wire.shape):
            raise InputError("wires of positive sizes", found=f"{wire.shape} on wire {place}", do=_DO)
        if wire.size > _MOST_ELEMENTS:
            raise InputError(
                f"at most {_MOST_ELEMENTS} elements a wire", found=f"{wire.size}", do="use a smaller model"
            )
        if wire.kind == "accumulator" and not wire.number.signed:
            raise InputError("signed accumulators", found=f"wire {place}, unsigned", do=_DO)
    ready: set[int] = {_wire(program, program.input)}
    if program.wires[program.input].kind != "activation":
        raise InputError("an activation as input", found="an accumulator", do=_DO)
    number, (low, high) = program.wires[program.input].number, program.input_range
    if not number.low <= low <= high <= number.high:
        raise InputError(f"inputs within {number.low} … {number.high}", found=f"{low} … {high}", do=_DO)
    _check_projection(program)
    for step in program.steps:
        sources = [step.source] if isinstance(step, Linear) else [operand.source for operand in step.operands]
        if not sources or any(_wire(program, source) not in ready for source in sources):
            raise InputError("steps that read what is there", found=f"step {step.name!r}", do=_DO)
        if _wire(program, step.target) in ready:
            raise InputError("wires that are written once", found=f"wire {step.target} twice", do=_DO)
        if isinstance(step, Linear):
            _check_linear(program, step)
        else:
            _check_circuit(program, step)
        ready.add(step.target)
    if _wire(program, program.output) not in ready:
        raise InputError("an output that a step writes", found=f"wire {program.output}", do=_DO)
    last = program.steps[-1] if program.steps else None
    labelled = isinstance(last, Circuit) and last.gadget == "argmax" and last.target == program.output
    if program.permits not in ("label", "logits") or (program.permits == "label") != labelled:
        raise InputError("argmax at the end of a program that permits labels only", found=program.permits, do=_DO)
    public = {i for i, step in enumerate(program.steps) if isinstance(step, Linear) and step.public}
    if public != set(program.constants):
        raise InputError("constants for the public steps", found=f"steps {sorted(program.constants)}", do=_DO)
    for index, weights in program.constants.items():
        step = program.steps[index]
        if not isinstance(step, Linear) or weights.weight.shape != step.weight_shape:
            raise InputError("constants of the steps' shapes", found=f"{weights.weight.shape}", do=_DO)
        if step.mask is not None and bool(weights.weight[~step.mask.array].any()):
            raise InputError("constants that are 0 outside the mask", found=f"others in step {index}", do=_DO)


def _check_projection(program: Program) -> None:
    projection, wire = program.encoding.projection, program.wires[program.input]
    if projection is None:
        return
    shape = projection.array.shape
    if projection.array.dtype.kind != "f" or len(shape) < 2 or wire.shape != shape[:1] or 0 in shape:
        found = f"{projection.array.dtype} of shape {shape} for an input of shape {wire.shape}"
        raise InputError("a projection to the input's shape", found=found, do=_DO)
    if math.prod(shape) > _MOST_ELEMENTS:
        raise InputError(f"a projection of at most {_MOST_ELEMENTS} numbers", found=f"{math.prod(shape)}", do=_DO)


def _wire(program: Program, wire: int) -> int:
    if not 0 <= wire < len(program.wires):
        raise InputError(f"wires 0 … {len(program.wires) - 1}", found=str(wire), do=_DO)
    return wire


def _check_linear(program: Program, step: Linear) -> None:
    source, target = program.wires[step.source], program.wires[step.target]
    if source.kind != "activation" or target.kind != "accumulator":
        raise InputError("a linear step from an activation to an accumulator", found=f"step {step.name!r}", do=_DO)
    if target.number.fraction != source.number.fraction + step.weight.fraction:
        found = f"{target.number.fraction} in {step.name!r}"
        expected = f"a fraction of {source.number.fraction + step.weight.fraction} bits"
        raise InputError(expected, found=found, do=_DO)
    if step.op not in ("linear", "conv1d", "conv2d") or len(step.weight_shape) != 2 + step.spatial:
        raise InputError("linear, conv1d or conv2d with its weights", found=f"{step.op!r} {step.weight_shape}", do=_DO)
    shape = step.input_shape(program)
    settings = (step.stride, step.padding, step.dilation)
    fits = all(len(setting) == step.spatial for setting in settings) and all(n >= 1 for n in step.weight_shape)
    fits = fits and all(n >= 1 for n in (*step.stride, *step.dilation, step.groups)) and min((0, *step.padding)) == 0
    if step.op == "linear":
        fits = fits and len(shape) >= 1 and shape[-1] == step.weight_shape[1] and step.groups == 1
    else:
        fits = fits and len(shape) == 1 + step.spatial and shape[0] == step.weight_shape[1] * step.groups
        fits = fits and step.weight_shape[0] % step.groups == 0
    if not fits or step.target_shape(shape) != target.shape:
        found = f"{shape} to {target.shape} with weights {step.weight_shape} in {step.name!r}"
        raise InputError("shapes that fit together", found=found, do=_DO)
    if step.window is not None:
        view_index(step.window, source.size)
    if step.mask is not None and (step.mask.array.dtype.kind != "b" or step.mask.array.shape != step.weight_shape):
        found = f"{step.mask.array.dtype} of shape {step.mask.array.shape} in {step.name!r}"
        raise InputError("a mask of booleans of the weights' shape", found=found, do=_DO)


def _check_circuit(program: Program, step: Circuit) -> None:
    target = program.wires[step.target]
    if target.kind != "activation":
        raise InputError("a circuit that writes an activation", found=f"step {step.name!r}", do=_DO)
    for operand in step.operands:
        size = program.wires[operand.source].size
        lanes = size if operand.window is None else math.prod(operand.window.shape)
        if lanes != target.size:
            found = f"{lanes} in step {step.name!r}"
            raise InputError(f"operands of {target.size} lanes", found=found, do=_DO)
        if operand.window is not None:
            view_index(operand.window, size)
    zeros = [np.zeros(1, dtype=np.int64)] * len(step.operands)
    gadgets.evaluate(step.gadget, zeros, step.options, step.numbers(program))
