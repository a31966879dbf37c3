"""How fast the engine is on this machine: gates in memory and between two processes, and oblivious transfers.

Every figure is the median of several runs. Two processes on one machine share its memory bus and perhaps a core.
"""

from __future__ import annotations

import os
import statistics
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from deepseal import _native
from deepseal.errors import InputError, TransportError
from deepseal.secure_inference.netlist import Netlist, Record
from deepseal.secure_inference.protocol import base_ot
from deepseal.secure_inference.protocol.extension import Array, TransferSettings
from deepseal.secure_inference.protocol.parties import (
    EvaluatorParty,
    GarblerParty,
    Program,
    Settings,
    start_evaluator,
    start_garbler,
)
from deepseal.secure_inference.transport import Channel, Kind, Tls, connect, listen

WIDTH = 64
LANES = 512
_TIMEOUT = 60.0
_SECONDS = struct.Struct("<d")
_CHILD = "from deepseal.secure_inference.protocol.bench import peer; peer()"


def mixing_layer(width: int = WIDTH) -> Netlist:
    """``width`` AND gates and as many XOR gates on two words, with as many outputs as inputs, so that it repeats."""
    context = Record()
    x, y = context.inputs(width), context.inputs(width)
    both = [context.and_(a, b) for a, b in zip(x, y, strict=True)]
    either = [context.xor(a, b) for a, b in zip(x[1:] + x[:1], y, strict=True)]
    return context.netlist(tuple(both), tuple(either))


def bench_memory(kernels: str = "", *, seconds: float = 0.5, repeats: int = 5) -> dict[str, float]:
    """AND gates a second, garbled and evaluated on one core without any input or output.

    Args:
        kernels: AES kernels; empty takes the fastest.
        seconds: how long each run takes, about.
        repeats: runs; the median counts.
    """
    session = _native.Session(bytes(16), kernels)
    program = Program(mixing_layer())
    plan = program.plan(LANES)
    garbler, evaluator = _native.Garbler(_native.Delta(), session), _native.Evaluator(session)
    zero = np.random.default_rng(0).integers(0, 256, (2 * WIDTH, LANES, 16), dtype=np.uint8)
    frame = np.empty(1 << 18, dtype=np.uint8)
    chunk, out = program.chunk(LANES), np.empty_like(zero)

    def garble() -> int:
        run = garbler.garbling(plan, LANES, zero, chunk, out)
        while run.next(frame):
            pass
        return plan.and_gates * LANES

    def evaluate() -> int:
        run = evaluator.evaluation(plan, LANES, zero, chunk, out)
        while run.tables_left:
            run.next(frame[: min(frame.nbytes, 32 * run.tables_left)])
        return plan.and_gates * LANES

    return {"garble": _rate(garble, seconds, repeats), "evaluate": _rate(evaluate, seconds, repeats)}


def bench_transfer(kernels: str = "", *, k: int = 2, seconds: float = 0.5, repeats: int = 5) -> dict[str, float]:
    """Correlated oblivious transfers a second, at the sender and at the receiver, without the channel."""
    session, delta = _native.Session(bytes(16), kernels), _native.Delta()
    rng = np.random.default_rng(0)
    pairs = rng.integers(0, 256, (128, 2, 16), dtype=np.uint8)
    receiver = _native.CotReceiver(session, k, pairs)
    keys = delta.choose(np.ascontiguousarray(pairs[:, 0]), np.ascontiguousarray(pairs[:, 1]))
    sender = _native.CotSender(session, k, delta, keys, receiver.opening)
    bits = rng.integers(0, 2, 1 << 17, dtype=np.uint8)
    corrections = receiver.extend(bits)[1]

    def send() -> int:
        return len(sender.extend(corrections, len(bits)))

    def receive() -> int:
        return len(receiver.extend(bits)[0])

    return {
        "send": _rate(send, seconds, repeats),
        "receive": _rate(receive, seconds, repeats),
        "bytes_each": corrections.nbytes / len(bits),
    }


def bench_pair(
    *,
    gates: int = 50_000_000,
    transfers: int = 4_000_000,
    tls: tuple[Tls, Tls] | None = None,
    settings: Settings | None = None,
    cores: tuple[int, int] | None = None,
) -> dict[str, Any]:
    """Two processes over loopback: set-up, AND gates a second (garble, send, evaluate), transfers a second.

    Args:
        gates: how many AND gates, about.
        transfers: how many correlated oblivious transfers.
        tls: the garbler's and the evaluator's files; None: plain TCP.
        settings: the engine's.
        cores: CPUs of the garbler and the evaluator; None leaves it to the system.

    Raises:
        TransportError: the other process failed.
    """
    settings = settings or Settings()
    base_ot.load()
    with listen("127.0.0.1:0", tls=tls[0] if tls else None, timeout=_TIMEOUT) as listener:
        words = [
            listener.address,
            str(gates),
            str(transfers),
            str(settings.transfer.k),
            str(int(settings.transfer.checks)),
        ]
        words += [settings.kernels or "-"]
        words += [str(cores[1]) if cores else "-"]
        words += [str(path) for path in (tls[1].certificate, tls[1].key, tls[1].ca)] if tls else []
        # Of its own session, so that Ctrl-C is for us, and we end it.
        command = [sys.executable, "-c", _CHILD, *words]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        affinity = os.sched_getaffinity(0)
        try:
            if cores:
                os.sched_setaffinity(0, {cores[0]})
            with listener.accept() as channel:
                result = _play(channel, "garbler", gates, transfers, settings)
                # The evaluator's clock starts before it connects, when its process is up.
                result["setup_seconds"] = _SECONDS.unpack(channel.receive(Kind.OUTPUT, at_most=_SECONDS.size))[0]
            if child.wait(_TIMEOUT):
                raise TransportError(
                    "the other process to end well", found=f"status {child.returncode}", do="run again"
                )
        finally:
            os.sched_setaffinity(0, affinity)
            if child.poll() is None:
                child.kill()
                child.wait()
    return result


def peer() -> None:
    """The evaluator's process; see ``bench_pair``."""
    address, gates, transfers, k, checks, kernels, core, *files = sys.argv[1:]
    if core != "-":
        os.sched_setaffinity(0, {int(core)})
    tls = Tls(*files) if files else None
    settings = Settings(TransferSettings(k=int(k), checks=checks == "1"), kernels="" if kernels == "-" else kernels)
    base_ot.load()
    clock = time.perf_counter()
    try:
        with connect(address, tls=tls, timeout=_TIMEOUT) as channel:
            connection = time.perf_counter() - clock
            result = _play(channel, "evaluator", int(gates), int(transfers), settings)
            channel.send(Kind.OUTPUT, _SECONDS.pack(connection + result["setup_seconds"]))
    except TransportError:
        sys.exit(1)  # the first process tells the user


def _play(channel: Channel, role: str, gates: int, transfers: int, settings: Settings) -> dict[str, Any]:
    program = Program(mixing_layer())
    start = start_garbler if role == "garbler" else start_evaluator
    clock = time.perf_counter()
    party = start(channel, program=program.netlist.digest(), parameters={"gates": gates}, settings=settings)
    _meet(channel)
    result: dict[str, Any] = {"setup_seconds": time.perf_counter() - clock}
    bits = np.random.default_rng(1).integers(0, 2, 2 * WIDTH * LANES, dtype=np.uint8)
    labels = (party.own_labels(bits) if role == "garbler" else party.peer_labels(len(bits))).reshape(-1, LANES, 16)
    layers = max(1, gates // (program.netlist.and_gates * LANES))
    other = _layer(party, program, labels, np.empty_like(labels))
    _meet(channel)
    clock, before = time.perf_counter(), channel.counters.bytes_sent
    for _ in range(layers):
        labels, other = other, _layer(party, program, other, labels)
    _meet(channel)
    seconds, count = time.perf_counter() - clock, layers * program.netlist.and_gates * LANES
    sent = channel.counters.bytes_sent - before
    result |= {
        "and_gates": count,
        "and_seconds": seconds,
        "and_per_second": count / seconds,
        "bytes_per_and": sent / count,
    }
    batch = min(transfers, 1 << 18)
    bits, labels = np.random.default_rng(2).integers(0, 2, batch, dtype=np.uint8), np.zeros((batch, 16), dtype=np.uint8)
    _meet(channel)
    clock, before = time.perf_counter(), channel.counters.bytes_received
    for done in range(0, transfers, batch):
        count = min(batch, transfers - done)
        if isinstance(party, GarblerParty):
            party.peer_labels(count, out=labels[:count])
        else:
            party.own_labels(bits[:count], out=labels[:count])
    _meet(channel)
    seconds, received = time.perf_counter() - clock, channel.counters.bytes_received - before
    return result | {"ot": transfers, "ot_per_second": transfers / seconds, "bytes_per_ot": received / transfers}


def _layer(party: GarblerParty | EvaluatorParty, program: Program, labels: Array, out: Array) -> Array:
    if isinstance(party, GarblerParty):
        return party.garble(program, labels, out=out)
    return party.evaluate(program, labels, out=out)


def _meet(channel: Channel) -> None:
    channel.send(Kind.DONE)
    channel.receive(Kind.DONE, at_most=0)


def _rate(action: Callable[[], int], seconds: float, repeats: int) -> float:
    if repeats < 1 or not seconds > 0:
        raise InputError(
            "at least one repeat of more than 0 seconds", found=f"{repeats} of {seconds}", do="correct them"
        )
    action()
    rates = []
    for _ in range(repeats):
        count, clock = 0, time.perf_counter()
        while time.perf_counter() - clock < seconds:
            count += action()
        rates.append(count / (time.perf_counter() - clock))
    return statistics.median(rates)
