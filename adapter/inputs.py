"""A batch of inputs: one tensor, or several named ones that a module takes by keyword."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, overload

import torch
from torch import Tensor

from deepseal.errors import InputError


class Inputs:
    """Several named tensors whose first dimension is the samples; ``len`` and ``[]`` go by sample, like a tensor's.

    Args:
        tensors: (N, …) tensors by the names of the module's keywords.

    Raises:
        InputError: none, something other than tensors, or different numbers of samples.
    """

    __slots__ = ("_tensors",)

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        foreign = sorted({type(value).__name__ for value in tensors.values() if not isinstance(value, Tensor)})
        if foreign or not tensors:
            found = ", ".join(foreign) if foreign else "none"
            raise InputError("named torch tensors as inputs", found=found, do="use torch.from_numpy")
        counts = {name: len(value) if value.ndim else 0 for name, value in tensors.items()}
        if len(set(counts.values())) > 1:
            raise InputError("as many samples in every input", found=str(counts), do="check the data")
        self._tensors = MappingProxyType(dict(tensors))

    @property
    def tensors(self) -> Mapping[str, Tensor]:
        """The tensors by name."""
        return self._tensors

    def __len__(self) -> int:
        return len(next(iter(self._tensors.values())))

    @overload
    def __getitem__(self, index: str) -> Tensor: ...
    @overload
    def __getitem__(self, index: Tensor | slice) -> Inputs: ...
    def __getitem__(self, index: str | Tensor | slice) -> Tensor | Inputs:
        if isinstance(index, str):
            return self._tensors[index]
        return self.map(lambda tensor: tensor[index])

    def map(self, function: Callable[[Tensor], Tensor]) -> Inputs:
        """The function applied to every tensor."""
        return Inputs({name: function(tensor) for name, tensor in self._tensors.items()})

    def split(self, size: int) -> tuple[Inputs, ...]:
        """Consecutive batches of at most ``size`` samples."""
        starts = range(0, max(1, len(self)), size)
        return tuple(self[start : start + size] for start in starts)

    def to(self, device: torch.device | str) -> Inputs:
        """On a device; integers and floats keep their types."""
        return self.map(lambda tensor: tensor.to(device))

    def __repr__(self) -> str:
        shapes = ", ".join(f"{name}: {tuple(tensor.shape)}" for name, tensor in self._tensors.items())
        return f"Inputs({shapes})"


Batch = Tensor | Inputs


def call(function: Callable[..., Any], x: Batch) -> Any:
    """``function(x)``, or ``function(name=tensor, …)`` for several named tensors."""
    return function(**x.tensors) if isinstance(x, Inputs) else function(x)


def concatenated(parts: Sequence[Batch]) -> Batch:
    """One batch after the other.

    Raises:
        InputError: batches of different names or sizes.
    """
    first = parts[0]
    if isinstance(first, Inputs):
        named = [part for part in parts if isinstance(part, Inputs) and part.tensors.keys() == first.tensors.keys()]
        if len(named) < len(parts):
            raise InputError(f"inputs called {list(first.tensors)}", found="others", do="pass data of one kind")
        return Inputs({name: _joined(name, [part[name] for part in named]) for name in first.tensors})
    return _joined("the inputs", [single(part) for part in parts])


def single(x: Batch) -> Tensor:
    """The one tensor that the inputs are.

    Raises:
        InputError: several named ones.
    """
    if isinstance(x, Inputs):
        raise InputError("inputs that are one tensor", found=repr(x), do="use a model with one input here")
    return x


def named(x: Batch, name: str) -> dict[str, Tensor]:
    """The tensors under ``name``, or under ``name.FIELD``, as they are stored in a file."""
    if isinstance(x, Inputs):
        return {f"{name}.{field}": tensor.contiguous() for field, tensor in x.tensors.items()}
    return {name: x.contiguous()}


def stored(tensors: Mapping[str, Tensor], name: str) -> Batch | None:
    """The inverse of ``named``; None if there is nothing of that name."""
    fields = {key.removeprefix(f"{name}."): value for key, value in tensors.items() if key.startswith(f"{name}.")}
    if name in tensors:
        return tensors[name]
    return Inputs(fields) if fields else None


def each(x: Batch) -> Iterator[Tensor]:
    """Every tensor of the batch, the fields in the order of their names."""
    if isinstance(x, Inputs):
        yield from (x[name] for name in sorted(x.tensors))
    else:
        yield x


def _joined(name: str, parts: Sequence[Tensor]) -> Tensor:
    shapes = {tuple(part.shape[1:]) for part in parts}
    if len(shapes) > 1:
        found = " and ".join(map(str, sorted(shapes)[:3]))
        raise InputError(f"{name} of one shape", found=found, do="pad or cut all data to one length")
    return torch.cat(list(parts))
