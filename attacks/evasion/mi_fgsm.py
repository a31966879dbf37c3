"""The momentum iterative method: steps along a running mean of gradients, which transfers better to other models.

Source: Y. Dong, F. Liao, T. Pang, H. Su, J. Zhu, X. Hu, J. Li, "Boosting adversarial attacks with momentum", CVPR 2018,
algorithm 1.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import Differentiable, Split
from deepseal.adapter.quick import quick_copy
from deepseal.attacks.base import Perturbed
from deepseal.attacks.evasion.pgd import cross_entropy_of, gradient_of
from deepseal.attacks.evasion.search import attacked
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class MIFGSM(Parameters):
    """Dong et al., 2018: g <- mu * g + gradient / ||gradient||_1; a signed step along g."""

    name: ClassVar[str] = "mi-fgsm"

    epsilon: float = parameter(0.3, "radius of the ball, as a share of the bounds' width", minimum=0.0)
    steps: int = parameter(10, "gradient steps, each of epsilon / steps", minimum=1, maximum=100_000)
    decay: float = parameter(1.0, "mu, the share of the old direction that stays", minimum=0.0, maximum=1e3)

    def perturb(self, model: Differentiable, data: Split, *, rng: Rng) -> Perturbed:
        """Signed steps along accumulated gradients.

        Raises:
            InputError: see ``search.attacked``.
        """
        low, high = model.spec.bounds
        radius = self.epsilon * (high - low)
        quick = quick_copy(model)

        def search(x: Tensor, y: Tensor, _generator: torch.Generator) -> Tensor:
            objective, moved, direction = cross_entropy_of(quick, y), x, torch.zeros_like(x)
            everything = tuple(range(1, x.dim()))
            for _ in range(self.steps):
                gradient = gradient_of(objective, moved)
                length = gradient.abs().sum(dim=everything, keepdim=True).clamp_min(1e-30)
                direction = self.decay * direction + gradient / length
                moved = moved + radius / self.steps * direction.sign()
                moved = moved.clamp(x - radius, x + radius).clamp(low, high)
            return moved

        return attacked(model, data, search, rng=rng)
