"""Several defenders that watch different things: each learns from what the earlier ones already find strange.

Source: B. Rouhani, M. Samragh, M. Javaheripi, T. Javidi, F. Koushanfar, "DeepFense: online accelerated defense against
adversarial deep learning", ICCAD 2018, section 4.3 ("modular redundancies"). Defenders are fitted one after the other.
Before each, a share of the training inputs is moved to where the earlier defenders' scores are high, while the victim's
answer stays as it is: so the next one takes these for ordinary, and has to tell by other features. Nothing here attacks
the label, and no adversarial input is learned from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from scipy.stats import rankdata
from torch import Tensor

from deepseal.adapter import Classifier, Split
from deepseal.adapter.classifier import BATCH
from deepseal.adapter.training import Progress
from deepseal.attacks.evasion.pgd import Objective, ascent
from deepseal.defense.base import Detector
from deepseal.defense.context import Reference, differentiable_context
from deepseal.defense.layered import scale_of
from deepseal.defense.monitor import Member, Monitor, sample_hashes
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class Redundancy(Parameters):
    """How inputs are moved against defenders: within an L-infinity ball, by signed gradient steps."""

    epsilon: float = parameter(0.05, "radius, as a share of the bounds' width", minimum=0.0, maximum=1.0)
    steps: int = parameter(5, "gradient steps", minimum=1, maximum=10_000)
    share: float = parameter(0.5, "share of the training inputs that are moved", minimum=0.0, maximum=1.0)
    most: int = parameter(10_000, "most training inputs that are moved", minimum=1)


def fit_complementary(
    model: Classifier,
    split: Split,
    detectors: Sequence[Detector],
    *,
    rng: Rng,
    redundancy: Redundancy | None = None,
    progress: Progress | None = None,
) -> Monitor:
    """Fit detectors one after the other, each also on inputs moved against those before it.

    Args:
        model: the victim; it is not changed.
        split: (N, …) clean inputs and labels.
        detectors: already placed on the model, in the order of fitting.
        rng: all randomness.
        redundancy: how inputs are moved.
        progress: called with detectors done and all.

    Raises:
        InputError: data that do not fit the model, or that are too few.
    """
    how = redundancy or Redundancy()
    model.spec.require_plain("a detector")
    model.spec.require_classes()
    split.check(model.spec)
    members: list[Member] = []
    for index, detector in enumerate(detectors):
        own = rng.child(index, detector.name)
        data = _moved(model, split, members, how, own.child("moved")) if members else split
        members.append(Member(detector, detector.fit(Reference(model, data), rng=own.child("fit"))))
        if progress:
            progress(index + 1, len(detectors))
    seen, splits = {"fit": sample_hashes(split.tensor)}, {"fit": split.fingerprint()}
    return Monitor(model, tuple(members), (), seen, splits)


def complementarity(
    monitor: Monitor, x: Tensor, *, rng: Rng, false_positive: float = 0.05, redundancy: Redundancy | None = None
) -> Mapping[str, Any]:
    """How differently the members judge, each at its own quantile of the scores of clean inputs ``x``.

    ``correlation``: of ranks, on clean inputs. ``disagreement``: of inputs with random signs of size epsilon added that
    either of two members flags, the share that only one does. ``survivors[i][j]``: of those that member i flags and
    that can be moved past it by lowering its score alone, the share that member j does not flag either: 0 where
    whatever fools i is caught by j. None where there is nothing to count.

    Raises:
        InputError: a model whose gradients do not reach the input, or too few inputs for the quantile.
    """
    model, how = monitor.model, redundancy or Redundancy()
    if not isinstance(model, Classifier):
        do = "compare correlations alone (monitor.agreement)"
        raise InputError("a model whose gradients reach the input", found="a model that only answers", do=do)
    if len(x) * false_positive < 1.0:
        few = f"{len(x)} for a rate of {false_positive:g}"
        raise InputError("enough clean inputs for the quantile", found=few, do="pass more, or raise the rate")
    clean = monitor.raw(x)[0].double()
    limits = torch.quantile(clean, 1.0 - false_positive, dim=0)
    low, high = model.spec.bounds
    signs = torch.randint(2, x.shape, generator=rng.child("signs").torch()).to(x) * 2.0 - 1.0
    strange = (x + how.epsilon * (high - low) * signs).clamp(low, high)
    flagged = monitor.raw(strange)[0].double() > limits
    count = len(monitor.members)
    survivors: list[list[float | None]] = []
    for index, member in enumerate(monitor.members):
        mine = strange[flagged[:, index]]
        past = torch.empty(0, count, dtype=torch.bool)
        if len(mine):
            objective = _objective(model, [member], clean[:, index : index + 1], sign=-1.0)
            passed = monitor.raw(_climbed(model, mine, objective, how))[0].double() <= limits
            past = passed[passed[:, index]]
        survivors.append([_mean(past[:, other]) for other in range(count)])
    either = flagged[:, :, None] | flagged[:, None, :]
    differ = flagged[:, :, None] != flagged[:, None, :]
    return {
        "members": [member.title for member in monitor.members],
        "correlation": _rank_correlation(clean),
        "flagged": [float(column.double().mean()) for column in flagged.unbind(dim=1)],
        "disagreement": [[_mean(differ[:, i, j][either[:, i, j]]) for j in range(count)] for i in range(count)],
        "survivors": survivors,
    }


def _moved(model: Classifier, split: Split, members: Sequence[Member], how: Redundancy, rng: Rng) -> Split:
    """The split with a share of its inputs moved to where the members' scores are high and the answer is the same."""
    count = min(how.most, round(how.share * len(split)))
    chosen = torch.randperm(len(split), generator=rng.torch())[:count]
    if not count or not how.epsilon:
        return split
    x = split.tensor.clone()
    picked = x[chosen]
    scores = Monitor(model, tuple(members)).raw(picked)[0].double()
    found = _climbed(model, picked, _objective(model, members, scores), how)
    same = model.predict(found) == model.predict(picked)
    x[chosen[same]] = found[same].to(x)
    return Split(x, split.y)


def _objective(model: Classifier, members: Sequence[Member], clean: Tensor, sign: float = 1.0) -> Objective:
    """(N,) sum of the members' scores, each in units of its spread on clean inputs."""
    scales = [scale_of(column) for column in clean.unbind(dim=1)]
    taps = Monitor(model, tuple(members)).taps

    def objective(z: Tensor) -> Tensor:
        context = differentiable_context(model, z, taps, surrogate="identity")
        total = z.new_zeros(len(z))
        for member, (mean, spread) in zip(members, scales, strict=True):
            total = total + (member.detector.score(context, member.state).to(total) - mean) / spread
        return sign * total

    return objective


def _climbed(model: Classifier, x: Tensor, objective: Objective, how: Redundancy) -> Tensor:
    step = 2.5 * how.epsilon / how.steps
    parts = [
        ascent(part, objective, model.spec, epsilon=how.epsilon, steps=how.steps, step_size=step)
        for part in x.split(BATCH)
    ]
    return torch.cat(parts).detach()


def _mean(marks: Tensor) -> float | None:
    return float(marks.double().mean()) if len(marks) else None


def _rank_correlation(scores: Tensor) -> list[list[float | None]]:
    """Spearman's; None where a member gives all inputs the same score."""
    ranks = torch.from_numpy(rankdata(scores.numpy(), axis=0))
    centred = ranks - ranks.mean(dim=0)
    lengths = centred.norm(dim=0)
    table = []
    for i in range(scores.shape[1]):
        row: list[float | None] = []
        for j in range(scores.shape[1]):
            both = float(lengths[i] * lengths[j])
            row.append(float(centred[:, i] @ centred[:, j]) / both if both else None)
        table.append(row)
    return table
