"""Which layers a model has, and how the output of each becomes one vector a sample."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from deepseal.adapter.capture import (
    NORMALISATION,
    PARAMETRIC,
    RECURRENT,
    evaluating,
    execution_order,
    find_layer,
    forward_to,
)
from deepseal.adapter.classifier import Classifier
from deepseal.adapter.outputs import pool as pooled
from deepseal.adapter.spec import InputSpec
from deepseal.errors import InputError

_PROBES = 3
_OTHER_PROBES = (2, 5, 9)  # an expert's tokens may be as many as the inputs once, by chance
_LARGEST = 16384  # values of a map that are read one by one
_CHANNELS_FIRST = (
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    *NORMALISATION,
    nn.GroupNorm,
    nn.InstanceNorm1d,
    nn.InstanceNorm2d,
    nn.InstanceNorm3d,
)


@dataclasses.dataclass(frozen=True)
class Reading:
    """How a layer's output becomes the vector that holds bits.

    Attributes:
        pool: the rule, one of ``outputs.POOLS``.
        shape: of what it gives.
        weights: number of parameters of the layer that computes the output; 0 where nobody asked.
    """

    pool: str
    shape: tuple[int, ...]
    weights: int = 0

    @property
    def width(self) -> int:
        """Number of features."""
        return math.prod(self.shape)

    @property
    def advised(self) -> int:
        """Bits a cell that leave margin against removal; maps of convolutions drift more than dense layers do."""
        return max(1, min(16 if len(self.shape) == 1 else 10, self.width // 16))


def hidden_layers(model: Classifier, pool: str = "auto") -> list[tuple[str, str, Reading]]:
    """Hidden pre-activations in the order of the forward pass: name, kind, and how it is read.

    The output of a linear, convolutional or recurrent layer, or of the batch normalisation that follows a layer
    directly. Layers that run several times in a pass, or on something else than all the inputs, are left out.

    Raises:
        InputError: a model without a hidden layer.
    """
    order = _orderly(model)
    found: list[tuple[str, nn.Module, tuple[int, ...], int]] = []
    for position, (name, layer, shape) in enumerate(order):
        if not isinstance(layer, PARAMETRIC + RECURRENT):
            continue
        weights = sum(tensor.numel() for tensor in layer.parameters())
        after = order[position + 1] if position + 1 < len(order) else None
        if after is not None and isinstance(after[1], NORMALISATION) and after[2] == shape:
            name, layer = after[0], after[1]
        found.append((name, layer, shape, weights))
    if len(found) < 2:
        raise InputError("a model with a hidden linear or convolutional layer", found="none", do="name layers yourself")
    inside = [(name, layer, weights) for name, layer, shape, weights in found[:-1] if shape]
    readings = layer_readings(model, [name for name, *_ in inside], pool)
    return [
        (name, type(layer).__name__, dataclasses.replace(readings[name], weights=weights))
        for name, layer, weights in inside
    ]


def layer_readings(model: Classifier, layers: Sequence[str], pool: str = "auto") -> dict[str, Reading]:
    """How each named layer is read: by the stated rule, or by the one that fits its output.

    ``auto`` takes the mean over the attention mask or over time of what has a position (N, T, …, D); maps of
    convolutions (N, C, …) are flattened, or their mean over space is taken where sizes vary or the map is very large.

    Raises:
        UnknownNameError: an unknown layer.
        InputError: a layer that the rule does not fit.
    """
    if not layers:
        return {}
    probe = model.probe(_PROBES)
    mask = model.spec.mask_of(probe)
    with evaluating(model.module), torch.no_grad():
        captured = forward_to(model.module, probe, layers)
    readings = {}
    for name in layers:
        value = captured[name]
        rule = _rule(model.spec, find_layer(model.module, name), value, mask) if pool == "auto" else pool
        read = pooled(value, rule, mask)
        if len(read) != _PROBES:
            found, do = f"{len(read)} rows for {_PROBES}", "name another layer, or its output as layer:0"
            raise InputError(f"a layer {name!r} with one row an input", found=found, do=do)
        readings[name] = Reading(rule, tuple(value.shape[1:]) if rule == "none" else tuple(read.shape[1:]))
    return readings


def _rule(spec: InputSpec, layer: nn.Module, value: Tensor, mask: Tensor | None) -> str:
    if value.ndim < 3:
        return "none"
    if isinstance(layer, _CHANNELS_FIRST):
        return "space" if spec.varies or value[0].numel() > _LARGEST else "none"
    if len(value) != _PROBES and value.shape[1] == _PROBES:
        return "time-first"
    return "mask" if mask is not None and mask.shape == value.shape[:2] and value.ndim == 3 else "time"


def _orderly(model: Classifier) -> list[tuple[str, nn.Module, tuple[int, ...]]]:
    """The layers that run once a pass; an empty shape where the rows do not follow the number of inputs."""
    order = execution_order(model.module, model.probe(_PROBES))
    others = [execution_order(model.module, model.probe(count)) for count in _OTHER_PROBES]
    follow = [{name for name, _, shape in other if shape} for other in others]
    runs = [name for name, _, _ in order]
    return [
        (name, layer, shape if all(name in names for names in follow) else ())
        for name, layer, shape in order
        if runs.count(name) == 1
    ]


def activation_after(model: Classifier, layer: str) -> str:
    """Name of the activation that runs after the named layer.

    The layer's own where the activation is no module, or one that runs elsewhere in the pass too.
    """
    order = execution_order(model.module, model.probe())
    runs = [name for name, _, _ in order]
    index = runs.index(layer)
    (_, _, shape), (after, module, after_shape) = order[index], order[index + 1]
    own = after_shape == shape and not list(module.parameters()) and runs.count(after) == 1
    return after if own else layer
