"""Distance to the k-th nearest clean neighbour in a hidden layer.

Source: Y. Sun, Y. Ming, X. Zhu, Y. Li, "Out-of-distribution detection with deep nearest neighbors", ICML 2022,
algorithm 1: features are scaled to length 1.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepseal.defense.base import State
from deepseal.defense.context import Context, Reference
from deepseal.defense.layered import AtLayer, bank, squared_distances
from deepseal.parameters import parameter
from deepseal.rng import Rng

_FLOOR = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class NearestNeighbours(AtLayer):
    """Sun et al., 2022: distance to the 50th nearest of the references, whatever their classes."""

    name: ClassVar[str] = "knn"

    references: int = parameter(5000, "references that are kept, evenly over the classes", minimum=1)
    neighbours: int = parameter(50, "which neighbour's distance counts", minimum=1, maximum=100_000)

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Keep the references."""
        kept = bank(reference, [self.tap], self.references, rng)
        return {"references": nn.functional.normalize(kept.features[self.tap], dim=1)}

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) distances; of fewer references than neighbours to the farthest."""
        rows = nn.functional.normalize(context.at(self.tap), dim=1)
        references = state["references"].to(rows)
        count = min(self.neighbours, len(references))
        nearest = squared_distances(rows, references).topk(count, dim=1, largest=False).values
        farthest: Tensor = torch.sqrt(nearest[:, -1].clamp_min(_FLOOR))
        return farthest
