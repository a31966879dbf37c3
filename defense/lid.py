"""Local intrinsic dimensionality: how fast the number of clean neighbours grows with distance, layer by layer.

Source: X. Ma, B. Li, Y. Wang, S. Erfani, S. Wijewickrema, G. Schoenebeck, D. Song, M. Houle, J. Bailey, "Characterizing
adversarial subspaces using local intrinsic dimensionality", ICLR 2018, equation 4 (the maximum-likelihood estimate).
There a logistic regression that was trained on attacks weights the layers; here nothing is: each layer's estimate is
standardised on clean data, and the score is their mean.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.defense.base import State
from deepseal.defense.context import Context, Reference
from deepseal.defense.layered import AtLayers, bank, scale_of, squared_distances
from deepseal.errors import InputError
from deepseal.parameters import parameter
from deepseal.rng import Rng

_FLOOR = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class LID(AtLayers):
    """Ma et al., 2018: estimates from the nearest of a fixed sample of clean references, mean over layers."""

    name: ClassVar[str] = "lid"

    references: int = parameter(1000, "references that are kept, evenly over the classes", minimum=3)
    neighbours: int = parameter(20, "nearest references that an estimate is made from", minimum=2, maximum=10_000)

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Keep references, and the scale of estimates at as many other clean inputs.

        Raises:
            InputError: fewer than four samples.
        """
        kept = bank(reference, self.taps, 2 * self.references, rng.child("references"))
        order = torch.randperm(len(kept.labels), generator=rng.child("halves").torch())
        half = len(order) // 2
        if half < 2:
            raise InputError("at least 4 samples", found=str(len(order)), do="pass more data")
        state = {f"{index}.references": kept.features[tap][order[:half]] for index, tap in enumerate(self.taps)}
        scales = []
        for index, tap in enumerate(self.taps):
            scales.append(scale_of(self._estimate(kept.features[tap][order[half:]], state[f"{index}.references"])))
        return {**state, "scale": torch.stack(scales)}

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) mean standardised estimates."""
        scores = []
        for index, tap in enumerate(self.taps):
            rows = context.at(tap)
            mean, spread = state["scale"][index].to(rows)
            scores.append((self._estimate(rows, state[f"{index}.references"].to(rows)) - mean) / spread)
        return torch.stack(scores).mean(dim=0)

    def _estimate(self, rows: Tensor, references: Tensor) -> Tensor:
        """(N,) -1 / mean_i log(r_i / r_k) over the k nearest."""
        count = min(self.neighbours, len(references))
        nearest = squared_distances(rows, references).topk(count, dim=1, largest=False).values
        logs = 0.5 * nearest.clamp_min(_FLOOR).log()
        # Equal distances to all of them, as between constant features, say nothing: the estimate is bounded.
        return -1.0 / (logs - logs[:, -1:]).mean(dim=1).clamp_max(-1e-3)
