"""A latent defender without training: where the predicted class's data lie in a hidden layer.

Source: B. Rouhani, M. Samragh, M. Javaheripi, T. Javidi, F. Koushanfar, "DeepFense: online accelerated defense against
adversarial deep learning", ICCAD 2018, section 4, in the practical form: features are L2-normalised, projected to the
principal directions, and each class is one Gaussian; without the fine-tuned copy, so that one pass serves the victim
and all its defenders.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepseal.defense.base import State
from deepseal.defense.context import Context, Reference
from deepseal.defense.gaussian import ClassGaussians, Moments, log_density, principal
from deepseal.defense.layered import AtLayer
from deepseal.parameters import parameter
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class LatentDensity(AtLayer):
    """Rouhani et al., 2018: negative log density under the Gaussian of the class that the victim predicts."""

    name: ClassVar[str] = "density"

    layer: str = parameter("early", "qualified name, or first, early, middle, last")
    normalise: bool = parameter(True, "scale features to length 1")
    variance: float = parameter(0.99, "share of the variance that the directions keep", minimum=0.1, maximum=1.0)
    directions: int = parameter(64, "most directions", minimum=1, maximum=4096)
    shrinkage: float = parameter(0.01, "how far covariances are drawn to trace/D", minimum=0.0, maximum=1.0)
    per_class: bool = parameter(True, "one Gaussian a class; else one for all, also for models of many classes")

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Principal directions and Gaussians, in two passes over the data.

        Raises:
            InputError: no data, or a layer that is too wide.
        """
        tap = self.tap
        moments = None
        for context, _ in reference.stream([tap]):
            rows = self._rows(context)
            moments = (moments or Moments.empty(rows.shape[1])).add(rows)
        assert moments is not None  # noqa: S101 - a split is never empty
        directions, _ = principal(moments, self.variance, self.directions)
        groups = reference.classes if self.per_class else 1
        classes = [Moments.empty(directions.shape[1]) for _ in range(groups)]
        for context, labels in reference.stream([tap]):
            rows = (self._rows(context).double() - moments.mean) @ directions
            for label in labels.unique().tolist() if self.per_class else ():
                classes[label] = classes[label].add(rows[labels == label])
            if not self.per_class:
                classes[0] = classes[0].add(rows)
        gaussians = ClassGaussians.of(classes, self.shrinkage)
        return {
            "mean": moments.mean.float(),
            "directions": directions.float().contiguous(),
            "means": gaussians.means.float(),
            "whiten": gaussians.whiten.float(),
            "offset": gaussians.offset.float(),
        }

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) negative log densities."""
        rows = (self._rows(context).to(state["mean"]) - state["mean"]) @ state["directions"]
        classes = context.predicted if self.per_class else torch.zeros_like(context.predicted)
        return -log_density(rows, classes, state["means"], state["whiten"], state["offset"])

    def _rows(self, context: Context) -> Tensor:
        rows = context.at(self.tap)
        return nn.functional.normalize(rows, dim=1) if self.normalise else rows
