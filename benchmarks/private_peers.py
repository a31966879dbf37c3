"""Peers on an exported network: SPU (CHEETAH) or CrypTen, two processes over loopback, batch 1.

    python private_peers.py spu|crypten FOLDER CORE CORE

Runs in an environment of its own (``pip install "spu==0.9.5" "numpy<2" "torch>=2.6" omegaconf pyyaml onnx`` and, as its
requirements cannot be met any more, ``pip install --no-deps crypten``); our own environment must not import it. Prints
one line of JSON. Where it may, it works in a network namespace of its own, so that every byte on its loopback device is
the peers'. Both stop at the logits, which is less than the argmax that DeepSeal adds.
"""

import importlib.metadata
import json
import multiprocessing
import os
import queue
import subprocess
import sys
import tempfile
import time
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np  # noqa: E402
from private_peers_systems import LIMIT, Crypten, Spu, spu_program  # noqa: E402

BUDGET = 60.0  # seconds of later runs, about
LATER = 20  # of these at most
SETTINGS = {
    "spu": {"64-bit ring": {"field": "FM64", "fraction": 18}, "32-bit ring": {"field": "FM32", "fraction": 8}},
    "crypten": {"64-bit ring": {}},
}


def party(kind, rank, core, folder, setting, inbox, results):
    """One process: a first run, then later ones while the budget lasts."""
    os.sched_setaffinity(0, {core})
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        clock = time.perf_counter()
        own = {"spu": Spu, "crypten": Crypten}[kind](rank, Path(folder), setting, inbox)
        ready = time.perf_counter() - clock
        spent = 0.0
        for number in range(1 + LATER):
            own.meet()
            before = traffic()
            own.meet()
            seconds, answer = own.run(number % len(own.x))
            own.meet()
            results.put(("run", rank, number, seconds, traffic() - before, answer))
            spent += seconds if number else 0.0
            if rank == 0:
                setting["go"].value = int(spent < BUDGET)
            own.meet()
            if not setting["go"].value:
                break
        results.put(("end", rank, ready))
    except BaseException as error:
        results.put(("error", rank, f"{type(error).__name__}: {error}"[:400]))
    results.close()
    results.join_thread()
    os._exit(0)  # neither peer always ends by itself


def traffic():
    """Bytes that the loopback device of this namespace has sent."""
    line = next(line for line in Path("/proc/self/net/dev").read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9])


def measure(kind, folder, cores, setting, alone):
    """One setting of a peer."""
    context = multiprocessing.get_context("spawn")
    results, inboxes = context.Queue(), [context.Queue(), context.Queue()]
    shared = {
        **setting,
        "barrier": context.Barrier(2),
        "go": context.Value("i", 1),
        "port": 21000 + os.getpid() % 9000,
        "meeting": tempfile.mktemp(),
    }
    logits = np.load(folder / "arrays.npz")["logits"]
    combine, samples = None, None
    if kind == "spu":
        executable, weights, samples, combine = spu_program(folder, setting)
        for rank in range(2):
            inboxes[rank].put((executable, weights[rank]))
            for number in range(1 + LATER):
                inboxes[rank].put(samples[number % len(samples)][rank])
    processes = [
        context.Process(target=party, args=(kind, r, cores[r], str(folder), shared, inboxes[r], results), daemon=True)
        for r in range(2)
    ]
    for process in processes:
        process.start()
    runs, ready, ended, end = {}, {}, 0, time.monotonic() + LIMIT
    try:
        while ended < 2:
            try:
                what, rank, *rest = results.get(timeout=5)
            except queue.Empty:
                dead = [process.exitcode for process in processes if process.exitcode]
                if dead:
                    raise RuntimeError(f"a party ended with status {dead[0]} after {len(runs)} runs") from None
                if time.monotonic() > end:
                    raise RuntimeError(f"not done after {LIMIT:g} s, {len(runs)} runs") from None
                continue
            if what == "error":
                raise RuntimeError(rest[0])
            if what == "end":
                ready[rank], ended = rest[0], ended + 1
            else:
                runs.setdefault(rest[0], {})[rank] = rest[1:]
    finally:
        for process in processes:
            process.kill()
            process.join()
        for inbox in inboxes:
            inbox.cancel_join_thread()  # what nobody took must not keep us
    answers = {}
    for number in range(len(runs)):
        both = [runs[number][rank][2] for rank in range(2)]
        answers[number % len(logits)] = np.asarray(combine(both) if combine else both[0]).reshape(-1)
    later = sorted(1000 * runs[number][0][0] for number in range(1, len(runs)))
    wanted = np.array([logits[i] for i in answers])
    got = np.array(list(answers.values()))
    return {
        "ready_ms": 1000 * max(ready.values()),
        "first_ms": 1000 * runs[0][0][0],
        "later_ms": {"median": float(np.median(later)), "lowest": later[0], "highest": later[-1]},
        "later_n": len(later),
        "first_bytes": runs[0][0][1] if alone else None,
        "bytes": int(np.median([runs[n][0][1] for n in range(1, len(runs))])) if alone else None,
        "same_label": int((wanted.argmax(1) == got.argmax(1)).sum()),
        "samples": len(wanted),
        "largest_error": float(np.abs(wanted - got).max()),
    }


def own_network():
    """Whether we are in a network namespace of our own, with its loopback device up."""
    if os.environ.get("DEEPSEAL_ALONE") == "1":
        return subprocess.run(["ip", "link", "set", "lo", "up"]).returncode == 0
    probe = subprocess.run(["unshare", "--net", "true"], capture_output=True)
    if probe.returncode == 0:
        os.environ["DEEPSEAL_ALONE"] = "1"
        os.execvp("unshare", ["unshare", "--net", sys.executable, *sys.argv])
    return False


def main():
    kind, folder, cores = sys.argv[1], Path(sys.argv[2]), [int(core) for core in sys.argv[3:5]]
    alone = own_network()
    runs = {}
    for label, setting in SETTINGS[kind].items():
        try:
            runs[label] = measure(kind, folder, cores, setting, alone)
        except Exception as error:
            runs[label] = {"error": f"{type(error).__name__}: {error}"[:400]}
    print(
        json.dumps(
            {
                "version": f"{kind} {importlib.metadata.version(kind)}",
                "settings": SETTINGS[kind],
                "bytes_are": "of the loopback device, with the headers of TCP and IP",
                "runs": runs,
            }
        )
    )


if __name__ == "__main__":
    main()
