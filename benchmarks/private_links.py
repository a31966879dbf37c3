"""Two network namespaces with a shaped link between them, for measurements beyond loopback. Needs root.

A veth pair joins the namespaces; a token bucket (``tbf``) at both ends sets the bandwidth. ``netem`` is not everywhere,
so latency is added by a relay in the client's namespace: it holds whatever passes for half a round trip, and opens the
onward connection when TCP's own greeting would have been through. It keeps nothing back otherwise, so a transfer is
never slower than the bandwidth because of the latency: the figures are those of a connection with a wide window.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import socket
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SERVER = "10.77.0.1:7000"
RELAY = "127.0.0.1:7001"
_CHUNK = 1 << 18
_HELD = 64 << 20  # bytes that wait in one direction of the relay
_PREFIX = "deepseal-"


@dataclass(frozen=True)
class Shape:
    """A link: bits a second each way, seconds of a round trip, the bucket's bytes."""

    name: str
    bandwidth: float
    round_trip: float
    burst: int


SHAPES = {shape.name: shape for shape in (Shape("lan", 1e9, 0.001, 262144), Shape("wan", 1e8, 0.040, 16384))}


@contextlib.contextmanager
def shaped(shape: Shape) -> Iterator[tuple[str, str]]:
    """The names of the server's and the client's namespace; both are gone when the block ends.

    Raises:
        RuntimeError: they cannot be made here; with the reason.
    """
    remove_stale()
    server, client = (f"{_PREFIX}{os.getpid()}-{side}" for side in "sc")
    with contextlib.ExitStack() as stack:
        for name in (server, client):
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name, check=False)
        ip("-n", server, "link", "add", "name", "ds0", "type", "veth", "peer", "name", "ds0", "netns", client)
        for name, address in ((server, "10.77.0.1/24"), (client, "10.77.0.2/24")):
            ip("-n", name, "address", "add", address, "dev", "ds0")
            for device in ("lo", "ds0"):
                ip("-n", name, "link", "set", device, "up")
            rate = [str(part) for part in ("rate", f"{shape.bandwidth:.0f}bit", "burst", shape.burst, "limit", 1 << 20)]
            ip("netns", "exec", name, "tc", "qdisc", "add", "dev", "ds0", "root", "tbf", *rate)
        relay = stack.enter_context(inside(client, "relay", repr(shape.round_trip)))
        expect(relay)
        yield server, client


def commands(link: tuple[str, str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """What a command is put behind to run in the server's and in the client's namespace."""
    server, client = (("ip", "netns", "exec", name) for name in link)
    return server, client


def probe(link: tuple[str, str], shape: Shape) -> dict[str, Any]:
    """What the link does: round trip of one byte, and bits a second each way, through relay and buckets."""
    with inside(link[0], "echo") as echo:
        expect(echo)
        with inside(link[1], "probe", str(int(shape.bandwidth))) as probing:
            found = expect(probing)
    return {
        "bandwidth_wanted": shape.bandwidth,
        "round_trip_wanted_ms": 1000 * shape.round_trip,
        "latency_by": "userspace relay",
        "bandwidth_by": "tbf",
        **found,
    }


def ip(*words: str, check: bool = True) -> str:
    try:
        done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    except FileNotFoundError as error:
        raise RuntimeError("expected the command ip, found none: install iproute2") from error
    if check and done.returncode:
        raise RuntimeError(f"ip {' '.join(words)}: {done.stderr.strip()}")
    return done.stdout


def remove_stale() -> None:
    """Take away what runs that were killed have left."""
    for line in ip("netns", "list").splitlines():
        match = re.match(rf"{_PREFIX}(\d+)-[sc]\b", line)
        if match and not Path("/proc", match[1]).exists():
            ip("netns", "del", match[0], check=False)


@contextlib.contextmanager
def inside(namespace: str, *words: str) -> Iterator[subprocess.Popen[str]]:
    """This script in a namespace; it ends with its standard input, at the latest with the block."""
    command = ["ip", "netns", "exec", namespace, sys.executable, str(Path(__file__).resolve()), *words]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.terminate()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()


def expect(process: subprocess.Popen[str]) -> dict[str, Any]:
    """The next line of such a script."""
    assert process.stdout is not None
    if not select.select([process.stdout], [], [], 120)[0]:
        raise RuntimeError(f"nothing came from {process.args!r}")
    line = process.stdout.readline()
    if not line:
        raise RuntimeError(f"{process.args!r} ended early")
    result: dict[str, Any] = json.loads(line)
    return result


# What runs inside the namespaces


class Direction:
    """Bytes from one socket to another, each held for a while, and none passed on before ``opens``."""

    def __init__(self, source: socket.socket, target: socket.socket, delay: float, opens: float) -> None:
        self.source, self.target, self.delay, self.opens = source, target, delay, opens
        self.held: deque[tuple[float, memoryview]] = deque()
        self.size, self.ended = 0, False

    @property
    def due(self) -> float | None:
        """When the next bytes may go."""
        return self.held[0][0] if self.held else None

    def read(self) -> None:
        try:
            data = self.source.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        self.held.append((max(time.monotonic() + self.delay, self.opens), memoryview(data)))
        self.size += len(data)
        self.ended = not data

    def write(self) -> None:
        while self.held and self.held[0][0] <= time.monotonic():
            due, data = self.held[0]
            try:
                if not data:
                    self.target.shutdown(socket.SHUT_WR)
                count = self.target.send(data) if data else 0
            except BlockingIOError:
                return
            except OSError:
                self.ended = True
                self.held.clear()
                return
            self.size -= count
            if count < len(data):
                self.held[0] = (due, data[count:])
                return
            self.held.popleft()


def relay(round_trip: float) -> None:
    """Forward the port of RELAY to SERVER; until standard input ends."""
    listener = socket.create_server(_place(RELAY))
    waiting: list[tuple[float, socket.socket]] = []
    pairs: list[tuple[Direction, Direction]] = []
    say({})
    while True:
        now = time.monotonic()
        for opens, client in [one for one in waiting if one[0] <= now]:
            waiting.remove((opens, client))
            server = tuned(socket.create_connection(_place(SERVER), timeout=5))
            # As with TCP's greeting: the client's first bytes are there after 1.5 round trips, the server's after 2.
            there = Direction(client, server, round_trip / 2, 0.0)
            pairs.append((there, Direction(server, client, round_trip / 2, opens + round_trip)))
        for pair in list(pairs):
            for one in pair:
                one.write()
            if all(one.ended and not one.held for one in pair):
                pair[0].source.close()
                pair[1].source.close()
                pairs.remove(pair)
        ways = [one for pair in pairs for one in pair]
        sources = {one.source: one for one in ways if not one.ended and one.size < _HELD}
        now = time.monotonic()
        full = [one.target for one in ways if one.due is not None and one.due <= now]
        times = [one.due for one in ways if one.due is not None and one.due > now] + [opens for opens, _ in waiting]
        wait = max(0.0, min(times) - now) if times else None
        for found in select.select([listener, sys.stdin, *sources], full, [], wait)[0]:
            if found is sys.stdin:
                return
            if found is listener:
                waiting.append((time.monotonic() + round_trip, tuned(listener.accept()[0])))
            else:
                sources[found].read()


def tuned(sock: socket.socket) -> socket.socket:
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setblocking(False)
    return sock


def echo() -> None:
    """Answer each byte of the first phase, then take and give as many bytes as asked."""
    listener = socket.create_server(_place(SERVER))
    say({})
    sock = listener.accept()[0]
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.settimeout(60)
    with sock:
        while (kind := exactly(sock, 1)) == b"p":
            sock.sendall(b"p")
        size = int.from_bytes(exactly(sock, 8), "big")
        exactly(sock, size)
        sock.sendall(b"d")
        exactly(sock, 1)
        sock.sendall(bytes(size))
        exactly(sock, 1)
    assert kind == b"t"


def measure_link(bandwidth: float) -> None:
    """Ping-pong and throughput from the client's side."""
    with socket.create_connection(_place(RELAY), timeout=60) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        trips = []
        for _ in range(21):
            clock = time.perf_counter()
            sock.sendall(b"p")
            exactly(sock, 1)
            trips.append(1000 * (time.perf_counter() - clock))
        trip, size = statistics.median(trips[1:]), int(bandwidth / 8)  # one second
        clock = time.perf_counter()
        sock.sendall(b"t" + size.to_bytes(8, "big") + bytes(size))
        exactly(sock, 1)
        there = time.perf_counter() - clock - trip / 1000
        clock = time.perf_counter()
        sock.sendall(b"g")
        exactly(sock, size)
        back = time.perf_counter() - clock - trip / 1000
        sock.sendall(b"e")
    say({"n": len(trips) - 1, "round_trip_ms": {"median": trip, "lowest": min(trips[1:]), "highest": max(trips[1:])},
         "bits_per_second_to_server": 8 * size / there, "bits_per_second_to_client": 8 * size / back})  # fmt: skip


def exactly(sock: socket.socket, count: int) -> bytes:
    """The next bytes; of a long row only the last part is kept."""
    data = b""
    while count:
        data = sock.recv(min(count, _CHUNK))
        if not data:
            raise ConnectionError("the other side hung up")
        count -= len(data)
    return data


def _place(text: str) -> tuple[str, int]:
    host, port = text.split(":")
    return host, int(port)


def say(values: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))  # a wire does not wait for a processor
    {"relay": lambda: relay(float(sys.argv[2])), "echo": echo, "probe": lambda: measure_link(float(sys.argv[2]))}[
        sys.argv[1]
    ]()
