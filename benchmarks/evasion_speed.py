"""Speed of our attacks beside four libraries', in one run, on one thread, at equal success.

    python benchmarks/evasion_speed.py [--repeats 3] [--only fgsm,pgd]

Time is CPU time of the process over whole calls. Ours re-check every result, which the libraries leave to the user; so
each is timed with the same re-check (``checked``, added to the libraries' time) and without (taken off ours). A result
counts as a success only if it is wrong alone and in another batch, in bounds, in the ball where there is one, and not
blank. Attacks, libraries and repeats are interleaved.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from defense_nets import lenet_on  # noqa: E402
from evasion_peers import peers  # noqa: E402
from torch import Tensor  # noqa: E402

from deepseal.adapter import Classifier, Split, load_data  # noqa: E402
from deepseal.attacks import EVASION  # noqa: E402
from deepseal.record import Run  # noqa: E402
from deepseal.rng import Rng  # noqa: E402
from deepseal.statistics import rate  # noqa: E402

EPSILON = 0.3
SPEEDS = ("samples_per_cpu_second", "samples_per_cpu_second_unchecked")
BATCH = 250
COUNTS = {"fgsm": 1000, "pgd": 250, "deepfool": 125, "cw": 60}
FEWER = {("deepfool", "torchattacks"): 30, ("deepfool", "art"): 50, ("cw", "art"): 8}
Times = dict[tuple[str, str], list[tuple[float, float]]]  # attack, library -> speeds with and without the re-check
Rows = dict[tuple[str, str], dict[str, Any]]
OURS: dict[str, dict[str, Any]] = {
    "fgsm": {"epsilon": EPSILON},
    "pgd": {"epsilon": EPSILON, "steps": 40, "step_size": 2.5},
    "deepfool": {"steps": 50, "candidates": 10, "overshoot": 0.02},
    "cw": {"steps": 100, "searches": 3, "initial": 1.0, "learning_rate": 0.05},
}


def checked(model: Classifier, data: Split, x: Tensor) -> None:
    """What our attacks ask of the model beside the search, for the sake of its time."""
    for part in data.tensor.split(256):
        model.query(part)
    for part in x.split(256):
        model.query(part)
    for part in x.flip(0).split(97):
        model.query(part)
    for row in x[:64].split(1):
        model.query(row)


def judged(model: Classifier, data: Split, x: Tensor, epsilon: float | None) -> dict[str, Any]:
    """What of the results stands."""
    flat, change = x.flatten(1), (x - data.tensor).flatten(1)
    wrong = model.predict(x) != data.y
    again = torch.cat([model.predict(part) for part in x.flip(0).split(97)]).flip(0) != data.y
    alone = torch.cat([model.predict(row) for row in x.split(1)]) != data.y
    blank = flat.amax(dim=1) == flat.amin(dim=1)
    inside = (flat >= 0.0).all(dim=1) & (flat <= 1.0).all(dim=1)
    if epsilon is not None:
        inside &= change.abs().amax(dim=1) <= epsilon + 1e-6
    sound = wrong & again & alone & ~blank & inside
    return {
        "success": rate(int(sound.sum()), len(x)).as_dict(),
        "claimed": int(wrong.sum()),
        "blank": int((wrong & blank).sum()),
        "undone_in_another_batch": int((wrong & ~(again & alone)).sum()),
        "outside": int((wrong & ~inside).sum()),
        "mean_l2": float(change[sound].norm(dim=1).mean()) if bool(sound.any()) else None,
    }


def tabulate(run: Run, chosen: Sequence[str], others: Mapping[str, Any], times: Times, rows: Rows) -> None:
    """What is measured so far, for each attack against the fastest library of equal success."""
    for attack in chosen:
        table: dict[str, Any] = {}
        for library in ("deepseal", *others[attack]):
            table[library] = {**rows[attack, library]}
            for place, name in enumerate(SPEEDS):
                speeds = [pair[place] for pair in times[attack, library]]
                spread = {"median": statistics.median(speeds), "lowest": min(speeds), "highest": max(speeds)}
                table[library][name] = spread
        least = table["deepseal"]["success"]["low"]
        equal = [name for name in others[attack] if table[name]["success"]["value"] >= least]
        for name in SPEEDS:
            speed = {library: table[library][name]["median"] for library in ("deepseal", *equal)}
            fastest = max(equal, key=lambda library: speed[library], default=None)
            table[f"{name}_over_fastest"] = {
                "peer": fastest,
                "times_as_fast": speed["deepseal"] / speed[fastest] if fastest else None,
            }
        run.results[attack] = table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", default="fgsm,pgd,deepfool,cw")
    parser.add_argument("--dry", action="store_true", help="print, and leave the record as it is")
    options = parser.parse_args()
    torch.set_num_threads(1)
    data = load_data("mnist")
    model = lenet_on(data, 0)
    right = torch.nonzero(model.predict(data.test.tensor) == data.test.y).reshape(-1)
    module = model.copy().module.eval()
    others = peers(module, epsilon=EPSILON, batch=BATCH)
    params = {"epsilon": EPSILON, "batch": BATCH, "counts": COUNTS, "ours": OURS}
    run = Run("benchmark.evasion-speed", seed=0, params=params)
    run.fingerprints.update(model=model.fingerprint(), **{"data.test": data.test.fingerprint()})
    run.notes.append("torchattacks' C&W has no bisection: one constant and 300 steps. cleverhans has no DeepFool.")
    times: Times = {}
    rows: Rows = {}
    chosen = options.only.split(",")
    for repeat in range(options.repeats):
        for attack in chosen:
            for library in ("deepseal", *others[attack]):
                count = FEWER.get((attack, library), COUNTS[attack])
                some = data.test.take(right[:count])
                torch.manual_seed(repeat)
                own = library == "deepseal"
                start = time.process_time()
                if own:
                    x = EVASION.build(attack, OURS[attack]).perturb(model, some, rng=Rng(repeat)).x
                else:
                    x = others[attack][library](some.tensor, some.y).detach().float()
                attacking = time.process_time() - start
                start = time.process_time()
                checked(model, some, x)
                checking = time.process_time() - start
                whole = attacking if own else attacking + checking
                times.setdefault((attack, library), []).append((count / whole, count / (whole - checking)))
                epsilon = EPSILON if attack in ("fgsm", "pgd") else None
                rows[attack, library] = {"n": count, **judged(model, some, x, epsilon)}
                print(
                    attack,
                    library,
                    [round(speed, 1) for speed in times[attack, library][-1]],
                    rows[attack, library],
                    flush=True,
                )
        tabulate(run, chosen, others, times, rows)
        run.results["repeats"] = repeat + 1
        if not options.dry and any(others.values()):  # a record without peers says nothing
            run.record().write(Path(__file__).with_name("evasion_speed.json"), force=True)
    for attack in chosen:
        print(attack, {name: run.results[attack][f"{name}_over_fastest"] for name in SPEEDS})


if __name__ == "__main__":
    main()
