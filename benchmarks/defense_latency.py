"""Latency and throughput of a monitor with the preset ``fast``: eager, compiled, and in ONNX Runtime, on one thread.

    python benchmarks/defense_latency.py [--rounds N]

The victim is the LeNet-like network on MNIST. Every part runs in turns; a figure is the median over the rounds with the
lowest and the highest, so that a busy machine shows. ``load average`` stands beside them: figures are for comparison
only where it is below 1 besides the benchmark itself.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import onnxruntime  # noqa: E402
import torch  # noqa: E402
from defense_nets import lenet_like  # noqa: E402

from deepseal.adapter import Classifier, Recipe, initialise, load_data, train  # noqa: E402
from deepseal.defense.base import DETECTORS  # noqa: E402
from deepseal.defense.context import contexts  # noqa: E402
from deepseal.defense.graph import exported, write_onnx  # noqa: E402
from deepseal.defense.monitor import Monitor, calibrate, fit_monitor  # noqa: E402
from deepseal.defense.presets import choose  # noqa: E402
from deepseal.record import Run  # noqa: E402
from deepseal.rng import Rng  # noqa: E402

RECORD = Path(__file__).resolve().parent / "defense-latency.json"
ARCHITECTURE = f"defense_nets:{lenet_like.__name__}"
FITTED, BATCH = 10_000, 512
GAUSSIAN = ("density", "hdda")

Parts = dict[str, Callable[[], Any]]


def measured(parts: Parts, rounds: int) -> dict[str, list[float]]:
    """Milliseconds of each part, all in turns."""
    seen: dict[str, list[float]] = {name: [] for name in parts}
    for index in range(rounds + 3):
        for name, part in parts.items():
            begun = time.perf_counter()
            part()
            if index >= 3:
                seen[name].append(1e3 * (time.perf_counter() - begun))
    return seen


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def session(path: Path) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def parts_for(monitor: Monitor, compiled: Any, sessions: dict[str, onnxruntime.InferenceSession], x: Any) -> Parts:
    model, array = monitor.model, x.numpy()
    assert isinstance(model, Classifier)
    return {
        "victim, eager": lambda: model.query(x),
        "monitor, eager": lambda: monitor.judge(x, batch=len(x)),
        "monitor, compiled": lambda: compiled(x),
        **{f"{name}, ONNX Runtime": lambda s=one: s.run(None, {"input": array}) for name, one in sessions.items()},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    params = {"rounds": options.rounds, "fitted": FITTED, "batch": BATCH, "threads": 1, "architecture": ARCHITECTURE}
    run = Run("benchmark.defense-latency", seed=0, params=params)
    before = list(os.getloadavg())
    data = load_data("mnist")
    some, x = data.train.take(torch.arange(FITTED)), data.test.tensor
    with torch.enable_grad():
        model = train(initialise(ARCHITECTURE, data.spec, Rng(0)), some, recipe=Recipe(epochs=2), rng=Rng(0))
        fitted = fit_monitor(model, some, choose(model, ["fast"]).detectors, rng=Rng(0))
    monitor = calibrate(fitted, data.calibration, rng=Rng(0))
    compiled = torch.compile(exported(monitor).module())
    with tempfile.TemporaryDirectory() as place:
        written = write_onnx(monitor, Path(place) / "monitor.onnx")
        batch = torch.export.Dim("batch", min=1)
        plain = torch.export.export(model.module.eval(), (x[:3],), dynamic_shapes=({0: batch},))
        victim = torch.onnx.export(plain, dynamo=True, input_names=["input"], verbose=False)
        assert victim is not None
        (Path(place) / "victim.onnx").write_bytes(victim.model_proto.SerializeToString())
        sessions = {name: session(Path(place) / f"{name}.onnx") for name in ("victim", "monitor")}
        run.results["members"] = [member.title for member in monitor.members]
        run.results["score difference of ONNX Runtime"] = written.difference
        for count, rounds in ((1, options.rounds), (BATCH, max(5, options.rounds // 10))):
            seen = measured(parts_for(monitor, compiled, sessions, x[:count].contiguous()), rounds)
            row: dict[str, Any] = {f"{name}, ms": spread(values) for name, values in seen.items()}
            row["samples a second"] = {name: 1e3 * count / statistics.median(values) for name, values in seen.items()}
            over = {"eager": "victim, eager", "compiled": "victim, eager", "ONNX Runtime": "victim, ONNX Runtime"}
            row["over the victim, ms: median, lowest"] = {
                kind: [take(seen[f"monitor, {kind}"]) - take(seen[base]) for take in (statistics.median, min)]
                for kind, base in over.items()
            }
            run.results[f"batch {count}"] = row
    run.results["Gaussian detectors, samples a second of processor time"] = gaussians(monitor.model, some, x[:2048])
    run.results["load average before and after"] = [before, list(os.getloadavg())]
    run.record().write(RECORD, force=True)
    print(RECORD.read_text())


def gaussians(model: Any, some: Any, x: torch.Tensor) -> dict[str, Any]:
    """Samples a second of each Gaussian detector by itself, beside the shared pass that it reads."""
    found = {}
    for name in GAUSSIAN:
        for place in ("early", "last"):
            detector = DETECTORS.build(name, {"layer": place}).placed(model)
            state = fit_monitor(model, some, [detector], rng=Rng(0)).members[0].state
            ready = list(contexts(model, x, detector.needs.taps))
            parts: Parts = {
                "the detector": lambda d=detector, r=ready, s=state: [d.score(one, s) for one in r],
                "the shared pass": lambda d=detector: list(contexts(model, x, d.needs.taps)),
            }
            rates: dict[str, list[float]] = {part: [] for part in parts}
            for _ in range(6):
                for part, work in parts.items():
                    begun = time.process_time()
                    work()
                    rates[part].append(len(x) / max(1e-9, time.process_time() - begun))
            found[f"{name}@{place}"] = {part: spread(values[1:]) for part, values in rates.items()}
    return found


if __name__ == "__main__":
    main()
