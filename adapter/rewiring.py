"""The same network with its hidden neurons in other places, scales and numbers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from deepseal.adapter.capture import NORMALISATION
from deepseal.adapter.classifier import Classifier
from deepseal.adapter.widths import resize
from deepseal.adapter.wiring import Place, Wiring


@dataclasses.dataclass(frozen=True)
class Links:
    """Where the readers of a group take its new neurons from: pairs of old and new neurons.

    Attributes:
        old: (links,) old neuron, whose outgoing weights are taken.
        new: (links,) new neuron, to which they are added.
        share: (links,) factor of the outgoing weights; those of one old neuron add up to 1 if it goes on as it was.
    """

    old: Tensor
    new: Tensor
    share: Tensor


@dataclasses.dataclass(frozen=True)
class Move:
    """What happens to a group.

    Attributes:
        order: (new,) old neuron that each new one is a copy of; -1 for none, whose weights are 0.
        links: where the outgoing weights go.
    """

    order: Tensor
    links: Links

    @classmethod
    def permutation(cls, order: Tensor) -> Move:
        """New neuron i is old neuron order[i]; with ``arange`` nothing moves."""
        return cls(order, Links(order, torch.arange(len(order)), torch.ones(len(order))))


@dataclasses.dataclass(frozen=True)
class Scale:
    """Factors of a segment: old neurons hold ``before`` (old,) times some values, new ones ``after`` (new,) times."""

    before: Tensor
    after: Tensor


def rewired(
    model: Classifier,
    wiring: Wiring,
    moves: Mapping[int, Move],
    scales: Mapping[int, Scale],
    template: nn.Module,
) -> nn.Module:
    """``template`` with the weights of ``model``, its neurons moved and scaled; other tensors as in the model.

    Args:
        model: where the weights come from; not changed.
        wiring: of the model.
        moves: by group; the other groups stay as they are.
        scales: by segment; the others keep their scale.
        template: a module of the model's structure; its layers are given the widths that the moves need.
    """
    state: dict[str, Tensor] = dict(model.module.state_dict())
    for group in wiring.groups:
        for name in (*group.makers, *group.norms):
            layer = model.module.get_submodule(name)
            place = wiring.inputs[name]
            if isinstance(layer, NORMALISATION):
                changed = _normalisation(layer, wiring, moves, scales, place, wiring.outputs[name])
            else:
                changed = _weights(layer, wiring, moves, scales, place, wiring.outputs[name])
            state.update({f"{name}.{part}": value for part, value in changed.items()})
            resize(template.get_submodule(name), changed)
    template.load_state_dict(state, strict=True)
    return template


def _weights(
    layer: nn.Module,
    wiring: Wiring,
    moves: Mapping[int, Move],
    scales: Mapping[int, Scale],
    into: Place,
    out: Place,
) -> dict[str, Tensor]:
    weight = layer.get_parameter("weight").detach()
    read, made = wiring.segments[into.segment].group, wiring.segments[out.segment].group
    weight = _read(weight, moves.get(read), scales.get(into.segment), into.block)
    result = {"weight": _made(weight, moves.get(made), scales.get(out.segment))}
    if layer._parameters.get("bias") is not None:
        bias = layer.get_parameter("bias").detach()
        result["bias"] = _made(bias, moves.get(made), scales.get(out.segment))
    return result


def _read(weight: Tensor, move: Move | None, scale: Scale | None, block: int) -> Tensor:
    """Columns of the new neurons: sums over links of the old ones', so that the layer reads what it read."""
    if move is None and scale is None:
        return weight
    rows, rest = weight.shape[0], weight.shape[2:]
    columns = weight.reshape(rows, weight.shape[1] // block, block, *rest)
    move = move or Move.permutation(torch.arange(columns.shape[1]))
    old, new, factor = move.links.old, move.links.new, move.links.share.double()
    if scale is not None:
        factor = factor * scale.before[old] / scale.after[new]
    taken = columns[:, old].double() * _along(factor.to(weight.device), columns.ndim, 1)
    result = torch.zeros(rows, len(move.order), block, *rest, dtype=torch.float64, device=weight.device)
    result.index_add_(1, new.to(weight.device), taken)
    return result.to(weight).reshape(rows, -1, *rest)


def _made(values: Tensor, move: Move | None, scale: Scale | None) -> Tensor:
    """Rows of the new neurons."""
    if move is None and scale is None:
        return values
    order = move.order if move is not None else torch.arange(len(values))
    factor = (order >= 0).double()
    if scale is not None:
        factor = factor * scale.after / scale.before[order.clamp(min=0)]
    factor = factor.to(values.device)
    return (values[order.clamp(min=0)].double() * _along(factor, values.ndim, 0)).to(values)


def _normalisation(
    layer: nn.Module,
    wiring: Wiring,
    moves: Mapping[int, Move],
    scales: Mapping[int, Scale],
    into: Place,
    out: Place,
) -> dict[str, Tensor]:
    """Inputs t times as large have t times the mean and t squared times the variance; the gain makes up for epsilon."""
    kept = [*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)]
    parts = {name: value.detach().cpu() for name, value in kept if value.ndim == 1}
    move = moves.get(wiring.segments[into.segment].group)
    order = move.order if move is not None else torch.arange(len(next(iter(parts.values()))))
    there, rows = (order >= 0).double(), order.clamp(min=0)
    moved = {name: value[rows].double() for name, value in parts.items()}
    t, s = (_ratio(scales.get(place.segment), rows) for place in (into, out))
    if "weight" in moved:
        gain = torch.ones_like(t) * s / t
        if "running_var" in moved:
            variance, epsilon = moved["running_var"], float(getattr(layer, "eps", 0.0))
            gain = gain * ((t * t * variance + epsilon) / (variance + epsilon)).sqrt()
        moved["weight"] = moved["weight"] * gain * there
        moved["bias"] = moved["bias"] * s * there
    if "running_mean" in moved:
        moved["running_mean"] = moved["running_mean"] * t
        moved["running_var"] = moved["running_var"] * t * t
    return {name: value.to(parts[name]) for name, value in moved.items()}


def _ratio(scale: Scale | None, rows: Tensor) -> Tensor:
    return torch.ones(len(rows), dtype=torch.float64) if scale is None else scale.after / scale.before[rows]


def _along(factor: Tensor, ndim: int, axis: int) -> Tensor:
    return factor.reshape(*(-1 if index == axis else 1 for index in range(ndim)))
