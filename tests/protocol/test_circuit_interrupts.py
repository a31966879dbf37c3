"""Interrupts of the command line while circuits are computed: nothing is left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from circuits import OWN, SUBTRACT

from deepseal.secure_inference.protocol.parties import Settings, start_evaluator, start_garbler
from deepseal.secure_inference.transport import Kind, TransportError, listen

# The command line, and two commands more that compute for hours: alone, and between two processes.
COMMANDS = """
import sys
from deepseal.apps.cli import app, main
from deepseal.secure_inference.protocol import bench

@app.command()
def memory():
    bench.bench_memory("portable", seconds=3600)

@app.command()
def pair():
    bench.bench_pair(gates=10**14)

sys.argv = ["deepseal", *sys.argv[1:]]
main()
"""


def deepseal(*words):
    command = [sys.executable, "-c", COMMANDS, *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def interrupted(process):
    """Send Ctrl-C: seconds to the end, and what was written to stderr."""
    start = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=30)
    seconds = time.monotonic() - start
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err and "Error" not in err
    assert len(err.splitlines()) <= 1
    return seconds


class TestInterrupts:
    def test_a_party_that_waits_for_the_other(self):
        with deepseal(
            "private", "circuit", "run", OWN / "subtract8.txt", "--role", "garbler", "--listen", "0", "--input", "5"
        ) as process:
            assert "waiting for the other party on" in process.stderr.readline()
            assert interrupted(process) < 2

    @pytest.mark.parametrize("role", ["garbler", "evaluator"])
    def test_a_party_whose_peer_stalls_in_the_session(self, role):
        other = {"garbler": "evaluator", "evaluator": "garbler"}[role]
        with listen("127.0.0.1:0", tls=None, timeout=20) as listener:
            words = ["--role", role, "--connect", listener.address, "--input", "5"]
            with (
                deepseal("private", "circuit", "run", OWN / "subtract8.txt", *words) as process,
                listener.accept() as channel,
            ):
                start = start_garbler if other == "garbler" else start_evaluator
                parameters = {"owners": "garbler,evaluator", "readers": "both"}
                start(channel, program=SUBTRACT.digest(), parameters=parameters, settings=Settings())
                time.sleep(0.3)
                assert interrupted(process) < 2
                with pytest.raises(TransportError):
                    channel.receive(Kind.INPUT, at_most=16)
                    channel.receive(Kind.DONE, at_most=0)

    @pytest.mark.parametrize("phase", ["memory", "pair"])
    def test_a_party_that_computes(self, phase):
        with deepseal(phase) as process:
            deadline = time.monotonic() + 60
            while not computing(process.pid, children=phase == "pair"):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            time.sleep(1)
            descendants = children_of(process.pid)
            assert interrupted(process) < 2
            for pid in descendants:  # and nothing is left behind
                deadline = time.monotonic() + 5
                while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
                    time.sleep(0.05)
                assert not Path(f"/proc/{pid}").exists()


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def computing(pid, *, children):
    """Whether the engine is loaded, and the second process too, if there is to be one."""
    every = [str(pid), *children_of(pid)]
    loaded = all("_native" in Path(f"/proc/{each}/maps").read_text() for each in every)
    return loaded and len(every) == 1 + children
