"""Integer weights of linear steps: arrays, their file form and digest."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import InputError


class PublicArray:
    """A read-only array that is part of a program; two are equal when kind, shape and bytes are.

    Args:
        array: kept as bool or float64.

    Raises:
        InputError: another kind of array, or values that are not finite.
    """

    __slots__ = ("_digest", "array")
    array: NDArray[Any]

    def __init__(self, array: NDArray[np.bool_] | NDArray[np.float64]) -> None:
        given = np.asarray(array)
        if given.dtype.kind not in "bf" or not np.isfinite(given).all():
            raise InputError("an array of booleans or finite numbers", found=str(given.dtype), do="convert it")
        copy: NDArray[Any] = np.array(given, dtype=np.bool_ if given.dtype.kind == "b" else np.float64, order="C")
        copy.flags.writeable = False
        state = hashlib.sha256(f"{copy.dtype.kind}\0".encode())
        state.update(np.array([copy.ndim, *copy.shape], dtype="<i8").tobytes())
        state.update(copy.tobytes() if copy.dtype.kind == "b" else copy.astype("<f8").tobytes())
        self.array, self._digest = copy, state.hexdigest()

    def digest(self) -> str:
        """SHA-256 in hexadecimal over kind, shape and values."""
        return self._digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PublicArray) and other._digest == self._digest

    def __hash__(self) -> int:
        return hash(self._digest)

    def __repr__(self) -> str:
        return f"PublicArray({self.array.dtype}, shape={self.array.shape}, {self._digest[:12]})"


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class LinearWeights:
    """The integers of one linear step.

    Attributes:
        weight: int64 of the step's ``weight_shape``.
        bias: (channels,) int64, with the target's fraction.
    """

    weight: NDArray[np.int64]
    bias: NDArray[np.int64]

    def __post_init__(self) -> None:
        for name in ("weight", "bias"):
            array = np.asarray(getattr(self, name))
            if array.dtype.kind not in "iu":
                raise InputError(f"{name} as integers", found=str(array.dtype), do="round them first")
            copy = array.astype(np.int64)
            copy.flags.writeable = False
            object.__setattr__(self, name, copy)
        if self.bias.ndim != 1 or self.weight.ndim < 2 or len(self.bias) != len(self.weight):
            found = f"weights of shape {self.weight.shape}, bias of shape {self.bias.shape}"
            raise InputError("one bias for each output channel", found=found, do="correct the arrays")

    def digest(self) -> str:
        """SHA-256 in hexadecimal over shapes and values, 64 bits little-endian each."""
        state = hashlib.sha256()
        for array in (self.weight, self.bias):
            state.update(np.array([array.ndim, *array.shape], dtype="<i8").tobytes())
            state.update(np.ascontiguousarray(array, dtype="<i8").tobytes())
        return state.hexdigest()

    def __repr__(self) -> str:
        return f"LinearWeights(shape={self.weight.shape})"


def pack_arrays(layers: Mapping[int, LinearWeights], **extra: NDArray[np.uint8]) -> bytes:
    """A ``.npz`` archive of weights by index of the step, in the smallest integer types that hold them."""
    arrays: dict[str, NDArray[np.integer]] = dict(extra)
    for step, weights in sorted(layers.items()):
        arrays[f"{step}.weight"], arrays[f"{step}.bias"] = _small(weights.weight), _small(weights.bias)
    stream = io.BytesIO()
    np.savez_compressed(stream, allow_pickle=False, **arrays)
    return stream.getvalue()


def pack_public(arrays: Mapping[str, PublicArray]) -> bytes:
    """A ``.npz`` archive of public arrays: numbers as they are, booleans eight to a byte behind their shape."""
    plain: dict[str, NDArray[np.generic]] = {}
    for name, public in sorted(arrays.items()):
        if public.array.dtype.kind == "b":
            plain[f"{name}.shape"] = np.array(public.array.shape, dtype=np.int64)
            plain[name] = np.packbits(public.array.reshape(-1))
        else:
            plain[name] = public.array
    stream = io.BytesIO()
    np.savez_compressed(stream, allow_pickle=False, **plain)
    return stream.getvalue()


def unpack_public(data: bytes) -> dict[str, PublicArray]:
    """The inverse of ``pack_public``.

    Raises:
        InputError: not such an archive.
    """
    arrays = read_archive(data)
    found = {}
    for name, array in arrays.items():
        shape = arrays.get(f"{name}.shape")
        if shape is not None:
            size = int(np.prod(shape, dtype=np.int64))
            if array.dtype != np.uint8 or array.ndim != 1 or not 0 < size <= 8 * len(array):
                raise InputError("packed booleans", found=f"{name!r}", do="compile the model again")
            found[name] = PublicArray(np.unpackbits(array.astype(np.uint8), count=size).astype(np.bool_).reshape(shape))
        elif not name.endswith(".shape"):
            found[name] = PublicArray(array)  # type: ignore[arg-type]
    return found


def unpack_arrays(data: bytes) -> dict[int, LinearWeights]:
    """The inverse of ``pack_arrays``; further entries are left out.

    Raises:
        InputError: not such an archive.
    """
    arrays = read_archive(data)
    steps = sorted({int(name.partition(".")[0]) for name in arrays if name.partition(".")[0].isdigit()})
    try:
        return {step: LinearWeights(_wide(arrays[f"{step}.weight"]), _wide(arrays[f"{step}.bias"])) for step in steps}
    except KeyError as error:
        raise InputError("weight and bias of each step", found=f"no {error}", do="compile the model again") from error


def read_archive(data: bytes) -> dict[str, NDArray[np.integer]]:
    """All arrays of an archive.

    Raises:
        InputError: not an archive of plain arrays.
    """
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as archive:
            return {name: archive[name] for name in archive.files}
    except (ValueError, OSError, zipfile.BadZipFile, EOFError, AttributeError, KeyError) as error:
        if isinstance(error, InputError):
            raise
        do = "compile the model again"
        raise InputError("an archive of integer arrays", found=type(error).__name__, do=do) from error


def _wide(array: NDArray[np.integer]) -> NDArray[np.int64]:
    if array.dtype.kind not in "iu":
        raise InputError("integer weights", found=str(array.dtype), do="compile the model again")
    return array.astype(np.int64)


def _small(array: NDArray[np.int64]) -> NDArray[np.integer]:
    low, high = int(array.min(initial=0)), int(array.max(initial=0))
    for kind in (np.int8, np.int16, np.int32):
        limits = np.iinfo(kind)
        if limits.min <= low and high <= limits.max:
            return array.astype(kind)
    return array
