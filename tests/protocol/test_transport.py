"""Channels: frames in order over memory, TCP and TLS, and what they count."""

from __future__ import annotations

import time

import numpy as np
import pytest
from channels import MODES, pair
from parties import together

from deepseal.errors import InputError, TransportError
from deepseal.secure_inference.transport import Kind, memory_pair


@pytest.mark.parametrize("mode", MODES)
def test_frames_of_all_sizes_arrive(mode, certified):
    sizes = [0, 1, 15, 16, 17, 4095, 4096, 4097, 16367, 16368, 16369, 16384, 100_000, 2**20, 3 * 2**20 + 5]
    data = np.random.default_rng(0).integers(0, 256, max(sizes), dtype=np.uint8)
    left, right = pair(mode, certified)
    with left, right:

        def send():
            for size in sizes:
                left.send(Kind.TABLES, data[:size])
                left.send(Kind.INPUT, memoryview(data[:size]))
            left.flush()

        def receive():
            buffer = np.zeros(max(sizes), dtype=np.uint8)
            for size in sizes:
                assert right.receive_into(Kind.TABLES, buffer) == size
                assert np.array_equal(buffer[:size], data[:size])
                assert right.receive(Kind.INPUT, at_most=size) == data[:size].tobytes()
            return "done"

        assert together(send, receive) == [None, "done"]
        ours, theirs = left.counters, right.counters
        assert ours.bytes_sent == theirs.bytes_received == 2 * sum(16 + size for size in sizes)
        assert ours.frames_sent == theirs.frames_received == 2 * len(sizes)


@pytest.mark.parametrize("mode", MODES)
def test_both_directions_and_many_small_frames(mode, certified):
    left, right = pair(mode, certified)
    with left, right:

        def side(channel):
            for index in range(2000):
                channel.send(Kind.OT, index.to_bytes(4, "little"))
            for index in range(2000):
                assert channel.receive(Kind.OT, at_most=4) == index.to_bytes(4, "little")
            return "done"

        assert together(lambda: side(left), lambda: side(right)) == ["done", "done"]


def test_arrays_of_words_are_sent_as_their_bytes():
    left, right = memory_pair(timeout=2)
    with left, right:
        words = np.arange(6, dtype=np.uint32).reshape(2, 3)
        left.send(Kind.INPUT, words)
        left.send(Kind.INPUT, words[:0])
        left.flush()
        got = np.zeros((2, 3), dtype=np.uint32)
        assert right.receive_into(Kind.INPUT, got) == 24
        assert np.array_equal(got, words)
        assert right.receive(Kind.INPUT, at_most=0) == b""
        with pytest.raises(InputError, match="read-only"):
            left.receive_into(Kind.INPUT, b"1234")


def test_receive_sends_what_waits_first():
    left, right = memory_pair(timeout=5)
    with left, right:

        def echo():
            right.send(Kind.OT, right.receive(Kind.OT, at_most=9))
            right.flush()

        def ask():
            left.send(Kind.OT, b"hello")
            return left.receive(Kind.OT, at_most=9)

        assert together(echo, ask) == [None, b"hello"]


def test_a_large_frame_does_not_overtake_small_ones():
    left, right = memory_pair(timeout=5)
    with left, right:
        left.send(Kind.INPUT, b"small")
        left.send(Kind.TABLES, bytes(5000))
        assert right.receive(Kind.INPUT, at_most=5) == b"small"
        assert right.receive(Kind.TABLES, at_most=5000) == bytes(5000)


def test_pings_are_skipped_and_bounded():
    left, right = memory_pair(timeout=5)
    with left, right:
        left.ping()
        left.send(Kind.OT, b"x")
        left.ping()
        assert right.receive(Kind.OT, at_most=1) == b"x"
        assert right.counters.frames_received == 1

        def flood():
            for _ in range(20_000):
                left.send(Kind.PING)

        errors = together(flood, lambda: right.receive(Kind.OT, at_most=1))
        assert "PING in a row" in str(errors[1])
        assert errors[0] is None or isinstance(errors[0], TransportError)
        left.refuse("the end")


def test_phases_count_bytes_and_seconds():
    left, right = memory_pair(timeout=5)
    with left, right:
        with left.phase("ot"):
            left.send(Kind.OT, bytes(84))
            with left.phase("inner"):
                left.send(Kind.OT, bytes(34))
        with left.phase("ot"):
            left.send(Kind.OT, b"")
            left.flush()
            time.sleep(0.02)
        phases = left.counters.phases
        assert (phases["ot"]["bytes_sent"], phases["inner"]["bytes_sent"]) == (100 + 50 + 16, 50)
        assert phases["ot"]["bytes_received"] == 0
        assert 0.02 <= phases["ot"]["seconds"] < 5
        phases["ot"]["bytes_sent"] = 0  # a snapshot
        assert left.counters.phases["ot"]["bytes_sent"] == 166
