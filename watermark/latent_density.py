"""Where a model's data rarely are: a Gaussian mixture, one Gaussian a class, over its last hidden layer."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from deepseal.adapter import Classifier, Split
from deepseal.adapter.layers import hidden_layers
from deepseal.rng import expand_normal

_SAMPLES = 5000
_WIDEST = 128  # more features are projected to so many


class LatentDensity:
    """log sum_c w_c N(h; mu_c, S): means and weights by class, one covariance S, h the last hidden pre-activation.

    Args:
        model: whose features are taken.
        data: (N, …) labelled samples, of which at most 5,000 are used.
        secret: draws the random projection of wide layers.
    """

    def __init__(self, model: Classifier, data: Split, secret: bytes) -> None:
        name, _, reading = hidden_layers(model)[-1]
        self._model, self._layer, self._pool = model, name, reading.pool
        self._project: Tensor | None = None
        if reading.width > _WIDEST:
            drawn = expand_normal(secret, "density/projection", (reading.width, _WIDEST))
            self._project = torch.from_numpy(drawn).double() / math.sqrt(reading.width)
        sample = data.take(torch.arange(min(len(data), _SAMPLES)))
        features, classes = self.features(sample.tensor), sample.y.unique()
        self._means = torch.stack([features[sample.y == c].mean(dim=0) for c in classes])
        self._weights = torch.tensor([float((sample.y == c).double().mean()) for c in classes])
        centred = features - self._means[torch.searchsorted(classes, sample.y)]
        covariance = centred.T @ centred / len(features)
        shrink = 1e-3 * covariance.diagonal().mean().clamp_min(1e-12)
        factor = torch.linalg.cholesky(covariance + shrink * torch.eye(len(covariance)))
        self._whiten = torch.linalg.inv(factor).T

    def features(self, x: Tensor) -> Tensor:
        """(N, D) float64 features."""
        read = self._model.features(x, [self._layer], pool={self._layer: self._pool})[self._layer].double()
        return read.flatten(1) if self._project is None else read.flatten(1) @ self._project

    def log_density(self, x: Tensor) -> Tensor:
        """(N,) log densities, up to the constant that all inputs share."""
        whitened, means = self.features(x) @ self._whiten, self._means @ self._whiten
        return torch.logsumexp(-0.5 * torch.cdist(whitened, means).pow(2) + self._weights.log(), dim=1)

    def rare(self, x: Tensor, data: Split, share: float) -> Tensor:
        """(N,) True where the density is below that of all but ``share`` of the data."""
        own = self.log_density(data.take(torch.arange(min(len(data), _SAMPLES))).tensor)
        return self.log_density(x) < float(np.quantile(own.numpy(), share))
