"""The odds are odd: how the logits of an input move under noise, compared with how clean inputs' logits move.

Source: K. Roth, Y. Kilcher, T. Hofmann, "The odds are odd: a statistical test for detecting adversarial examples", ICML
2019, equations 5-8. The noise copies are fixed by a seed that belongs to the fitted detector.

The paper standardises each move by the mean and deviation of its pair of classes. Clean inputs with large margins lose
more of them under noise, which hides adversarial ones behind confident clean ones; so by default a move is compared
with the one that a clean input of the same logits would make (a line for each pair of classes).
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
_FEW = 20


@dataclasses.dataclass(frozen=True, kw_only=True)
class Odds(Parameters):
    """Roth et al., 2019: the largest standardised move of the logit differences under noise."""

    name: ClassVar[str] = "odds"

    copies: int = parameter(8, "noise copies of each input", minimum=1, maximum=256)
    spread: float = parameter(0.05, "standard deviation of the noise, in widths of the bounds", minimum=1e-4, maximum=1)
    conditional: bool = parameter(True, "expect of an input what its logits let expect; False: as in the paper")
    samples: int = parameter(10_000, "clean samples for the moments", minimum=_FEW)

    @property
    def needs(self) -> Needs:
        """One pass a copy."""
        return Needs(passes=self.copies)

    def placed(self, model: BlackBox) -> Odds:
        """Itself."""
        return self

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Intercept, slope and deviation of the moves for each pair of predicted and other class.

        Pairs that were seen less than 20 times have those of all pairs.
        """
        classes, spec = reference.classes, reference.model.spec
        generator = rng.child("noise").torch()
        noise = torch.randn(self.copies, *spec.shape, generator=generator)
        state = {"noise": noise * self.spread * (spec.bounds[1] - spec.bounds[0])}
        sums = torch.zeros(6, classes, classes, dtype=torch.float64)  # of 1, d, m, d^2, d m, m^2
        for context, _ in reference.sample(self.samples, rng.child("sample")).stream():
            moves, differences = (part.double() for part in self._moves(context, state))
            ones = torch.ones_like(moves)
            terms = (ones, differences, moves, differences.square(), differences * moves, moves.square())
            for total, term in zip(sums, terms, strict=True):
                total.index_add_(0, context.predicted, term)
        own = torch.eye(classes, dtype=torch.bool)
        overall = sums.masked_fill(own, 0.0).sum(dim=(1, 2))[:, None, None].expand_as(sums)
        intercept, slope, deviation = self._line(torch.where(sums[0] < _FEW, overall, sums))
        return {
            **state,
            "intercept": intercept.float(),
            "slope": slope.float(),
            "deviation": deviation.clamp_min(_FLOOR).float(),
        }

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) the largest standardised move over all other classes."""
        moves, differences = self._moves(context, state)
        intercept, slope, deviation = (state[name][context.predicted] for name in ("intercept", "slope", "deviation"))
        standard = (moves - intercept - slope * differences) / deviation
        return standard.scatter(1, context.predicted[:, None], -torch.inf).amax(dim=1)

    def _line(self, sums: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Least squares of m on d from their sums; a constant where the slope is not wanted or not determined."""
        count, d, m, dd, dm, mm = sums
        n = count.clamp_min(1.0)
        spread = (dd - d.square() / n).clamp_min(0.0)
        known = (spread > _FLOOR * dd) & self.conditional
        slope = torch.where(known, (dm - d * m / n) / spread.clamp_min(1e-30), torch.zeros_like(d))
        left = (mm - m.square() / n - slope.square() * spread).clamp_min(0.0)
        return (m - slope * d) / n, slope, (left / n).sqrt()

    def _moves(self, context: Context, state: State) -> tuple[Tensor, Tensor]:
        """(N, classes) mean moves under noise of each logit relative to the predicted one's, and what it was before."""
        low, high = context.model.spec.bounds
        noise, x = state["noise"].to(context.x), context.x
        copies = (x[:, None] + noise).clamp(low, high).reshape(-1, *x.shape[1:])
        asked = context.ask(copies).reshape(len(x), len(noise), -1).mean(dim=1)
        after, before = (part - part.gather(1, context.predicted[:, None]) for part in (asked, context.logits))
        return after - before, before
