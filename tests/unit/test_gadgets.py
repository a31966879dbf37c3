"""Gadgets against Python integers, in the clear and as recorded netlists, and their golden AND counts."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from deepseal.errors import InputError
from deepseal.secure_inference.netlist import (
    Clear,
    Count,
    absolute,
    add,
    any_of,
    argmax,
    constant_word,
    divide,
    dot,
    equal,
    equal_zero,
    from_word,
    largest,
    less_than,
    maximum,
    minimum,
    multiply,
    mux,
    negate,
    negate_if,
    record,
    relu,
    relu_saturate,
    saturate,
    shift_left,
    shift_left_by,
    shift_right,
    shift_right_by,
    sign_extend,
    subtract,
    to_word,
    zero_extend,
)
from deepseal.secure_inference.netlist.products import KARATSUBA

WIDTHS = st.integers(1, 64)
BOTH = pytest.mark.parametrize("signed", [False, True])
FEW = settings(max_examples=40, deadline=None)


def check(gadget, widths, values, *expected):
    """The gadget gives what is expected in the clear and recorded, and Count and Record agree on its cost."""
    bits = [to_word(value, width) for value, width in zip(values, widths, strict=True)]
    result = gadget(Clear(), *bits)
    if not isinstance(result, tuple):
        result = ((result,),)
    elif not isinstance(result[0], tuple):
        result = (result,)
    expected = [value % (1 << len(word)) for value, word in zip(expected, result, strict=True)]
    assert [from_word(word) for word in result] == expected
    netlist = record(gadget, *widths)
    assert netlist.evaluate([value % (1 << width) for value, width in zip(values, widths, strict=True)]) == expected
    count = Count()
    gadget(count, *(count.inputs(width) for width in widths))
    assert (count.and_gates, count.depth) == (netlist.and_gates, netlist.depth)
    assert (count.xor_gates, count.not_gates) == (netlist.xor_gates, netlist.not_gates)
    return netlist


def draw_value(data, width, signed=False):
    """Any value of the width; the extreme ones often."""
    low, high = (-(1 << (width - 1)), (1 << (width - 1)) - 1) if signed else (0, (1 << width) - 1)
    edges = {low, high, 0, -1, 1, low + 1, high // 2} & set(range(low, high + 1)) if width < 8 else {low, high, 0, 1}
    return data.draw(st.sampled_from(sorted(edges)) | st.integers(low, high))


def draw_values(data, widths, signed=False):
    return [draw_value(data, width, signed) for width in widths]


def divided(x, y):
    """Rounded toward zero, of exact integers."""
    return abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)


class TestArithmetic:
    @given(WIDTHS, st.data())
    @FEW
    def test_add_subtract_negate(self, n, data):
        x, y = draw_values(data, (n, n))
        assert check(add, (n, n), (x, y), x + y).and_gates == n - 1
        assert check(lambda c, a, b: add(c, a, b, carry_out=True), (n, n), (x, y), x + y).and_gates == n
        assert check(subtract, (n, n), (x, y), x - y).and_gates == n - 1
        borrowed = (x - y) % (1 << n) | (x < y) << n
        assert check(lambda c, a, b: subtract(c, a, b, borrow_out=True), (n, n), (x, y), borrowed).and_gates == n
        assert check(negate, (n,), (x,), -x).and_gates == max(n - 2, 0)

    @given(WIDTHS, st.booleans(), st.data())
    @FEW
    def test_negate_on_condition_and_absolute(self, n, condition, data):
        x = draw_value(data, n, signed=True)
        gadget = lambda c, word, s: negate_if(c, word, s[0])  # noqa: E731
        assert check(gadget, (n, 1), (x, condition), -x if condition else x).and_gates == n - 1
        assert check(absolute, (n,), (x,), abs(x)).and_gates == n - 1

    @given(WIDTHS, WIDTHS, st.booleans(), st.booleans(), st.data())
    @settings(max_examples=60, deadline=None)
    def test_multiply(self, n, m, first, second, data):
        width = data.draw(st.integers(1, n + m) | st.just(n + m))
        x, y = draw_value(data, n, first), draw_value(data, m, second)
        check(lambda c, a, b: multiply(c, a, b, signed=(first, second), width=width), (n, m), (x, y), x * y)

    @pytest.mark.parametrize("signed", [(False, False), (True, True), (True, False), (False, True)])
    @pytest.mark.parametrize("n", [1, 2, 3, 4])
    def test_every_small_product_and_its_truncations(self, n, signed):
        for m in (1, 2, 3, 4):
            for width in range(1, n + m + 1):
                netlist = record(multiply, n, m, signed=signed, width=width)
                for x in range(1 << n):
                    for y in range(1 << m):
                        exact = from_word(to_word(x, n), signed=signed[0]) * from_word(to_word(y, m), signed=signed[1])
                        assert netlist.evaluate([x, y]) == [exact % (1 << width)]

    @given(st.integers(0, 5), st.integers(1, 16), st.integers(1, 16), st.integers(1, 40), st.data())
    @FEW
    def test_dot(self, terms, n, m, width, data):
        signs = data.draw(st.tuples(st.booleans(), st.booleans()))
        xs = [draw_value(data, n, signs[0]) for _ in range(terms)]
        ys = [draw_value(data, m, signs[1]) for _ in range(terms)]
        bias = draw_value(data, 20, any(signs))

        def gadget(c, *words):
            pairs = {"signed": signs, "width": width, "addends": words[2 * terms :]}
            return dot(c, words[:terms], words[terms : 2 * terms], **pairs)

        widths = [n] * terms + [m] * terms + [20]
        check(gadget, widths, [*xs, *ys, bias], sum(x * y for x, y in zip(xs, ys, strict=True)) + bias)

    @BOTH
    @given(WIDTHS, st.data())
    @FEW
    def test_divide(self, signed, n, data):
        x, y = draw_values(data, (n, n), signed)
        by_zero = (-1 if x >= 0 else 1) if signed else (1 << n) - 1
        check(lambda c, a, b: divide(c, a, b, signed=signed), (n, n), (x, y), divided(x, y) if y else by_zero)

    @BOTH
    @pytest.mark.parametrize("n", [1, 2, 3, 4, 5])
    def test_every_small_quotient(self, n, signed):
        netlist = record(divide, n, n, signed=signed)
        for i in range(1 << n):
            for j in range(1 << n):
                x, y = (from_word(to_word(value, n), signed=signed) for value in (i, j))
                by_zero = (-1 if x >= 0 else 1) if signed else -1
                assert netlist.evaluate([i, j]) == [(divided(x, y) if y else by_zero) % (1 << n)]


class TestChoices:
    @BOTH
    @given(WIDTHS, st.data())
    @FEW
    def test_compare(self, signed, n, data):
        x, y = draw_values(data, (n, n), signed)
        y = data.draw(st.sampled_from([x, y]))
        less = check(lambda c, a, b: less_than(c, a, b, signed=signed), (n, n), (x, y), x < y)
        assert (less.and_gates, less.not_gates) == (n, 0)
        assert check(equal, (n, n), (x, y), x == y).and_gates == n - 1
        assert check(equal_zero, (n,), (x,), x == 0).and_gates == n - 1
        assert check(lambda c, a: any_of(c, a), (n,), (x,), x != 0).depth == (n - 1).bit_length()
        for gadget, best in ((maximum, max), (minimum, min)):
            netlist = check(lambda c, a, b, g=gadget: g(c, a, b, signed=signed), (n, n), (x, y), best(x, y))
            assert netlist.and_gates == 2 * n

    @given(WIDTHS, st.booleans(), st.data())
    @FEW
    def test_mux(self, n, condition, data):
        x, y = draw_values(data, (n, n))
        netlist = check(lambda c, s, a, b: mux(c, s[0], a, b), (1, n, n), (condition, x, y), x if condition else y)
        assert (netlist.and_gates, netlist.depth) == (n, 1)

    @given(WIDTHS, st.data())
    @FEW
    def test_relu(self, n, data):
        x = draw_value(data, n, signed=True)
        assert check(relu, (n,), (x,), max(x, 0)).and_gates == n - 1

    @BOTH
    @given(st.integers(1, 20), st.integers(1, 13), st.data())
    @FEW
    def test_argmax_and_largest(self, signed, n, k, data):
        values = draw_values(data, [n] * k, signed)
        values[k // 2] = data.draw(st.sampled_from(values))
        check(lambda c, *words: argmax(c, words, signed=signed), [n] * k, values, values.index(max(values)))
        netlist = check(lambda c, *words: largest(c, words, signed=signed), [n] * k, values, max(values))
        assert netlist.and_gates == 2 * n * (k - 1)

    @BOTH
    @given(WIDTHS, st.integers(1, 70), st.data())
    @FEW
    def test_saturate(self, signed, n, bits, data):
        x = draw_value(data, n, signed)
        low, high = (-(1 << (bits - 1)), (1 << (bits - 1)) - 1) if signed else (0, (1 << bits) - 1)
        netlist = check(lambda c, a: saturate(c, a, bits, signed=signed), (n,), (x,), min(max(x, low), high))
        assert netlist.and_gates <= n - 1

    @given(WIDTHS, st.integers(1, 70), st.data())
    @FEW
    def test_relu_saturate(self, n, bits, data):
        x = draw_value(data, n, signed=True)
        netlist = check(lambda c, a: relu_saturate(c, a, bits), (n,), (x,), min(max(x, 0), (1 << bits) - 1))
        assert netlist.and_gates <= max(n - 1, 0)


class TestShifts:
    @BOTH
    @given(WIDTHS, st.integers(0, 70), st.data())
    @FEW
    def test_public_distance_and_extension_are_free(self, signed, n, by, data):
        x = draw_value(data, n, signed)
        left = check(lambda c, a: shift_left(c, a, by), (n,), (x,), x << by)
        right = check(lambda c, a: shift_right(c, a, by, signed=signed), (n,), (x,), x >> by)
        wide = check(lambda c, a: sign_extend(a, n + by) if signed else zero_extend(c, a, n + by), (n,), (x,), x)
        assert left.and_gates == right.and_gates == wide.and_gates == 0

    @BOTH
    @given(WIDTHS, st.integers(1, 9), st.data())
    @FEW
    def test_secret_distance(self, signed, n, m, data):
        x, by = draw_value(data, n, signed), draw_value(data, m)
        check(shift_left_by, (n, m), (x, by), x << by)
        check(lambda c, a, b: shift_right_by(c, a, b, signed=signed), (n, m), (x, by), x >> by)

    @given(st.integers(), WIDTHS)
    @example(-1, 64)
    def test_public_words(self, value, width):
        assert check(lambda c: constant_word(c, value, width), (), (), value).and_gates == 0


GOLDEN = {
    "add": (add, (16, 16), {}, 15),
    "add with carry": (add, (16, 16), {"carry_out": True}, 16),
    "subtract": (subtract, (16, 16), {}, 15),
    "negate": (negate, (16,), {}, 14),
    "absolute": (absolute, (16,), {}, 15),
    "less than": (less_than, (16, 16), {"signed": True}, 16),
    "equal": (equal, (16, 16), {}, 15),
    "relu": (relu, (16,), {}, 15),
    "maximum": (maximum, (16, 16), {"signed": True}, 32),
    "multiply 8": (multiply, (8, 8), {"signed": True, "width": 8}, 41),
    "multiply": (multiply, (16, 16), {"signed": True, "width": 16}, 149),
    "multiply unsigned": (multiply, (16, 16), {"signed": False, "width": 16}, 149),
    "multiply full": (multiply, (16, 16), {"signed": True}, 285),
    "multiply full unsigned": (multiply, (16, 16), {"signed": False}, 301),
    "multiply full 8": (multiply, (8, 8), {"signed": (False, True)}, 77),
    "multiply 64": (multiply, (64, 64), {"signed": False, "width": 64}, 2141),
    "multiply full 64": (multiply, (64, 64), {"signed": False}, 3618),
    "divide": (divide, (16, 16), {"signed": True}, 210),
    "divide unsigned": (divide, (16, 16), {"signed": False}, 165),
    "saturate": (saturate, (16,), {"bits": 8, "signed": True}, 14),
    "relu and saturate": (relu_saturate, (16,), {"bits": 8}, 15),
    "shift left": (shift_left_by, (16, 4), {}, 64),
    "shift right": (shift_right_by, (16, 4), {"signed": True}, 60),
}


class TestCosts:
    @pytest.mark.parametrize("name", GOLDEN)
    def test_golden_counts(self, name):
        gadget, widths, options, and_gates = GOLDEN[name]
        assert record(gadget, *widths, **options).and_gates == and_gates

    def test_never_above_the_components_of_deepsecure(self):
        def cost(gadget, *widths, **options):
            return record(gadget, *widths, **options).and_gates

        assert cost(add, 16, 16) <= 16
        assert cost(multiply, 16, 16, signed=True, width=16) <= 212
        assert cost(divide, 16, 16, signed=True) <= 361
        assert cost(relu, 16) <= 15
        for classes, golden in ((10, 279), (19, 576), (26, 806)):  # the classes of its benchmarks
            total = cost(lambda c, *words: argmax(c, words, signed=True), *[16] * classes)
            assert total == golden
            assert total < 32 * classes

    def test_a_sum_of_products_is_cheaper_than_its_parts(self):
        k = 32
        gadget = lambda c, *words: dot(c, words[:k], words[k:], signed=True, width=16)  # noqa: E731
        assert record(gadget, *[16] * (2 * k)).and_gates <= 151 * k

    @pytest.mark.parametrize("signed", [(False, False), (True, False), (True, True)])
    def test_products_are_split_only_where_that_is_cheaper(self, signed, monkeypatch):
        def cost(n, narrowest):
            monkeypatch.setattr("deepseal.secure_inference.netlist.products.KARATSUBA", (narrowest,) * 3)
            return record(multiply, n, n, signed=signed).and_gates

        threshold = KARATSUBA[sum(signed)]
        assert cost(threshold, threshold) < cost(threshold, 1000)
        assert cost(threshold - 4, threshold - 4) > cost(threshold - 4, 1000)

    @pytest.mark.parametrize("n", [1, 2, 5, 16, 64])
    def test_formula_of_the_quotient(self, n):
        expected = n * (n + 1) // 2 + max(2 * n - 3, 0)
        assert record(divide, n, n, signed=False).and_gates == expected
        assert record(divide, n, n, signed=True).and_gates == expected + 3 * (n - 1)

    def test_recording_takes_milliseconds(self):
        record(multiply, 16, 16, signed=True, width=16)
        start = time.process_time()
        for _ in range(10):
            record(multiply, 16, 16, signed=True, width=16)
        assert time.process_time() - start < 0.5


@pytest.mark.parametrize(
    "call",
    [
        lambda c, x: add(c, x, x[:2]),
        lambda c, x: add(c, (), ()),
        lambda c, x: mux(c, x[0], x, ()),
        lambda c, x: relu(c, ()),
        lambda c, x: argmax(c, (), signed=True),
        lambda c, x: multiply(c, x, (), signed=True),
        lambda c, x: multiply(c, x, x, signed=True, width=0),
        lambda c, x: multiply(c, x, x, signed=True, width=9),
        lambda c, x: dot(c, [x], [], signed=True, width=4),
        lambda c, x: dot(c, [x], [x], signed=True, width=0),
        lambda c, x: divide(c, x, x[1:], signed=True),
        lambda c, x: zero_extend(c, x, 3),
        lambda c, x: sign_extend(x, 3),
        lambda c, x: shift_left(c, x, -1),
        lambda c, x: shift_right(c, x, -1, signed=True),
        lambda c, x: saturate(c, x, 0, signed=True),
        lambda c, x: relu_saturate(c, x, 0),
    ],
)
def test_misuse_is_refused_in_one_line(call):
    with pytest.raises(InputError) as error:
        call(Clear(), to_word(5, 4))
    assert "\n" not in str(error.value)
