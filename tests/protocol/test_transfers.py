"""Base oblivious transfer and its extension over a channel: both sides agree, and a side that deviates is refused."""

from __future__ import annotations

import socket

import numpy as np
import pytest
from meddling import Dealt, Frame, Relay, meddled
from nacl.bindings import crypto_core_ed25519_add, crypto_core_ed25519_is_valid_point
from parties import together

from deepseal import _native
from deepseal.errors import InputError, ProtocolError
from deepseal.secure_inference.protocol.base_ot import ChouOrlandi
from deepseal.secure_inference.protocol.extension import TransferReceiver, TransferSender, TransferSettings
from deepseal.secure_inference.transport import Channel, Kind, TransportError, memory_pair
from deepseal.secure_inference.transport.frames import HEADER, MAGIC

SESSION = bytes(range(32))
SEED = bytes(range(16))
P = 2**255 - 19
D = -121665 * pow(121666, -1, P) % P


def root(x):
    """A square root modulo P, or None."""
    y = pow(x, (P + 3) // 8, P)
    y = y if y * y % P == x % P else y * pow(2, (P - 1) // 4, P) % P
    return y if y * y % P == x % P else None


def encoded(x, y):
    return (y | (x & 1) << 255).to_bytes(32, "little")


def on_curve(y):
    """x for this y, or None: -x^2 + y^2 = 1 + d x^2 y^2."""
    return root((y * y - 1) * pow(D * y * y + 1, -1, P))


def added(one, two):
    (x, y), (u, v) = one, two
    product = D * x * u * y * v % P
    return (x * v + u * y) * pow(1 + product, -1, P) % P, (y * v + x * u) * pow(1 - product, -1, P) % P


def times(number, point):
    result = (0, 1)
    while number:
        result = added(result, point) if number & 1 else result
        point, number = added(point, point), number >> 1
    return result


def points_of_small_order():
    """All eight, from a point of order 8: any point times the prime order."""
    order = 2**252 + 27742317777372353535851937790883648493
    for y in range(2, 100):
        if (x := on_curve(y)) is not None:
            point = times(order, (x, y))
            if times(4, point) != (0, 1):
                return [times(k, point) for k in range(8)]
    raise AssertionError


BASE = (on_curve(4 * pow(5, -1, P) % P) or 0, 4 * pow(5, -1, P) % P)
SMALL = points_of_small_order()
OFF = next(y for y in range(2, 100) if on_curve(y) is None)
INVALID = {
    **{f"order {8 // np.gcd(8, k)}, number {k}": encoded(*SMALL[k]) for k in range(8)},
    "identity with a sign": ((1 << 255) | 1).to_bytes(32, "little"),
    "not canonical, of order 1": (P + 1).to_bytes(32, "little"),
    "not canonical, of order 4": P.to_bytes(32, "little"),
    "not canonical": (P + next(y for y in range(2, 19) if on_curve(y) is not None)).to_bytes(32, "little"),
    "the largest number": b"\xff" * 32,
    "off the curve": OFF.to_bytes(32, "little"),
    "off the curve, signed": (OFF | 1 << 255).to_bytes(32, "little"),
    "outside the prime-order group": encoded(*added(BASE, SMALL[1])),
    "with a part of order 2": encoded(*added(times(77, BASE), SMALL[4])),
}


def own_choice(bits):
    mask = bits[:, None].astype(bool)
    return lambda zeros, ones: np.where(mask, ones, zeros)


def refused(data, *, as_sender):
    """What we raise when the other party sends this in a base OT, and what it is told. Our channel must be closed."""
    left, right = memory_pair(timeout=0.2)
    with left, right:
        left.send(Kind.BASE_OT, data)
        left.flush()
        with pytest.raises(ProtocolError) as caught:
            if as_sender:
                ChouOrlandi().offer(right, SESSION)
            else:
                ChouOrlandi().choose(right, SESSION, own_choice(np.zeros(128, np.uint8)))
        assert repr(right) == "<Channel plain, closed>"
        with pytest.raises(ProtocolError) as told:
            for _ in range(2):  # the first may be its point
                left.receive(Kind.BASE_OT, at_most=4096)
    return caught.value, told.value


def closing(channel, part):
    def run():
        try:
            return part(channel)
        finally:
            channel.close()

    return run


class TestBaseOt:
    def test_receiver_gets_the_chosen_keys(self):
        seen = set()
        for seed in range(3):
            bits = np.random.default_rng(seed).integers(0, 2, 128, dtype=np.uint8)
            left, right = memory_pair(timeout=10)
            pairs, keys = together(
                closing(left, lambda c: ChouOrlandi().offer(c, SESSION)),
                closing(right, lambda c, bits=bits: ChouOrlandi().choose(c, SESSION, own_choice(bits))),
            )
            assert pairs.shape == (128, 2, 16)
            assert np.array_equal(keys, pairs[np.arange(128), bits])
            assert (keys != pairs[np.arange(128), 1 - bits]).any(axis=1).all()
            seen |= {key.tobytes() for key in pairs.reshape(-1, 16)}
        assert len(seen) == 3 * 256

    def test_keys_belong_to_the_session(self):
        bits = np.zeros(128, np.uint8)
        left, right = memory_pair(timeout=10)
        pairs, keys = together(
            closing(left, lambda c: ChouOrlandi().offer(c, SESSION)),
            closing(right, lambda c: ChouOrlandi().choose(c, SESSION[::-1], own_choice(bits))),
        )
        assert not {key.tobytes() for key in keys} & {key.tobytes() for key in pairs.reshape(-1, 16)}

    def test_our_points_are_what_they_are_called(self):
        """The test's own arithmetic agrees with the library on points that are good."""
        three = encoded(*times(3, BASE))
        assert crypto_core_ed25519_add(encoded(*BASE), encoded(*times(2, BASE))) == three
        assert crypto_core_ed25519_is_valid_point(three)
        assert len({encoded(*point) for point in SMALL}) == 8
        for y in (point[1] for point in (BASE, *SMALL)):
            assert on_curve(y) is not None

    def test_a_sender_with_a_bad_point(self):
        for name, point in INVALID.items():
            error, told = refused(point, as_sender=False)
            assert "expected 1 points of ed25519's prime-order group; found something else" in str(error), name
            assert "that it stopped: expected 1 points" in str(told), name

    @pytest.mark.parametrize("place", [0, 64, 127])
    def test_a_receiver_with_one_bad_point(self, place):
        good = [encoded(*times(3, BASE))] * 127
        for name, point in INVALID.items():
            error, told = refused(b"".join([*good[:place], point, *good[place:]]), as_sender=True)
            assert "expected 128 points of ed25519's prime-order group; found something else" in str(error), name
            assert "that it stopped: expected 128 points" in str(told), name

    def test_wrong_lengths(self):
        good = encoded(*times(3, BASE))
        for count, change in ((128, -32), (128, -1), (128, 1), (128, 32), (1, -32), (1, -1), (1, 1), (1, 32)):
            error, _ = refused((good * (count + 1))[: 32 * count + change], as_sender=count == 128)
            assert ("points of ed25519" in str(error)) == (change < 0), (count, change)
            assert ("at most" in str(error)) == (change > 0), (count, change)


def extension(part, settings, relay=None):
    """Run ``part(side)`` on both sides of an extension; what each gave, and the offset."""
    delta = _native.Delta()
    known = _native.Garbler(delta, _native.Session(SEED)).offset(np.zeros(16, np.uint8), np.ones(1, np.uint8))[0]

    def sender(channel):
        return part(TransferSender(channel, SESSION, _native.Session(SEED), delta, settings))

    def receiver(channel):
        return part(TransferReceiver(channel, SESSION, _native.Session(SEED), settings))

    results = meddled(relay or Relay(), sender, receiver)
    return (*results, known)


BITS = np.random.default_rng(4).integers(0, 2, 300, dtype=np.uint8)


class TestExtension:
    @pytest.mark.parametrize("checks", [False, True])
    @pytest.mark.parametrize("k", [1, 2, 3, 8])
    def test_everything_agrees(self, k, checks):
        rng = np.random.default_rng(k)
        messages = rng.integers(0, 256, (300, 2, 16), dtype=np.uint8)
        values = rng.integers(0, 2**64, (300, 3), dtype=np.uint64)

        def part(side):
            if isinstance(side, TransferSender):
                got = side.correlated(300), side.random(300), side.correlated(0)
                side.send(messages)
                return (*got, side.ring(values, 21))
            return side.correlated(BITS), side.random(BITS), side.receive(BITS), side.ring(BITS, 3, 21)

        sent, got, delta = extension(part, TransferSettings(k=k, checks=checks, base=Dealt()))
        assert np.array_equal(got[0], sent[0] ^ BITS[:, None] * delta)
        assert np.array_equal(got[1], sent[1][np.arange(300), BITS])
        assert sent[2].shape == (0, 16)
        assert np.array_equal(got[2], messages[np.arange(300), BITS])
        modulus = np.uint64((1 << 21) - 1)
        assert np.array_equal(got[3], sent[3] + BITS[:, None] * values & modulus)

    @pytest.mark.parametrize("k", [2, 5])
    def test_corrections_for_several_choices_are_caught(self, k):
        """A receiver that flips a choice in every other tree: survives with one chance in 2^60 or so."""
        trees = -(-128 // k)

        def change(sender, _index, frame):
            if sender == "evaluator" and frame.kind == Kind.OT and len(frame.payload) == 16 * trees * 4:
                data = np.frombuffer(frame.payload, np.uint8).reshape(trees, 4, 16).copy()
                data[::2, 0, 0] ^= 1
                return [Frame(frame.kind, data.tobytes(), 0)]
            return [frame]

        def part(side):
            return side.correlated(300) if isinstance(side, TransferSender) else side.correlated(BITS)

        settings = TransferSettings(k=k, checks=True, base=Dealt())
        sent, got, _ = extension(part, settings, Relay(change))
        assert isinstance(sent, ProtocolError)
        assert "corrections for one choice" in str(sent)
        assert isinstance(got, np.ndarray | TransportError)

    @pytest.mark.parametrize("k", [2])
    def test_trees_that_do_not_fit_are_caught(self, k):
        def change(sender, index, frame):
            if sender == "evaluator" and frame.kind == Kind.BASE_OT and index == 1:  # the opening of the trees
                return [Frame(frame.kind, bytes(byte ^ 1 for byte in frame.payload), 0)]
            return [frame]

        def part(side):
            return side.correlated(300) if isinstance(side, TransferSender) else side.correlated(BITS)

        sent, got, _ = extension(part, TransferSettings(k=k, checks=True, base=Dealt()), Relay(change))
        assert isinstance(sent, ProtocolError) and "trees that fit together" in str(sent)
        assert isinstance(got, TransportError)

    @pytest.mark.parametrize("length", [0, 47, 49])
    def test_answers_of_wrong_length(self, length):
        def change(sender, index, frame):
            if sender == "evaluator" and frame.kind == Kind.OT and len(frame.payload) == 48:
                return [Frame(frame.kind, bytes(length), 0)]
            return [frame]

        def part(side):
            return side.correlated(300) if isinstance(side, TransferSender) else side.correlated(BITS)

        sent, _, _ = extension(part, TransferSettings(checks=True, base=Dealt()), Relay(change))
        assert isinstance(sent, ProtocolError)

    def test_settings(self):
        for k in (0, 9, -1):
            with pytest.raises(InputError, match="k from 1 to 8"):
                TransferSettings(k=k)


def test_a_frame_that_is_never_finished(certified):
    """A receiver that promises all corrections and sends half of them."""
    left, right = socket.socketpair()
    with right, Channel(left, timeout=0.5) as channel:
        right.sendall(HEADER.pack(MAGIC, Kind.BASE_OT, 0, 4096, 0) + encoded(*BASE) * 64)
        with pytest.raises(TransportError, match="to go on within 0.5 s"):
            ChouOrlandi().offer(channel, SESSION)
        assert repr(channel) == "<Channel plain, closed>"
