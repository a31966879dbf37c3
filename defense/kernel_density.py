"""Kernel density of the predicted class in the last hidden layer.

Source: R. Feinman, R. Curtin, S. Shintre, A. Gardner, "Detecting adversarial samples from artifacts", arXiv 1703.00410,
2017, equation 5. The bandwidth is the one under which left-out clean samples are likeliest; there it was tuned by hand.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.defense.base import State
from deepseal.defense.context import Context, Reference
from deepseal.defense.layered import AtLayer, bank, squared_distances
from deepseal.errors import InputError
from deepseal.parameters import parameter
from deepseal.rng import Rng

_CANDIDATES, _WIDEST = 25, 1000.0
_FLOOR = 1e-6
_LEFT_OUT = 2000


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelDensity(AtLayer):
    """Feinman et al., 2017: minus the log of a Gaussian kernel density over references of the predicted class."""

    name: ClassVar[str] = "kernel-density"

    references: int = parameter(5000, "references that are kept, evenly over the classes", minimum=3)
    bandwidth: float | None = parameter(None, "of the kernel; none: the likeliest of left-out samples", minimum=1e-9)

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Keep the references, and find the bandwidth.

        Raises:
            InputError: a single sample.
        """
        kept = bank(reference, [self.tap], self.references, rng.child("references"))
        rows, labels = kept.features[self.tap], kept.labels
        if len(rows) < 2:
            raise InputError("at least 2 samples", found=str(len(rows)), do="pass more data")
        width = self.bandwidth if self.bandwidth is not None else _likeliest(rows, labels, rng.child("bandwidth"))
        return {"references": rows, "labels": labels, "bandwidth": torch.tensor([width])}

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) minus log densities; of a class without references under all of them."""
        rows = context.at(self.tap)
        squared = squared_distances(rows, state["references"].to(rows))
        own = context.predicted[:, None] == state["labels"].to(context.predicted.device)[None, :]
        own = own | ~own.any(dim=1, keepdim=True)
        return -_log_density(squared, own, float(state["bandwidth"]), rows.shape[1])


def _log_density(squared: Tensor, among: Tensor, bandwidth: float, width: int) -> Tensor:
    """(N,) log of the mean of Gaussians of that standard deviation around what is marked in (N, M)."""
    exponents = (-0.5 / bandwidth**2 * squared).masked_fill(~among, -torch.inf)
    constant = width * (math.log(bandwidth) + 0.5 * math.log(2.0 * math.pi))
    return exponents.logsumexp(dim=1) - among.sum(dim=1).log() - constant


def _likeliest(rows: Tensor, labels: Tensor, rng: Rng) -> float:
    """Of bandwidths spread geometrically, the one with the largest median log density of samples left out of it."""
    chosen = torch.randperm(len(rows), generator=rng.torch())[:_LEFT_OUT]
    rows, labels = rows[chosen].double(), labels[chosen]
    squared = squared_distances(rows, rows)
    others = ~torch.eye(len(rows), dtype=torch.bool)
    own = (labels[:, None] == labels[None, :]) & others
    own = torch.where(own.any(dim=1, keepdim=True), own, others)
    largest = max(float(squared.max().sqrt()), _FLOOR)
    candidates = [largest * float(_WIDEST ** (-step / (_CANDIDATES - 1))) for step in range(_CANDIDATES)]
    likelihood = [float(_log_density(squared, own, width, rows.shape[1]).median()) for width in candidates]
    return candidates[likelihood.index(max(likelihood))]
