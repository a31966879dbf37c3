"""The fast adaptive boundary attack: the nearest wrong input, from projections on linearised borders within the bounds.

Source: F. Croce, M. Hein, "Minimally distorted adversarial examples with a fast adaptive boundary attack", ICML 2020
(arXiv 1907.02044): projection of section 2.2 (maximum norm), biased step of equation 8, steps back of equation 9,
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
from deepseal.attacks.evasion.pgd import gradient_of
from deepseal.attacks.evasion.search import Search, along, first_success, ranked_class
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

_OVERSHOOT, _MOST_BIAS, _BACK = 1.05, 0.1, 0.9


@dataclasses.dataclass(frozen=True, kw_only=True)
class FAB(Parameters):
    """Croce and Hein, 2020 (L-inf): walks along the border towards the input; what lies in the ball counts.

    Each restart walks to the border of the next likeliest class, the first from the input, the others from a point
    drawn within half the radius.
    """

    name: ClassVar[str] = "fab"

    epsilon: float = parameter(0.3, "radius of the ball, as a share of the bounds' width", minimum=0.0)
    steps: int = parameter(50, "steps of each walk", minimum=1, maximum=100_000)
    restarts: int = parameter(9, "walks, each towards another class", minimum=1, maximum=10_000)

    def perturb(self, model: Differentiable, data: Split, *, rng: Rng) -> Perturbed:
        """Walk along the border.

        Raises:
            InputError: see ``search.first_success``.
        """
        quick = quick_copy(model)
        found, _ = first_success(model, data, [self._search(quick, rank) for rank in range(self.restarts)], rng=rng)
        return found

    def _search(self, model: Differentiable, rank: int) -> Search:
        def search(x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
            start = x
            if rank:
                low, high = model.spec.bounds
                radius = 0.5 * self.epsilon * (high - low)
                start = (x + torch.empty_like(x).uniform_(-radius, radius, generator=generator)).clamp(low, high)
            return self._walk(model, x, start, y, ranked_class(model, x, y, rank))

        return search

    def _walk(self, model: Differentiable, x: Tensor, start: Tensor, y: Tensor, target: Tensor) -> Tensor:
        low, high = model.spec.bounds
        radius = self.epsilon * (high - low)
        here, result, going = start, x.clone(), torch.arange(len(x))
        nearest = torch.full((len(x),), float("inf"))
        for _ in range(self.steps):
            origin, here = x[going], here[going] if len(here) > len(going) else here
            slope, gap = _border(model, here, y[going], target[going])
            there = nearest_on_border(here, slope, gap, (low, high))
            # The same plane seen from the input: w . (origin - here) further away.
            offset = gap + ((origin - here) * slope).flatten(1).sum(dim=1)
            home = nearest_on_border(origin, slope, offset, (low, high))
            first, second = _length(there - here), _length(home - origin)
            bias = along((first / (first + second).clamp_min(1e-12)).clamp_max(_MOST_BIAS), x)
            ahead = (1.0 - bias) * (here + _OVERSHOOT * (there - here))
            here = (ahead + bias * (origin + _OVERSHOOT * (home - origin))).clamp(low, high)
            wrong = model.query(here).argmax(dim=1) != y[going]
            distance = _length(here - origin)
            better = wrong & (distance < nearest[going])
            result[going[better]] = here[better]
            nearest[going[better]] = distance[better]
            here = torch.where(along(wrong, x), (1.0 - _BACK) * origin + _BACK * here, here)
            left = nearest[going] > radius
            going, here = going[left], here[left]
            if not len(going):
                break
        return torch.where(along(nearest <= radius, x), result, x)


def nearest_on_border(x: Tensor, slope: Tensor, gap: Tensor, bounds: tuple[float, float]) -> Tensor:
    """The point within the bounds with slope . (z - x) + gap = 0 that is nearest to x in the maximum norm.

    Where the bounds let none reach the border, the one that comes nearest to it.

    Args:
        x: (N, …) within the bounds.
        slope: (N, …) of the border.
        gap: (N,) value at x.
        bounds: lowest and highest value.
    """
    w, flat = slope.flatten(1), x.flatten(1)
    sign = -torch.sign(w) * torch.sign(gap)[:, None]
    room = torch.where(sign > 0, bounds[1] - flat, flat - bounds[0]).clamp_min(0.0)
    weight = torch.where(sign == 0, torch.zeros_like(w), w.abs())
    # Every feature moves by t, or by its room where that is less: sum |w| min(t, room) = |gap|, piecewise linear in t.
    order = room.argsort(dim=1)
    rooms, weights = room.gather(1, order), weight.gather(1, order)
    spent = (weights * rooms).cumsum(dim=1)
    free = weights.sum(dim=1, keepdim=True) - weights.cumsum(dim=1)
    reached = spent + rooms * free
    piece = torch.searchsorted(reached, gap.abs()[:, None].contiguous()).clamp_max(w.shape[1] - 1)
    before = (piece - 1).clamp_min(0)
    start = torch.where(piece > 0, spent.gather(1, before), torch.zeros_like(gap)[:, None])
    rate = torch.where(piece > 0, free.gather(1, before), weight.sum(dim=1, keepdim=True))
    size = (gap.abs()[:, None] - start) / rate.clamp_min(1e-30)
    return (flat + sign * torch.minimum(size, room)).reshape(x.shape).clamp(*bounds)


def _border(model: Differentiable, x: Tensor, y: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient (N, …) and value (N,) of z_target - z_y, which is 0 on the border."""
    values: list[Tensor] = []

    def objective(z: Tensor) -> Tensor:
        logits = model.logits(z)
        pair = torch.stack([target, y], dim=1).to(logits.device)
        both = logits.gather(1, pair)
        values.append((both[:, 0] - both[:, 1]).detach().to(x))
        return both[:, 0] - both[:, 1]

    return gradient_of(objective, x), values[0]


def _length(change: Tensor) -> Tensor:
    return change.flatten(1).abs().amax(dim=1)
