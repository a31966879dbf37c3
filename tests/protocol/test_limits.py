"""Limits of what a caller can hold, and for how long, whatever it does."""

import contextlib
import os
import resource
import socket
import threading
import time

import numpy as np
import pytest
from channels import frame, pair
from parties import party, together
from test_mixed import drawn
from test_server import reals, serving, wait_for

from deepseal.errors import ProtocolError, TransportError
from deepseal.secure_inference.compile.simulate import simulate
from deepseal.secure_inference.roles.client import Client
from deepseal.secure_inference.roles.reception import Served, Tally
from deepseal.secure_inference.transport import Kind, listen, memory_pair, sockets

STREAMS = ("plain", "tls")
LONGEST = 6.0  # seconds of misbehaviour; a wait that lasts until its end was not bounded


@contextlib.contextmanager
def meanwhile(act, *, every):
    """Do ``act`` again and again beside the block, for at most ``LONGEST`` seconds, or until it fails."""
    stop = threading.Event()

    def run():
        end = time.monotonic() + LONGEST
        with contextlib.suppress(OSError, TransportError):
            while time.monotonic() < end and not stop.wait(every):
                act()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join(LONGEST + 5)
        assert not thread.is_alive()


@contextlib.contextmanager
def lasting(least, most):
    start = time.monotonic()
    yield
    assert least <= time.monotonic() - start < most


def raw(channel):
    return channel._sock if isinstance(channel._sock, socket.socket) else channel._sock.sock


def wire_bytes(channel, data):
    """What these bytes are on the channel's wire."""
    if isinstance(channel._sock, socket.socket):
        return data
    channel._sock._tls.write(data)
    return channel._sock._outgoing.read()


def knock(address, stack):
    """A connection that says nothing."""
    host, port = address.rsplit(":", 1)
    return stack.enter_context(socket.create_connection((host, int(port))))


def asks_rightly(address, program, weights, tls=None):
    x = drawn(program, 1)
    with Client.connect(program, address, tls=tls, timeout=10, retry_for=0) as client:
        return np.array_equal(client.ask(reals(program, x)).values, simulate(program, weights, x).reshape(-1))


# One channel


@pytest.mark.parametrize("mode", STREAMS)
def test_no_reading_beyond_a_deadline(mode, certified):
    """Bytes one by one do not stretch it."""
    left, right = pair(mode, certified, timeout=0.5)
    with left:
        data = iter(wire_bytes(right, frame(Kind.TABLES, bytes(1000))))
        with (
            meanwhile(lambda: raw(right).sendall(bytes([next(data)])), every=0.1),
            lasting(0.4, 4),
            pytest.raises(TransportError, match=r"go on within 0\.5 s"),
            left.within(0.5),
        ):
            left.receive(Kind.TABLES, at_most=1000)
    raw(right).close()


@pytest.mark.parametrize("mode", STREAMS)
@pytest.mark.parametrize("act", ["receive", "send"])
def test_behind_a_deadline_all_is_over(mode, act, certified):
    """Also where the bytes are there, or could go."""
    left, right = pair(mode, certified, timeout=0.4)
    with left, right:
        right.send(Kind.OT, b"x")
        right.flush()
        with pytest.raises(TransportError, match=r"go on within 0\.4 s"), left.within(0.2):
            time.sleep(0.3)
            if act == "receive":
                left.receive(Kind.OT, at_most=1)
            else:
                left.send(Kind.TABLES, bytes(5000))
        assert "closed" in repr(left)
        right._drop()


@pytest.mark.parametrize("mode", STREAMS)
def test_no_writing_beyond_a_deadline(mode, certified):
    left, right = pair(mode, certified, timeout=0.5)
    with (
        meanwhile(lambda: raw(right).recv(2**14), every=0.05),
        lasting(0.4, 4),
        pytest.raises(TransportError, match="found no bytes taken"),
        left.within(0.5),
    ):
        for _ in range(10):
            left.send(Kind.TABLES, bytes(2**24))
    raw(right).close()


def test_a_record_has_an_end(certified):
    """Ten time-outs for one record of TLS, however steadily its bytes come."""
    left, right = pair("tls", certified, timeout=0.2)
    with left:
        data = iter(wire_bytes(right, bytes(8000)))
        with (
            meanwhile(lambda: raw(right).sendall(bytes([next(data)])), every=0.05),
            lasting(1.9, 4.5),
            pytest.raises(TransportError, match=r"go on within 0\.2 s"),
        ):
            left.receive(Kind.OT, at_most=1)
    raw(right).close()


def test_signs_of_life_do_not_last_for_ever():
    left, right = memory_pair(timeout=0.2)
    with (
        right,
        left,
        meanwhile(left.ping, every=0.05),
        lasting(1.9, 4.5),
        pytest.raises(ProtocolError, match="only frames PING for 2 s"),
    ):
        right.receive(Kind.OT, at_most=1)


def test_waiting_leaves_the_frame_and_is_not_prolonged():
    left, right = memory_pair(timeout=0.4)
    with right, left:
        left.ping()
        left.send(Kind.OT, b"x")
        left.flush()
        right.wait(0.4)
        right.wait(0.4)  # again, for the same frame
        assert right.receive(Kind.OT, at_most=1) == b"x"
        assert (right.counters.bytes_received, right.counters.frames_received) == (16 + 17, 1)
        assert right.counters.bytes_received == left.counters.bytes_sent
        with right.within(30), meanwhile(left.ping, every=0.05), lasting(0.3, 2), pytest.raises(TransportError):
            right.wait(0.4)


def test_a_deadline_inside_a_deadline():
    left, right = memory_pair(timeout=0.6)
    with right, left, meanwhile(left.ping, every=0.05), lasting(0.5, 1.8), pytest.raises(TransportError):  # noqa: SIM117
        with right.within(0.6):
            with right.within(60):
                pass
            with right.within(60):
                right.receive(Kind.OT, at_most=1)


def test_the_reason_of_a_refusal_behind_a_frame_that_was_met():
    left, right = memory_pair(timeout=2)
    with right, left:
        left.send(Kind.OT, bytes(3000))
        left.flush()
        right.wait(2)
        left.refuse("enough")
        with pytest.raises(ProtocolError, match="stopped: enough"):
            for _ in range(10):
                right.send(Kind.TABLES, bytes(2**20))


def test_silent_callers_have_little_time_to_greet(certified, monkeypatch):
    assert sockets._GREETING == 5.0
    monkeypatch.setattr(sockets, "_GREETING", 0.3)
    with listen("0", tls=certified.garbler, timeout=20) as listener, contextlib.ExitStack() as stack:
        knock(listener.address, stack)
        with lasting(0.2, 3), pytest.raises(TransportError, match=r"TLS greeting within 0\.3 s; found none"):
            listener.accept()


# A server


def test_signs_of_life_keep_no_session():
    with serving(timeout=0.8, most_clients=2) as (address, program, weights, found):
        clients = [Client.connect(program, address, timeout=5) for _ in range(2)]
        pings = [meanwhile(client._channel.ping, every=0.1) for client in clients]
        with contextlib.ExitStack() as stack, lasting(0.5, 4):
            for ping in pings:
                stack.enter_context(ping)
            wait_for(lambda: len(found) == 2)
        assert all("within 0.8 s" in one.error for one in found)
        assert asks_rightly(address, program, weights)
        for client in clients:
            client._channel.refuse("the end")


def test_an_idle_client_keeps_its_session_for_less_than_a_time_out():
    with serving(timeout=2.0) as (address, program, weights, found):
        x = drawn(program, 1)
        with Client.connect(program, address, timeout=5) as client:
            for _ in range(3):
                time.sleep(1.0)
                values = client.ask(reals(program, x)).values
                assert np.array_equal(values, simulate(program, weights, x).reshape(-1))
        wait_for(lambda: found)
        assert (found[0].questions, found[0].error) == (3, None)


def test_callers_that_say_nothing_take_no_place():
    with serving(timeout=5.0, most_clients=2) as (address, program, weights, found), contextlib.ExitStack() as stack:
        for _ in range(6):
            knock(address, stack)
        time.sleep(0.3)
        assert asks_rightly(address, program, weights)
        wait_for(lambda: found, 3)
        assert found[0].error is None


@pytest.mark.parametrize("mode", STREAMS)
def test_a_crowd_that_says_nothing_keeps_nobody_out(mode, certified):
    ours, theirs = (certified.garbler, certified.evaluator) if mode == "tls" else (None, None)
    with serving(tls=ours, timeout=5.0, most_clients=2) as (address, program, weights, found):
        with contextlib.ExitStack() as stack:
            for _ in range(66 + 10):
                knock(address, stack)
            wait_for(lambda: len(found) == 10)
            assert all("dropped for a newer caller" in one.error for one in found)
            assert sorted(one.client for one in found) == list(range(1, 11)), "the oldest go"
            assert asks_rightly(address, program, weights, theirs)
        wait_for(lambda: len(found) == 77)
        assert [one.client for one in found if one.error is None] == [77]


def test_a_session_is_not_dropped_for_a_crowd(certified):
    with serving(timeout=8.0, most_clients=4, tls=certified.garbler) as (address, program, weights, _):
        x = drawn(program, 1)
        with (
            Client.connect(program, address, tls=certified.evaluator, timeout=8) as client,
            contextlib.ExitStack() as stack,
        ):
            for _ in range(100):
                knock(address, stack)
            values = client.ask(reals(program, x)).values
            assert np.array_equal(values, simulate(program, weights, x).reshape(-1))


def test_a_certificate_has_its_share_of_the_places(certified, tmp_path):
    made = certified.files
    tls = {"one": certified.evaluator, "two": certified.garbler}  # the server's own will do as another client's
    assert made.fingerprints["garbler"] != made.fingerprints["evaluator"]
    with serving(tls=certified.garbler, most_clients=8, timeout=8.0) as (address, program, weights, found):
        with contextlib.ExitStack() as stack:
            for _ in range(2):
                stack.enter_context(Client.connect(program, address, tls=tls["one"], timeout=8))
            with pytest.raises(ProtocolError, match="busy with 2 sessions of your certificate"):
                Client.connect(program, address, tls=tls["one"], timeout=8)
            assert asks_rightly(address, program, weights, tls["two"])
        for _ in range(5):  # one behind the other there may be any number
            assert asks_rightly(address, program, weights, tls["one"])
        wait_for(lambda: len(found) == 9)
        assert sum(one.error is None for one in found) == 8
    other = party(tmp_path / "other")
    with serving(tls=other.garbler, most_clients=1) as (address, program, weights, _):
        assert asks_rightly(address, program, weights, other.evaluator)


def test_the_loop_outlives_a_thread_that_does_not_start(monkeypatch):
    told, start = [], threading.Thread.start

    def report(served):
        told.append(served)
        raise ZeroDivisionError

    def failing(self):
        if "_serve" in repr(self._target) and not told:
            raise RuntimeError("can't start new thread")
        start(self)

    with serving(report=report, timeout=2.0, most_clients=1) as (address, program, weights, _):
        monkeypatch.setattr(threading.Thread, "start", failing)
        with contextlib.ExitStack() as stack:
            sock = knock(address, stack)
            sock.settimeout(5)
            assert sock.recv(1) == b""
        wait_for(lambda: told)  # the connection ends before the report
        assert "no thread for it (RuntimeError)" in told[0].error
        for _ in range(2):
            assert asks_rightly(address, program, weights)
        wait_for(lambda: len(told) == 3)


def test_no_descriptors_left():
    """It tries again a little later, without using up the processor or flooding the log."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    held, sock = [], socket.socket()
    with serving(timeout=3.0) as (address, program, weights, found), sock:
        host, port = address.rsplit(":", 1)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
            with contextlib.suppress(OSError):
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            sock.connect((host, int(port)))
            clock = time.process_time()
            time.sleep(1.2)
            clock = time.process_time() - clock
        finally:
            for one in held:
                os.close(one)
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        assert 1 <= len(found) <= 4 and clock < 0.4, (len(found), clock)
        assert "Too many open files" in found[0].error
        assert asks_rightly(address, program, weights)


def test_sums_over_callers():
    tally = Tally()

    def add():
        for index in range(500):
            tally.add(Served(index, 2, 0.1, 30, 40, None if index % 5 else "gone"))

    together(*(add for _ in range(4)))
    assert (tally.clients, tally.questions, tally.failures, tally.bytes_sent) == (2000, 4000, 400, 60_000)
