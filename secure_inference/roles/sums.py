"""Linear layers as circuits, for weights that one party knows: how products pair up, and the circuits that add them.

A weight w of n bits is a sum of n signs: 2w + 1 = sum_b 2^b s_b, s_b = 1 or -1, where bit b of w + 2^(n-1) says which.
With free XOR a product with a sign costs nothing (-x = not x + 1), so only the sum of the n words costs gates, k for a
factor of k bits. Two products together, s_1 x_1 + s_2 x_2, are plus or minus x_1 + x_2 or x_1 - x_2. Both are worked
out once for all outputs that read the pair (the idea of Arlazarov, Dinic, Kronrod, Faradzev 1970), and for each bit of
the weights half gates of one ciphertext (Zahur, Rosulek, Evans 2015) take one of them, since a party knows which. A
pair then costs n (k + 1) half gates and as many whole ones, where two products would cost 2 n k whole ones.

For words z of k + 1 bits, Z = z + 2^k is unsigned, and the complement of z gives 2^(k+1) - 1 - Z. So for each output

    2y = sum_b 2^b sum_pairs Z' - sum_pairs Z + K  (mod 2^(l+1)),

where Z' is Z of the pair's sum or difference, complemented where s_1 = -1, the Z behind it are those of the pairs' sums
(2w = -1 + ...), and K is what the weights, the bias and public constants add: the weight owner knows it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import InputError
from deepseal.secure_inference.compile.program import Linear, Program
from deepseal.secure_inference.netlist import Record, add, sign_extend, subtract
from deepseal.secure_inference.netlist.products import Columns
from deepseal.secure_inference.protocol.parties import Program as Replayed

Ints = NDArray[np.int64]
_NARROW, _WIDE = 64, 256  # outputs of a group that are few, and many
_PAIRS = (32, 16, 8)  # pairs in a circuit for few outputs, for some, for many
_DEGREES = 8  # different numbers of products for which outputs of the same number are a group
_MOST_BITS = 63


@dataclass(frozen=True, eq=False)
class Group:
    """Outputs with the same number of products, or nearly so, which are added in the same circuits.

    Attributes:
        outputs: (m,) flat index of each.
        sets: (m,) which row of ``sources`` it reads.
        sources: (u, pairs, 2) flat index of each source element; -1 for none, behind the last one.
        weights: (m, 2 pairs) flat index of each weight; -1 for none.
    """

    outputs: Ints
    sets: Ints
    sources: NDArray[np.int32]
    weights: NDArray[np.int32]

    @property
    def pairs(self) -> int:
        """Pairs of products of each output."""
        return int(self.sources.shape[1])

    @property
    def chunk(self) -> int:
        """Pairs in one circuit: more where there are few outputs to fill the processor."""
        few, some, many = _PAIRS
        return few if len(self.outputs) < _NARROW else some if len(self.outputs) < _WIDE else many


@dataclass(frozen=True)
class Format:
    """Numbers of a linear layer.

    Attributes:
        source_bits: k.
        signed: the source is signed.
        weight_bits: n, of signed weights.
        ring_bits: l.
    """

    source_bits: int
    signed: bool
    weight_bits: int
    ring_bits: int

    @property
    def word_bits(self) -> int:
        """Of a pair's sum or difference."""
        return self.source_bits + 1


@dataclass(frozen=True)
class Part:
    """A circuit that adds some pairs of each output to its sum.

    Attributes:
        first: pair.
        last: pair behind the last one.
        carried: bits of the sum so far.
        program: inputs: the sum so far, then the words (digit, bit, pair); output: the new sum.
    """

    first: int
    last: int
    carried: int
    program: Replayed


def format_of(program: Program, step: Linear) -> Format:
    """The numbers of a linear step.

    Raises:
        InputError: sums of 63 bits or more.
    """
    source, target = program.wires[step.source].number, program.wires[step.target].number
    if target.bits >= _MOST_BITS:
        found = f"{target.bits} bits in {step.name!r}"
        raise InputError(f"sums of fewer than {_MOST_BITS} bits", found=found, do="compile with fewer bits")
    return Format(source.bits, source.signed, step.weight.bits + int(not step.weight.signed), target.bits)


def groups_of(program: Program, step: Linear) -> tuple[Group, ...]:
    """The products of a linear step, by output."""
    size = program.wires[step.target].size
    shape = step.input_shape(program)
    if step.op == "linear" and step.window is None and step.mask is None and len(shape) == 1:
        sources = np.arange(shape[0], dtype=np.int32)[None]
        weights = np.arange(size * shape[0], dtype=np.int32).reshape(size, -1)
        return (_paired(np.arange(size), np.zeros(size, dtype=np.int64), sources, weights),)
    met = step.connections(program)
    degrees = np.bincount(met.outputs, minlength=size)
    order = np.argsort(met.outputs, kind="stable")
    every_source = np.repeat(np.arange(len(met.starts) - 1, dtype=np.int32), np.diff(met.starts))[order]
    every_weight = met.weights[order].astype(np.int32)
    firsts, counts = np.cumsum(degrees) - degrees, _counts(degrees)
    groups = []
    for count in np.unique(counts).tolist():
        outputs = np.flatnonzero(counts == count)
        places = np.arange(count)
        missing = places >= degrees[outputs, None]
        rows = np.where(missing, 0, firsts[outputs, None] + places)
        sources, weights = (np.where(missing, np.int32(-1), part[rows]) for part in (every_source, every_weight))
        known: dict[bytes, int] = {}
        sets = np.array([known.setdefault(row.tobytes(), len(known)) for row in sources], dtype=np.int64)
        groups.append(_paired(outputs, sets, sources[np.unique(sets, return_index=True)[1]], weights))
    return tuple(groups)


def _counts(degrees: Ints) -> Ints:
    """Products of each output's group: its own; more, where nearly every output would be a group of its own."""
    if len(np.unique(degrees)) <= _DEGREES:
        return degrees
    step = 2 * max(1, int(degrees.max()) // (4 * _DEGREES))
    return -(-degrees // step) * step


def _paired(outputs: Ints, sets: Ints, sources: NDArray[np.int32], weights: NDArray[np.int32]) -> Group:
    odd = [(0, 0), (0, sources.shape[1] % 2)]
    pairs = np.pad(sources, odd, constant_values=-1).reshape(len(sources), -1, 2)
    return Group(outputs, sets, pairs, np.pad(weights, odd, constant_values=-1))


@lru_cache(maxsize=256)
def pair_circuit(numbers: Format) -> Replayed:
    """Inputs x_1, x_2; outputs Z of the sum, and the difference of the bits of both Z, of sum and difference."""
    context, width = Record(), numbers.word_bits
    words = [context.inputs(numbers.source_bits) for _ in range(2)]
    if not numbers.signed:  # x - 2^(k-1)
        words = [(*word[:-1], context.not_(word[-1])) for word in words]
    x, y = (sign_extend(word, width) for word in words)
    total, difference = add(context, x, y), subtract(context, x, y)
    unlike = tuple(context.xor(a, b) for a, b in zip(total, difference, strict=True))
    return Replayed(context.netlist((*total[:-1], context.not_(total[-1])), unlike))


@lru_cache(maxsize=1024)
def _sum_circuit(carried: int, pairs: int, digits: int, word: int, width: int) -> Replayed:
    context = Record()
    total = Columns(context, width)
    if carried:
        total.add_word(context.inputs(carried), 0, signed=False)
    bits = context.inputs(digits * word * pairs)
    for place in range(digits * word):
        for bit in bits[place * pairs : (place + 1) * pairs]:
            total.add_bit(bit, place // word + place % word)
    return Replayed(context.netlist(total.total()))


def parts(pairs: int, chunk: int, digits: int, word: int, most: int) -> tuple[Part, ...]:
    """The circuits that add ``pairs`` groups of ``digits`` unsigned words of ``word`` bits, modulo 2^most."""
    largest = ((1 << digits) - 1) * ((1 << word) - 1)
    found, carried = [], 0
    for first in range(0, pairs, chunk):
        last = min(first + chunk, pairs)
        width = min((last * largest).bit_length(), most)
        found.append(Part(first, last, carried, _sum_circuit(carried, last - first, digits, word, width)))
        carried = width
    return tuple(found)


@lru_cache(maxsize=256)
def last_circuit(total: int, common: int, ring: int) -> Replayed:
    """Inputs: the sum of the Z', the sum of the Z, and K, modulo 2^(l+1); output: y modulo 2^l."""
    context = Record()
    columns = Columns(context, ring + 1)
    columns.add_word(context.inputs(total), 0, signed=False)
    columns.add_word(context.inputs(common), 0, signed=False, negative=True)
    columns.add_word(context.inputs(ring + 1), 0, signed=False)
    return Replayed(context.netlist(columns.total()[1:]))


@dataclass(frozen=True, eq=False)
class Sums:
    """All circuits of a group.

    Attributes:
        group: its outputs.
        numbers: of the layer.
        common: adds the pairs' sums, once for each row of sources.
        own: adds each output's own words.
    """

    group: Group
    numbers: Format
    common: tuple[Part, ...]
    own: tuple[Part, ...]

    @property
    def last(self) -> Replayed:
        """The circuit that makes the result."""
        common, own = (sum(found[-1].program.netlist.outputs) for found in (self.common, self.own))
        return last_circuit(common=common, total=own, ring=self.numbers.ring_bits)

    @property
    def gates(self) -> tuple[int, int]:
        """Whole and half gates for one sample."""
        group, numbers = self.group, self.numbers
        if not group.pairs:
            return 0, 0
        once = group.pairs * pair_circuit(numbers).netlist.and_gates + _gates(self.common)
        each = _gates(self.own) + self.last.netlist.and_gates
        halves = group.pairs * numbers.weight_bits * numbers.word_bits
        return len(group.sources) * once + len(group.outputs) * each, len(group.outputs) * halves


def _gates(found: tuple[Part, ...]) -> int:
    return sum(part.program.netlist.and_gates for part in found)


def sums_of(program: Program, step: Linear) -> tuple[Sums, ...]:
    """The circuits of a linear step whose weights are secret."""
    numbers = format_of(program, step)
    digits, word, most = numbers.weight_bits, numbers.word_bits, numbers.ring_bits + 1
    return tuple(
        Sums(
            group,
            numbers,
            parts(group.pairs, _PAIRS[0], 1, word, most),
            parts(group.pairs, group.chunk, digits, word, most),
        )
        for group in groups_of(program, step)
    )


@lru_cache(maxsize=256)
def public_circuit(weights: tuple[int, ...], bias: int, numbers: Format) -> Replayed:
    """The sum of public multiples of the inputs, and a public number, modulo 2^l."""
    context = Record()
    total = Columns(context, numbers.ring_bits)
    for weight in weights:
        word = context.inputs(numbers.source_bits)
        for place, negative in _signed_digits(weight):
            total.add_word(word, place, signed=numbers.signed, negative=negative)
    for place in range(numbers.ring_bits):
        if bias >> place & 1:
            total.add_bit(context.constant(True), place)
    return Replayed(context.netlist(total.total()))


def _signed_digits(value: int) -> Iterator[tuple[int, bool]]:
    """The non-adjacent form: the fewest powers of two, added or subtracted."""
    place = 0
    while value:
        if value & 1:
            negative = value & 3 == 3
            yield place, negative
            value += 1 if negative else -1
        value >>= 1
        place += 1
