"""Layers with other widths than their architecture gives them: a thief adds neurons, or cuts them away."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from deepseal.adapter.capture import NORMALISATION, PARAMETRIC
from deepseal.adapter.names import spellings

_PARTS = ("weight", "bias", "running_mean", "running_var")
_SIZES = (("out_features", "in_features"), ("out_channels", "in_channels"), ("num_features",))


def widen(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give the linear, convolutional and batch normalisation layers of a module the widths of a file's tensors.

    Only numbers of inputs and outputs follow the file; kernels stay. Names may carry the prefixes of parallel and
    compiled training.
    """
    named = dict(module.named_modules())
    layers = {name: layer for name, layer in named.items() if isinstance(layer, (*PARAMETRIC, *NORMALISATION))}
    given = max(spellings(tensors), key=lambda spelling: sum(f"{name}.weight" in spelling for name in layers))
    for name, layer in layers.items():
        found = {part: tensors[given[f"{name}.{part}"]] for part in _PARTS if f"{name}.{part}" in given}
        kernels = {part: getattr(layer, part, None) for part in found}
        if all(known is not None and known.shape[2:] == found[part].shape[2:] for part, known in kernels.items()):
            resize(layer, found)


def resize(layer: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Give a linear, convolutional or batch normalisation layer room for tensors of these shapes, and say so in it."""
    for part, value in tensors.items():
        known = getattr(layer, part)
        if known.shape == value.shape:
            continue
        empty = torch.zeros(value.shape, dtype=known.dtype, device=known.device)
        if isinstance(known, nn.Parameter):
            setattr(layer, part, nn.Parameter(empty, requires_grad=known.requires_grad))
        else:
            setattr(layer, part, empty)
    if "weight" not in tensors:
        return
    shape = tensors["weight"].shape
    for pair in _SIZES:
        for name, size in zip(pair, shape, strict=False):
            if hasattr(layer, name):
                setattr(layer, name, size)
