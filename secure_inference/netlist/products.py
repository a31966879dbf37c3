"""Products and sums of products, with half the AND gates of the schoolbook.

A product of two bits is linear in their XOR: 2xy = x + y - (x xor y). With free XOR, partial products then cost nothing
and only their sum does, one AND for each full adder. This is the classical form of the controlled add-subtract of
Litinski, "Quantum schoolbook multiplication with fewer Toffoli gates" (arXiv 2410.00899). For words x = sum a_i x_i and
y = sum b_j y_j (a_i, b_j = 2^i, 2^j, negative at the top of signed words), A = sum a_i and B = sum b_j:

    2xy = Bx + Ay - sum_ij a_i b_j (x_i xor y_j).

Wide full products are split once more (Karatsuba and Ofman 1962) where that is cheaper.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Generic

from deepseal.errors import InputError
from deepseal.secure_inference.netlist.context import Context, W, Word
from deepseal.secure_inference.netlist.words import add, sign_extend, zero_extend

KARATSUBA = (28, 32, 36)  # the narrowest full products for which it saves AND gates, by the number of signed factors


def multiply(
    context: Context[W], x: Word[W], y: Word[W], *, signed: bool | tuple[bool, bool], width: int | None = None
) -> Word[W]:
    """Multiply: x y mod 2^width.

    Args:
        context: what the operations do.
        x: n bits.
        y: m bits.
        signed: whether the words are signed; a pair when they differ.
        width: at most n + m; None gives all n + m bits.

    Raises:
        InputError: an empty word, or a width outside 1 … n + m.
    """
    full = len(x) + len(y)
    width = full if width is None else width
    if not 1 <= width <= full:
        raise InputError(f"a product of 1 to {full} bits", found=f"{width} bits", do="extend the factors or the result")
    return dot(context, [x], [y], signed=signed, width=width)


def dot(
    context: Context[W],
    xs: Sequence[Word[W]],
    ys: Sequence[Word[W]],
    *,
    signed: bool | tuple[bool, bool],
    width: int,
    addends: Sequence[Word[W]] = (),
) -> Word[W]:
    """The sum of x y over all pairs, and of the addends, mod 2^width.

    One big carry-save addition: cheaper than products and additions one by one. About n(n + 1)/2 AND for each pair at
    ``width`` n, additions included.

    Args:
        context: what the operations do.
        xs: the first factors, of any widths.
        ys: as many second factors.
        signed: whether the factors are signed; a pair when xs and ys differ. Addends of fewer bits than ``width`` are
            signed unless this is False.
        width: bits of the result.
        addends: words to add, such as a bias.

    Raises:
        InputError: unequal numbers of factors, an empty word, or a width below 1.
    """
    if len(xs) != len(ys) or width < 1 or not all(map(len, [*xs, *ys, *addends])):
        found = f"{len(xs)} and {len(ys)} factors, {width} bits, some words perhaps empty"
        raise InputError("pairs of words and a width of at least 1 bit", found=found, do="correct the arguments")
    signs = (signed, signed) if isinstance(signed, bool) else signed
    total = Columns(context, width)
    for x, y in zip(xs, ys, strict=True):
        total.add_product(x, y, signs)
    for word in addends:
        total.add_word(word, 0, signed=any(signs))
    return total.total()


class Columns(Generic[W]):
    """Bits by their weight, whose sum mod 2^width is wanted, and a public constant.

    Args:
        context: what the operations do.
        width: number of columns.
    """

    def __init__(self, context: Context[W], width: int) -> None:
        self._context, self._width = context, width
        self._columns: list[list[W]] = [[] for _ in range(width)]
        self._constant = 0

    def add_bit(self, bit: W, place: int, *, negative: bool = False) -> None:
        """Add 2^place bit, or subtract it: -b = (1 - b) - 1."""
        if place < self._width:
            self._columns[place].append(self._context.not_(bit) if negative else bit)
            self._constant -= int(negative) << place

    def add_word(self, word: Word[W], place: int, *, signed: bool, negative: bool = False) -> None:
        """Add 2^place word, or subtract it."""
        for i, bit in enumerate(word):
            self.add_bit(bit, place + i, negative=negative ^ (signed and i == len(word) - 1))

    def add_product(self, x: Word[W], y: Word[W], signed: tuple[bool, bool]) -> None:
        """Add x y."""
        shorter, longer = sorted((len(x), len(y)))
        if shorter >= KARATSUBA[sum(signed)] and 3 * longer <= 4 * shorter and self._width >= shorter + longer:
            self._add_split(x, y, signed)
        elif shorter <= 2:
            self._add_by_bit(x, y, signed)
        else:
            self._add_halved(x, y, signed)

    def _add_by_bit(self, x: Word[W], y: Word[W], signed: tuple[bool, bool]) -> None:
        for i, a in enumerate(x):
            for j, b in enumerate(y[: self._width - i] if i < self._width else ()):
                negative = (signed[0] and i == len(x) - 1) ^ (signed[1] and j == len(y) - 1)
                self.add_bit(self._context.and_(a, b), i + j, negative=negative)

    def _add_halved(self, x: Word[W], y: Word[W], signed: tuple[bool, bool]) -> None:
        """The formula of the module, halved; its terms of weight 1 and 2 are worked out by hand."""
        self._add_corner(x, y)
        context, n, m = self._context, len(x), len(y)
        for word, other, (own_sign, other_sign) in ((x, y, signed), (y, x, signed[::-1])):
            for i, bit in enumerate(word):
                top = own_sign and i == len(word) - 1
                if i >= 2:  # A and B are -1 for signed words,
                    self.add_bit(bit, i - 1, negative=not top)
                if not other_sign:  # and 2^width more for unsigned ones
                    self.add_bit(bit, i + len(other) - 1, negative=top)
        opposite: list[W | None] = [None] * n
        for i in range(n):
            for j in range(max(2 - i, 0), min(m, self._width - i + 1)):
                bit = x[i]
                if (signed[0] and i == n - 1) == (signed[1] and j == m - 1):  # one NOT serves the whole row
                    known = opposite[i]
                    bit = opposite[i] = context.not_(bit) if known is None else known
                    self._constant -= 1 << (i + j - 1)
                self._columns[i + j - 1].append(context.xor(bit, y[j]))

    def _add_corner(self, x: Word[W], y: Word[W]) -> None:
        """The terms of x_0, y_0, x_1 and y_1 with weight 1 and 2 before halving.

        Weight 1: -x_0 - y_0 - (x_0 xor y_0) = -2 (x_0 or y_0). Weight 2: -x_1 - (x_1 xor y_0) =
        y_0 - 2 (x_1 or y_0), the same with x and y exchanged, and x_0 + y_0 - (x_0 or y_0) = x_0 and y_0.
        """
        self.add_bit(self._context.and_(x[0], y[0]), 0)
        if self._width == 1:
            return
        self.add_bit(self._or(x[1], y[0]), 1, negative=True)
        self.add_bit(self._or(x[0], y[1]), 1, negative=True)

    def _or(self, x: W, y: W) -> W:
        return self._context.xor(self._context.xor(x, y), self._context.and_(x, y))

    def _add_split(self, x: Word[W], y: Word[W], signed: tuple[bool, bool]) -> None:
        """With x = x_0 + 2^h x_1 and z_k = x_k y_k: z_0 + 2^2h z_1 + 2^h ((x_0 + x_1)(y_0 + y_1) - z_0 - z_1)."""
        context, h = self._context, (max(len(x), len(y)) + 1) // 2
        sums = [self._sum_of_halves(word, h, sign) for word, sign in zip((x, y), signed, strict=True)]
        low = multiply(context, x[:h], y[:h], signed=False)
        high = multiply(context, x[h:], y[h:], signed=signed)
        middle = multiply(context, *sums, signed=signed)
        either = any(signed)
        self.add_word(low, 0, signed=False)
        self.add_word(high, 2 * h, signed=either)
        self.add_word(middle, h, signed=either)
        self.add_word(low, h, signed=False, negative=True)
        self.add_word(high, h, signed=either, negative=True)

    def _sum_of_halves(self, word: Word[W], h: int, signed: bool) -> Word[W]:
        low, high = word[:h], word[h:]
        if not signed:
            width = max(len(low), len(high))
            pair = (zero_extend(self._context, low, width), zero_extend(self._context, high, width))
            return add(self._context, *pair, carry_out=True)
        width = max(len(low) + 1, len(high)) + 1
        return add(self._context, zero_extend(self._context, low, width), sign_extend(high, width))

    def total(self) -> Word[W]:
        """The sum mod 2^width: a full adder for every three bits of a column, a half adder for two that are left."""
        context = self._context
        result: list[W] = []
        carries: list[W] = []
        for place, column in enumerate(self._columns):
            bits, carries = deque([*column, *carries]), []
            public, last = bool(self._constant >> place & 1), place == self._width - 1
            while len(bits) > 1:
                x, y = bits.popleft(), bits.popleft()
                if bits:
                    z = bits.popleft()
                else:
                    z, public = context.constant(public), False
                half = context.xor(x, z)
                bits.append(context.xor(half, y))
                if not last:
                    carries.append(context.xor(z, context.and_(half, context.xor(y, z))))
            if public and bits and not last:
                carries.append(bits[0])  # b + 1 is (b, not b): no gate that costs something
            if public:
                bits.append(context.not_(bits.pop()) if bits else context.constant(True))
            result.append(bits[0] if bits else context.constant(False))
        return tuple(result)
