"""Carlini and Wagner's attack with the detector as one more logit to beat: the smallest silent change.

Source: N. Carlini, D. Wagner, "Adversarial examples are not easily detected: bypassing ten detection methods", AISec
2017, section 3 (a detector's term beside the classifier's), over the attack of "Towards evaluating the robustness of
neural networks", IEEE S&P 2017.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import Differentiable, Split
from deepseal.attacks.base import Guarded, Perturbed
from deepseal.attacks.evasion.guarded import adaptive, averaged_suspicion, guarded, surrogates
from deepseal.attacks.evasion.search import Search
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

_INSIDE = 1.0 - 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptiveCW(Parameters):
    """Carlini and Wagner, 2017: min ||x' - x||^2 + c * (max(gap, -confidence) + b * max(suspicion - limit, 0)).

    c and b are found for each input: c by bisection, b (``balance``) doubled after each search in which the input was
    wrong but never unflagged. Suspicion counts in units of the limit. There is no ball: of all iterates that are wrong
    by the confidence and unflagged the nearest is kept.
    """

    name: ClassVar[str] = "adaptive-cw"

    confidence: float = parameter(0.0, "kappa: by how much another logit must win", minimum=0.0, maximum=1e6)
    steps: int = parameter(100, "steps of Adam for each c", minimum=1, maximum=100_000)
    searches: int = parameter(6, "steps of the bisection for c", minimum=1, maximum=100)
    learning_rate: float = parameter(0.05, "step size of Adam", minimum=1e-9, maximum=10.0)
    initial: float = parameter(1.0, "first c", minimum=1e-12, maximum=1e12)
    balance: float = parameter(1.0, "first weight of the detector's term", minimum=1e-6, maximum=1e6)
    surrogate: str = parameter(
        "both", "backward pass of steps without a gradient", choices=("identity", "smooth", "both")
    )
    eot: int = parameter(1, "draws of a random detector's noise for each gradient", minimum=1, maximum=1000)

    def perturb(self, model: Differentiable, data: Split, *, rng: Rng) -> Perturbed:
        """Search the weights and descend.

        Raises:
            InputError: a model without a detector, or see ``search.first_success``.
        """
        victim = guarded(model)
        trials = [({"surrogate": kind}, self._trial(victim, kind)) for kind in surrogates(self.surrogate)]
        return adaptive(victim, data, trials, rng=rng)

    def _trial(self, model: Guarded, surrogate: str) -> Search:
        def search(x: Tensor, y: Tensor, _generator: torch.Generator) -> Tensor:
            return self._descend(model, x, y, surrogate)

        return search

    def _descend(self, model: Guarded, x: Tensor, y: Tensor, surrogate: str) -> Tensor:
        low, high = model.spec.bounds
        middle, half = 0.5 * (low + high), 0.5 * (high - low)
        start = torch.atanh(((x - middle) / half).clamp(-1.0, 1.0) * _INSIDE)
        clean = middle + half * torch.tanh(start)
        unit = max(abs(model.limit), 1e-6)
        weight, lower = torch.full((len(x),), self.initial), torch.zeros(len(x))
        upper, balance = torch.full_like(lower, float("inf")), torch.full_like(lower, self.balance)
        result, nearest, least = x.clone(), torch.full_like(lower, float("inf")), torch.full_like(lower, float("inf"))
        for _ in range(self.searches):
            won, misled = torch.zeros(2, len(x), dtype=torch.bool)
            free = start.clone().requires_grad_(True)
            adam = torch.optim.Adam([free], lr=self.learning_rate)
            for _ in range(self.steps):
                with torch.enable_grad():
                    moved = middle + half * torch.tanh(free)
                    distance = (moved - clean).flatten(1).square().sum(dim=1)
                    gap = _gap(model, moved, y)
                    excess = (averaged_suspicion(model, moved, surrogate, self.eot).to(distance) - model.limit) / unit
                    terms = (gap + self.confidence).clamp_min(0.0) + balance * excess.clamp_min(0.0)
                    (gradient,) = torch.autograd.grad((distance + weight * terms).sum(), free)
                free.grad = gradient.nan_to_num(0.0, 0.0, 0.0)
                wrong = (gap < 0) & (gap <= -self.confidence)
                silent = wrong & (excess <= 0)
                # Before the first success the least suspicious wrong input is kept, then the nearest silent one.
                better = silent & (distance < nearest)
                closer = wrong & torch.isinf(nearest) & ~silent & (excess < least)
                result[better | closer] = moved.detach()[better | closer]
                nearest = torch.where(better, distance.detach(), nearest)
                least = torch.where(closer, excess.detach(), least)
                won, misled = won | silent, misled | wrong
                adam.step()
            upper = torch.where(won, torch.minimum(upper, weight), upper)
            lower = torch.where(won, lower, torch.maximum(lower, weight))
            weight = torch.where(torch.isfinite(upper), 0.5 * (lower + upper), 10.0 * weight)
            balance = torch.where(misled & ~won, 2.0 * balance, balance)
        return result.clamp(low, high)


def _gap(model: Guarded, x: Tensor, y: Tensor) -> Tensor:
    """(N,) z_y minus the best other logit, on the CPU."""
    logits = model.logits(x).cpu()
    own = logits.gather(1, y[:, None])[:, 0]
    return own - logits.scatter(1, y[:, None], float("-inf")).amax(dim=1)
