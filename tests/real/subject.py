"""A model as its user has it, beside its own task."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

Given = Tensor | dict[str, Tensor]
Measured = dict[str, float]


@dataclasses.dataclass(frozen=True)
class Subject:
    """A model that is to be marked.

    Attributes:
        build: the module with its weights; another call gives an equal one.
        inputs: the owner's inputs.
        task: numbers of which higher is better, on inputs that are not the owner's; the first one is judged.
        spec: arguments of ``InputSpec``.
        labels: the owner's labels, where the model has classes and its owner knows them.
        packages: what must be installed.
        bits: length of the mark.
        params: further parameters of the scheme.
    """

    build: Callable[[], nn.Module]
    inputs: Callable[[], Given]
    task: Callable[[nn.Module], Measured]
    spec: Mapping[str, Any]
    labels: Callable[[], Tensor] | None = None
    packages: tuple[str, ...] = ()
    bits: int = 256
    params: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def architecture(self) -> str:
        """Where ``load`` finds what builds the module."""
        return f"{self.build.__module__}:{self.build.__name__}"

    def missing(self) -> list[str]:
        """Packages of this subject that are not installed."""
        return [name for name in self.packages if importlib.util.find_spec(name) is None]


def relative_change(before: Measured, after: Measured) -> float:
    """Change of the judged number, relative to what it was."""
    judged = next(iter(before))
    return (after[judged] - before[judged]) / before[judged]


@contextmanager
def stubbed(*names: str) -> Iterator[None]:
    """Empty modules stand for what a package imports and its model does not use; gone again on leaving."""
    stubs = [name for name in names if name not in sys.modules and importlib.util.find_spec(name) is None]
    sys.modules.update({name: types.ModuleType(name) for name in stubs})
    try:
        yield
    finally:
        for name in stubs:
            del sys.modules[name]


@torch.no_grad()
def answers(module: nn.Module, x: Given, select: Callable[[Any], Tensor] = lambda out: out, batch: int = 50) -> Tensor:
    """Selected outputs in evaluation mode, some inputs at a time; the module's flags are put back."""
    flags = [(layer, layer.training) for layer in module.modules()]
    named = x if isinstance(x, dict) else {"x": x}
    parts = [
        dict(zip(named, part, strict=True)) for part in zip(*(v.split(batch) for v in named.values()), strict=True)
    ]
    try:
        module.eval()
        outputs = [module(**part) if isinstance(x, dict) else module(part["x"]) for part in parts]
        return torch.cat([select(output) for output in outputs])
    finally:
        for layer, training in flags:
            layer.training = training
