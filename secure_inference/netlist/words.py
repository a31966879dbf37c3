"""Words and the gadgets on them, written once over a context. A word is a tuple of wires, least significant first.

Every adder and comparator costs one AND a bit (Kolesnikov, Sadeghi, Schneider, "Improved garbled circuit building
blocks and applications to auctions and computing minima", CANS 2009); so does a choice between two words. Costs below
are AND gates for words of n bits. Signed words are in two's complement; results wrap like those of a processor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from deepseal.errors import InputError
from deepseal.secure_inference.netlist.context import Context, Record, W, Word
from deepseal.secure_inference.netlist.netlist import Netlist


def constant_word(context: Context[W], value: int, width: int) -> Word[W]:
    """The ``width`` low bits of a public integer."""
    return tuple(context.constant(bool(value >> i & 1)) for i in range(width))


def add(context: Context[W], x: Word[W], y: Word[W], *, carry_out: bool = False) -> Word[W]:
    """Add: x + y mod 2^n in n - 1 AND; with ``carry_out`` all n + 1 bits of the unsigned sum in n."""
    _same_width(x, y)
    total: list[W] = []
    carry = context.constant(False)
    for i, (a, b) in enumerate(zip(x, y, strict=True)):
        half = context.xor(a, carry)
        total.append(context.xor(half, b))
        if carry_out or i < len(x) - 1:
            carry = context.xor(carry, context.and_(half, context.xor(b, carry)))
    return (*total, carry) if carry_out else tuple(total)


def subtract(context: Context[W], x: Word[W], y: Word[W], *, borrow_out: bool = False) -> Word[W]:
    """Subtract: x - y mod 2^n in n - 1 AND; ``borrow_out`` appends the bit that says x < y (unsigned), in n."""
    _same_width(x, y)
    difference: list[W] = []
    borrow = context.constant(False)
    for i, (a, b) in enumerate(zip(x, y, strict=True)):
        unlike = context.xor(a, b)
        difference.append(context.xor(unlike, borrow))
        if borrow_out or i < len(x) - 1:
            borrow = context.xor(borrow, context.and_(unlike, context.xor(b, borrow)))
    return (*difference, borrow) if borrow_out else tuple(difference)


def negate(context: Context[W], x: Word[W]) -> Word[W]:
    """Negate: -x mod 2^n in n - 2 AND."""
    return subtract(context, constant_word(context, 0, len(x)), x)


def negate_if(context: Context[W], x: Word[W], condition: W) -> Word[W]:
    """Negate on condition: -x mod 2^n where the condition is 1, else x, in n - 1 AND."""
    _not_empty(x)
    if len(x) == 1:
        return x
    flipped = [context.xor(bit, condition) for bit in x]
    result, carry = [x[0]], condition
    for below, bit in pairwise(flipped):
        carry = context.and_(below, carry)
        result.append(context.xor(bit, carry))
    return tuple(result)


def absolute(context: Context[W], x: Word[W]) -> Word[W]:
    """|x| of a signed word as an unsigned word of the same width (so -2^(n-1) is right too), in n - 1 AND."""
    return negate_if(context, x, x[-1])


def less_than(context: Context[W], x: Word[W], y: Word[W], *, signed: bool) -> W:
    """Whether x < y, in n AND: the borrow of x - y."""
    _same_width(x, y)
    if signed:  # the top bit weighs -2^(n-1), so the two top bits change places
        x, y = (*x[:-1], y[-1]), (*y[:-1], x[-1])
    borrow = context.constant(False)
    for a, b in zip(x, y, strict=True):
        borrow = context.xor(borrow, context.and_(context.xor(a, b), context.xor(b, borrow)))
    return borrow


def any_of(context: Context[W], bits: Sequence[W]) -> W:
    """Whether any of the bits is 1, in n - 1 AND at depth log2 n; 0 when there is none."""
    layer = list(bits)
    if not layer:
        return context.constant(False)
    while len(layer) > 1:
        pairs = zip(layer[::2], layer[1::2], strict=False)
        odd = layer[len(layer) // 2 * 2 :]
        layer = [_or(context, a, b) for a, b in pairs] + odd
    return layer[0]


def equal_zero(context: Context[W], x: Word[W]) -> W:
    """Whether x = 0, in n - 1 AND."""
    return context.not_(any_of(context, x))


def equal(context: Context[W], x: Word[W], y: Word[W]) -> W:
    """Whether x = y, in n - 1 AND."""
    _same_width(x, y)
    return equal_zero(context, tuple(context.xor(a, b) for a, b in zip(x, y, strict=True)))


def mux(context: Context[W], condition: W, x: Word[W], y: Word[W]) -> Word[W]:
    """Choose: x where the condition is 1, else y, in n AND."""
    _same_width(x, y)
    return tuple(context.xor(b, context.and_(condition, context.xor(a, b))) for a, b in zip(x, y, strict=True))


def relu(context: Context[W], x: Word[W]) -> Word[W]:
    """max(x, 0) of a signed word, in n - 1 AND; the top bit of the result is a constant 0."""
    _not_empty(x)
    if len(x) == 1:
        return (context.constant(False),)
    positive = context.not_(x[-1])
    return (*(context.and_(bit, positive) for bit in x[:-1]), context.constant(False))


def maximum(context: Context[W], x: Word[W], y: Word[W], *, signed: bool) -> Word[W]:
    """The larger of two words, in 2n AND."""
    return mux(context, less_than(context, x, y, signed=signed), y, x)


def minimum(context: Context[W], x: Word[W], y: Word[W], *, signed: bool) -> Word[W]:
    """The smaller of two words, in 2n AND."""
    return mux(context, less_than(context, x, y, signed=signed), x, y)


def largest(context: Context[W], words: Sequence[Word[W]], *, signed: bool) -> Word[W]:
    """The largest of k words by a tournament, in 2n(k - 1) AND at depth about (n + 1) log2 k."""
    _not_empty(words)
    layer = list(words)
    while len(layer) > 1:
        pairs = zip(layer[::2], layer[1::2], strict=False)
        odd = layer[len(layer) // 2 * 2 :]
        layer = [maximum(context, x, y, signed=signed) for x, y in pairs] + odd
    return layer[0]


def argmax(context: Context[W], words: Sequence[Word[W]], *, signed: bool) -> Word[W]:
    """The index of the first of the largest of k words: ceil(log2 k) bits, at least one.

    A tournament in 2n(k - 1) - n AND for comparing and choosing words, and fewer than k for choosing indices.
    """
    _not_empty(words)
    if len(words) == 1:
        return (context.constant(False),)
    left, right, half = _semifinals(context, words, signed)
    later = less_than(context, left[0], right[0], signed=signed)
    return _joined(context, later, left[1], right[1], half)


def _champion(context: Context[W], words: Sequence[Word[W]], signed: bool) -> tuple[Word[W], Word[W]]:
    """The largest word, and its index."""
    if len(words) == 1:
        return words[0], ()
    left, right, half = _semifinals(context, words, signed)
    later = less_than(context, left[0], right[0], signed=signed)
    return mux(context, later, right[0], left[0]), _joined(context, later, left[1], right[1], half)


def _semifinals(
    context: Context[W], words: Sequence[Word[W]], signed: bool
) -> tuple[tuple[Word[W], Word[W]], tuple[Word[W], Word[W]], int]:
    """Both halves' champions, and the number of index bits of a half; the first half is a power of two."""
    bits = (len(words) - 1).bit_length() - 1
    half = 1 << bits
    return _champion(context, words[:half], signed), _champion(context, words[half:], signed), bits


def _joined(context: Context[W], later: W, left: Word[W], right: Word[W], bits: int) -> Word[W]:
    return (*mux(context, later, zero_extend(context, right, bits), left), later) if bits else (later,)


def zero_extend(context: Context[W], x: Word[W], width: int) -> Word[W]:
    """An unsigned word in ``width`` bits, at least its own; free."""
    _extensible(x, width)
    return (*x, *constant_word(context, 0, width - len(x)))


def sign_extend(x: Word[W], width: int) -> Word[W]:
    """A signed word in ``width`` bits, at least its own; free."""
    _not_empty(x)
    _extensible(x, width)
    return (*x, *[x[-1]] * (width - len(x)))


def saturate(context: Context[W], x: Word[W], bits: int, *, signed: bool) -> Word[W]:
    """The nearest value that ``bits`` bits can hold, in n - 2 AND (signed, the result too) or n - 1 (unsigned)."""
    _not_empty(x)
    if bits < 1:
        raise InputError("at least 1 bit to saturate to", found=str(bits), do="choose more bits")
    if bits >= len(x):
        return sign_extend(x, bits) if signed else zero_extend(context, x, bits)
    if not signed:
        over = any_of(context, x[bits:])
        return tuple(_or(context, bit, over) for bit in x[:bits])
    sign = x[-1]
    if bits == 1:
        return (sign,)
    over = any_of(context, [context.xor(bit, sign) for bit in x[bits - 1 : -1]])
    limit = context.not_(sign)
    return (*mux(context, over, (limit,) * (bits - 1), x[: bits - 1]), sign)


def relu_saturate(context: Context[W], x: Word[W], bits: int) -> Word[W]:
    """min(max(x, 0), 2^bits - 1) of a signed word as an unsigned word of ``bits`` bits, in n - 1 AND.

    With p = "x is positive" and o = "x is too large" a bit becomes x p(1-o) + po: one AND a bit.
    """
    _not_empty(x)
    if bits < 1:
        raise InputError("at least 1 bit to saturate to", found=str(bits), do="choose more bits")
    if bits >= len(x) - 1:
        return zero_extend(context, relu(context, x)[: max(len(x) - 1, 1)], bits)
    positive = context.not_(x[-1])
    over = context.and_(positive, any_of(context, x[bits:-1]))
    kept = context.xor(positive, over)
    return tuple(context.xor(context.and_(bit, kept), over) for bit in x[:bits])


def shift_left(context: Context[W], x: Word[W], by: int) -> Word[W]:
    """Shift: x 2^by mod 2^n for a public distance; free."""
    _distance(by)
    return (*constant_word(context, 0, min(by, len(x))), *x)[: len(x)]


def shift_right(context: Context[W], x: Word[W], by: int, *, signed: bool) -> Word[W]:
    """Shift: x / 2^by rounded down, for a public distance; free."""
    _distance(by)
    _not_empty(x)
    kept = x[by:]
    return sign_extend(kept or x[-1:], len(x)) if signed else zero_extend(context, kept, len(x))


def shift_left_by(context: Context[W], x: Word[W], amount: Word[W]) -> Word[W]:
    """Shift: x 2^amount mod 2^n for a secret unsigned distance of any width, in about n log2 n AND (a barrel)."""
    near, beyond = _stages(context, len(x), amount)
    for stage, condition in enumerate(near):
        x = mux(context, condition, shift_left(context, x, 1 << stage), x)
    return x if beyond is None else mux(context, beyond, constant_word(context, 0, len(x)), x)


def shift_right_by(context: Context[W], x: Word[W], amount: Word[W], *, signed: bool) -> Word[W]:
    """Shift: x / 2^amount rounded down, for a secret unsigned distance of any width, in about n log2 n AND."""
    if signed and len(x) == 1:
        return x
    near, beyond = _stages(context, len(x), amount)
    for stage, condition in enumerate(near):
        x = mux(context, condition, shift_right(context, x, 1 << stage, signed=signed), x)
    return x if beyond is None else mux(context, beyond, shift_right(context, x, len(x), signed=signed), x)


def _stages(context: Context[W], width: int, amount: Word[W]) -> tuple[Word[W], W | None]:
    """The distance's bits that stay within the word, and whether any other bit is set (None: there is no other)."""
    inside = (width - 1).bit_length()
    return amount[:inside], any_of(context, amount[inside:]) if len(amount) > inside else None


def record(gadget: Callable[..., Any], *widths: int, **options: Any) -> Netlist:
    """The netlist of a gadget.

    Args:
        gadget: called as ``gadget(context, *words, **options)``; returns a wire, a word, or a sequence of words.
        widths: of each input word, in bits.
        options: the gadget's keyword arguments.
    """
    recorder = Record()
    result = gadget(recorder, *(recorder.inputs(width) for width in widths), **options)
    if isinstance(result, int):
        return recorder.netlist((result,))
    return recorder.netlist(result) if isinstance(result[0], int) else recorder.netlist(*result)


def _or(context: Context[W], x: W, y: W) -> W:
    return context.xor(context.xor(x, y), context.and_(x, y))


def _not_empty(words: Sequence[object]) -> None:
    if not words:
        raise InputError("at least one bit or word", found="none", do="pass a longer tuple")


def _same_width(x: Word[W], y: Word[W]) -> None:
    _not_empty(x)
    if len(x) != len(y):
        found = f"{len(x)} and {len(y)} bits"
        raise InputError("two words of one width", found=found, do="extend the shorter one with its sign or zeros")


def _extensible(x: Word[W], width: int) -> None:
    if width < len(x):
        found = f"{width} for a word of {len(x)}"
        raise InputError("a width that is not smaller", found=found, do="take the low bits as word[:width]")


def _distance(by: int) -> None:
    if by < 0:
        raise InputError("a distance of 0 or more", found=str(by), do="shift the other way")
