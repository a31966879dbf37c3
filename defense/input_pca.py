"""Input defenders that need no dictionary: what the principal directions of clean inputs leave over.

Reconstruction from a low-dimensional basis of legitimate inputs is DeepFense's input defender (Rouhani et al., ICCAD
2018, section 5) with principal components instead of learned atoms (compare A. Bhagoji, D. Cullina, C. Sitawarin, P.
Mittal, 2018). The relative form asks whether another class's basis would reconstruct the input better than that of the
class the victim predicts.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import BlackBox
from deepseal.defense.base import Needs, State
from deepseal.defense.context import Context, Reference
from deepseal.defense.gaussian import Moments, principal
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

_FLOOR = 1e-12
_INSTEAD = "use a detector that reads a layer, such as density or ratio"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Reconstruction(Parameters):
    """Log of the energy that the principal directions of clean inputs do not hold."""

    name: ClassVar[str] = "input-pca"

    variance: float = parameter(0.95, "share of the variance that the directions keep", minimum=0.1, maximum=0.9999)
    directions: int = parameter(1024, "most directions", minimum=1, maximum=4096)

    @property
    def needs(self) -> Needs:
        """The inputs."""
        return Needs()

    def placed(self, model: BlackBox) -> Reconstruction:
        """Itself."""
        return self

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Principal directions.

        Raises:
            InputError: inputs of too many values.
        """
        moments = None
        for x in reference.split.tensor.split(512):
            rows = x.flatten(1)
            moments = (moments or Moments.empty(rows.shape[1], do=_INSTEAD)).add(rows)
        assert moments is not None  # noqa: S101 - a split is never empty
        directions, _ = principal(moments, self.variance, self.directions)
        return {"mean": moments.mean.float(), "directions": directions.float().contiguous()}

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) log energies of the residual."""
        rows = context.x.flatten(1).to(state["mean"]) - state["mean"]
        left = rows.square().sum(dim=1) - (rows @ state["directions"]).square().sum(dim=1)
        return left.clamp_min(_FLOOR).log()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RelativeReconstruction(Parameters):
    """Reconstruction error in the basis of the predicted class, relative to the best other class's."""

    name: ClassVar[str] = "inrel"

    directions: int = parameter(30, "principal directions a class", minimum=1, maximum=1024)

    @property
    def needs(self) -> Needs:
        """The inputs and the answer."""
        return Needs()

    def placed(self, model: BlackBox) -> RelativeReconstruction:
        """Itself."""
        return self

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Each class's mean and principal directions; a class with fewer samples has fewer, a missing class none.

        Raises:
            InputError: fewer than two classes with samples, or inputs of too many values.
        """
        labels, inputs = reference.split.y, reference.split.tensor
        width = inputs[0].numel()
        means = torch.zeros(reference.classes, width)
        bases = torch.zeros(reference.classes, self.directions, width)
        present = torch.zeros(reference.classes, dtype=torch.bool)
        for label in labels.unique().tolist():
            moments = Moments.empty(width, do=_INSTEAD)
            for x in inputs[labels == label].split(512):
                moments = moments.add(x.flatten(1))
            most = min(self.directions, max(1, moments.count - 1))
            found, _ = principal(moments, 1.0, most)
            means[label], bases[label, : found.shape[1]], present[label] = moments.mean, found.T, True
        if int(present.sum()) < 2:
            raise InputError("samples of at least two classes", found=f"{int(present.sum())}", do="pass more data")
        offsets = torch.einsum("ckd,cd->ck", bases.double(), means.double()).float()
        return {"means": means, "bases": bases, "offsets": offsets, "present": present}

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) log ratios of reconstruction errors; 0 where the predicted class has no basis."""
        rows = context.x.flatten(1).to(state["means"])
        means, bases = state["means"], state["bases"]
        classes, count, width = bases.shape
        held = (rows @ bases.reshape(-1, width).T).reshape(-1, classes, count) - state["offsets"]
        energy = rows.square().sum(dim=1, keepdim=True) + means.square().sum(dim=1) - 2.0 * rows @ means.T
        errors = (energy - held.square().sum(dim=2)).clamp_min(_FLOOR).log()
        errors = errors.masked_fill(~state["present"], torch.inf)
        own = errors.gather(1, context.predicted[:, None])[:, 0]
        best = errors.scatter(1, context.predicted[:, None], torch.inf).amin(dim=1)
        return torch.where(torch.isfinite(own), own - best, torch.zeros_like(own))
