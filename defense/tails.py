"""From a detector's scores to p-values under clean data: empirical, with an exponential tail.

Above a high quantile the excess of a score is taken to be exponential (the peaks-over-threshold model of extreme value
theory with shape 0; J. Pickands, 1975), so that scores beyond all clean ones are still told apart. Between the
observed quantiles log p is interpolated, so that it has a gradient. These p-values only make the scores of several
detectors comparable: what an alarm's rate is, an exact order statistic of their combination says, on other data.
"""

from __future__ import annotations

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
    tail = tail.to(scores)
    knots, heights, scale = tail[:-1, 0].contiguous(), tail[:-1, 1], tail[-1, 0]
    beyond = heights[-1] + (scores - knots[-1]) / scale
    if len(knots) == 1:
        return torch.where(scores > knots[-1], beyond, heights[-1].expand_as(scores))
    place = torch.searchsorted(knots, scores.detach().contiguous(), right=True).clamp(1, len(knots) - 1)
    low, high = knots[place - 1], knots[place]
    share = ((scores - low) / (high - low)).clamp(0.0, 1.0)
    within = heights[place - 1] + share * (heights[place] - heights[place - 1])
    return torch.where(scores > knots[-1], beyond, within)
