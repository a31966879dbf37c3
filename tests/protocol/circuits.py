"""Circuits between two parties over memory and TCP, for tests of the protocol."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from meddling import Dealt
from parties import together

from deepseal.secure_inference.netlist import read_bristol
from deepseal.secure_inference.protocol.circuit import run_circuit
from deepseal.secure_inference.protocol.extension import TransferSettings
from deepseal.secure_inference.protocol.parties import Settings
from deepseal.secure_inference.transport import TransportError, connect, listen, memory_pair

OWN = Path(__file__).parents[1] / "data" / "bristol"
PUBLIC = Path(os.environ.get("DEEPSEAL_DATA", "/nonexistent")) / "bristol"
needs_circuits = pytest.mark.skipif(not PUBLIC.is_dir(), reason="DEEPSEAL_DATA names no folder with bristol/")
SUBTRACT = read_bristol(OWN / "subtract8.txt")
DEALT = Settings(TransferSettings(base=Dealt()))
MASK = 2**64 - 1
MEANINGS = {
    "adder64": lambda x, y: x + y & MASK,
    "sub64": lambda x, y: x - y & MASK,
    "mult64": lambda x, y: x * y & MASK,
    "neg64": lambda x: -x & MASK,
    "zero_equal": lambda x: int(x == 0),
}


def over_memory(netlist, x, y, **options):
    left, right = memory_pair(timeout=20)
    return played(left, right, netlist, x, y, **options)


def played(left, right, netlist, x, y, **options):
    def side(channel, role, values):
        def run():
            with channel:
                return run_circuit(channel, role, netlist, values, **options)

        return run

    return together(side(left, "garbler", x), side(right, "evaluator", y))


def over_tcp(netlist, x, y, tls=(None, None), **options):
    with listen("127.0.0.1:0", tls=tls[0], timeout=20) as listener:
        channels = together(listener.accept, lambda: connect(listener.address, tls=tls[1], timeout=20))
    return played(*channels, netlist, x, y, **options)


def outputs(results):
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result.output for result in results]


def sides(x=(9,), y=(5,), **options):
    """Both sides of the subtraction; a call that fails must have closed its channel by itself."""

    def side(role, values):
        def run(channel):
            try:
                return run_circuit(channel, role, SUBTRACT, values, **options)
            except TransportError:
                assert repr(channel) == "<Channel plain, closed>"
                raise

        return run

    return side("garbler", x), side("evaluator", y)
