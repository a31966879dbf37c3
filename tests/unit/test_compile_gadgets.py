"""Every gadget of the compiler: the circuit and the integer arithmetic agree on drawn formats and words."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseal.errors import InputError
from deepseal.secure_inference.compile import Number
from deepseal.secure_inference.compile.gadgets import GADGETS, build, evaluate, netlist
from deepseal.secure_inference.compile.lookup import lookup, table_cost
from deepseal.secure_inference.netlist import Clear, Record, from_word, record, to_word

LANES = 128
FEW = settings(max_examples=40, deadline=None)
ACCUMULATOR = Number(22, True, 14)
BYTE, SIGNED_BYTE = Number(8, False, 5), Number(8, True, 5)


def words(number, rng, lanes=LANES):
    """Drawn words, small ones and the ends of the range often."""
    values = rng.integers(number.low, number.high, size=lanes, endpoint=True)
    small = rng.integers(max(number.low, -40), min(number.high, 40), size=lanes, endpoint=True)
    values = np.where(rng.random(lanes) < 0.5, values, small)
    values[:3] = [number.low, number.high, 0]
    return values.astype(np.int64)


def run_netlist(circuit, numbers, values):
    """The netlist's result as integers of the target's format."""
    bits = [(value[None] >> np.arange(n.bits)[:, None]) & 1 for value, n in zip(values, numbers, strict=False)]
    out = circuit.evaluate_bits(np.concatenate(bits).astype(bool))
    got = sum(row.astype(np.int64) << i for i, row in enumerate(out))
    target = numbers[-1]
    return np.where(got > target.high, got - (1 << target.bits), got) if target.signed else got


def check(name, numbers, options=None, *, seed=0, values=None):
    """Circuit and arithmetic give the same, within the format; gives the netlist."""
    rng = np.random.default_rng(seed)
    values = values or [words(number, rng) for number in numbers[:-1]]
    expected = evaluate(name, values, options or {}, tuple(numbers))
    circuit = netlist(name, options or {}, tuple(numbers))
    assert circuit.outputs == (numbers[-1].bits,)
    np.testing.assert_array_equal(run_netlist(circuit, numbers, values), expected)
    assert expected.min() >= numbers[-1].low and expected.max() <= numbers[-1].high
    return circuit


FRACTIONS = st.integers(-2, 12)


@st.composite
def formats(draw, most=20, signed=None, fraction=FRACTIONS):
    sign = draw(st.booleans()) if signed is None else signed
    return Number(draw(st.integers(2 if sign else 1, most)), sign, draw(fraction))


SEEDS = st.integers(0, 2**32)


@FEW
@given(formats(), formats(12), st.booleans(), SEEDS)
def test_requantise_and_relu(source, target, rounds, seed):
    check("requantise", (source, target), {"round": rounds}, seed=seed)
    check("relu", (source, target), {"round": rounds}, seed=seed)


@FEW
@given(formats(), formats(10), st.data(), SEEDS)
def test_clamp(source, target, data, seed):
    low = data.draw(st.integers(target.low, target.high))
    high = data.draw(st.integers(low, target.high))
    check("clamp", (source, target), {"low": low, "high": high}, seed=seed)


@FEW
@given(formats(), formats(10, signed=True), st.integers(0, 7), st.integers(0, 9), SEEDS)
def test_leaky_relu(source, target, slope, shift, seed):
    check("leaky_relu", (source, target), {"slope": slope, "slope_shift": shift}, seed=seed)


@FEW
@given(formats(10), formats(10), st.integers(1, 9), SEEDS)
def test_max(source, target, count, seed):
    check("max", (*[source] * count, target), seed=seed)


@FEW
@given(st.lists(formats(14), min_size=1, max_size=4), formats(12), st.data(), SEEDS)
def test_add(sources, target, data, seed):
    signs = data.draw(st.text("+-", min_size=len(sources), max_size=len(sources)))
    options = {"signs": signs, "round": data.draw(st.booleans()), "relu": data.draw(st.booleans())}
    check("add", (*sources, target), options, seed=seed)


@FEW
@given(st.lists(formats(9), min_size=2, max_size=4), formats(12), st.booleans(), SEEDS)
def test_multiply(sources, target, rounds, seed):
    sources = sources[: len(sources) // 2 * 2]
    check("multiply", (*sources, target), {"round": rounds}, seed=seed)


@FEW
@given(formats(12), st.integers(1, 27), SEEDS)
def test_argmax(source, count, seed):
    check("argmax", (*[source] * count, Number(max((count - 1).bit_length(), 1), False, 0)), seed=seed)


def test_argmax_takes_the_first_of_equal_ones():
    number = Number(6, True, 0)
    tie = [np.full(4, value) for value in (-3, 5, 2, 5, 5)]
    assert evaluate("argmax", tie, {}, (*[number] * 5, Number(3, False, 0))).tolist() == [1] * 4


@FEW
@given(formats(10), st.integers(1, 4), SEEDS)
def test_join_where_one_operand_is_no_padding(number, count, seed):
    rng = np.random.default_rng(seed)
    chosen = rng.integers(0, count, size=LANES)
    values = [np.where(chosen == k, words(number, rng), 0) for k in range(count)]
    circuit = check("join", (number,) * (count + 1), values=values)
    assert circuit.and_gates == 0


@settings(max_examples=15, deadline=None)
@given(formats(18), st.sampled_from(["lut", "piecewise_linear", "piecewise_quadratic", "cordic"]), st.data(), SEEDS)
def test_curves(source, form, data, seed):
    fraction = data.draw(st.integers(2, 9))
    check("tanh", (source, Number(fraction + data.draw(st.integers(1, 3)), True, fraction)), {"form": form}, seed=seed)
    target = Number(fraction + data.draw(st.integers(1, 3)), data.draw(st.booleans()), fraction)
    check("sigmoid", (source, target), {"form": form}, seed=seed)
    if form != "cordic":
        target = Number(data.draw(st.integers(2, 10)), True, data.draw(st.integers(-1, 8)))
        for name in ("silu", "gelu", "gelu_tanh"):
            check(name, (source, target), {"form": form}, seed=seed)


@pytest.mark.parametrize("precise", [{"precision": 4}, {"grid": 3}, {"segments": 2}, {"slope": 3}])
def test_curves_with_options(precise):
    for form in ("lut", "piecewise_linear", "piecewise_quadratic"):
        check("tanh", (ACCUMULATOR, Number(8, True, 7)), {"form": form, **precise})
        check("silu", (ACCUMULATOR, Number(8, True, 5)), {"form": form, **precise})


def test_exact_arguments():
    number = Number(10, True, 6)
    every = [np.arange(number.low, number.high + 1)]
    for form, grid in (("lut", 6), ("cordic", 6)):
        check("tanh", (number, number), {"form": form, "exact": True, "grid": grid}, values=every)
        check("sigmoid", (number, number), {"form": form, "exact": True, "grid": grid + 1}, values=every)
    x = every[0] * 2.0**-6
    table = evaluate("tanh", every, {"form": "lut", "exact": True}, (number, number))
    np.testing.assert_array_equal(table, np.rint(np.tanh(x) * 64))


GOLDEN = [
    ("requantise", (ACCUMULATOR, SIGNED_BYTE), {}, 11),
    ("requantise", (BYTE, SIGNED_BYTE), {}, 7),
    ("relu", (ACCUMULATOR, BYTE), {}, 12),
    ("relu", (SIGNED_BYTE, BYTE), {}, 7),
    ("clamp", (ACCUMULATOR, BYTE), {"high": 192}, 27),
    ("leaky_relu", (ACCUMULATOR, SIGNED_BYTE), {"slope": 1, "slope_shift": 3}, 23),
    ("max", (BYTE,) * 5, {}, 48),
    ("add", (SIGNED_BYTE,) * 3, {}, 15),
    ("multiply", (BYTE, SIGNED_BYTE, SIGNED_BYTE), {}, 87),
    ("argmax", (*[ACCUMULATOR] * 10, Number(4, False, 0)), {}, 381),
    ("sigmoid", (ACCUMULATOR, Number(8, False, 8)), {"form": "piecewise_linear"}, 76),
    ("tanh", (ACCUMULATOR, Number(8, True, 7)), {"form": "piecewise_linear"}, 77),
    ("sigmoid", (ACCUMULATOR, Number(8, False, 8)), {"form": "lut"}, 93),
    ("silu", (ACCUMULATOR, SIGNED_BYTE), {"form": "lut"}, 84),
    ("gelu", (ACCUMULATOR, SIGNED_BYTE), {"form": "lut"}, 61),
]


@pytest.mark.parametrize(("name", "numbers", "options", "gates"), GOLDEN)
def test_golden_and_counts(name, numbers, options, gates):
    assert check(name, numbers, options).and_gates == gates


def test_paper_relu_and_argmax():
    """DeepSecure's components at 16 bits: ReLU 15, argmax 32 a class."""
    number = Number(16, True, 12)
    assert netlist("relu", {}, (number, number)).and_gates <= 15
    assert netlist("argmax", {}, (*[number] * 10, Number(4, False, 0))).and_gates <= 32 * 10


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 8), st.integers(1, 9), SEEDS)
def test_lookup(n, width, seed):
    table = tuple(np.random.default_rng(seed).integers(0, 1 << width, size=1 << n).tolist())
    assert [from_word(lookup(Clear(), to_word(i, n), table, width)) for i in range(1 << n)] == list(table)
    if n:
        assert record(lookup, n, table=table, width=width).and_gates <= table_cost(n, width)


def test_a_table_of_eight_bits_costs_less_than_a_tree():
    assert table_cost(8, 7) == 79
    with pytest.raises(InputError, match="table of 8 entries"):
        lookup(Clear(), to_word(0, 3), (1, 2), 4)


def test_what_does_not_fit_is_refused():
    with pytest.raises(InputError, match="gadget"):
        evaluate("softmax", [np.zeros(1, np.int64)], {}, (BYTE, BYTE))
    with pytest.raises(InputError, match="operands"):
        evaluate("relu", [np.zeros(1, np.int64)] * 2, {}, (BYTE,) * 3)
    with pytest.raises(InputError, match="option"):
        evaluate("relu", [np.zeros(1, np.int64)], {"slope": 1}, (BYTE, BYTE))
    with pytest.raises(InputError, match="one format"):
        evaluate("max", [np.zeros(1, np.int64)] * 2, {}, (BYTE, SIGNED_BYTE, BYTE))
    with pytest.raises(InputError, match="format of at least"):
        evaluate("tanh", [np.zeros(1, np.int64)], {}, (BYTE, BYTE))
    with pytest.raises(InputError, match="form"):
        evaluate("tanh", [np.zeros(1, np.int64)], {"form": "spline"}, (BYTE, Number(8, True, 7)))
    with pytest.raises(InputError, match="bits"):
        recorder = Record()
        build(recorder, "relu", [recorder.inputs(5)], {}, (BYTE, BYTE))


def test_padding_is_zero_or_the_lowest_value():
    assert GADGETS["max"].padding_value(SIGNED_BYTE) == -128
    assert GADGETS["max"].padding_value(BYTE) == 0
    assert GADGETS["add"].padding_value(SIGNED_BYTE) == 0
