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
from deepseal.adapter.quick import quick_copy
from deepseal.attacks.base import Perturbed
from deepseal.attacks.evasion.pgd import require_finite
from deepseal.attacks.evasion.search import along, attacked
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

_CLEAR = 1e-4  # how far beyond the border counts: what rounding cannot undo


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
        quick = quick_copy(model)

        def search(x: Tensor, y: Tensor, _generator: torch.Generator) -> Tensor:
            return self._walk(quick, x, y)

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
            there = _margin(model.query(here), y[going]) > -_CLEAR
            going, here = going[there], here[there]
            if not len(going):
                break
            change[going] += _step(model, here, y[going], others[going])
        return result


def _margin(scores: Tensor, y: Tensor) -> Tensor:
    """(N,) score of the right class minus the best other, in units of the largest score."""
    own = scores.gather(1, y[:, None])[:, 0]
    best = scores.scatter(1, y[:, None], float("-inf")).amax(dim=1)
    return (own - best) / scores.abs().amax(dim=1).clamp_min(1e-12)


def _step(model: Differentiable, x: Tensor, y: Tensor, others: Tensor) -> Tensor:
    """|f| / ||w||^2 * w of the nearest border, f = z_k - z_y and w its gradient, k among the (N, K) others."""
    best, step = torch.full((len(x),), float("inf")), torch.zeros_like(x)
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_(True)
        logits = model.logits(leaf)
        index = others.to(logits.device)
        gaps = logits.gather(1, index) - logits.gather(1, y[:, None].to(logits.device))
        last = gaps.shape[1] - 1
        for column in range(last + 1):
            (w,) = torch.autograd.grad(gaps[:, column].sum(), leaf, retain_graph=column < last)
            require_finite(w)
            f = gaps[:, column].detach().to(x).abs() + _CLEAR
            length = w.flatten(1).norm(dim=1).clamp_min(1e-12)
            nearer = f / length < best
            best = torch.where(nearer, f / length, best)
            step = torch.where(along(nearer, x), along(f / length.square(), x) * w, step)
    return step
