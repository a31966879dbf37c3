"""Division without restoring, in a window that grows with the quotient.

Step i brings down the i-th bit of the dividend from the top and keeps R = (remainder so far) - divisor, adding the
divisor back in the next step when R is negative: one adder a step instead of an adder and a choice. Only the low i + 1
bits of R are ever needed: the remainder so far has i bits, so a divisor with a bit at place i or above is larger
anyway.
"""

from __future__ import annotations

from deepseal.errors import InputError
from deepseal.secure_inference.netlist.context import Context, W, Word
from deepseal.secure_inference.netlist.words import absolute, negate_if


def divide(context: Context[W], x: Word[W], y: Word[W], *, signed: bool) -> Word[W]:
    """Divide: x / y, rounded toward zero; n(n + 1)/2 + 2n - 3 AND unsigned, 3n - 3 more signed.

    x / 0 is 2^n - 1 unsigned; signed it is -1 for x >= 0 and 1 for x < 0. The signed -2^(n-1) / -1 wraps to -2^(n-1).

    Args:
        context: what the operations do.
        x: dividend, n bits.
        y: divisor, n bits.
        signed: whether both words are signed.

    Raises:
        InputError: words of different or no width.
    """
    if not x or len(x) != len(y):
        found = f"{len(x)} and {len(y)} bits"
        raise InputError("two words of one width", found=found, do="extend the shorter one with its sign or zeros")
    if not signed or len(x) == 1:  # -1, the only other number of one bit, is its own negative there
        return _divide(context, x, y)
    quotient = _divide(context, absolute(context, x), absolute(context, y))
    return negate_if(context, quotient, context.xor(x[-1], y[-1]))


def _divide(context: Context[W], x: Word[W], y: Word[W]) -> Word[W]:
    n, zero = len(x), context.constant(False)
    above = [zero] * n  # whether the divisor has a bit at place i or higher
    for i in range(n - 1, 0, -1):
        higher = above[i + 1] if i + 1 < n else zero
        above[i] = context.xor(context.xor(y[i], higher), context.and_(y[i], higher))
    fits = context.constant(True)
    quotient: list[W] = []
    rest: list[W] = [zero]
    for i in range(1, n + 1):
        carry, total = fits, []
        for place, bit in enumerate([x[n - i], *rest]):
            term = context.xor(y[place], fits) if place < n else fits  # subtract if the last step did fit, else add
            half = context.xor(bit, carry)
            if i < n or place == i:
                total.append(context.xor(half, term))
            if place < i:
                carry = context.xor(carry, context.and_(half, context.xor(term, carry)))
        rest = total
        fits = context.not_(total[-1])
        if i < n:
            fits = context.and_(fits, context.not_(above[i]))
        quotient.append(fits)
    return tuple(reversed(quotient))
