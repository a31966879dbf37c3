"""Reading hidden layers through weights that have been through what a thief does: pruned and drifted.

A mark whose loss is taken on such readings keeps its margin when the real thief comes. One draw costs about as much as
a plain forward pass: pruning is a comparison of each weight with a sampled quantile, and the drift of a linear
layer's weights is drawn on its outputs, where independent Gaussian weight noise of variance s^2 is exactly Gaussian
noise of variance s^2 * sum(x^2) (local reparametrisation; Kingma, Salimans, Welling, 2015).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepseal.adapter.capture import NORMALISATION, PARAMETRIC, Hook, evaluating, forward_to, hooked
from deepseal.adapter.inputs import Batch

_SAMPLE = 4096
_LARGE = 1 << 18  # weights of a linear layer


@contextmanager
def weathered_features(
    module: nn.Module,
    x: Batch,
    layers: Sequence[str],
    *,
    prune: float,
    drift: float,
    generator: torch.Generator,
    running_statistics: bool = False,
) -> Iterator[dict[str, Tensor]]:
    """Outputs of the named layers, graph attached, read through pruned and noisy weights; differentiate inside.

    Batch normalisation uses the statistics of ``x`` as these weights give them, and leaves the running ones alone;
    with ``running_statistics`` it uses those, for inputs that are unlike the data.

    Args:
        module: the network; its parameters are not changed.
        x: normalised inputs.
        layers: qualified names.
        prune: share of the smallest weights, over all linear and convolutional layers, that read as 0.
        drift: standard deviation of Gaussian weight noise, in standard deviations of each layer's weights.
        generator: source of the noise.
        running_statistics: what batch normalisation uses.
    """
    statistics = nullcontext() if running_statistics else _batch_statistics(module)
    with weathered(module, prune=prune, drift=drift, generator=generator), statistics:
        yield forward_to(module, x, layers)


@contextmanager
def weathered(module: nn.Module, *, prune: float, drift: float, generator: torch.Generator) -> Iterator[None]:
    """Inside, the module runs in evaluation mode through pruned and noisy weights; gradients reach its own.

    Differentiate inside too: a module that recomputes activations (gradient checkpointing) then meets the same weights
    and the same noise again. Pruned copies of large weights are made when they are used and not kept. A layer's
    ``weight`` is the worn one meanwhile; ``parameters()`` gives the module's own.

    Args:
        module: the network; its parameters are not changed.
        prune: see ``weathered_features``.
        drift: see there.
        generator: source of the noise.
    """
    targets = {name: layer for name, layer in module.named_modules() if isinstance(layer, PARAMETRIC)}
    targets = {name: layer for name, layer in targets.items() if "weight" in layer._parameters}
    weights = [layer.weight for layer in targets.values()]
    threshold = magnitude_quantile(weights, prune, generator) if prune > 0 else 0.0
    seeds = torch.randint(2**62, (len(targets),), generator=generator).tolist()
    replaced: dict[nn.Module, Tensor] = {}
    hooks: list[tuple[str, Hook]] = []
    pruned: list[nn.Linear] = []
    for (name, layer), seed in zip(targets.items(), seeds, strict=True):
        spread = drift * float(layer.weight.detach().std()) if drift > 0 else 0.0
        if spread > 0 and isinstance(layer, nn.Linear):
            hooks.append((name, _linear_noise(spread, seed)))
            spread = 0.0
        if isinstance(layer, nn.Linear) and _is_stock(layer) and layer.weight.numel() >= _LARGE:
            pruned.append(layer)
        else:
            replaced[layer] = _worn(layer.weight, threshold, spread, seed)
    try:
        for worn, weight in replaced.items():
            vars(worn)["weight"] = weight  # found before the parameter, which stays where it is
        for linear in pruned if threshold > 0 else ():
            vars(linear)["forward"] = partial(_pruned_linear, linear, threshold)
        with evaluating(module), hooked(module, hooks):
            yield
    finally:
        for worn in replaced:
            vars(worn).pop("weight", None)
        for linear in pruned:
            vars(linear).pop("forward", None)


def _is_stock(layer: nn.Linear) -> bool:
    return type(layer).forward is nn.Linear.forward and "forward" not in vars(layer)


def _worn(weight: Tensor, threshold: float, spread: float, seed: int) -> Tensor:
    if threshold > 0:
        weight = nn.functional.hardshrink(weight, threshold)
    if spread > 0:
        weight = weight + spread * torch.randn(weight.shape, generator=_seeded(seed)).to(weight)
    return weight


def _pruned_linear(layer: nn.Linear, threshold: float, x: Tensor) -> Tensor:
    """The layer's output through pruned weights, which are made again for the backward pass."""

    def output(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return nn.functional.linear(x, nn.functional.hardshrink(weight, threshold), bias)

    result: Tensor = checkpoint(output, x, layer.weight, layer.bias, use_reentrant=False, preserve_rng_state=False)
    return result


def _seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@contextmanager
def _batch_statistics(module: nn.Module) -> Iterator[None]:
    layers = [layer for layer in module.modules() if isinstance(layer, NORMALISATION)]
    flags = [(layer.training, layer.track_running_stats) for layer in layers]
    try:
        for layer in layers:
            layer.training, layer.track_running_stats = True, False
        yield
    finally:
        for layer, (training, tracking) in zip(layers, flags, strict=True):
            layer.training, layer.track_running_stats = training, tracking


def _linear_noise(spread: float, seed: int) -> Hook:
    def add(_layer: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> Tensor:
        scale: Tensor = spread * inputs[0].detach().pow(2).sum(dim=-1, keepdim=True).sqrt()
        noise: Tensor = scale * torch.randn(output.shape, generator=_seeded(seed)).to(output)
        return output + noise

    return add


def magnitude_quantile(weights: Sequence[Tensor], share: float, generator: torch.Generator) -> float:
    """Magnitude below which ``share`` of all weights lie, from a sample of them."""
    total = sum(weight.numel() for weight in weights)
    drawn = []
    for weight in weights:
        count = max(16, round(_SAMPLE * weight.numel() / total))
        index = torch.randint(weight.numel(), (count,), generator=generator)
        drawn.append(weight.detach().reshape(-1)[index.to(weight.device)])
    return float(torch.cat(drawn).abs().float().quantile(share))
