"""The EMP toolkit as a second engine. Most tests need a DeepSeal that was built with DEEPSEAL_EMP=ON."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from deepseal.errors import DeepSealError, InputError, TransportError
from deepseal.secure_inference.netlist import Netlist, Op, read_bristol
from deepseal.secure_inference.protocol import emp
from deepseal.secure_inference.protocol.circuit import run_circuit_on_emp
from deepseal.secure_inference.protocol.emp import emp_build, measure_emp, run_emp
from deepseal.secure_inference.protocol.emp_builds import BUILDS, check_build, check_leaks
from deepseal.secure_inference.transport import Channel, memory_pair

INSTALLED = importlib.util.find_spec("deepseal._emp") is not None
needs_emp = pytest.mark.skipif(not INSTALLED, reason="deepseal._emp is not installed: built without DEEPSEAL_EMP=ON")
CIRCUITS = Path(os.environ.get("DEEPSEAL_DATA", "/nonexistent")) / "bristol"
needs_circuits = pytest.mark.skipif(not CIRCUITS.is_dir(), reason="DEEPSEAL_DATA names no folder with bristol/")
pytestmark = pytest.mark.timeout(120)

PARTY = """
import json, socket, sys, time
from pathlib import Path
from deepseal.errors import DeepSealError
from deepseal.secure_inference.netlist import read_bristol
from deepseal.secure_inference.protocol.emp import run_emp

file, role, value, width, port, wait = sys.argv[1:]
netlist = read_bristol(Path(file))
if port == "0":
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    sock = listener.accept()[0]
else:
    sock = socket.create_connection(("127.0.0.1", int(port)))
time.sleep(float(wait))
bits = [int(value, 16) >> i & 1 for i in range(int(width))]
try:
    result = run_emp(netlist, role, bits, sock, timeout=20)
except DeepSealError as error:
    print(json.dumps({"error": str(error)}))
else:
    print(json.dumps({"output": [int(bit) for bit in result.output], "sent": result.bytes_sent,
                      "received": result.bytes_received}))
"""


def bits_of(value: int, width: int) -> list[int]:
    return [value >> i & 1 for i in range(width)]


def value_of(bits: np.ndarray) -> int:
    return sum(int(bit) << i for i, bit in enumerate(bits))


def party(file: str, role: str, value: int, width: int, port: int, wait: float = 0) -> subprocess.Popen[str]:
    words = [str(CIRCUITS / file), role, f"{value:x}", str(width), str(port), str(wait)]
    return subprocess.Popen([sys.executable, "-c", PARTY, *words], stdout=subprocess.PIPE, text=True)


def both(netlist: Netlist, garbler: list[int], evaluator: list[int], **options: object) -> dict[str, object]:
    """Both parties as two children of this process, over a socket pair; results or errors by role."""
    ends = socket.socketpair()
    done: dict[str, object] = {}

    def play(role: str, bits: list[int], sock: socket.socket) -> None:
        try:
            done[role] = run_emp(netlist, role, bits, sock, timeout=20, **options)  # type: ignore[arg-type]
        except DeepSealError as error:
            done[role] = error

    jobs = zip(("garbler", "evaluator"), (garbler, evaluator), ends, strict=True)
    threads = [threading.Thread(target=play, args=job) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end in ends:
        end.close()
    return done


AND = Netlist((1, 1), (1,), np.array([Op.AND]), np.array([0]), np.array([1]), np.array([2]))


@needs_emp
@needs_circuits
@pytest.mark.parametrize(
    ("file", "width", "garbler", "evaluator", "wanted"),
    [
        (
            "aes_128.txt",
            128,
            0x000102030405060708090A0B0C0D0E0F,
            0x00112233445566778899AABBCCDDEEFF,
            0x69C4E0D86A7B0430D8CDB78070B4C55A,
        ),
        ("adder64.txt", 64, 0x0123456789ABCDEF, 0xFEDCBA98000000FF, 0x0123456789ABCDEF + 0xFEDCBA98000000FF),
    ],
    ids=["aes", "adder"],
)
def test_circuits_between_two_processes(file, width, garbler, evaluator, wanted):
    first = party(file, "garbler", garbler, width, 0)
    assert first.stdout is not None
    port = int(first.stdout.readline())
    second = party(file, "evaluator", evaluator, width, port)
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in (first, second)]
    for answer in answers:
        assert value_of(np.array(answer["output"])) == wanted % (1 << width)
    assert answers[0]["sent"] == answers[1]["received"]
    assert answers[0]["received"] == answers[1]["sent"]
    assert answers[0]["sent"] >= 32 * read_bristol(CIRCUITS / file).and_gates


def drawn(rng: np.random.Generator, inputs: tuple[int, ...], gates: int) -> Netlist:
    first = sum(inputs)
    ops = rng.integers(0, 5, gates).astype(np.uint8)
    a = np.array([rng.integers(0, first + i) for i in range(gates)])
    b = np.array([rng.integers(0, first + i) for i in range(gates)])
    a[ops == Op.CONST] %= 2
    b[ops >= Op.NOT] = 0
    return Netlist(inputs, (9, 7), ops, a, b, rng.integers(0, first + gates, 16))


@needs_emp
@pytest.mark.parametrize("seed", range(3))
def test_gates_of_all_kinds_and_values_of_any_owner(seed):
    rng = np.random.default_rng(seed)
    inputs = ((5, 1, 12, 3), (8,), (4, 4))[seed]
    owners = (("evaluator", "garbler", "garbler", "evaluator"), ("evaluator",), None)[seed]
    netlist = drawn(rng, inputs, 300)
    values = [int(rng.integers(0, 1 << width)) for width in inputs]
    own: dict[str, list[int]] = {"garbler": [], "evaluator": []}
    for width, value, owner in zip(inputs, values, owners or ("garbler", "evaluator"), strict=True):
        own[owner] += bits_of(value, width)
    done = both(netlist, own["garbler"], own["evaluator"], owners=owners)
    wanted = netlist.evaluate(values)
    for result in done.values():
        assert isinstance(result, emp.EmpResult), result
        assert [value_of(result.output[:9]), value_of(result.output[9:])] == wanted
        assert "output" not in repr(result)


@needs_emp
def test_the_socket_carries_more_afterwards_and_nothing_is_left_open():
    def descriptors() -> int:
        return len(list(Path("/proc/self/fd").iterdir()))

    before = descriptors()
    first, second = socket.socketpair()
    first.settimeout(10)  # makes the descriptor non-blocking
    for _ in range(3):
        other = threading.Thread(target=run_emp, args=(AND, "evaluator", [1], second), kwargs={"timeout": 20})
        other.start()
        assert run_emp(AND, "garbler", [1], first, timeout=20).output.tolist() == [1]
        second.sendall(b"more")
        assert first.recv(10) == b"more"
        other.join()
    first.close()
    second.close()
    assert descriptors() == before


@needs_emp
def test_a_circuit_over_a_channel_after_the_handshake():
    done: dict[str, object] = {}

    def play(role: str, channel: Channel) -> None:
        try:
            done[role] = run_circuit_on_emp(channel, role, AND, [1])
        except DeepSealError as error:
            done[role] = error

    ends = memory_pair(timeout=20)
    threads = [threading.Thread(target=play, args=job) for job in zip(emp.ROLES, ends, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [getattr(done[role], "output", done[role]) for role in emp.ROLES] == [(1,), (1,)]


@needs_emp
@needs_circuits
@pytest.mark.parametrize("when", ["before its run", "in its run"])
def test_a_killed_peer(when):
    peer = party("aes_128.txt", "garbler", 1, 128, 0, wait=60 if when == "before its run" else 0)
    assert peer.stdout is not None
    sock = socket.create_connection(("127.0.0.1", int(peer.stdout.readline())))
    if when == "in its run":
        assert sock.recv(1, socket.MSG_PEEK)  # its child is at work and waits for us
    killer = threading.Timer(0.5, os.kill, (peer.pid, signal.SIGKILL))
    if when == "in its run":
        os.kill(peer.pid, signal.SIGKILL)
        peer.wait()
    else:
        killer.start()
    netlist = read_bristol(CIRCUITS / "aes_128.txt")
    with pytest.raises(TransportError, match="it hung up"):
        run_emp(netlist, "evaluator", [0] * 128, sock, timeout=20)
    peer.communicate()
    sock.close()


@needs_emp
@pytest.mark.parametrize(
    ("times", "found"),
    [({"timeout": 0.4}, "nothing from it for 0.4 seconds"), ({"timeout": 20, "limit": 1.5}, "that it goes on")],
)
def test_a_silent_peer(times, found):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(TransportError, match=found):
            run_emp(AND, "evaluator", [1], ours, **times)
        theirs.settimeout(5)
        while theirs.recv(1 << 16):  # the end: the peer notices that we are gone
            pass


@needs_emp
@pytest.mark.parametrize("role", ["garbler", "evaluator"])
def test_garbage_from_the_peer(role):
    ours, theirs = socket.socketpair()
    with ours, theirs:
        feeder = threading.Thread(target=lambda: theirs.sendall(np.random.default_rng(0).bytes(4096)))
        feeder.start()
        with pytest.raises(TransportError) as caught:
            run_emp(AND, role, [1], ours, timeout=2)
        feeder.join()
    assert "\n" not in str(caught.value)
    assert "Traceback" not in str(caught.value)


@needs_emp
def test_a_build_that_was_not_tested_is_refused(monkeypatch):
    headers = emp_build().headers
    monkeypatch.setattr(emp, "BUILDS", {"0" * 64: "another"})
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(InputError, match=f"tested here.*{headers}"):
        run_emp(AND, "evaluator", [1], ours, timeout=5)


def test_the_list_of_builds():
    assert all(len(bytes.fromhex(digest)) == 32 and name for digest, name in BUILDS.items())
    for digest in BUILDS:
        check_build(digest)
    with pytest.raises(InputError, match="0" * 64):
        check_build("0" * 64)
    check_leaks(0, 256)
    with pytest.raises(InputError, match="128 of 256 pairs"):
        check_leaks(128, 256)


@needs_emp
def test_the_installed_build_is_listed_and_keeps_delta():
    build = emp_build()
    assert build.name == BUILDS[build.headers]
    assert build.leaks == 0
    answer, _ = emp._ask({"job": "about"}, {}, None, timeout=10, limit=10)
    assert {status: name for name, status in answer["statuses"].items()} == dict(emp.STATUSES)


@needs_emp
def test_randomness_cannot_be_switched_off_from_the_environment(monkeypatch):
    monkeypatch.setenv("EMP_TEST_MODE", "1")
    seen = set()
    for _ in range(2):
        ours, theirs = socket.socketpair()
        with ours, theirs:
            with pytest.raises(TransportError):
                run_emp(AND, "garbler", [1], ours, timeout=0.3)
            seen.add(theirs.recv(48))  # two constant labels and the seed of the hash
    assert len(seen) == 2


@pytest.mark.parametrize(
    ("change", "found"),
    [
        ({"role": "server"}, "'server'"),
        ({"bits": [1, 0]}, r"shape \(2,\)"),
        ({"bits": [2]}, "other values"),
        ({"timeout": 0}, "found 0"),
        ({"timeout": float("nan")}, "found nan"),
        ({"limit": float("inf")}, "found inf"),
        ({"owners": ["garbler"]}, "found 1"),
        ({"owners": ["garbler", "both"]}, "'both'"),
        ({"netlist": Netlist((1, 1, 1), (1,), np.array([]), np.array([]), np.array([]), np.array([0]))}, "no owners"),
    ],
)
def test_arguments_that_do_not_fit(change, found):
    arguments = {"netlist": AND, "role": "garbler", "bits": [1], "timeout": 5} | change
    ours, theirs = socket.socketpair()
    with ours, theirs, pytest.raises(InputError, match=found):
        run_emp(sock=ours, **arguments)


def test_sockets_that_do_not_fit():
    closed = socket.socket()
    closed.close()
    with pytest.raises(InputError, match="closed"):
        run_emp(AND, "garbler", [1], closed, timeout=5)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    with socket.socket() as plain, pytest.raises(InputError, match="a TLS socket"):
        run_emp(AND, "garbler", [1], context.wrap_socket(plain), timeout=5)


@pytest.mark.skipif(INSTALLED, reason="deepseal._emp is installed")
def test_without_emp_the_error_says_what_to_do():
    with pytest.raises(InputError, match="DEEPSEAL_EMP=ON"):
        emp_build()


@needs_emp
@pytest.mark.parametrize("own_channel", [False, True])
@pytest.mark.parametrize(
    ("what", "kind", "least"),
    [("and", None, 32.0), ("cot", "softspoken2", 7.8), ("cot", "iknp", 15.5), ("base_ot", "co", 60.0)],
)
def test_measurements(what, kind, least, own_channel):
    count = {"and": 20_000, "cot": 100_000, "base_ot": 128}[what]
    ends = socket.socketpair()
    done: dict[str, object] = {}

    def measure(role: str, sock: socket.socket) -> None:
        done[role] = measure_emp(what, count=count, role=role, sock=sock, kind=kind, own_channel=own_channel)

    threads = [threading.Thread(target=measure, args=job) for job in zip(emp.ROLES, ends, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for end in ends:
        end.close()
    moved = max(done[role]["bytes_sent"] for role in emp.ROLES)  # type: ignore[index]
    assert least * count <= moved <= 2 * least * count + 100_000
    assert done["garbler"]["bytes_sent"] == done["evaluator"]["bytes_received"]  # type: ignore[index]
    assert all(0 < done[role]["seconds"] < 60 for role in emp.ROLES)  # type: ignore[index]


@needs_emp
def test_measurement_in_memory():
    answer = measure_emp("memory", count=100_000)
    assert 0 < answer["evaluate_seconds"] < answer["garble_seconds"] * 2 < 60
