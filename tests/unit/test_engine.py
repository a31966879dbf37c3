"""The native garbling engine against the slow reference, byte for byte; what its bytes may show; its binding."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from drawn_netlists import netlists
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare, norm

from deepseal import _native
from deepseal.secure_inference.netlist import Clear, Netlist, Op, multiply, record, replay, simplify
from deepseal.secure_inference.reference.half_gates import ReferenceEvaluator, ReferenceGarbler, garbler_input_labels

SEED = bytes(range(16))
DELTA = bytes.fromhex("1f5a9be3c07d4482a6f1e2d3b4958677")
OFFSET = np.frombuffer(DELTA, np.uint8)
KERNELS = _native.kernels()
ORDERS = ("given", "depth")
AND = Netlist((2,), (1,), [Op.AND], [0], [1], [2])
LEVEL = 1e-6


def plan_of(netlist, order="given"):
    return _native.Plan(netlist.input_bits, netlist.ops, netlist.a, netlist.b, netlist.output_wires, order)


def parties(kernels="", delta=DELTA, seed=SEED):
    session = _native.Session(seed, kernels)
    return _native.Garbler(_native.Delta.from_bytes(delta), session), _native.Evaluator(session)


def garble(garbler, plan, zero, sizes=(1 << 16,)):
    """All tables, through buffers of these sizes in turn, and the outputs' zero labels."""
    run = garbler.garbling(plan, zero.shape[1], zero)
    tables, turn = bytearray(), 0
    while left := run.tables_left:
        buffer = np.empty(sizes[turn % len(sizes)], np.uint8)
        count = run.next(buffer)
        assert count == 32 * min(len(buffer) // 32, left)
        tables += buffer[:count].tobytes()
        turn += 1
    return bytes(tables), run.outputs()


def evaluate(evaluator, plan, active, tables, counts=(1000,)):
    run = evaluator.evaluation(plan, active.shape[1], active)
    turn = 0
    while tables:
        size = 32 * counts[turn % len(counts)]
        run.next(tables[:size])
        tables, turn = tables[size:], turn + 1
    assert run.tables_left == 0
    return run.outputs()


def drawn(seed, inputs, lanes):
    rng = np.random.default_rng(seed)
    zero = rng.integers(0, 256, (inputs, lanes, 16), dtype=np.uint8)
    bits = rng.integers(0, 2, (inputs, lanes), dtype=np.uint8)
    return zero, bits, zero ^ bits[..., None] * OFFSET


def wide_netlist(gates, inputs, seed):
    """Many gates of all kinds over few inputs, deep and wide."""
    rng = np.random.default_rng(seed)
    ops = rng.choice([Op.XOR, Op.AND, Op.NOT, Op.CONST, Op.COPY], size=gates, p=[0.3, 0.55, 0.1, 0.02, 0.03])
    wires = np.arange(inputs, inputs + gates)
    a, b = rng.integers(0, wires), rng.integers(0, wires)
    a, b = np.where(ops == Op.CONST, a % 2, a), np.where(ops <= Op.AND, b, 0)
    return Netlist((inputs,), (64,), ops, a, b, rng.integers(inputs + gates - 80, inputs + gates, 64))


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


class TestWhatBytesShow:
    def test_evaluator_never_holds_the_offset_or_both_labels(self):
        """All wires as outputs: all labels that it can hold, all tables; no block, and no two blocks, give delta."""
        base = simplify(wide_netlist(400, 24, seed=8))
        every = np.arange(base.wires)
        netlist = Netlist(base.inputs, (base.wires,), base.ops, base.a, base.b, every)
        garbler, evaluator = parties()
        seed, bits = b"fedcba9876543210", drawn(2, 24, 1)[1]
        zero = garbler.own_labels(seed, bits).reshape(24, 1, 16)
        active = _native.active_labels(_native.Session(SEED), seed, 24).reshape(24, 1, 16)
        tables, labels = garble(garbler, plan_of(netlist), zero)
        held = evaluate(evaluator, plan_of(netlist), active, tables)
        received = seed + tables + np.packbits(labels[:, 0, 0] & 1).tobytes()
        trace = received + held.tobytes()
        windows = {trace[i : i + 16] for i in range(len(trace) - 15)}
        assert DELTA not in windows
        assert held.shape[0] > 150
        # NOT keeps the evaluator's label: it may stand for opposite values on two wires, but never with its twin
        others = {(label ^ OFFSET).tobytes() for label in held[:, 0]}
        assert not others & windows
        blocks = {tables[i : i + 16] for i in range(0, len(tables), 16)} | {label.tobytes() for label in held[:, 0]}
        assert not [b for b in blocks if bytes(x ^ y for x, y in zip(b, DELTA, strict=True)) in blocks]

    @pytest.mark.parametrize("lanes", [1, 1000])
    def test_two_gates_that_share_a_wire(self, lanes):
        """AND(a, b), AND(a, c), 1,000 pairs; the control resets the counter of gates and leaks half of the time."""
        netlist = Netlist((3,), (2,), [Op.AND, Op.AND], [0, 0], [1, 2], [3, 4])
        one, two = (Netlist((3,), (1,), [Op.AND], [0], [second], [3]) for second in (1, 2))
        zero, _, _ = drawn(4, 3, 1000)
        garbler, _ = parties()
        tables = b""
        for start in range(0, 1000, lanes):
            tables += garble(garbler, plan_of(netlist, "depth"), np.ascontiguousarray(zero[:, start : start + lanes]))[
                0
            ]
        blocks = np.frombuffer(tables, np.uint8).reshape(1000 // lanes, 2, lanes, 2, 16)
        assert not (blocks[:, 0] ^ blocks[:, 1] == OFFSET).all(axis=-1).any()
        everything = {block.tobytes() for block in blocks.reshape(-1, 16)}
        assert len(everything) == 4000
        assert not [b for b in everything if bytes(x ^ y for x, y in zip(b, DELTA, strict=True)) in everything]
        control = [np.frombuffer(garble(parties()[0], plan_of(n), zero)[0], np.uint8) for n in (one, two)]
        leaks = (control[0] ^ control[1]).reshape(1000, 2, 16)[:, 0] == OFFSET
        assert 400 < leaks.all(axis=-1).sum() < 600

    def test_no_table_or_label_twice_in_a_session(self):
        garbler, _ = parties()
        zero, _, _ = drawn(6, 2, 64)
        seen = b"".join(garble(garbler, plan_of(AND), zero)[0] for _ in range(70))  # the same labels each time
        blocks = {seen[i : i + 16] for i in range(0, len(seen), 16)}
        assert len(blocks) == len(seen) // 16 == 2 * garbler.gates == 2 * 70 * 64

    def test_tables_and_labels_are_uniform(self):
        """Chi-square of each byte of 100,000 tables and output labels: level 1e-6 over the 48 tests."""
        garbler, evaluator = parties()
        zero, _, active = drawn(9, 2, 100_000)
        tables, labels = garble(garbler, plan_of(AND), zero)
        out = evaluate(evaluator, plan_of(AND), active, tables)
        samples = [*np.frombuffer(tables, np.uint8).reshape(-1, 32).T, *out.reshape(-1, 16).T]
        assert min(chisquare(np.bincount(sample, minlength=256)).pvalue for sample in samples) > LEVEL / len(samples)
        assert labels.shape == out.shape == (1, 100_000, 16)

    @pytest.mark.parametrize("what", ["own input", "gate"])
    def test_colour_is_in_the_lowest_bit_only(self, what):
        """100,000 active labels: no bit goes with the value, or with the colour in the lowest (level 1e-6 in all)."""
        n = 100_000
        rng = np.random.default_rng(10)
        garbler, evaluator = parties(delta=rng.bytes(16))
        offset = garbler.offset(np.zeros(16, np.uint8), np.ones(1, np.uint8))[0]
        values = rng.integers(0, 2, n, dtype=np.uint8)
        if what == "own input":
            active = _native.active_labels(_native.Session(SEED), b"fedcba9876543210", n)
            zero = garbler.own_labels(b"fedcba9876543210", values)
        else:
            inputs = rng.integers(0, 256, (2, n, 16), dtype=np.uint8)
            ones = np.stack([values, np.ones_like(values)])
            tables, zero = garble(garbler, plan_of(AND), inputs)
            active = evaluate(evaluator, plan_of(AND), inputs ^ ones[..., None] * offset, tables)[0]
            zero = zero[0]
        assert np.array_equal((active ^ zero)[:, 0] & 1, values)
        bits = np.unpackbits(active, axis=1, bitorder="little")
        bound = norm.isf(LEVEL / (2 * 383)) * np.sqrt(n) / 2
        for other, places in ((values, range(128)), (bits[:, 0], range(1, 128)), (np.zeros(n), range(128))):
            same = (bits[:, places] == other[:, None]).sum(axis=0)
            assert np.abs(same - n / 2).max() < bound

    def test_constants_cost_no_tables(self):
        ops = [Op.CONST, Op.CONST, Op.AND, Op.AND, Op.XOR, Op.XOR, Op.AND, Op.COPY]
        netlist = Netlist((1,), (6,), ops, [0, 1, 0, 0, 0, 0, 0, 2], [0, 0, 1, 2, 0, 2, 0, 0], [3, 4, 5, 6, 7, 8])
        for order in ORDERS:
            plan = plan_of(netlist, order)
            assert (plan.and_gates, plan.depth) == (0, 0)
            zero, bits, active = drawn(11, 1, 3)
            (garbler, evaluator), buffer = parties(), np.full(64, 7, np.uint8)
            run, other = garbler.garbling(plan, 3, zero), evaluator.evaluation(plan, 3, active)
            assert run.tables_left == other.tables_left == run.next(buffer) == 0
            assert (buffer == 7).all()
            labels, out = run.outputs(), other.outputs()
            assert np.array_equal(garbler.decode(labels, out).reshape(6, 3), netlist.evaluate_bits(bits.astype(bool)))
            assert not out[[0, 2, 5]].any()  # a constant's active label is 0
            assert garbler.gates == evaluator.gates == 0


class TestDecoding:
    def test_made_up_labels_give_nothing(self):
        garbler, _ = parties()
        zero, bits, active = drawn(12, 8, 1)
        assert np.array_equal(garbler.decode(zero, active), bits.ravel())
        for place in range(128):
            for label in range(0, 8, 3):
                wrong = active.copy()
                wrong[label, 0, place // 8] ^= 1 << place % 8
                assert garbler.decode(zero, wrong) is None
        assert garbler.decode(zero, np.roll(active, 1, axis=0)) is None
        assert garbler.decode(zero[:0], active[:0]).shape == (0,)


class TestSecrets:
    def test_delta_cannot_be_read(self):
        delta = _native.Delta.from_bytes(DELTA)
        shown = repr(delta) + str(delta) + format(delta) + " ".join(map(str, (delta.__doc__, vars(_native.Delta))))
        for text in (
            DELTA.hex(),
            DELTA.hex().upper(),
            repr(DELTA),
            str(list(DELTA)),
            str(int.from_bytes(DELTA, "little")),
        ):
            assert text not in shown
        for call in (pickle.dumps, copy.copy, copy.deepcopy, bytes, memoryview, np.frombuffer, int, list):
            with pytest.raises((TypeError, ValueError, AttributeError)):
                call(delta)
        public = [name for name in dir(delta) if not name.startswith("_")]
        assert public == [
            "choose",
            "from_bytes",
        ]  # choose is the base OT's selection; whoever calls it learns its result
        assert not hasattr(delta, "__dict__")

    def test_nothing_that_holds_a_secret_can_be_copied(self):
        session, delta = _native.Session(SEED), _native.Delta()
        pairs = np.zeros((128, 2, 16), np.uint8)
        receiver = _native.CotReceiver(session, 2, pairs)
        sender = _native.CotSender(session, 2, delta, np.zeros((128, 16), np.uint8), receiver.opening)
        garbler = _native.Garbler(delta, session)
        zero = np.zeros((2, 1, 16), np.uint8)
        for thing in (delta, garbler, garbler.garbling(plan_of(AND), 1, zero), receiver, sender):
            assert repr(thing).startswith("<deepseal._native.") and " object at " in repr(thing)
            for call in (pickle.dumps, copy.copy, copy.deepcopy):
                with pytest.raises(TypeError):
                    call(thing)

    def test_offsets_are_fresh_and_odd(self):
        session, zero, one = _native.Session(SEED), np.zeros(16, np.uint8), np.ones(1, np.uint8)
        offsets = {_native.Garbler(_native.Delta(), session).offset(zero, one).tobytes() for _ in range(500)}
        assert len(offsets) == 500
        assert all(offset[0] & 1 for offset in offsets)
        even = _native.Garbler(_native.Delta.from_bytes(bytes(16)), session)
        assert even.offset(zero, one).tobytes() == b"\1" + bytes(15)


class TestLifetimes:
    def test_runs_outlive_what_made_them(self):
        zero, bits, active = drawn(13, 2, 50)
        expected, labels = garble(parties()[0], plan_of(AND), zero)
        garbler, evaluator = parties()
        plan = plan_of(AND)
        run, other = garbler.garbling(plan, 50, zero), evaluator.evaluation(plan, 50, active)
        del garbler, evaluator, plan, zero, active
        np.full((2, 50, 16), 7, np.uint8)  # where their memory would be, if it were free
        buffer = np.empty(32 * 50, np.uint8)
        assert run.next(buffer) == 1600 and buffer.tobytes() == expected
        other.next(buffer)
        assert np.array_equal(run.outputs(), labels)
        assert np.array_equal(other.outputs(), labels ^ (bits[0] & bits[1])[None, :, None] * OFFSET)

    def test_after_the_end(self):
        zero, _, active = drawn(14, 2, 3)
        garbler, evaluator = parties()
        run, other = garbler.garbling(plan_of(AND), 3, zero), evaluator.evaluation(plan_of(AND), 3, active)
        for unfinished in (run, other):
            with pytest.raises(RuntimeError, match="expected all tables to be through, found 3 left"):
                unfinished.outputs()
        buffer = np.empty(96, np.uint8)
        assert (run.next(buffer[:31]), run.next(buffer[:0]), run.tables_left) == (0, 0, 3)
        assert (run.next(buffer), run.next(buffer), run.tables_left) == (96, 0, 0)
        other.next(buffer[:0])
        other.next(buffer)
        with pytest.raises(ValueError, match="at most 0 tables"):
            other.next(buffer)
        assert np.array_equal(run.outputs(), run.outputs())
        assert np.array_equal(other.outputs(), other.outputs())
        assert garbler.gates == evaluator.gates == 3


def views(array):
    """Other looks of the same bytes, and whether the binding may take them."""
    flat = np.ascontiguousarray(array)
    spaced = np.zeros((*flat.shape[:-1], 2 * flat.shape[-1]), np.uint8)
    spaced[..., ::2] = flat
    shifted = np.zeros(flat.nbytes + 17, np.uint8)
    start = 1 + -(shifted.ctypes.data) % 16
    shifted[start : start + flat.nbytes] = flat.ravel()
    frozen = flat.copy()
    frozen.flags.writeable = False
    yield flat.tobytes(), True
    yield bytearray(flat.tobytes()), True
    yield memoryview(flat), True
    yield frozen, True
    yield flat.view(np.uint64), True
    yield shifted[start : start + flat.nbytes], True
    yield spaced[..., ::2], False
    yield flat[::-1], False
    yield np.asfortranarray(flat), False


class TestBinding:
    def test_labels_and_tables_in_any_contiguous_memory(self):
        zero, bits, active = drawn(15, 2, 9)
        expected, labels = garble(parties()[0], plan_of(AND), zero)
        result = labels ^ (bits[0] & bits[1])[None, :, None] * OFFSET
        for view, sound in views(zero):
            garbler, _ = parties()
            if not sound:
                with pytest.raises(ValueError, match="contiguous"):
                    garbler.garbling(plan_of(AND), 9, view)
                continue
            run, buffer = garbler.garbling(plan_of(AND), 9, view), np.empty(288, np.uint8)
            assert run.next(buffer) == 288 and buffer.tobytes() == expected
        for view, sound in views(np.frombuffer(expected, np.uint8).reshape(9, 32)):
            run = parties()[1].evaluation(plan_of(AND), 9, active)
            if sound:
                run.next(view)
                assert np.array_equal(run.outputs(), result)
            else:
                with pytest.raises(ValueError, match="contiguous"):
                    run.next(view)

    def test_wrong_sizes(self):
        (garbler, evaluator), plan, session = parties(), plan_of(AND), _native.Session(SEED)
        labels, long = np.zeros((2, 3, 16), np.uint8), np.zeros(200, np.uint8)
        one = np.zeros(1, np.uint8)
        for size in (0, 1, 15, 16, 95, 97, 112):
            for call in (
                lambda size=size: garbler.garbling(plan, 3, long[:size]),
                lambda size=size: evaluator.evaluation(plan, 3, long[:size]),
            ):
                with pytest.raises(ValueError):
                    call()
        for lanes in (0, 2, 4, 2**40):
            with pytest.raises((ValueError, MemoryError)):
                garbler.garbling(plan, lanes, labels)
        run = evaluator.evaluation(plan, 3, labels)
        for size in (1, 16, 31, 33, 48, 128):
            with pytest.raises(ValueError):
                run.next(bytes(size))
        for call in (
            lambda: _native.Session(b""),
            lambda: _native.Session(bytes(17)),
            lambda: _native.Session(SEED, "no such kernels"),
            lambda: _native.Delta.from_bytes(bytes(15)),
            lambda: garbler.own_labels(bytes(3), one),
            lambda: garbler.offset(labels, one),
            lambda: garbler.decode(labels, labels[:1]),
            lambda: garbler.decode(bytes(17), bytes(17)),
            lambda: _native.active_labels(session, bytes(15), 1),
            lambda: _native.active_labels(session, SEED, 2**62),
            lambda: _native.active_labels(session, SEED, 2**64 - 1),
            lambda: _native.Delta().choose(np.zeros((127, 4), np.uint8), np.zeros((127, 4), np.uint8)),
            lambda: _native.Delta().choose(np.zeros((128, 4), np.uint8), np.zeros((128, 3), np.uint8)),
            lambda: _native.Delta().choose(np.zeros(128, np.uint8), np.zeros(128, np.uint8)),
        ):
            with pytest.raises(ValueError):
                call()

    def test_half_gates_of_wrong_sizes(self):
        (garbler, evaluator), (zero, bits, _) = parties(), drawn(0, 2, 5)
        tables = np.empty((5, 16), np.uint8)
        calls = [
            lambda: garbler.and_own(zero[0], bits[0][:4], tables),
            lambda: garbler.and_own(zero[0], bits[0], tables[:4]),
            lambda: garbler.and_own(zero[0], bits[0], tables, tables[:4]),
            lambda: garbler.and_peer(zero[0], zero[1][:4], tables),
            lambda: garbler.and_peer(zero[0], zero[1], np.empty(81, np.uint8)[1:]),
            lambda: evaluator.and_peer(zero[0], tables[:4]),
            lambda: evaluator.and_own(zero[0], zero[1][:4], bits[0], tables),
            lambda: evaluator.and_own(zero[0], zero[1], bits[0][:4], tables),
            lambda: evaluator.and_own(zero[0], zero[1], bits[0], tables[:4]),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="expected"):
                call()
        assert garbler.gates == evaluator.gates == 0

    def test_wrong_types(self):
        (garbler, _), plan = parties(), plan_of(AND)
        for bits in (np.zeros(3, np.int64), np.zeros(3, np.float32), object(), np.zeros(3, object)):
            with pytest.raises((TypeError, ValueError)):
                garbler.own_labels(SEED, bits)
        for lanes in (-1, 2**64, 1.5, None, "1"):
            with pytest.raises(TypeError):
                garbler.garbling(plan, lanes, np.zeros((2, 1, 16), np.uint8))
        for labels in (None, "x" * 32, [0] * 32):
            with pytest.raises((TypeError, BufferError)):
                garbler.garbling(plan, 1, labels)
        for seed in (None, 5, "x" * 16, np.zeros(16, np.uint8)):
            with pytest.raises(TypeError):
                _native.Session(seed)

    def test_results_into_an_array_of_the_caller(self):
        zero, _, active = drawn(16, 2, 40)
        tables, labels = garble(parties()[0], plan_of(AND), zero)
        expected = evaluate(parties()[1], plan_of(AND), active, tables)
        for chunk in (0, 1, 7, 16, 40, 2**63):
            garbler, evaluator = parties()
            out, other = np.zeros((1, 40, 16), np.uint8), np.zeros(640, np.uint8)
            run = garbler.garbling(plan_of(AND), 40, zero, chunk, out)
            buffer = np.empty(1280, np.uint8)
            assert run.next(buffer) == 1280
            assert np.array_equal(run.outputs(), labels) and np.array_equal(out, labels)
            second = evaluator.evaluation(plan_of(AND), 40, active, chunk, other)
            second.next(buffer)
            assert np.array_equal(second.outputs().reshape(1, 40, 16), expected)
            assert np.array_equal(other.reshape(1, 40, 16), expected)
        frozen, raw = np.zeros(640, np.uint8), np.zeros(700, np.uint8)
        frozen.flags.writeable = False
        start = 1 + -raw.ctypes.data % 16
        bad = (
            frozen,
            raw[start : start + 640],
            np.zeros(624, np.uint8),
            np.zeros(656, np.uint8),
            np.zeros(0, np.uint8),
        )
        for out in (
            *bad,
            np.zeros(1280, np.uint8)[::2],
            np.zeros(640, np.uint8)[::-1],
            np.zeros(80),
            bytes(640),
            [0] * 640,
        ):
            for make in (parties()[0].garbling, parties()[1].evaluation):
                with pytest.raises((TypeError, ValueError)):
                    make(plan_of(AND), 40, zero, 0, out)

    def test_buffers_for_tables(self):
        zero = np.zeros((2, 4, 16), np.uint8)
        run = parties()[0].garbling(plan_of(AND), 4, zero)
        frozen = np.zeros(64, np.uint8)
        frozen.flags.writeable = False
        raw = np.zeros(100, np.uint8)
        start = 1 + -raw.ctypes.data % 16
        for buffer in (bytes(64), frozen, raw[start : start + 64], None, "text"):
            with pytest.raises((TypeError, ValueError, BufferError)):
                run.next(buffer)
        assert run.tables_left == 4
        assert run.next(np.zeros(8, np.uint64)) == 64
        assert run.next(np.zeros((2, 2, 16), np.uint8)) == 64

    @pytest.mark.parametrize(
        "change",
        [
            {"inputs": 2**31},
            {"inputs": 2**32 - 1},
            {"ops": [5]},
            {"ops": [255]},
            {"ops": [1, 1]},
            {"a": [2]},
            {"a": [2**32 - 1]},
            {"a": []},
            {"b": [2]},
            {"b": [0, 0]},
            {"ops": [3], "a": [2]},
            {"ops": [4], "a": [2]},
            {"outputs": [3]},
            {"outputs": [2**32 - 1]},
            {"order": "other"},
            {"order": ""},
        ],
    )
    def test_netlists_that_are_none(self, change):
        sound = {"inputs": 2, "ops": [1], "a": [0], "b": [1], "outputs": [2], "order": "given"} | change
        kinds = {"ops": np.uint8, "a": np.uint32, "b": np.uint32, "outputs": np.uint32}
        with pytest.raises(ValueError, match="expected .*, found "):
            _native.Plan(**{name: np.array(v, kinds[name]) if name in kinds else v for name, v in sound.items()})

    def test_bits_count_by_their_lowest_bit(self):
        garbler, _ = parties()
        labels = garbler.offset(np.zeros((4, 16), np.uint8), np.array([0, 1, 2, 255], np.uint8))
        assert np.array_equal(labels, np.array([0, 1, 0, 1], np.uint8)[:, None] * OFFSET)

    def test_drawn_calls_never_crash(self):
        """1,500 calls with arguments of all kinds, in a process of their own."""
        done = child(FUZZ)
        assert done.returncode == 0, done.stderr[-2000:]
        calls, errors = map(int, done.stdout.split())
        assert calls == 1500
        assert 300 < errors < 1500

    def test_absurd_numbers_of_lanes(self):
        done = child(
            """
            plan = _native.Plan(2, np.array([1], np.uint8), 0 * one, one, np.array([2, 2], np.uint32), "depth")
            for make in (garbler.garbling, evaluator.evaluation):
                for lanes in (2**63, 2**62 * 3, 2**64 - 1):
                    for chunk in (0, 1, 2**63):
                        try:
                            run = make(plan, lanes, np.zeros((0, 16), np.uint8), chunk)
                            run.next(np.zeros(1 << 12, np.uint8))
                        except ValueError:
                            print("refused")
                four = _native.Plan(4, np.array([1], np.uint8), 0 * one, one, np.array([4] * 4, np.uint32), "depth")
                try:  # inputs * lanes and outputs * lanes are 0 in 64 bits
                    make(four, 2**62, np.zeros((0, 16), np.uint8), 1, np.zeros(0, np.uint8)).next(np.zeros(96))
                except ValueError:
                    print("refused")
                run = make(plan, 3, np.zeros((2, 3, 16), np.uint8), 2**63)
                run.next(np.zeros(96, np.uint8))
                run.outputs()
            """
        )
        assert (done.returncode, done.stdout.split()) == (0, ["refused"] * 20), done.stderr[-500:]

    @pytest.mark.parametrize("step", [2, -1, -2])
    def test_tables_into_strided_memory(self, step):
        done = child(
            f"""
            run = garbler.garbling(plan, 64, np.zeros((2, 64, 16), np.uint8))
            memory = np.zeros(8192, np.uint8)
            for start in range(16):
                view = memory[start : start + 2049][::{step}]
                if view.ctypes.data % 16 == 0:
                    break
            try:
                run.next(view)
            except (ValueError, BufferError):
                print("refused")
            """
        )
        assert done.stdout.split() == ["refused"]

    def test_old_pickles(self):
        done = child(
            """
            import pickle
            for protocol in (0, 1):
                try:
                    pickle.dumps(_native.Delta(), protocol)
                except TypeError:
                    print("refused")
            """
        )
        assert done.stdout.split() == ["refused"] * 2

    def test_none_for_an_object(self):
        done = child(
            """
            keys = np.zeros((128, 16), np.uint8)
            opening = _native.CotReceiver(session, 2, np.zeros((128, 2, 16), np.uint8)).opening
            for call in (
                lambda: garbler.garbling(None, 1, np.zeros((2, 1, 16), np.uint8)),
                lambda: evaluator.evaluation(None, 1, np.zeros((2, 1, 16), np.uint8)),
                lambda: _native.Garbler(None, session),
                lambda: _native.CotSender(session, 2, None, keys, opening),
            ):
                try:
                    call()
                except (TypeError, ValueError):
                    print("refused")
            """
        )
        assert done.stdout.split() == ["refused"] * 4


HEAD = """
import numpy as np
from deepseal import _native
session = _native.Session(bytes(16))
garbler, evaluator = _native.Garbler(_native.Delta(), session), _native.Evaluator(session)
one = np.array([1], np.uint32)
plan = _native.Plan(2, np.array([1], np.uint8), 0 * one, one, 2 * one, "depth")
"""

FUZZ = """
import random
rng, numbers = random.Random(7), np.random.default_rng(7)
sizes = [0, 1, 2, 3, 15, 16, 17, 31, 32, 33, 64, 127, 128, 129, 4096]
def any_array():
    n = rng.choice(sizes)
    shape = rng.choice([(), (0,), (n,), (128, 16), (128, 2, 16), (2, n, 16), (0, 16), (3, 5)])
    kind = rng.choice([np.uint8, np.uint8, np.uint8, np.uint32, np.uint64, np.int8, np.float64, bool])
    array = np.asarray(numbers.integers(0, 2, shape)).astype(kind)
    if array.ndim and rng.random() < 0.3:
        wide = np.broadcast_to(array, (2, *array.shape))
        array = rng.choice([array[::2], array[::-1], np.asfortranarray(array), wide])
    if rng.random() < 0.2:
        array.flags.writeable = False
    return array
def any_thing():
    return rng.choice([
        any_array, any_array, any_array, lambda: numbers.bytes(rng.choice(sizes)), lambda: bytearray(rng.choice(sizes)),
        lambda: rng.choice(sizes), lambda: rng.choice([-1, 2**31, 2**32, 2**55, 2**56, 2**64, -2**63]), lambda: "given",
        lambda: 1.5, lambda: [0, 1], lambda: session, lambda: garbler,
    ])()
pairs = np.zeros((128, 2, 16), np.uint8)
def receiver():
    return _native.CotReceiver(session, rng.randint(1, 4), pairs)
def sender():
    k = rng.randint(1, 4)
    opening = _native.CotReceiver(session, k, pairs).opening
    return _native.CotSender(session, k, _native.Delta(), pairs[:, 0].copy(), opening)
def strided(buffer):  # what next cannot refuse yet has a test of its own
    return isinstance(buffer, np.ndarray) and not buffer.flags.c_contiguous
def next_tables(buffer):
    if not strided(buffer):
        garbler.garbling(plan, 5, np.zeros((2, 5, 16), np.uint8)).next(buffer)
lanes = lambda n: n if not isinstance(n, int) or n < 2**40 else 7
targets = [
    (5, lambda *x: _native.Plan(rng.choice([0, 2, 5]), *x[:4], "given")),
    (2, lambda *x: _native.Session(*x)), (1, lambda x: _native.Delta.from_bytes(x)),
    (2, lambda *x: _native.Delta().choose(*x)), (2, garbler.own_labels), (2, garbler.offset), (2, garbler.decode),
    (2, lambda n, x: garbler.garbling(plan, lanes(n), x)), (2, lambda n, x: evaluator.evaluation(plan, lanes(n), x)),
    (1, next_tables), (1, lambda x: evaluator.evaluation(plan, 5, np.zeros((2, 5, 16), np.uint8)).next(x)),
    (2, lambda x, n: _native.active_labels(session, x, n if not isinstance(n, int) or n < 2**20 else 2**62)),
    (2, lambda k, x: _native.CotReceiver(session, k, x)), (1, lambda x: receiver().extend(x)),
    (3, lambda k, x, y: _native.CotSender(session, k, _native.Delta(), x, y)), (2, lambda x, n: sender().extend(x, n)),
    (1, lambda n: sender().correction_bytes(n)), (3, lambda *x: _native.OtKeys(session).chosen(*x)),
    (3, lambda *x: _native.OtKeys(session).pairs(_native.Delta(), *x)), (2, lambda *x: _native.RingOt(session, *x)),
    (2, lambda *x: _native.RingOt(session, rng.randint(1, 64), rng.randint(1, 9)).send(*x)),
    (3, lambda *x: _native.RingOt(session, rng.randint(1, 64), rng.randint(1, 9)).receive(*x)),
]
if hasattr(_native, "hash_rows"):
    targets += [(3, lambda *x: _native.hash_rows(session, *x)), (1, lambda x: sender().leaf_checks(x)),
                (3, lambda x, y, z: _native.expected_rows(session, x, y, _native.Delta(), z))]
errors = 0
for call in range(1500):
    count, target = rng.choice(targets)
    try:
        target(*(any_thing() for _ in range(count)))
    except (TypeError, ValueError, BufferError, MemoryError, IndexError):
        errors += 1
print(call + 1, errors)
"""


def child(code):
    text = HEAD + textwrap.dedent(code)
    return subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=60, check=False)
