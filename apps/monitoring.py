"""What the command line does with monitors: one library call each, written into a run's record."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepseal.adapter import Classifier, Dataset, InputSpec
from deepseal.apps.reporter import Reporter
from deepseal.attacks.base import Evasion
from deepseal.defense.evaluation import (
    attack,
    bound,
    clean_scores,
    controls,
    false_positives,
    figures,
    per_day,
    summary,
)
from deepseal.defense.monitor import Monitor, agreement, calibrate, fit_monitor
from deepseal.defense.monitor_file import check_folder, describe, save_monitor
from deepseal.defense.presets import choose
from deepseal.errors import InputError, understood
from deepseal.files import read_bytes
from deepseal.record import Run
from deepseal.rng import Rng
from deepseal.statistics import rate

_A_DAY = 100_000.0
_LIMIT = 2**31


def fit(
    run: Run,
    *,
    model: Classifier,
    dataset: Dataset,
    words: Sequence[str],
    seed: int,
    out: Path,
    force: bool,
    report: Reporter,
    limit: int | None = None,
) -> Monitor:
    """Fit detectors on the training split and write the monitor's folder."""
    check_folder(out, force=force)
    chosen = choose(model, words)
    count = len(dataset.train) if limit is None else min(limit, len(dataset.train))
    split = dataset.train.take(torch.arange(count))
    clock = time.perf_counter()
    with report("fitting") as progress:
        monitor = fit_monitor(
            model, split, chosen.detectors, rng=Rng(seed).child("fit"), notes=chosen.notes, progress=progress
        )
    run.params.update(detectors=list(words), data=dataset.name, limit=limit)
    run.fingerprints.update(model=model.fingerprint(), fit=monitor.splits["fit"])
    run.results.update(
        {name: value for name, value in describe(monitor).items() if name in ("members", "passes")},
        samples=count,
        seconds=time.perf_counter() - clock,
        file=str(out),
    )
    run.notes.extend(chosen.notes)
    save_monitor(monitor, out, force=force)
    return monitor


def calibrate_monitor(
    run: Run,
    *,
    monitor: Monitor,
    dataset: Dataset,
    false_positive: float,
    confidence: float,
    per_class: bool,
    traffic: float,
    seed: int,
    out: Path,
) -> Monitor:
    """Calibrate on the held-out split, unfiltered, and write the monitor back into its folder."""
    ready = calibrate(
        monitor,
        dataset.calibration,
        rng=Rng(seed).child("calibrate"),
        false_positive=false_positive,
        confidence=confidence,
        per_class=per_class,
    )
    limit = ready.threshold()
    classes = ready.class_thresholds()
    without = [c for c in range(ready.model.spec.num_classes) if c not in classes] if per_class else []
    run.params.update(false_positive=false_positive, confidence=confidence, per_class=per_class, data=dataset.name)
    run.fingerprints.update(ready.splits)
    run.results.update(
        threshold=limit.value,
        interval=[limit.low, limit.high],
        n=limit.n,
        exceeding=limit.exceeding,
        promise=f"false-positive rate at most {false_positive:.4g} with {100 * confidence:.4g} % confidence",
        classes=[{"predicted_class": label, **own.as_dict()} for label, own in classes.items()],
        classes_without_guarantee=without,
        false_alarms_a_day={
            "requests": traffic,
            "at_most": per_day(false_positive, traffic),
            "expected": per_day((limit.exceeding + 1) / (limit.n + 1), traffic),
        },
        agreement=agreement(ready),
        file=str(out),
    )
    if without:
        run.notes.append(
            f"predicted classes {', '.join(map(str, without))} have too few clean samples for a promise of their own: "
            "the global threshold is used for them, without a guarantee for each"
        )
    save_monitor(ready, out, force=True)
    return ready


def evaluate(
    run: Run,
    *,
    monitor: Monitor,
    dataset: Dataset,
    attacks: Sequence[tuple[str, Evasion]],
    limit: int | None,
    cost_ratio: float,
    seed: int,
    report: Reporter,
) -> None:
    """False positives, controls, and every attack, on the test split.

    Raises:
        InputError: a test split that the monitor has seen.
    """
    rng = Rng(seed).child("evaluate")
    clean = clean_scores(monitor, dataset.test)
    rates = false_positives(monitor, clean)
    count = len(dataset.test) if limit is None else min(limit, len(dataset.test))
    attacked = dataset.test.take(torch.arange(count))
    rows = []
    with report("attacking") as progress:
        for index, (title, method) in enumerate(attacks):
            rows.append(figures(monitor, clean, attack(monitor, attacked, title, method, rng=rng)))
            if progress:
                progress(index + 1, len(attacks))
    known = monitor.calibrated_on()
    wrong = 1.0 - float(clean.right.double().mean())
    silent = [row[f"silent_errors_at_{p}"]["value"] for row in rows for p in (1, 5) if row[f"silent_errors_at_{p}"]]
    run.params.update(data=dataset.name, attacks=[title for title, _ in attacks], limit=limit, seed=seed)
    run.fingerprints.update(**{f"monitor.{use}": value for use, value in monitor.splits.items()})
    run.fingerprints.update({"data.test": dataset.test.fingerprint()})
    run.results.update(
        accuracy=rate(int(clean.right.sum()), len(clean.right)).as_dict(),
        samples=len(clean.right),
        false_positives=rates,
        controls=controls(monitor, dataset.test, clean, rng=rng),
        attacks=rows,
        **summary(rows),
        cost={
            "ratio": cost_ratio,
            "of_one_alarm_rate": known.false_positive,
            "break_even": known.false_positive / cost_ratio,
        },
        checklist=checklist(rows),
        bound=bound(wrong),
    )
    if not any(row["adaptive"] for row in rows):
        run.notes.append("no adaptive attack was run: an attacker who knows the monitor does better than these figures")
    if silent and max(silent) > 0.5:
        run.notes.append("some attack leaves most of its errors unflagged: this monitor does not make the model secure")


def checklist(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What an honest evaluation contains, ticked by what was measured here."""
    names = [row["name"].partition(":")[0] for row in rows]
    titles = " ".join(row["name"] for row in rows)
    adaptive = [row for row in rows if row["adaptive"]]
    ticks = {
        "false-positive rate with an interval, on data that nothing was fitted on": True,
        "clean-versus-clean and benign-noise controls": True,
        "each adversarial input checked again, alone and in another batch": bool(rows),
        "an attack with confidence (C&W)": any(n == "cw" for n in names) and "confidence" in titles,
        "an iterated attack (PGD or APGD)": any(n in ("pgd", "apgd", "bim") for n in names),
        "an attack without gradients (Square, HopSkipJump)": any(n in ("square", "hop-skip-jump") for n in names),
        "an attacker who knows the monitor": bool(adaptive),
        "several strengths of one attack": len(names) > len(set(names)),
    }
    return [{"what": what, "done": done} for what, done in ticks.items()]


def detect(run: Run, *, monitor: Monitor, x: Tensor) -> bool:
    """The monitor's word on inputs; True where any raises the alarm."""
    found = monitor.judge(x)
    limits = monitor.limits(found.predicted)
    run.results.update(
        inputs=len(x),
        alarms=int(found.alarm.sum()),
        rows=[
            {
                "input": index,
                "predicted": int(found.predicted[index]),
                "score": float(found.score[index]),
                "threshold": float(limits[index]),
                "p_value": float(found.p_value[index]),
                "alarm": bool(found.alarm[index]),
            }
            for index in range(len(x))
        ],
    )
    return bool(found.alarm.any())


def read_inputs(path: Path, spec: InputSpec) -> Tensor:
    """Inputs of a ``.npy`` file, or ``x`` of a ``.npz``: (N, …), or one sample; 8-bit values are divided by 255.

    Raises:
        InputError: no such file, no plain numbers, or a shape that the model does not take.
    """
    import io

    with understood(f"inputs in {path}", "save them with numpy.save"):
        loaded = np.load(io.BytesIO(read_bytes(path, "a file of inputs", limit=_LIMIT)), allow_pickle=False)
        array = loaded["x"] if isinstance(loaded, np.lib.npyio.NpzFile) else loaded
    if array.dtype.kind not in "fiub":
        raise InputError(f"numbers in {path}", found=str(array.dtype), do="save them as float32")
    scale = 255.0 if array.dtype == np.uint8 else 1.0
    x = torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32) / np.float32(scale))
    x = x[None] if tuple(x.shape) == spec.shape else x
    if len(x) == 0:
        raise InputError(f"at least one input in {path}", found="none", do="check the file")
    spec.check(x)
    return x
