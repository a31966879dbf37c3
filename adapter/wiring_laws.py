"""How the operations between layers let neurons be scaled: f(s x) = s f(x) for any s, for s > 0, for s = -1, or not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import fx, nn
from torch.nn import functional as F

Law = Literal["any", "positive", "sign", "none"]
_FACTORS: dict[Law, int] = {
    "any": 3,
    "positive": 1,
    "sign": 2,
    "none": 0,
}  # bit 0: positive factors, bit 1: a change of sign

_LINEAR: tuple[Any, ...] = (
    nn.Identity,
    nn.Dropout,
    nn.Dropout1d,
    nn.Dropout2d,
    nn.Dropout3d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AvgPool3d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveAvgPool3d,
    F.dropout,
    F.dropout2d,
    F.avg_pool2d,
    F.adaptive_avg_pool2d,
    "contiguous",
    "clone",
    "float",
)
_HOMOGENEOUS: tuple[Any, ...] = (
    nn.ReLU,
    nn.LeakyReLU,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.MaxPool3d,
    nn.AdaptiveMaxPool1d,
    nn.AdaptiveMaxPool2d,
    nn.AdaptiveMaxPool3d,
    F.relu,
    F.relu_,
    F.leaky_relu,
    F.max_pool2d,
    torch.relu,
    torch.relu_,
    torch.max_pool2d,
    "relu",
    "relu_",
)
_POOLING = frozenset(
    {
        nn.AvgPool1d,
        nn.AvgPool2d,
        nn.AvgPool3d,
        nn.AdaptiveAvgPool1d,
        nn.AdaptiveAvgPool2d,
        nn.AdaptiveAvgPool3d,
        nn.MaxPool1d,
        nn.MaxPool2d,
        nn.MaxPool3d,
        nn.AdaptiveMaxPool1d,
        nn.AdaptiveMaxPool2d,
        nn.AdaptiveMaxPool3d,
        F.avg_pool2d,
        F.adaptive_avg_pool2d,
        F.max_pool2d,
        torch.max_pool2d,
    }
)
_QUESTIONS: tuple[Any, ...] = (getattr, "size", "dim", "ndimension", "numel")
_ODD: tuple[Any, ...] = (nn.Tanh, nn.Softsign, nn.Tanhshrink, torch.tanh, F.tanh, F.softsign, "tanh", "tanh_")
_OTHER: tuple[Any, ...] = (
    nn.Sigmoid,
    nn.GELU,
    nn.SiLU,
    nn.ELU,
    nn.SELU,
    nn.CELU,
    nn.Mish,
    nn.ReLU6,
    nn.Hardtanh,
    nn.Hardswish,
    nn.Hardsigmoid,
    nn.Softplus,
    nn.LogSigmoid,
    F.gelu,
    F.silu,
    F.elu,
    F.softplus,
    F.hardtanh,
    F.relu6,
    F.sigmoid,
    torch.sigmoid,
    torch.square,
    "sigmoid",
    "sigmoid_",
    "square",
)
_LAWS: dict[Any, Law] = {
    **dict.fromkeys(_OTHER, "none"),
    **dict.fromkeys(_ODD, "sign"),
    **dict.fromkeys(_HOMOGENEOUS, "positive"),
    **dict.fromkeys(_LINEAR, "any"),
}
_SPATIAL_MEANS: tuple[Any, ...] = (torch.mean, "mean")
_SCALINGS: tuple[Any, ...] = (operator.mul, operator.truediv, operator.neg, torch.neg, "mul", "div", "neg")
_PRODUCTS: tuple[Any, ...] = (operator.mul, operator.imul, torch.mul, "mul", "mul_")
_FLATTENINGS: tuple[Any, ...] = (nn.Flatten, torch.flatten, torch.reshape, "flatten", "reshape", "view")
_ADDITIONS: tuple[Callable[..., Any] | str, ...] = (operator.add, operator.iadd, torch.add, "add", "add_")


def both(one: Law, other: Law) -> Law:
    """What two laws in a row allow."""
    bits = _FACTORS[one] & _FACTORS[other]
    return next(law for law, allowed in _FACTORS.items() if allowed == bits)


def law_of(node: fx.Node, layer: nn.Module | None, *, last: bool = False) -> Law | None:
    """The law of an operation that treats each neuron by itself and keeps their places; None for any other.

    Args:
        node: the operation.
        layer: the module that it calls, if it calls one.
        last: neurons lie on the last axis, not on the one behind the samples.
    """
    target = type(layer) if layer is not None else node.target
    if target in _SPATIAL_MEANS:
        return "any" if _keeps_neurons(node, last) else None
    if last and target in _POOLING:
        return None
    if last and keeps_last_axis(node):
        return "any"
    if target in _SCALINGS:
        others = [argument for argument in node.args[1:] if not isinstance(argument, int | float)]
        return None if others or isinstance(node.args[0], int | float) else "any"
    return _LAWS.get(target)


def is_addition(node: fx.Node) -> bool:
    """Whether an operation adds two tensors as they are."""
    scaled = node.kwargs.get("alpha", 1) != 1 or len(node.args) > 2
    return node.op in ("call_function", "call_method") and node.target in _ADDITIONS and not scaled


def is_product(node: fx.Node) -> bool:
    """Whether an operation multiplies two tensors neuron by neuron, as a gate does."""
    return node.op in ("call_function", "call_method") and node.target in _PRODUCTS and len(node.args) == 2


def is_flattening(node: fx.Node, layer: nn.Module | None) -> bool:
    """Whether an operation only lays the axes after the first end to end."""
    target = type(layer) if layer is not None else node.target
    before, after = shape_of(node.args[0]), shape_of(node)
    return (
        target in _FLATTENINGS
        and before is not None
        and after is not None
        and len(before) >= 2
        and after == (before[0], torch.Size(before[1:]).numel())
    )


def shape_of(node: object) -> tuple[int, ...] | None:
    """Shape of what a traced operation gives; None where that is no tensor."""
    meta = node.meta.get("tensor_meta") if isinstance(node, fx.Node) else None
    shape = getattr(meta, "shape", None)
    return tuple(shape) if shape is not None else None


def asks_only(node: fx.Node) -> bool:
    """Whether an operation asks for a tensor's shape or type, not for its values."""
    return node.target in _QUESTIONS and node.op in ("call_function", "call_method")


def keeps_last_axis(node: fx.Node) -> bool:
    """Whether an operation selects among the axes before the last, or lays them end to end, and leaves the last one."""
    before, after = shape_of(node.args[0]) if node.args else None, shape_of(node)
    if node.op == "call_module" or not before or not after or before[-1] != after[-1]:
        return False
    if node.target is operator.getitem:
        index = node.args[1] if isinstance(node.args[1], tuple) else (node.args[1],)
        plain = all(isinstance(part, int | slice) for part in index)
        return plain and (len(index) < len(before) or index[len(before) - 1 :] == (slice(None),))
    return node.target in _FLATTENINGS


def _keeps_neurons(node: fx.Node, last: bool) -> bool:
    """Whether a mean is over axes behind the neurons' (before, where theirs is the last), and only those."""
    dims = node.kwargs.get("dim", node.args[1] if len(node.args) > 1 else None)
    axes = [dims] if isinstance(dims, int) else list(dims) if isinstance(dims, list | tuple) else []
    rank = len(shape_of(node.args[0]) or ())
    if not axes or not all(isinstance(axis, int) for axis in axes):
        return False
    places = {axis % rank for axis in axes}
    return not places & ({0, rank - 1} if last else {0, 1})
