"""One input before a model and its monitor, and the same input after an attack on it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from deepseal.adapter import Split
from deepseal.attacks.base import Evasion
from deepseal.defense.evaluation import ADAPTIVE
from deepseal.defense.guarded import GuardedModel, victim_of
from deepseal.defense.monitor import Monitor
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True)
class Judged:
    """What model and monitor say of one input.

    Attributes:
        predicted: the model's class.
        probabilities: (classes,) softmax of its logits.
        score: combined score of the detectors.
        limit: score above which there is an alarm.
        p_value: how rare such a score is among clean inputs.
        alarm: whether the score is above the limit.
    """

    predicted: int
    probabilities: Tensor = dataclasses.field(repr=False)
    score: float
    limit: float
    p_value: float
    alarm: bool


@dataclasses.dataclass(frozen=True)
class Trial:
    """An attack on one input.

    Attributes:
        x: the input as it was, the model's shape.
        changed: what the attack made of it; where it does not fool the model, the last that was tried.
        before: of ``x``.
        after: of ``changed``.
        fooled: whether the answer has changed, checked again; for an attack that knows the monitor: without an alarm.
        moved: how many values were changed.
        largest: the largest change of a value.
    """

    x: Tensor = dataclasses.field(repr=False)
    changed: Tensor = dataclasses.field(repr=False)
    before: Judged
    after: Judged
    fooled: bool
    moved: int
    largest: float


def judged(monitor: Monitor, x: Tensor) -> Judged:
    """Model and monitor on one input of the model's shape.

    Raises:
        InputError: a monitor that is not calibrated, a model that only answers, or an input that does not fit.
    """
    model, batch = victim_of(monitor), x[None]
    monitor.model.spec.check(batch)
    found = monitor.judge(batch)
    return Judged(
        int(found.predicted[0]),
        model.query(batch)[0].double().softmax(dim=0),
        float(found.score[0]),
        float(monitor.limits(found.predicted)[0]),
        float(found.p_value[0]),
        bool(found.alarm[0]),
    )


def trial(monitor: Monitor, x: Tensor, method: Evasion, *, rng: Rng) -> Trial:
    """Attack one input; right is whatever the model answers now.

    Args:
        monitor: calibrated; an attack that knows it runs at its own rate.
        x: of the model's shape.
        method: the attack.
        rng: all its randomness.

    Raises:
        InputError: see ``judged``; or a model that the attack cannot be run on.
    """
    before = judged(monitor, x)
    victim = GuardedModel(monitor) if method.name.startswith(ADAPTIVE) else victim_of(monitor)
    found = method.perturb(victim, Split(x[None], torch.tensor([before.predicted])), rng=rng)
    fooled = bool(found.fooled[0])
    changed = found.x[0] if fooled or found.last is None else found.last[0]
    difference = (changed - x).abs()
    return Trial(
        x,
        changed,
        before,
        judged(monitor, changed),
        fooled,
        int((difference > 0).sum()),
        float(difference.max()),
    )
