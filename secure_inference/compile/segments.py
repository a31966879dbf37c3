"""A function on equal segments: a table of constants, lines or parabolas, fitted in integers.

The argument is an unsigned word m that stands for (m + 1/2) 2^-grid (``exact``: m 2^-grid). Its high bits i choose the
segment, its low bits d are the place within. The circuit and the integer arithmetic are the same formula:

    t = (C_i + (S_i + floor(Q_i d / 2^inner)) d) / 2^shift, rounded down.

The rounding is inside C, which is fitted last, over all arguments, so that the largest error is as small as it can be
with these slopes.
"""

from __future__ import annotations

import dataclasses
import functools
import math

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import InputError
from deepseal.secure_inference.compile.functions import samples
from deepseal.secure_inference.compile.lookup import lookup
from deepseal.secure_inference.netlist.context import Context, W, Word
from deepseal.secure_inference.netlist.products import Columns, multiply

Ints = NDArray[np.int64]
GUARD = 12  # further bits of the samples to which the coefficients are fitted
MOST_BITS = 18


@dataclasses.dataclass(frozen=True)
class Shape:
    """How fine the segments are.

    Attributes:
        grid: fraction bits of the argument.
        bits: of the argument.
        precision: fraction bits of the result.
        segments: log2 of their number; ``bits`` for degree 0.
        degree: 0 (a table), 1 (lines) or 2 (parabolas).
        slope: bits of the slopes.
        ceiling: largest result.
        exact: m stands for itself, not for the middle of its unit.
    """

    grid: int
    bits: int
    precision: int
    segments: int
    degree: int
    slope: int
    ceiling: int
    exact: bool = False

    def __post_init__(self) -> None:
        if not (1 <= self.bits <= MOST_BITS and 0 <= self.segments <= self.bits and self.degree in (0, 1, 2)):
            found = f"{self.bits} bits, 2^{self.segments} segments of degree {self.degree}"
            raise InputError(f"a table of 1 to {MOST_BITS} bits", found=found, do="choose a coarser format or form")


@dataclasses.dataclass(frozen=True, eq=False)
class Segments:
    """Fitted coefficients; see the formula of the module. ``width`` is the bits of the result."""

    shape: Shape
    constants: tuple[int, ...]
    slopes: tuple[int, ...]
    curvatures: tuple[int, ...]
    shift: int
    inner: int

    @property
    def width(self) -> int:
        """Bits of the result."""
        return max(self.shape.ceiling.bit_length(), 1)

    def evaluate(self, m: Ints) -> Ints:
        """The results for arguments of any shape, in integer arithmetic."""
        rest = self.shape.bits - self.shape.segments
        i, d = m >> rest, m & ((1 << rest) - 1)
        return self._formula(i, d)

    def _formula(self, i: Ints, d: Ints) -> Ints:
        constants, slopes, curvatures = (
            np.array(part, dtype=np.int64) for part in (self.constants, self.slopes, self.curvatures)
        )
        total = constants[i]
        if self.shape.degree >= 1:
            slope = slopes[i] + ((curvatures[i] * d) >> self.inner) if self.shape.degree == 2 else slopes[i]
            total = total + slope * d
        return np.asarray(total >> self.shift, dtype=np.int64)

    def build(self, context: Context[W], m: Word[W]) -> Word[W]:
        """The circuit; ``m`` has the shape's bits, the result ``width`` bits."""
        rest = self.shape.bits - self.shape.segments
        d, i = m[:rest], m[rest:]
        if self.shape.degree == 0 or rest == 0:
            return lookup(context, i, tuple(c >> self.shift for c in self.constants), self.width)
        width = self.width + self.shift
        tables = [(self.constants, width), (self.slopes, _signed_bits(self.slopes))]
        if self.shape.degree == 2:
            tables.append((self.curvatures, _signed_bits(self.curvatures)))
        packed, offset = [0] * len(self.constants), 0
        for values, bits in tables:
            packed = [p | (v & ((1 << bits) - 1)) << offset for p, v in zip(packed, values, strict=True)]
            offset += bits
        word = lookup(context, i, tuple(packed), offset)
        constant, slope = word[:width], word[width : width + tables[1][1]]
        signed = min(self.slopes) < 0
        if not signed:
            slope = slope[:-1]
        if self.shape.degree == 2:
            slope, signed = self._bent(context, slope, word[width + tables[1][1] :], d, signed)
        total = Columns(context, width)
        total.add_product(slope, d, (signed, False))
        total.add_word(constant, 0, signed=False)
        return total.total()[self.shift :]

    def _bent(
        self, context: Context[W], slope: Word[W], curvature: Word[W], d: Word[W], signed: bool
    ) -> tuple[Word[W], bool]:
        """S + floor(Q d / 2^inner), and whether it is signed."""
        product = multiply(context, curvature, d, signed=(True, False))[self.inner :]
        rest = self.shape.bits - self.shape.segments
        places = np.arange(1 << rest, dtype=np.int64)
        i = np.arange(1 << self.shape.segments, dtype=np.int64)[:, None]
        bent = np.array(self.slopes)[i] + ((np.array(self.curvatures)[i] * places) >> self.inner)
        low, high = int(bent.min()), int(bent.max())
        width = max(high.bit_length(), (-1 - low).bit_length() if low < 0 else 0, 1) + int(low < 0)
        total = Columns(context, width)
        total.add_word(_extended(context, slope, width, signed), 0, signed=False)
        total.add_word(_extended(context, product, width, True), 0, signed=False)
        return total.total(), low < 0


def _extended(context: Context[W], word: Word[W], width: int, signed: bool) -> Word[W]:
    if len(word) >= width:
        return word[:width]
    top = word[-1] if signed else context.constant(False)
    return (*word, *[top] * (width - len(word)))


def _signed_bits(values: tuple[int, ...]) -> int:
    return max(max(v if v >= 0 else -1 - v for v in values).bit_length(), 1) + 1


@functools.lru_cache(maxsize=64)
def fit(function: str, shape: Shape) -> Segments:
    """Fit a function of ``functions.FUNCTIONS``.

    Raises:
        InputError: a shape that is too fine for a table.
    """
    wanted = samples(function, shape.grid, shape.bits, shape.precision + GUARD, exact=shape.exact)
    wanted = np.minimum(wanted, shape.ceiling << GUARD)
    if shape.degree == 0:
        rounded = np.clip((wanted + (1 << (GUARD - 1))) >> GUARD, 0, shape.ceiling)
        zeros = (0,) * len(wanted)
        table = dataclasses.replace(shape, segments=shape.bits)
        return Segments(table, tuple(rounded.tolist()), zeros, zeros, 0, 0)
    rows = wanted.reshape(1 << shape.segments, -1).astype(np.float64) / (1 << GUARD)
    slopes, curvatures = _derivatives(rows, shape.degree)
    steepest = float(np.abs(slopes).max())
    shift = max(shape.slope - math.frexp(steepest)[1], 0)
    scaled = np.rint(slopes * 2.0**shift).astype(np.int64)
    inner = 0
    bent = np.zeros_like(scaled)
    if shape.degree == 2:
        inner = min(shape.bits - shape.segments, 10)
        bent = np.rint(curvatures * 2.0 ** (shift + inner)).astype(np.int64)
    places = np.arange(rows.shape[1], dtype=np.int64)
    run = (scaled[:, None] + ((bent[:, None] * places) >> inner)) * places
    steep = np.ptp(run, axis=1) >= (shape.ceiling + 1) << shift  # such a line would leave the format
    scaled[steep] = bent[steep] = 0
    zeros = (0,) * len(rows)
    draft = Segments(shape, zeros, tuple(scaled.tolist()), tuple(bent.tolist()), shift, inner)
    return dataclasses.replace(draft, constants=_best_constants(draft, wanted))


def _derivatives(rows: NDArray[np.float64], degree: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Slope at d = 0 and half the second derivative of each segment, per unit of d.

    A line has the slope of its chord, which is the best one where the function bends one way; a parabola goes through
    the function at the three Chebyshev places.
    """
    size = rows.shape[1]
    if degree == 1 or size < 3:
        return (rows[:, -1] - rows[:, 0]) / max(size - 1, 1), np.zeros(len(rows))
    places = np.array([0.067, 0.5, 0.933]) * (size - 1)
    places = np.rint(places)
    a, b, c = (rows[:, int(p)] for p in places)
    x, y, z = places
    first, second = (b - a) / (y - x), (c - b) / (z - y)
    curvature = (second - first) / (z - x)
    return first - curvature * (x + y), curvature


def _best_constants(draft: Segments, wanted: Ints) -> tuple[int, ...]:
    """Constants with the smallest largest error, rounding included; no result is below 0 or above the ceiling."""
    shape, shift = draft.shape, draft.shift
    rest = shape.bits - shape.segments
    i = np.arange(1 << shape.segments, dtype=np.int64)[:, None]
    d = np.arange(1 << rest, dtype=np.int64)[None, :]
    slope = np.array(draft.slopes, dtype=np.int64)[i]
    if shape.degree == 2:
        slope = slope + ((np.array(draft.curvatures, dtype=np.int64)[i] * d) >> draft.inner)
    run = slope * d
    target = wanted.reshape(run.shape)
    away = (target << shift) - (run << GUARD)  # what C should be at each place, in units of 2^-(shift + GUARD)
    middle = (away.max(axis=1) + away.min(axis=1)) // 2
    constants = (middle >> GUARD) + ((1 << shift) >> 1)
    top = ((shape.ceiling + 1) << shift) - 1
    constants = np.minimum(constants, top - run.max(axis=1))
    constants = np.maximum(constants, -run.min(axis=1))
    return tuple(constants.tolist())
