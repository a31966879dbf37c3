"""Linear layers by correlated OT: the shares add up to W x modulo 2^l, and nothing else is said."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseal import _native


def layer(session, shape, bits, k, signed, use=1):
    starts, targets, _, outputs = shape
    return _native.LinearOt(session, _native.Connections(starts, targets, outputs), bits, k, signed, use)


def drawn_shape(rng, sources, outputs, weights, connections):
    """Starts, targets, a weight for each connection, and the number of outputs."""
    sources_of = np.sort(rng.integers(0, sources, connections))
    starts = np.concatenate([[0], np.cumsum(np.bincount(sources_of, minlength=sources))]).astype(np.uint64)
    targets = rng.integers(0, outputs, connections).astype(np.uint32)
    return starts, targets, rng.choice(weights, connections), outputs


def run(rng, shape, x, bits, k, signed, kernels="", ranges=None, sample=1):
    """Both parties in turn, on one of three samples; their shares and the messages."""
    session, delta = _native.Session(bytes(range(16)), kernels), _native.Delta.from_bytes(b"\x35" * 16)
    garbler = _native.Garbler(delta, session)
    values = np.zeros((k, 3, len(x)), np.uint8)
    values[:, sample] = (x.astype(np.int64) >> np.arange(k)[:, None]) & 1
    zero = rng.integers(0, 256, (k, 3, len(x), 16), dtype=np.uint8)
    active = garbler.offset(zero.reshape(-1, 16), values.reshape(-1)).reshape(zero.shape)
    sender, receiver = (layer(session, shape, bits, k, signed) for _ in range(2))
    own, other, messages = np.zeros(shape[3], np.uint64), np.zeros(shape[3], np.uint64), []
    for first, last in ranges or [(0, len(x))]:
        message = np.zeros(sender.message_bytes(first, last), np.uint8)
        assert sender.send(delta, shape[2], first, last, zero, sample, own, message) == len(message)
        receiver.receive(first, last, active, sample, message, other)
        messages.append(message)
    return own, other, messages


def product(shape, x):
    starts, targets, weights, outputs = shape
    result = np.zeros(outputs, object)
    for i, value in enumerate(x.tolist()):
        for place in range(int(starts[i]), int(starts[i + 1])):
            result[targets[place]] += value * int(weights[place])
    return result


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**32 - 1),
    bits=st.integers(2, 64),
    signed=st.booleans(),
    connections=st.integers(0, 300),
    data=st.data(),
)
def test_shares_add_up(seed, bits, signed, connections, data):
    rng = np.random.default_rng(seed)
    k = data.draw(st.integers(1, min(bits, 16)))
    sources = data.draw(st.integers(1, 12))
    shape = drawn_shape(rng, sources, 7, rng.integers(-(2**15), 2**15, 11), connections)
    low = -(1 << (k - 1)) if signed else 0
    x = rng.integers(low, low + (1 << k), sources)
    cut = data.draw(st.integers(0, sources))
    kernels = data.draw(st.sampled_from(_native.kernels()))
    own, other, _ = run(rng, shape, x, bits, k, signed, kernels, [(0, cut), (cut, sources)])
    wanted = product(shape, x)
    for left, right, value in zip(own.tolist(), other.tolist(), wanted, strict=True):
        assert (left + right - value) % (1 << bits) == 0


@pytest.mark.parametrize("outputs", [1000, 40_000])
def test_rows_longer_than_a_key_lasts(outputs):
    """A key serves 8,192 blocks of pads: rows that go on under the next one, and rows of several."""
    rng = np.random.default_rng(5)
    starts = np.arange(0, 6 * outputs + 1, outputs, dtype=np.uint64)
    targets = np.tile(np.arange(outputs, dtype=np.uint32), 6)
    shape = (starts, targets, rng.integers(-99, 99, 6 * outputs), outputs)
    x = rng.integers(0, 256, 6)
    own, other, _ = run(rng, shape, x, 24, 8, False)
    assert not ((own + other - product(shape, x).astype(np.int64).view(np.uint64)) & np.uint64(2**24 - 1)).any()


def test_bytes_of_a_multiplication():
    """Only l - b bits of each element: 20.5 bytes for 8 bits in a ring of 24."""
    shape = (np.array([0, 800], np.uint64), np.arange(800, dtype=np.uint32), None, 800)
    assert layer(_native.Session(bytes(16)), shape, 24, 8, False).message_bytes(0, 1) == 800 * 20.5


def test_same_bytes_from_all_kernels():
    found = set()
    for name in _native.kernels():
        rng = np.random.default_rng(1)
        shape = drawn_shape(rng, 5, 4, rng.integers(-99, 99, 6), 90)
        found.add(b"".join(m.tobytes() for m in run(rng, shape, rng.integers(0, 256, 5), 24, 8, False, name)[2]))
    assert len(found) == 1


def test_message_and_shares_say_nothing():
    """Byte counts of the message and of the receiver's share: chi-square below its 1 - 1e-6 quantile (255 degrees)."""
    rng = np.random.default_rng(2)
    starts = np.arange(0, 64_001, 1000, dtype=np.uint64)
    shape = (starts, np.tile(np.arange(1000, dtype=np.uint32), 64), np.ones(64_000, np.int64), 1000)
    own, other, messages = run(rng, shape, np.zeros(64, np.int64), 32, 8, False)
    for part in (messages[0], (other & np.uint64(2**32 - 1)).astype(np.uint32).view(np.uint8)):
        counts = np.bincount(part, minlength=256)
        assert ((counts - part.size / 256) ** 2 / (part.size / 256)).sum() < 383
    assert not ((own + other) & np.uint64(2**32 - 1)).any()


SMALL = (np.array([0, 4], np.uint64), np.arange(4, dtype=np.uint32), np.full(4, 5), 4)


def test_another_use_gives_another_message():
    session, delta = _native.Session(bytes(16)), _native.Delta()
    labels = np.frombuffer(os.urandom(8 * 16), np.uint8).reshape(8, 1, 1, 16)
    seen = set()
    for use in (0, 1):
        ot = layer(session, SMALL, 24, 8, False, use)
        for _ in range(2):  # a counter that goes on, too
            message = np.zeros(ot.message_bytes(0, 1), np.uint8)
            ot.send(delta, SMALL[2], 0, 1, labels, 0, np.zeros(4, np.uint64), message)
            seen.add(message.tobytes())
    assert len(seen) == 4


@pytest.mark.parametrize("change", [{"starts": [0, 3]}, {"starts": [1, 4]}, {"starts": []}, {"targets": [0, 1, 2, 9]}])
def test_connections_that_do_not_fit(change):
    whole = {"starts": [0, 4], "targets": [0, 1, 2, 3], **change}
    with pytest.raises(ValueError, match="expected"):
        _native.Connections(np.array(whole["starts"], np.uint64), np.array(whole["targets"], np.uint32), 4)


@pytest.mark.parametrize("change", [{"bits": 1}, {"bits": 65}, {"k": 0}, {"k": 25}, {"use": 2**56}])
def test_rings_that_do_not_fit(change):
    whole = {"bits": 24, "k": 8, "use": 0, **change}
    with pytest.raises(ValueError, match="expected"):
        layer(_native.Session(bytes(16)), SMALL, whole["bits"], whole["k"], False, whole["use"])


def test_arrays_that_do_not_fit():
    ot = layer(_native.Session(bytes(16)), SMALL, 24, 8, False)
    good = {
        "weights": SMALL[2],
        "first": 0,
        "last": 1,
        "labels": np.zeros((8, 1, 1, 16), np.uint8),
        "sample": 0,
        "share": np.zeros(4, np.uint64),
        "message": np.zeros(100, np.uint8),
    }
    delta = _native.Delta()
    assert ot.send(delta, **good) == ot.message_bytes(0, 1)
    for name, bad in {
        "weights": np.full(5, 5),
        "last": 2,
        "labels": np.zeros((7, 1, 1, 16), np.uint8),
        "sample": 1,
        "share": np.zeros(3, np.uint64),
        "message": np.zeros(10, np.uint8),
    }.items():
        with pytest.raises(ValueError, match="expected"):
            ot.send(delta, **{**good, name: bad})
    with pytest.raises(ValueError, match="message of"):
        ot.receive(0, 1, good["labels"], 0, np.zeros(3, np.uint8), good["share"])
    with pytest.raises(ValueError, match="expected labels"):
        ot.receive(0, 1, good["labels"], 1, np.zeros(ot.message_bytes(0, 1), np.uint8), good["share"])
