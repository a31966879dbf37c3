"""What trigger marks share that teach each trigger, or group of them, a class: a gap to the other classes.

Cross-entropy stops pushing a trigger that reads right; a gap of logits, asked for through noisy weights, does not, and
it is what fine-tuning and a second mark have to use up.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deepseal.adapter import Classifier, Split
from deepseal.adapter.training import Loss
from deepseal.parameters import parameter
from deepseal.watermark.key import Key
from deepseal.watermark.triggers import TriggerLoss, TriggerScheme


class GapLoss(TriggerLoss):
    """CE on the data + strength * log C * mean relu(1 - g / gap) of a draw of the triggers, read through noisy weights.

    g is the label's logit less the best other one. At g = 0 the second term weighs what cross-entropy does at a guess;
    unlike that, it goes on until every trigger is as far from its frontier. With a gap of 0 it is cross-entropy.
    """

    def __init__(self, model: Classifier, key: Key, scheme: LabelScheme) -> None:
        super().__init__(model, key, scheme)
        self._gap = 0.0 if getattr(scheme, "recipe", "robust") == "paper" else scheme.gap

    def taught(self, logits: Tensor, index: Tensor) -> Tensor:
        """The triggers' part of the loss: scalar, of the (N, classes) answers to the triggers at ``index``."""
        if not self._gap:
            return super().taught(logits, index)
        labels = self._y[index].to(logits.device)[:, None]
        gap = logits.gather(1, labels)[:, 0] - logits.scatter(1, labels, -torch.inf).amax(dim=1)
        return math.log(logits.shape[1]) * nn.functional.relu(1.0 - gap / self._gap).mean()


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelScheme(TriggerScheme):
    """A trigger mark whose triggers, or groups of them, are taught a class each."""

    # What keys that do not state it, being older, were embedded with.
    earlier: ClassVar[Mapping[str, Any]] = MappingProxyType({"gap": 0.0, "settle": 0})

    gap: float = parameter(
        10.0,
        "logit gap to the best other class that each trigger is taught (robust); 0: cross-entropy",
        minimum=0.0,
        maximum=1000.0,
    )
    drift: float = parameter(0.5, "weight noise the triggers are read through", minimum=0.0, maximum=10.0)

    def loss(self, model: Classifier, data: Split, key: Key) -> Loss:
        """What embedding minimises."""
        return GapLoss(model, key, self)
