"""How fast a party computes on this machine, for estimates."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from deepseal import _native
from deepseal.secure_inference.compile.arrays import LinearWeights
from deepseal.secure_inference.compile.program import Linear, Number, Program, Wire
from deepseal.secure_inference.compile.weights import Weights
from deepseal.secure_inference.protocol.bench import bench_memory, bench_transfer
from deepseal.secure_inference.protocol.parties import Settings
from deepseal.secure_inference.roles.yao import YaoClientSession, YaoServerSession
from deepseal.secure_inference.roles.yao_layers import prepare_garbled, prepare_garbled_server
from deepseal.secure_inference.transport import connect, listen

_TIMEOUT = 60.0
_PEER = "from deepseal.secure_inference.roles.rates import peer; peer()"


@dataclass(frozen=True)
class Rates:
    """Operations a second, and seconds for what does not depend on sizes.

    Args:
        garble: whole AND gates.
        evaluate: likewise.
        mask: values of a linear layer at the weight owner, in long rows.
        open: likewise at the other party.
        send: correlated OTs.
        receive: likewise.
        mask_row: seconds for each source element of a linear layer, whatever the length of its row.
        open_row: likewise at the other party.
        copy: bytes through a socket and back.
        layer: seconds for each layer.
        message: seconds to get a message through the system, besides the network's latency.
        yao_garble: whole gates in linear layers, a half gate as half of one, with all that is around them.
        yao_evaluate: likewise.
    """

    garble: float
    evaluate: float
    mask: float
    open: float
    send: float
    receive: float
    mask_row: float = 0.0
    open_row: float = 0.0
    copy: float = 2.5e9
    layer: float = 6e-5
    message: float = 4e-5
    yao_garble: float = 4e7
    yao_evaluate: float = 4e7


def measure(kernels: str = "", *, yao: bool = False) -> Rates:
    """Measure this machine: about a second, and two more with ``yao``, between two processes.

    Raises:
        TransportError: the other process fails.
    """
    gates = bench_memory(kernels, seconds=0.05, repeats=3)
    transfers = bench_transfer(kernels, seconds=0.05, repeats=3)
    garbled = _yao_rate(kernels) if yao else Rates.yao_garble
    (mask, mask_row), (open_, open_row) = _linear_rates(kernels)
    return Rates(
        gates["garble"],
        gates["evaluate"],
        mask,
        open_,
        transfers["send"],
        transfers["receive"],
        mask_row,
        open_row,
        yao_garble=garbled,
        yao_evaluate=garbled,
    )


def _linear_rates(kernels: str) -> list[tuple[float, float]]:
    """Values a second and seconds a row at either party, from rows of two lengths."""
    session, delta = _native.Session(bytes(16), kernels), _native.Delta()
    sources, bits, lengths = 128, 8, (8, 512)
    taken: list[list[float]] = [[], []]
    for outputs in lengths:
        starts = np.arange(sources + 1, dtype=np.uint64) * outputs
        met = _native.Connections(starts, np.tile(np.arange(outputs, dtype=np.uint32), sources), outputs)
        one, two = (_native.LinearOt(session, met, 24, bits, False, use) for use in (1, 2))
        labels = np.zeros((bits, 1, sources, 16), dtype=np.uint8)
        message = np.zeros(one.message_bytes(0, sources), dtype=np.uint8)
        share = np.zeros(outputs, dtype=np.uint64)
        weights = np.zeros(sources * outputs, dtype=np.int64)
        taken[0].append(_fastest(lambda: one.send(delta, weights, 0, sources, labels, 0, share, message)))  # noqa: B023
        taken[1].append(_fastest(lambda: two.receive(0, sources, labels, 0, message, share)))  # noqa: B023
    found = []
    for short, long in taken:
        value = (long - short) / (sources * bits * (lengths[1] - lengths[0]))
        found.append((1 / value, max(0.0, short / sources - value * bits * lengths[0])))
    return found


def _fastest(call: Callable[[], object], repeats: int = 30) -> float:
    best = float("inf")
    for _ in range(repeats):
        clock = time.perf_counter()
        call()
        best = min(best, time.perf_counter() - clock)
    return best


def _layer() -> tuple[Program, Weights]:
    """One dense layer, 8-bit, 512 to 128."""
    source, target = Number(8, signed=False, fraction=8), Number(24, signed=True, fraction=14)
    step = Linear(0, 1, "linear", (128, 512), Number(8, signed=True, fraction=6))
    wires = (Wire((512,), source, "activation"), Wire((128,), target, "accumulator"))
    program = Program(wires, (step,), 0, 1, "logits", labels=128)
    weights = LinearWeights(np.ones((128, 512), dtype=np.int64), np.zeros(128, dtype=np.int64))
    return program, Weights(program.digest(), {0: weights})


def _yao_rate(kernels: str, repeats: int = 4) -> float:
    """Gates a second through both parties of ``yao``: the client is here, the server another process."""
    program, _ = _layer()
    ready = prepare_garbled(program)
    with listen("127.0.0.1:0", tls=None, timeout=_TIMEOUT) as listener:
        command = [sys.executable, "-c", _PEER, listener.address, kernels]
        child = subprocess.Popen(command, stdout=subprocess.DEVNULL, start_new_session=True)
        try:
            with listener.accept() as channel:
                session = YaoClientSession(channel, ready, Settings(kernels=kernels))
                x = np.zeros((1, 512), dtype=np.int64)
                session.ask(x)
                seconds = _fastest(lambda: session.ask(x), repeats)
                session.close()
            child.wait(_TIMEOUT)
        finally:
            if child.poll() is None:
                child.kill()
                child.wait()
    whole, half = ready.layers[0].gates
    return (whole + half / 2) / seconds


def peer() -> None:
    """The server of ``_yao_rate``; its arguments are the address and the kernels."""
    address, kernels = sys.argv[1:3]
    with connect(address, tls=None, timeout=_TIMEOUT, retry_for=5.0) as channel:
        session = YaoServerSession(channel, prepare_garbled_server(*_layer()), Settings(kernels=kernels))
        while session.answer():
            pass
