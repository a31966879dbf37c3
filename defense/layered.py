"""What detectors that read hidden layers share: where they read, and clean features that they keep."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TypeVar

import torch
from torch import Tensor

from deepseal.adapter import BlackBox, Classifier
from deepseal.adapter.capture import Tap
from deepseal.adapter.layers import activation_after, hidden_layers, layer_readings
from deepseal.defense.base import Needs
from deepseal.defense.context import Reference
from deepseal.defense.placing import tap_at
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

One = TypeVar("One", bound="AtLayer")
Several = TypeVar("Several", bound="AtLayers")
_LEAST_SPREAD = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtLayer(Parameters):
    """A detector that reads one hidden layer."""

    layer: str = parameter("last", "qualified name, or first, early, middle, last")
    pool: str = parameter("auto", "how the layer's output becomes a vector (outputs.POOLS)")

    @property
    def needs(self) -> Needs:
        return Needs(access="module", taps=(self.tap,))

    @property
    def tap(self) -> Tap:
        """Where it reads."""
        return Tap(self.layer, self.pool)

    def placed(self: One, model: BlackBox) -> One:
        """The same with its layer and pooling rule settled.

        Raises:
            UnknownNameError: no such layer.
            InputError: a model whose layers cannot be read.
        """
        layer, pool = tap_at(model, self.layer, self.pool)
        return dataclasses.replace(self, layer=layer, pool=pool)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AtLayers(Parameters):
    """A detector that reads several hidden layers."""

    layers: tuple[str, ...] = parameter((), "qualified names; none: hidden layers spread evenly")
    pools: tuple[str, ...] = parameter((), "how each becomes a vector (outputs.POOLS); none: means over space or time")
    most: int = parameter(4, "how many layers where none are named", minimum=1)

    @property
    def needs(self) -> Needs:
        return Needs(access="module", taps=self.taps)

    @property
    def taps(self) -> tuple[Tap, ...]:
        """Where it reads."""
        return tuple(Tap(layer, pool) for layer, pool in zip(self.layers, self.pools, strict=True))

    def placed(self: Several, model: BlackBox) -> Several:
        """The same with its layers and pooling rules settled.

        Raises:
            UnknownNameError: no such layer.
            InputError: a model whose layers cannot be read, or another number of rules than of layers.
        """
        if not isinstance(model, Classifier):
            found, do = "a model that only answers", "use detectors that read no layer, such as max-softmax"
            raise InputError("a model whose layers can be read", found=found, do=do)
        names = list(self.layers)
        if not names:
            hidden = [name for name, _, _ in hidden_layers(model)]
            places = torch.linspace(0, len(hidden) - 1, min(self.most, len(hidden))).round().long().tolist()
            names = list(dict.fromkeys(activation_after(model, hidden[place]) for place in places))
        if self.pools and len(self.pools) != len(names):
            found = f"{len(self.pools)} for {len(names)} layers"
            raise InputError("one pooling rule a layer", found=found, do="name both, or leave out the rules")
        pools = self.pools or [self._rule(model, name) for name in names]
        return dataclasses.replace(self, layers=tuple(names), pools=tuple(pools))

    def _rule(self, model: Classifier, layer: str) -> str:
        pool = tap_at(model, layer).pool
        return "space" if pool == "none" and len(layer_readings(model, [layer], pool)[layer].shape) > 1 else pool


@dataclasses.dataclass(frozen=True)
class Bank:
    """Clean features that are kept.

    Attributes:
        features: (M, D) of each tap.
        labels: (M,).
        predicted: (M,) the model's answers.
    """

    features: dict[Tap, Tensor]
    labels: Tensor
    predicted: Tensor


def bank(reference: Reference, taps: Sequence[Tap], count: int, rng: Rng) -> Bank:
    """Features of about as many samples of each class, ``count`` together at most."""
    found = list(reference.sample(count, rng).stream(taps))
    features = {tap: torch.cat([context.at(tap) for context, _ in found]) for tap in taps}
    predicted = torch.cat([context.predicted for context, _ in found])
    return Bank(features, torch.cat([labels for _, labels in found]), predicted)


def squared_distances(rows: Tensor, others: Tensor) -> Tensor:
    """(N, M) squared Euclidean distances, never negative, differentiable, also where they are 0."""
    both = rows.square().sum(dim=1)[:, None] + others.square().sum(dim=1)[None]
    return torch.addmm(both, rows, others.T, alpha=-2.0).clamp_min(0.0)


def scale_of(values: Tensor) -> Tensor:
    """(2,) mean and standard deviation of clean values, the latter never 0: what makes layers comparable."""
    seen = values.double()
    spread = seen.std(unbiased=False).clamp_min(_LEAST_SPREAD * (1.0 + float(seen.abs().mean())))
    return torch.stack([seen.mean(), spread]).float()
