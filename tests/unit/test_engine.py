"""The native engine's half gates give what the readable reference gives, in every context."""

from __future__ import annotations

import numpy as np
import pytest
from drawn_netlists import netlists
from garblings import AND, DELTA, KERNELS, OFFSET, ORDERS, SEED, drawn, evaluate, garble, parties, plan_of, wide_netlist
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseal import _native
from deepseal.secure_inference.netlist import Clear, multiply, record, replay, simplify
from deepseal.secure_inference.reference.half_gates import ReferenceEvaluator, ReferenceGarbler, garbler_input_labels


class TestAgainstTheReference:
    @given(
        netlists(),
        st.integers(1, 20),
        st.sampled_from(ORDERS),
        st.integers(0, 2**32 - 1),
        st.lists(st.integers(32, 300), min_size=1, max_size=3),
    )
    @settings(max_examples=40, deadline=None)
    def test_drawn_netlists_byte_for_byte(self, netlist, lanes, order, seed, sizes):
        zero, bits, active = drawn(seed, netlist.input_bits, lanes)
        slow, slow_evaluator = ReferenceGarbler(SEED, DELTA, order), ReferenceEvaluator(SEED, order)
        expected = [slow.garble(netlist, zero) for _ in range(2)]
        slow_active = slow_evaluator.evaluate(netlist, active, expected[0][1])
        clear = netlist.evaluate_bits(bits.astype(bool))
        plan = plan_of(netlist, order)
        assert plan.and_gates == simplify(netlist).and_gates
        for kernels in KERNELS:
            garbler, evaluator = parties(kernels)
            for index, (labels, tables) in enumerate(expected):  # the second run goes on with the gates' numbers
                got_tables, got_labels = garble(garbler, plan, zero, sizes)
                assert got_tables == tables
                assert np.array_equal(got_labels, labels)
                got = evaluate(evaluator, plan, active, tables, [size // 32 for size in sizes])
                assert np.array_equal(got, labels ^ clear[..., None] * OFFSET)
                if index == 0:
                    assert np.array_equal(got, slow_active)
                assert np.array_equal(garbler.decode(labels, got), clear.ravel())
            assert garbler.gates == evaluator.gates == slow.gates

    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("lanes", [1, 7, 16, 33])
    def test_many_runs_across_the_change_of_key(self, order, lanes):
        netlist = wide_netlist(330, 20, seed=3)
        plan = plan_of(netlist, order)
        runs = -(-4300 // (plan.and_gates * lanes))
        assert plan.and_gates > 60
        slow, expected = ReferenceGarbler(SEED, DELTA, order), []
        zero, bits, active = drawn(5, 20, lanes)
        clear = netlist.evaluate_bits(bits.astype(bool))
        for _ in range(runs):
            expected.append(slow.garble(netlist, zero))
        assert slow.gates > 4096  # the second key
        for kernels in KERNELS:
            garbler, evaluator = parties(kernels)
            for turn, (labels, tables) in enumerate(expected):
                got, out = garble(garbler, plan, zero, (32, 95, 4096 + 31, 32 * (turn + 1)))
                assert got == tables
                assert np.array_equal(out, labels)
                got = evaluate(evaluator, plan, active, tables, (1, 3, 129, turn + 1))
                assert np.array_equal(got, labels ^ clear[..., None] * OFFSET)

    def test_half_gates_byte_for_byte(self):
        """Both kinds, of any number, between whole gates, and across the change of key."""
        slow, slow_evaluator = ReferenceGarbler(SEED, DELTA), ReferenceEvaluator(SEED)
        pairs = {kernels: parties(kernels) for kernels in KERNELS}
        for turn, n in enumerate((0, 1, 2, 17, 300, 4000, 4001, 255)):
            zero, bits, active = drawn(turn, 2, n)
            x, y = bits
            (own, own_tables), (peer, peer_tables) = slow.and_own(zero[0], y), slow.and_peer(*zero)
            wanted = [labels ^ (x & y)[:, None] * OFFSET for labels in (own, peer)]
            assert np.array_equal(slow_evaluator.and_peer(active[0], own_tables), wanted[0])
            assert np.array_equal(slow_evaluator.and_own(*active, y, peer_tables), wanted[1])
            whole = slow.garble(AND, zero) if n else None
            if whole:
                slow_evaluator.evaluate(AND, active, whole[1])
            for garbler, evaluator in pairs.values():
                tables = np.empty((n, 16), np.uint8)
                assert np.array_equal(garbler.and_own(zero[0], y, tables), own)
                assert tables.tobytes() == own_tables
                assert np.array_equal(evaluator.and_peer(active[0], tables), wanted[0])
                out = np.empty_like(own)
                garbler.and_peer(*zero, tables, out)
                assert np.array_equal(out, peer)
                assert tables.tobytes() == peer_tables
                evaluator.and_own(*active, y, tables, out)
                assert np.array_equal(out, wanted[1])
                if whole:
                    assert garble(garbler, plan_of(AND), zero)[0] == whole[1]
                    evaluate(evaluator, plan_of(AND), active, whole[1])
                assert garbler.gates == evaluator.gates == slow.gates == slow_evaluator.gates
        assert slow.gates > 8192

    def test_two_runs_that_alternate_share_the_numbers(self):
        """Tables of two runs taken in turn: each gate gets the next number, so the reference does the same."""
        zero, _, _ = drawn(1, 2, 40)
        slow, (garbler, _) = ReferenceGarbler(SEED, DELTA), parties()
        expected = [slow.garble(AND, zero[:, start : start + 10])[1] for start in (0, 0, 10, 10)]
        runs = [garbler.garbling(plan_of(AND), 40, zero) for _ in range(2)]
        buffer = np.empty(320, np.uint8)
        got = []
        for _ in range(2):
            for run in runs:
                assert run.next(buffer) == 320
                got.append(buffer.tobytes())
        assert got == expected

    @pytest.mark.parametrize("kernels", KERNELS)
    def test_own_labels(self, kernels):
        for n in (0, 1, 3, 8, 129):
            bits = np.random.default_rng(n).integers(0, 2, n, dtype=np.uint8)
            garbler, _ = parties(kernels)
            active = _native.active_labels(_native.Session(SEED, kernels), b"0123456789abcdef", n)
            assert np.array_equal(active, garbler_input_labels(b"0123456789abcdef", n))
            assert np.array_equal(garbler.own_labels(b"0123456789abcdef", bits), active ^ bits[:, None] * OFFSET)


class TestContextsAgree:
    @pytest.mark.parametrize("lanes", [1, 15, 16, 500])
    def test_clear_reference_and_native(self, lanes):
        netlist = record(multiply, 6, 6, signed=True)
        zero, bits, active = drawn(lanes, 12, lanes)
        clear = np.array(replay(netlist, Clear(), list(bits.astype(bool))))
        assert np.array_equal(clear, netlist.evaluate_bits(bits.astype(bool)))
        garbler, evaluator = parties()
        tables, labels = garble(garbler, plan_of(netlist), zero)
        out = evaluate(evaluator, plan_of(netlist), active, tables)
        assert np.array_equal(garbler.decode(labels, out).reshape(clear.shape), clear)
        if lanes <= 16:
            slow_labels, slow_tables = ReferenceGarbler(SEED, DELTA).garble(netlist, zero)
            assert (slow_tables, slow_labels.tobytes()) == (tables, labels.tobytes())
            slow = ReferenceEvaluator(SEED).evaluate(netlist, active, tables)
            assert np.array_equal(slow, out)
        for lane in range(0, lanes, max(1, lanes // 7)):  # a wide replay is many narrow ones
            words = [sum(int(bit) << i for i, bit in enumerate(bits[k : k + 6, lane])) for k in (0, 6)]
            value = netlist.evaluate(words)[0]
            assert value == sum(int(bit) << i for i, bit in enumerate(clear[:, lane]))
