"""Whole sessions, also on wires that fail and between processes that die."""

from __future__ import annotations

import random
import select
import signal
import socket
import struct
import threading
import time
from pathlib import Path

import pytest
from channels import PROGRAM, SECRET, child, session
from parties import open_descriptors, together

from deepseal.errors import DeepSealError, ProtocolError, TransportError
from deepseal.secure_inference.transport import Hello, Kind, Session, connect, handshake, listen, memory_pair


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
