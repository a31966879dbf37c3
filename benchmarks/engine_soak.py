"""A long life in little: 2,000 sessions in one process without growth, 10,000 mutated frames without a crash.

Criterion: between the end of the warm-up (a tenth) and the end, resident memory grows by at most 4 MiB, and by 1 KiB a
session in the second half; open descriptors and threads do not grow at all. A mutated session must end, on both sides,
with a result or with one of our one-line errors, and within its time-outs. Most mutated sessions deal the base OTs in
the clear, which is quicker; every tenth runs the real ones.
"""

from __future__ import annotations

import argparse
import collections
import gc
import os
import random
import sys
import tempfile
import threading
import time
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "tests" / "protocol"))

from meddling import Dealt, Relay, meddled, party_of
from parties import open_descriptors, party, together

from deepseal.errors import TransportError
from deepseal.record import Run
from deepseal.secure_inference.netlist import read_bristol
from deepseal.secure_inference.protocol.circuit import CircuitResult
from deepseal.secure_inference.protocol.extension import TransferSettings
from deepseal.secure_inference.protocol.parties import Settings
from deepseal.secure_inference.transport import Kind, connect, listen, memory_pair

ROOT = Path(__file__).parents[1]
CIRCUIT = ROOT / "tests/data/bristol/subtract8.txt"
TLS_EVERY, REAL_EVERY, WORKERS = 20, 10, 8
MEMORY_BYTES, SESSION_BYTES = 4 * 2**20, 2**10
TIMEOUT = 1.0


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def state(sessions: int) -> dict[str, int]:
    gc.collect()
    return {
        "sessions": sessions,
        "resident_bytes": resident_bytes(),
        "descriptors": open_descriptors(),
        "threads": threading.active_count(),
    }


def session(netlist, x: int, y: int, files) -> None:
    if files is None:
        left, right = memory_pair(timeout=30)

        def garble():
            with left:
                return party_of("garbler", netlist, [x])(left)

        def evaluate():
            with right:
                return party_of("evaluator", netlist, [y])(right)

        results = together(garble, evaluate)
    else:
        with listen("127.0.0.1:0", tls=files.garbler, timeout=30) as listener:

            def garble():
                with listener.accept() as channel:
                    return party_of("garbler", netlist, [x])(channel)

            def evaluate():
                with connect(listener.address, tls=files.evaluator, timeout=30) as channel:
                    return party_of("evaluator", netlist, [y])(channel)

            results = together(garble, evaluate)
    for result in results:
        if isinstance(result, BaseException):
            raise result
        assert result.output == tuple(netlist.evaluate([x, y]))


def soak(sessions: int) -> dict[str, object]:
    """The states after the warm-up, in the middle and at the end, and whether they meet the criterion."""
    netlist, rng = read_bristol(CIRCUIT), random.Random(0)
    states, warm_up = [state(0)], sessions // 10
    marks = {warm_up, (warm_up + sessions) // 2, sessions}
    with tempfile.TemporaryDirectory() as folder:
        files = party(Path(folder) / "keys")
        for index in range(1, sessions + 1):
            over_tls = index % TLS_EVERY == 0
            session(netlist, rng.randrange(256), rng.randrange(256), files if over_tls else None)
            if index in marks:
                states.append(state(index))
                print(states[-1], file=sys.stderr, flush=True)
    _, warm, middle, last = states
    growth = last["resident_bytes"] - warm["resident_bytes"]
    later = (last["resident_bytes"] - middle["resident_bytes"]) / (last["sessions"] - middle["sessions"])
    steady = all(last[name] <= warm[name] for name in ("descriptors", "threads"))
    return {
        "states": states,
        "growth_bytes": growth,
        "growth_bytes_per_session_in_second_half": later,
        "passed": growth <= MEMORY_BYTES and later <= SESSION_BYTES and steady,
    }


def mutation(rng: random.Random):
    """One frame of one side, changed in one way; the rest of the session is honest."""
    sender, target = rng.choice(("garbler", "evaluator")), rng.randrange(7)
    kind, seed = rng.choice(("flip", "cut", "grow", "retype", "raw flip", "repeat", "drop", "noise")), rng.random()

    def change(side, index, frame):
        if (side, index) != (sender, target):
            return [frame]
        inner = random.Random(seed)
        data = bytearray(frame.payload)
        if kind == "flip" and data:
            data[inner.randrange(len(data))] ^= 1 << inner.randrange(8)
        elif kind == "cut":
            del data[inner.randrange(len(data) + 1) :]
        elif kind == "grow":
            data += inner.randbytes(inner.randrange(1, 200))
        elif kind == "noise":
            data = bytearray(inner.randbytes(len(data)))
        elif kind == "repeat":
            return [frame, frame]
        elif kind == "drop":
            return []
        elif kind == "raw flip":
            raw = bytearray(frame.packed())
            raw[inner.randrange(min(len(raw), 40))] ^= 1 << inner.randrange(8)
            return [bytes(raw)]
        new = inner.choice(list(Kind)) if kind == "retype" else frame.kind
        return [type(frame)(int(new), bytes(data), frame.number)]

    return change


def mutate(frames: int) -> dict[str, object]:
    """Outcomes of one session for each mutated frame."""
    netlist = read_bristol(CIRCUIT)
    outcomes: collections.Counter[str] = collections.Counter()
    faults: list[str] = []
    lock, numbers = threading.Lock(), iter(range(frames))

    def work() -> None:
        while True:
            with lock:
                number = next(numbers, None)
            if number is None:
                return
            rng = random.Random(number)
            options = {"readers": rng.choice(("both", "garbler", "evaluator"))}
            if number % REAL_EVERY:
                options["settings"] = Settings(TransferSettings(base=Dealt()))
            sides = [party_of(role, netlist, [rng.randrange(256)], **options) for role in ("garbler", "evaluator")]
            start = time.monotonic()
            try:
                results = meddled(Relay(mutation(rng)), *sides, timeout=TIMEOUT)
            except BaseException as error:
                results = [error]
            seconds = time.monotonic() - start
            with lock:
                for result in results:
                    outcomes[_outcome(result)] += 1
                    if _outcome(result) == "fault":
                        faults.append(f"frame {number}: {type(result).__name__}: {result}"[:300])
                if seconds > 10 * TIMEOUT:
                    faults.append(f"frame {number}: took {seconds:.0f} s")

    threads = [threading.Thread(target=work) for _ in range(WORKERS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"frames": frames, "outcomes": dict(outcomes), "faults": faults[:20], "passed": not faults}


def _outcome(result: object) -> str:
    if isinstance(result, CircuitResult):
        return "finished"
    dealt = isinstance(result, ValueError) and str(result) == "expected 128 pairs of keys"
    if dealt or (isinstance(result, TransportError) and "\n" not in str(result)):
        return "refused"
    return "fault"


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--sessions", type=int, default=2000, help="at least 20")
    arguments.add_argument("--frames", type=int, default=10_000)
    arguments.add_argument("--out", type=Path, default=Path(__file__).parent / "engine" / "soak.json")
    chosen = arguments.parse_args()
    run = Run("benchmark.engine-soak", seed=0, params={"sessions": chosen.sessions, "frames": chosen.frames})
    run.params.update(tls_every=TLS_EVERY, real_base_ot_every=REAL_EVERY, circuit=CIRCUIT.name)
    run.params.update(most_growth_bytes=MEMORY_BYTES, most_growth_bytes_per_session=SESSION_BYTES)
    run.results.update(soak=soak(chosen.sessions), mutations=mutate(chosen.frames))
    record = run.record()
    chosen.out.parent.mkdir(exist_ok=True)
    record.write(chosen.out, force=True)
    print(record.to_json())
    if not all(part["passed"] for part in run.results.values()):
        sys.exit("expected a soak without growth and faults, found some; see the record")


if __name__ == "__main__":
    main()
