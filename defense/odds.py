"""The odds are odd: how the logits of an input move under noise, compared with how clean inputs' logits move.

Source: K. Roth, Y. Kilcher, T. Hofmann, "The odds are odd: a statistical test for detecting adversarial examples", ICML
2019, equations 5-8. The noise copies are fixed by a seed that belongs to the fitted detector.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import BlackBox
from deepseal.defense.base import Needs, State
from deepseal.defense.context import Context, Reference
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

_FLOOR = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class Odds(Parameters):
    """Roth et al., 2019: the largest standardised move of the logit differences under noise."""

    name: ClassVar[str] = "odds"

    copies: int = parameter(8, "noise copies of each input", minimum=1, maximum=256)
    spread: float = parameter(0.1, "standard deviation of the noise, in widths of the bounds", minimum=1e-4, maximum=1)
    samples: int = parameter(5000, "clean samples for the moments", minimum=20)

    @property
    def needs(self) -> Needs:
        """One pass a copy."""
        return Needs(passes=self.copies)

    def placed(self, model: BlackBox) -> Odds:
        """Itself."""
        return self

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Mean and standard deviation of the moves for each pair of predicted and other class.

        Pairs that were seen less than 20 times have those of all pairs.
        """
        classes, spec = reference.classes, reference.model.spec
        generator = rng.child("noise").torch()
        noise = torch.randn(self.copies, *spec.shape, generator=generator)
        state = {"noise": noise * self.spread * (spec.bounds[1] - spec.bounds[0])}
        count = torch.zeros(classes, dtype=torch.float64)
        total, squares = torch.zeros(2, classes, classes, dtype=torch.float64)
        for context, _ in reference.sample(self.samples, rng.child("sample")).stream():
            moves = self._moves(context, state).double()
            count.index_add_(0, context.predicted, torch.ones(len(moves), dtype=torch.float64))
            total.index_add_(0, context.predicted, moves)
            squares.index_add_(0, context.predicted, moves.square())
        pairs = float(count.sum()) * max(1, classes - 1)
        overall = float(total.sum()) / pairs, float(squares.sum()) / pairs
        n = count.clamp_min(1.0)[:, None]
        mean, variance = total / n, (squares / n - (total / n).square()).clamp_min(0.0)
        rare = (count < 20)[:, None]
        mean = torch.where(rare, torch.full_like(mean, overall[0]), mean)
        variance = torch.where(rare, torch.full_like(mean, max(0.0, overall[1] - overall[0] ** 2)), variance)
        return {**state, "mean": mean.float(), "deviation": variance.sqrt().clamp_min(_FLOOR).float()}

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) the largest standardised move over all other classes."""
        moves = self._moves(context, state)
        standard = (moves - state["mean"][context.predicted]) / state["deviation"][context.predicted]
        return standard.scatter(1, context.predicted[:, None], -torch.inf).amax(dim=1)

    def _moves(self, context: Context, state: State) -> Tensor:
        """(N, classes) mean change under noise of each logit relative to the predicted one's."""
        low, high = context.model.spec.bounds
        noise, x = state["noise"].to(context.x), context.x
        copies = (x[:, None] + noise).clamp(low, high).reshape(-1, *x.shape[1:])
        asked = context.ask(copies).reshape(len(x), len(noise), -1).mean(dim=1) if len(x) else context.logits
        change = asked - context.logits
        return change - change.gather(1, context.predicted[:, None])
