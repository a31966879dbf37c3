"""Benign noise: the null of evasion. What a detector says of it is its alarm rate, not its power."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import Differentiable, Split
from deepseal.attacks.base import Perturbed
from deepseal.attacks.evasion.search import attacked
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class Noise(Parameters):
    """Independent uniform noise within the ball; looks at no gradient and no answer."""

    name: ClassVar[str] = "noise"

    epsilon: float = parameter(0.1, "largest change, as a share of the bounds' width", minimum=0.0)
    restarts: int = parameter(1, "draws", minimum=1, maximum=10_000)

    def perturb(self, model: Differentiable, data: Split, *, rng: Rng) -> Perturbed:
        """Add noise, within the bounds.

        Raises:
            InputError: see ``search.attacked``.
        """
        low, high = model.spec.bounds
        radius = self.epsilon * (high - low)

        def search(x: Tensor, _y: Tensor, generator: torch.Generator) -> Tensor:
            return (x + torch.empty_like(x).uniform_(-radius, radius, generator=generator)).clamp(low, high)

        return attacked(model, data, search, rng=rng, restarts=self.restarts)
