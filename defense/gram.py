"""Gram matrices: do a layer's channels act together as they do on clean data of the predicted class?

Source: C. Sastry, S. Oore, "Detecting out-of-distribution examples with Gram matrices", ICML 2020, equations 1 to 4:
row sums of G^p = (F^p F^pT)^(1/p) for several orders p; deviations beyond the smallest and the largest value seen, each
layer in units of its mean deviation on clean data that set no bounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import BlackBox, Classifier
from deepseal.adapter.layers import layer_readings
from deepseal.defense.base import State
from deepseal.defense.context import Context, Reference
from deepseal.defense.layered import AtLayers
from deepseal.defense.placing import tap_at
from deepseal.errors import InputError
from deepseal.parameters import parameter
from deepseal.rng import Rng

_VALUES = 1 << 24  # of Gram matrices at once
_FLOOR = 1e-6
_LARGEST = 1 << 16  # values of a map that are read one by one
_DEAD = 1e-3  # of the largest channel's bound: what a silent one is measured by
_LEAST = 1e-2  # mean deviation, where clean data that set no bounds hardly left them
_SMALLEST = 1e-30  # whose root has a finite gradient


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gram(AtLayers):
    """Sastry and Oore, 2020: total deviation of row sums of Gram matrices from the predicted class's bounds."""

    name: ClassVar[str] = "gram"

    orders: int = parameter(10, "orders p = 1 … of the matrices", minimum=1, maximum=20)
    widest: int = parameter(1024, "most channels of a layer", minimum=1, maximum=8192)
    channels: tuple[int, ...] = parameter((), "channels of each layer; none: as the layer gives them", minimum=1)

    def placed(self, model: BlackBox) -> Gram:
        """The same with its layers, read whole, and their channels settled; wider layers are left out.

        Raises:
            InputError: a model whose layers cannot be read, or none narrow enough.
        """
        settled = super().placed(model)
        if not isinstance(model, Classifier):
            raise AssertionError  # refused above
        found: dict[str, tuple[str, int]] = {}
        for layer in settled.layers:
            reading = layer_readings(model, [layer], tap_at(model, layer).pool)[layer]
            if reading.pool == "space":
                whole = layer_readings(model, [layer], "none")[layer]
                reading = whole if whole.width <= _LARGEST else reading
            if reading.shape[0] <= self.widest:
                found[layer] = (reading.pool, reading.shape[0])
        if not found:
            do = "raise widest, or name other layers"
            raise InputError(f"a layer of at most {self.widest} channels", found="none", do=do)
        pools, channels = zip(*found.values(), strict=True)
        return dataclasses.replace(settled, layers=tuple(found), pools=pools, channels=channels)

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Bounds of each predicted class from nine tenths of the data, the layers' scale from the rest.

        Raises:
            InputError: fewer than two samples.
        """
        count = len(reference)
        if count < 2:
            raise InputError("at least 2 samples", found=str(count), do="pass more data")
        order = torch.randperm(count, generator=rng.torch())
        cut = min(count - 1, round(0.9 * count))
        most, rest = (Reference(reference.model, reference.split.take(part)) for part in (order[:cut], order[cut:]))
        state: dict[str, Tensor] = {}
        for index in range(len(self.taps)):
            state[f"{index}.size"] = torch.zeros(1)
        for context, _ in most.stream(self.taps):
            for index, tap in enumerate(self.taps):
                state[f"{index}.size"] = torch.maximum(state[f"{index}.size"], context.at(tap).abs().amax().reshape(1))
        for index, wide in enumerate(self.channels):
            empty = torch.full((reference.classes + 1, self.orders, wide), torch.inf)
            state[f"{index}.low"], state[f"{index}.high"] = empty, -empty
        for context, _ in most.stream(self.taps):
            for index in range(len(self.taps)):
                for places, sums in self._sums(context, index, state):
                    _widen(state, index, context.predicted[places], sums)
        for index in range(len(self.taps)):  # a class that was never predicted has the bounds of all
            for end in ("low", "high"):
                bounds = state[f"{index}.{end}"]
                state[f"{index}.{end}"] = torch.where(torch.isfinite(bounds), bounds, bounds[-1:])[:-1].clone()
        seen = torch.cat([self._deviations(context, state) for context, _ in rest.stream(self.taps)])
        state["scale"] = seen.double().mean(dim=0).float().clamp_min(_LEAST)
        return state

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) total deviations."""
        found = self._deviations(context, state)
        return (found / state["scale"].to(found)).sum(dim=1)

    def _deviations(self, context: Context, state: State) -> Tensor:
        """(N, layers)."""
        found = []
        for index in range(len(self.taps)):
            parts = []
            for places, sums in self._sums(context, index, state):
                labels = context.predicted[places]
                low, high = (state[f"{index}.{end}"].to(sums)[labels] for end in ("low", "high"))
                least = _DEAD * torch.maximum(low.abs(), high.abs()).amax(dim=2, keepdim=True) + _FLOOR
                under = (low - sums).clamp_min(0.0) / torch.maximum(low.abs(), least)
                over = (sums - high).clamp_min(0.0) / torch.maximum(high.abs(), least)
                parts.append((under + over).flatten(1).sum(dim=1))
            found.append(torch.cat(parts))
        return torch.stack(found, dim=1)

    def _sums(self, context: Context, index: int, state: State) -> Iterator[tuple[slice, Tensor]]:
        """Row sums (n, orders, C) of the Gram matrices of the layer's maps, a few inputs after the other.

        Values are divided by the largest that was seen while fitting, so that no power overflows; deviations are
        relative, and do not change.
        """
        wide = self.channels[index]
        rows = context.at(self.taps[index])
        maps = (rows / state[f"{index}.size"].to(rows).clamp_min(_FLOOR)).reshape(len(rows), wide, -1)
        step = max(1, _VALUES // (wide * (wide if maps.shape[2] > 1 else 1)))
        for start in range(0, len(rows), step):
            part, sums = maps[start : start + step], []
            for order in range(1, self.orders + 1):
                sums.append(_row_sums(part, order))
            yield slice(start, start + step), torch.stack(sums, dim=1)


def _row_sums(maps: Tensor, order: int) -> Tensor:
    """(N, C) row sums of (F^p F^pT)^(1/p), roots keep signs; maps (N, C, places)."""
    if maps.shape[2] == 1:  # the root undoes the power
        single = maps.squeeze(2) if order % 2 else maps.squeeze(2).abs()
        return single * single.sum(dim=1, keepdim=True)
    power = maps.pow(order)
    matrix = power @ power.transpose(1, 2)
    if order > 1:
        matrix = matrix.sign() * matrix.abs().clamp_min(_SMALLEST).pow(1.0 / order)
    return matrix.sum(dim=2)


def _widen(state: dict[str, Tensor], index: int, predicted: Tensor, sums: Tensor) -> None:
    low, high = state[f"{index}.low"], state[f"{index}.high"]
    groups = [(-1, sums), *((label, sums[predicted == label]) for label in predicted.unique().tolist())]
    for label, rows in groups:
        low[label] = torch.minimum(low[label], rows.amin(dim=0))
        high[label] = torch.maximum(high[label], rows.amax(dim=0))
