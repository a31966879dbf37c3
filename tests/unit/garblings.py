"""A garbler and an evaluator in one process, driven call by call, for tests of the native engine."""

from __future__ import annotations

import numpy as np

from deepseal import _native
from deepseal.secure_inference.netlist import Netlist, Op

SEED = bytes(range(16))
DELTA = bytes.fromhex("1f5a9be3c07d4482a6f1e2d3b4958677")
OFFSET = np.frombuffer(DELTA, np.uint8)
KERNELS = _native.kernels()
ORDERS = ("given", "depth")
AND = Netlist((2,), (1,), [Op.AND], [0], [1], [2])
LEVEL = 1e-6


def plan_of(netlist, order="given"):
    return _native.Plan(netlist.input_bits, netlist.ops, netlist.a, netlist.b, netlist.output_wires, order)


def parties(kernels="", delta=DELTA, seed=SEED):
    session = _native.Session(seed, kernels)
    return _native.Garbler(_native.Delta.from_bytes(delta), session), _native.Evaluator(session)


def garble(garbler, plan, zero, sizes=(1 << 16,)):
    """All tables, through buffers of these sizes in turn, and the outputs' zero labels."""
    run = garbler.garbling(plan, zero.shape[1], zero)
    tables, turn = bytearray(), 0
    while left := run.tables_left:
        buffer = np.empty(sizes[turn % len(sizes)], np.uint8)
        count = run.next(buffer)
        assert count == 32 * min(len(buffer) // 32, left)
        tables += buffer[:count].tobytes()
        turn += 1
    return bytes(tables), run.outputs()


def evaluate(evaluator, plan, active, tables, counts=(1000,)):
    run = evaluator.evaluation(plan, active.shape[1], active)
    turn = 0
    while tables:
        size = 32 * counts[turn % len(counts)]
        run.next(tables[:size])
        tables, turn = tables[size:], turn + 1
    assert run.tables_left == 0
    return run.outputs()


def drawn(seed, inputs, lanes):
    rng = np.random.default_rng(seed)
    zero = rng.integers(0, 256, (inputs, lanes, 16), dtype=np.uint8)
    bits = rng.integers(0, 2, (inputs, lanes), dtype=np.uint8)
    return zero, bits, zero ^ bits[..., None] * OFFSET


def wide_netlist(gates, inputs, seed):
    """Many gates of all kinds over few inputs, deep and wide."""
    rng = np.random.default_rng(seed)
    ops = rng.choice([Op.XOR, Op.AND, Op.NOT, Op.CONST, Op.COPY], size=gates, p=[0.3, 0.55, 0.1, 0.02, 0.03])
    wires = np.arange(inputs, inputs + gates)
    a, b = rng.integers(0, wires), rng.integers(0, wires)
    a, b = np.where(ops == Op.CONST, a % 2, a), np.where(ops <= Op.AND, b, 0)
    return Netlist((inputs,), (64,), ops, a, b, rng.integers(inputs + gates - 80, inputs + gates, 64))


def views(array):
    """Other looks of the same bytes, and whether the binding may take them."""
    flat = np.ascontiguousarray(array)
    spaced = np.zeros((*flat.shape[:-1], 2 * flat.shape[-1]), np.uint8)
    spaced[..., ::2] = flat
    shifted = np.zeros(flat.nbytes + 17, np.uint8)
    start = 1 + -(shifted.ctypes.data) % 16
    shifted[start : start + flat.nbytes] = flat.ravel()
    frozen = flat.copy()
    frozen.flags.writeable = False
    yield flat.tobytes(), True
    yield bytearray(flat.tobytes()), True
    yield memoryview(flat), True
    yield frozen, True
    yield flat.view(np.uint64), True
    yield shifted[start : start + flat.nbytes], True
    yield spaced[..., ::2], False
    yield flat[::-1], False
    yield np.asfortranarray(flat), False
