"""The network between PyTorch and the program: few kinds of layers, real weights, views instead of data movement."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Kind = Literal["input", "affine", "activation", "max", "add", "concat", "multiply"]
Ints = NDArray[np.int64]
Reals = NDArray[np.float64]


@dataclasses.dataclass(frozen=True, eq=False)
class Ref:
    """A tensor that is a view of a node's output.

    Attributes:
        node: whose output.
        index: element numbers, in the tensor's shape without the batch; -1 is padding.
        batch: where the batch dimension is.
    """

    node: int
    index: Ints
    batch: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample."""
        return tuple(self.index.shape)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Affine:
    """W x + b in real numbers, with torch's meaning.

    Attributes:
        op: ``linear``, ``conv1d`` or ``conv2d``.
        weight: float64.
        bias: (channels,) float64.
        public: the weights are no secret of the model (average pooling).
    """

    op: Literal["linear", "conv1d", "conv2d"]
    weight: Reals
    bias: Reals
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    public: bool = False


@dataclasses.dataclass(frozen=True, eq=False)
class Node:
    """One layer.

    ``activation`` has ``settings["function"]``; ``max`` has one input for each place of the window; ``add`` has
    ``settings["signs"]``; ``concat`` has inputs of the output's shape, with padding where another one is read;
    ``multiply`` has its factors in pairs, whose products are added.

    Attributes:
        kind: of the layer.
        inputs: tensors that it reads.
        shape: of its output, without the batch.
        name: of the layer in the model.
        settings: see above.
        affine: weights, for ``affine``.
    """

    kind: Kind
    inputs: tuple[Ref, ...]
    shape: tuple[int, ...]
    name: str
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    affine: Affine | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class Graph:
    """Layers in order; ``output`` is the logits. ``mean``, ``std`` and ``bounds`` stay with the input's encoding."""

    nodes: tuple[Node, ...]
    output: Ref

    def consumers(self) -> list[list[int]]:
        """For each node the nodes that read it, once each; the output counts as node -1."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for i, node in enumerate(self.nodes):
            for source in sorted({ref.node for ref in node.inputs}):
                found[source].append(i)
        found[self.output.node].append(-1)
        return found


def identity(node: int, shape: tuple[int, ...]) -> Ref:
    """A node's output as it is."""
    return Ref(node, np.arange(math.prod(shape), dtype=np.int64).reshape(shape))


def run(graph: Graph, x: Tensor) -> list[Tensor]:
    """All nodes' outputs in real numbers.

    Args:
        graph: what to run.
        x: (N, …) normalised inputs.

    Returns:
        For each node (N, …) float64.
    """
    values: list[Tensor] = []
    for node in graph.nodes:
        if node.kind == "input":
            values.append(x.double())
            continue
        lowest = -math.inf if node.kind == "max" else 0.0
        inputs = [read(values[ref.node], ref.index, lowest) for ref in node.inputs]
        values.append(_apply(node, inputs).reshape(len(x), *node.shape))
    return values


def read(value: Tensor, index: Ints, padding: float) -> Tensor:
    """(N, …) a view of a batch of outputs."""
    flat = value.flatten(1)
    if index.size == flat.shape[1] and np.array_equal(index.reshape(-1), np.arange(index.size)):
        return value.reshape(len(value), *index.shape)
    result = flat[:, torch.from_numpy(index.reshape(-1).copy()).clamp(min=0)]
    if index.min() < 0:
        result[:, torch.from_numpy(index.reshape(-1) < 0)] = padding
    return result.reshape(len(value), *index.shape)


def _apply(node: Node, inputs: Sequence[Tensor]) -> Tensor:
    if node.affine is not None:
        return apply_affine(node.affine, inputs[0])
    if node.kind == "activation":
        return activate(node.settings, inputs[0])
    if node.kind == "max":
        return torch.stack(list(inputs)).amax(0)
    if node.kind == "multiply":
        return torch.stack([a * b for a, b in zip(inputs[::2], inputs[1::2], strict=True)]).sum(0)
    signs = node.settings.get("signs", "+" * len(inputs))
    total = torch.stack([x if sign == "+" else -x for x, sign in zip(inputs, signs, strict=True)]).sum(0)
    return total.clamp(min=0) if node.settings.get("relu") else total


def apply_affine(affine: Affine, x: Tensor) -> Tensor:
    """(N, …) to (N, …), float64."""
    weight, bias = torch.from_numpy(affine.weight), torch.from_numpy(affine.bias)
    if affine.op == "linear":
        return torch.nn.functional.linear(x, weight, bias)
    convolve = torch.nn.functional.conv1d if affine.op == "conv1d" else torch.nn.functional.conv2d
    return convolve(x, weight, bias, affine.stride, affine.padding, affine.dilation, affine.groups)


def activate(settings: Mapping[str, Any], x: Tensor) -> Tensor:
    """The activation ``settings["function"]``."""
    function = settings["function"]
    if function == "relu":
        return x.clamp(min=0)
    if function == "clamp":
        return x.clamp(settings["low"], settings["high"])
    if function == "leaky_relu":
        return torch.where(x < 0, x * settings["slope"], x)
    if function == "gelu":
        return torch.nn.functional.gelu(x)
    if function == "gelu_tanh":
        return torch.nn.functional.gelu(x, approximate="tanh")
    if function == "silu":
        return torch.nn.functional.silu(x)
    return torch.sigmoid(x) if function == "sigmoid" else torch.tanh(x)
