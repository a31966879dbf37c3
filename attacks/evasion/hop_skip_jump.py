"""HopSkipJump: along the border by labels alone.

Source: J. Chen, M. I. Jordan, M. J. Wainwright, "HopSkipJumpAttack: a query-efficient decision-based attack", IEEE S&P
2020 (arXiv 1904.02144), algorithms 1 and 2 (L2, untargeted).
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import BlackBox, Split
from deepseal.attacks.base import Perturbed
from deepseal.attacks.evasion.search import attacked
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

_TRIES = 100  # random inputs, before an input is given up


@dataclasses.dataclass(frozen=True, kw_only=True)
class HopSkipJump(Parameters):
    """Chen et al., 2020: bisection to the border, the gradient there by Monte Carlo, a step, and again.

    An input has about ``iterations * queries * sqrt(iterations)`` queries at most; it is walked alone.
    """

    name: ClassVar[str] = "hop-skip-jump"

    iterations: int = parameter(15, "steps along the border", minimum=1, maximum=10_000)
    queries: int = parameter(100, "queries for the first gradient; later ones take sqrt(t) as many", minimum=1)

    def perturb(self, model: BlackBox, data: Split, *, rng: Rng) -> Perturbed:
        """Walk along the border.

        Raises:
            InputError: see ``search.attacked``.
        """

        def search(x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
            walked = [_Walk(model, one, int(label), generator) for one, label in zip(x, y, strict=True)]
            results = [walk.result(self.iterations, self.queries) for walk in walked]
            return torch.stack(results) if results else x

        return attacked(model, data, search, rng=rng)


class _Walk:
    """One input's walk."""

    def __init__(self, model: BlackBox, x: Tensor, label: int, generator: torch.Generator) -> None:
        self._model, self._x, self._label, self._generator = model, x, label, generator
        self._bounds = model.spec.bounds
        self._tolerance = 1.0 / x.numel() ** 1.5

    def result(self, iterations: int, queries: int) -> Tensor:
        here = self._start()
        if here is None:
            return self._x
        here = self._to_border(here)
        for index in range(1, iterations + 1):
            distance = float((here - self._x).norm())
            radius = 0.1 * (self._bounds[1] - self._bounds[0]) if index == 1 else self._radius(distance)
            direction = self._gradient(here, radius, int(queries * math.sqrt(index)))
            step = distance / math.sqrt(index)
            while step > 1e-9 and not self._fools((here + step * direction).clamp(*self._bounds)[None])[0]:
                step /= 2.0
            there = (here + step * direction).clamp(*self._bounds)
            moved = self._to_border(there) if self._fools(there[None])[0] else here
            here = moved if (moved - self._x).norm() < (here - self._x).norm() else here
        return here

    def _radius(self, distance: float) -> float:
        size: float = math.sqrt(self._x.numel()) * self._tolerance * distance
        return size

    def _start(self) -> Tensor | None:
        """A random input that is not of the label."""
        tries = torch.empty(_TRIES, *self._x.shape).uniform_(*self._bounds, generator=self._generator)
        wrong = torch.nonzero(self._fools(tries)).reshape(-1)
        return tries[wrong[0]] if len(wrong) else None

    def _to_border(self, beyond: Tensor) -> Tensor:
        """Bisection between the input and a point beyond the border; the result is beyond it."""
        low, high = 0.0, 1.0
        while high - low > self._tolerance:
            middle = 0.5 * (low + high)
            if self._fools(((1.0 - middle) * self._x + middle * beyond)[None])[0]:
                high = middle
            else:
                low = middle
        return (1.0 - high) * self._x + high * beyond

    def _gradient(self, here: Tensor, radius: float, count: int) -> Tensor:
        """Unit vector of mean (phi - mean phi) * u over random directions u (equation 16), phi = +-1 by the answer."""
        u = torch.randn(count, *here.shape, generator=self._generator)
        u = u / u.flatten(1).norm(dim=1).reshape(-1, *[1] * here.dim())
        moved = (here + radius * u).clamp(*self._bounds)
        u = (moved - here) / radius
        phi = self._fools(moved).float() * 2.0 - 1.0
        weights = phi - phi.mean() if 0 < float((phi > 0).float().mean()) < 1 else phi
        direction = (weights.reshape(-1, *[1] * here.dim()) * u).mean(dim=0)
        unit: Tensor = direction / direction.norm().clamp_min(1e-12)
        return unit

    def _fools(self, x: Tensor) -> Tensor:
        answers = self._model.query(x)
        labels = answers if self._model.output == "labels" else answers.argmax(dim=1)
        fools: Tensor = labels != self._label
        return fools
