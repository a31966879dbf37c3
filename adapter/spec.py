"""What a model takes and gives: shape, value range and normalisation of its inputs, and which output is the answer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from deepseal.adapter.inputs import Batch, Inputs
from deepseal.adapter.outputs import REDUCTIONS, reduce, select
from deepseal.errors import InputError

VARYING = 8
_PROBE_SEED = 20181104


@dataclasses.dataclass(frozen=True)
class Field:
    """One input tensor, in data space.

    Attributes:
        shape: shape of one sample, for instance (1, 28, 28); -1 for a size that varies from batch to batch.
        bounds: smallest and largest value that it may have.
        mean: per-channel mean that the forward pass subtracts, or None.
        std: per-channel standard deviation that the forward pass divides by, or None.
        integer: int64 values such as tokens, which are neither normalised nor cast.
        mask: the attention mask: 1 where there is input, 0 where there is padding.
    """

    shape: tuple[int, ...]
    bounds: tuple[float, float] = (0.0, 1.0)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    integer: bool = False
    mask: bool = False

    def __post_init__(self) -> None:
        for name in ("mean", "std"):
            value = getattr(self, name)
            if value is not None:
                values = (value,) if isinstance(value, int | float) else value
                object.__setattr__(self, name, tuple(map(float, values)))
        object.__setattr__(self, "bounds", tuple(map(float, self.bounds)))
        if any(size is None or (size < 1 and size != -1) for size in self.shape):
            do = "state the shape of one sample, with -1 for a size that varies"
            raise InputError("an input shape of positive sizes", found=str(self.shape), do=do)
        if not self.bounds[0] < self.bounds[1]:
            raise InputError("bounds (low, high) with low < high", found=str(self.bounds), do="correct the bounds")
        if self.std is not None and any(value <= 0 for value in self.std):
            raise InputError("positive standard deviations", found=str(self.std), do="correct std")
        if self.integer and (self.mean is not None or self.std is not None):
            raise InputError("integers as they are", found="a mean or std for them", do="leave it out")

    def normalise(self, x: Tensor) -> Tensor:
        """(x - mean) / std over the channel dimension (the first of a sample), differentiable in x."""
        if self.mean is not None:
            x = x - self._per_channel(self.mean, x)
        if self.std is not None:
            x = x / self._per_channel(self.std, x)
        return x

    def check(self, x: Tensor, name: str = "inputs") -> None:
        """Refuse what is no batch of this field.

        Raises:
            InputError: another shape or kind of number, non-finite values, or values clearly outside the bounds.
        """
        x, sizes = x.detach(), tuple(x.shape[1:])
        fits = len(sizes) == len(self.shape) and all(a in (-1, b) for a, b in zip(self.shape, sizes, strict=True))
        if x.ndim == 0 or not fits:
            raise InputError(
                f"{name} of shape (N, {', '.join(map(str, self.shape))})",
                found=str(tuple(x.shape)),
                do="use the data the model was trained for, or state the right input spec",
            )
        if self.integer and (x.dtype.is_floating_point or x.dtype.is_complex or x.dtype == torch.bool):
            raise InputError(f"{name} that are integers", found=str(x.dtype), do="use x.long()")
        if x.numel() == 0:
            return
        smallest, largest = map(float, torch.aminmax(x))  # NaN if any value is
        if not (math.isfinite(smallest) and math.isfinite(largest)):
            raise InputError(f"finite {name}", found="NaN or infinite values", do="clean the data")
        low, high = self.bounds
        slack = 0.0 if self.integer else 1e-3 * (high - low)
        if smallest < low - slack or largest > high + slack:
            raise InputError(
                f"{name} in [{low:g}, {high:g}]",
                found=f"values in [{smallest:g}, {largest:g}]",
                do="pass raw data (normalisation belongs to the spec), or state the right bounds",
            )

    def draw(self, count: int, generator: torch.Generator) -> Tensor:
        """``count`` samples, uniform within the bounds; an attention mask of ones; sizes that vary are ``VARYING``."""
        shape = (count, *(VARYING if size == -1 else size for size in self.shape))
        low, high = self.bounds
        if self.mask:
            return torch.ones(shape, dtype=torch.int64 if self.integer else torch.float32)
        if self.integer:
            return torch.randint(int(low), int(high) + 1, shape, generator=generator)
        return low + (high - low) * torch.rand(shape, generator=generator)

    def _per_channel(self, values: tuple[float, ...], x: Tensor) -> Tensor:
        if len(values) not in (1, self.shape[0]):
            raise InputError(f"1 or {self.shape[0]} channel values", found=str(len(values)), do="correct mean and std")
        return torch.tensor(values, dtype=x.dtype, device=x.device).reshape(-1, *(1,) * (len(self.shape) - 1))


@dataclasses.dataclass(frozen=True)
class InputSpec:
    """What a model takes, in data space, and how its answer is read.

    Attributes:
        shape: shape of one sample of the one input tensor; () where ``fields`` names several.
        num_classes: number of classes, labels 0 … num_classes - 1; 0 for a model without classes, an embedding.
        bounds, mean, std, integer: of the one input tensor; see ``Field``.
        fields: several input tensors by the module's keywords.
        output: which part of what the module returns is the answer, see ``outputs.select``; "" for the first tensor,
            several joined by commas for all of these, one after the other.
        reduce: how answers of shape (N, T, C), one a frame or token, become (N, C); one of ``outputs.REDUCTIONS``.
    """

    shape: tuple[int, ...]
    num_classes: int
    bounds: tuple[float, float] = (0.0, 1.0)
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    integer: bool = False
    fields: Mapping[str, Field] = dataclasses.field(default_factory=dict, hash=False)
    output: str = ""
    reduce: str = "none"

    def __post_init__(self) -> None:
        object.__setattr__(self, "fields", MappingProxyType(dict(self.fields)))
        if bool(self.shape) == bool(self.fields):
            found = "both" if self.shape else "neither"
            do = "state the shape of one sample, or the fields"
            raise InputError("an input shape of positive sizes, or named fields", found=found, do=do)
        if self.num_classes < 0:
            raise InputError("at least one class, or 0 for none", found=str(self.num_classes), do="state num_classes")
        if self.reduce not in REDUCTIONS:
            raise InputError(f"one of {REDUCTIONS} as reduce", found=repr(self.reduce), do="correct it")
        if sum(field.mask for field in self.fields.values()) > 1:
            raise InputError("one attention mask", found="several", do="mark one field")
        for name in ("bounds", "mean", "std"):
            object.__setattr__(self, name, getattr(self._only, name))

    @property
    def _only(self) -> Field:
        return Field(self.shape, self.bounds, self.mean, self.std, self.integer)

    def named_fields(self, name: str) -> Mapping[str, Field]:
        """The fields of all inputs; the one input tensor goes under ``name``."""
        return self.fields or {name: self._only}

    @property
    def is_plain(self) -> bool:
        """One floating-point tensor of fixed shape, and an answer that needs no selection."""
        plain = not self.fields and not self.integer and -1 not in self.shape
        return plain and not self.output and self.reduce == "none"

    @property
    def varies(self) -> bool:
        """Whether an input has a size that varies from batch to batch."""
        return -1 in self.shape or any(-1 in field.shape for field in self.fields.values())

    def normalise(self, x: Tensor) -> Tensor:
        """(x - mean) / std of the one input tensor, differentiable in x."""
        return self._only.normalise(x)

    def prepare(self, x: Batch, device: torch.device, dtype: torch.dtype) -> Batch:
        """What the module itself takes: normalised, on its device; floating-point tensors in its type."""
        if not isinstance(x, Inputs):
            return _prepared(self._only, x, device, dtype)
        return Inputs({name: _prepared(self.fields[name], part, device, dtype) for name, part in x.tensors.items()})

    def read(self, output: Any, x: Batch) -> Tensor:
        """The answer in what the module returned for ``x``: (N, classes) logits, or (N, D) of a model without classes.

        A single logit z of a model with two classes becomes the logits (0, z).

        Raises:
            InputError: no such output, or one of another shape.
        """
        answers = [select(output, path) for path in self.output.split(",")]
        parts = [reduce(answer, self.reduce, self.mask_of(x)) for answer in answers]
        values = parts[0] if len(parts) == 1 else torch.cat([part.flatten(1) for part in parts], dim=1)
        if self.num_classes == 2 and values.shape in ((len(x),), (len(x), 1)):
            logit = values.reshape(-1, 1)
            values = torch.cat([torch.zeros_like(logit), logit], dim=1)
        wanted = values.shape[1:] if self.num_classes == 0 and values.ndim == 2 else (self.num_classes,)
        if values.ndim != 2 or values.shape != (len(x), *wanted):
            expected = (
                f"logits of shape (N, {self.num_classes})" if self.num_classes else "an embedding of shape (N, D)"
            )
            raise InputError(
                f"{expected} from the model",
                found=" and ".join(str(tuple(answer.shape)) for answer in answers),
                do="use data with the classes the model was trained for, or state output and reduce in its spec",
            )
        return values

    def require_classes(self) -> None:
        """Refuse a model without classes where labels are asked for.

        Raises:
            InputError: there are none.
        """
        if self.num_classes == 0:
            do = "ask for its embeddings (logits)"
            raise InputError("a model with classes", found="one without, whose answers are embeddings", do=do)

    def require_plain(self, what: str) -> None:
        """Refuse anything but one floating-point tensor of fixed shape with one plain answer, which ``what`` needs.

        Raises:
            InputError: several inputs, integers, varying sizes, or a selected answer.
        """
        if self.is_plain:
            return
        found = f"shape {self.shape}, output {self.output!r}, reduce {self.reduce!r}"
        if self.fields or self.integer:
            found = f"inputs called {', '.join(self.fields)}" if self.fields else "integers as inputs"
        expected = f"a model from one float tensor of fixed shape to logits for {what}"
        raise InputError(expected, found=found, do="use a model of that kind here")

    def mask_of(self, x: Batch) -> Tensor | None:
        """The attention mask among the inputs, if one is declared."""
        names = [name for name, field in self.fields.items() if field.mask]
        return x[names[0]] if names and isinstance(x, Inputs) else None

    def check(self, x: Batch) -> None:
        """Refuse inputs that are not a batch of this spec.

        Raises:
            InputError: other names, another shape or kind of number, non-finite or out-of-range values.
        """
        if not self.fields and isinstance(x, Tensor):
            self._only.check(x)
            return
        expected = f"inputs called {', '.join(self.fields)}" if self.fields else "one tensor as input"
        if not isinstance(x, Inputs) or x.tensors.keys() != self.fields.keys():
            found = ", ".join(x.tensors) if isinstance(x, Inputs) else type(x).__name__
            raise InputError(expected, found=found, do="pass what the model takes, or state the right input spec")
        for name, field in self.fields.items():
            field.check(x[name], name)

    def probe(self, count: int = 1) -> Batch:
        """``count`` samples within the bounds, always the same, for finding out shapes."""
        generator = torch.Generator().manual_seed(_PROBE_SEED)
        if not self.fields:
            return self._only.draw(count, generator)
        return Inputs({name: field.draw(count, generator) for name, field in self.fields.items()})

    def same_inputs(self, other: InputSpec) -> bool:
        """Whether both take tensors of the same names and shapes."""
        mine, its = ({name: f.shape for name, f in spec.fields.items()} for spec in (self, other))
        return self.shape == other.shape and mine == its

    def with_values_of(self, other: InputSpec) -> InputSpec:
        """This spec with the other's bounds, normalisation and way to read the answer."""
        values = {name: getattr(other, name) for name in ("bounds", "mean", "std", "integer", "output", "reduce")}
        return dataclasses.replace(self, fields=other.fields, **values)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for metadata and records; what was never stated is left out."""
        values = {name: getattr(self, name) for name in ("shape", "num_classes", "bounds", "mean", "std")}
        stated = {name: getattr(self, name) for name in ("integer", "output", "reduce")}
        values.update({name: value for name, value in stated.items() if value not in (False, "", "none")})
        if self.fields:
            values["fields"] = {name: _plain(dataclasses.asdict(field)) for name, field in self.fields.items()}
        return _plain(values)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> InputSpec:
        """The inverse of ``as_dict``.

        Raises:
            InputError: missing or malformed entries.
        """
        try:
            fields = {str(name): Field(**_field(entry)) for name, entry in values.get("fields", {}).items()}
            return cls(
                num_classes=int(values["num_classes"]),
                fields=fields,
                output=str(values.get("output", "")),
                reduce=str(values.get("reduce", "none")),
                **_field(values),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                "an input spec", found=repr(dict(values))[:200], do="state shape, num_classes, bounds"
            ) from error


def _prepared(field: Field, x: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    return x.to(device, torch.int64) if field.integer else field.normalise(x.to(device, dtype))


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: list(v) if isinstance(v, tuple) else v for name, v in values.items()}


def _field(values: Mapping[str, Any]) -> dict[str, Any]:
    optional = {name: tuple(map(float, values[name])) for name in ("mean", "std") if values.get(name) is not None}
    flags = {name: bool(values[name]) for name in ("integer", "mask") if name in values}
    low, high = map(float, values["bounds"])
    return {"shape": tuple(int(size) for size in values["shape"]), "bounds": (low, high), **optional, **flags}
