"""Reading hidden layers by qualified name: hooks live inside one ``with`` and are always removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from deepseal.adapter.inputs import Batch, call
from deepseal.adapter.outputs import select
from deepseal.errors import InputError, UnknownNameError

Hook = Callable[[nn.Module, tuple[Any, ...], Any], Any]
PARAMETRIC = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
RECURRENT = (nn.LSTM, nn.GRU, nn.RNN)
NORMALISATION = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


class Tap(NamedTuple):
    """A place where a model is read: a layer's qualified name, and the rule of ``outputs.POOLS`` that makes it rows."""

    layer: str
    pool: str = "none"


class _Enough(Exception):  # noqa: N818
    """Ends a forward pass whose remaining layers nobody reads."""


def find_layer(module: nn.Module, name: str) -> nn.Module:
    """The submodule with a qualified name; what follows a colon selects one of its outputs (see ``outputs.select``).

    Raises:
        UnknownNameError: no such layer; the message lists near names.
    """
    wanted = layer_name(name)
    try:
        if wanted:
            return module.get_submodule(wanted)
    except AttributeError:
        pass
    raise UnknownNameError("layer", wanted, [known for known, _ in module.named_modules() if known])


def layer_name(name: str) -> str:
    """The layer's own name, without the part that selects one of its outputs."""
    return name.partition(":")[0]


def require_layers(module: nn.Module) -> None:
    """Refuse a module whose layers can be neither watched nor trained one by one.

    Raises:
        InputError: a TorchScript module: it answers queries, but its layers run outside Python.
    """
    if isinstance(module, torch.jit.ScriptModule):
        raise InputError(
            "a module whose layers run in Python",
            found="TorchScript, which only answers queries",
            do="name the architecture that it was made from, and its weights are loaded into that",
        )


@contextmanager
def _eager(module: nn.Module) -> Iterator[None]:
    """Compiled parts run uncompiled inside: compiled code does not see hooks that came after it."""
    parts = module.modules()
    if any(hasattr(part, "_orig_mod") or getattr(part, "_compiled_call_impl", None) is not None for part in parts):
        with torch.compiler.set_stance("force_eager"):
            yield
    else:
        yield


@contextmanager
def hooked(module: nn.Module, hooks: Sequence[tuple[str, Hook]]) -> Iterator[None]:
    """Forward hooks on named layers, removed on leaving, also after an error.

    Raises:
        UnknownNameError: an unknown layer.
        InputError: a TorchScript module, whose layers run where no hook sees them.
    """
    require_layers(module)
    handles = []
    try:
        for name, hook in hooks:
            handles.append(find_layer(module, name).register_forward_hook(hook))
        with _eager(module):
            yield
    finally:
        for handle in handles:
            handle.remove()


def forward_to(module: nn.Module, x: Batch, layers: Sequence[str]) -> dict[str, Tensor]:
    """Outputs of the named layers, graph attached; the pass ends as soon as the last of them has run.

    Args:
        module: where the layers are.
        x: what the module takes.
        layers: qualified names; ``NAME:PATH`` for one of several outputs, of which else the first tensor is taken.

    Raises:
        UnknownNameError: an unknown layer.
        InputError: a layer that does not run, runs twice, or gives something other than a tensor.
    """
    captured: dict[str, Tensor] = {}
    with _kept(module, layers, captured, enough=True):
        try:
            call(module, x)
        except _Enough:
            return captured
    raise _never(layers, captured)


def forward_with(module: nn.Module, x: Batch, layers: Sequence[str]) -> tuple[Any, dict[str, Tensor]]:
    """What the module returns, and the outputs of the named layers in the same pass, graph attached.

    Raises:
        UnknownNameError: an unknown layer.
        InputError: a layer that does not run, runs twice, or gives something other than a tensor.
    """
    captured: dict[str, Tensor] = {}
    with _kept(module, layers, captured):
        returned = call(module, x)
    if len(captured) < len(set(layers)):
        raise _never(layers, captured)
    return returned, captured


@contextmanager
def _kept(
    module: nn.Module, layers: Sequence[str], captured: dict[str, Tensor], *, enough: bool = False
) -> Iterator[None]:
    """Inside, outputs of the named layers go into ``captured``; ``enough`` ends the pass with the last of them."""
    wanted = list(dict.fromkeys(layers))

    def hook(name: str) -> Hook:
        def keep(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
            captured[name] = _tensor(name, output, captured)
            if enough and len(captured) == len(wanted):
                raise _Enough

        return keep

    with hooked(module, [(name, hook(name)) for name in wanted]):
        yield


def _never(layers: Sequence[str], captured: dict[str, Tensor]) -> InputError:
    missing = [name for name in layers if name not in captured]
    return InputError("layers that run in a forward pass", found=f"{missing} never ran", do="choose another layer")


def execution_order(module: nn.Module, x: Batch) -> list[tuple[str, nn.Module, tuple[int, ...]]]:
    """Leaf layers in the order in which they run on ``x``: qualified name, layer, output shape of one sample.

    Of several outputs (recurrent layers) the first counts. A layer whose first dimension is not the samples', such as
    an expert that sees some of the tokens, has an empty shape.
    """
    order: list[tuple[str, nn.Module, tuple[int, ...]]] = []

    def hook(name: str) -> Hook:
        def note(layer: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if isinstance(first, Tensor):
                order.append((name, layer, tuple(first.shape[1:]) if first.shape[:1] == (len(x),) else ()))

        return note

    leaves = [
        (name, hook(name))
        for name, layer in module.named_modules()
        if name and (isinstance(layer, PARAMETRIC) or not list(layer.children()))  # a parametrised layer has children
    ]
    with hooked(module, leaves), evaluating(module), torch.no_grad():
        call(module, x)
    return order


def running_between(module: nn.Module, x: Batch, layers: Sequence[str]) -> list[str]:
    """Qualified names of the modules with parameters of their own that run from the first of the layers to the last.

    Where the first is no linear, convolutional or recurrent layer, such as a normalisation, the one before it counts.

    Raises:
        UnknownNameError: an unknown layer.
    """
    wanted = {id(find_layer(module, name)) for name in layers}
    own = {name: layer for name, layer in module.named_modules() if list(layer.parameters(recurse=False))}
    started: list[nn.Module] = []
    handles = [
        layer.register_forward_pre_hook(lambda layer, _inputs: started.append(layer))
        for layer in {id(layer): layer for layer in (*own.values(), *map(partial(find_layer, module), layers))}.values()
    ]
    try:
        with _eager(module), evaluating(module), torch.no_grad():
            call(module, x)
    finally:
        for handle in handles:
            handle.remove()
    first = next((place for place, layer in enumerate(started) if id(layer) in wanted), len(started))
    while 0 < first < len(started) and not isinstance(started[first], PARAMETRIC + RECURRENT):
        first -= 1
    last = max((place for place, layer in enumerate(started) if id(layer) in wanted), default=-1)
    within = {id(layer) for layer in started[first : last + 1]}
    outside = {id(layer) for layer in (*started[:first], *started[last + 1 :])}
    return [name for name, layer in own.items() if id(layer) in within - outside]


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Evaluation mode inside; the training flag of every submodule is put back on leaving."""
    flags = [(layer, layer.training) for layer in module.modules() if hasattr(layer, "training")]  # frozen TorchScript
    try:
        module.eval()
        yield
    finally:
        for layer, training in flags:
            layer.training = training


def _tensor(name: str, output: Any, captured: dict[str, Tensor]) -> Tensor:
    if name in captured:
        raise InputError("a layer that runs once in a pass", found=f"{name!r} runs twice", do="choose another layer")
    try:
        return select(output, name.partition(":")[2]).clone()
    except InputError as error:
        raise InputError(f"a tensor from layer {name!r}", found=error.found, do="choose another layer") from error
