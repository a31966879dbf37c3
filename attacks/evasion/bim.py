"""The basic iterative method: small signed steps from the input itself.

Source: A. Kurakin, I. Goodfellow, S. Bengio, "Adversarial examples in the physical world", ICLR workshop 2017
(arXiv 1607.02533), section 2.2.
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
class BIM(Parameters):
    """Kurakin et al., 2017: FGSM with a small step, again and again, cut to the ball; no random start."""

    name: ClassVar[str] = "bim"

    epsilon: float = parameter(0.3, "radius of the ball, as a share of the bounds' width", minimum=0.0)
    steps: int = parameter(40, "gradient steps", minimum=1, maximum=100_000)
    step_size: float = parameter(2.5, "length of all steps together, in radii", minimum=1e-6, maximum=1e6)

    def perturb(self, model: Differentiable, data: Split, *, rng: Rng) -> Perturbed:
        """Signed gradient steps.

        Raises:
            InputError: see ``search.attacked``.
        """
        quick = quick_copy(model)

        def search(x: Tensor, y: Tensor, _generator: torch.Generator) -> Tensor:
            size = self.step_size * self.epsilon / self.steps
            objective = cross_entropy_of(quick, y)
            return ascent(x, objective, model.spec, epsilon=self.epsilon, steps=self.steps, step_size=size)

        return attacked(model, data, search, rng=rng)
