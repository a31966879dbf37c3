"""What detectors cost on one core: the dictionary beside scikit-learn's pursuit, and every detector over the victim.

    python benchmarks/defense_speed.py [--rounds N] [--detectors NAME,...]

Samples per second of processor time, on MNIST test images, after one warming run; every part runs once a round, and a
figure is the median over the rounds with the lowest and the highest. A detector's own time is what it adds to one
shared pass, whose time stands beside it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from sklearn.linear_model import orthogonal_mp  # noqa: E402

from deepseal.adapter import Classifier, Dataset, Recipe, initialise, load_data, train  # noqa: E402
from deepseal.defense.base import DETECTORS, Detector  # noqa: E402
from deepseal.defense.context import Reference, contexts  # noqa: E402
from deepseal.defense.dictionary import Dictionary  # noqa: E402
from deepseal.defense.omp import residuals  # noqa: E402
from deepseal.record import Run  # noqa: E402
from deepseal.rng import Rng  # noqa: E402

RECORD = Path(__file__).resolve().parent / "defense-speed.json"
IMAGES, FITTED, EPOCHS = 2048, 5000, 1
TRAINED = 10_000
SPARSE = (5, 32)
SLOW_PATCHES = 1000  # scikit-learn codes these
SLOW = ("complementary", "constant")


def rate(count: int, part: Callable[[], Any]) -> float:
    begun = time.process_time()
    part()
    return count / max(1e-9, time.process_time() - begun)


def rounds(number: int, parts: dict[str, tuple[int, Callable[[], Any]]]) -> dict[str, Any]:
    seen: dict[str, list[float]] = {name: [] for name in parts}
    for _, part in parts.values():
        part()
    for _ in range(number):
        for name, (count, part) in parts.items():
            seen[name].append(rate(count, part))
    return {
        name: {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}
        for name, values in seen.items()
    }


def pursuit(model: Classifier, data: Dataset, number: int) -> dict[str, Any]:
    """Patches a second of the kernel and of scikit-learn; images a second of the whole detector, and its learning."""
    found: dict[str, Any] = {}
    images = data.test.tensor[:IMAGES]
    batches = list(contexts(model, images, ()))
    for shared in (False, True):
        learner = Dictionary(shared=shared).placed(model)
        begun = time.process_time()
        state = learner.fit(Reference(model, data.train.take(torch.arange(FITTED))), rng=Rng(0))
        kind = "shared" if shared else "per class"
        found[f"learning, {kind}, seconds"] = time.process_time() - begun
        for nonzeros in SPARSE:
            detector = Dictionary(shared=shared, nonzeros=nonzeros).placed(model)
            patches = detector._cut(images, model.spec.bounds).flatten(0, 1)
            patches = patches[(patches != 0).any(dim=1)]
            atoms, some = state["atoms"][0], patches[:SLOW_PATCHES]
            slow = (atoms.double().numpy().T, some.double().numpy().T)
            parts: dict[str, tuple[int, Callable[[], Any]]] = {
                "images": (len(images), lambda d=detector, s=state: [d.score(batch, s) for batch in batches]),
            }
            if shared:
                parts["patches"] = (len(patches), lambda a=atoms, p=patches, k=nonzeros: residuals(p, a, k))
                parts["patches, scikit-learn"] = (
                    len(some),
                    lambda s=slow, k=nonzeros: orthogonal_mp(*s, n_nonzero_coefs=k),
                )
            row = rounds(number, parts)
            if shared:
                row["times faster than scikit-learn"] = (
                    row["patches"]["median"] / row["patches, scikit-learn"]["median"]
                )
            row["patches an image that are not blank"] = len(patches) / len(images)
            found[f"{nonzeros} non-zeros, {kind}"] = row
    return found


def detectors(model: Classifier, data: Dataset, names: list[str], number: int, run: Run) -> dict[str, Any]:
    """Samples a second of each detector with its defaults; a detector that does not fit the model is noted."""
    images, found = data.test.tensor[:IMAGES], {}
    reference = Reference(model, data.train.take(torch.arange(FITTED)))
    for name in names:
        try:
            detector: Detector = DETECTORS.build(name, {}).placed(model)
            begun = time.process_time()
            state = detector.fit(reference, rng=Rng(0))
        except Exception as error:
            run.notes.append(f"{name}: {error}")
            continue
        seconds, taps = time.process_time() - begun, list(detector.needs.taps)
        batches = list(contexts(model, images, taps))
        parts: dict[str, tuple[int, Callable[[], Any]]] = {
            "the shared pass": (len(images), lambda t=taps: list(contexts(model, images, t))),
            "the detector": (len(images), lambda d=detector, s=state, b=batches: [d.score(one, s) for one in b]),
        }
        found[name] = {
            "fit, seconds": seconds,
            "further passes": detector.needs.passes,
            "state, MiB": sum(value.numel() * value.element_size() for value in state.values()) / 2**20,
            **rounds(number, parts),
        }
        print(name, found[name]["the detector"]["median"], flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--detectors", default=",".join(name for name in DETECTORS.names() if name not in SLOW))
    options = parser.parse_args()
    torch.set_num_threads(1)
    params = {
        "rounds": options.rounds,
        "images": IMAGES,
        "fitted on": FITTED,
        "trained on": TRAINED,
        "network": "lenet",
        "threads": 1,
    }
    run = Run("benchmark.defense-speed", seed=0, params=params)
    data = load_data("mnist")
    start = initialise("deepseal.adapter.zoo:lenet", data.spec, Rng(0))
    model = train(start, data.train.take(torch.arange(TRAINED)), recipe=Recipe(epochs=EPOCHS), rng=Rng(0))
    run.results["dictionary"] = pursuit(model, data, options.rounds)
    names = [name for name in options.detectors.split(",") if name]
    run.results["detectors"] = detectors(model, data, names, options.rounds, run)
    run.record().write(RECORD, force=True)
    print(RECORD.read_text())


if __name__ == "__main__":
    main()
