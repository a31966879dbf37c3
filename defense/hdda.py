"""High-dimensional discriminant analysis: each class has a subspace of its own, and noise of one size outside.

Source: C. Bouveyron, S. Girard, C. Schmid, "High-dimensional discriminant analysis", Communications in Statistics 36,
2007, model [a_ij b_i Q_i d_i], equations 4 to 6; the density that DeepFense (ICCAD 2018) proposes for its latent
defenders. A class's covariance has the eigenvalues a_1 ... a_d along its principal directions, and b in all others.
"""

from __future__ import annotations

import dataclasses
import math
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

_MEMORY = 512 * 2**20  # of scatter matrices at once; more classes take further passes over the data
_GATHERED = 1 << 18
_FLOOR = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class HDDA(AtLayer):
    """Bouveyron et al., 2007: negative log density under the Gaussian of the class that the victim predicts."""

    name: ClassVar[str] = "hdda"

    layer: str = parameter("early", "qualified name, or first, early, middle, last")
    normalise: bool = parameter(True, "scale features to length 1")
    variance: float = parameter(0.95, "share of a class's variance inside its subspace", minimum=0.1, maximum=1.0)
    directions: int = parameter(64, "most directions of a subspace", minimum=1, maximum=4096)
    noise: float = parameter(0.05, "least noise outside, in units of trace/D", minimum=1e-6, maximum=1.0)

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Means, subspaces and noise; a class with fewer than two samples has those of all classes together.

        Raises:
            InputError: no data, or a layer that is too wide.
        """
        width = next(iter(self._rows(context).shape[1] for context, _ in reference.sample(1, rng).stream([self.tap])))
        whole, classes = Moments.empty(width), reference.classes
        at_once = max(1, int(_MEMORY / (8 * width * width)))
        found: dict[int, tuple[Tensor, ...]] = {}
        for first in range(0, classes, at_once):
            moments = {label: Moments.empty(width) for label in range(first, min(classes, first + at_once))}
            for context, labels in reference.stream([self.tap]):
                rows = self._rows(context)
                for label in sorted(set(labels.unique().tolist()) & moments.keys()):
                    moments[label] = moments[label].add(rows[labels == label])
                if classes > at_once and first == 0:
                    whole = whole.add(rows)
            if classes <= at_once:
                for one in moments.values():
                    whole = whole.merged(one)
            found.update({label: self._law(one) for label, one in moments.items() if one.count > 1})
        if len(found) < classes:
            if not whole.count:
                raise InputError("samples to fit a density on", found="none", do="pass data")
            spare = self._law(whole)
            found.update({label: spare for label in range(classes) if label not in found})
        laws = [found[label] for label in range(classes)]
        names = ("means", "axes", "inverse", "noise", "offset")
        return {
            name: torch.stack(part).float().contiguous()
            for name, part in zip(names, zip(*laws, strict=True), strict=True)
        }

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) negative log densities."""
        rows, classes = self._rows(context), context.predicted
        parts = {name: value.to(rows) for name, value in state.items()}
        centred = rows - parts["means"][classes]
        whole = centred.square().sum(dim=1)
        if len(rows) * parts["axes"][0].numel() <= _GATHERED:
            along = torch.einsum("nd,ndk->nk", centred, parts["axes"][classes]).square()
        else:
            groups = [torch.nonzero(classes == label).reshape(-1) for label in classes.unique()]
            pieces = [centred[places] @ parts["axes"][classes[places[0]]] for places in groups]
            along = torch.cat(pieces)[torch.argsort(torch.cat(groups))].square()
        # Outside the subspace with the noise's variance, inside with the axes' own.
        inside = (along * parts["inverse"][classes]).sum(dim=1)
        outside = (whole - along.sum(dim=1)).clamp_min(0.0) / parts["noise"][classes]
        return 0.5 * (inside + outside) - parts["offset"][classes]

    def _rows(self, context: Context) -> Tensor:
        rows = context.at(self.tap)
        return nn.functional.normalize(rows, dim=1) if self.normalise else rows

    def _law(self, moments: Moments) -> tuple[Tensor, ...]:
        """Mean, axes (D, k), 1/a (k,), b, log normalisation; unused axes are 0."""
        width = len(moments.mean)
        trace = moments.covariance.trace()
        axes, values = principal(moments, self.variance, min(self.directions, max(1, width - 1)))
        least = (self.noise * trace / width).clamp_min(_FLOOR)
        outside = width - len(values)
        noise = ((trace - values.sum()) / outside).clamp_min(least) if outside else least
        values = values.clamp_min(noise)
        whole = values.log().sum() + outside * noise.log() + width * math.log(2.0 * math.pi)
        padded = torch.zeros(width, min(self.directions, width), dtype=torch.float64)
        padded[:, : len(values)] = axes
        inverse = torch.zeros(padded.shape[1], dtype=torch.float64)
        inverse[: len(values)] = 1.0 / values
        return moments.mean, padded, inverse, noise, -0.5 * whole
