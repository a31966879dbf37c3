"""The null detector: the same score for every input."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import BlackBox
from deepseal.defense.base import Needs, State
from deepseal.defense.context import Context, Reference
from deepseal.parameters import Parameters
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class Constant(Parameters):
    """Knows nothing: the baseline whose area under the curve is one half."""

    name: ClassVar[str] = "constant"

    @property
    def needs(self) -> Needs:
        """Nothing."""
        return Needs()

    def placed(self, model: BlackBox) -> Constant:
        """Itself."""
        return self

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Nothing to learn."""
        return {}

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) zeros."""
        return torch.zeros_like(context.logits[:, 0])
