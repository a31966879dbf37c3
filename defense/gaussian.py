"""Means, covariances and Gaussians of features that are seen once, batch by batch, in float64."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from deepseal.errors import InputError

WIDEST = 4096  # features: a covariance of these takes 128 MiB
_FLOOR = 1e-12
_LEAST = 1e-6  # of trace/D on the diagonal, so that constant features have a density too


@dataclasses.dataclass(frozen=True)
class Moments:
    """Number, mean (D,) and scatter (D, D), the sum of (x - mean)(x - mean)^T, of rows seen so far."""

    count: int
    mean: Tensor
    scatter: Tensor

    @classmethod
    def empty(cls, width: int, *, do: str = "read the layer pooled (pool=space), or another layer") -> Moments:
        """Of no rows.

        Args:
            width: features.
            do: what to do where these are too many.

        Raises:
            InputError: more features than a covariance can have.
        """
        if width > WIDEST:
            raise InputError(f"at most {WIDEST} features", found=str(width), do=do)
        zeros = torch.zeros(width, dtype=torch.float64)
        return cls(0, zeros, torch.zeros(width, width, dtype=torch.float64))

    def add(self, rows: Tensor) -> Moments:
        """With (N, D) further rows (T. Chan, G. Golub, R. LeVeque, 1983: pairwise update, no cancellation)."""
        count = len(rows)
        if not count:
            return self
        values = rows.detach().double()
        mean = values.mean(dim=0)
        centred, step = values - mean, mean - self.mean
        total = self.count + count
        scatter = self.scatter + centred.T @ centred + torch.outer(step, step) * (self.count * count / total)
        return Moments(total, self.mean + step * (count / total), scatter)

    def merged(self, other: Moments) -> Moments:
        """Of the rows of both."""
        total = self.count + other.count
        if not total:
            return self
        step = other.mean - self.mean
        scatter = self.scatter + other.scatter + torch.outer(step, step) * (self.count * other.count / total)
        return Moments(total, self.mean + step * (other.count / total), scatter)

    @property
    def covariance(self) -> Tensor:
        """(D, D), the maximum-likelihood estimate."""
        return self.scatter / max(1, self.count)


def principal(moments: Moments, share: float, most: int) -> tuple[Tensor, Tensor]:
    """Directions (D, k) of the largest variance that hold ``share`` of it together, at most ``most``; their variances.

    One direction at least, also of features that are constant.
    """
    values, vectors = torch.linalg.eigh(moments.covariance)
    values, vectors = values.flip(0).clamp_min(0.0), vectors.flip(1)
    total = values.sum()
    held = torch.cumsum(values, dim=0)
    count = int((held < share * total).sum()) + 1 if float(total) > 0 else 1
    count = max(1, min(count, most, len(values)))
    return vectors[:, :count], values[:count]


@dataclasses.dataclass(frozen=True)
class ClassGaussians:
    """A Gaussian for each class; a class without samples has that of all of them.

    Attributes:
        means: (C, D).
        whiten: (C, D, D) with whiten^T whiten the inverse covariance.
        offset: (C,) log normalisation, so that the log density is offset - |whiten (x - mean)|^2 / 2.
    """

    means: Tensor
    whiten: Tensor
    offset: Tensor

    @classmethod
    def of(cls, moments: list[Moments], shrinkage: float) -> ClassGaussians:
        """From the moments of each class; covariances are drawn towards trace/D times the identity by ``shrinkage``.

        A class with fewer samples than features is drawn further, by D / (D + samples) at least.

        Raises:
            InputError: no samples at all.
        """
        whole = moments[0]
        for other in moments[1:]:
            whole = whole.merged(other)
        if not whole.count:
            raise InputError("samples to fit a density on", found="none", do="pass data")
        width = len(whole.mean)
        means, whitens, offsets = [], [], []
        for one in moments:
            known = one if one.count > 1 else whole
            covariance = known.covariance
            strength = max(shrinkage, _LEAST, width / (width + known.count) if known.count <= width else 0.0)
            level = (covariance.trace() / width).clamp_min(_FLOOR)
            eye = torch.eye(width, dtype=torch.float64)
            factor = torch.linalg.cholesky((1.0 - strength) * covariance + strength * level * eye)
            means.append(one.mean if one.count else whole.mean)
            whitens.append(torch.linalg.solve_triangular(factor, eye, upper=False))
            offsets.append(-factor.diagonal().log().sum() - 0.5 * width * torch.log(torch.tensor(2.0 * torch.pi)))
        return cls(torch.stack(means), torch.stack(whitens), torch.stack(offsets))


def log_density(x: Tensor, classes: Tensor, means: Tensor, whiten: Tensor, offset: Tensor) -> Tensor:
    """(N,) log density of each row under the Gaussian of its class.

    Args:
        x: (N, D).
        classes: (N,).
        means: (C, D), as in ``ClassGaussians``.
        whiten: (C, D, D).
        offset: (C,).
    """
    centred = x - means[classes]
    if torch.compiler.is_compiling() or len(x) * whiten[0].numel() <= _GATHERED:
        white = torch.einsum("nij,nj->ni", whiten[classes], centred)
        return offset[classes] - 0.5 * white.square().sum(dim=1)
    parts, places = [], []
    for label in classes.unique().tolist():
        rows = torch.nonzero(classes == label).reshape(-1)
        white = centred[rows] @ whiten[label].T
        parts.append(offset[label] - 0.5 * white.square().sum(dim=1))
        places.append(rows)
    return torch.cat(parts)[torch.argsort(torch.cat(places))]


_GATHERED = 1 << 18
