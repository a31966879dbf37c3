"""The extension of oblivious transfer in the engine: correlated, random and over a ring; what the other key shows."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from deepseal import _native
from deepseal.secure_inference.reference.half_gates import hash_block, tweak

SEED = bytes(range(100, 116))
DELTA = bytes.fromhex("3d9b1c52e47fa6088c1bd3e5709f2a64")
OFFSET = np.frombuffer(DELTA, np.uint8)
OT = 2  # the domain
EPOCH = 1 << 13
LEVEL = 1e-6
EACH_K = pytest.mark.parametrize("k", range(1, 9))


class Pair:
    """Both sides of an extension, from base OTs that the test deals."""

    def __init__(self, k=2, *, delta=DELTA, kernels="", seed=0):
        self.session = _native.Session(SEED, kernels)
        self.delta = _native.Delta.from_bytes(delta)
        pairs = np.random.default_rng(seed).integers(0, 256, (128, 2, 16), dtype=np.uint8)
        self.receiver = _native.CotReceiver(self.session, k, pairs)
        chosen = self.delta.choose(np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1]))
        self.sender = _native.CotSender(self.session, k, self.delta, chosen, self.receiver.opening)

    def extend(self, bits):
        t, corrections = self.receiver.extend(bits)
        assert corrections.nbytes == self.sender.correction_bytes(len(bits))
        return t, self.sender.extend(corrections, len(bits)), corrections


def choices(n, seed=1):
    return np.random.default_rng(seed).integers(0, 2, n, dtype=np.uint8)


def bias(blocks):
    """How far the number of ones in each of the 128 bits is from half."""
    ones = np.zeros(128)
    table = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little")
    for byte in range(16):
        ones[8 * byte : 8 * byte + 8] = np.bincount(blocks[:, byte], minlength=256) @ table
    return np.abs(ones - len(blocks) / 2)


class TestCorrelated:
    @EACH_K
    def test_t_is_q_and_the_choice_times_delta(self, k):
        pair = Pair(k)
        for n in (1, 100, 127, 128, 129, 0, 4096, 4097, 5000):
            bits = choices(n, n)
            t, q, corrections = pair.extend(bits)
            assert t.shape == q.shape == (n, 16)
            assert np.array_equal(t, q ^ bits[:, None] * OFFSET)
            assert corrections.nbytes == -(-n // 128) * -(-128 // k) * 16

    @EACH_K
    def test_kernels_give_the_same_bytes(self, k):
        bits = choices(700)
        results = {
            b"".join(part.tobytes() for part in Pair(k, kernels=name).extend(bits)) for name in _native.kernels()
        }
        assert len(results) == 1

    @EACH_K
    def test_any_offset(self, k):
        """Also those whose trees are punctured at the first, the last and at different leaves."""
        for delta in (bytes(16), b"\xff" * 16, bytes([1] + [0x80] * 15), bytes(range(7, 23))):
            bits = choices(300)
            t, q, _ = Pair(k, delta=delta).extend(bits)
            odd = np.frombuffer(bytes([delta[0] | 1]) + delta[1:], np.uint8)
            assert np.array_equal(t ^ q, bits[:, None] * odd)

    def test_each_index_is_used_once(self):
        pair, seen, used = Pair(), set(), 0
        bits = choices(300)
        for n in (300, 1, 128, 0, 300, 300):
            t, q, corrections = pair.extend(bits[:n])
            used += -(-n // 128) * 128  # whole batches
            assert pair.receiver.used == pair.sender.used == used
            blocks = [row.tobytes() for row in (*t, *corrections.reshape(-1, 16))]
            assert not seen & set(blocks)
            seen |= set(blocks)
            assert len(set(blocks)) == len(blocks)
        for name in ("used", "position"):
            with pytest.raises(AttributeError):
                setattr(pair.receiver, name, 0)

    def test_corrections_are_uniform_whatever_the_bits(self):
        """For all choices 0, and for all 1: 200,000 transfers, each bit of the corrections and labels, level 1e-6."""
        bound = norm.isf(LEVEL / (2 * 4 * 128)) / 2
        for bits in (np.zeros(200_000, np.uint8), np.ones(200_000, np.uint8)):
            t, _, corrections = Pair(seed=int(bits[0])).extend(bits)
            for blocks in (t, corrections.reshape(-1, 16)):
                assert bias(blocks).max() < bound * np.sqrt(len(blocks))

    def test_wrong_sizes(self):
        pair, session = Pair(), _native.Session(SEED)
        pairs, keys = np.zeros((128, 2, 16), np.uint8), np.zeros((128, 16), np.uint8)
        opening = pair.receiver.opening
        corrections = pair.receiver.extend(choices(129))[1]
        for call in (
            lambda: _native.CotReceiver(session, 0, pairs),
            lambda: _native.CotReceiver(session, 9, pairs),
            lambda: _native.CotReceiver(session, 2**31, pairs),
            lambda: _native.CotReceiver(session, 2, pairs[:127]),
            lambda: _native.CotReceiver(session, 2, pairs[:, :, :15].copy()),
            lambda: _native.CotSender(session, 0, pair.delta, keys, opening),
            lambda: _native.CotSender(session, 2, pair.delta, keys[:127], opening),
            lambda: _native.CotSender(session, 2, pair.delta, keys, opening[:-1]),
            lambda: _native.CotSender(session, 2, pair.delta, keys, np.concatenate([opening, opening[:1]])),
            lambda: _native.CotSender(session, 3, pair.delta, keys, opening),
            lambda: pair.sender.extend(corrections.ravel()[:-16], 129),
            lambda: pair.sender.extend(corrections.ravel()[:-1], 129),
            lambda: pair.sender.extend(corrections, 128),
            lambda: pair.sender.extend(corrections, 257),
            lambda: pair.sender.extend(b"", 2**64 - 1),
            lambda: pair.sender.extend(b"", 2**63),
        ):
            with pytest.raises(ValueError, match="expected .*, found |negative|too large|maximum"):
                call()
        assert pair.sender.used == 0
        assert len(pair.sender.extend(corrections, 129)) == 129


class TestRandom:
    def test_keys_are_hashes_with_the_tweak_of_use_and_index(self):
        pair = Pair()
        t, q, _ = pair.extend(choices(40))
        for first, use in ((0, 0), (EPOCH - 20, 5), (3 * EPOCH - 1, 2**56 - 1)):
            keys = _native.OtKeys(pair.session)
            chosen, both = keys.chosen(t, first, use), keys.pairs(pair.delta, q, first, use)
            for i in range(40):
                index = first + i
                wanted = [
                    hash_block(SEED, OT, 1 + index // EPOCH, bytes(block), tweak(OT, use, index))
                    for block in (t[i], q[i], q[i] ^ OFFSET)
                ]
                assert [chosen[i].tobytes(), both[i, 0].tobytes(), both[i, 1].tobytes()] == wanted

    @EACH_K
    def test_receiver_has_exactly_the_chosen_key(self, k):
        pair, bits = Pair(k), choices(20_000, k)
        first = pair.receiver.used
        t, q, _ = pair.extend(bits)
        chosen = _native.OtKeys(pair.session).chosen(t, first, 1)
        both = _native.OtKeys(pair.session).pairs(pair.delta, q, first, 1)
        rows = np.arange(len(bits))
        assert np.array_equal(both[rows, bits], chosen)
        assert (both[rows, 1 - bits] != chosen).any(axis=1).all()
        assert len({key.tobytes() for key in both.reshape(-1, 16)}) == 2 * len(bits)

    def test_other_key_looks_random(self):
        """A million transfers: each bit of the other key, alone and against all that the receiver has and against
        delta, is as often 0 as 1 (8 x 128 tests, level 1e-6 in all). The control, the unhashed label, is not.
        """
        pair, n = Pair(), 1_000_000
        bits = choices(n, 3)
        first = pair.receiver.used
        t, q, _ = pair.extend(bits)
        chosen = _native.OtKeys(pair.session).chosen(t, first, 1)
        both = _native.OtKeys(pair.session).pairs(pair.delta, q, first, 1)
        other = both[np.arange(n), 1 - bits]
        bound = norm.isf(LEVEL / (2 * 8 * 128)) * np.sqrt(n) / 2
        secret = bits[:, None] * np.uint8(255)
        for known in (np.uint8(0), chosen, OFFSET, chosen ^ OFFSET, t, t ^ OFFSET, secret, chosen ^ t ^ secret):
            assert bias(other ^ known).max() < bound
        assert bias((q ^ (1 - bits)[:, None] * OFFSET) ^ t ^ OFFSET).max() == n / 2

    def test_use_and_index_set_keys_apart(self):
        pair = Pair()
        t, q, _ = pair.extend(choices(10))
        keys = [_native.OtKeys(pair.session).chosen(t, first, use) for first in (0, 1, 2**40) for use in (0, 1, 2)]
        keys += [_native.OtKeys(pair.session).pairs(pair.delta, q, 0, 3)]
        blocks = [block.tobytes() for part in keys for block in part.reshape(-1, 16)]
        assert len(set(blocks)) == len(blocks) == 110

    def test_wrong_arguments(self):
        pair = Pair()
        keys, t = _native.OtKeys(pair.session), np.zeros((4, 16), np.uint8)
        for call in (
            lambda: keys.chosen(t, 0, 2**56),
            lambda: keys.pairs(pair.delta, t, 0, 2**64 - 1),
            lambda: keys.chosen(t.ravel()[:17], 0, 0),
            lambda: keys.chosen(t[:, ::2], 0, 0),
        ):
            with pytest.raises(ValueError):
                call()
        for call in (lambda: keys.chosen(t, -1, 0), lambda: keys.chosen(t, 0, -1), lambda: keys.chosen(t, 2**64, 0)):
            with pytest.raises(TypeError):
                call()


class TestRing:
    @given(st.data(), st.integers(1, 64), st.integers(1, 40), st.integers(1, 12))
    @settings(max_examples=120, deadline=None)
    def test_against_integers(self, data, bits, width, n):
        seed = data.draw(st.integers(0, 2**32 - 1))
        rng = np.random.default_rng(seed)
        both = rng.integers(0, 256, (n, 2, 16), dtype=np.uint8)
        choice = rng.integers(0, 2, n, dtype=np.uint8)
        extreme = st.sampled_from([0, 1, 2**64 - 1, 2**63, (1 << bits) - 1, 1 << (bits - 1)])
        values = rng.integers(0, 2**64, (n, width), dtype=np.uint64)
        values[0, 0] = data.draw(extreme)
        values[-1, -1] = data.draw(extreme)
        ring = _native.RingOt(_native.Session(SEED), bits, width)
        sent, message = ring.send(both, values)
        got = ring.receive(np.ascontiguousarray(both[np.arange(n), choice]), choice, message)
        assert ring.row_bytes == -(-width * bits // 8)
        assert message.shape == (n, ring.row_bytes)
        modulus = 1 << bits
        for i in range(n):
            for j in range(width):
                s, r, v = int(sent[i, j]), int(got[i, j]), int(values[i, j])
                assert r == (s + int(choice[i]) * v) % modulus
                assert 0 <= s < modulus
        spare = 8 * ring.row_bytes - width * bits
        assert not spare or not (message[:, -1] >> (8 - spare)).any()  # what is not used carries nothing

    def test_shares_and_message_show_nothing_of_values(self):
        """One value, 100,000 times: each bit of shares and message, level 1e-6."""
        n = 100_000
        both = np.random.default_rng(5).integers(0, 256, (n, 2, 16), dtype=np.uint8)
        ring = _native.RingOt(_native.Session(SEED), 64, 2)
        shares, message = ring.send(both, np.full((n, 2), 12345, np.uint64))
        bound = norm.isf(LEVEL / (2 * 3 * 128)) * np.sqrt(n) / 2
        for blocks in (shares.view(np.uint8), message, shares.view(np.uint8) ^ message):
            assert bias(blocks).max() < bound

    def test_wrong_sizes(self):
        session = _native.Session(SEED)
        for bits, width in ((0, 1), (65, 1), (8, 0)):
            with pytest.raises(ValueError):
                _native.RingOt(session, bits, width)
        ring = _native.RingOt(session, 9, 3)
        keys, values = np.zeros((5, 2, 16), np.uint8), np.zeros((5, 3), np.uint64)
        for call in (
            lambda: ring.send(keys[:4], values),
            lambda: ring.send(keys, values[:, :2].copy()),
            lambda: ring.send(keys, values.ravel()),
            lambda: ring.receive(keys[:, 0].copy(), np.zeros(4, np.uint8), np.zeros((5, 4), np.uint8)),
            lambda: ring.receive(keys[:, 0].copy(), np.zeros(5, np.uint8), np.zeros((5, 3), np.uint8)),
            lambda: ring.receive(keys[:, 0].copy(), np.zeros(5, np.uint8), np.zeros((6, 4), np.uint8)),
        ):
            with pytest.raises(ValueError, match="expected .*, found "):
                call()
