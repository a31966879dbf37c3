"""Activation functions as exact integers, the same on every machine.

Tables of circuits are computed by both parties, so they must not depend on a processor's floating point. Everything
here is ``decimal`` arithmetic, which is correctly rounded everywhere.
"""

from __future__ import annotations

import decimal
import functools
from collections.abc import Callable
from decimal import Decimal

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import UnknownNameError

_CONTEXT = decimal.Context(prec=50, rounding=decimal.ROUND_HALF_EVEN)
_PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494")


def _tanh(u: Decimal) -> Decimal:
    return 1 - 2 / ((2 * u).exp() + 1)


def _silu_rest(u: Decimal) -> Decimal:
    return u / (1 + u.exp())


def _gelu_rest(u: Decimal) -> Decimal:
    """The argument times the tail of the normal distribution beyond it, by the series of erf."""
    z = u / Decimal(2).sqrt()
    term, total, n = z, z, 0
    while abs(term) > Decimal(10) ** -40 and n < 400:
        n += 1
        term = -term * z * z / n
        total += term / (2 * n + 1)
    return u * (1 - 2 * total / _PI.sqrt()) / 2


def _gelu_tanh_rest(u: Decimal) -> Decimal:
    inner = (2 / _PI).sqrt() * (u + Decimal("0.044715") * u**3)
    return u * (1 - _tanh(inner)) / 2


FUNCTIONS: dict[str, Callable[[Decimal], Decimal]] = {
    "tanh": _tanh,
    "silu_rest": _silu_rest,
    "gelu_rest": _gelu_rest,
    "gelu_tanh_rest": _gelu_tanh_rest,
}
"""Functions of u >= 0. silu(x) = max(x, 0) - silu_rest(|x|), and gelu likewise; sigmoid(x) = (1 + tanh(x / 2)) / 2."""


@functools.lru_cache(maxsize=64)
def samples(function: str, grid: int, bits: int, precision: int, *, exact: bool) -> NDArray[np.int64]:
    """(2^bits,) values f((m + 1/2) 2^-grid) 2^precision, or f(m 2^-grid) when ``exact``, rounded to integers.

    Raises:
        UnknownNameError: an unknown function.
    """
    if function not in FUNCTIONS:
        raise UnknownNameError("function", function, FUNCTIONS)
    f = FUNCTIONS[function]
    with decimal.localcontext(_CONTEXT):
        scale, step = Decimal(2) ** precision, Decimal(2) ** -grid
        half = Decimal(0) if exact else Decimal("0.5")
        values = [int((f((m + half) * step) * scale).to_integral_value()) for m in range(1 << bits)]
    array = np.array(values, dtype=np.int64)
    array.flags.writeable = False
    return array
