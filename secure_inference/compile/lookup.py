"""Tables in a circuit: any function of a few bits, with few AND gates however many bits it gives.

Every bit of the result is a polynomial over GF(2) in the index bits (algebraic normal form), and sums are free. With
the index split into x and y, f(x, y) = sum_j y^j f_j(x): all monomials of x and of y cost one AND each, and each result
bit one more for each monomial of y. The split that is cheapest is taken.
"""

from __future__ import annotations

import functools
from typing import Generic

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import InputError
from deepseal.secure_inference.netlist.context import Context, W, Word


def lookup(context: Context[W], index: Word[W], table: tuple[int, ...], width: int) -> Word[W]:
    """The entry of a public table.

    Args:
        context: what the operations do.
        index: n bits, unsigned.
        table: 2^n integers; their low ``width`` bits count.
        width: bits of the result.

    Raises:
        InputError: a table of another length.
    """
    n = len(index)
    if len(table) != 1 << n:
        raise InputError(f"a table of {1 << n} entries", found=str(len(table)), do="fill it up")
    if n == 0:
        return tuple(context.constant(bool(table[0] >> i & 1)) for i in range(width))
    coefficients = _normal_form(table, width)
    low = _split(n, width)
    near, far = _monomials(context, index[:low]), _monomials(context, index[low:])
    sums = _Sums(context, near, block=8 if width << (n - low) >= 64 else 4)
    result = []
    for bit in range(width):
        total = context.constant(False)
        rows = coefficients[bit].reshape(1 << (n - low), 1 << low)
        for power, row in zip(far, rows, strict=True):
            total = context.xor(total, context.and_(power, sums.of(row)))
        result.append(total)
    return tuple(result)


class _Sums(Generic[W]):
    """Sums of subsets of the monomials; sums within a block are made once and shared."""

    def __init__(self, context: Context[W], monomials: list[W], block: int) -> None:
        self._context, self._block = context, min(block, len(monomials))
        self._known: list[dict[int, W]] = [
            {0: context.constant(False), **{1 << i: wire for i, wire in enumerate(monomials[start : start + block])}}
            for start in range(0, len(monomials), block)
        ]

    def of(self, row: NDArray[np.uint8]) -> W:
        """The sum of the monomials whose coefficient is 1."""
        masks = row.reshape(-1, self._block) @ (1 << np.arange(self._block))
        total = self._context.constant(False)
        for known, mask in zip(self._known, masks.tolist(), strict=True):
            total = self._context.xor(total, self._sum(known, mask))
        return total

    def _sum(self, known: dict[int, W], mask: int) -> W:
        if mask not in known:
            top = 1 << (mask.bit_length() - 1)
            known[mask] = self._context.xor(self._sum(known, mask ^ top), known[top])
        return known[mask]


def table_cost(n: int, width: int) -> int:
    """The most AND gates that ``lookup`` needs for n index bits and ``width`` result bits."""
    return min(_cost(n, low, width) for low in range(1, n + 1)) if n else 0


def _cost(n: int, low: int, width: int) -> int:
    high = n - low
    return (1 << low) - low - 1 + (1 << high) - high - 1 + width * ((1 << high) - 1)


def _split(n: int, width: int) -> int:
    return min(range(1, n + 1), key=lambda low: (_cost(n, low, width), low))


def _monomials(context: Context[W], bits: Word[W]) -> list[W]:
    """Products of all subsets of the bits, by the mask of the subset."""
    products = [context.constant(True)]
    for bit in bits:
        products += [context.and_(product, bit) for product in products]
    return products


@functools.lru_cache(maxsize=256)
def _normal_form(table: tuple[int, ...], width: int) -> NDArray[np.uint8]:
    """(width, entries) coefficients of the monomials: the Moebius transform of each bit."""
    values = np.array([entry & ((1 << width) - 1) for entry in table], dtype=np.uint64)
    places = np.arange(width, dtype=np.uint64)[:, None]
    bits: NDArray[np.uint8] = ((values >> places) & np.uint64(1)).astype(np.uint8)
    size = len(table)
    half = 1
    while half < size:
        pairs = bits.reshape(width, size // (2 * half), 2, half)
        pairs[:, :, 1] ^= pairs[:, :, 0]
        half *= 2
    bits.flags.writeable = False
    return bits
