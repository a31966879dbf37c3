"""The native engine's objects in Python: lifetimes, buffers, and arguments that nobody should pass."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import numpy as np
import pytest
from garblings import AND, OFFSET, SEED, drawn, evaluate, garble, parties, plan_of, views

from deepseal import _native


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
