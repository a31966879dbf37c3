"""DeepFool: the nearest border, as a linear model of the network has it.

Source: S.-M. Moosavi-Dezfooli, A. Fawzi, P. Frossard, "DeepFool: a simple and accurate method to fool deep neural
networks", CVPR 2016, algorithm 2 (L2).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import Differentiable, Split
from deepseal.attacks.base import Perturbed
from deepseal.attacks.evasion.pgd import Objective, gradient_of
from deepseal.attacks.evasion.search import attacked
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepFool(Parameters):
    """Moosavi-Dezfooli et al., 2016: step to the nearest of the linearised borders until the label changes.

    The overshoot is counted in, so that a result lies beyond the border and not on it.
    """

    name: ClassVar[str] = "deepfool"

    steps: int = parameter(50, "most steps", minimum=1, maximum=10_000)
    overshoot: float = parameter(0.02, "share by which the change is stretched", minimum=0.0, maximum=10.0)
    candidates: int = parameter(10, "classes whose borders are looked at, the likeliest first", minimum=2)

    def perturb(self, model: Differentiable, data: Split, *, rng: Rng) -> Perturbed:
        """Walk to the nearest border.

        Raises:
            InputError: see ``search.attacked``.
        """

        def search(x: Tensor, y: Tensor, _generator: torch.Generator) -> Tensor:
            return self._walk(model, x, y)

        return attacked(model, data, search, rng=rng)

    def _walk(self, model: Differentiable, x: Tensor, y: Tensor) -> Tensor:
        low, high = model.spec.bounds
        count = min(self.candidates, model.spec.num_classes)
        others = model.query(x).scatter(1, y[:, None], float("-inf")).topk(count - 1, dim=1).indices
        change, going = torch.zeros_like(x), torch.arange(len(x))
        result = x.clone()
        for _ in range(self.steps):
            here = (x[going] + (1.0 + self.overshoot) * change[going]).clamp(low, high)
            result[going] = here
            there = model.query(here).argmax(dim=1) == y[going]
            going, here = going[there], here[there]
            if not len(going):
                break
            change[going] += self._step(model, here, y[going], others[going])
        return result

    def _step(self, model: Differentiable, x: Tensor, y: Tensor, others: Tensor) -> Tensor:
        """|f| / ||w||^2 * w of the nearest border, f = z_k - z_y and w its gradient."""
        scores = model.query(x)
        own = gradient_of(score_of(model, y), x)
        best = torch.full((len(x),), float("inf"))
        step = torch.zeros_like(x)
        for column in others.T:
            index = column[:, None]
            other = gradient_of(score_of(model, column), x)
            w = (other - own).flatten(1)
            f = (scores.gather(1, y[:, None]) - scores.gather(1, index)).squeeze(1).abs() + 1e-4
            length = w.norm(dim=1).clamp_min(1e-12)
            nearer = f / length < best
            best = torch.where(nearer, f / length, best)
            step[nearer] = ((f / length.pow(2))[:, None] * w)[nearer].reshape(-1, *x.shape[1:])
        return step


def score_of(model: Differentiable, labels: Tensor) -> Objective:
    """(N,) logit of each input's label, a function of the inputs."""

    def objective(z: Tensor) -> Tensor:
        logits = model.logits(z)
        return logits.gather(1, labels[:, None].to(logits.device)).squeeze(1)

    return objective
