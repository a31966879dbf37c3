"""Which neuron of a suspect is which neuron of the original, by what they are made of: their incoming weights.

Never by their activations: among the many orders of a layer's neurons some make any network carry any mark.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import special
from scipy.optimize import linear_sum_assignment

Floats = NDArray[np.float64]
_CHANCE = 1e-3


@dataclasses.dataclass(frozen=True)
class Rows:
    """Incoming weights in common coordinates, of one or several layers that share a scale.

    Attributes:
        original: (n, d) of the original's neurons.
        suspect: (m, d) of the suspect's.
    """

    original: Floats
    suspect: Floats


@dataclasses.dataclass(frozen=True)
class Similarity:
    """Cosines of all pairs, (n, m), over the weights that the suspect has (pruned ones say nothing).

    Attributes:
        cosine: between -1 and 1.
        ratio: (n, m) norm of the suspect's weights over the original's; the factor between them.
        original, suspect: (n,) and (m,) norms of all weights.
        dimension: (m,) number of weights that decide, for the cosine that chance gives.
    """

    cosine: Floats
    ratio: Floats
    original: Floats
    suspect: Floats
    dimension: Floats


@dataclasses.dataclass(frozen=True)
class Matching:
    """The suspect's neurons by name.

    Attributes:
        partner: (m,) the original's neuron that each is, or a further copy of; -1 for none.
        cosine: (m,) with it; 0 for none.
        sure: (m,) whether a cosine so high does not come by chance either, so that the neuron may be read.
    """

    partner: NDArray[np.int64]
    cosine: Floats
    sure: NDArray[np.bool_]

    def found(self, width: int) -> NDArray[np.bool_]:
        """(n,) which of the original's neurons may be read."""
        there = np.zeros(width, dtype=bool)
        there[self.partner[self.sure & (self.partner >= 0)]] = True
        return there


def similarity(rows: Rows) -> Similarity:
    """Cosines and ratios of norms of all pairs."""
    present = (rows.suspect != 0).astype(np.float64)
    dots = rows.original @ rows.suspect.T
    original = np.sqrt((rows.original**2) @ present.T)
    suspect = np.linalg.norm(rows.suspect, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        cosine = np.nan_to_num(dots / (original * suspect))
        ratio = np.nan_to_num(suspect / original, posinf=0.0)
    energy = (rows.original**2).mean(axis=0)
    spread = _participation(present * energy)
    own = 3.0 * _participation(rows.suspect**2)  # of Gaussian weights a third takes part
    dimension = np.minimum(np.minimum(present.sum(axis=1), spread), own)
    return Similarity(np.clip(cosine, -1.0, 1.0), ratio, np.linalg.norm(rows.original, axis=1), suspect, dimension)


def chance_cosine(dimension: Floats, pairs: int, rate: float = _CHANCE) -> Floats:
    """Cosine that none of so many pairs of independent directions exceeds, with probability 1 - ``rate`` at least.

    In d dimensions P(cosine > g) = I(1 - g^2; (d - 1) / 2, 1 / 2) / 2, I the regularised incomplete beta function.
    """
    tail = min(1.0, 2.0 * rate / max(1, pairs))
    inside = special.betaincinv(np.maximum(dimension - 1.0, 1e-6) / 2.0, 0.5, tail)
    return np.asarray(np.where(dimension > 1.0, np.sqrt(1.0 - inside), 1.0), dtype=np.float64)


def match(parts: Sequence[Similarity], signed: Sequence[bool], gate: float) -> Matching:
    """The matching of the largest total cosine, one to one, then copies of neurons that are matched already.

    Args:
        parts: similarities of the layers that make the neurons; they count as many times as they have weights.
        signed: for each, whether opposite signs are the same.
        gate: cosine under which a neuron has no partner.
    """
    weights = np.array([float(np.mean(part.dimension)) for part in parts])
    weights = weights / weights.sum() if weights.sum() > 0 else np.full(len(parts), 1.0 / len(parts))
    score = np.zeros_like(parts[0].cosine)
    for part, both, weight in zip(parts, signed, weights, strict=True):
        score += weight * (np.abs(part.cosine) if both else part.cosine)
    count, others = score.shape
    dimension = sum((part.dimension for part in parts), np.zeros(others))
    high = np.maximum(gate, chance_cosine(dimension, count * others * 2 ** sum(signed)))
    partner = np.full(others, -1, dtype=np.int64)
    rows, columns = linear_sum_assignment(-np.where(score >= gate, score, 0.0))
    kept = score[rows, columns] >= gate
    partner[columns[kept]] = rows[kept]
    best = score.argmax(axis=0)
    copies = (partner < 0) & (score.max(axis=0) >= high) & np.isin(best, partner)
    partner[copies] = best[copies]
    cosine = np.where(partner >= 0, score[partner.clip(min=0), np.arange(others)], 0.0)
    return Matching(partner, cosine, (partner >= 0) & (cosine >= high))


def identity(width: int) -> Matching:
    """Every neuron is itself."""
    return Matching(np.arange(width), np.ones(width), np.ones(width, dtype=bool))


def _participation(energy: Floats) -> Floats:
    """Number of entries among which the energy of each row is shared: (sum e)^2 / sum e^2."""
    total = (energy**2).sum(axis=1)
    return np.asarray(np.where(total > 0, energy.sum(axis=1) ** 2 / np.where(total > 0, total, 1.0), 0.0))
