"""A monitor on a network that others trained: EfficientNet-Lite0, 1,000 classes, and no ImageNet at hand.

    .venv-real/bin/python benchmarks/defense_real.py [--limit 40]

Photographs are those that scikit-image and scikit-learn bring along, cut into crops; labels are the network's own first
answers. Detectors are fitted on crops of the owner's photographs, calibrated and judged on different crops of other
photographs: the promise is about crops of these, not about photographs in general. What needs samples of all classes
is tried and its refusal recorded.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "tests" / "real"))

import photos  # noqa: E402
import torch  # noqa: E402
from pretrained import EFFICIENTNET, efficientnet_lite0  # noqa: E402
from torch import Tensor  # noqa: E402

from deepseal.adapter import Classifier, InputSpec, Split  # noqa: E402
from deepseal.defense.evaluation import attack, clean_scores, controls, false_positives, figures, parse_attack  # noqa: E402
from deepseal.defense.monitor import calibrate, fit_monitor  # noqa: E402
from deepseal.defense.monitor_file import describe  # noqa: E402
from deepseal.defense.presets import choose  # noqa: E402
from deepseal.errors import InputError  # noqa: E402
from deepseal.record import Run  # noqa: E402
from deepseal.rng import Rng  # noqa: E402

KEPT = (
    "max-softmax",
    "density?per_class=false&layer=last",
    "density?per_class=false&layer=middle",
    "odds?copies=4",
    "dist",
    "squeeze?bits=4",
)
TRIED = ("input-pca", "inrel", "ratio?layer=last", "density?layer=last", "kernel-density?layer=last")
ATTACKS = (
    "fgsm:epsilon=0.02",
    "pgd:epsilon=0.008,steps=10",
    "pgd:epsilon=0.03,steps=10",
    "deepfool",
    "cw:confidence=0,steps=30,searches=2",
    "adaptive-pgd:epsilon=0.008,steps=10,restarts=1,loss=selective,surrogate=smooth",
)


def labelled(model: Classifier, x: Tensor) -> Split:
    """The network's own answers as labels."""
    return Split(x, model.predict(x))


def main() -> None:
    """Measure once, write one record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--limit", type=int, default=20)
    limit = parser.parse_args().limit
    torch.set_num_threads(1)
    torch.manual_seed(0)
    run = Run("benchmark.defense-real", seed=0)
    module = efficientnet_lite0().to(memory_format=torch.channels_last)
    model = Classifier(module, InputSpec(bounds=(0.0, 1.0), **EFFICIENTNET))  # type: ignore[arg-type]
    fit, calibration, test = (
        labelled(model, photos.crops(names, count, 128, seed=seed))
        for names, count, seed in ((photos.OWNER, 600, 11), (photos.OTHERS, 420, 12), (photos.OTHERS, 300, 13))
    )
    refused = {}
    for word in TRIED:
        try:
            fit_monitor(model, fit, choose(model, [word]).detectors, rng=Rng(0))
            refused[word] = "fitted: the classes that are there have enough crops"
        except InputError as error:
            refused[word] = str(error)
    clock = time.process_time()
    monitor = fit_monitor(model, fit, choose(model, KEPT).detectors, rng=Rng(0))
    fitting = time.process_time() - clock
    monitor = calibrate(monitor, calibration, rng=Rng(0), false_positive=0.01, per_class=True)
    clean = clean_scores(monitor, test)
    rows = []
    for text in ATTACKS:
        title, method = parse_attack(text)
        clock = time.process_time()
        found = figures(monitor, clean, attack(monitor, test.take(torch.arange(limit)), title, method, rng=Rng(1)))
        rows.append({**found, "cpu_seconds": time.process_time() - clock})
        print(title, found["auroc"], flush=True)
    run.params.update(limit=limit, detectors=list(KEPT), size=128)
    run.results.update(
        monitor=describe(monitor),
        refused=refused,
        classes_with_a_promise=len(monitor.class_thresholds()),
        classes_in_the_calibration=len(calibration.y.unique()),
        fitting_cpu_seconds=fitting,
        false_positives=false_positives(monitor, clean),
        controls=controls(monitor, test, clean, rng=Rng(2), spread=0.02),
        attacks=rows,
    )
    run.record().write(HERE / "defense-real.json", force=True)


if __name__ == "__main__":
    main()
