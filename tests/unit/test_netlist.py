"""Netlists as data, and the contexts."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from drawn_netlists import clear, netlists
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseal.errors import InputError
from deepseal.secure_inference.netlist import (
    Clear,
    Count,
    Netlist,
    Op,
    Record,
    from_word,
    multiply,
    record,
    replay,
    simplify,
    to_word,
)


def full_adder() -> Netlist:
    """a, b, c -> (sum, carry) with one AND."""
    return Netlist((1, 1, 1), (2,), [0, 0, 0, 1, 0], [0, 1, 3, 3, 6], [2, 2, 1, 4, 2], [5, 7])


class TestNetlist:
    def test_full_adder(self):
        adder = full_adder()
        for bits in itertools.product((0, 1), repeat=3):
            assert adder.evaluate(bits) == [sum(bits)]
        assert (adder.and_gates, adder.xor_gates, adder.not_gates, adder.gates) == (1, 4, 0, 5)
        assert (adder.wires, adder.depth) == (8, 1)

    @given(netlists(), st.data())
    @settings(max_examples=80, deadline=None)
    def test_all_ways_to_evaluate_agree(self, netlist, data):
        lanes = data.draw(st.integers(1, 20))
        seed = data.draw(st.integers(0, 2**32 - 1))
        bits = np.random.default_rng(seed).integers(0, 2, (netlist.input_bits, lanes)).astype(bool)
        batch = netlist.evaluate_bits(bits)
        assert batch.shape == (sum(netlist.outputs), lanes)
        assert batch.dtype == np.bool_
        vectors = replay(netlist, Clear(), list(bits))
        for lane in range(lanes):
            expected = clear(netlist, [bool(bit) for bit in bits[:, lane]])
            assert batch[:, lane].tolist() == expected
            rest = iter(bits[:, lane])
            values = [from_word([next(rest) for _ in range(width)]) for width in netlist.inputs]
            answer = iter(expected)
            words = [from_word([next(answer) for _ in range(width)]) for width in netlist.outputs]
            assert netlist.evaluate(values) == words
            assert [bool(np.broadcast_to(v, lanes)[lane]) for v in vectors] == expected

    @given(netlists())
    @settings(max_examples=60, deadline=None)
    def test_depth_is_the_longest_chain_of_ands(self, netlist):
        n = netlist.input_bits

        def depth(wire):
            if wire < n or netlist.ops[wire - n] == Op.CONST:
                return 0
            op, x, y = netlist.ops[wire - n], int(netlist.a[wire - n]), int(netlist.b[wire - n])
            if op in (Op.NOT, Op.COPY):
                return depth(x)
            return max(depth(x), depth(y)) + (op == Op.AND)

        small = netlist if netlist.gates < 15 else full_adder()
        if small is netlist:
            assert small.and_depths.tolist() == [depth(wire) for wire in range(small.wires)]
            assert small.depth == max(map(depth, range(small.wires)))

    def test_no_lanes_and_no_inputs(self):
        assert full_adder().evaluate_bits(np.zeros((3, 0), bool)).shape == (2, 0)
        assert Netlist((), (2,), [3, 3], [1, 0], [0, 0], [0, 1]).evaluate([]) == [1]

    def test_digest_sees_every_field_and_is_pinned(self):
        base = full_adder()
        assert base.digest() == "ff14e51f239c97412d19c503f6503894ac977987552ff278f7346e591ac57c5c"
        fields = {
            "inputs": (2, 1),
            "outputs": (1, 1),
            "ops": [0, 0, 0, 0, 0],
            "a": [0, 1, 3, 4, 6],
            "b": [2, 2, 0, 4, 2],
            "output_wires": [7, 5],
        }
        whole = {name: getattr(base, name) for name in fields}
        others = [Netlist(**{**whole, name: value}) for name, value in fields.items()]
        assert len({base.digest(), *(other.digest() for other in others)}) == 7
        assert all(other != base for other in others)
        assert Netlist(**whole) == base
        assert len({Netlist(**whole), base}) == 1

    def test_arrays_are_read_only_copies(self):
        ops = np.array([1], np.uint8)
        netlist = Netlist((2,), (1,), ops, [0], [1], [2])
        ops[0] = 0
        assert netlist.and_gates == 1
        with pytest.raises(ValueError):
            netlist.ops[0] = 0

    @pytest.mark.parametrize(
        "change",
        [
            {"inputs": (0, 3)},
            {"inputs": ("x",)},
            {"outputs": ()},
            {"outputs": (3,)},
            {"outputs": (-2,)},
            {"ops": [0, 0, 0, 1]},
            {"ops": [0, 0, 0, 5, 0]},
            {"ops": [0, 0, 0, 256, 0]},
            {"ops": [0, 0, 0, 1.0, 0]},
            {"ops": [[0, 0, 0, 1, 0]]},
            {"ops": [0, 0, 0, 2, 0]},  # NOT with a second operand
            {"ops": [0, 0, 0, 3, 0]},  # CONST 3
            {"a": [3, 1, 3, 3, 6]},  # reads itself
            {"a": [0, 1, 3, 3, -1]},
            {"a": [0, 1, 3, 3, 2**32]},
            {"a": [0, 1, 3, 3, 10**30]},
            {"b": [2, 2, 1, 4, 7]},
            {"output_wires": [5, 8]},
            {"output_wires": [5]},
        ],
    )
    def test_unsound_netlists_are_refused_in_one_line(self, change):
        base = full_adder()
        fields = {name: getattr(base, name) for name in ("inputs", "outputs", "ops", "a", "b", "output_wires")}
        with pytest.raises(InputError) as error:
            Netlist(**{**fields, **change})
        assert "\n" not in str(error.value)

    def test_unsound_values_are_refused_and_not_shown(self):
        for values in ([1, 1], [1, 1, 1, 1], [1, 1, 2], [1, 1, -1]):
            with pytest.raises(InputError):
                full_adder().evaluate(values)
        with pytest.raises(InputError) as error:
            Netlist((8,), (8,), [], [], [], range(8)).evaluate([123456789])
        assert "123456789" not in str(error.value)
        for bits in (np.zeros((2, 5), bool), np.zeros(3, bool), np.zeros((3, 5), np.uint8)):
            with pytest.raises(InputError):
                full_adder().evaluate_bits(bits)


class TestContexts:
    @given(netlists(), st.data())
    @settings(max_examples=120, deadline=None)
    def test_simplify_keeps_the_function_and_leaves_nothing_to_fold(self, netlist, data):
        simple = simplify(netlist)
        assert simple.inputs == netlist.inputs
        bits = data.draw(st.lists(st.booleans(), min_size=netlist.input_bits, max_size=netlist.input_bits))
        assert clear(simple, bits) == clear(netlist, bits)
        assert simplify(simple) == simple
        assert not np.any(simple.ops == Op.COPY)
        constants = np.flatnonzero(simple.ops == Op.CONST) + simple.input_bits
        assert len(constants) <= 2
        two = simple.ops <= Op.AND
        operands = {*simple.a[simple.ops != Op.CONST].tolist(), *simple.b[two].tolist()}
        assert not operands & set(constants.tolist())
        assert not np.any(simple.a[two] == simple.b[two])
        used = operands | set(simple.output_wires.tolist())
        assert used >= set(range(simple.input_bits, simple.wires))

    def test_folding_rules_one_by_one(self):
        recorder = Record()
        x, y = recorder.inputs(2)
        zero, one = recorder.constant(False), recorder.constant(True)
        assert recorder.xor(x, x) == zero
        assert recorder.xor(x, zero) == x == recorder.xor(zero, x)
        assert recorder.and_(x, x) == x
        assert recorder.and_(x, zero) == zero == recorder.and_(zero, x)
        assert recorder.and_(x, one) == x == recorder.and_(one, x)
        assert recorder.not_(zero) == one
        assert recorder.not_(one) == zero
        assert [recorder.xor(a, b) for a, b in itertools.product((zero, one), repeat=2)] == [zero, one, one, zero]
        assert [recorder.and_(a, b) for a, b in itertools.product((zero, one), repeat=2)] == [zero, zero, zero, one]
        once = recorder.xor(one, x)
        twice = recorder.not_(once)
        netlist = recorder.netlist((twice, recorder.and_(x, y)))
        assert netlist.ops.tolist() == [Op.NOT, Op.NOT, Op.AND]

    def test_inputs_may_come_late_and_dead_gates_go(self):
        recorder = Record()
        (x,) = recorder.inputs(1)
        dead = recorder.not_(x)
        recorder.and_(dead, x)
        (y,) = recorder.inputs(1)
        netlist = recorder.netlist((recorder.and_(x, y), recorder.constant(True)), (y,))
        assert (netlist.inputs, netlist.outputs, netlist.gates, netlist.and_gates) == ((1, 1), (2, 1), 2, 1)
        assert netlist.evaluate([1, 1]) == [3, 1]

    def test_count_counts_what_record_writes(self):
        netlist = record(multiply, 7, 5, signed=True)
        count = Count()
        replay(netlist, count, count.inputs(12))
        assert (count.and_gates, count.xor_gates, count.not_gates) == (
            netlist.and_gates,
            netlist.xor_gates,
            netlist.not_gates,
        )
        assert count.depth == netlist.depth

    def test_errors(self):
        recorder = Record()
        for width in (0, -1, 1 << 40):
            with pytest.raises(InputError):
                recorder.inputs(width)
        with pytest.raises(InputError):
            recorder.netlist((5,))
        with pytest.raises(InputError):
            recorder.netlist()
        with pytest.raises(InputError):
            replay(full_adder(), Clear(), [True])

    @given(st.integers(1, 70), st.data())
    def test_words_of_integers(self, width, data):
        value = data.draw(st.integers(-(1 << (width - 1)), (1 << (width - 1)) - 1))
        assert from_word(to_word(value, width), signed=True) == value
        assert from_word(to_word(value, width)) == value % (1 << width)
