"""``deepseal defense serve`` under load: no answer lost or mixed up, bounded memory, the same scores after a kill.

    python benchmarks/defense_service.py [--requests N] [--clients N]

The service is a process of its own, its monitor the preset ``fast`` of a network on MNIST; the clients ask for one to
four test images a request over connections that they keep, one request in a hundred malformed. Every answer is compared
with ``Monitor.judge``. Then the process is killed and started again. The sequential test of the alarm rate is measured
on simulated streams.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from defense_nets import lenet_like  # noqa: E402

from deepseal.adapter import Recipe, initialise, load_data, train  # noqa: E402
from deepseal.defense.drift import AlarmDrift  # noqa: E402
from deepseal.defense.monitor import Detection, Monitor, calibrate, fit_monitor  # noqa: E402
from deepseal.defense.monitor_file import load_monitor, save_monitor  # noqa: E402
from deepseal.defense.presets import choose  # noqa: E402
from deepseal.record import Run  # noqa: E402
from deepseal.rng import Rng  # noqa: E402
from deepseal.statistics import rate as rate_of  # noqa: E402

HERE = Path(__file__).resolve().parent
RECORD = HERE / "defense-service.json"
ARCHITECTURE = f"defense_nets:{lenet_like.__name__}"
INFER = "/v2/models/monitor/infer"
FITTED, EPOCHS, MALFORMED = 10_000, 2, 0.01
STREAMS, STREAM, BLOCK = 1000, 20_000, 50


def make(folder: Path) -> None:
    data = load_data("mnist")
    start = initialise(ARCHITECTURE, data.spec, Rng(0))
    some = data.train.take(torch.arange(FITTED))
    model = train(start, some, recipe=Recipe(epochs=EPOCHS), rng=Rng(0))
    fitted = fit_monitor(model, some, choose(model, ["fast"]).detectors, rng=Rng(0))
    save_monitor(calibrate(fitted, data.calibration, rng=Rng(0)), folder)


@contextmanager
def process(folder: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    command = [sys.executable, "-m", "deepseal", "defense", "serve", str(folder), "--arch", ARCHITECTURE]
    command += ["--listen", "127.0.0.1:0"]
    paths = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": paths}) as child:
        try:
            assert child.stderr is not None
            line = child.stderr.readline()
            found = re.search(r"http://\S+(?=;)", line)
            assert found, line + child.stderr.read()
            yield child, found[0]
        finally:
            child.kill()


def ask(connection: http.client.HTTPConnection, body: bytes) -> tuple[int, dict[str, Any]]:
    connection.request("POST", INFER, body, {"Content-Type": "application/json"})
    reply = connection.getresponse()
    return reply.status, json.loads(reply.read())


def body_of(x: torch.Tensor, name: str) -> bytes:
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": x.reshape(-1).tolist()}
    return json.dumps({"id": name, "inputs": [tensor]}).encode()


def malformed(draw: random.Random, good: bytes) -> bytes:
    return draw.choice([b"{", good[: len(good) // 2], good.replace(b"FP32", b"FP31"), good.replace(b"28]", b"27]")])


def same(found: dict[str, list[Any]], expected: Detection, rows: list[int], limits: torch.Tensor) -> tuple[bool, float]:
    score = expected.score[rows]
    off = float((torch.tensor(found["score"]) - score).abs().max()) if len(found["score"]) == len(rows) else np.inf
    edge = (score - limits[rows]).abs() < 1e-3
    alarms = all(
        bool(a) == bool(b) or bool(e) for a, b, e in zip(found["alarm"], expected.alarm[rows], edge, strict=True)
    )
    return found["prediction"] == expected.predicted[rows].tolist() and alarms and off < 1e-3, off


def client(
    url: str, number: int, count: int, x: torch.Tensor, expected: Detection, limits: torch.Tensor
) -> dict[str, Any]:
    draw, parts = random.Random(number), urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
    statuses: Counter[str] = Counter()
    wrong, worst, seconds = 0, 0.0, []
    for turn in range(count):
        rows = [draw.randrange(len(x)) for _ in range(draw.choice([1, 1, 1, 1, 2, 4]))]
        name, bad = f"{number}-{turn}", draw.random() < MALFORMED
        body = body_of(x[rows], name)
        begun = time.perf_counter()
        status, reply = ask(connection, malformed(draw, body_of(x[rows[:1]], name)) if bad else body)
        seconds.append(time.perf_counter() - begun)
        statuses[f"{'malformed' if bad else 'sound'}: {status}"] += 1
        if bad:
            wrong += not (400 <= status < 500 and set(reply) == {"error"} and "\n" not in reply["error"])
        elif status == 200:
            columns = {output["name"]: output["data"] for output in reply["outputs"]}
            fine, off = same(columns, expected, rows, limits)
            wrong += not (fine and reply["id"] == name)
            worst = max(worst, off)
        else:
            wrong += 1
    connection.close()
    return {"statuses": statuses, "wrong": wrong, "worst": worst, "seconds": seconds}


def memory(process_id: int) -> float:
    """Resident MiB of a process."""
    return int(re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process_id}/status").read_text())[1]) / 1024  # type: ignore[index]


def load(url: str, child: int, monitor: Monitor, x: torch.Tensor, requests: int, clients: int) -> dict[str, Any]:
    expected = monitor.judge(x)
    limits = monitor.limits(expected.predicted)
    warm = client(url, 10_000, 100, x, expected, limits)
    assert warm["wrong"] == 0
    before = memory(child)
    begun = time.perf_counter()
    with ThreadPoolExecutor(clients) as pool:
        share = requests // clients
        found = list(pool.map(lambda number: client(url, number, share, x, expected, limits), range(clients)))
    wall = time.perf_counter() - begun
    seconds = sorted(value for one in found for value in one["seconds"])
    return {
        "requests": sum(sum(one["statuses"].values()) for one in found),
        "statuses": dict(sum((one["statuses"] for one in found), Counter())),
        "lost, mixed up or unclear": sum(one["wrong"] for one in found),
        "largest score difference": max(one["worst"] for one in found),
        "resident MiB before and after": [before, memory(child)],
        "requests a second": len(seconds) / wall,
        "milliseconds: median, 99 %, longest": [1e3 * seconds[int(q * (len(seconds) - 1))] for q in (0.5, 0.99, 1.0)],
    }


def restart(folder: Path, x: torch.Tensor) -> bool:
    """Whether a service that was killed says the same after its restart, to the last bit."""
    answers = []
    for _ in range(2):
        with process(folder) as (child, url):
            parts = urlsplit(url)
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port, timeout=120)
            answers.append(ask(connection, body_of(x[:64], "same")))
            child.send_signal(signal.SIGKILL)
            child.wait(30)
    return answers[0] == answers[1] and answers[0][0] == 200


def drift() -> dict[str, Any]:
    """How often the test is wrong on streams that keep a promise of 1 %, and how soon it sees a higher rate."""
    wrong = [_watched(seed, 0.01, 0, STREAM) for seed in range(STREAMS)]
    found: dict[str, Any] = {
        "promised": 0.01,
        "stated error": 0.01,
        "read every so many inputs": BLOCK,
        "false reports": rate_of(sum(one is not None for one in wrong), STREAMS).as_dict(),
        "inputs a stream": STREAM,
    }
    for rate in (0.02, 0.03, 0.05, 0.1):
        for quiet in (0, 100_000):
            seen = [_watched(10_000 + seed, rate, quiet, 100_000) for seed in range(100 if not quiet else 20)]
            times = [float("inf") if one is None else one for one in seen]
            found[f"inputs until {rate:g} is seen, after {quiet} at 0.008"] = statistics.median(times)
    return found


def _watched(seed: int, rate: float, quiet: int, most: int) -> int | None:
    draw, state, done = np.random.default_rng(seed), AlarmDrift(0.01, 0.01), 0
    while done < quiet:
        state, done = state.seen(500, int(draw.binomial(500, 0.008))), done + 500
    while done < quiet + most:
        state, done = state.seen(BLOCK, int(draw.binomial(BLOCK, rate))), done + BLOCK
        if state.drifted:
            return done - quiet
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--clients", type=int, default=8)
    options = parser.parse_args()
    torch.set_num_threads(1)
    params = {"requests": options.requests, "clients": options.clients, "malformed": MALFORMED, "fitted": FITTED}
    run = Run("benchmark.defense-service", seed=0, params=params)
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "monitor"
        make(folder)
        monitor, x = load_monitor(folder, architecture=ARCHITECTURE), load_data("mnist").test.tensor
        with process(folder) as (child, url):
            run.results["load"] = load(url, child.pid, monitor, x, options.requests, options.clients)
        run.results["same after kill -9 and restart"] = restart(folder, x)
    run.results["drift"] = drift()
    run.results["load average"] = list(os.getloadavg())
    run.record().write(RECORD, force=True)
    print(RECORD.read_text())


if __name__ == "__main__":
    main()
