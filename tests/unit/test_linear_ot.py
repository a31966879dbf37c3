"""Linear layers by correlated OT: the shares add up to W x modulo 2^l, and nothing else is said."""

import os

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseal import _native


def layer(session, shape, bits, k, signed, use=1):
    starts, targets, weights, outputs, count = shape
    return _native.LinearOt(session, starts, targets, weights, outputs, count, bits, k, signed, use)


def drawn_shape(rng, sources, outputs, count, connections):
    sources_of = np.sort(rng.integers(0, sources, connections))
    starts = np.concatenate([[0], np.cumsum(np.bincount(sources_of, minlength=sources))]).astype(np.uint64)
    targets, weights = (rng.integers(0, size, connections).astype(np.uint32) for size in (outputs, count))
    return starts, targets, weights, outputs, count


def run(rng, shape, weights, x, bits, k, signed, kernels="", ranges=None):
    """Both parties in turn; their shares and the messages."""
    session, delta = _native.Session(bytes(range(16)), kernels), _native.Delta.from_bytes(b"\x35" * 16)
    garbler = _native.Garbler(delta, session)
    values = (x[:, None].astype(np.int64) >> np.arange(k)) & 1
    labels = rng.integers(0, 256, (len(x), k, 16), dtype=np.uint8)  # zero labels
    active = garbler.offset(labels.reshape(-1, 16), values.astype(np.uint8).reshape(-1)).reshape(labels.shape)
    permute, choices = (np.ascontiguousarray(part[..., 0] & 1) for part in (labels, active))
    coloured = garbler.offset(labels.reshape(-1, 16), permute.reshape(-1)).reshape(labels.shape)
    sender, receiver = (layer(session, shape, bits, k, signed) for _ in range(2))
    own, other, messages = np.zeros(shape[3], np.uint64), np.zeros(shape[3], np.uint64), []
    for first, last in ranges or [(0, len(x))]:
        message = np.zeros(sender.message_bytes(first, last), np.uint8)
        part = slice(first, last)
        assert sender.send(delta, weights, first, last, coloured[part], permute[part], own, message) == len(message)
        receiver.receive(first, last, active[part], choices[part], message, other)
        messages.append(message)
    return own, other, messages


def product(shape, weights, x):
    starts, targets, indices, outputs, _ = shape
    result = np.zeros(outputs, object)
    for i, value in enumerate(x.tolist()):
        for place in range(int(starts[i]), int(starts[i + 1])):
            result[targets[place]] += value * int(weights[indices[place]])
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
    shape = drawn_shape(rng, sources, 7, 11, connections)
    weights = rng.integers(-(2**15), 2**15, 11)
    low = -(1 << (k - 1)) if signed else 0
    x = rng.integers(low, low + (1 << k), sources)
    cut = data.draw(st.integers(0, sources))
    kernels = data.draw(st.sampled_from(_native.kernels()))
    own, other, _ = run(rng, shape, weights, x, bits, k, signed, kernels, [(0, cut), (cut, sources)])
    wanted = product(shape, weights, x)
    for left, right, value in zip(own.tolist(), other.tolist(), wanted, strict=True):
        assert (left + right - value) % (1 << bits) == 0


def test_bytes_of_a_multiplication():
    """Only l - b bits of each element: 20.5 bytes for 8 bits in a ring of 24."""
    shape = (np.array([0, 800], np.uint64), np.arange(800, dtype=np.uint32), np.zeros(800, np.uint32), 800, 1)
    assert layer(_native.Session(bytes(16)), shape, 24, 8, False).message_bytes(0, 1) == 800 * 20.5


def test_same_bytes_from_all_kernels():
    found = set()
    for name in _native.kernels():
        rng = np.random.default_rng(1)
        shape = drawn_shape(rng, 5, 4, 6, 90)
        weights, x = rng.integers(-99, 99, 6), rng.integers(0, 256, 5)
        found.add(b"".join(m.tobytes() for m in run(rng, shape, weights, x, 24, 8, False, name)[2]))
    assert len(found) == 1


def test_message_and_shares_say_nothing():
    """Byte counts of the message and of the receiver's share: chi-square below its 1 - 1e-6 quantile (255 degrees)."""
    rng = np.random.default_rng(2)
    shape = (
        np.arange(0, 64_001, 1000, dtype=np.uint64),
        np.tile(np.arange(1000, dtype=np.uint32), 64),
        np.zeros(64_000, np.uint32),
        1000,
        1,
    )
    own, other, messages = run(rng, shape, np.array([1]), np.zeros(64, np.int64), 32, 8, False)
    for part in (messages[0], (other & np.uint64(2**32 - 1)).astype(np.uint32).view(np.uint8)):
        counts = np.bincount(part, minlength=256)
        assert ((counts - part.size / 256) ** 2 / (part.size / 256)).sum() < 383
    assert not ((own + other) & np.uint64(2**32 - 1)).any()


def test_another_use_gives_another_message():
    session, delta = _native.Session(bytes(16)), _native.Delta()
    shape = (np.array([0, 4], np.uint64), np.arange(4, dtype=np.uint32), np.zeros(4, np.uint32), 4, 1)
    labels, permute = np.frombuffer(os.urandom(8 * 16), np.uint8).reshape(8, 16), np.zeros(8, np.uint8)
    seen = set()
    for use in (0, 1):
        ot = layer(session, shape, 24, 8, False, use)
        for _ in range(2):  # a counter that goes on, too
            message = np.zeros(ot.message_bytes(0, 1), np.uint8)
            ot.send(delta, np.array([5]), 0, 1, labels, permute, np.zeros(4, np.uint64), message)
            seen.add(message.tobytes())
    assert len(seen) == 4


@pytest.mark.parametrize(
    "change",
    [
        {"starts": [0, 3]},
        {"starts": [1, 4]},
        {"starts": []},
        {"targets": [0, 1, 2, 9]},
        {"weights": [0, 0, 0, 1]},
        {"bits": 1},
        {"bits": 65},
        {"k": 0},
        {"k": 25},
        {"use": 2**56},
    ],
)
def test_shapes_that_do_not_fit(change):
    whole = {"starts": [0, 4], "targets": [0, 1, 2, 3], "weights": [0] * 4, "bits": 24, "k": 8, "use": 0, **change}
    with pytest.raises(ValueError, match="expected"):
        _native.LinearOt(
            _native.Session(bytes(16)),
            np.array(whole["starts"], np.uint64),
            np.array(whole["targets"], np.uint32),
            np.array(whole["weights"], np.uint32),
            4,
            1,
            whole["bits"],
            whole["k"],
            False,
            whole["use"],
        )


def test_arrays_that_do_not_fit():
    session, delta = _native.Session(bytes(16)), _native.Delta()
    shape = (np.array([0, 4], np.uint64), np.arange(4, dtype=np.uint32), np.zeros(4, np.uint32), 4, 1)
    ot = layer(session, shape, 24, 8, False)
    good = {
        "weights": np.array([5]),
        "first": 0,
        "last": 1,
        "zero": np.zeros((8, 16), np.uint8),
        "permute": np.zeros(8, np.uint8),
        "share": np.zeros(4, np.uint64),
        "message": np.zeros(100, np.uint8),
    }
    assert ot.send(delta, **good) == ot.message_bytes(0, 1)
    for name, bad in {
        "weights": np.array([5, 6]),
        "last": 2,
        "zero": np.zeros((7, 16), np.uint8),
        "permute": np.zeros(7, np.uint8),
        "share": np.zeros(3, np.uint64),
        "message": np.zeros(10, np.uint8),
    }.items():
        with pytest.raises(ValueError, match="expected"):
            ot.send(delta, **{**good, name: bad})
    with pytest.raises(ValueError, match="message of"):
        ot.receive(0, 1, good["zero"], good["permute"], np.zeros(3, np.uint8), good["share"])
