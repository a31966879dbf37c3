"""Where the bits of a mark are: hidden layers, their capacity, and cells of a layer and a carrier class."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from deepseal.adapter import Classifier, Split
from deepseal.adapter.capture import NORMALISATION, PARAMETRIC, evaluating, execution_order, forward_to
from deepseal.errors import InputError
from deepseal.rng import expand_normal
from deepseal.watermark.key import Key


@dataclasses.dataclass(frozen=True)
class Cell:
    """One Gaussian of the mixture: the mean activation of a carrier class in a layer holds ``bits`` bits."""

    layer: str
    carrier: int
    bits: int
    start: int


@dataclasses.dataclass(frozen=True)
class LayerCapacity:
    """What a layer can hold. ``limit`` bits can be embedded at all; ``advised`` leave margin against removal."""

    layer: str
    kind: str
    features: int
    limit: int
    advised: int


def hidden_layers(model: Classifier) -> list[tuple[str, str, tuple[int, ...]]]:
    """Hidden pre-activations in the order of the forward pass: name, kind, shape of one sample's output.

    The output of a linear or convolutional layer, or of the batch normalisation that follows it directly.

    Raises:
        InputError: a model without a hidden layer.
    """
    order = execution_order(model.module, model.probe())
    runs = [name for name, _, _ in order]
    found: list[tuple[str, str, tuple[int, ...]]] = []
    for position, (name, layer, shape) in enumerate(order):
        if not isinstance(layer, PARAMETRIC) or runs.count(name) > 1:
            continue
        after = order[position + 1] if position + 1 < len(order) else None
        if after is not None and isinstance(after[1], NORMALISATION) and after[2] == shape:
            name, layer = after[0], after[1]
        found.append((name, type(layer).__name__, shape))
    if len(found) < 2:
        raise InputError("a model with a hidden linear or convolutional layer", found="none", do="name layers yourself")
    return found[:-1]


def advised(shape: tuple[int, ...]) -> int:
    """Bits a cell that leave margin against removal; maps of convolutions drift more than dense layers do."""
    return max(1, min(16 if len(shape) == 1 else 10, math.prod(shape) // 16))


def layer_shapes(model: Classifier, layers: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Shape of one sample's output of each named layer."""
    with evaluating(model.module), torch.no_grad():
        captured = forward_to(model.module, model.probe(), layers)
    return {name: tuple(captured[name].shape[1:]) for name in layers}


def activation_after(model: Classifier, layer: str) -> str:
    """Name of the activation that runs after the named layer, or the layer's own where the activation is no module."""
    order = execution_order(model.module, model.probe())
    index = [name for name, _, _ in order].index(layer)
    (_, _, shape), (after, module, after_shape) = order[index], order[index + 1]
    return after if after_shape == shape and not list(module.parameters()) else layer


def cells_of(key: Key) -> list[Cell]:
    """The message dealt out: each layer's bits evenly over the carriers."""
    cells: list[Cell] = []
    start, carriers = 0, key.public["carriers"]
    for layer in key.public["layers"]:
        bits = int(key.public["layer_bits"][layer])
        for index, carrier in enumerate(carriers):
            size = bits // len(carriers) + (index < bits % len(carriers))
            cells.append(Cell(layer, int(carrier), size, start))
            start += size
    return [cell for cell in cells if cell.bits]


def deal(bits: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Bits in proportion to the weights, the rest to the largest remainders."""
    total = sum(weights.values())
    dealt = {name: bits * weight // total for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: -(bits * weights[name] % total))
    for name in by_remainder[: bits - sum(dealt.values())]:
        dealt[name] += 1
    return dealt


def projection_of(secret: bytes, cell: Cell, width: int) -> NDArray[np.float32]:
    """The cell's secret matrix A, (width, bits), i.i.d. N(0, 1)."""
    return expand_normal(secret, f"projection/{cell.layer}/{cell.carrier}", (width, cell.bits))


def check_carriers(carriers: Sequence[int], classes: int, data: Split) -> None:
    """Refuse carriers that are not distinct classes with samples in the data.

    Raises:
        InputError: carriers named twice, outside the classes, or without samples.
    """
    if not carriers or len(set(carriers)) != len(carriers):
        raise InputError("distinct carrier classes", found=str(list(carriers)), do="name each class once")
    outside = [carrier for carrier in carriers if carrier >= classes]
    if outside:
        raise InputError(f"carrier classes 0 … {classes - 1}", found=str(outside), do="name classes of this model")
    absent = [carrier for carrier in carriers if not bool((data.y == carrier).any())]
    if absent:
        raise InputError(
            "training samples of every carrier class",
            found=f"none of class {absent}",
            do="add samples or give -p carriers=…",
        )
