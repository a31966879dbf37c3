"""The slow reference of half gates: correctness, colours, tweaks, and what its bytes look like."""

from __future__ import annotations

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from drawn_netlists import netlists
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from deepseal.errors import InputError
from deepseal.secure_inference.netlist import Netlist, Op, multiply, record, simplify
from deepseal.secure_inference.reference.folding import folded
from deepseal.secure_inference.reference.half_gates import (
    ReferenceEvaluator,
    ReferenceGarbler,
    evaluate_and,
    evaluate_own,
    evaluate_peer,
    garble_and,
    garble_own,
    garble_peer,
    garbler_input_labels,
    hash_block,
    permutation_key,
    tmmo,
    tweak,
)

SEED = bytes(range(16))
ORDERS = pytest.mark.parametrize("order", ["given", "depth"])


def secrets(seed, *shape):
    """Reproducible labels, and an offset with colour bit 1."""
    rng = np.random.default_rng(seed)
    delta = bytearray(rng.bytes(16))
    delta[0] |= 1
    return rng.integers(0, 256, (*shape, 16), dtype=np.uint8), bytes(delta)


def active(zero, bits, delta):
    return zero ^ bits[..., None].astype(np.uint8) * np.frombuffer(delta, np.uint8)


def aes(key, block):
    return Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(block)


def xor(*blocks):
    return bytes(np.bitwise_xor.reduce([np.frombuffer(block, np.uint8) for block in blocks]))


class TestBlocks:
    def test_tweak_has_index_use_and_domain_from_low_to_high(self):
        assert tweak(0xAB, 0x01020304050607, 0x1122334455667788).hex() == "887766554433221107060504030201ab"
        for unsound in ((256, 0, 0), (0, 1 << 56, 0), (0, 0, 1 << 64), (-1, 0, 0)):
            with pytest.raises(InputError):
                tweak(*unsound)

    def test_hash_is_tmmo_under_the_key_of_domain_and_epoch(self):
        x, t = bytes(range(50, 66)), tweak(1, 0, 7)
        key = aes(SEED, tweak(0, 1, 3))
        assert key == permutation_key(SEED, 1, 3)
        once = aes(key, x)
        assert hash_block(SEED, 1, 3, x, t) == xor(aes(key, xor(once, t)), once)

    def test_known_answers(self):
        assert hash_block(SEED, 1, 0, bytes(16), tweak(1, 0, 0)).hex() == "de5ffcd35ef97a9c287e9e568e6f4dac"
        assert (
            garbler_input_labels(SEED, 2).tobytes().hex()
            == "b9ad2b2e346ac238505d365e9cb7fc5680cad9df57866cec616af4e749369aa9"
        )

    def test_input_labels_are_aes_in_the_prg_domain(self):
        labels = garbler_input_labels(SEED, 5)
        assert labels.shape == (5, 16)
        assert all(labels[i].tobytes() == aes(SEED, tweak(3, 0, i)) for i in range(5))
        assert garbler_input_labels(SEED, 0).shape == (0, 16)

    def test_wrong_lengths(self):
        for call in (
            lambda: garbler_input_labels(b"short", 1),
            lambda: hash_block(SEED, 1, 0, b"short", bytes(16)),
            lambda: hash_block(SEED, 1, 0, bytes(16), b"short"),
            lambda: ReferenceGarbler(b"short", b"\1" * 16),
            lambda: ReferenceGarbler(SEED, b"\1" * 15),
            lambda: ReferenceGarbler(SEED, b"\2" * 16),
            lambda: ReferenceGarbler(SEED, b"\1" * 16, order="other"),
            lambda: ReferenceEvaluator(bytes(17)),
        ):
            with pytest.raises(InputError):
                call()


class TestGate:
    @given(st.binary(min_size=48, max_size=48), st.integers(0, 2**20))
    @settings(max_examples=100, deadline=None)
    def test_all_four_rows(self, data, gate):
        a0, b0, delta = (int.from_bytes(data[i : i + 16], "little") for i in (0, 16, 32))
        delta |= 1
        h = tmmo(permutation_key(SEED, 1, 0))
        t, t2 = (int.from_bytes(tweak(1, 0, 2 * gate + k), "little") for k in (0, 1))
        c0, t_g, t_e = garble_and(h, a0, b0, delta, t, t2)
        for x in (0, 1):
            for y in (0, 1):
                result = evaluate_and(h, a0 ^ x * delta, b0 ^ y * delta, t_g, t_e, t, t2)
                assert result == c0 ^ (x & y) * delta
                assert (result ^ c0) & 1 == x & y  # colours decode

    @given(st.binary(min_size=48, max_size=48), st.integers(0, 2**20))
    @settings(max_examples=100, deadline=None)
    def test_half_gates(self, data, half):
        """One party knows y: the garbler, without labels for it; or the evaluator."""
        a0, b0, delta = (int.from_bytes(data[i : i + 16], "little") for i in (0, 16, 32))
        delta |= 1
        h, t = tmmo(permutation_key(SEED, 1, 0)), int.from_bytes(tweak(1, 0, half), "little")
        for x in (0, 1):
            for y in (0, 1):
                c0, table = garble_own(h, a0, y, delta, t)
                assert evaluate_peer(h, a0 ^ x * delta, table, t) == c0 ^ (x & y) * delta
                c0, table = garble_peer(h, a0, b0, delta, t)
                assert evaluate_own(h, a0 ^ x * delta, b0 ^ y * delta, y, table, t) == c0 ^ (x & y) * delta

    def test_two_gates_that_share_a_wire_leak_the_offset_only_without_tweaks(self):
        """AND(a, b) and AND(a, c): T_G xor T_G' is the offset when the colours of b and c differ, so half the time."""
        h = tmmo(permutation_key(SEED, 1, 0))
        leaks = {"same": 0, "none": 0, "distinct": 0}
        rng = np.random.default_rng(5)
        pairs = 1000
        for pair in range(pairs):
            a0, b0, c0, delta = (int.from_bytes(rng.bytes(16), "little") for _ in range(4))
            delta |= 1
            own = [int.from_bytes(tweak(1, 0, 4 * pair + k), "little") for k in range(4)]
            cases = {"same": own[:2] * 2, "none": [0] * 4, "distinct": own}
            for case, (t, t2, u, u2) in cases.items():
                first, second = garble_and(h, a0, b0, delta, t, t2), garble_and(h, a0, c0, delta, u, u2)
                leaks[case] += first[1] ^ second[1] == delta
        assert leaks["distinct"] == 0
        for case in ("same", "none"):
            assert abs(leaks[case] - pairs / 2) < 5 * (pairs / 4) ** 0.5


class TestNetlists:
    @ORDERS
    @given(netlists(), st.integers(0, 3), st.integers(0, 2**32 - 1))
    @settings(max_examples=60, deadline=None)
    def test_outputs_decode_to_the_clear_result(self, order, netlist, lanes, seed):
        zero, delta = secrets(seed, netlist.input_bits, lanes)
        bits = np.random.default_rng(seed).integers(0, 2, zero.shape[:2]).astype(bool)
        garbler, evaluator = ReferenceGarbler(SEED, delta, order), ReferenceEvaluator(SEED, order)
        for _ in range(2):  # the second call goes on where the first one stopped
            zero_out, tables = garbler.garble(netlist, zero)
            out = evaluator.evaluate(netlist, active(zero, bits, delta), tables)
            assert len(tables) == 32 * simplify(netlist).and_gates * lanes
            expected = netlist.evaluate_bits(bits)
            assert np.array_equal(out[..., 0] & 1 ^ zero_out[..., 0] & 1, expected)
            assert np.array_equal(out, active(zero_out, expected, delta))
        assert garbler.gates == evaluator.gates == 2 * simplify(netlist).and_gates * lanes

    @given(netlists())
    @settings(max_examples=150, deadline=None)
    def test_two_ways_to_fold_agree(self, netlist):
        plan, simple = folded(netlist), simplify(netlist)
        gates = [gate for gate in zip(simple.ops, simple.a, simple.b, strict=True) if gate[0] != Op.CONST]
        assert [(gate.op, gate.a, gate.b) for gate in plan.gates] == gates
        for output, wire in zip(plan.outputs, simple.output_wires.tolist(), strict=True):
            gate = wire - simple.input_bits
            if gate >= 0 and simple.ops[gate] == Op.CONST:
                assert output.public == simple.a[gate]
            else:
                assert output.wire == wire

    @given(netlists())
    @settings(max_examples=80, deadline=None)
    def test_order_by_depth_is_sorted_and_stable(self, netlist):
        simple = simplify(netlist)
        ands = np.flatnonzero(simple.ops == Op.AND)
        depths = simple.and_depths[ands + simple.input_bits]
        ranks = [gate.rank for gate in folded(netlist, "depth").gates if gate.op == Op.AND]
        assert ranks == np.argsort(np.argsort(depths, kind="stable"), kind="stable").tolist()
        given_ranks = [gate.rank for gate in folded(netlist, "given").gates if gate.op == Op.AND]
        assert given_ranks == list(range(len(ands)))

    @ORDERS
    def test_tables_stand_gate_by_gate_then_lane_by_lane(self, order):
        """Garbling a netlist by hand, with the numbers that the format gives each gate."""
        netlist = Netlist((3,), (2,), [Op.AND, Op.AND, Op.AND], [0, 3, 1], [1, 2, 2], [4, 5])
        lanes, before = 3, 4095  # a key change on the way
        zero, delta = secrets(1, 3, lanes)
        garbler = ReferenceGarbler(SEED, delta, order)
        garbler.gates = before
        _, tables = garbler.garble(netlist, zero)
        rank = {0: 0, 1: 1, 2: 2} if order == "given" else {0: 0, 2: 1, 1: 2}
        for lane in range(lanes):
            wires = [int.from_bytes(zero[i, lane].tobytes(), "little") for i in range(3)]
            for i, (a, b) in enumerate(((0, 1), (3, 2), (1, 2))):
                j = before + rank[i] * lanes + lane
                h = tmmo(permutation_key(SEED, 1, j >> 12))
                t, t2 = (int.from_bytes(tweak(1, 0, 2 * j + k), "little") for k in (0, 1))
                c0, *halves = garble_and(h, wires[a], wires[b], int.from_bytes(delta, "little"), t, t2)
                wires.append(c0)
                at = 32 * (rank[i] * lanes + lane)
                assert tables[at : at + 32] == b"".join(half.to_bytes(16, "little") for half in halves)

    def test_constants_cost_nothing_and_decode(self):
        ops = [Op.CONST, Op.CONST, Op.AND, Op.AND, Op.XOR, Op.COPY]
        netlist = Netlist((1,), (4,), ops, [0, 1, 0, 0, 0, 2], [0, 0, 1, 2, 0, 0], [3, 4, 5, 6])
        zero, delta = secrets(2, 1, 2)
        zero_out, tables = ReferenceGarbler(SEED, delta).garble(netlist, zero)
        bits = np.array([[False, True]])
        out = ReferenceEvaluator(SEED).evaluate(netlist, active(zero, bits, delta), tables)
        assert tables == b""
        assert (out[..., 0] & 1 ^ zero_out[..., 0] & 1).tolist() == [[0, 0], [0, 1], [0, 0], [1, 1]]
        assert not out[3].any()
        assert zero_out[3].tobytes() == delta * 2

    def test_a_session_never_repeats_a_table(self):
        netlist = record(multiply, 4, 4, signed=True)
        zero, delta = secrets(3, 8, 1)
        garbler = ReferenceGarbler(SEED, delta)
        first, second = (garbler.garble(netlist, zero)[1] for _ in range(2))
        blocks = [data[i : i + 16] for data in (first, second) for i in range(0, len(data), 16)]
        assert len(set(blocks)) == len(blocks)

    def test_colours_and_tables_are_uniform(self):
        """Chi-square at level 1e-6 over the bytes of 6,000 tables and the colours of the outputs, fixed seeds."""
        netlist = record(multiply, 8, 8, signed=True)
        zero, delta = secrets(4, 16, 80)
        zero_out, tables = ReferenceGarbler(SEED, delta).garble(netlist, zero)
        assert len(tables) > 32 * 6000
        for offset in range(32):
            counts = np.bincount(np.frombuffer(tables, np.uint8)[offset::32], minlength=256)
            assert chisquare(counts).pvalue > 1e-6 / 33
        assert chisquare(np.bincount((zero_out[..., 0] & 1).ravel(), minlength=2)).pvalue > 1e-6 / 33

    def test_wrong_shapes_and_lengths(self):
        netlist = record(multiply, 2, 2, signed=True)
        zero, delta = secrets(6, 4, 1)
        garbler, evaluator = ReferenceGarbler(SEED, delta), ReferenceEvaluator(SEED)
        _, tables = garbler.garble(netlist, zero)
        for labels in (zero[:3], zero[:, 0], zero[..., :15], zero.astype(np.int64)):
            with pytest.raises(InputError):
                garbler.garble(netlist, labels)
        with pytest.raises(InputError, match="bytes of tables"):
            evaluator.evaluate(netlist, zero, tables[:-1])

    def test_no_secret_in_repr(self):
        garbler = ReferenceGarbler(SEED, b"\x55" * 16)
        assert "5555" not in repr(garbler)
        assert str(0x55) * 3 not in repr(garbler)
