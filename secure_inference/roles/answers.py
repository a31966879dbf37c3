"""What a client asks and learns, in every mode: integers of the input wire, and the answer from bits or shares.

Needs neither the engine nor a channel, so that a constrained client can use it too.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import InputError
from deepseal.secure_inference.compile.program import Program

MOST_SAMPLES = 4096


@dataclass(frozen=True, eq=False)
class Answer:
    """What the client learns.

    Args:
        values: labels (N,) as integers, or logits (N, classes).
        clamped: input values that were outside the program's range and became the nearest value inside.
        seconds: from the question to the answer, without the set-up of the session and what was prepared ahead.
        bytes_sent: for this question, likewise.
        bytes_received: for this question, likewise.
    """

    values: NDArray[np.int64] | NDArray[np.float64]
    clamped: int
    seconds: float
    bytes_sent: int
    bytes_received: int


def check_question(program: Program, x: NDArray[np.int64]) -> None:
    """``x`` must be (N, …) integers of the input wire.

    Raises:
        InputError: another shape or range, or too many samples.
    """
    wire = program.wires[program.input]
    if x.shape[1:] != wire.shape or not 1 <= len(x) <= MOST_SAMPLES:
        expected = f"1 to {MOST_SAMPLES} samples of shape {wire.shape}"
        raise InputError(expected, found=str(x.shape), do="use encode_input, and fewer samples at once")
    if int(x.min()) < wire.number.low or int(x.max()) > wire.number.high:
        found = f"{x.min()} to {x.max()}"
        raise InputError(f"integers {wire.number.low} to {wire.number.high}", found=found, do="use encode_input")


def from_bits(program: Program, bits: NDArray[np.uint8], batch: int) -> NDArray[np.int64]:
    """The output wire's integers, (batch, …), from its bits: the lowest bit of every element first."""
    wire = program.wires[program.output]
    number, signed = wire.number, wire.number.signed or wire.kind == "accumulator"
    planes = bits.reshape(number.bits, -1).astype(np.uint64)
    places = np.arange(number.bits, dtype=np.uint64).reshape(-1, 1)
    return _shaped(program, (planes << places).sum(axis=0, dtype=np.uint64), batch, signed=signed)


def from_shares(program: Program, one: NDArray[np.uint64], other: NDArray[np.uint64], batch: int) -> NDArray[np.int64]:
    """The output wire's integers, (batch, …), from additive shares modulo 2^bits, which are always signed."""
    mask = np.uint64((1 << program.wires[program.output].number.bits) - 1)
    return _shaped(program, (one + other) & mask, batch, signed=True)


def _shaped(program: Program, values: NDArray[np.uint64], batch: int, *, signed: bool) -> NDArray[np.int64]:
    wire = program.wires[program.output]
    integers = values.astype(np.int64)
    if signed and wire.number.bits < 64:
        half = np.int64(1) << np.int64(wire.number.bits - 1)
        integers = (integers ^ half) - half
    return integers.reshape(batch, *wire.shape)
