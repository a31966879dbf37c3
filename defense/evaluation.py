"""How well a monitor tells attacked inputs from clean ones, on data that it has not seen.

Negatives are the clean test inputs: those that the model gets right, as the literature has it, and all of them, which
is what a deployed monitor meets. Positives are inputs that an attack turned from right to wrong, checked again. A
silent error is an input that is answered wrongly *and* raises no alarm (W. He, J. Wei, X. Chen, N. Carlini, D. Song,
"Adversarial example defenses: ensembles of weak defenses are not strong", WOOT 2017).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepseal.adapter import Split
from deepseal.attacks.base import EVASION, Evasion, Perturbed
from deepseal.defense.guarded import GuardedModel, victim_of
from deepseal.defense.monitor import Monitor, fresh
from deepseal.defense.thresholds import Threshold, realised_interval
from deepseal.errors import InputError, UnknownNameError
from deepseal.rng import Rng
from deepseal.statistics import rate

RATES = (0.01, 0.05)
ADAPTIVE = "adaptive-"
BARS = 40


@dataclasses.dataclass(frozen=True)
class Attacked:
    """One attack on the test inputs.

    Attributes:
        title: name and parameters.
        found: the changed inputs by the nominal false-positive rate that the monitor runs at: an adaptive attack finds
            others at each, and its ``fooled`` is wrong and unflagged.
        right: (N,) True where the model was right before.
        labels: (N,) right answers.
    """

    title: str
    found: Mapping[float, Perturbed]
    right: Tensor = dataclasses.field(repr=False)
    labels: Tensor = dataclasses.field(repr=False)


def parse_attack(text: str) -> tuple[str, Evasion]:
    """An attack as ``name`` or ``name:parameter=value,parameter=value``.

    Raises:
        UnknownNameError: no such attack, or no such parameter.
        InputError: a value that it cannot have.
    """
    name, _, options = text.partition(":")
    if name not in EVASION.names():
        raise UnknownNameError("evasion attack", name, EVASION.names())
    values: dict[str, str] = {}
    for part in filter(None, options.split(",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise InputError("an attack as name:parameter=value,…", found=repr(text), do="write pgd:epsilon=0.3")
        values[key] = value
    return text, EVASION.build(name, values)


def attack(monitor: Monitor, test: Split, title: str, method: Evasion, *, rng: Rng) -> Attacked:
    """Attack the model; or, if the attack is adaptive, model and monitor together, at each rate that can be promised.

    Raises:
        InputError: data that the monitor has seen, or a model that the attack cannot be run on.
    """
    model = victim_of(monitor)
    clean = fresh(monitor, test, "judge it on")
    seeded, found = rng.child("attack", title), {}
    if method.name.startswith(ADAPTIVE):
        rates = [nominal for nominal in RATES if _threshold(monitor, nominal)] or [
            monitor.calibrated_on().false_positive
        ]
        found = {nominal: method.perturb(GuardedModel(monitor, nominal), clean, rng=seeded) for nominal in rates}
    else:
        once = method.perturb(model, clean, rng=seeded)
        found = dict.fromkeys(RATES, once)
    return Attacked(title, found, model.predict(clean.tensor) == clean.y, clean.y)


@dataclasses.dataclass(frozen=True)
class Clean:
    """A monitor on clean test inputs.

    Attributes:
        scores: (N,) combined scores.
        members: (N, members) -log p.
        right: (N,) whether the model is right.
        predicted: (N,) its answers.
    """

    scores: Tensor = dataclasses.field(repr=False)
    members: Tensor = dataclasses.field(repr=False)
    right: Tensor = dataclasses.field(repr=False)
    predicted: Tensor = dataclasses.field(repr=False)


def clean_scores(monitor: Monitor, test: Split) -> Clean:
    """Scores of clean inputs that the monitor has not seen.

    Raises:
        InputError: it has seen them.
    """
    kept = fresh(monitor, test, "judge it on")
    found = monitor.scores(kept.tensor)
    return Clean(found.total, found.members, found.predicted == kept.y, found.predicted)


def false_positives(monitor: Monitor, clean: Clean) -> list[Mapping[str, Any]]:
    """Realised false-positive rate at each nominal one, with where it should lie; and by class where promised."""
    own = monitor.calibrated_on().false_positive
    rows = [false_positives_at(monitor, clean, nominal) for nominal in sorted({*RATES, own})]
    for label, known in monitor.class_thresholds().items():
        within = clean.scores[clean.predicted == label]
        if len(within):
            alarms = within > known.value
            rows.append(
                {
                    "nominal": own,
                    "predicted_class": label,
                    "guaranteed": True,
                    "threshold": known.value,
                    "realised": rate(int(alarms.sum()), len(alarms)).as_dict(),
                }
            )
    return rows


def false_positives_at(monitor: Monitor, clean: Clean, nominal: float) -> Mapping[str, Any]:
    """Realised false-positive rate at a nominal one; ``guaranteed`` is False where it cannot be promised."""
    known = _threshold(monitor, nominal)
    if known is None:
        return {"nominal": nominal, "guaranteed": False}
    alarms = clean.scores > known.value
    return {
        "nominal": nominal,
        "guaranteed": True,
        "threshold": known.value,
        "realised": rate(int(alarms.sum()), len(alarms)).as_dict(),
        "realised_on_right_answers": rate(int(alarms[clean.right].sum()), int(clean.right.sum())).as_dict(),
        "expected_interval": list(realised_interval(known, len(alarms))),
    }


def figures(monitor: Monitor, clean: Clean, attacked: Attacked) -> dict[str, Any]:
    """What one attack achieves and what the monitor sees of it.

    ``auroc`` and ``tpr_at_1``, ``tpr_at_5`` are over inputs that fool the model, against correctly answered clean ones
    (``auroc_all``: against all). ``tpr_at_1`` is at the threshold calibrated for 1 %, ``tpr_at_true_1`` at the one that
    1 % of the right clean test inputs exceed. ``silent_errors_at_1`` is the share of all attacked inputs that are
    answered wrongly without an alarm at the calibrated threshold.
    """
    scored = {nominal: _scored(monitor, attacked, nominal) for nominal in attacked.found}
    wrong, scores, members = next(iter(scored.values()))
    tried, positive = int(attacked.right.sum()), scores[wrong]
    negative = clean.scores[clean.right]
    result: dict[str, Any] = {
        "name": attacked.title,
        "attacked": tried,
        "success": rate(int(wrong.sum()), tried).as_dict() if tried else None,
        "adaptive": attacked.title.startswith(ADAPTIVE),
        "auroc": auroc(negative, positive),
        "auroc_all": auroc(clean.scores, positive),
    }
    for nominal in RATES:
        percent, known = round(100 * nominal), _threshold(monitor, nominal)
        true = float(negative.quantile(1.0 - nominal)) if len(negative) else float("nan")
        result[f"tpr_at_true_{percent}"] = _share(positive > true)
        result[f"tpr_at_{percent}"] = None if known is None else _share(positive > known.value)
        result[f"silent_errors_at_{percent}"] = None
        if known is not None and tried and nominal in scored:
            errors, at, _ = scored[nominal]
            silent = int((errors & (at <= known.value)).sum())
            result[f"silent_errors_at_{percent}"] = rate(silent, tried).as_dict()
    titles = [member.title for member in monitor.members]
    result["members"] = {
        title: auroc(clean.members[clean.right, index], members[wrong, index]) for index, title in enumerate(titles)
    }
    result["roc"] = roc(negative, positive)
    result["scores"] = histogram(positive, edges_of(clean.scores))
    result["evidence"] = {f"{nominal:g}": dict(found.evidence) for nominal, found in attacked.found.items()}
    return result


def _scored(monitor: Monitor, attacked: Attacked, nominal: float) -> tuple[Tensor, Tensor, Tensor]:
    x = attacked.found[nominal].x
    found = monitor.scores(x)
    return attacked.right & (found.predicted != attacked.labels), found.total, found.members


def roc(negative: Tensor, positive: Tensor, points: int = 60) -> list[list[float]]:
    """(false-positive rate, true-positive rate) at rates from 0.0005 to 1, evenly in their logarithm."""
    if not len(negative) or not len(positive):
        return []
    rates = torch.logspace(-3.3, 0.0, points, dtype=torch.float64)
    limits = negative.double().quantile(1.0 - rates)
    return [
        [round(float(r), 6), round(float((positive > t).double().mean()), 6)]
        for r, t in zip(rates, limits, strict=True)
    ]


def edges_of(clean: Tensor, bars: int = BARS) -> Tensor:
    """(bars + 1,) edges of equal bars over clean scores, on and on to twice as far: attacks are expected beyond."""
    low, high = float(clean.min()), float(clean.max())
    return torch.linspace(low, low + 2.0 * max(high - low, 1e-9), bars + 1, dtype=torch.float64)


def histogram(scores: Tensor, edges: Tensor) -> dict[str, list[float]]:
    """``edges`` (bars + 1,) and ``counts`` (bars,); what lies outside counts in the first and the last bar."""
    inner = torch.bucketize(scores.double(), edges[1:-1].contiguous(), right=True)
    counts = torch.bincount(inner, minlength=len(edges) - 1)
    return {"edges": [round(float(edge), 6) for edge in edges], "counts": [int(count) for count in counts]}


def controls(monitor: Monitor, test: Split, clean: Clean, *, rng: Rng, spread: float = 0.1) -> dict[str, Any]:
    """Two answers that must be near one half and near the nominal rate: clean against clean, and benign noise.

    Clean inputs are split in two by chance; noise is uniform, of the stated share of the bounds' width.
    """
    order = torch.randperm(len(clean.scores), generator=rng.child("halves").torch())
    half = len(order) // 2
    kept = fresh(monitor, test, "judge it on")
    low, high = kept.tensor.min(), kept.tensor.max()
    noise = torch.empty_like(kept.tensor).uniform_(-spread, spread, generator=rng.child("noise").torch())
    noisy = (kept.tensor + noise * (high - low)).clamp(float(low), float(high))
    judged = monitor.scores(noisy)
    still = (judged.predicted == kept.y) & clean.right
    scores = judged.total
    known = _threshold(monitor, monitor.calibrated_on().false_positive)
    assert known is not None  # noqa: S101 - it was promised
    return {
        "clean_against_clean": auroc(clean.scores[order[:half]], clean.scores[order[half:]]),
        "noise_spread": spread,
        "noise_alarms": rate(int((scores[still] > known.value).sum()), max(1, int(still.sum()))).as_dict(),
    }


def auroc(negative: Tensor, positive: Tensor) -> float | None:
    """Probability that a positive scores higher than a negative, ties by half (Mann and Whitney, 1947)."""
    if not len(negative) or not len(positive):
        return None
    from scipy.stats import rankdata

    ranks = rankdata(np.concatenate([negative.numpy(), positive.numpy()]))
    above = ranks[len(negative) :].sum() - len(positive) * (len(positive) + 1) / 2
    return float(above / (len(negative) * len(positive)))


def bound(clean_wrong: float) -> str:
    """What no detector can promise, in one sentence.

    Source: F. Tramèr, "Detecting adversarial examples is (nearly) as hard as classifying them", ICML 2022, theorem 4.
    """
    return (
        "A detector that is robust at distance ε would give, without limit of time, a classifier that is robust at "
        f"ε/2 (Tramèr, 2022): claims at ε are claims about classifying at ε/2; this model errs on {clean_wrong:.1%} "
        "of clean inputs already."
    )


def per_day(false_positive: float, requests: float) -> float:
    """False alarms a day at a given traffic, all of it clean."""
    return false_positive * requests


def _share(hits: Tensor) -> dict[str, Any] | None:
    return rate(int(hits.sum()), len(hits)).as_dict() if len(hits) else None


def _threshold(monitor: Monitor, nominal: float) -> Threshold | None:
    try:
        return monitor.threshold(nominal)
    except InputError:
        return None


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Mean and worst area under the curve over attacks that do not know the monitor."""
    known = [row["auroc"] for row in rows if row["auroc"] is not None and not row["adaptive"]]
    return {"mean_auroc": float(np.mean(known)), "worst_auroc": float(min(known))} if known else {}
