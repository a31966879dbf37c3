"""Carlini and Wagner's L2 attack: the smallest change that wins by a margin.

Source: N. Carlini, D. Wagner, "Towards evaluating the robustness of neural networks", IEEE S&P 2017, sections V-B
(objective f6), V-C (change of variables), VI-A.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import Differentiable, Split
from deepseal.adapter.quick import quick_copy
from deepseal.attacks.base import Perturbed
from deepseal.attacks.evasion.search import attacked
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

_INSIDE = 1.0 - 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class CarliniWagner(Parameters):
    """Carlini and Wagner, 2017: min ||x' - x||^2 + c * max(z_y - max z_other, -confidence), x' the tanh of free values.

    c is found by bisection for each input; of all iterates that win by the confidence the nearest is kept.
    """

    name: ClassVar[str] = "cw"

    confidence: float = parameter(0.0, "kappa: by how much another logit must win", minimum=0.0, maximum=1e6)
    steps: int = parameter(100, "steps of Adam for each c", minimum=1, maximum=100_000)
    searches: int = parameter(5, "steps of the bisection for c", minimum=1, maximum=100)
    learning_rate: float = parameter(0.05, "step size of Adam", minimum=1e-9, maximum=10.0)
    initial: float = parameter(1.0, "first c", minimum=1e-12, maximum=1e12)

    def perturb(self, model: Differentiable, data: Split, *, rng: Rng) -> Perturbed:
        """Search c and descend.

        Raises:
            InputError: see ``search.attacked``.
        """
        quick = quick_copy(model)

        def search(x: Tensor, y: Tensor, _generator: torch.Generator) -> Tensor:
            return self._search(quick, x, y)

        return attacked(model, data, search, rng=rng)

    def _search(self, model: Differentiable, x: Tensor, y: Tensor) -> Tensor:
        low, high = model.spec.bounds
        middle, half = 0.5 * (low + high), 0.5 * (high - low)
        start = torch.atanh(((x - middle) / half).clamp(-1.0, 1.0) * _INSIDE)
        clean = middle + half * torch.tanh(start)
        weight, lower = torch.full((len(x),), self.initial), torch.zeros(len(x))
        upper = torch.full((len(x),), float("inf"))
        result, nearest = x.clone(), torch.full((len(x),), float("inf"))
        for _ in range(self.searches):
            won = torch.zeros(len(x), dtype=torch.bool)
            free = start.clone().requires_grad_(True)
            adam = torch.optim.Adam([free], lr=self.learning_rate)
            for _ in range(self.steps):
                with torch.enable_grad():
                    moved = middle + half * torch.tanh(free)
                    distance = (moved - clean).flatten(1).pow(2).sum(dim=1)
                    gap = _gap(model.logits(moved), y)
                    loss = distance + weight * (gap + self.confidence).clamp_min(0.0)
                    (free.grad,) = torch.autograd.grad(loss.sum(), free)
                wins = (gap < 0) & (gap <= -self.confidence)
                better = wins & (distance < nearest)
                won |= wins
                nearest = torch.where(better, distance.detach(), nearest)
                result[better] = moved.detach()[better]
                adam.step()
            upper = torch.where(won, torch.minimum(upper, weight), upper)
            lower = torch.where(won, lower, torch.maximum(lower, weight))
            weight = torch.where(torch.isfinite(upper), 0.5 * (lower + upper), 10.0 * weight)
        return result.clamp(low, high)


def _gap(logits: Tensor, y: Tensor) -> Tensor:
    """(N,) z_y minus the best other logit, on the CPU."""
    scores = logits.cpu()
    own = scores.gather(1, y[:, None]).squeeze(1)
    return own - scores.scatter(1, y[:, None], float("-inf")).amax(dim=1)
