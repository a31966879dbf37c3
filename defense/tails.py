"""From a detector's scores to p-values under clean data: empirical, with an exponential tail.

Above a high quantile the excess of a score is taken to be exponential (the peaks-over-threshold model of extreme value
theory with shape 0; J. Pickands, 1975), so that scores beyond all clean ones are still told apart. Between the
observed quantiles log p is interpolated, so that it has a gradient. These p-values only make the scores of several
detectors comparable: what an alarm's rate is, an exact order statistic of their combination says, on other data.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from deepseal.errors import InputError

_KNOTS = 256
_TAIL = 0.05
MINIMUM = 100


def fit_tail(scores: Tensor) -> Tensor:
    """(K + 1, 2) knots of (score, -log p), rising; the last row is (mean excess over the last knot, unused).

    Args:
        scores: (N,) of clean data.

    Raises:
        InputError: fewer than 100, or scores that are not finite.
    """
    if len(scores) < MINIMUM:
        found, do = str(len(scores)), "pass more clean data"
        raise InputError(f"at least {MINIMUM} clean samples to compare scores with", found=found, do=do)
    values = scores.double().sort().values
    if not bool(torch.isfinite(values).all()):
        raise InputError("finite scores", found="NaN or infinity", do="check model and data")
    ranks = torch.linspace(0, 1.0 - _TAIL, _KNOTS, dtype=torch.float64) * (len(values) - 1)
    knots = values[ranks.round().long()]
    survival = 1.0 - ranks.round() / len(values)
    keep = torch.ones(_KNOTS, dtype=torch.bool)
    keep[1:] = knots[1:] > knots[:-1]  # of equal scores the first: the share of clean scores at least as high
    knots, survival = knots[keep], survival[keep]
    excess = (values[values > knots[-1]] - knots[-1]).mean() if bool((values > knots[-1]).any()) else torch.tensor(0.0)
    least = 1e-6 * max(float((values[-1] - values[0]).abs()), float(values[-1].abs()), 1e-6)
    end = torch.tensor([[max(float(excess), least), 0.0]], dtype=torch.float64)
    return torch.cat([torch.stack([knots, -survival.log()], dim=1), end])


def surprise(scores: Tensor, tail: Tensor) -> Tensor:
    """(N,) -log p of scores: 0 for the most ordinary, differentiable in the scores."""
    return Tails.of([tail.to(scores)]).surprise(scores[:, None])[:, 0]


@dataclasses.dataclass(frozen=True)
class Tails:
    """The knots of several detectors side by side.

    Attributes:
        knots: (members, K) scores, rising; infinity where a detector has fewer.
        heights: (members, K) their -log p.
        last: (members,) number of the last knot.
        scale: (members,) mean excess over it.
    """

    knots: Tensor
    heights: Tensor
    last: Tensor
    scale: Tensor

    @classmethod
    def of(cls, tails: Sequence[Tensor]) -> Tails:
        """From what ``fit_tail`` gives for each."""
        most = max(len(tail) - 1 for tail in tails)
        knots = tails[0].new_full((len(tails), max(2, most)), torch.inf)
        heights = torch.zeros_like(knots)
        for row, tail in enumerate(tails):
            knots[row, : len(tail) - 1], heights[row, : len(tail) - 1] = tail[:-1, 0], tail[:-1, 1]
        last = torch.tensor([len(tail) - 2 for tail in tails])
        return cls(knots, heights, last, torch.stack([tail[-1, 0] for tail in tails]))

    def surprise(self, scores: Tensor) -> Tensor:
        """(N, members) -log p of (N, members) scores."""
        rows = scores.T.contiguous()
        place = torch.searchsorted(self.knots, rows.detach(), right=True)
        place = torch.minimum(place, self.last[:, None]).clamp_min(1)
        low, high = self.knots.gather(1, place - 1), self.knots.gather(1, place)
        below, above = self.heights.gather(1, place - 1), self.heights.gather(1, place)
        within = below + ((rows - low) / (high - low)).clamp(0.0, 1.0) * (above - below)
        end, top = self.knots.gather(1, self.last[:, None]), self.heights.gather(1, self.last[:, None])
        beyond = top + (rows - end) / self.scale[:, None]
        return torch.where(rows > end, beyond, within).T
