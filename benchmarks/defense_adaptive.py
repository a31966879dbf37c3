"""Silent errors, wrong AND unflagged, against the size of the change: who knows of the detector, and who does not.

    python benchmarks/defense_adaptive.py [--data mnist,fashion-mnist] [--seeds 1] [--only adaptive-0.1,…] [--summary]

One record a cell, in ``defense-adaptive/``; a cell whose record is ok and has the same parameters is skipped. The
networks are those of ``defense_detection``; members of ``full`` were chosen on seed 0, so seed 1 judges. Every share is
of the attacked images, those that the network gets right, with its 95 % interval.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from cells import is_done  # noqa: E402
from defense_nets import MODELS, lenet_on  # noqa: E402
from torch import Tensor  # noqa: E402

from deepseal.adapter import Dataset, Split, load_data  # noqa: E402
from deepseal.attacks import EVASION, Perturbed  # noqa: E402
from deepseal.defense.guarded import GuardedModel  # noqa: E402
from deepseal.defense.monitor import Monitor, calibrate, fit_monitor  # noqa: E402
from deepseal.defense.monitor_file import load_monitor, save_monitor
from deepseal.defense.presets import PRESETS, choose  # noqa: E402
from deepseal.record import Record, Run, read_record  # noqa: E402
from deepseal.rng import Rng  # noqa: E402
from deepseal.statistics import rate  # noqa: E402

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "defense-adaptive"
RATES = (0.01, 0.05)
CONFIDENCE = 0.95
LIMIT = {"mnist": 210, "fashion-mnist": 240}  # test images, of which at least 200 are right
MAIN = {"mnist": 0.1, "fashion-mnist": 0.03}
CURVE = {"mnist": (0.05, 0.15, 0.2, 0.3), "fashion-mnist": (0.01, 0.05, 0.1)}
FULL = {"loss": "all", "steps": 40, "restarts": 4}
LIGHT = {"loss": "all", "steps": 40, "restarts": 1}


class Bench:
    """One network with its monitor, fitted when it is first needed."""

    def __init__(self, name: str, seed: int, preset: str) -> None:
        self.name, self.seed, self.preset = name, seed, preset
        self.rng = Rng(seed).child("adaptive", name, preset)

    @functools.cached_property
    def data(self) -> Dataset:
        return load_data(self.name)

    @property
    def attacked(self) -> Split:
        return self.data.test.take(torch.arange(LIMIT[self.name]))

    @functools.cached_property
    def monitor(self) -> Monitor:
        """Fitted on the training images, calibrated on the held-out ones; from ``build/`` if it is there."""
        members = hashlib.sha256(repr(PRESETS[self.preset]).encode()).hexdigest()[:8]
        path = MODELS / f"monitor-{self.name}-seed{self.seed}-{self.preset}-{members}"
        if not path.exists():
            model = lenet_on(self.data, self.seed)
            chosen = choose(model, [self.preset])
            fitted = fit_monitor(model, self.data.train, chosen.detectors, rng=self.rng, notes=chosen.notes)
            save_monitor(calibrate(fitted, self.data.calibration, rng=self.rng, confidence=CONFIDENCE), path)
        monitor = load_monitor(path, architecture="defense_nets:lenet_like")
        monitor.model.module.to(memory_format=torch.channels_last)  # the same numbers, faster
        return monitor

    def guard(self, false_positive: float) -> GuardedModel:
        return GuardedModel(self.monitor, false_positive)

    @functools.cached_property
    def thresholds(self) -> list[dict[str, Any]]:
        """The thresholds, and the alarms that they raise on the clean test images that are not attacked."""
        clean = self.data.test.tensor[LIMIT[self.name] :]
        totals = torch.cat([self.monitor.scores(part).total for part in clean.split(1000)])
        rows = []
        for known in map(self.monitor.threshold, RATES):
            realised = rate(int((totals > known.value).sum()), len(totals))
            rows.append({**known.as_dict(), "realised": realised.as_dict()})
        return rows

    def surrogate(self) -> str:
        """Both where a member has a step without a gradient; they are one and the same where none has."""
        smooth = all(member.detector.needs.differentiable for member in self.monitor.members)
        return "identity" if smooth else "both"


@dataclasses.dataclass(frozen=True)
class BothGuards(GuardedModel):
    """The guard at the stricter threshold, which also keeps what only that one flags: silent at the looser one.

    A search goes on until the strict threshold, whatever the looser one is, so one search serves both.
    """

    looser: float = 0.0
    kept: list[Tensor] = dataclasses.field(default_factory=list, repr=False)

    def alarms(self, x: Tensor) -> Tensor:
        totals = self.monitor.scores(x).total
        self.kept.append(x[(totals > self.limit) & (totals <= self.looser)])
        return totals > self.limit


def adaptive(bench: Bench, run: Run, settings: dict[str, Any]) -> None:
    """Searches at the stricter threshold; the least suspicious of each search is judged at both."""
    attack = EVASION.build("adaptive-pgd", {**settings, "surrogate": bench.surrogate()})
    some, model = bench.attacked, bench.monitor.model
    guard = BothGuards(bench.monitor, RATES[1], looser=bench.guard(RATES[0]).limit)
    found = attack.perturb(guard, some, rng=bench.rng.child("adaptive"))
    silent = found.fooled.clone()
    kept = torch.cat([some.tensor[:0], *guard.kept])
    if len(kept):
        # Whose input it is, by nearness; it counts for that one if it is in its ball and wrong for it.
        place = torch.cdist(kept.flatten(1), some.tensor.flatten(1)).argmin(dim=1)
        near = (kept - some.tensor[place]).flatten(1).abs().amax(dim=1) <= settings["epsilon"] + 1e-6
        again = torch.cat([model.query(part) for part in kept.split(97)]).argmax(dim=1)
        right = model.query(some.tensor).argmax(dim=1) == some.y
        silent[place[near & (again != some.y[place]) & right[place] & ~bench.guard(RATES[0]).alarms(kept)]] = True
    attacked = found.evidence["attacked"]
    run.results.update(
        attacked=attacked,
        wrong=rate(found.evidence["wrong"], attacked).as_dict(),
        surrogate=bench.surrogate(),
        attack=attack.as_dict(),
        evidence=dict(found.evidence),
        thresholds=bench.thresholds,
    )
    for false_positive, mask in zip(RATES, (silent, found.fooled), strict=True):
        run.results[_key(false_positive)] = rate(int(mask.sum()), attacked).as_dict()


def oblivious(bench: Bench, run: Run, settings: dict[str, Any]) -> None:
    """Attacks that do not know of the detector, at each size; the least flagged of them an input."""
    some = bench.attacked
    rows = []
    for epsilon in settings["epsilons"]:
        found = [
            EVASION.build(name, {"epsilon": epsilon, **params}).perturb(
                bench.monitor.model, some, rng=bench.rng.child("oblivious", name, str(epsilon))
            )
            for name, params in settings["attacks"]
        ]
        row = {"epsilon": epsilon, "wrong": _share(found, [one.fooled for one in found])}
        for false_positive in RATES:
            guard = bench.guard(false_positive)
            silent = [one.fooled & ~guard.alarms(one.x) for one in found]
            row[_key(false_positive)] = _share(found, silent)
            for (name, _), one, mask in zip(settings["attacks"], found, silent, strict=True):
                row[f"{name}_{_key(false_positive)}"] = _share([one], [mask])
        rows.append(row)
    run.results.update(curve=rows, thresholds=bench.thresholds)


def _share(found: list[Perturbed], masks: list[Tensor]) -> dict[str, Any]:
    together = torch.stack(masks).any(dim=0)
    return rate(int(together.sum()), found[0].evidence["attacked"]).as_dict()


def ladder(bench: Bench, run: Run, settings: dict[str, Any]) -> None:
    """More steps must not be weaker: silent errors at the stricter threshold."""
    rows = []
    for steps in settings["steps"]:
        attack = EVASION.build("adaptive-pgd", {**settings["attack"], "steps": steps})
        found = attack.perturb(bench.guard(RATES[1]), bench.attacked, rng=bench.rng.child("ladder"))
        rows.append({"steps": steps, **rate(found.evidence["fooled"], found.evidence["attacked"]).as_dict()})
    run.results.update(ladder=rows)


def _key(false_positive: float) -> str:
    return f"silent_errors_at_{100 * false_positive:g}"


def cells(bench: Bench) -> Iterator[tuple[str, dict[str, Any], Callable[[Bench, Run, dict[str, Any]], None]]]:
    main = MAIN[bench.name]
    yield f"adaptive-{main}", {"epsilon": main, **FULL}, adaptive
    members = [["pgd", {"steps": 40, "restarts": 2}], ["square", {"queries": 300}]]
    grid = sorted([main, *CURVE[bench.name]])
    yield "oblivious", {"epsilons": grid, "attacks": members}, oblivious
    light = {"epsilon": main, "loss": "joint", "restarts": 1, "surrogate": "identity"}
    yield "steps", {"attack": light, "steps": [2, 10, 40, 160]}, ladder
    yield "unlimited", {"epsilon": 1.0, **LIGHT}, adaptive
    for epsilon in CURVE[bench.name]:
        yield f"adaptive-{epsilon}", {"epsilon": epsilon, **LIGHT}, adaptive


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="mnist,fashion-mnist")
    parser.add_argument("--seeds", default="1")
    parser.add_argument("--presets", default="full")
    parser.add_argument("--only", default="", help="names of cells")
    parser.add_argument("--summary", action="store_true", help="only rewrite the summary from the records")
    options = parser.parse_args()
    torch.set_num_threads(1)
    RECORDS.mkdir(parents=True, exist_ok=True)
    benches = [
        Bench(name, int(seed), preset)
        for preset in options.presets.split(",")
        for seed in options.seeds.split(",")
        for name in options.data.split(",")
    ]
    queue = [(place, bench, cell) for bench in benches for place, cell in enumerate(cells(bench))]
    for _, bench, (name, settings, fill) in sorted(queue, key=lambda one: one[0]) if not options.summary else ():
        path = RECORDS / f"{bench.name}-seed{bench.seed}-{bench.preset}-{name}.json"
        params = {"data": bench.name, "preset": bench.preset, "members": list(PRESETS[bench.preset])}
        params |= {"cell": name, "limit": LIMIT[bench.name], "settings": settings}
        if (options.only and name not in options.only.split(",")) or is_done(path, params):
            continue
        clock, run = time.process_time(), Run("benchmark.defense-adaptive", seed=bench.seed, params=params)
        fill(bench, run, settings)
        monitor = bench.monitor
        run.results.update(
            members=[{"title": one.title, **one.detector.as_dict()} for one in monitor.members],
            cpu_seconds=time.process_time() - clock,
        )
        run.fingerprints.update(monitor.splits)
        run.record().write(path, force=True)
        shown = {key: _shown(value) for key, value in run.results.items() if key.startswith(("silent", "wrong"))}
        print(path.stem, shown, run.results.get("ladder", ""), round(run.results["cpu_seconds"]), "s", flush=True)
    (RECORDS / "README.md").write_text(summary([read_record(path) for path in sorted(RECORDS.glob("*.json"))]))


def summary(records: list[Record]) -> str:
    """Markdown: a curve for each network, and the checks of the attack itself."""
    lines = [
        "# Silent errors: wrong and unflagged",
        "",
        "Made from the records in this folder; see `defense_adaptive.py`.",
    ]
    lines += ["Per cent of the attacked images with 95 % interval, at thresholds that promise a false-positive rate of"]
    lines += ["at most 1 % and 5 % with 95 % confidence. Detection is no security: see how the columns rise.", ""]
    nets = sorted({(one.params["data"], one.seed, one.params["preset"]) for one in records}, key=str)
    for net in nets:
        own = [one for one in records if (one.params["data"], one.seed, one.params["preset"]) == net]
        titles = ", ".join(member["title"] for member in own[0].results["members"])
        lines += [f"## {net[0]}, seed {net[1]}, `{net[2]}` ({titles})", ""]
        lines += ["| attacker | epsilon | restarts | wrong at all | silent at 1 % | silent at 5 % |", "|---" * 6 + "|"]
        for one in sorted(own, key=lambda one: one.params["settings"].get("epsilon", 0.0)):
            if one.params["cell"].startswith(("adaptive", "unlimited")):
                settings = one.params["settings"]
                lines.append(_row("adaptive", settings["epsilon"], settings["restarts"], one.results))
        for one in own:
            for row in one.results.get("curve", ()):
                lines.append(_row("oblivious", row["epsilon"], 2, row))
        for one in own:
            if "ladder" in one.results:
                shares = ", ".join(f"{row['steps']} steps {_shown(row)}" for row in one.results["ladder"])
                lines += ["", f"Joint loss, one restart, at 5 %: {shares}."]
        main = next((one for one in own if one.params["cell"] == f"adaptive-{MAIN[net[0]]}"), None)
        if main:
            lines += ["", "First successes at 5 % by loss: " + _by_loss(main) + "."]
            for one in main.results["thresholds"]:
                promised, real = 100 * one["false_positive"], _shown(one["realised"])
                lines.append(f"Alarms on other clean test images where at most {promised:g} % are promised: {real} %.")
        lines.append("")
    return "\n".join(lines)


def _row(attacker: str, epsilon: float, restarts: int, results: dict[str, Any]) -> str:
    keys = ("wrong", *map(_key, RATES))
    return f"| {attacker} | {epsilon:g} | {restarts} | " + " | ".join(_shown(results[key]) for key in keys) + " |"


def _shown(share: dict[str, Any]) -> str:
    return f"{100 * share['value']:.1f} ({100 * share['low']:.1f}-{100 * share['high']:.1f})"


def _by_loss(record: Record) -> str:
    counts: dict[str, int] = {}
    for trial in record.results["evidence"]["trials"]:
        counts[trial["loss"]] = counts.get(trial["loss"], 0) + trial["first"]
    return ", ".join(f"{loss} {count}" for loss, count in counts.items())


if __name__ == "__main__":
    main()
