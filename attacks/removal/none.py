"""The null attack: a copy, the baseline of every table."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from deepseal.adapter import Classifier, Split
from deepseal.adapter.training import Progress
from deepseal.attacks.base import Removed
from deepseal.parameters import Parameters
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoAttack(Parameters):
    """Does nothing."""

    name: ClassVar[str] = "none"

    def remove(self, model: Classifier, data: Split, *, rng: Rng, progress: Progress | None = None) -> Removed:
        """An unchanged copy."""
        data.check(model.spec)
        return Removed(model.copy(), {"relative_weight_change": 0.0})
