"""Channels: frames in order over memory, TCP and TLS, and every way in which the other side can misbehave."""

from __future__ import annotations

import datetime
import os
import random
import select
import signal
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from parties import open_descriptors, party, together

from deepseal.errors import DeepSealError, InputError, ProtocolError, TransportError
from deepseal.secure_inference.transport import (
    Channel,
    Hello,
    Kind,
    Session,
    Tls,
    connect,
    handshake,
    listen,
    memory_pair,
)
from deepseal.secure_inference.transport.sockets import parse_address

SECRET = b"the labels of a wire"
PROGRAM = "ab" * 32


def frame(kind, payload=b"", number=0, *, length=None, magic=b"\xd5\x5e", zero=0):
    size = len(payload) if length is None else length
    return struct.pack("<2sBBIQ", magic, kind, zero, size, number) + payload


def pair(mode, certified, timeout=5.0, **options):
    """Two connected channels."""
    if mode == "memory":
        return memory_pair(timeout=timeout, **options)
    tls = (certified.garbler, certified.evaluator) if mode == "tls" else (None, None)
    with listen("0", tls=tls[0], timeout=timeout, **options) as listener:
        ends = together(
            lambda: connect(listener.address, tls=tls[1], timeout=timeout, **options), lambda: listener.accept()
        )
    for end in ends:
        if isinstance(end, Exception):
            raise end
    return ends


MODES = ("memory", "plain", "tls")


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


# Peers that break the rules

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


# Whole sessions


def session(channel, role, *, rounds=3):
    """A small session: handshake, frames both ways, DONE."""
    handshake(channel, Hello(role, PROGRAM, "native", None, {"lanes": 4}))
    for index in range(rounds):
        if role == "garbler":
            channel.send(Kind.TABLES, bytes([index]) * 9000)
            channel.send(Kind.INPUT, SECRET)
        else:
            buffer = bytearray(9000)
            assert channel.receive_into(Kind.TABLES, buffer) == 9000 and buffer[8999] == index
            assert channel.receive(Kind.INPUT, at_most=64) == SECRET
    if role == "evaluator":
        channel.send(Kind.OUTPUT, b"bits")
        channel.receive(Kind.DONE, at_most=0)
    else:
        assert channel.receive(Kind.OUTPUT, at_most=4) == b"bits"
        channel.send(Kind.DONE)
    return "done"


def run_session(mode, certified):
    tls = (certified.garbler, certified.evaluator) if mode == "tls" else (None, None)

    def garbler(listener):
        with listener.accept() as channel:
            return session(channel, "garbler")

    def evaluator(address):
        with connect(address, tls=tls[1], timeout=10) as channel:
            return session(channel, "evaluator")

    with listen("0", tls=tls[0], timeout=10) as listener:
        return together(lambda: garbler(listener), lambda: evaluator(listener.address))


def test_200_sessions_in_a_row_leave_nothing(certified):
    for mode in ("plain", "tls"):
        assert run_session(mode, certified) == ["done", "done"]
    before, threads = open_descriptors(), threading.active_count()
    for index in range(200):
        assert run_session("tls" if index % 2 else "plain", certified) == ["done", "done"]
    assert (open_descriptors(), threading.active_count()) == (before, threads)


def test_sessions_run_in_parallel(certified):
    results = together(*(lambda: run_session("tls", certified) for _ in range(8)))
    assert results == [["done", "done"]] * 8


class Relay:
    """A wire between the parties that, after so many bytes in one direction, is cut, reset or says no more."""

    def __init__(self, target: str, after: int, how: str, direction: int) -> None:
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.target, self.after, self.how, self.direction = target, after, how, direction
        self.carried = [0, 0]
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        host, port = self.target.split(":")
        with self.listener, self.listener.accept()[0] as one, socket.create_connection((host, int(port))) as two:
            ends, alive = (one, two), {one, two}
            try:
                while alive and not self.stop.is_set():
                    for source in select.select(list(alive), [], [], 0.02)[0]:
                        way = ends.index(source)
                        room = self.after - self.carried[way] if way == self.direction else 2**20
                        data = source.recv(max(1, min(65536, room)))
                        if not data:
                            alive.discard(source)
                            ends[1 - way].shutdown(socket.SHUT_WR)
                        elif room <= 0:
                            if self.how == "stall":
                                alive.discard(source)
                                continue
                            if self.how == "reset":
                                for end in ends:
                                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                            return
                        else:
                            self.carried[way] += len(data)
                            ends[1 - way].sendall(data)
            except OSError:
                pass
            if self.how == "stall":
                self.stop.wait(10)


def through(relay_after, how, direction, mode, certified, timeout):
    tls = (certified.garbler, certified.evaluator) if mode == "tls" else (None, None)

    def garbler(listener):
        with listener.accept() as channel:
            return session(channel, "garbler")

    def evaluator(relay):
        with connect(relay.address, tls=tls[1], timeout=timeout) as channel:
            return session(channel, "evaluator")

    with listen("0", tls=tls[0], timeout=timeout) as listener:
        relay = Relay(listener.address, relay_after, how, direction)
        start = time.monotonic()
        try:
            results = together(lambda: garbler(listener), lambda: evaluator(relay))
        finally:
            relay.stop.set()
            relay.thread.join(12)
        return results, relay.carried, time.monotonic() - start


@pytest.mark.parametrize("mode", ["plain", "tls"])
@pytest.mark.parametrize("how", ["cut", "reset", "stall"])
def test_a_wire_that_fails_at_each_point_of_a_session(mode, how, certified):
    timeout = 0.4 if how == "stall" else 5.0
    clean, sizes, _ = through(2**30, "cut", 0, mode, certified, 10)
    assert clean == ["done", "done"]
    points = 4 if how == "stall" else 10
    for direction in (0, 1):
        rng = random.Random(direction)
        small = [0, 1, 15, 16, 17, 40] if how != "stall" else [0, 17]
        for after in small + [rng.randrange(sizes[direction]) for _ in range(points)]:
            results, _, seconds = through(after, how, direction, mode, certified, timeout)
            failed = [result for result in results if result != "done"]
            assert failed, (after, direction)
            for error in failed:
                assert isinstance(error, TransportError), (after, direction, error)
                assert str(error).isprintable() and SECRET.decode() not in str(error)
            assert seconds < 5 * timeout + 5


# Addresses and listeners


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("9000", ("127.0.0.1", 9000)),
        (":9000", ("127.0.0.1", 9000)),
        ("[::1]:9000", ("::1", 9000)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        ("example.org:443", ("example.org", 443)),
    ],
)
def test_addresses(text, parsed):
    assert parse_address(text) == parsed


@pytest.mark.parametrize(
    "text", ["", "x", "::1:9000", "[::1]", "1.2.3.4:", "a:b", "a:70000", "-1", "http://a:1", "a b:1"]
)
def test_bad_addresses(text):
    with pytest.raises(InputError, match="HOST:PORT"):
        parse_address(text)


def test_loopback_is_the_default_and_plain_stays_there(certified):
    with listen("0", tls=None, timeout=1) as listener:
        assert listener.address.startswith("127.0.0.1:") and not listener.address.endswith(":0")
    for opener in (listen, connect):
        with pytest.raises(InputError, match=r"TLS for an address beyond this machine.*--tls-cert"):
            opener("0.0.0.0:9000", tls=None, timeout=1)
    with listen("0.0.0.0:0", tls=None, timeout=1, allow_plain=True) as listener:
        assert listener.address.startswith("0.0.0.0:")
    with listen("0.0.0.0:0", tls=certified.garbler, timeout=1):
        pass


def test_ipv6():
    try:
        listener = listen("[::1]:0", tls=None, timeout=3)
    except TransportError:
        pytest.skip("no IPv6 here")
    with listener:
        assert listener.address.startswith("[::1]:")
        with connect(listener.address, tls=None, timeout=3) as left, listener.accept() as right:
            left.send(Kind.OT, b"6")
            left.flush()
            assert right.receive(Kind.OT, at_most=1) == b"6"


def test_a_port_in_use_and_a_port_where_nobody_is():
    with listen("0", tls=None, timeout=1) as listener:
        with pytest.raises(TransportError, match="choose another port"):
            listen(listener.address, tls=None, timeout=1)
        with pytest.raises(TransportError, match="expected a party to connect to .* within 1 s; found none"):
            listener.accept()
        address = listener.address
    start = time.monotonic()
    with pytest.raises(TransportError, match="connection refused; start the other side"):
        connect(address, tls=None, timeout=1, retry_for=0.3)
    assert 0.3 <= time.monotonic() - start < 3
    with pytest.raises(InputError, match="name or address"):
        connect("no-such-host.invalid:9", tls=None, timeout=1, allow_plain=True)
    with pytest.raises(InputError, match="port 0"):
        connect("0", tls=None, timeout=1)


def test_connect_waits_for_a_late_listener():
    with listen("0", tls=None, timeout=1) as listener:
        address = listener.address

    def late():
        time.sleep(0.4)
        with listen(address, tls=None, timeout=5) as again, again.accept() as channel:
            return channel.receive(Kind.OT, at_most=1)

    def early():
        with connect(address, tls=None, timeout=5) as channel:
            channel.send(Kind.OT, b"x")

    assert together(late, early) == [b"x", None]


# TLS


def strange_pair(server, client, timeout=3.0):
    """What both sides get when the server listens with these settings and the client comes with those."""

    def serve(listener):
        with listener.accept() as channel:
            return session(channel, "garbler")

    def come(address):
        with connect(address, tls=client, timeout=timeout) as channel:
            return session(channel, "evaluator")

    with listen("0", tls=server, timeout=timeout) as listener:
        return together(lambda: serve(listener), lambda: come(listener.address))


def test_wrong_ca(certified, tmp_path):
    other = party(tmp_path / "other")
    for server, client in ((certified.garbler, other.evaluator), (other.garbler, certified.evaluator)):
        for error in strange_pair(server, client):
            assert isinstance(error, TransportError), error
            assert "use certificates of one CA" in str(error), error
    mixed = Tls(other.files.certificates["evaluator"], other.files.keys["evaluator"], certified.files.ca)
    server, client = strange_pair(certified.garbler, mixed)
    assert "does not pass: unable to get local issuer" in str(server)
    assert "that it does not trust the CA of our certificate" in str(client)


def test_expired_certificate(certified, tmp_path):
    past = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=9)
    old = party(tmp_path / "old", now=past, days=1)
    server, client = strange_pair(old.garbler, old.evaluator)
    assert "certificate has expired" in str(client) and "make new certificates" in str(client)
    assert "calls our certificate expired" in str(server)


def test_peer_name_is_compared_when_given(certified):
    def named(tls, name):
        return Tls(tls.certificate, tls.key, tls.ca, peer_name=name)

    good = strange_pair(named(certified.garbler, "evaluator"), named(certified.evaluator, "Garbler"))
    assert good == ["done", "done"]
    server, client = strange_pair(named(certified.garbler, "somebody"), certified.evaluator)
    assert "expected a certificate for somebody from the other party; found one for evaluator" in str(server)
    assert "another name in your certificate" in str(client)
    server, client = strange_pair(certified.garbler, named(certified.evaluator, "somebody"))
    assert "found one for garbler" in str(client) and isinstance(server, TransportError)


def test_plain_and_tls_do_not_meet(certified):
    server, client = strange_pair(certified.garbler, None)
    assert "bytes that are not TLS" in str(server) and "found TLS" in str(client)
    server, client = strange_pair(None, certified.evaluator)
    assert "found TLS" in str(server) and "bytes that are not TLS" in str(client)


def raw_client(address, context=None):
    host, port = address.split(":")
    sock = socket.create_connection((host, int(port)), timeout=3)
    if context is None:
        return sock
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        return context.wrap_socket(sock)
    except BaseException:
        sock.close()
        raise


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "found plain HTTP"),
        (frame(Kind.OT, SECRET), "found bytes that are not TLS"),
        (bytes(100), "found"),
        (b"\x16\x03\x01\x00\x05\x01", "found"),
        (b"", "found a connection that it closed"),
    ],
)
def test_strangers_at_a_tls_port(data, text, certified):
    with listen("0", tls=certified.garbler, timeout=3) as listener:
        with raw_client(listener.address) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            with pytest.raises(TransportError) as caught:
                listener.accept()
        assert text in str(caught.value) and str(caught.value).isprintable()
        outer, inner = together(
            lambda: connect(listener.address, tls=certified.evaluator, timeout=3), lambda: listener.accept()
        )
        outer.close()
        inner.close()


def test_random_bytes_at_a_tls_port(certified):
    rng = random.Random(5)
    with listen("0", tls=certified.garbler, timeout=3) as listener:
        for index in range(200):
            data = rng.randbytes(rng.randrange(400))
            with raw_client(listener.address) as sock:
                sock.sendall(b"\x16\x03\x01" + data if index % 2 else data)
                sock.shutdown(socket.SHUT_WR)
                with pytest.raises(TransportError) as caught:
                    listener.accept()
            assert str(caught.value).isprintable()


def test_silent_client_does_not_hold_a_tls_port_for_ever(certified):
    with listen("0", tls=certified.garbler, timeout=0.4) as listener, raw_client(listener.address):
        start = time.monotonic()
        with pytest.raises(TransportError, match=r"TLS greeting within 0\.4 s; found none"):
            listener.accept()
        assert time.monotonic() - start < 3


def test_old_tls_and_no_certificate_are_refused(certified):
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    def knock(context):
        with raw_client(listener.address, context) as sock:
            return sock.recv(10)

    with listen("0", tls=certified.garbler, timeout=3) as listener:
        server, client = together(lambda: listener.accept(), lambda: knock(old))
        assert isinstance(server, TransportError) and "found an older TLS" in str(server)
        assert isinstance(client, ssl.SSLError)
        server, client = together(lambda: listener.accept(), lambda: knock(bare))
        assert isinstance(server, TransportError) and "found no certificate" in str(server)
        assert "CERTIFICATE_REQUIRED" in str(client)


def test_bad_files_are_named(certified, tmp_path):
    files = certified.files
    cert, key, ca = files.certificates["garbler"], files.keys["garbler"], files.ca
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    locked = tmp_path / "locked.key"
    from cryptography.hazmat.primitives import serialization as s

    loaded = s.load_pem_private_key(key.read_bytes(), None)
    hidden = s.BestAvailableEncryption(b"x")
    locked.write_bytes(loaded.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, hidden))
    cases = [
        (Tls(tmp_path / "none.pem", key, ca), "a certificate file .PEM. at .*; found no such file"),
        (Tls(cert, tmp_path, ca), "private key"),
        (Tls(cert, key, junk), "expected CA certificates"),
        (Tls(junk, key, ca), "its private key in"),
        (Tls(cert, junk, ca), "its private key in"),
        (Tls(cert, files.keys["evaluator"], ca), "a key of another certificate"),
        (Tls(cert, locked, ca), "found an encrypted one"),
    ]
    for tls, text in cases:
        with pytest.raises(InputError, match=text):
            listen("0", tls=tls, timeout=1)
        with pytest.raises(InputError, match=text):
            connect("9", tls=tls, timeout=1, retry_for=0)


# Mutations


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


# Processes


def child(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


PARTY = """
import sys
from deepseal.secure_inference.transport import *
address, certificate, key, ca = sys.argv[1:]
with connect(address, tls=Tls(certificate, key, ca), timeout=20) as channel:
    session = handshake(channel, Hello("evaluator", "ab" * 32, "native"))
    channel.send(Kind.OUTPUT, session.id)
    total = sum(len(channel.receive(Kind.TABLES, at_most=2**20)) for _ in range(64))
    print(session.id.hex(), total, "torch" in sys.modules)
"""


def test_two_processes_over_tls(certified):
    files = certified.files
    with listen("0", tls=certified.garbler, timeout=30) as listener:
        arguments = (listener.address, files.certificates["evaluator"], files.keys["evaluator"], files.ca)
        with child(PARTY, *arguments) as process, listener.accept() as channel:
            made = handshake(channel, Hello("garbler", PROGRAM, "native"))
            assert isinstance(made, Session)
            assert channel.receive(Kind.OUTPUT, at_most=32) == made.id
            for _ in range(64):
                channel.send(Kind.TABLES, bytes(2**20))
            out, err = process.communicate(timeout=60)
    assert (out.split(), err) == ([made.id.hex(), str(2**26), "False"], "")


KILLED = """
import sys
from deepseal.secure_inference.transport import *
with connect(sys.argv[1], tls=None, timeout=20) as channel:
    channel.send(Kind.OT)
    channel.flush()
    while True:
        channel.send(Kind.TABLES, bytes(2**20))
"""


def test_a_process_that_is_killed(certified):
    with (
        listen("0", tls=None, timeout=30) as listener,
        child(KILLED, listener.address) as process,
        listener.accept() as channel,
    ):
        channel.receive(Kind.OT, at_most=0)
        process.kill()
        with pytest.raises(TransportError, match="to stay until the end"):
            while True:
                channel.receive(Kind.TABLES, at_most=2**20)


WAITING = """
import sys
from deepseal.secure_inference.transport import *
try:
    with connect(sys.argv[1], tls=None, timeout=60) as channel:
        channel.send(Kind.OT)
        channel.receive(Kind.OT, at_most=1)
except KeyboardInterrupt:
    print("interrupted")
"""


def test_interrupt_ends_a_wait(certified):
    with (
        listen("0", tls=None, timeout=30) as listener,
        child(WAITING, listener.address) as process,
        listener.accept() as channel,
    ):
        channel.receive(Kind.OT, at_most=0)
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        with pytest.raises(TransportError, match="stopped early|closed"):  # closed: inside the sending itself
            channel.receive(Kind.OT, at_most=1)
        assert process.communicate(timeout=20)[0] == "interrupted\n"


def test_representations_show_nothing(certified):
    left, right = memory_pair(timeout=1)
    with left, right:
        left.send(Kind.OT, SECRET)
        left.flush()
        assert repr(left) == "<Channel plain, open>"
    assert repr(left) == "<Channel plain, closed>"
    assert issubclass(ProtocolError, TransportError) and issubclass(TransportError, DeepSealError)
    assert Path(certified.garbler.key).read_text() not in repr(certified.garbler)
