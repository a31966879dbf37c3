"""From a PyTorch module to a ``Graph``, through ``torch.export``.

Everything that only moves data (views, permutations, slices, padding, …) becomes an index: the operator is run on the
element numbers. Batch normalisation, scalings and shifts are folded into the layer before where they can be.
"""

from __future__ import annotations

import math
import operator
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deepseal.adapter import Classifier
from deepseal.errors import InputError, understood
from deepseal.secure_inference.compile import operators
from deepseal.secure_inference.compile.folding import fold
from deepseal.secure_inference.compile.graph import Affine, Graph, Node, Ref, identity, run
from deepseal.secure_inference.compile.operators import HINTS, MOVES, Unsupported

_FAR = 1 << 40  # between the element numbers of the two samples


class Builder:
    """A graph under construction, with what the operators' translations need."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []
        self.layer = ""

    def add(self, kind: Any, inputs: Sequence[Ref], shape: Sequence[int], *, affine: Affine | None = None,
            **settings: Any) -> Ref:  # fmt: skip
        """Append a layer; gives its output."""
        node = Node(kind, tuple(inputs), tuple(int(n) for n in shape), self.layer, settings, affine)
        self.nodes.append(node)
        return identity(len(self.nodes) - 1, node.shape)

    def affine(self, x: Ref, affine: Affine) -> Ref:
        """Append a linear layer."""
        with torch.no_grad():
            shape = run_shape(affine, x.shape)
        return self.add("affine", [x], shape, affine=affine)

    def scale(self, x: Ref, factor: Any, shift: Any) -> Ref:
        """Scale: x factor + shift, elementwise; the two broadcast to x."""
        factor, shift = (
            np.array(np.broadcast_to(np.asarray(part, dtype=np.float64), x.shape), copy=True)
            for part in (factor, shift)
        )
        return self.add("affine", [x], x.shape, affine=None, factor=factor, shift=shift)


def run_shape(affine: Affine, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of the result of a linear layer."""
    if affine.op == "linear":
        return (*shape[:-1], len(affine.weight))
    kernel = affine.weight.shape[2:]
    sizes = zip(shape[1:], kernel, affine.stride, affine.padding, affine.dilation, strict=True)
    return (len(affine.weight), *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes))


def lower(model: Classifier) -> Graph:
    """The graph of a classifier, without its normalisation; the model is left as it is.

    Raises:
        InputError: operators that are not supported, all in one message; or a model that ``torch.export`` refuses.
    """
    model.spec.require_plain("a compiler of circuits")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        module = model.copy().module.cpu().double().eval()
        low, high = model.spec.bounds
        example = torch.full((2, *model.spec.shape), (low + high) / 2)
        example = model.spec.normalise(example.double())
        with understood("a model that torch.export accepts", "rewrite what it names"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exported = torch.export.export(module, (example,), strict=False)
            constants: dict[str, Tensor] = {}
            signature = exported.graph_signature
            for part in (signature.inputs_to_parameters, signature.inputs_to_buffers):
                for name, target in part.items():
                    constants[name] = (exported.state_dict | exported.constants)[target]
            for name, target in signature.inputs_to_lifted_tensor_constants.items():
                constants[name] = exported.constants[target]
        graph = fold(_walk(exported.graph, constants, model.spec.shape))
        generator = torch.Generator().manual_seed(0)
        drawn = low + (high - low) * torch.rand((4, *model.spec.shape), generator=generator, dtype=torch.float64)
        drawn = model.spec.normalise(drawn)
        _compare(graph, drawn, module(drawn))
    return graph


def _compare(graph: Graph, x: Tensor, expected: Tensor) -> None:
    """The lowered graph must give what the model gives."""
    values = run(graph, x)[graph.output.node].flatten(1)[:, torch.from_numpy(graph.output.index.reshape(-1).copy())]
    for wanted in (values, values.softmax(1), values.log_softmax(1)):
        if wanted.shape == expected.shape and torch.allclose(wanted, expected, rtol=1e-6, atol=1e-8):
            return
    error = float((values - expected).abs().max()) if values.shape == expected.shape else math.inf
    do = "please report the model: one of its operators is lowered wrongly"
    raise InputError("a graph that computes the same as the model", found=f"a difference of {error:g}", do=do)


def _walk(graph: torch.fx.Graph, constants: dict[str, Tensor], shape: tuple[int, ...]) -> Graph:
    builder = Builder()
    values: dict[str, Any] = {}
    problems: list[str] = []
    x = builder.add("input", [], shape)
    softmax: set[str] = set()
    output: Any = None
    for node in graph.nodes:
        builder.layer = _layer(node)
        if node.op == "placeholder":
            values[node.name] = constants.get(node.name, x)
        elif node.op == "output":
            outputs: Any = node.args[0]
            output = outputs[0] if len(outputs) == 1 else None
        elif node.op == "call_function":
            used = [argument.name for argument in node.all_input_nodes]
            try:
                if softmax & set(used) and node.target is not operator.getitem:
                    raise Unsupported("softmax inside the network", "only one at the output can be left out")
                values[node.name] = _call(builder, node, values)
                if _name(node.target) in ("softmax", "_softmax", "log_softmax", "_log_softmax"):
                    softmax.add(node.name)
            except Unsupported as error:
                problem = f"{error.what} in {builder.layer or 'the model itself'!r} ({error.hint})"
                problems += [problem] * (problem not in problems)
                values[node.name] = _stand_in(builder, node)
        else:
            values[node.name] = None
    if problems:
        found, do = "; ".join(problems), "replace these layers"
        raise InputError("layers that private inference supports", found=found, do=do)
    result = values.get(getattr(output, "name", ""))
    if not isinstance(result, Ref) or len(result.shape) != 1 or result.batch:
        raise InputError("one output of shape (N, classes)", found="another", do="let the model return its logits")
    return Graph(tuple(builder.nodes), result)


def _layer(node: torch.fx.Node) -> str:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return str(stack[-1][0]) if stack else ""


def _name(target: Any) -> str:
    """``conv2d`` for ``aten.conv2d.default``, without the underscore of operators that work in place."""
    packet = getattr(target, "_opname", None) or getattr(getattr(target, "overloadpacket", None), "__name__", None)
    name = str(packet or getattr(target, "__name__", target))
    return name[:-1] if name.endswith("_") and not name.startswith("__") else name


def _call(builder: Builder, node: torch.fx.Node, values: dict[str, Any]) -> Any:
    args: Any = torch.fx.node.map_arg(node.args, lambda n: values[n.name])
    kwargs: Any = torch.fx.node.map_arg(node.kwargs, lambda n: values[n.name])
    name = _name(node.target)
    if node.target is operator.getitem:
        return args[0][args[1]]
    if not _refs((args, kwargs)):
        return node.target(*args, **kwargs)  # type: ignore[operator]
    if name in MOVES:
        result = _moved(node.target, args, kwargs, name)
    else:
        translate: Callable[..., Any] | None = operators.OPERATORS.get(name)
        if translate is None:
            raise Unsupported(f"operator {name}", HINTS.get(name, "there is no circuit for it yet"))
        if name != "lstm" and any(ref.batch for ref in _refs((args, kwargs))):
            raise Unsupported(f"operator {name} on a tensor whose batch is not first", "put the batch first")
        try:
            result = translate(builder, *args, **kwargs)
        except (TypeError, ValueError, IndexError, RuntimeError) as error:
            found = f"{type(error).__name__}: {error}"[:120]
            raise Unsupported(f"operator {name} with these arguments", found) from error
    target = str(node.target)
    if target.split(".")[1].endswith("_") and not target.split(".")[1].startswith("_"):
        first: Any = node.args[0]
        values[first.name] = result
    return result


def _refs(value: Any) -> list[Ref]:
    if isinstance(value, Ref):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [ref for item in value for ref in _refs(item)] if isinstance(value, list | tuple) else []


def _stand_in(builder: Builder, node: torch.fx.Node) -> Any:
    """A layer in place of one that is not supported, so that the rest can be looked through."""
    shown = node.meta.get("val")
    if isinstance(shown, Tensor):
        return builder.add("input", [], shown.shape[1:] or (1,))
    if isinstance(shown, list | tuple):
        return [builder.add("input", [], v.shape[1:] or (1,)) if isinstance(v, Tensor) else None for v in shown]
    return None


def _moved(target: Any, args: Any, kwargs: Any, name: str) -> Any:
    """Run an operator that moves data on element numbers: padding is -1, the second sample is far away."""
    source = _refs((args, kwargs))
    node = source[0].node
    if any(ref.node != node for ref in source):
        raise Unsupported(f"operator {name} on several tensors", "concatenate them first")

    def numbers(value: Any) -> Any:
        if isinstance(value, Ref):
            index = torch.from_numpy(value.index.copy())
            return torch.stack([index, torch.where(index >= 0, index + _FAR, index)], dim=value.batch)
        if isinstance(value, list | tuple):
            return type(value)(numbers(item) for item in value)
        return value

    if name == "constant_pad_nd":
        if len(args) > 2 and args[2] != 0:
            raise Unsupported("padding with another value than 0", "pad with 0")
        args, kwargs = (*args[:2], -1), {}
    elif name == "pad":
        args, kwargs = (args[0], args[1], "constant", -1), {}
        target = torch.nn.functional.pad
    moved = target(*numbers(args), **{key: numbers(value) for key, value in kwargs.items()})
    return _back(moved, node, name)


def _back(result: Any, node: int, name: str) -> Any:
    if isinstance(result, list | tuple):
        return [_back(item, node, name) for item in result]
    for axis in range(result.ndim):
        if result.shape[axis] == 2:
            first, second = result.unbind(axis)
            if bool((second == torch.where(first >= 0, first + _FAR, first)).all()):
                return Ref(node, first.contiguous().numpy().astype(np.int64), axis)
    raise Unsupported(f"operator {name} across samples", "keep the first dimension for the batch")
