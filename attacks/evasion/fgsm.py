"""The fast gradient sign method: one step.

Source: I. Goodfellow, J. Shlens, C. Szegedy, "Explaining and harnessing adversarial examples", ICLR 2015, section 4.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import Differentiable, Split
from deepseal.adapter.quick import quick_copy
from deepseal.attacks.base import Perturbed
from deepseal.attacks.evasion.pgd import ascent, cross_entropy_of
from deepseal.attacks.evasion.search import attacked
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class FGSM(Parameters):
    """Goodfellow et al., 2015: x + epsilon * sign of the gradient of the cross-entropy."""

    name: ClassVar[str] = "fgsm"

    epsilon: float = parameter(0.3, "size of the step, as a share of the bounds' width", minimum=0.0)

    def perturb(self, model: Differentiable, data: Split, *, rng: Rng) -> Perturbed:
        """One signed gradient step.

        Raises:
            InputError: see ``search.attacked``.
        """
        quick = quick_copy(model)

        def search(x: Tensor, y: Tensor, _generator: torch.Generator) -> Tensor:
            step = self.epsilon
            return ascent(x, cross_entropy_of(quick, y), model.spec, epsilon=step, steps=1, step_size=step)

        return attacked(model, data, search, rng=rng)
