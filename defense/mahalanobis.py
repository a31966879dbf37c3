"""The Mahalanobis detector: class means and one covariance for all classes, in several layers.

Source: K. Lee, K. Lee, H. Lee, J. Shin, "A simple unified framework for detecting out-of-distribution samples and
adversarial attacks", NeurIPS 2018, equations 1 and 2, without its input processing. There a logistic regression that
was trained on attacks weights the layers; here nothing is: each layer's distance is standardised on clean data, and the
score is their mean.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.defense.base import State
from deepseal.defense.context import Context, Reference
from deepseal.defense.gaussian import Moments
from deepseal.defense.layered import AtLayers, scale_of
from deepseal.parameters import parameter
from deepseal.rng import Rng

_FLOOR = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class Mahalanobis(AtLayers):
    """Lee et al., 2018: distance to the nearest class mean under the tied covariance, mean over layers."""

    name: ClassVar[str] = "mahalanobis"

    shrinkage: float = parameter(1e-3, "how far covariances are drawn to trace/D", minimum=1e-9, maximum=1.0)

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Means and whitenings of each layer, in one pass, and the scale of clean distances in another.

        Raises:
            InputError: a layer that is too wide.
        """
        moments: list[dict[int, Moments]] = [{} for _ in self.taps]
        for context, labels in reference.stream(self.taps):
            for known, tap in zip(moments, self.taps, strict=True):
                rows = context.at(tap)
                for label in labels.unique().tolist():
                    known[label] = known.get(label, Moments.empty(rows.shape[1])).add(rows[labels == label])
        state: dict[str, Tensor] = {}
        for index, known in enumerate(moments):
            whiten = _whitening(list(known.values()), self.shrinkage)
            means = torch.stack([known[label].mean for label in sorted(known)])
            state[f"{index}.whiten"] = whiten.float()
            state[f"{index}.means"] = (means @ whiten.T).float()
        distances = torch.cat([self._distances(context, state) for context, _ in reference.stream(self.taps)])
        state["scale"] = torch.stack([scale_of(column) for column in distances.unbind(dim=1)])
        return state

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) mean standardised distances."""
        found = self._distances(context, state)
        mean, spread = state["scale"].to(found).unbind(dim=1)
        return ((found - mean) / spread).mean(dim=1)

    def _distances(self, context: Context, state: State) -> Tensor:
        """(N, layers) squared distances to the nearest class mean."""
        found = []
        for index, tap in enumerate(self.taps):
            rows = context.at(tap)
            white = rows @ state[f"{index}.whiten"].to(rows).T
            means = state[f"{index}.means"].to(rows)
            each = [(white - mean).square().sum(dim=1) for mean in means]
            found.append(torch.stack(each, dim=1).min(dim=1).values)
        return torch.stack(found, dim=1)


def _whitening(classes: list[Moments], shrinkage: float) -> Tensor:
    """(D, D) W with W^T W the inverse of the covariance around the class means; drawn further where samples are few."""
    count, width = sum(one.count for one in classes), len(classes[0].mean)
    covariance = torch.stack([one.scatter for one in classes]).sum(dim=0) / count
    strength = max(shrinkage, width / (width + count) if count <= width else 0.0)
    level = (covariance.trace() / width).clamp_min(_FLOOR)
    eye = torch.eye(width, dtype=torch.float64)
    factor = torch.linalg.cholesky((1.0 - strength) * covariance + strength * level * eye)
    whiten: Tensor = torch.linalg.solve_triangular(factor, eye, upper=False)
    return whiten
