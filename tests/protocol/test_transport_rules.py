"""Peers that break the rules of a channel: wrong frames, hang-ups, stalls, and thousands of mutations."""

from __future__ import annotations

import random
import socket
import struct
import time

import pytest
from channels import MODES, PROGRAM, SECRET, frame, pair
from parties import together

from deepseal.errors import InputError, ProtocolError, TransportError
from deepseal.secure_inference.transport import Channel, Hello, Kind, handshake, memory_pair

WRONG = {
    "kind": (frame(Kind.OUTPUT, SECRET), "expected a frame OT from the other party; found a frame OUTPUT"),
    "unknown kind": (frame(77), "found a frame number 77"),
    "too long": (frame(Kind.OT, SECRET + bytes(100)), "of at most 64 bytes from the other party; found 120 bytes"),
    "huge": (frame(Kind.OT, length=2**32 - 1), "found 4294967295 bytes"),
    "dropped": (frame(Kind.OT, number=1), "expected frame 0 from the other party; found frame 1"),
    "repeated": (frame(Kind.PING) * 2, "expected frame 1 from the other party; found frame 0"),
    "swapped": (frame(Kind.OT, number=1) + frame(Kind.OT), "lost, repeated or swapped"),
    "huge number": (frame(Kind.OT, number=2**64 - 1), "found frame 18446744073709551615"),
    "magic": (frame(Kind.OT, magic=b"\x00\x00"), "bytes of another protocol"),
    "reserved": (frame(Kind.OT, zero=1), "bytes of another protocol"),
    "HTTP": (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "found HTTP"),
    "one letter": (b"x", "bytes of another protocol"),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(99), "found TLS"),
    "TLS alert": (b"\x15\x03\x03\x00\x02\x02\x46", "found TLS"),
    "SSH": (b"SSH-2.0-OpenSSH_9.2\r\n", "found SSH"),
    "long ping": (frame(Kind.PING, b"x"), "found a frame PING"),
    "long refusal": (frame(Kind.REFUSED, bytes(600)), "found a frame REFUSED"),
    "refusal": (frame(Kind.REFUSED, b"no \x1b[31m\x00 \xff"), "found that it stopped: no ?[31m? ?"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_not_allowed_is_refused(name):
    data, text = WRONG[name]
    left, right = memory_pair(timeout=3)
    with left:
        right._sock.sendall(data)
        right._sock.shutdown(socket.SHUT_WR)
        with pytest.raises(ProtocolError) as caught:
            left.receive(Kind.OT, at_most=64)
        message = str(caught.value)
        assert text in message and message.isprintable() and len(message) < 900
        assert SECRET.decode() not in message
        answer = b"".join(iter(lambda: right._sock.recv(4096), b""))
        if name.endswith("refusal") and "long" not in name:
            assert answer == b""
        else:
            assert answer[:3] == frame(Kind.REFUSED)[:3] and answer[16:].isascii() and SECRET not in answer
        with pytest.raises(TransportError, match="closed"):
            left.receive(Kind.OT, at_most=64)
        with pytest.raises(TransportError, match="closed"):
            left.send(Kind.OT)
    right.close()


def test_lengths_are_checked_before_memory_is_taken():
    import tracemalloc

    left, right = memory_pair(timeout=3)
    with left, right:
        right._sock.sendall(frame(Kind.OT, length=16 * 2**20 + 1))
        right._sock.shutdown(socket.SHUT_WR)
        tracemalloc.start()
        with pytest.raises(ProtocolError, match="16777217 bytes"):
            left.receive(Kind.OT, at_most=2**40)
        assert tracemalloc.get_traced_memory()[1] < 2**20
        tracemalloc.stop()
        right._drop()


def test_own_frames_have_a_limit_too():
    left, right = memory_pair(timeout=3, limit=1000)
    with left, right, pytest.raises(InputError, match="at most 1000 bytes; found 1001"):
        left.send(Kind.OT, bytes(1001))


def test_a_frame_longer_than_the_buffer_is_refused():
    left, right = memory_pair(timeout=3)
    with left, right:
        left.send(Kind.TABLES, bytes(11))
        left.flush()
        buffer = bytearray(10)
        results = together(
            lambda: left.receive(Kind.OT, at_most=1), lambda: right.receive_into(Kind.TABLES, memoryview(buffer))
        )
        assert "of at most 10 bytes" in str(results[1])
        assert "stopped: expected a frame TABLES of at most 10 bytes, found 11 bytes" in str(results[0])


@pytest.mark.parametrize("mode", MODES)
def test_the_sender_of_much_learns_why_it_was_refused(mode, certified):
    left, right = pair(mode, certified)
    with left, right:

        def send():
            for _ in range(200):
                left.send(Kind.TABLES, bytes(2**20))

        results = together(send, lambda: right.receive(Kind.OUTPUT, at_most=10))
        assert isinstance(results[1], ProtocolError)
        assert isinstance(results[0], TransportError) and "a frame OUTPUT" in str(results[0]), results[0]


@pytest.mark.parametrize("mode", MODES)
def test_an_error_inside_with_is_told_to_the_other_side(mode, certified):
    left, right = pair(mode, certified)
    with right:
        with pytest.raises(ZeroDivisionError), left:
            1 / 0  # noqa: B018
        with pytest.raises(ProtocolError, match="stopped: the other party stopped early"):
            right.receive(Kind.OT, at_most=1)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["close", "half a header", "half a frame", "reset"])
def test_a_peer_that_hangs_up(mode, how, certified):
    left, right = pair(mode, certified)
    raw = right._sock if isinstance(right._sock, socket.socket) else right._sock.sock
    with left:
        if how == "half a header":
            right._sock.send(memoryview(frame(Kind.OT)[:7]))
        if how == "half a frame":
            right._sock.send(memoryview(frame(Kind.OT, SECRET)[:-3]))
        if how == "reset" and mode != "memory":
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        raw.close()
        with pytest.raises(TransportError) as caught:
            left.receive(Kind.OT, at_most=64)
        assert "to stay until the end" in str(caught.value) and SECRET.decode() not in str(caught.value)
        with pytest.raises(TransportError):
            left.send(Kind.OT, bytes(10_000))


@pytest.mark.parametrize("mode", MODES)
def test_time_outs_of_reading_and_writing(mode, certified):
    left, right = pair(mode, certified, timeout=0.4)
    with left, right:
        start = time.monotonic()
        with pytest.raises(TransportError, match="go on within 0.4 s; found nothing"):
            left.receive(Kind.OT, at_most=1)
        assert time.monotonic() - start < 3
        with pytest.raises(ProtocolError, match=r"stopped: nothing came for 0\.4 s"):
            right.receive(Kind.OT, at_most=1)
    left, right = pair(mode, certified, timeout=0.4)
    with left, right:
        start = time.monotonic()
        with pytest.raises(TransportError, match="found no bytes taken"):
            for _ in range(1000):
                left.send(Kind.TABLES, bytes(2**20))
        assert time.monotonic() - start < 10
        right._drop()


def test_slow_progress_is_no_stall():
    left, right = memory_pair(timeout=0.5)
    data = frame(Kind.OT, bytes(24))

    def trickle():
        for byte in data:
            right._sock.sendall(bytes([byte]))
            time.sleep(0.03)

    with left, right:
        assert together(trickle, lambda: left.receive(Kind.OT, at_most=24))[1] == bytes(24)


def mutate(rng, frames):
    frames = list(frames)
    choice = rng.randrange(6)
    if choice == 0:
        one, two = rng.randrange(len(frames)), rng.randrange(len(frames))
        frames[one], frames[two] = frames[two], frames[one]
    elif choice == 1:
        del frames[rng.randrange(len(frames))]
    elif choice == 2:
        frames.insert(rng.randrange(len(frames) + 1), rng.choice(frames))
    data = bytearray(b"".join(frames))
    if choice >= 3:
        for _ in range(rng.randint(1, 4)):
            place = rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(200, len(data)))
            if choice == 3:
                data[place] ^= 1 << rng.randrange(8)
            elif choice == 4:
                del data[place : place + rng.randint(1, 40)]
            else:
                data[place:place] = rng.randbytes(rng.randint(1, 40))
    if rng.random() < 0.3:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


def test_10000_mutated_streams():
    """Whatever arrives, a receiver ends with our errors or with frames of the right kind, and at once."""
    nonce, hello = bytes(32), Hello("evaluator", PROGRAM, "native", None, {"lanes": 4}).canonical()
    kinds = (Kind.HELLO, Kind.OT, Kind.PING, Kind.TABLES, Kind.INPUT, Kind.DONE)
    payloads = (nonce + hello, b"12345", b"", bytes(5000), SECRET, b"")
    frames = [frame(kind, payload, index) for index, (kind, payload) in enumerate(zip(kinds, payloads, strict=True))]
    rng, outcomes = random.Random(1), {"passed": 0, "refused": 0, "hung up": 0}
    start = time.monotonic()
    buffer = bytearray(5000)
    for _ in range(10_000):
        data = mutate(rng, frames)
        far, near = socket.socketpair()
        channel = Channel(near, timeout=5)
        with far:
            far.sendall(data)
            far.shutdown(socket.SHUT_WR)
            try:
                with channel:
                    assert len(channel.receive(Kind.HELLO, at_most=1000)) <= 1000
                    assert len(channel.receive(Kind.OT, at_most=5)) <= 5
                    assert channel.receive_into(Kind.TABLES, buffer) <= 5000
                    channel.receive(Kind.INPUT, at_most=64)
                    channel.receive(Kind.DONE, at_most=0)
                outcomes["passed"] += 1
            except TransportError as error:
                assert str(error).isprintable() and SECRET.decode() not in str(error)
                outcomes["refused" if isinstance(error, ProtocolError) else "hung up"] += 1
    assert all(count > 300 for count in outcomes.values()), outcomes
    assert time.monotonic() - start < 120


def test_1000_mutated_sessions_against_the_handshake():
    rng = random.Random(2)
    hello = Hello("evaluator", PROGRAM, "native", None, {"lanes": 4})
    frames = [frame(Kind.HELLO, bytes(32) + hello.canonical(), 0), frame(Kind.READY, bytes(32), 1)]
    for _ in range(1000):
        far, near = socket.socketpair()
        with far:
            far.sendall(mutate(rng, frames))
            far.shutdown(socket.SHUT_WR)
            with Channel(near, timeout=5) as channel, pytest.raises(TransportError):
                handshake(channel, Hello("garbler", PROGRAM, "native", None, {"lanes": 4}))
