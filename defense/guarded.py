"""A monitored model as an attacker sees it, and as an application uses it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from deepseal.adapter import Classifier, InputSpec
from deepseal.adapter.access import Output
from deepseal.adapter.inputs import Batch
from deepseal.defense.context import SURROGATES, differentiable_context
from deepseal.defense.monitor import Detection, Monitor
from deepseal.errors import DeepSealError, InputError, UnknownNameError

ABSTAIN = -1


class AlarmError(DeepSealError):
    """An input that the monitor holds for adversarial; ``detection`` has its word on the whole batch."""

    def __init__(self, detection: Detection) -> None:
        self.detection = detection
        count, total = int(detection.alarm.sum()), len(detection.alarm)
        least = float(detection.p_value.min())
        super().__init__(f"{count} of {total} inputs look adversarial (smallest p-value {least:.2g}); look at them")


@dataclasses.dataclass(frozen=True)
class GuardedModel:
    """The victim and its monitor as one model: see ``attacks.base.Guarded``.

    Attributes:
        monitor: calibrated.
        false_positive: rate at which it raises alarms; None for the monitor's own.
    """

    monitor: Monitor
    false_positive: float | None = None
    output: Output = dataclasses.field(default="logits", init=False)

    def __post_init__(self) -> None:
        victim_of(self.monitor)
        self.limit  # noqa: B018 - refuses what cannot be promised

    @property
    def spec(self) -> InputSpec:
        """What the victim takes."""
        return self.monitor.model.spec

    @property
    def limit(self) -> float:
        """Combined score above which an input raises the alarm."""
        return self.monitor.threshold(self.false_positive).value

    def query(self, x: Batch) -> Tensor:
        """The victim's answers."""
        return self.monitor.model.query(x)

    def logits(self, x: Batch) -> Tensor:
        """The victim's logits, differentiable."""
        return victim_of(self.monitor).logits(x)

    def suspicion(self, x: Tensor, *, surrogate: str = "identity") -> Tensor:
        """(N,) combined scores, differentiable in ``x``.

        Raises:
            UnknownNameError: no such surrogate.
        """
        if surrogate not in SURROGATES:
            raise UnknownNameError("surrogate", surrogate, SURROGATES)
        with torch.enable_grad():
            inputs = x if x.requires_grad else x.detach().requires_grad_(True)
            context = differentiable_context(victim_of(self.monitor), inputs, self.monitor.taps, surrogate=surrogate)
            scores = [member.detector.score(context, member.state) for member in self.monitor.members]
            return self.monitor.tails.surprise(torch.stack(scores, dim=1).double()).sum(dim=1).to(scores[0])

    def alarms(self, x: Tensor) -> Tensor:
        """(N,) True where an input raises the alarm."""
        return self.monitor.scores(x).total > self.limit


@dataclasses.dataclass(frozen=True)
class Guard:
    """A monitored model in use: it answers what looks clean.

    Attributes:
        monitor: calibrated.
        abstain: answer -1 for inputs that raise the alarm, instead of raising an error.
    """

    monitor: Monitor
    abstain: bool = False

    def predict(self, x: Tensor) -> Tensor:
        """(N,) classes.

        Raises:
            AlarmError: an input raises the alarm (unless the guard abstains).
            InputError: inputs that do not fit the model.
        """
        found = self.monitor.judge(x)
        if bool(found.alarm.any()) and not self.abstain:
            raise AlarmError(found)
        return found.predicted.masked_fill(found.alarm, ABSTAIN)


def guarded(monitor: Monitor, *, abstain: bool = False) -> Guard:
    """A model that raises, or abstains, where its monitor raises the alarm.

    Raises:
        InputError: a monitor that is not calibrated.
    """
    monitor.calibrated_on()
    return Guard(monitor, abstain)


def victim_of(monitor: Monitor) -> Classifier:
    """The model that a monitor watches.

    Raises:
        InputError: it only answers, so that nothing can follow its gradients.
    """
    if not isinstance(monitor.model, Classifier):
        raise InputError("a model with weights to attack", found="one that only answers", do="use its weights file")
    return monitor.model
