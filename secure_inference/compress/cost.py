"""What one question costs, read from the public program: multiplications, AND gates, bytes of linear layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

from deepseal.secure_inference.compile import gadgets
from deepseal.secure_inference.compile.arrays import PublicArray
from deepseal.secure_inference.compile.program import Linear, Program

_CIPHERTEXTS = 32  # bytes of an AND gate: two half gates (Zahur, Rosulek, Evans, 2015)


@dataclasses.dataclass(frozen=True)
class Cost:
    """For one sample in mode ``mixed``.

    Attributes:
        multiplications: of an input with a weight, without padding and without what the public map leaves out.
        and_gates: of all circuits, with the additions of shares in front of them.
        linear_bytes: messages of the linear layers, from the server to the client.
        table_bytes: garbled tables.
    """

    multiplications: int
    and_gates: int
    linear_bytes: int
    table_bytes: int

    def as_dict(self) -> dict[str, int]:
        """Plain values for a record."""
        return dataclasses.asdict(self)


def program_cost(program: Program) -> Cost:
    """Count a program."""
    multiplications = gates = linear = 0
    for step in program.steps:
        target = program.wires[step.target]
        if isinstance(step, Linear):
            degrees = np.diff(step.connections(program).starts)
            multiplications += int(degrees.sum())
            for bit in range(program.wires[step.source].number.bits):  # a bit b needs its weights modulo 2^(l-b) only
                linear += int((-(-degrees * (target.number.bits - bit) // 8)).sum())
            continue
        numbers = step.numbers(program)
        lane = gadgets.netlist(step.gadget, step.options, numbers).and_gates
        for operand in step.operands:
            wire = program.wires[operand.source]
            lane += (wire.number.bits - 1) * (wire.kind == "accumulator")
        gates += lane * target.size
    return Cost(multiplications, gates, linear, gates * _CIPHERTEXTS)


def masked_counts(program: Program, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """For each weight how often one sample is multiplied with it, once the program's layers have these masks.

    Args:
        program: of the network without masks.
        masks: 0 or 1 by name of the layer, of the weights' shapes.
    """
    steps = list(program.steps)
    layers = layers_of(program)
    for name, mask in masks.items():
        place, step = layers[name]
        steps[place] = dataclasses.replace(step, mask=PublicArray(mask.bool().cpu().numpy()))
    masked = dataclasses.replace(program, steps=tuple(steps))
    counts = {}
    for name, (_, step) in layers_of(masked).items():
        met = np.bincount(step.connections(masked).weights, minlength=masks[name].numel())
        counts[name] = torch.from_numpy(met.reshape(masks[name].shape)).to(masks[name])
    return counts


def layers_of(program: Program) -> dict[str, tuple[int, Linear]]:
    """Steps with secret weights, with their places, by the name of their layer."""
    found = enumerate(program.steps)
    return {step.name: (i, step) for i, step in found if isinstance(step, Linear) and not step.public}
