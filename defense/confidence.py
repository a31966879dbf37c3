"""Scores of the answer alone.

Sources: D. Hendrycks, K. Gimpel, "A baseline for detecting misclassified and out-of-distribution examples", ICLR 2017
(maximum softmax probability); W. Liu, X. Wang, J. Owens, Y. Li, "Energy-based out-of-distribution detection", NeurIPS
2020, equation 4.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import BlackBox
from deepseal.defense.base import Needs, State
from deepseal.defense.context import Context, Reference
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaxSoftmax(Parameters):
    """Hendrycks and Gimpel, 2017: how improbable the model itself holds its answer to be."""

    name: ClassVar[str] = "max-softmax"

    @property
    def needs(self) -> Needs:
        """The shared answers."""
        return Needs()

    def placed(self, model: BlackBox) -> MaxSoftmax:
        """Itself."""
        return self

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Nothing to learn."""
        return {}

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) log of the odds against the answer: log (1 - p) / p, which does not saturate where p is nearly 1."""
        own = context.logits.gather(1, context.predicted[:, None])
        others = context.logits.scatter(1, context.predicted[:, None], -torch.inf)
        return torch.logsumexp(others - own, dim=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Energy(Parameters):
    """Liu et al., 2020: the negative log of the sum of the exponentials of the logits."""

    name: ClassVar[str] = "energy"

    temperature: float = parameter(1.0, "divides the logits", minimum=1e-3, maximum=1e3)

    @property
    def needs(self) -> Needs:
        """The shared answers."""
        return Needs()

    def placed(self, model: BlackBox) -> Energy:
        """Itself."""
        return self

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Nothing to learn."""
        return {}

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) energies."""
        return -self.temperature * torch.logsumexp(context.logits / self.temperature, dim=1)
