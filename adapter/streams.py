"""Residual streams that can be rotated: who writes into them, who reads them, and what normalises them.

A stream is a vector a token (or a sample) that layers only add to and read linearly, through nothing but RMSNorm or
LayerNorm. An orthogonal Q on all writers, undone in all readers, leaves the function as it is (S. Ashkboos et al.,
"SliceGPT", ICLR 2024, section 3.1, theorem 1). RMSNorm commutes with any Q once its gains are in the readers, LayerNorm
with those that keep the mean over the features.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, fx, nn

from deepseal.adapter.classifier import Classifier
from deepseal.adapter.tracing import is_rms_norm, traced
from deepseal.adapter.wiring_laws import asks_only, is_addition, keeps_last_axis, law_of, shape_of

_SMALLEST = 1e-4  # a gain, relative to the largest, by which a bias can be divided
_EXPANSIONS = ("expand", "unsqueeze", "to", "type_as", "contiguous")


@dataclasses.dataclass(frozen=True)
class Reader:
    """A linear layer that reads a stream; ``norm`` is the normalisation in between, if there is one."""

    layer: str
    norm: str | None


@dataclasses.dataclass(frozen=True)
class Stream:
    """A residual stream.

    Attributes:
        width: number of features, on the last axis.
        writers: linear layers and embeddings that write into it, in the order of the forward pass.
        parameters: tensors that are added to it as they are, such as positions.
        norms: normalisations that are read through.
        readers: linear layers.
        centred: whether a rotation must keep the mean over the features (LayerNorm).
    """

    width: int
    writers: tuple[str, ...]
    parameters: tuple[str, ...]
    norms: tuple[str, ...]
    readers: tuple[Reader, ...]
    centred: bool


@dataclasses.dataclass(frozen=True)
class Streams:
    """The streams of a network, and for what is read or added in another way, by its first writer, the reason."""

    free: tuple[Stream, ...]
    fixed: dict[str, str]

    def read_by(self) -> dict[str, int]:
        """Position of the stream that each reader reads."""
        return {reader.layer: index for index, stream in enumerate(self.free) for reader in stream.readers}


def streams_of(model: Classifier) -> Streams:
    """The residual streams of a model, from its traced forward pass.

    Raises:
        InputError: a forward pass that cannot be traced.
    """
    return _Walk(model.module, traced(model)).streams()


@dataclasses.dataclass(frozen=True)
class _Flow:
    """A value that lies in a stream, as it is or normalised."""

    stream: int
    norm: str | None = None


class _Walk:
    """One pass over the traced operations; streams are joined by addition."""

    def __init__(self, module: nn.Module, graph: fx.Graph) -> None:
        self._layers = dict(module.named_modules())
        self._tensors = dict(module.named_parameters(remove_duplicate=False))
        self._parents: list[int] = []
        self._widths: list[int] = []
        self._reasons: dict[int, str] = {}
        self._members: list[tuple[int, str, str, str | None]] = []  # stream, role, name, norm
        self._flows: dict[fx.Node, _Flow] = {}
        self._added: dict[fx.Node, str] = {}  # nodes that are parameters, or parts of one
        calls = [str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")]
        ran = set(calls)
        shown = {name for name in ran if name.rpartition(".")[0] in ran}  # a layer's own tensor, also read by itself
        owners = {name.rpartition(".")[0] for name in shown}
        self._repeated = {name for name in calls if calls.count(name) > 1} | self._tied() | shown | owners
        for node in graph.nodes:
            self._visit(node)

    def _tied(self) -> set[str]:
        """Layers, and parameters, that share a tensor with another layer."""
        owners: dict[int, set[str]] = {}
        for name, tensor in self._tensors.items():
            owners.setdefault(id(tensor), set()).add(name)
        shared = {name for names in owners.values() if len(names) > 1 for name in names}
        return shared | {name.rpartition(".")[0] for name in shared}

    def _visit(self, node: fx.Node) -> None:
        read = [argument for argument in node.all_input_nodes if argument in self._flows]
        shape = shape_of(node)
        if node.op == "get_attr" and str(node.target) in self._tensors:
            self._added[node] = str(node.target)
            return
        if node.op == "output":
            self._break(read, "it is the answer")
            return
        if shape is None and asks_only(node):
            return
        layer = self._layers.get(str(node.target)) if node.op == "call_module" else None
        name = str(node.target) if layer is not None else ""
        if isinstance(layer, nn.Linear | nn.Embedding) and shape:
            self._linear(node, name, layer, read, shape)
        elif not read:
            self._parameter(node, shape)
        elif (layer is not None and is_rms_norm(layer)) or isinstance(layer, nn.LayerNorm):
            self._norm(node, name, layer, read[0])
        elif is_addition(node) and shape:
            self._addition(node, read, shape)
        elif len(read) == 1 and shape and self._passes(node, layer):
            self._flows[node] = self._flows[read[0]]
        else:
            what = type(layer).__name__ if layer is not None else getattr(node.target, "__name__", str(node.target))
            self._break(read, f"{what} reads it")

    def _parameter(self, node: fx.Node, shape: tuple[int, ...] | None) -> None:
        """Follow a parameter through selections and expansions that keep its last axis."""
        source = node.args[0] if node.args else None
        known = self._added.get(source) if isinstance(source, fx.Node) else None
        kept = keeps_last_axis(node) or node.target in _EXPANSIONS
        if known is not None and kept and shape and shape[-1] == self._tensors[known].shape[-1]:
            self._added[node] = known

    def _linear(
        self, node: fx.Node, name: str, layer: nn.Linear | nn.Embedding, read: list[fx.Node], shape: tuple[int, ...]
    ) -> None:
        flow = self._new(shape[-1])
        self._flows[node] = flow
        self._members.append((flow.stream, "writer", name, None))
        reason = None
        if name in self._repeated:
            reason = f"{name} runs twice or shares weights"
        elif "weight" not in layer._parameters:
            reason = f"the weight of {name} is computed from other tensors"
        elif isinstance(layer, nn.Embedding) and layer.max_norm is not None:
            reason = f"{name} rescales its rows"
        if reason is not None:
            self._break([node, *read], reason)
        for argument in read:
            source = self._flows[argument]
            self._members.append((source.stream, "reader", name, source.norm))

    def _norm(self, node: fx.Node, name: str, layer: nn.Module, source: fx.Node) -> None:
        flow = self._flows[source]
        weight, bias = (layer._parameters.get(part) for part in ("weight", "bias"))
        sizes = getattr(layer, "normalized_shape", None)
        if flow.norm is not None or name in self._repeated or (sizes is not None and len(sizes) > 1):
            self._break([source], f"{name} is no single normalisation of it")
            return
        if bias is not None and (weight is None or not _invertible(weight, bias)):
            self._break([source], f"{name} has a bias where its gain is 0")
            return
        self._members.append((flow.stream, "norm", name, None))
        self._flows[node] = _Flow(flow.stream, name)

    def _addition(self, node: fx.Node, read: list[fx.Node], shape: tuple[int, ...]) -> None:
        flows = [self._flows[argument] for argument in read]
        width = self._widths[flows[0].stream]
        arguments = node.all_input_nodes
        tensors = [self._added[argument] for argument in arguments if argument in self._added]
        known = len(read) + len(tensors) == len(arguments) == 2 and shape[-1] == width
        if not known or any(flow.norm is not None for flow in flows) or any(n in self._repeated for n in tensors):
            self._break(read, "something else is added to it")
            return
        if any(self._widths[flow.stream] != width for flow in flows):
            self._break(read, "it is added to another width")
            return
        for flow in flows[1:]:
            low, high = sorted((_find(self._parents, flows[0].stream), _find(self._parents, flow.stream)))
            self._parents[high] = low
        self._members += [(flows[0].stream, "parameter", name, None) for name in tensors]
        self._flows[node] = flows[0]

    @staticmethod
    def _passes(node: fx.Node, layer: nn.Module | None) -> bool:
        """Whether an operation is linear and treats all features alike."""
        flat = len(shape_of(node.args[0]) or ()) < 3
        return law_of(node, layer, last=not flat) == "any" or keeps_last_axis(node)

    def _new(self, width: int) -> _Flow:
        self._parents.append(len(self._parents))
        self._widths.append(width)
        return _Flow(len(self._parents) - 1)

    def _break(self, nodes: list[fx.Node], reason: str) -> None:
        for node in nodes:
            self._reasons.setdefault(self._flows[node].stream, reason)

    def streams(self) -> Streams:
        """What was found, in the order of the first writers."""
        reasons = {_find(self._parents, index): reason for index, reason in sorted(self._reasons.items(), reverse=True)}
        free, fixed = [], {}
        for root in sorted({_find(self._parents, index) for index in range(len(self._parents))}):
            own = [entry for entry in self._members if _find(self._parents, entry[0]) == root]
            writers, parameters, norms = (
                tuple(dict.fromkeys(name for _, role, name, _ in own if role == wanted))
                for wanted in ("writer", "parameter", "norm")
            )
            readers = tuple(Reader(name, norm) for _, role, name, norm in own if role == "reader")
            centred = any(isinstance(self._layers[name], nn.LayerNorm) for name in norms)
            if root in reasons or not readers or self._widths[root] < 2 + centred:
                fixed[writers[0]] = reasons.get(root, "nothing reads it linearly")
            else:
                free.append(Stream(self._widths[root], writers, parameters, norms, readers, centred))
        return Streams(tuple(free), fixed)


def _invertible(gain: Tensor, bias: Tensor) -> bool:
    size = gain.detach().abs()
    return bool((size[bias.detach() != 0] > _SMALLEST * size.max()).all()) or not bool(torch.any(bias != 0))


def _find(parents: list[int], index: int) -> int:
    while parents[index] != index:
        index = parents[index]
    return index
