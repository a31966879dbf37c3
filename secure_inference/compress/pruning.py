"""Pruning: connections of least importance go, the rest is retrained, in steps; the map of what is left is public.

Sources: Rouhani, Riazi, Koushanfar (DeepSecure, 2018), network pre-processing; S. Han, J. Pool, J. Tran, W. Dally,
"Learning both weights and connections for efficient neural networks", NeurIPS 2015 (steps, retraining); Y. LeCun,
J. Denker, S. Solla, "Optimal brain damage", NeurIPS 1989 (saliency; the curvature is here the squared gradient);
M. Zhu, S. Gupta, "To prune, or not to prune", 2017 (cubic course).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from deepseal.adapter import Classifier, Split
from deepseal.adapter.capture import PARAMETRIC, evaluating, hooked
from deepseal.errors import InputError
from deepseal.rng import Rng

_BATCH, _BATCHES = 128, 32  # for saliency


class Masked(nn.Module):
    """Parametrisation of a weight: those outside the mask are zero and get no gradient."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight: Tensor) -> Tensor:
        """The weight where the mask is 1."""
        return weight * self.mask

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Any weight is a starting point."""
        return weight


def prunable(module: nn.Module) -> dict[str, nn.Module]:
    """Linear and convolutional layers by name.

    Raises:
        InputError: none, or one whose weight is computed or shared.
    """
    layers: dict[str, nn.Module] = {
        name: layer for name, layer in module.named_modules() if isinstance(layer, PARAMETRIC)
    }
    if not layers:
        raise InputError("linear or convolutional layers", found="none in the model", do="use a model that has one")
    if len({id(_trained(layer)) for layer in layers.values()}) != len(layers):
        raise InputError("layers with weights of their own", found="shared weights", do="untie them first")
    return layers


def _trained(layer: nn.Module) -> nn.Parameter:
    """What training changes: the weight itself, or what is behind its mask."""
    mask = _mask(layer)
    if mask is not None:
        behind: nn.Parameter = layer.parametrizations["weight"].original  # type: ignore[union-attr,index]
        return behind
    weight = layer._parameters.get("weight")
    if weight is None:
        do = "remove the parametrizations first"
        raise InputError("layers whose weight is a parameter", found=f"computed ones ({layer})"[:80], do=do)
    return weight


def _mask(layer: nn.Module) -> Masked | None:
    """The only parametrisation of a layer's weight, if that is a mask."""
    chain = list(layer.parametrizations["weight"]) if parametrize.is_parametrized(layer, "weight") else []  # type: ignore
    return chain[0] if len(chain) == 1 and isinstance(chain[0], Masked) else None


def add_masks(module: nn.Module) -> None:
    """Put a mask of ones in front of every weight that is trained; the module is changed."""
    for layer in prunable(module).values():
        parametrize.register_parametrization(layer, "weight", Masked(torch.ones_like(_trained(layer))))


def masks(module: nn.Module) -> dict[str, Tensor]:
    """The masks by layer; changing them in place changes the network."""
    return {name: layer.parametrizations["weight"][0].mask  # type: ignore[union-attr,index]
            for name, layer in prunable(module).items()}  # fmt: skip


def without_masks(model: Classifier, template: Classifier) -> Classifier:
    """A copy of the template, the network as it was before ``add_masks``, with the masked network's weights.

    Copies of a parametrised layer share one class, so that taking the masks off one would break the others.
    """
    state = {name: value for name, value in model.module.state_dict().items() if "parametrizations." not in name}
    for name, layer in prunable(model.module).items():
        weight = layer.weight
        assert isinstance(weight, Tensor)  # noqa: S101
        state[f"{name}.weight".lstrip(".")] = weight.detach()
    result = template.copy()
    result.module.load_state_dict(state)
    return result


def multiplications(model: Classifier) -> dict[str, Tensor]:
    """For each weight that is trained, how often one sample is multiplied with it; padding does not count.

    The derivative of the sum of a layer's outputs on ones. For a projected layer: on the projected input.
    """
    found: dict[str, Tensor] = {}

    def count(name: str) -> Any:
        def hook(layer: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
            if isinstance(layer, nn.Linear):
                rows = output.numel() // layer.out_features
                found[name] = torch.full_like(_trained(layer), float(rows)).detach()
                return
            with torch.enable_grad():
                ones = torch.ones_like(inputs[0])
                weight = torch.ones_like(_trained(layer)).requires_grad_()
                total = layer._conv_forward(ones, weight, None).sum()  # type: ignore[operator]
                found[name] = torch.autograd.grad(total, weight)[0]

        return hook

    layers = prunable(model.module)
    with hooked(model.module, [(name, count(name)) for name in layers]), evaluating(model.module), torch.no_grad():
        model.module(model.probe())
    return found


def importance(
    model: Classifier, data: Split, costs: Mapping[str, Tensor], criterion: str, rng: Rng
) -> dict[str, Tensor]:
    """A score of each weight that is trained.

    ``magnitude``: |w| over the root mean square of its layer. ``saliency``: w^2 E[g^2] for each multiplication that the
    weight costs, with g the gradients of the loss on batches of the data.
    """
    layers = prunable(model.module)
    if criterion == "magnitude":
        weights = {name: _trained(layer).detach() for name, layer in layers.items()}
        return {name: weight.abs() / weight.square().mean().sqrt() for name, weight in weights.items()}
    trained = [_trained(layer) for layer in layers.values()]
    squares = [torch.zeros_like(weight) for weight in trained]
    order = torch.randperm(len(data), generator=rng.torch())
    with evaluating(model.module):
        for index in order.split(_BATCH)[:_BATCHES]:
            loss = nn.functional.cross_entropy(model.logits(data.x[index]), data.y[index].to(model.device))
            for square, gradient in zip(squares, torch.autograd.grad(loss, trained), strict=True):
                square += gradient.square()
    return {name: weight.detach().square() * square / costs[name].clamp(min=1.0)
            for name, weight, square in zip(layers, trained, squares, strict=True)}  # fmt: skip


def lower_masks(kept: Mapping[str, Tensor], scores: Mapping[str, Tensor], costs: Mapping[str, Tensor],
                budget: float) -> None:  # fmt: skip
    """Drop the weights with the smallest scores until what is left fits the budget.

    Args:
        kept: masks, changed in place; what is out stays out.
        scores: importance of each weight.
        costs: multiplications of each weight.
        budget: multiplications that may be left.
    """
    names = list(kept)
    mask = torch.cat([kept[name].reshape(-1) for name in names]).bool()
    cost = torch.cat([costs[name].reshape(-1) for name in names]).double()
    value = torch.cat([scores[name].reshape(-1) for name in names]).double()
    order = value.masked_fill(~mask, -1.0).argsort(descending=True, stable=True)
    fits = (cost * mask)[order].cumsum(0) <= budget
    left = torch.zeros_like(mask)
    left[order[fits]] = True
    parts = (left & mask).split([kept[name].numel() for name in names])
    for name, part in zip(names, parts, strict=True):
        kept[name].copy_(part.reshape(kept[name].shape).to(kept[name]))
