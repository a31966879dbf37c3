"""Auto-PGD: projected gradients with momentum, whose step size follows the progress.

Source: F. Croce, M. Hein, "Reliable evaluation of adversarial robustness with an ensemble of diverse parameter-free
attacks", ICML 2020 (arXiv 2003.01690), algorithm 1, conditions 1 and 2, and the DLR losses of equations 6 and 7.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import Differentiable, Split
from deepseal.adapter.quick import quick_copy
from deepseal.attacks.base import Perturbed
from deepseal.attacks.evasion.pgd import Objective, cross_entropy_of, require_finite
from deepseal.attacks.evasion.search import Search, first_success, ranked_class
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

_MOMENTUM, _PROGRESS = 0.75, 0.75


@dataclasses.dataclass(frozen=True, kw_only=True)
class APGD(Parameters):
    """Croce and Hein, 2020 (L-inf): where the loss stops rising the step is halved, and the search goes on at the best.

    ``loss="dlr"`` is the difference of logits ratio, which no scaling of the logits flattens; it needs three classes.
    ``loss="targeted"`` is its targeted form, run towards one likely wrong class after the other; it needs four.
    """

    name: ClassVar[str] = "apgd"

    epsilon: float = parameter(0.3, "radius of the ball, as a share of the bounds' width", minimum=0.0)
    steps: int = parameter(100, "gradient steps", minimum=2, maximum=100_000)
    restarts: int = parameter(1, "random starting points", minimum=1, maximum=10_000)
    loss: str = parameter(
        "ce", "cross-entropy, difference of logits ratio, or its targeted form", choices=("ce", "dlr", "targeted")
    )
    targets: int = parameter(9, "classes that each restart of the targeted loss aims at", minimum=1, maximum=10_000)

    def perturb(self, model: Differentiable, data: Split, *, rng: Rng) -> Perturbed:
        """Raise the loss.

        Raises:
            InputError: fewer than three classes for ``dlr``, four for ``targeted``, or see ``search.first_success``.
        """
        least = {"ce": 0, "dlr": 3, "targeted": 4}[self.loss]
        if 0 < model.spec.num_classes < least:
            number, given = {3: "three", 4: "four"}[least], str(model.spec.num_classes)
            raise InputError(f"{number} classes for the {self.loss} loss", found=given, do="use loss=ce")
        ranks = range(min(self.targets, model.spec.num_classes - 1) if self.loss == "targeted" else 1)
        quick = quick_copy(model)
        searches = [self._search(quick, rank) for _ in range(self.restarts) for rank in ranks]
        found, _ = first_success(model, data, searches, rng=rng)
        return found

    def _search(self, model: Differentiable, rank: int) -> Search:
        def search(x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
            low, high = model.spec.bounds
            return climbed(
                x, self._objective(model, x, y, rank), self.epsilon * (high - low), (low, high), self.steps, generator
            )

        return search

    def _objective(self, model: Differentiable, x: Tensor, y: Tensor, rank: int) -> Objective:
        if self.loss == "ce":
            return cross_entropy_of(model, y)
        if self.loss == "dlr":
            return difference_of_logits_ratio(model, y)
        return targeted_ratio(model, y, ranked_class(model, x, y, rank))


def difference_of_logits_ratio(model: Differentiable, labels: Tensor) -> Objective:
    """(N,) -(z_y - max z_other) / (z_(1) - z_(3)), the logits in descending order."""

    def objective(z: Tensor) -> Tensor:
        logits = model.logits(z)
        index = labels[:, None].to(logits.device)
        own = logits.gather(1, index).squeeze(1)
        other = logits.scatter(1, index, float("-inf")).amax(dim=1)
        top = logits.topk(3, dim=1).values
        return -(own - other) / (top[:, 0] - top[:, 2] + 1e-12)

    return objective


def targeted_ratio(model: Differentiable, labels: Tensor, targets: Tensor) -> Objective:
    """(N,) -(z_y - z_t) / (z_(1) - (z_(3) + z_(4)) / 2), the logits in descending order (equation 7)."""

    def objective(z: Tensor) -> Tensor:
        logits = model.logits(z)
        own, aimed = (logits.gather(1, index[:, None].to(logits.device))[:, 0] for index in (labels, targets))
        top = logits.topk(4, dim=1).values
        return -(own - aimed) / (top[:, 0] - 0.5 * (top[:, 2] + top[:, 3]) + 1e-12)

    return objective


def climbed(
    x: Tensor,
    objective: Objective,
    radius: float,
    bounds: tuple[float, float],
    steps: int,
    generator: torch.Generator,
) -> Tensor:
    """The best inputs found in a ball of the maximum norm around ``x`` (absolute radius) and within the bounds."""

    def project(z: Tensor) -> Tensor:
        return z.clamp(x - radius, x + radius).clamp(*bounds)

    shape = (len(x), *[1] * (x.dim() - 1))
    size = torch.full(shape, 2.0 * radius)
    here = project(x + torch.empty_like(x).uniform_(-radius, radius, generator=generator))
    value, gradient = _evaluated(objective, here)
    best, most, slope = here.clone(), value.clone(), gradient.clone()
    before, rises = here, torch.zeros(len(x))
    last_size, last_most, last_checkpoint = size.clone(), most.clone(), 0
    checkpoints = _checkpoints(steps)
    for index in range(1, steps + 1):
        share = 1.0 if index == 1 else _MOMENTUM
        ahead = project(here + size * gradient.sign())
        there = project(here + share * (ahead - here) + (1.0 - share) * (here - before))
        previous = value
        before, here = here, there
        value, gradient = _evaluated(objective, here)
        rises += value > previous
        better = value > most
        most = torch.where(better, value, most)
        best[better], slope[better] = here[better], gradient[better]
        if index in checkpoints:
            slow = rises < _PROGRESS * (index - last_checkpoint)
            stuck = (last_size == size).reshape(len(x)) & (last_most == most)
            halve = slow | stuck
            last_size, last_most, last_checkpoint = size.clone(), most.clone(), index
            size = torch.where(halve.reshape(shape), 0.5 * size, size)
            here, before, gradient = (z.clone() for z in (here, before, gradient))
            here[halve], before[halve], gradient[halve] = best[halve], best[halve], slope[halve]
            value = torch.where(halve, most, value)
            rises = torch.zeros(len(x))
    return best


def _evaluated(objective: Objective, x: Tensor) -> tuple[Tensor, Tensor]:
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_(True)
        values = objective(leaf)
        (gradient,) = torch.autograd.grad(values.sum(), leaf)
    require_finite(gradient)
    return values.detach().cpu(), gradient


def _checkpoints(steps: int) -> set[int]:
    """ceil(p_j * steps), p_0 = 0, p_1 = 0.22, p_(j+1) = p_j + max(p_j - p_(j-1) - 0.03, 0.06)."""
    shares = [0.0, 0.22]
    while shares[-1] < 1.0:
        shares.append(shares[-1] + max(shares[-1] - shares[-2] - 0.03, 0.06))
    return {math.ceil(round(share * steps, 6)) for share in shares[1:] if share <= 1.0}
