"""A program made ready for the yao protocol: its layers as circuits, and what they cost."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from deepseal.secure_inference.compile import gadgets
from deepseal.secure_inference.compile.program import Circuit, Linear, Program
from deepseal.secure_inference.compile.weights import Weights, layer_weights
from deepseal.secure_inference.protocol.parties import Program as Replayed
from deepseal.secure_inference.roles.layers import Read
from deepseal.secure_inference.roles.memory import label_bytes
from deepseal.secure_inference.roles.owned import Secrets, secrets_of
from deepseal.secure_inference.roles.sums import Ints, Sums, format_of, groups_of, public_circuit, sums_of


@dataclass(frozen=True, eq=False)
class SecretLayer:
    """A linear step whose weights one party knows."""

    step: int
    name: str
    source: int
    target: int
    sums: tuple[Sums, ...]

    @property
    def gates(self) -> tuple[int, int]:
        """Whole and half gates for one sample."""
        found = [sums.gates for sums in self.sums]
        return sum(whole for whole, _ in found), sum(half for _, half in found)


@dataclass(frozen=True, eq=False)
class PublicLayer:
    """A linear step whose weights are public: one circuit for all outputs with the same weights and bias.

    Attributes:
        runs: circuit, (lanes, products) source elements, (lanes,) outputs.
    """

    step: int
    name: str
    source: int
    target: int
    runs: tuple[tuple[Replayed, Ints, Ints], ...]

    @property
    def gates(self) -> tuple[int, int]:
        """Whole and half gates for one sample."""
        return sum(program.netlist.and_gates * len(outputs) for program, _, outputs in self.runs), 0


@dataclass(frozen=True, eq=False)
class GadgetLayer:
    """A circuit step."""

    step: int
    name: str
    target: int
    reads: tuple[Read, ...]
    program: Replayed
    lanes: int

    @property
    def gates(self) -> tuple[int, int]:
        """Whole and half gates for one sample."""
        return self.program.netlist.and_gates * self.lanes, 0


Layer: TypeAlias = SecretLayer | PublicLayer | GadgetLayer


@dataclass(frozen=True, eq=False)
class Garbled:
    """A program made ready once, for all sessions of a party.

    Attributes:
        program: what it was.
        layers: its steps, in order.
        secrets: by step, at the server: for each group of outputs.
    """

    program: Program
    layers: tuple[Layer, ...]
    secrets: Mapping[int, tuple[Secrets, ...]] = field(default_factory=dict, repr=False)

    @cached_property
    def label_bytes(self) -> int:
        """That a party holds for a sample, at most."""
        return label_bytes(self.program, shares=False)

    @cached_property
    def digest(self) -> str:
        """Of the program."""
        return self.program.digest()


def prepare_garbled(program: Program) -> Garbled:
    """For the client."""
    return Garbled(program, tuple(_layer(program, number) for number in range(len(program.steps))))


def prepare_garbled_server(program: Program, weights: Weights | None) -> Garbled:
    """For the server.

    Raises:
        InputError: weights of another program, or none where there are secret ones.
    """
    if weights is not None:
        weights.check(program)
    ready, secrets = prepare_garbled(program), {}
    for layer in ready.layers:
        step = program.steps[layer.step]
        if isinstance(layer, SecretLayer) and isinstance(step, Linear):
            channels = step.channel_of(program.wires[step.target].shape)
            found = layer_weights(program, weights, layer.step)
            secrets[layer.step] = tuple(secrets_of(sums, found, channels) for sums in layer.sums)
    return replace(ready, secrets=secrets)


def gate_counts(program: Program) -> tuple[tuple[str, int, int], ...]:
    """For each step: its name, and its whole gates (32 bytes each) and half gates (16 bytes) for one sample."""
    return tuple((layer.name, *layer.gates) for layer in prepare_garbled(program).layers)


def _layer(program: Program, number: int) -> Layer:
    step = program.steps[number]
    if isinstance(step, Circuit):
        return _gadget(program, number, step)
    name = step.name or step.op
    if step.public:
        return PublicLayer(number, name, step.source, step.target, tuple(_public_runs(program, number, step)))
    return SecretLayer(number, name, step.source, step.target, sums_of(program, step))


def _public_runs(program: Program, number: int, step: Linear) -> Iterator[tuple[Replayed, Ints, Ints]]:
    constants, numbers = program.constants[number], format_of(program, step)
    flat = np.append(constants.weight.reshape(-1).astype(np.int64), 0)
    biases = constants.bias.astype(np.int64)[step.channel_of(program.wires[step.target].shape)]
    for group in groups_of(program, step):
        rows = np.column_stack([flat[group.weights], biases[group.outputs]])
        for row in np.unique(rows, axis=0):
            chosen = np.flatnonzero((rows == row).all(axis=1))
            needed = row[:-1] != 0
            sources = group.sources.reshape(len(group.sources), -1)[group.sets[chosen]][:, needed]
            program_of = public_circuit(tuple(row[:-1][needed].tolist()), int(row[-1]), numbers)
            yield program_of, sources.astype(np.int64), group.outputs[chosen]


def _gadget(program: Program, number: int, step: Circuit) -> GadgetLayer:
    numbers = step.numbers(program)
    reads = []
    for operand, source in zip(step.operands, numbers, strict=False):
        low = gadgets.gadget(step.gadget).padding_value(source)
        bits = tuple(low >> bit & 1 for bit in range(source.bits))
        index = operand.index(program)
        whole = np.array_equal(index, np.arange(program.wires[operand.source].size))
        reads.append(Read(operand.source, index, False, bits, whole))
    replayed = Replayed(gadgets.netlist(step.gadget, step.options, numbers))
    return GadgetLayer(
        number, step.name or step.gadget, step.target, tuple(reads), replayed, program.wires[step.target].size
    )
