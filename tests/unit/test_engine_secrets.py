"""What the bytes of the native engine show, and what never leaves it."""

from __future__ import annotations

import copy
import pickle

import numpy as np
import pytest
from garblings import AND, DELTA, LEVEL, OFFSET, ORDERS, SEED, drawn, evaluate, garble, parties, plan_of, wide_netlist
from scipy.stats import chisquare, norm

from deepseal import _native
from deepseal.secure_inference.netlist import Netlist, Op, simplify


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
