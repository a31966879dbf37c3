"""The small circuits of which programs are made, each once as a circuit and once as integer arithmetic.

A gadget gets its operand words and the formats of the operands and of the target (``numbers``: operands, then target).
Accumulators arrive as plain signed words. Shifts to the right are exact and round down (floor); compilers put half a
unit into the bias of the layer before, where that costs nothing, and use ``round`` where there is no such bias. What is
too large or small for the target saturates.

| gadget | operands | result | options |
|---|---|---|---|
| ``requantise`` | x | x | ``round`` |
| ``relu`` | x | max(x, 0) | ``round`` |
| ``clamp`` | x | x between ``low`` and ``high``, integers in the target's units | ``low``, ``high``, ``round`` |
| ``leaky_relu`` | x | x, or x ``slope`` 2^-``slope_shift`` where negative | ``slope``, ``slope_shift`` |
| ``sigmoid``, ``tanh``, ``silu``, ``gelu``, ``gelu_tanh`` | x | see ``curves`` | ``form``, ``grid``, ``precision``, … |
| ``max`` | any | the largest; padding is the lowest value | |
| ``add`` | any | their sum, with ``signs`` such as "+-" | ``signs``, ``relu``, ``round`` |
| ``join`` | any | their sum, where at most one is no padding (concatenation); free | |
| ``multiply`` | x0 y0 x1 y1 … | x0 y0 + x1 y1 + … | ``round`` |
| ``argmax`` | any | index of the first of the largest | |
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import InputError, UnknownNameError
from deepseal.secure_inference.compile import curves
from deepseal.secure_inference.netlist.context import Context, Record, W, Word
from deepseal.secure_inference.netlist.netlist import Netlist
from deepseal.secure_inference.netlist.products import Columns
from deepseal.secure_inference.netlist.words import (
    add,
    argmax,
    constant_word,
    largest,
    less_than,
    mux,
    relu_saturate,
    saturate,
    sign_extend,
    zero_extend,
)

if TYPE_CHECKING:
    from deepseal.secure_inference.compile.program import Number, Option

Ints = NDArray[np.int64]
Options = Mapping[str, "Option"]
Numbers = tuple["Number", ...]
Build = Callable[[Any, tuple[Word[Any], ...], Options, Numbers], Word[Any]]
Evaluate = Callable[[tuple[Ints, ...], Options, Numbers], Ints]


@dataclasses.dataclass(frozen=True)
class Gadget:
    """A circuit and its arithmetic.

    Attributes:
        build: (context, words, options, numbers) -> the target's word.
        evaluate: (int64 arrays of one shape, options, numbers) -> int64 array.
        options: names that it understands.
        operands: number of operands, or None for any.
        padding: what an operand's padding stands for.
    """

    build: Build
    evaluate: Evaluate
    options: tuple[str, ...] = ()
    operands: int | None = 1
    padding: Literal["zero", "lowest"] = "zero"

    def padding_value(self, number: Number) -> int:
        """The integer that padding stands for in an operand of this format."""
        return number.low if self.padding == "lowest" else 0


def gadget(name: str) -> Gadget:
    """The gadget of that name.

    Raises:
        UnknownNameError: there is none.
    """
    if name not in GADGETS:
        raise UnknownNameError("gadget", name, GADGETS)
    return GADGETS[name]


def build(context: Context[W], name: str, words: Sequence[Word[W]], options: Options, numbers: Numbers) -> Word[W]:
    """The target's word: ``numbers[-1].bits`` wires.

    Raises:
        InputError: operands or options that the gadget does not have.
    """
    _check(name, len(words), options, numbers)
    for word, number in zip(words, numbers, strict=False):
        if len(word) != number.bits:
            raise InputError(f"a word of {number.bits} bits", found=f"{len(word)}", do="pass the operand's bits")
    return gadget(name).build(context, tuple(words), options, numbers)


def evaluate(name: str, values: Sequence[Ints], options: Options, numbers: Numbers) -> Ints:
    """The target's integers, elementwise.

    Raises:
        InputError: operands or options that the gadget does not have.
    """
    _check(name, len(values), options, numbers)
    return np.asarray(gadget(name).evaluate(tuple(values), options, numbers), dtype=np.int64)


def netlist(name: str, options: Options, numbers: Numbers) -> Netlist:
    """The gadget as a netlist: one input for each operand, one output."""
    return _netlist(name, tuple(sorted(options.items())), numbers)


@functools.lru_cache(maxsize=256)
def _netlist(name: str, options: tuple[tuple[str, Option], ...], numbers: Numbers) -> Netlist:
    recorder = Record()
    words = [recorder.inputs(number.bits) for number in numbers[:-1]]
    return recorder.netlist(build(recorder, name, words, dict(options), numbers))


def _check(name: str, operands: int, options: Options, numbers: Numbers) -> None:
    wanted = gadget(name)
    right = operands >= 1 if wanted.operands is None else operands == wanted.operands
    if not right or len(numbers) != operands + 1:
        expected = f"{wanted.operands or 'at least one'} operands of {name}, and the format of each and of the target"
        raise InputError(expected, found=f"{operands} and {len(numbers)} formats", do="correct the program")
    for option in options:
        if option not in wanted.options:
            raise UnknownNameError(f"option of {name}", option, wanted.options)


# Shifts and saturation


def _signed(context: Context[W], word: Word[W], number: Number) -> Word[W]:
    return word if number.signed else (*word, context.constant(False))


def _shifted(context: Context[W], x: Word[W], by: int, *, round: bool = False) -> Word[W]:
    """A signed word divided by 2^by, rounded down or to nearest (halves up)."""
    if by <= 0:
        return (*(context.constant(False),) * -by, *x)
    if round:
        x = sign_extend(x, max(len(x), by) + 1)
        x = (*x[: by - 1], *add(context, x[by - 1 :], constant_word(context, 1, len(x) - by + 1)))
    return x[by:] or x[-1:]


def _to_target(context: Context[W], x: Word[W], target: Number, *, relu: bool = False) -> Word[W]:
    """A signed word saturated to the format; with ``relu`` negative values become 0."""
    if not target.signed:
        return relu_saturate(context, x, target.bits)
    if relu:
        return (
            zero_extend(context, relu_saturate(context, x, target.bits - 1), target.bits)
            if target.bits > 1
            else (context.constant(False),)
        )
    return saturate(context, x, target.bits, signed=True)


def _shift(x: Ints, by: int, *, round: bool = False) -> Ints:
    if by <= 0:
        return np.asarray(x << -by, dtype=np.int64)
    by = min(by, 63)
    return np.asarray((x + (1 << (by - 1)) if round else x) >> by, dtype=np.int64)


def _clip(x: Ints, target: Number, *, relu: bool = False) -> Ints:
    return np.clip(x, 0 if relu else target.low, target.high)


def _rounds(options: Options) -> bool:
    return bool(options.get("round", False))


def _build_requantise(
    context: Context[W], words: tuple[Word[W], ...], options: Options, numbers: Numbers, *, relu: bool = False
) -> Word[W]:
    source, target = numbers
    x = _signed(context, words[0], source)
    x = _shifted(context, x, source.fraction - target.fraction, round=_rounds(options))
    return _to_target(context, x, target, relu=relu)


def _requantise(values: tuple[Ints, ...], options: Options, numbers: Numbers, *, relu: bool = False) -> Ints:
    source, target = numbers
    return _clip(_shift(values[0], source.fraction - target.fraction, round=_rounds(options)), target, relu=relu)


def _build_relu(context: Context[W], words: tuple[Word[W], ...], options: Options, numbers: Numbers) -> Word[W]:
    return _build_requantise(context, words, options, numbers, relu=True)


def _relu(values: tuple[Ints, ...], options: Options, numbers: Numbers) -> Ints:
    return _requantise(values, options, numbers, relu=True)


def _limits(options: Options, target: Number) -> tuple[int, int]:
    low, high = int(options.get("low", target.low)), int(options.get("high", target.high))
    if not target.low <= low <= high <= target.high:
        found = f"{low} … {high}"
        raise InputError(f"limits in order, within {target.low} … {target.high}", found=found, do="correct them")
    return low, high


def _build_clamp(context: Context[W], words: tuple[Word[W], ...], options: Options, numbers: Numbers) -> Word[W]:
    target = numbers[-1]
    low, high = _limits(options, target)
    x = _build_requantise(context, words, options, numbers, relu=low == 0)
    if high < target.high:
        limit = constant_word(context, high, target.bits)
        x = mux(context, less_than(context, limit, x, signed=target.signed), limit, x)
    if low > target.low and low != 0:
        limit = constant_word(context, low, target.bits)
        x = mux(context, less_than(context, x, limit, signed=target.signed), limit, x)
    return x


def _clamp(values: tuple[Ints, ...], options: Options, numbers: Numbers) -> Ints:
    low, high = _limits(options, numbers[-1])
    return np.clip(_requantise(values, options, numbers), low, high)


def _build_leaky(context: Context[W], words: tuple[Word[W], ...], options: Options, numbers: Numbers) -> Word[W]:
    source, target = numbers
    slope, more = int(options["slope"]), int(options["slope_shift"])
    x = _signed(context, words[0], source)
    by = source.fraction - target.fraction
    width = len(x) + slope.bit_length()
    product = Columns(context, width)
    wide = sign_extend(x, width)
    for place in range(slope.bit_length()):
        if slope >> place & 1:
            product.add_word(wide[: width - place], place, signed=False)
    line = _shifted(context, x, by)
    small = _shifted(context, product.total(), by + more)
    width = max(len(line), len(small))
    chosen = mux(context, x[-1], sign_extend(small, width), sign_extend(line, width))
    return _to_target(context, chosen, target)


def _leaky(values: tuple[Ints, ...], options: Options, numbers: Numbers) -> Ints:
    source, target = numbers
    slope, more = int(options["slope"]), int(options["slope_shift"])
    x, by = values[0], source.fraction - target.fraction
    return _clip(np.where(x < 0, _shift(x * slope, by + more), _shift(x, by)), target)


# Gadgets of several operands


def _one_format(numbers: Numbers) -> Number:
    if any(number != numbers[0] for number in numbers[1:-1]):
        raise InputError("operands of one format", found="several", do="requantise them first")
    return numbers[0]


def _build_max(context: Context[W], words: tuple[Word[W], ...], options: Options, numbers: Numbers) -> Word[W]:
    source, target = _one_format(numbers), numbers[-1]
    top = largest(context, words, signed=source.signed)
    return top if source == target else _build_requantise(context, (top,), options, (source, target))


def _max(values: tuple[Ints, ...], options: Options, numbers: Numbers) -> Ints:
    top = functools.reduce(np.maximum, values)
    return _requantise((top,), options, (_one_format(numbers), numbers[-1]))


def _signs(options: Options, count: int) -> list[int]:
    text = str(options.get("signs", "+" * count))
    if len(text) != count or set(text) - {"+", "-"}:
        raise InputError(f"{count} signs such as {'+' * count!r}", found=repr(text), do="correct them")
    return [1 if sign == "+" else -1 for sign in text]


def _build_add(context: Context[W], words: tuple[Word[W], ...], options: Options, numbers: Numbers) -> Word[W]:
    *sources, target = numbers
    fraction = max(number.fraction for number in sources)
    signs = _signs(options, len(sources))
    ranges = [(n.low << (fraction - n.fraction), n.high << (fraction - n.fraction)) for n in sources]
    high = sum(h if s > 0 else -low for (low, h), s in zip(ranges, signs, strict=True))
    low = sum(low if s > 0 else -h for (low, h), s in zip(ranges, signs, strict=True))
    shift = fraction - target.fraction
    half = 1 << (shift - 1) if _rounds(options) and shift > 0 else 0
    width = max((high + half).bit_length(), (-1 - low).bit_length() if low < 0 else 0, 1) + 1
    total = Columns(context, width)
    for word, number, sign in zip(words, sources, signs, strict=True):
        place = fraction - number.fraction
        wide = sign_extend(_signed(context, word, number), max(width - place, number.bits + 1))[: width - place]
        total.add_word(wide, place, signed=True, negative=sign < 0)
    if half:
        total.add_bit(context.constant(True), shift - 1)
    return _to_target(context, _shifted(context, total.total(), shift), target, relu=bool(options.get("relu", False)))


def _add(values: tuple[Ints, ...], options: Options, numbers: Numbers) -> Ints:
    *sources, target = numbers
    fraction = max(number.fraction for number in sources)
    terms = zip(values, sources, _signs(options, len(sources)), strict=True)
    total = sum((sign * (x << (fraction - number.fraction)) for x, number, sign in terms), np.int64(0))
    shifted = _shift(np.asarray(total, dtype=np.int64), fraction - target.fraction, round=_rounds(options))
    return _clip(shifted, target, relu=bool(options.get("relu", False)))


def _build_join(context: Context[W], words: tuple[Word[W], ...], options: Options, numbers: Numbers) -> Word[W]:
    if _one_format(numbers) != numbers[-1]:
        raise InputError("operands of the target's format", found="others", do="requantise them first")
    return tuple(functools.reduce(context.xor, bits) for bits in zip(*words, strict=True))


def _join(values: tuple[Ints, ...], options: Options, numbers: Numbers) -> Ints:
    return np.asarray(functools.reduce(np.add, values), dtype=np.int64)


def _pairs(numbers: Numbers) -> tuple[list[tuple[Number, Number]], int]:
    """The factors' formats, and the largest fraction of a product."""
    if len(numbers) % 2 == 0:
        raise InputError("an even number of factors", found=str(len(numbers) - 1), do="correct the program")
    pairs = list(zip(numbers[:-1:2], numbers[1:-1:2], strict=True))
    return pairs, max(x.fraction + y.fraction for x, y in pairs)


def _build_multiply(context: Context[W], words: tuple[Word[W], ...], options: Options, numbers: Numbers) -> Word[W]:
    pairs, fraction = _pairs(numbers)
    target = numbers[-1]
    shift = fraction - target.fraction
    width = max(x.bits + y.bits + fraction - x.fraction - y.fraction for x, y in pairs) + len(pairs).bit_length()
    total = Columns(context, max(width, shift) + 1)
    for (x, y), a, b in zip(pairs, words[::2], words[1::2], strict=True):
        place = fraction - x.fraction - y.fraction
        total.add_product((*(context.constant(False),) * place, *a), b, (x.signed, y.signed))
    if _rounds(options) and shift > 0:
        total.add_bit(context.constant(True), shift - 1)
    return _to_target(context, _shifted(context, total.total(), shift), target)


def _multiply(values: tuple[Ints, ...], options: Options, numbers: Numbers) -> Ints:
    pairs, fraction = _pairs(numbers)
    terms = zip(pairs, values[::2], values[1::2], strict=True)
    total = sum(((a * b) << (fraction - x.fraction - y.fraction) for (x, y), a, b in terms), np.int64(0))
    shift = fraction - numbers[-1].fraction
    return _clip(_shift(np.asarray(total, dtype=np.int64), shift, round=_rounds(options)), numbers[-1])


def _build_argmax(context: Context[W], words: tuple[Word[W], ...], options: Options, numbers: Numbers) -> Word[W]:
    index = argmax(context, words, signed=_one_format(numbers).signed)
    if len(index) > numbers[-1].bits:
        raise InputError(f"a target of {len(index)} bits", found=str(numbers[-1].bits), do="correct the program")
    return zero_extend(context, index, numbers[-1].bits)


def _argmax(values: tuple[Ints, ...], options: Options, numbers: Numbers) -> Ints:
    _one_format(numbers)
    return np.asarray(np.argmax(np.stack(values), axis=0), dtype=np.int64)


def _rest(function: str) -> Gadget:
    def build(context: Context[W], words: tuple[Word[W], ...], options: Options, numbers: Numbers) -> Word[W]:
        return curves.build_rectified(context, words, options, numbers, function)

    def evaluate(values: tuple[Ints, ...], options: Options, numbers: Numbers) -> Ints:
        return curves.rectified(values, options, numbers, function)

    return Gadget(build, evaluate, _CURVE)


_CURVE = ("form", "grid", "precision", "segments", "slope")
_S_CURVE = (*_CURVE, "exact")
GADGETS: Mapping[str, Gadget] = MappingProxyType(
    {
        "requantise": Gadget(_build_requantise, _requantise, ("round",)),
        "relu": Gadget(_build_relu, _relu, ("round",)),
        "clamp": Gadget(_build_clamp, _clamp, ("low", "high", "round")),
        "leaky_relu": Gadget(_build_leaky, _leaky, ("slope", "slope_shift")),
        "sigmoid": Gadget(curves.build_sigmoid, curves.sigmoid, _S_CURVE),
        "tanh": Gadget(curves.build_tanh, curves.tanh, _S_CURVE),
        "silu": _rest("silu_rest"),
        "gelu": _rest("gelu_rest"),
        "gelu_tanh": _rest("gelu_tanh_rest"),
        "max": Gadget(_build_max, _max, ("round",), operands=None, padding="lowest"),
        "add": Gadget(_build_add, _add, ("signs", "relu", "round"), operands=None),
        "join": Gadget(_build_join, _join, operands=None),
        "multiply": Gadget(_build_multiply, _multiply, ("round",), operands=None),
        "argmax": Gadget(_build_argmax, _argmax, operands=None),
    }
)
