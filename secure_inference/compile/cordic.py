"""tanh by CORDIC: shifts, additions and a table of angles; no product, no table of values.

Hyperbolic rotation with the three further steps that widen the range to 5.16 (Walther, "A unified algorithm for
elementary functions", 1971; Hu, Harber, Bass, "Expanding the range of convergence of the CORDIC algorithm", IEEE Trans.
Computers 40(1), 1991) gives K cosh v and K sinh v; their quotient, digit by digit with the same kind of step, is
tanh v, whatever K is.
"""

from __future__ import annotations

import decimal
import functools
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from deepseal.secure_inference.netlist.context import Context, W, Word
from deepseal.secure_inference.netlist.words import constant_word, sign_extend

Ints = NDArray[np.int64]
LIMIT = 5  # from here on tanh is 1 for results of up to 12 fraction bits
_WIDE = (4, 3, 2)  # the steps with factor 1 - 2^-j
_START = 4  # log2 of the first x, so that K x stays above 1
_INTEGER = 9  # integer bits of x and y, sign included, over all arguments
_GUARD = 5


@functools.lru_cache(maxsize=32)
def _steps(precision: int) -> tuple[tuple[bool, int, Decimal], ...]:
    """(wide, shift, angle) of each rotation; steps 4 and 13 are done twice, as convergence needs it."""
    with decimal.localcontext(decimal.Context(prec=50)):
        plan: list[tuple[bool, int, Decimal]] = []
        for j in _WIDE:
            plan.append((True, j, _artanh(1 - Decimal(2) ** -j)))
        for i in range(1, precision + 3):
            plan += [(False, i, _artanh(Decimal(2) ** -i))] * (2 if i in (4, 13) else 1)
        return tuple(plan)


def _artanh(a: Decimal) -> Decimal:
    return ((1 + a) / (1 - a)).ln() / 2


def _angle(angle: Decimal, fraction: int) -> int:
    with decimal.localcontext(decimal.Context(prec=50)):
        return int((angle * Decimal(2) ** fraction).to_integral_value())


def evaluate(m: Ints, grid: int, precision: int, *, exact: bool = False) -> Ints:
    """floor(tanh(v) 2^precision + 1/2) up to one unit, for v below 5; elsewhere without meaning.

    v is (m + 1/2) 2^-grid, or m 2^-grid when ``exact``.
    """
    fraction = max(grid + 1, precision + _GUARD)
    z = ((m << 1) + int(not exact)) << (fraction - grid - 1)
    x = np.full_like(m, 1 << (_START + precision + _GUARD))
    y = np.zeros_like(m)
    for wide, shift, angle in _steps(precision):
        up, right = y >> shift, x >> shift
        if wide:
            up, right = y - up, x - right
        sign = np.where(z < 0, -1, 1)
        x, y, z = x + sign * up, y + sign * right, z - sign * _angle(angle, fraction)
    return _quotient(x, y, precision)


def _quotient(x: Ints, y: Ints, precision: int) -> Ints:
    rest = ((y << 1) + (x >> precision)) - x  # the first digit is always 1
    t = np.zeros_like(x)
    for _ in range(precision):
        fits = rest >= 0
        t = (t << 1) | fits
        rest = (rest << 1) + np.where(fits, -x, x)
    return t


def build(context: Context[W], m: Word[W], grid: int, precision: int, *, exact: bool = False) -> Word[W]:
    """The circuit of ``evaluate``: ``precision`` bits."""
    fraction = max(grid + 1, precision + _GUARD)
    width = _INTEGER + precision + _GUARD
    zero, one = context.constant(False), context.constant(True)
    z = (*(zero,) * (fraction - grid - 1), context.constant(not exact), *m, zero)
    z = sign_extend(z, fraction + 5)
    x = constant_word(context, 1 << (_START + precision + _GUARD), width)
    y = constant_word(context, 0, width)
    plan = _steps(precision)
    for place, (wide, shift, angle) in enumerate(plan):
        up, right = sign_extend(y[shift:], width), sign_extend(x[shift:], width)
        if wide:
            up, right = _plus_minus(context, y, up, one), _plus_minus(context, x, right, one)
        negative = z[-1]
        positive = context.not_(negative)
        x, y = _plus_minus(context, x, up, negative), _plus_minus(context, y, right, negative)
        if place < len(plan) - 1:
            z = _plus_minus(context, z, constant_word(context, _angle(angle, fraction), len(z)), positive)
    return _build_quotient(context, x, y, precision)


def _build_quotient(context: Context[W], x: Word[W], y: Word[W], precision: int) -> Word[W]:
    zero, one = context.constant(False), context.constant(True)
    width = len(x) + 1
    x = sign_extend(x, width)
    rest = _plus_minus(context, (zero, *y), sign_extend(x[precision:], width), zero)
    rest = _plus_minus(context, rest, x, one)
    digits: list[W] = []
    for place in range(precision):
        fits = context.not_(rest[-1])
        digits.append(fits)
        if place < precision - 1:
            rest = _plus_minus(context, (zero, *rest[:-1]), x, fits)
    return tuple(reversed(digits))


def _plus_minus(context: Context[W], x: Word[W], y: Word[W], minus: W) -> Word[W]:
    """Add or subtract: x + y, or x - y where ``minus`` is 1, modulo 2^n: n - 1 AND."""
    total: list[W] = []
    carry = minus
    for i, (a, bit) in enumerate(zip(x, y, strict=True)):
        b = context.xor(bit, minus)
        half = context.xor(a, carry)
        total.append(context.xor(half, b))
        if i < len(x) - 1:
            carry = context.xor(carry, context.and_(half, context.xor(b, carry)))
    return tuple(total)
