"""A model's monitor: detectors fitted on clean data, made comparable, combined, and calibrated on other clean data.

Each detector's score becomes -log of its p-value among clean scores; their sum is Fisher's statistic ("Statistical
methods for research workers", 1932, section 21.1). Detectors are not independent, so no chi-square table reads the sum:
its threshold is an exact order statistic of the sum on clean data that nothing was fitted on.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from deepseal.adapter import BlackBox, Split
from deepseal.adapter.capture import Tap
from deepseal.adapter.classifier import BATCH
from deepseal.adapter.training import Progress
from deepseal.defense.base import Detector, State
from deepseal.defense.context import Context, Reference, contexts
from deepseal.defense.presets import title_of
from deepseal.defense.tails import MINIMUM, Tails, fit_tail
from deepseal.defense.thresholds import Threshold, class_thresholds, p_values, threshold
from deepseal.errors import InputError
from deepseal.rng import Rng

_FOR_TAILS = 0.25
_OVERLAP = 0.01


@dataclasses.dataclass(frozen=True)
class Member:
    """A fitted detector; ``tail`` makes its scores p-values, once the monitor is calibrated."""

    detector: Detector
    state: State = dataclasses.field(repr=False)
    tail: Tensor | None = dataclasses.field(default=None, repr=False)

    @property
    def title(self) -> str:
        """Its name, with the layer where it reads one."""
        return title_of(self.detector)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What clean data that nothing was fitted on say of the combined score.

    Attributes:
        scores: (n,) combined scores.
        surprises: (n, members) -log p of each.
        predicted: (n,) classes that the model answers.
        false_positive, confidence: the promise of the monitor's alarm.
        per_class: whether each predicted class has a threshold of its own.
    """

    scores: Tensor = dataclasses.field(repr=False)
    surprises: Tensor = dataclasses.field(repr=False)
    predicted: Tensor = dataclasses.field(repr=False)
    false_positive: float
    confidence: float
    per_class: bool


@dataclasses.dataclass(frozen=True)
class Scores:
    """Combined scores (N,), -log p of each member (N, members), and predicted classes (N,)."""

    total: Tensor = dataclasses.field(repr=False)
    members: Tensor = dataclasses.field(repr=False)
    predicted: Tensor = dataclasses.field(repr=False)


@dataclasses.dataclass(frozen=True)
class Detection:
    """A monitor's word on N inputs.

    Attributes:
        predicted: (N,) the model's classes.
        score: (N,) combined scores.
        p_value: (N,) conformal p-values: how rare such a score is among clean inputs.
        alarm: (N,) True where the score is above the threshold.
    """

    predicted: Tensor
    score: Tensor
    p_value: Tensor
    alarm: Tensor


@dataclasses.dataclass(frozen=True)
class Monitor:
    """A model and its detectors.

    Attributes:
        model: the victim, unchanged.
        members: fitted detectors.
        notes: what was left out, and why.
        seen: hashes of the inputs that were used, by use: ``fit``, ``calibration``.
        splits: fingerprints of the data by use.
        calibration: None until calibrated.
    """

    model: BlackBox
    members: tuple[Member, ...]
    notes: tuple[str, ...] = ()
    seen: Mapping[str, Tensor] = dataclasses.field(default_factory=dict, repr=False)
    splits: Mapping[str, str] = dataclasses.field(default_factory=dict)
    calibration: Calibration | None = None

    @property
    def taps(self) -> tuple[Tap, ...]:
        """Layers that the shared pass reads."""
        return tuple(dict.fromkeys(tap for member in self.members for tap in member.detector.needs.taps))

    @property
    def passes(self) -> int:
        """Forward passes an input, the shared one included."""
        return 1 + sum(member.detector.needs.passes for member in self.members)

    def raw(self, x: Tensor, *, batch: int = BATCH) -> tuple[Tensor, Tensor]:
        """(N, members) scores in each detector's own units, and (N,) predicted classes."""
        columns, predicted = [], []
        for context in contexts(self.model, x, self.taps, batch=batch):
            columns.append(_scores(self.members, context))
            predicted.append(context.predicted)
        return torch.cat(columns), torch.cat(predicted)

    def scores(self, x: Tensor, *, batch: int = BATCH) -> Scores:
        """Comparable and combined scores.

        Raises:
            InputError: a monitor that is not calibrated, or inputs that do not fit the model.
        """
        raw, predicted = self.raw(x, batch=batch)
        members = self.comparable(raw)
        return Scores(members.sum(dim=1), members, predicted)

    def comparable(self, raw: Tensor) -> Tensor:
        """(N, members) -log p of scores in the detectors' own units.

        Raises:
            InputError: a monitor that is not calibrated.
        """
        return self.tails.surprise(raw.double())

    @functools.cached_property
    def tails(self) -> Tails:
        """What makes the members' scores comparable.

        Raises:
            InputError: a monitor that is not calibrated.
        """
        found = [member.tail for member in self.members if member.tail is not None]
        if len(found) < len(self.members):
            raise InputError("a calibrated monitor", found="one that is only fitted", do="run defense calibrate")
        return Tails.of([tail.double() for tail in found])

    def threshold(self, false_positive: float | None = None, confidence: float | None = None) -> Threshold:
        """The combined score above which an input raises the alarm, by default at the monitor's own promise.

        Raises:
            InputError: not calibrated, or on too few samples for this rate.
        """
        known = self.calibrated_on()
        rate = known.false_positive if false_positive is None else false_positive
        return threshold(known.scores, rate, known.confidence if confidence is None else confidence)

    def class_thresholds(self) -> Mapping[int, Threshold]:
        """Thresholds of those predicted classes for which the promise can be kept; empty unless asked per class."""
        known = self.calibrated_on()
        if not known.per_class:
            return {}
        classes = self.model.spec.num_classes
        return class_thresholds(known.scores, known.predicted, classes, known.false_positive, known.confidence)

    def calibrated_on(self) -> Calibration:
        """The calibration.

        Raises:
            InputError: there is none.
        """
        if self.calibration is None:
            raise InputError("a calibrated monitor", found="one that is only fitted", do="run defense calibrate")
        return self.calibration

    def limits(self, predicted: Tensor) -> Tensor:
        """(N,) thresholds of inputs by their predicted class: its own where it has one, else the global one."""
        limits: Tensor = self._limits[predicted]
        return limits

    @functools.cached_property
    def _limits(self) -> Tensor:
        limits = torch.full((self.model.spec.num_classes,), self.threshold().value, dtype=torch.float64)
        for label, own in self.class_thresholds().items():
            limits[label] = own.value
        return limits

    @functools.cached_property
    def _ordered(self) -> Tensor:
        return self.calibrated_on().scores.double().sort().values

    def judge(self, x: Tensor, *, batch: int = BATCH) -> Detection:
        """Predictions, p-values and alarms.

        Raises:
            InputError: not calibrated, or inputs that do not fit the model.
        """
        found = self.scores(x, batch=batch)
        alarm = found.total > self.limits(found.predicted)
        return Detection(found.predicted, found.total, p_values(found.total, self._ordered, ordered=True), alarm)


def fit_monitor(
    model: BlackBox,
    split: Split,
    detectors: Sequence[Detector],
    *,
    rng: Rng,
    notes: Sequence[str] = (),
    progress: Progress | None = None,
) -> Monitor:
    """Fit detectors on clean labelled data.

    Args:
        model: the victim; it is not changed.
        split: (N, …) inputs and labels, for instance the training data.
        detectors: already placed on the model.
        rng: all randomness.
        notes: what was left out.
        progress: called with detectors done and all.

    Raises:
        InputError: data that do not fit the model, or that are too few.
    """
    model.spec.require_plain("a detector")
    model.spec.require_classes()
    split.check(model.spec)
    reference, members = Reference(model, split), []
    for index, detector in enumerate(detectors):
        state = detector.fit(reference, rng=rng.child(title_of(detector)))
        members.append(Member(detector, state))
        if progress:
            progress(index + 1, len(detectors))
    splits = {"fit": split.fingerprint()}
    return Monitor(model, tuple(members), tuple(notes), {"fit": sample_hashes(split.tensor)}, splits)


def calibrate(
    monitor: Monitor,
    split: Split,
    *,
    rng: Rng,
    false_positive: float = 0.01,
    confidence: float = 0.95,
    per_class: bool = False,
) -> Monitor:
    """The same monitor, with p-values and a threshold from clean data that nothing was fitted on.

    The data must be *unfiltered* traffic: also those that the model answers wrongly. A quarter makes the detectors'
    scores comparable, and the rest, disjoint from it, gives the threshold.

    Args:
        monitor: fitted.
        split: clean data; the labels are not looked at.
        rng: divides the data.
        false_positive: rate that is promised not to be exceeded.
        confidence: with which it is promised.
        per_class: also thresholds by predicted class, whose promises hold together.

    Raises:
        InputError: data that the detectors were fitted on, or too few of them for the promise.
    """
    split.check(monitor.model.spec)
    fitted = {"fit": monitor.seen["fit"]}
    kept = fresh(dataclasses.replace(monitor, seen=fitted), split, "calibrate on")
    order = torch.randperm(len(kept), generator=rng.child("calibrate").torch())
    first = max(MINIMUM, round(_FOR_TAILS * len(kept)))
    raw, predicted = monitor.raw(kept.tensor)
    tails, rest = order[:first], order[first:]
    members = tuple(
        dataclasses.replace(member, tail=fit_tail(raw[tails, index])) for index, member in enumerate(monitor.members)
    )
    ready = dataclasses.replace(monitor, members=members)
    surprises = ready.comparable(raw[rest])
    totals = surprises.sum(dim=1)
    threshold(totals, false_positive, confidence)  # refuses what cannot be promised
    calibration = Calibration(totals, surprises, predicted[rest], false_positive, confidence, per_class)
    seen = {**fitted, "calibration": sample_hashes(kept.tensor)}
    splits = {**monitor.splits, "calibration": split.fingerprint()}
    return dataclasses.replace(ready, calibration=calibration, seen=seen, splits=splits)


def fresh(monitor: Monitor, split: Split, what: str) -> Split:
    """The samples of a split that the monitor has not seen.

    Raises:
        InputError: more than one in a hundred of them were seen: these are not other data.
    """
    known = torch.isin(sample_hashes(split.tensor), torch.cat([*monitor.seen.values()]))
    if int(known.sum()) > _OVERLAP * len(split):
        found = f"{int(known.sum())} of {len(split)} samples that the monitor was fitted or calibrated on"
        raise InputError(f"other data to {what}", found=found, do="use data that it has not seen")
    return split.take(torch.nonzero(~known).reshape(-1)) if bool(known.any()) else split


def sample_hashes(x: Tensor) -> Tensor:
    """(N,) 64-bit hashes of inputs as float32 values, to find the same sample again in other data."""
    rows = x.detach().float().cpu().flatten(1).contiguous().numpy()
    digests = [hashlib.blake2b(row.tobytes(), digest_size=8).digest() for row in rows]
    return torch.tensor([int.from_bytes(digest, "little", signed=True) for digest in digests], dtype=torch.int64)


def _scores(members: Sequence[Member], context: Context) -> Tensor:
    found = torch.stack([member.detector.score(context, member.state).detach() for member in members], dim=1)
    sound = torch.isfinite(found)
    if not bool(sound.all()):
        titles = [member.title for member, fine in zip(members, sound.all(dim=0), strict=True) if not bool(fine)]
        expected = f"finite scores from {' and '.join(titles)}"
        raise InputError(expected, found="NaN or infinity", do="check model and inputs")
    return found


def agreement(monitor: Monitor) -> Mapping[str, Any]:
    """How the members differ on clean data: correlations of their -log p, and alarms that only one would raise.

    Raises:
        InputError: not calibrated.
    """
    known = monitor.calibrated_on()
    titles = [member.title for member in monitor.members]
    correlation = torch.corrcoef(known.surprises.T).reshape(len(titles), len(titles)).nan_to_num(0.0)
    alarms = torch.stack(
        [column > column.sort().values[int(0.99 * (len(column) - 1))] for column in known.surprises.unbind(dim=1)],
        dim=1,
    )
    alone = (alarms & (alarms.sum(dim=1, keepdim=True) == 1)).sum(dim=0)
    return {
        "members": titles,
        "correlation": [[round(float(value), 4) for value in row] for row in correlation],
        "any_alarms": float(alarms.any(dim=1).double().mean()),
        "alarms_of_one_alone": {title: int(count) for title, count in zip(titles, alone, strict=True)},
    }
