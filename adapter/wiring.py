"""Which neurons of a network hang together: who makes them, who reads them, and how they may be scaled.

A network computes the same when the neurons of a hidden layer change places, together with the weights that make them
and the weights that read them. The neurons of layers that are added (a residual stream) change places together. Where
only ReLU-like functions lie between, they may also be scaled, and where only odd ones do, change their signs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

import torch
from torch import fx, nn

from deepseal.adapter.capture import NORMALISATION, PARAMETRIC
from deepseal.adapter.classifier import Classifier
from deepseal.adapter.tracing import traced
from deepseal.adapter.wiring_laws import Law, asks_only, both, is_addition, is_flattening, is_product, law_of, shape_of
from deepseal.adapter.wiring_parts import CLASSES, INPUT, Group, Place, Reader, Segment, Wiring

__all__ = ["Group", "Place", "Reader", "Segment", "Wiring", "wiring_of"]


def wiring_of(model: Classifier) -> Wiring:
    """The wiring of a model, from its traced forward pass.

    An operation that is not understood fixes the neurons that it reads: they are said to be unmovable, with the reason.

    Raises:
        InputError: a forward pass that cannot be traced.
    """
    return _Walk(model.module, traced(model)).wiring()


class _Walk:
    """One pass over the traced operations; segments are joined by addition, and grouped by batch normalisation."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self._layers = dict(module.named_modules())
        self._laws: list[Law] = []
        self._sizes: list[int] = []
        self._same: list[int] = []  # union-find over segments: one stretch
        self._together: list[int] = []  # union-find over segments: one group
        self._reasons: dict[int, str] = {}
        self._flows: dict[fx.Node, Place] = {}
        self._inputs: dict[str, Place] = {}
        self._outputs: dict[str, Place] = {}
        self._order: list[str] = []
        self._others: dict[str, str] = {}
        calls = [node.target for node in graph.nodes if node.op == "call_module"]
        self._repeated = {str(name) for name in calls if calls.count(name) > 1} | self._tied()
        for node in graph.nodes:
            self._visit(node)

    def _tied(self) -> set[str]:
        """Layers that share a parameter with another one."""
        owners: dict[int, set[str]] = {}
        for name, layer in self._layers.items():
            for parameter in layer.parameters(recurse=False):
                owners.setdefault(id(parameter), set()).add(name)
        return {name for names in owners.values() if len(names) > 1 for name in names}

    def _visit(self, node: fx.Node) -> None:
        shape = shape_of(node)
        read = [argument for argument in node.all_input_nodes if argument in self._flows]
        if node.op == "placeholder":
            if shape is not None and len(shape) > 1:
                self._flows[node] = self._new(shape[1], INPUT)
            return
        if node.op == "output":
            for argument in read:
                self._fix(self._flows[argument], CLASSES)
            return
        if shape is None or not read:
            if node.op != "get_attr" and not asks_only(node):
                self._unknown(node, read, shape or ())
            return
        layer = self._layers.get(str(node.target)) if node.op == "call_module" else None
        name = str(node.target) if layer is not None else None
        flow = self._flows[read[0]]
        if name in self._repeated and layer is not None and list(layer.parameters()):
            self._unknown(node, read, shape, f"{name} runs twice or shares weights")
        elif name is not None and isinstance(layer, PARAMETRIC):
            self._weights(node, name, layer, read[0], shape)
        elif name is not None and isinstance(layer, NORMALISATION):
            self._normalisation(node, name, layer, flow)
        elif len(read) == 2 and is_addition(node):
            self._addition(node, read)
        elif len(read) == 2 and is_product(node) and self._alike(read):
            self._product(node, read)
        elif len(read) == 1 and (law := law_of(node, layer, last=flow.last)) is not None:
            self._constrain(flow, law)
            self._flows[node] = dataclasses.replace(flow, last=flow.last and len(shape) > 2)
        elif len(read) == 1 and not flow.last and is_flattening(node, layer):
            before = shape_of(read[0]) or ()
            self._flows[node] = Place(flow.segment, flow.block * int(torch.Size(before[2:]).numel()))
        else:
            self._unknown(node, read, shape)
        if name is not None and name not in self._repeated and node in self._flows:
            self._outputs[name] = self._flows[node]

    def _weights(self, node: fx.Node, name: str, layer: nn.Module, source: fx.Node, shape: tuple[int, ...]) -> None:
        before, flow = shape_of(source) or (), self._flows[source]
        dense = isinstance(layer, nn.Linear)
        if "weight" not in layer._parameters:
            self._unknown(node, [source], shape, f"the weight of {name} is computed from other tensors")
        elif flow.last > dense or len(before) < 2 or getattr(layer, "groups", 1) != 1:
            self._unknown(node, [source], shape, f"{name} mixes its inputs in another way")
        else:
            deep = dense and len(before) > 2
            if deep and not flow.last:
                reason = f"{name} reads another axis"
                self._fix(flow, reason)
                flow = self._new(before[-1], reason, last=True)
            self._inputs[name] = flow
            self._order.append(name)
            self._flows[node] = self._new(shape[-1] if deep else shape[1], last=deep)

    def _normalisation(self, node: fx.Node, name: str, layer: nn.Module, flow: Place) -> None:
        result = self._new(self._sizes[flow.segment])
        self._join(self._together, flow.segment, result.segment)
        if getattr(layer, "running_mean", None) is None or layer._parameters.get("weight") is None:
            self._constrain(flow, "none")
            self._constrain(result, "none")
        if flow.block != 1 or flow.last:
            self._fix(flow, f"{name} follows a flattening" if flow.block != 1 else f"{name} reads another axis")
        self._inputs[name] = flow
        self._order.append(name)
        self._flows[node] = result

    def _addition(self, node: fx.Node, read: list[fx.Node]) -> None:
        if not self._alike(read):
            self._unknown(node, read, shape_of(node) or ())
            return
        one, other = (self._flows[argument] for argument in read)
        law = both(self._laws[self._root(one)], self._laws[self._root(other)])
        self._join(self._same, one.segment, other.segment)
        self._join(self._together, one.segment, other.segment)
        self._laws[self._root(one)] = law
        self._flows[node] = one

    def _product(self, node: fx.Node, read: list[fx.Node]) -> None:
        """Neurons change places together; factors are left alone."""
        first = self._flows[read[0]]
        result = dataclasses.replace(first, segment=self._new(self._sizes[first.segment]).segment)
        for flow in (result, *(self._flows[argument] for argument in read)):
            self._constrain(flow, "none")
            self._join(self._together, result.segment, flow.segment)
        self._flows[node] = result

    def _alike(self, read: list[fx.Node]) -> bool:
        """Whether two tensors have the same neurons in the same places."""
        one, other = (self._flows[argument] for argument in read)
        return (one.block, one.last) == (other.block, other.last) and shape_of(read[0]) == shape_of(read[1])

    def _unknown(
        self, node: fx.Node, read: Iterable[fx.Node], shape: tuple[int, ...], reason: str | None = None
    ) -> None:
        layer = self._layers.get(str(node.target)) if node.op == "call_module" else None
        what = type(layer).__name__ if layer is not None else getattr(node.target, "__name__", str(node.target))
        reason = reason or f"{what} is not understood"
        if layer is not None and list(layer.parameters()):
            self._others[str(node.target)] = reason
        for argument in read:
            self._fix(self._flows[argument], reason)
        if len(shape) > 1:
            self._flows[node] = self._new(shape[1], reason)

    def _new(self, size: int, reason: str | None = None, *, last: bool = False) -> Place:
        index = len(self._laws)
        self._laws.append("any")
        self._sizes.append(size)
        self._same.append(index)
        self._together.append(index)
        if reason is not None:
            self._reasons[index] = reason
        return Place(index, 1, last)

    def _fix(self, flow: Place, reason: str) -> None:
        self._reasons.setdefault(flow.segment, reason)

    def _constrain(self, flow: Place, law: Law) -> None:
        root = self._root(flow)
        self._laws[root] = both(self._laws[root], law)

    def _root(self, flow: Place) -> int:
        return _find(self._same, flow.segment)

    @staticmethod
    def _join(parents: list[int], one: int, other: int) -> None:
        low, high = sorted((_find(parents, one), _find(parents, other)))
        parents[high] = low

    def wiring(self) -> Wiring:
        """What was found, with groups and segments numbered in the order in which they first appear."""
        stretches = {root: index for index, root in enumerate(sorted({_find(self._same, s) for s in self._range()}))}
        groups = {root: index for index, root in enumerate(sorted({_find(self._together, s) for s in self._range()}))}

        def place(flow: Place) -> Place:
            return Place(stretches[self._root(flow)], flow.block, flow.last)

        inputs = {name: place(flow) for name, flow in self._inputs.items()}
        outputs = {name: place(flow) for name, flow in self._outputs.items()}
        group_of = {stretches[_find(self._same, s)]: groups[_find(self._together, s)] for s in self._range()}
        reasons = {
            groups[_find(self._together, s)]: reason for s, reason in sorted(self._reasons.items(), reverse=True)
        }
        segments = tuple(
            Segment(group_of[index], "none" if group_of[index] in reasons else self._laws[root])
            for root, index in stretches.items()
        )
        weighted = [name for name in self._order if isinstance(self._layers[name], PARAMETRIC)]
        normed = [name for name in self._order if isinstance(self._layers[name], NORMALISATION)]
        found = [
            Group(
                width=self._sizes[root],
                makers=tuple(n for n in weighted if group_of[outputs[n].segment] == index),
                norms=tuple(n for n in normed if group_of[outputs[n].segment] == index),
                readers=tuple(Reader(n, inputs[n].block) for n in weighted if group_of[inputs[n].segment] == index),
                fixed=reasons.get(index),
            )
            for root, index in groups.items()
        ]
        return Wiring(tuple(found), segments, inputs, outputs, self._others)

    def _range(self) -> range:
        return range(len(self._laws))


def _find(parents: list[int], index: int) -> int:
    while parents[index] != index:
        index = parents[index]
    return index
