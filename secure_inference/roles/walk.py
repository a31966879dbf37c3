"""The way through a program's layers in mixed mode, the same for both parties."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeAlias

import numpy as np

from deepseal.secure_inference.protocol.extension import BLOCK, Array
from deepseal.secure_inference.roles.layers import CircuitLayer, LinearLayer, Prepared, Read, Words, gather
from deepseal.secure_inference.roles.memory import ends

Progress: TypeAlias = Callable[[int, int], None]


class Side(Protocol):
    """One party's part of each layer; labels are zero labels at the garbler and active ones at the evaluator."""

    def phase(self, name: str) -> AbstractContextManager[None]:
        """Count what belongs to a layer."""
        ...

    def linear(self, layer: LinearLayer, labels: Array, batch: int) -> Words:
        """Our shares (batch, outputs) modulo 2^l, from the source's labels (bits, batch, elements, 16)."""
        ...

    def reenter(self, share: Words, bits: int) -> Array:
        """Labels (2 bits, elements, 16) of both parties' shares: the server's word, then the client's."""
        ...

    def circuit(self, layer: CircuitLayer, inputs: Array) -> Array:
        """Labels (output bits, lanes, 16) of a circuit's outputs, from those of its inputs."""
        ...

    def constants(self, bits: tuple[int, ...]) -> Array:
        """Labels (n, 16) of public bits."""
        ...


def walk(
    ready: Prepared, source: Array, batch: int, side: Side, progress: Progress | None = None
) -> tuple[Array, Words | None]:
    """All layers, from the labels of the input, (bits, batch x elements, 16); ``progress`` hears of each.

    Returns:
        The output's labels, (bits, batch, elements, 16), and None; or none, and our shares of it, (batch, elements).
    """
    program = ready.program
    wire = program.wires[program.input]
    labels = {program.input: source.reshape(wire.number.bits, batch, wire.size, BLOCK)}
    shares: dict[int, Words] = {}
    over = ends(program)
    for number, layer in enumerate(ready.layers):
        if progress is not None:
            progress(number, len(ready.layers))
        with side.phase(f"{number} {layer.name}"):
            if isinstance(layer, LinearLayer):
                shares[layer.target] = side.linear(layer, labels[layer.source], batch)
                _drop(labels, over[number])
                continue
            for read in layer.reads:
                if read.wire not in labels:  # once, however many operands read it
                    wire = program.wires[read.wire]
                    entered = side.reenter(shares[read.wire], wire.number.bits)
                    labels[read.wire] = entered.reshape(2 * wire.number.bits, batch, wire.size, BLOCK)
            out = side.circuit(layer, _inputs(layer.reads, labels, batch, side))
            labels[layer.target] = out.reshape(layer.target_bits, batch, layer.lanes, BLOCK)
            _drop(labels, over[number])
    if program.output in shares:
        return np.empty((0, BLOCK), dtype=np.uint8), shares[program.output]
    return labels[program.output], None


def _drop(labels: dict[int, Array], wires: tuple[int, ...]) -> None:
    for wire in wires:
        labels.pop(wire, None)


def _inputs(reads: tuple[Read, ...], labels: dict[int, Array], batch: int, side: Side) -> Array:
    parts = [gather(labels[read.wire], read, batch, side.constants) for read in reads]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
