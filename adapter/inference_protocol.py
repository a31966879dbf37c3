"""Tensors and descriptions of the Open Inference Protocol, version 2 (KServe v2), over HTTP with JSON.

Field names and datatypes are those of https://github.com/kserve/open-inference-protocol, inference_rest.md; both ends
use this module, the remote oracle and ``deepseal model serve``. Whatever comes in is from a stranger: every size and
type is checked, and what is wrong becomes an ``InputError`` that says where.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import InputError

DATATYPES: Mapping[str, type[np.generic]] = {
    "BOOL": np.bool_,
    "UINT8": np.uint8,
    "UINT16": np.uint16,
    "UINT32": np.uint32,
    "UINT64": np.uint64,
    "INT8": np.int8,
    "INT16": np.int16,
    "INT32": np.int32,
    "INT64": np.int64,
    "FP16": np.float16,
    "FP32": np.float32,
    "FP64": np.float64,
}
FLOATS = ("FP16", "FP32", "FP64")
INTEGERS = tuple(name for name in DATATYPES if "INT" in name)
INPUT = "input"  # what the only input is called, where nobody has named it
_MOST_DIMENSIONS = 16


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """What a model's description says of one tensor; -1 in ``shape`` is any size."""

    name: str
    datatype: str
    shape: tuple[int, ...]

    def as_dict(self) -> dict[str, Any]:
        """The protocol's ``metadata_tensor``."""
        return {"name": self.name, "datatype": self.datatype, "shape": list(self.shape)}


def parse(body: bytes, what: str) -> dict[str, Any]:
    """A JSON object.

    Raises:
        InputError: anything else.
    """
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise InputError(f"JSON as {what}", found=shown(body), do="check what answers there") from error
    return _object(content, what)


def encode(name: str, values: NDArray[Any], datatype: str) -> dict[str, Any]:
    """A tensor as a JSON value with its data flat, in row-major order; floats are exact.

    Raises:
        InputError: whole numbers that do not fit the datatype, or others that are not finite in it, which JSON cannot
            say.
    """
    with np.errstate(over="ignore"):
        cast = values.astype(DATATYPES[datatype])
    if datatype not in FLOATS and not np.array_equal(cast, values):
        found = f"values in [{values.min():g}, {values.max():g}]"
        raise InputError(f"values that fit {datatype} in {name!r}", found=found, do="pass what the server takes")
    if not np.isfinite(cast).all():
        raise InputError(f"finite {datatype} numbers", found="NaN or infinite values", do="check the data or the model")
    data = cast.reshape(-1).tolist()
    return {"name": name, "shape": list(values.shape), "datatype": datatype, "data": data}


def decode(tensor: object, what: str) -> tuple[str, str, NDArray[Any]]:
    """Name, datatype and values of a tensor whose data is flat or nested; NaN and infinity are let through.

    Raises:
        InputError: a missing or malformed field, an unknown datatype, data that do not fit datatype or shape.
    """
    fields = _object(tensor, what)
    name, datatype, shape = _name(fields, what), fields.get("datatype"), _shape(fields, what, smallest=0)
    if not isinstance(datatype, str) or datatype not in DATATYPES:
        raise InputError(f"a numeric datatype in {what}", found=shown(datatype), do="use for instance FP32")
    data = fields.get("data")
    if not isinstance(data, list):
        do = "send JSON numbers, not the binary extension"
        raise InputError(f"a list as the data of {what}", found=type(data).__name__, do=do)
    try:
        values = np.asarray(data)
    except (ValueError, OverflowError) as error:
        raise InputError(f"rectangular data in {what}", found="ragged lists", do="flatten the data") from error
    kinds = "b" if datatype == "BOOL" else "iuf" if datatype in FLOATS else "iu"
    if values.size and values.dtype.kind not in kinds:
        raise InputError(f"{datatype} numbers in {what}", found="other values", do="send numbers of that datatype")
    if values.size != math.prod(shape):
        found = f"{values.size} numbers for shape {shape}"
        raise InputError(f"as many numbers as the shape of {what} says", found=found, do="correct one of them")
    with np.errstate(over="ignore"):
        cast = values.astype(DATATYPES[datatype])
    if datatype not in FLOATS and not np.array_equal(cast, values):
        raise InputError(f"values that fit {datatype} in {what}", found="larger ones", do="use a larger datatype")
    return name, datatype, cast.reshape(shape)


def tensor_info(value: object, what: str) -> TensorInfo:
    """The protocol's ``metadata_tensor``.

    Raises:
        InputError: a missing or malformed field.
    """
    fields = _object(value, what)
    datatype = fields.get("datatype")
    if not isinstance(datatype, str):
        raise InputError(f"the datatype of {what}", found=shown(datatype), do="check the model's description")
    return TensorInfo(_name(fields, what), datatype, _shape(fields, what, smallest=-1))


def listed(fields: Mapping[str, Any], name: str, what: str) -> list[Any]:
    """A list among the fields of an object; empty where it is absent.

    Raises:
        InputError: something that is no list.
    """
    value = fields.get(name)
    if value is None:
        return []
    if not isinstance(value, list):
        raise InputError(f"a list of {name} in {what}", found=type(value).__name__, do="check what answers there")
    return value


def shown(value: object) -> str:
    """A stranger's value for an error message: printable, short."""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else value
    return ascii(text[:120] if isinstance(text, str) else text)[:160]


def _object(value: object, what: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"a JSON object as {what}", found=type(value).__name__, do="check what answers there")
    return value


def _name(fields: Mapping[str, Any], what: str) -> str:
    name = fields.get("name")
    if not isinstance(name, str) or not name:
        raise InputError(f"the name of {what}", found=shown(name), do="name every tensor")
    return name


def _shape(fields: Mapping[str, Any], what: str, *, smallest: int) -> tuple[int, ...]:
    shape = fields.get("shape")
    sound = isinstance(shape, list) and len(shape) <= _MOST_DIMENSIONS
    sound = sound and all(type(size) is int and smallest <= size < 2**31 for size in shape or ())
    if not sound or shape is None:
        raise InputError(f"the shape of {what} as a list of sizes", found=shown(shape), do="correct the shape")
    return tuple(shape)
