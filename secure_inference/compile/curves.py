"""sigmoid, tanh, SiLU and GELU as circuits on fixed-point words, each also as integer arithmetic.

All of them use one function of |x| (``functions.FUNCTIONS``): sigmoid(x) = (1 + tanh(x / 2)) / 2, and
silu(x) = max(x, 0) - rest(|x|), likewise gelu. An argument m >= 0 stands for m + 1/2 units of the grid, so that -x is
``not m``: the absolute value costs nothing. With ``exact`` it stands for itself, which costs one AND a bit. Forms:

``lut``: a table of the argument cut to the grid (truncated). ``piecewise_linear``,
``piecewise_quadratic``: segments. ``cordic``: tanh and sigmoid only.

The largest errors that these forms have in the formats of the papers, and their AND gates, are measured in
``tests/unit/test_compile_curves.py``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import InputError, UnknownNameError
from deepseal.secure_inference.compile import cordic
from deepseal.secure_inference.compile.segments import Shape, fit
from deepseal.secure_inference.netlist.context import Context, W, Word
from deepseal.secure_inference.netlist.words import (
    absolute,
    any_of,
    negate_if,
    relu_saturate,
    sign_extend,
    subtract,
    zero_extend,
)

if TYPE_CHECKING:
    from deepseal.secure_inference.compile.program import Number, Option

Ints = NDArray[np.int64]
FORMS = ("lut", "piecewise_linear", "piecewise_quadratic", "cordic")
_FINEST = 14  # fraction bits of a result
_DEGREE = {"lut": 0, "piecewise_linear": 1, "piecewise_quadratic": 2}


def build_sigmoid(
    context: Context[W], words: tuple[Word[W], ...], options: Mapping[str, Option], numbers: tuple[Number, ...]
) -> Word[W]:
    """1 / (1 + exp(-x)); the target has at least as many bits as its fraction, one more when signed."""
    source, plan = numbers[0], _sigmoid_plan(options, numbers)
    word = _s_curve(context, words[0], source, source.fraction + 1, plan)
    place = plan.shape.precision  # of the bit that weighs 1/2
    top = () if plan.top else (context.xor(word[place], word[place + 1]),)  # 1 for a result of 1 only
    middle = (*_zeros(context, plan.lost), *word[:place], context.not_(word[place]), *top)
    return zero_extend(context, middle, numbers[-1].bits)


def sigmoid(values: tuple[Ints, ...], options: Mapping[str, Option], numbers: tuple[Number, ...]) -> Ints:
    """The integers of ``build_sigmoid``."""
    source, target = numbers
    plan = _sigmoid_plan(options, numbers)
    half = 1 << (target.fraction - 1)
    return half + (_s_values(values[0], source.fraction + 1, plan) << plan.lost)


def build_tanh(
    context: Context[W], words: tuple[Word[W], ...], options: Mapping[str, Option], numbers: tuple[Number, ...]
) -> Word[W]:
    """The hyperbolic tangent; the target is signed, with at least one bit more than its fraction."""
    source, target = numbers
    plan = _tanh_plan(options, numbers)
    word = _s_curve(context, words[0], source, source.fraction, plan)
    return sign_extend((*_zeros(context, plan.lost), *word), max(target.bits, plan.lost + len(word)))[: target.bits]


def tanh(values: tuple[Ints, ...], options: Mapping[str, Option], numbers: tuple[Number, ...]) -> Ints:
    """The integers of ``build_tanh``."""
    plan = _tanh_plan(options, numbers)
    return _s_values(values[0], numbers[0].fraction, plan) << plan.lost


def build_rectified(
    context: Context[W],
    words: tuple[Word[W], ...],
    options: Mapping[str, Option],
    numbers: tuple[Number, ...],
    function: str,
) -> Word[W]:
    """max(x, 0) - rest(|x|), with x cut to the target's fraction and the first part saturated."""
    source, target = numbers
    plan = _rest_plan(options, function, numbers)
    x = _shifted(context, _signed(context, words[0], source), source.fraction - target.fraction)
    line = zero_extend(context, relu_saturate(context, x, target.bits - 1), target.bits)
    if target.fraction < 1:  # the rest is below half a unit
        return line
    _, m, over = _argument(context, x, target.fraction, plan.shape)
    inside = context.not_(over)
    rest = tuple(context.and_(bit, inside) for bit in fit(function, plan.shape).build(context, m))
    wide = zero_extend(context, (*_zeros(context, plan.lost), *rest), max(target.bits, plan.lost + len(rest)))
    return subtract(context, line, wide[: target.bits])


def rectified(
    values: tuple[Ints, ...], options: Mapping[str, Option], numbers: tuple[Number, ...], function: str
) -> Ints:
    """The integers of ``build_rectified``."""
    source, target = numbers
    plan = _rest_plan(options, function, numbers)
    x = _shift(values[0], source.fraction - target.fraction)
    if target.fraction < 1:
        return np.clip(x, 0, target.high)
    m, over = _argument_values(x, target.fraction, plan.shape)
    rest = np.where(over, 0, fit(function, plan.shape).evaluate(m)) << plan.lost
    return np.clip(x, 0, target.high) - rest


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How a curve is computed: form, segments, fraction bits that are left out (``lost``).

    ``top``: the largest result is one unit below 1, as the target cannot hold 1.
    """

    form: str
    shape: Shape
    lost: int
    top: bool = True


def _sigmoid_plan(options: Mapping[str, Option], numbers: tuple[Number, ...]) -> _Plan:
    source, target = numbers
    _fits(target, target.fraction + int(target.signed), "sigmoid")
    room = target.bits - int(target.signed) - target.fraction
    return _s_plan(options, source.fraction + 1, target.fraction - 1, top=room < 1)


def _tanh_plan(options: Mapping[str, Option], numbers: tuple[Number, ...]) -> _Plan:
    source, target = numbers
    _fits(target, target.fraction + 1, "tanh", signed=True)
    return _s_plan(options, source.fraction, target.fraction, top=target.bits < target.fraction + 2)


@functools.lru_cache(maxsize=64)
def _planned(form: str, wishes: tuple[tuple[str, int], ...], available: int, fraction: int, top: bool) -> _Plan:
    options = dict(wishes)
    precision = options.get("precision", min(fraction, _FINEST))
    if not 1 <= precision <= fraction or precision > _FINEST:
        expected = f"1 to {min(max(fraction, 1), _FINEST)} fraction bits"
        raise InputError(expected, found=f"{precision}", do="choose another precision or format")
    exact = bool(options.get("exact", 0))
    grid = min(options.get("grid", precision - 1 if form == "lut" and not exact else precision), max(available, 1))
    if exact and grid != available:
        do = "leave exact out, or choose the grid of the argument"
        raise InputError(f"a grid of {available} bits with exact", found=f"{grid}", do=do)
    degree = _DEGREE.get(form, 0)
    whole = 3 if form == "cordic" or (precision > 9 and form != "piecewise_linear") else 2
    bits = max(whole + grid, 1)
    finer = 2 if precision <= 8 else 4 if form == "piecewise_linear" and precision > 10 else 3
    segments = min(options.get("segments", whole + finer), bits) if degree else 0 if form == "cordic" else bits
    slope = options.get("slope", max(precision - (3 if degree < 2 else 2), 3))
    ceiling = (1 << precision) - int(top)
    shape = Shape(grid, bits, precision, segments, degree, slope, ceiling, exact)
    return _Plan(form, shape, fraction - precision, top)


def _s_plan(options: Mapping[str, Option], available: int, fraction: int, *, top: bool) -> _Plan:
    """For tanh of an argument with ``available`` fraction bits, to ``fraction`` bits."""
    form = str(options.get("form", "piecewise_linear"))
    if form not in FORMS:
        raise UnknownNameError("form of an activation", form, FORMS)
    wishes = tuple(sorted((name, int(value)) for name, value in options.items() if name != "form"))
    return _planned(form, wishes, available, fraction, top)


def _rest_plan(options: Mapping[str, Option], function: str, numbers: tuple[Number, ...]) -> _Plan:
    source, target = numbers
    _fits(target, 2, "SiLU and GELU", signed=True, point=False)
    form = str(options.get("form", "piecewise_linear"))
    if form not in FORMS or form == "cordic":
        raise UnknownNameError("form of SiLU and GELU", form, FORMS[:3])
    whole = 3 if function == "silu_rest" else 2
    precision = max(min(int(options.get("precision", _FINEST)), target.fraction, _FINEST), 0)
    grid = max(min(int(options.get("grid", _FINEST)), target.fraction, _FINEST), 0)
    bits = max(whole + grid, 1)
    degree = _DEGREE[form]
    segments = min(int(options.get("segments", whole + (2 if precision <= 8 else 3))), bits)
    if bits - segments <= 1:  # lines on so few points that a table is as cheap
        degree = 0
    # Both rests are below 0.279.
    ceiling = (1 << precision) // 4 + (1 << precision) // 16 + 1
    ceiling = max(min(ceiling, -target.low >> max(target.fraction - precision, 0)), 0)
    slope = int(options.get("slope", max(precision - 2, 3)))
    shape = Shape(grid, bits, precision, segments if degree else bits, degree, slope, ceiling)
    return _Plan(form, shape, target.fraction - precision)


def _s_curve(context: Context[W], word: Word[W], source: Number, fraction: int, plan: _Plan) -> Word[W]:
    """The value of tanh: precision + 1 bits, signed, one more without ``top``; ``fraction`` is the argument's."""
    shape = plan.shape
    sign, m, over = _argument(context, _signed(context, word, source), fraction, shape)
    if plan.form == "cordic":
        t = cordic.build(context, m, shape.grid, shape.precision, exact=shape.exact)
        over = any_of(context, (over, context.and_(m[-1], any_of(context, m[-3:-1]))))  # 5 … 8
    else:
        t = fit("tanh", shape).build(context, m)
    inside = context.not_(over)
    t = zero_extend(context, t, shape.ceiling.bit_length())
    full = [any_of(context, (bit, over)) if shape.ceiling >> i & 1 else context.and_(bit, inside)
            for i, bit in enumerate(t)]  # fmt: skip
    return negate_if(context, (*full, context.constant(False)), sign)


def _s_values(x: Ints, fraction: int, plan: _Plan) -> Ints:
    shape = plan.shape
    m, over = _argument_values(x, fraction, shape)
    if plan.form == "cordic":
        over = over | (m >= cordic.LIMIT << shape.grid)
        t = cordic.evaluate(m, shape.grid, shape.precision, exact=shape.exact)
    else:
        t = fit("tanh", shape).evaluate(m)
    t = np.where(over, shape.ceiling, t)
    return np.where(x < 0, -t, t)


def _argument(context: Context[W], x: Word[W], fraction: int, shape: Shape) -> tuple[W, Word[W], W]:
    """Sign of x, its magnitude in the grid, and whether it is beyond the grid's range."""
    x = _shifted(context, x, fraction - shape.grid)
    x = sign_extend(x, max(len(x), shape.bits + 1))
    sign = x[-1]
    flipped = absolute(context, x) if shape.exact else tuple(context.xor(bit, sign) for bit in x[:-1])
    return sign, flipped[: shape.bits], any_of(context, flipped[shape.bits :])


def _argument_values(x: Ints, fraction: int, shape: Shape) -> tuple[Ints, NDArray[np.bool_]]:
    cut = _shift(x, fraction - shape.grid)
    m = np.where(cut < 0, -cut if shape.exact else ~cut, cut)
    return m & ((1 << shape.bits) - 1), np.asarray(m >= 1 << shape.bits)


def _signed(context: Context[W], word: Word[W], number: Number) -> Word[W]:
    return word if number.signed else (*word, context.constant(False))


def _shifted(context: Context[W], word: Word[W], by: int) -> Word[W]:
    """A signed word divided by 2^by, rounded down; free."""
    return (word[by:] or word[-1:]) if by >= 0 else (*_zeros(context, -by), *word)


def _shift(x: Ints, by: int) -> Ints:
    return np.asarray(x >> min(by, 63) if by >= 0 else x << -by, dtype=np.int64)


def _zeros(context: Context[W], count: int) -> Word[W]:
    return (context.constant(False),) * count


def _fits(target: Number, bits: int, what: str, *, signed: bool | None = None, point: bool = True) -> None:
    if target.bits < bits or (signed is not None and target.signed != signed) or (point and target.fraction < 1):
        found = f"{'signed' if target.signed else 'unsigned'}, {target.bits} bits, {target.fraction} behind the point"
        expected = f"a {'signed ' if signed else ''}format of at least {bits} bits for {what}"
        raise InputError(expected, found=found, do="choose another format")
