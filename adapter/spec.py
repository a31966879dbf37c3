"""What a model takes: shape, value range and normalisation of its input, stated once."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from deepseal.errors import InputError


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """The input of a classifier, in data space.

    Attributes:
        shape: shape of one sample, for instance (1, 28, 28).
        num_classes: number of classes, labels 0 … num_classes - 1.
        bounds: smallest and largest value that an input may have.
        mean: per-channel mean that the forward pass subtracts, or None.
        std: per-channel standard deviation that the forward pass divides by, or None.
    """

    shape: tuple[int, ...]
    num_classes: int
    bounds: tuple[float, float] = (0.0, 1.0)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            value = getattr(self, name)
            if isinstance(value, int | float):
                object.__setattr__(self, name, (float(value),))
        if not self.shape or any(size < 1 for size in self.shape):
            raise InputError(
                "an input shape of positive sizes", found=str(self.shape), do="state the shape of one sample"
            )
        if self.num_classes < 1:
            raise InputError("at least one class", found=str(self.num_classes), do="state num_classes")
        if not self.bounds[0] < self.bounds[1]:
            raise InputError("bounds (low, high) with low < high", found=str(self.bounds), do="correct the bounds")
        if self.std is not None and any(value <= 0 for value in self.std):
            raise InputError("positive standard deviations", found=str(self.std), do="correct std")

    def normalise(self, x: Tensor) -> Tensor:
        """(x - mean) / std over the channel dimension (the first of a sample), differentiable in x."""
        if self.mean is not None:
            x = x - self._per_channel(self.mean, x)
        if self.std is not None:
            x = x / self._per_channel(self.std, x)
        return x

    def check(self, x: Tensor) -> None:
        """Refuse inputs that are not a batch of this spec.

        Raises:
            InputError: another shape, non-finite values, or values clearly outside the bounds.
        """
        if tuple(x.shape[1:]) != self.shape:
            raise InputError(
                f"inputs of shape (N, {', '.join(map(str, self.shape))})",
                found=str(tuple(x.shape)),
                do="use the data the model was trained for, or state the right input spec",
            )
        if x.numel() == 0:
            return
        if not bool(torch.isfinite(x).all()):
            raise InputError("finite inputs", found="NaN or infinite values", do="clean the data")
        low, high = self.bounds
        slack = 1e-3 * (high - low)
        smallest, largest = float(x.min()), float(x.max())
        if smallest < low - slack or largest > high + slack:
            raise InputError(
                f"inputs in [{low:g}, {high:g}]",
                found=f"values in [{smallest:g}, {largest:g}]",
                do="pass raw data (normalisation belongs to the spec), or state the right bounds",
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for metadata and records."""
        return {name: list(v) if isinstance(v, tuple) else v for name, v in dataclasses.asdict(self).items()}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> InputSpec:
        """The inverse of ``as_dict``.

        Raises:
            InputError: missing or malformed entries.
        """
        try:
            optional = {
                name: tuple(map(float, values[name])) for name in ("mean", "std") if values.get(name) is not None
            }
            low, high = map(float, values["bounds"])
            shape = tuple(int(size) for size in values["shape"])
            return cls(shape=shape, num_classes=int(values["num_classes"]), bounds=(low, high), **optional)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                "an input spec", found=repr(dict(values))[:200], do="state shape, num_classes, bounds"
            ) from error

    def _per_channel(self, values: tuple[float, ...], x: Tensor) -> Tensor:
        if len(values) not in (1, self.shape[0]):
            raise InputError(f"1 or {self.shape[0]} channel values", found=str(len(values)), do="correct mean and std")
        return torch.tensor(values, dtype=x.dtype, device=x.device).reshape(-1, *(1,) * (len(self.shape) - 1))
