"""Fewer layers, same function: scalings go into neighbouring linear layers, ReLU before max pooling and into sums."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from deepseal.secure_inference.compile.graph import Affine, Graph, Ints, Node, Reals, Ref, identity


def fold(graph: Graph) -> Graph:
    """The graph without layers that only scale, where that is possible, and without layers that nothing reads."""
    return _pruned(_merged(_swapped(_scaled_back(_scaled_ahead(graph)))))


def without_last_curve(graph: Graph) -> Graph:
    """The graph without sigmoid or tanh at its end, which change no order; for programs that give labels only."""
    output = graph.output
    while True:
        node = graph.nodes[output.node]
        if node.kind != "activation" or node.settings["function"] not in ("sigmoid", "tanh"):
            return _pruned(Graph(graph.nodes, output))
        output = _compose(output, node.inputs[0])


def _compose(outer: Ref, inner: Ref) -> Ref:
    """The view ``outer`` of a node that is itself the view ``inner`` of another."""
    flat = inner.index.reshape(-1)
    index = np.where(outer.index >= 0, flat[np.maximum(outer.index, 0)], -1)
    return Ref(inner.node, index)


class _Rewriting:
    """A graph that is copied node by node; old nodes may become views of new ones."""

    def __init__(self, graph: Graph) -> None:
        self.old, self.nodes = graph, list[Node]()
        self.readers = graph.consumers()
        self._places: list[Ref] = []

    def moved(self, ref: Ref) -> Ref:
        """A view of an old node as one of a new node."""
        return _compose(ref, self._places[ref.node])

    def keep(self, node: Node) -> None:
        """Copy the next old node."""
        self.nodes.append(dataclasses.replace(node, inputs=tuple(self.moved(ref) for ref in node.inputs)))
        self._places.append(identity(len(self.nodes) - 1, node.shape))

    def drop(self, ref: Ref) -> None:
        """The next old node is this view of a new node."""
        self._places.append(ref)

    def graph(self) -> Graph:
        """The result."""
        return Graph(tuple(self.nodes), self.moved(self.old.output))


def _is_scale(node: Node) -> bool:
    return node.kind == "affine" and node.affine is None


def _scaled_ahead(graph: Graph) -> Graph:
    """A scaling of the input or of an activation goes into the linear layers that read it, if all can take it."""
    work = _Rewriting(graph)
    taken: dict[int, list[tuple[Reals, Reals]]] = {}
    for i, node in enumerate(graph.nodes):
        if _is_scale(node) and graph.nodes[node.inputs[0].node].kind != "affine" and (node.inputs[0].index >= 0).all():
            readers = [graph.nodes[r] if r >= 0 else None for r in work.readers[i]]
            if readers and all(r is not None and _into_next(r, node) is not None for r in readers):
                taken[i] = []
    for i, node in enumerate(graph.nodes):
        if i in taken:
            work.drop(work.moved(node.inputs[0]))
        elif node.affine is not None and node.inputs[0].node in taken:
            work.keep(dataclasses.replace(node, affine=_into_next(node, graph.nodes[node.inputs[0].node])))
        else:
            work.keep(node)
    return work.graph()


def _into_next(reader: Node, scale: Node) -> Affine | None:
    """The reader's layer with the scaling before it, or None."""
    affine = reader.affine
    if affine is None or affine.public:
        return None
    index = reader.inputs[0].index
    real, place = index >= 0, np.maximum(index, 0)
    shift = np.where(real, scale.settings["shift"].reshape(-1)[place], 0.0)
    factor = scale.settings["factor"].reshape(-1)[place]
    if shift.any() and (not real.all() or any(affine.padding)):
        return None
    axis = index.ndim - 1 if affine.op == "linear" else 0
    factors, shifts = (np.moveaxis(part, axis, 0).reshape(index.shape[axis], -1) for part in (factor, shift))
    if (factors != factors[:, :1]).any() or (shifts != shifts[:, :1]).any():
        return None
    weight = affine.weight
    per_group, out = weight.shape[1], len(weight) // affine.groups
    reads = (np.arange(len(weight)) // out)[:, None] * per_group + np.arange(per_group)
    tail = (1,) * (weight.ndim - 2)
    bias = affine.bias + (weight * shifts[reads, 0].reshape(*reads.shape, *tail)).reshape(len(weight), -1).sum(axis=1)
    return dataclasses.replace(affine, weight=weight * factors[reads, 0].reshape(*reads.shape, *tail), bias=bias)


def _scaled_back(graph: Graph) -> Graph:
    """A scaling of a linear layer that nothing else reads goes into it; others become layers of their own."""
    work = _Rewriting(graph)
    for node in graph.nodes:
        if not _is_scale(node):
            work.keep(node)
            continue
        source = node.inputs[0]
        ref = work.moved(source)
        before = work.nodes[ref.node]
        if len(work.readers[source.node]) == 1 and before.affine is not None and not before.affine.public:
            merged = _into_last(before, ref.index, node.settings["factor"], node.settings["shift"])
            if merged is not None:
                name = before.name or node.name
                work.nodes[ref.node] = dataclasses.replace(before, affine=merged, name=name)
                work.drop(ref)
                continue
        work.keep(_depthwise(node))
    return work.graph()


def _into_last(before: Node, index: Ints, factor: Reals, shift: Reals) -> Affine | None:
    """The layer before with the scaling behind it, or None when a channel's elements are scaled differently."""
    affine = before.affine
    if affine is None or (index < 0).any():
        return None
    channel = channel_of(affine, before.shape)[index.reshape(-1)]
    merged = []
    for values, neutral in ((factor, 1.0), (shift, 0.0)):
        flat = values.reshape(-1)
        per_channel = np.full(len(affine.weight), neutral)
        per_channel[channel] = flat
        if (per_channel[channel] != flat).any():
            return None
        merged.append(per_channel)
    weight = affine.weight * merged[0].reshape(-1, *(1,) * (affine.weight.ndim - 1))
    return dataclasses.replace(affine, weight=weight, bias=affine.bias * merged[0] + merged[1])


def channel_of(affine: Affine, shape: tuple[int, ...]) -> Ints:
    """(elements,): the output channel of each element of a linear layer's result."""
    axis = len(shape) - 1 if affine.op == "linear" else 0
    sizes = [-1 if i == axis else 1 for i in range(len(shape))]
    return np.broadcast_to(np.arange(shape[axis]).reshape(sizes), shape).reshape(-1).astype(np.int64)


def _depthwise(node: Node) -> Node:
    """A scaling as a convolution of size 1 with as many groups as channels, or as elements where those differ."""
    factor, shift = node.settings["factor"], node.settings["shift"]
    channels = node.shape[0] if node.shape else 1
    rows = [part.reshape(channels, -1) for part in (factor, shift)]
    if any((part != part[:, :1]).any() for part in rows):
        channels, rows = math.prod(node.shape), [part.reshape(-1, 1) for part in (factor, shift)]
    source = Ref(node.inputs[0].node, node.inputs[0].index.reshape(channels, -1))
    weight = rows[0][:, 0].reshape(channels, 1, 1)
    affine = Affine("conv1d", weight, rows[1][:, 0].copy(), (1,), (0,), (1,), channels)
    return Node("affine", (source,), node.shape, node.name, {}, affine)


def _swapped(graph: Graph) -> Graph:
    """Max pooling, then ReLU: first ReLU, which then cuts the words that are compared."""
    work = _Rewriting(graph)
    swapped: set[int] = set()
    for i, node in enumerate(graph.nodes):
        if node.kind == "max" and len(work.readers[i]) == 1 and work.readers[i][0] >= 0:
            reader = graph.nodes[work.readers[i][0]]
            one = len({ref.node for ref in node.inputs}) == 1
            if one and reader.kind == "activation" and reader.settings["function"] == "relu":
                source = node.inputs[0].node
                shape = graph.nodes[source].shape
                first = Node("activation", (identity(source, shape),), shape, reader.name, reader.settings)
                place = len(work.nodes)
                moved = dataclasses.replace(first, inputs=(work.moved(first.inputs[0]),))
                work.nodes.append(moved)
                inputs = tuple(Ref(place, ref.index) for ref in node.inputs)
                work.nodes.append(dataclasses.replace(node, inputs=inputs))
                work.drop(identity(place + 1, node.shape))
                swapped.add(work.readers[i][0])
                continue
        if i in swapped:
            work.drop(work.moved(node.inputs[0]))
        else:
            work.keep(node)
    return work.graph()


def _merged(graph: Graph) -> Graph:
    """A sum, then ReLU: one layer."""
    work = _Rewriting(graph)
    for node in graph.nodes:
        source = node.inputs[0] if node.inputs else None
        if node.kind == "activation" and node.settings["function"] == "relu" and source is not None:
            ref = work.moved(source)
            before = work.nodes[ref.node]
            alone = len(work.readers[source.node]) == 1
            if before.kind == "add" and alone and not before.settings.get("relu") and (ref.index >= 0).all():
                work.nodes[ref.node] = dataclasses.replace(before, settings={**before.settings, "relu": True})
                work.drop(ref)
                continue
        work.keep(node)
    return work.graph()


def _pruned(graph: Graph) -> Graph:
    live = {0, graph.output.node}
    for i in range(len(graph.nodes) - 1, -1, -1):
        if i in live:
            live |= {ref.node for ref in graph.nodes[i].inputs}
    number = {old: new for new, old in enumerate(sorted(live))}
    nodes = [
        dataclasses.replace(node, inputs=tuple(Ref(number[ref.node], ref.index) for ref in node.inputs))
        for i, node in enumerate(graph.nodes)
        if i in live
    ]
    return Graph(tuple(nodes), Ref(number[graph.output.node], graph.output.index))
