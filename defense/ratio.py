"""How near an input's hidden features are to data of its predicted class, relative to the nearest other data.

Density alone says whether an input is rare; an adversarial one is also *nearer to another class than to its own* in
the early layers, which a relative score sees at any density. The nearest-neighbour ratio is that of outlier
detection and trust scores (H. Jiang, B. Kim, M. Guan, M. Gupta, "To trust or not to trust a classifier", NeurIPS 2018)
over L2-normalised features (Y. Sun et al., ICML 2022), taken in the principal directions of the features.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepseal.defense.base import State
from deepseal.defense.context import Context, Reference
from deepseal.defense.gaussian import Moments, principal
from deepseal.defense.layered import AtLayer
from deepseal.errors import InputError
from deepseal.parameters import parameter
from deepseal.rng import Rng

_FLOOR = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistanceRatio(AtLayer):
    """Log distance to the nearest references of the predicted class, minus that to the nearest of all others."""

    name: ClassVar[str] = "ratio"

    layer: str = parameter("first", "qualified name, or first, early, middle, last")
    references: int = parameter(5000, "references that are kept, evenly over the classes", minimum=20)
    neighbours: int = parameter(5, "nearest references whose mean distance counts", minimum=1, maximum=100)
    directions: int = parameter(128, "most principal directions", minimum=1, maximum=4096)
    variance: float = parameter(0.999, "share of the variance that the directions keep", minimum=0.1, maximum=1.0)

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Keep the references.

        Raises:
            InputError: fewer samples than neighbours, or samples of one class only.
        """
        chosen = reference.sample(self.references, rng)
        labels = chosen.split.y.unique(return_counts=True)
        few = int(labels[1].min())
        if len(labels[0]) < 2 or few < self.neighbours:
            found = f"{few} of the rarest of {len(labels[0])} classes"
            expected = f"at least {self.neighbours} samples of each class present, and two classes"
            raise InputError(expected, found=found, do="pass more data")
        moments, rows = None, []
        for context, _ in chosen.stream([self.tap]):
            rows.append(self._rows(context))
            moments = (moments or Moments.empty(rows[-1].shape[1])).add(rows[-1])
        assert moments is not None  # noqa: S101 - at least two classes are there
        directions, _ = principal(moments, self.variance, self.directions)
        projected = torch.cat(rows).float() @ directions.float()
        most = -(-2 * self.references // len(labels[0]))  # of one class, where others are rare
        size = min(int(labels[1].max()), max(self.neighbours, most))
        references = torch.zeros(reference.classes, size, projected.shape[1])
        norms = torch.full((reference.classes, size), torch.inf)  # where there is none, it is infinitely far
        for label in labels[0].tolist():
            own = projected[chosen.split.y == label][:size]
            references[label, : len(own)], norms[label, : len(own)] = own, own.square().sum(dim=1)
        return {"directions": directions.float().contiguous(), "references": references, "norms": norms}

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) log ratios of distances; 0 where the predicted class has no references."""
        rows = self._rows(context).to(state["directions"]) @ state["directions"]
        references, norms = state["references"], state["norms"]
        squared = torch.addmm(norms.flatten(), rows, references.flatten(0, 1).T, alpha=-2.0)
        squared = squared + rows.square().sum(dim=1, keepdim=True)
        nearest = squared.unflatten(1, norms.shape).topk(self.neighbours, dim=2, largest=False).values
        predicted = context.predicted[:, None, None].expand(-1, 1, self.neighbours)
        own = nearest.gather(1, predicted)[:, 0]
        others = nearest.scatter(1, predicted, torch.inf).flatten(1).topk(self.neighbours, dim=1, largest=False).values
        own = torch.where(torch.isinf(own), others, own)
        return self._log_mean(own) - self._log_mean(others)

    def _log_mean(self, squared: Tensor) -> Tensor:
        return squared.clamp_min(_FLOOR).sqrt().mean(dim=1).log()

    def _rows(self, context: Context) -> Tensor:
        return nn.functional.normalize(context.at(self.tap), dim=1)
