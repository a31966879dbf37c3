"""The two parties of a measurement, each in a process of its own, pinned to a core of its own.

    python private_parties.py server|client      (options as one line of JSON on standard input)

The server says where it listens, serves until its standard input closes, and then says how it went. The client asks
its questions and says what they took. ``measure`` starts both and ends both, whatever happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")

HERE = Path(__file__).resolve().parent
PEERS = ("spu", "crypten")
CORES = tuple(sorted(os.sched_getaffinity(0)))
PATIENCE = 60.0  # seconds a party waits for the other one
WARM = 3  # questions before the timed ones


@dataclass(frozen=True)
class Mode:
    """A protocol as the harness sees it: what the server, the client and the connection are called with (plain values).

    Args:
        server: further keyword arguments of ``Server``.
        serve: of ``Server.serve``.
        client: of ``Client.connect``.
        ask: of ``Client.ask``.
        ahead: call ``Client.prepare`` before each question, timed apart.
        programs: settings of ``compile_model``.
    """

    server: Mapping[str, Any] = field(default_factory=dict)
    serve: Mapping[str, Any] = field(default_factory=dict)
    client: Mapping[str, Any] = field(default_factory=dict)
    ask: Mapping[str, Any] = field(default_factory=dict)
    ahead: bool = False
    programs: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Link:
    """What stands between the parties.

    Args:
        server: command that the server's is put behind (to enter a network namespace).
        client: the client's.
        listen: address that the server listens on.
        connect: address that the client connects to; None: where the server listens.
    """

    server: tuple[str, ...] = ()
    client: tuple[str, ...] = ()
    listen: str = "127.0.0.1:0"
    connect: str | None = None


def measure(
    folder: Path,
    inputs: Path,
    *,
    mode: Mode | None = None,
    batch: int = 1,
    questions: int = 20,
    sessions: int = 3,
    warm: int = WARM,
    tls: Sequence[Sequence[str]] | None = None,
    link: Link | None = None,
    limit: float = 1800.0,
) -> dict[str, Any]:
    """Both parties' figures.

    Args:
        folder: of the program; only the server reads its secret half.
        inputs: ``.npy`` with samples in data space.
        mode: the protocol.
        batch: samples a question.
        questions: timed ones, in the last session.
        sessions: how often to set up.
        warm: questions before the timed ones.
        tls: certificate, key and CA of the server and of the client.
        link: what stands between them.
        limit: seconds that all of it may take.

    Raises:
        RuntimeError: a party failed; with its message.
    """
    mode, link = mode or Mode(), link or Link()
    common = {"folder": str(folder), "patience": PATIENCE}
    serving = {**common, "address": link.listen, "options": dict(mode.server), "serve": dict(mode.serve),
               "core": CORES[0], "tls": tls and list(tls[0])}  # fmt: skip
    with party("server", serving, link.server) as server:
        address = link.connect or said(server, limit)["address"]
        if link.connect is not None:
            said(server, limit)
        asking = {**common, "address": address, "options": dict(mode.client), "ask": dict(mode.ask),
                  "core": CORES[-1], "tls": tls and list(tls[1]), "inputs": str(inputs), "batch": batch,
                  "questions": questions, "sessions": sessions, "warm": warm, "ahead": mode.ahead}  # fmt: skip
        with party("client", asking, link.client) as client:
            result = said(client, limit)
        assert server.stdin is not None
        server.stdin.close()
        result["server"] = said(server, limit)
    return result


@contextlib.contextmanager
def party(role: str, options: Mapping[str, Any], prefix: Sequence[str]) -> Iterator[subprocess.Popen[str]]:
    """A party's process, which is gone when the block ends."""
    command = [*prefix, sys.executable, str(Path(__file__).resolve()), role]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            assert process.stdin is not None
            process.stdin.write(json.dumps(options) + "\n")
            process.stdin.flush()
            yield process
            process.stdin.close()
            process.wait(10)
        finally:
            process.kill()


def run_peer(python: str, system: str, folder: Path, cores: Sequence[int], limit: float = 3000.0) -> dict[str, Any]:
    """What ``private_peers.py`` says, run by another environment's Python on an exported network.

    Raises:
        RuntimeError: it said nothing, or not in time.
    """
    command = [python, str(HERE / "private_peers.py"), system, str(folder), str(cores[0]), str(cores[-1])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                          start_new_session=True) as process:  # fmt: skip
        try:
            output, complaints = process.communicate(timeout=limit)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{system} was not done after {limit:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # its children, too
    lines = [line for line in output.splitlines() if line.startswith("{")]
    if not lines:
        raise RuntimeError(f"{system} ended with status {process.returncode}: {complaints.strip()[-400:]}")
    return cast("dict[str, Any]", json.loads(lines[-1]))


def said(process: subprocess.Popen[str], limit: float) -> dict[str, Any]:
    """The next line of a party."""
    stream = cast("IO[str]", process.stdout)
    if not select.select([stream], [], [], limit)[0]:
        raise RuntimeError(f"expected a line from {process.args!r} within {limit:g} s, found none")
    line = stream.readline()
    answer = json.loads(line) if line else {"error": f"ended with status {process.wait(10)}"}
    if "error" in answer:
        raise RuntimeError(str(answer["error"]))
    return cast("dict[str, Any]", answer)


def tell(**values: Any) -> None:
    sys.stdout.write(json.dumps(values) + "\n")
    sys.stdout.flush()


def usage() -> dict[str, Any]:
    """Peak resident memory of this program (not, as ``ru_maxrss``, of whoever started it), processor time up to now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    peak = next(int(line.split()[1]) for line in lines if line.startswith("VmHWM"))
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {"peak_kib": peak, "cpu_seconds": used.ru_utime + used.ru_stime}


def serve(options: Mapping[str, Any]) -> None:
    from deepseal.secure_inference.compile import Program, Weights
    from deepseal.secure_inference.roles.server import Served, Server
    from deepseal.secure_inference.transport import Tls

    os.sched_setaffinity(0, {options["core"]})
    program = Program.load(Path(options["folder"]))
    sessions: list[Served] = []
    server = Server(program, Weights.load(Path(options["folder"]), program), timeout=options["patience"],
                    report=sessions.append, **options["options"])  # fmt: skip
    before = usage()

    def wait() -> None:
        sys.stdin.read()
        server.stop()

    threading.Thread(target=wait, daemon=True).start()
    tls = Tls(*options["tls"]) if options["tls"] else None
    server.serve(options["address"], tls=tls, allow_plain=True, ready=lambda at: tell(address=at), **options["serve"])
    errors = [one.error for one in sessions if one.error]
    last = sessions[-1] if sessions else None
    tell(sessions=len(sessions), errors=errors, loaded_kib=before["peak_kib"], **usage(),
         bytes_sent=last and last.bytes_sent, bytes_received=last and last.bytes_received)  # fmt: skip


def ask(options: Mapping[str, Any]) -> None:
    import numpy as np

    from deepseal.secure_inference.compile import Program
    from deepseal.secure_inference.roles.client import Client
    from deepseal.secure_inference.transport import Tls

    os.sched_setaffinity(0, {options["core"]})
    program = Program.load(Path(options["folder"]) / "public")
    x = np.load(options["inputs"])
    tls = Tls(*options["tls"]) if options["tls"] else None
    before, setups, rows = usage(), [], []
    batch = options["batch"]

    def part(number: int) -> Any:
        return x[np.arange(number * batch, (number + 1) * batch) % len(x)]

    def question(client: Client, samples: Any) -> dict[str, Any]:
        prepared = vars(client.prepare(len(samples))) if options["ahead"] else None
        clock, seen = time.perf_counter(), client.counters.phases
        answer = client.ask(samples, **options["ask"])
        return {
            "whole_seconds": time.perf_counter() - clock,
            "seconds": answer.seconds,
            "bytes_sent": answer.bytes_sent,
            "bytes_received": answer.bytes_received,
            "phases": less(client.counters.phases, seen),
            "values": answer.values.tolist(),
            "prepared": prepared,
        }

    for session in range(options["sessions"]):
        clock = time.perf_counter()
        with Client.connect(
            program, options["address"], tls=tls, timeout=options["patience"], allow_plain=True, **options["options"]
        ) as client:
            whole, counters = time.perf_counter() - clock, client.counters
            setups.append(
                {
                    "whole_seconds": whole,
                    "seconds": client.setup_seconds,
                    "bytes_sent": counters.bytes_sent,
                    "bytes_received": counters.bytes_received,
                    "phases": {name: dict(phase) for name, phase in counters.phases.items()},
                    "first": question(client, part(0)),
                }
            )
            if session == options["sessions"] - 1:
                for _ in range(options["warm"]):
                    question(client, part(0))
                rows = [question(client, part(number)) for number in range(options["questions"])]
    tell(setups=setups, questions=rows, loaded_kib=before["peak_kib"], **usage())


def less(now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """What each phase cost since then."""
    nothing = {"bytes_sent": 0, "bytes_received": 0, "seconds": 0.0}
    return {
        name: {key: phase[key] - before.get(name, nothing)[key] for key in nothing}
        for name, phase in now.items()
        if phase["seconds"] > before.get(name, nothing)["seconds"]
    }


def main() -> None:
    options = json.loads(sys.stdin.readline())
    try:
        {"server": serve, "client": ask}[sys.argv[1]](options)
    except Exception as error:
        tell(error=f"{sys.argv[1]}: {type(error).__name__}: {error}")
        sys.exit(1)


if __name__ == "__main__":
    main()
