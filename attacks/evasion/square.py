"""The square attack: random squares at the corners of the ball, kept where the margin falls. Asks for scores only.

Source: M. Andriushchenko, F. Croce, N. Flammarion, M. Hein, "Square attack: a query-efficient black-box adversarial
attack via random search", ECCV 2020, algorithms 1 and 2 (L-inf), section 4.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import BlackBox, Split
from deepseal.adapter.quick import quick_copy
from deepseal.attacks.base import Perturbed
from deepseal.attacks.evasion.search import attacked
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

# Shares of the queries (of 10,000) after which the squares' area is halved (section 4).
_HALVINGS = (0.001, 0.005, 0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Square(Parameters):
    """Andriushchenko et al., 2020 (L-inf). Inputs that are no images get runs of neighbouring features for squares."""

    name: ClassVar[str] = "square"

    epsilon: float = parameter(0.3, "radius of the ball, as a share of the bounds' width", minimum=0.0)
    queries: int = parameter(1000, "queries an input", minimum=1, maximum=1_000_000)
    area: float = parameter(0.05, "share of the input that the first squares cover", minimum=1e-6, maximum=1.0)

    def perturb(self, model: BlackBox, data: Split, *, rng: Rng) -> Perturbed:
        """Search at random.

        Raises:
            InputError: a model that answers with labels only, or see ``search.attacked``.
        """
        if model.output == "labels":
            raise InputError("a model that answers with scores", found="labels only", do="use hop-skip-jump")
        quick = quick_copy(model)

        def search(x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
            return self._search(quick, x, y, generator)

        return attacked(model, data, search, rng=rng)

    def _search(self, model: BlackBox, x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
        low, high = model.spec.bounds
        radius = self.epsilon * (high - low)
        frame = x.shape[1:] if x.dim() == 4 else (1, 1, x[0].numel())
        clean = x.reshape(-1, *frame)
        channels, height, width = frame

        def signs(*shape: int) -> Tensor:
            return torch.randint(0, 2, shape, generator=generator) * 2.0 - 1.0

        stripes = radius * signs(len(x), channels, 1, width)
        best = (clean + stripes).clamp(low, high)
        margin = _margin(model, best.reshape(x.shape), y)
        for index in range(1, self.queries):
            going = torch.nonzero(margin >= 0).reshape(-1)
            if not len(going):
                break
            halved = sum(index > share * self.queries for share in _HALVINGS)
            pixels = self.area * 0.5**halved * height * width
            tall = min(height, max(1, round(math.sqrt(pixels))))
            wide = min(width, max(1, round(pixels / tall)))
            tops, lefts = (
                torch.randint(0, size - side + 1, (len(going), 1), generator=generator)
                for size, side in ((height, tall), (width, wide))
            )
            values = radius * signs(len(going), channels, 1, 1)
            within = [
                (places >= start) & (places < start + side)
                for places, start, side in ((torch.arange(height), tops, tall), (torch.arange(width), lefts, wide))
            ]
            square = (within[0][:, :, None] & within[1][:, None, :])[:, None]
            changed = torch.where(square, clean[going] + values, best[going]).clamp(low, high)
            found = _margin(model, changed.reshape(-1, *x.shape[1:]), y[going])
            better = found < margin[going]
            best[going[better]] = changed[better]
            margin[going[better]] = found[better]
        return best.reshape(x.shape)


def _margin(model: BlackBox, x: Tensor, y: Tensor) -> Tensor:
    """(N,) score of the right class minus the best other."""
    scores = model.query(x)
    own = scores.gather(1, y[:, None]).squeeze(1)
    return own - scores.scatter(1, y[:, None], float("-inf")).amax(dim=1)
