"""The weights of a ``torch.export`` archive (``.pt2``), read as data: no program is loaded, no pickle opened.

``torch.export.load`` unpickles the example inputs and evaluates the program's shape expressions, so a stranger's file
must not reach it. The weights are plain bytes with a JSON table (archive version 0, recent versions of torch:
``data/weights/NAME_weights_config.json``, as ``torch.export.pt2_archive`` writes it). Older archives pickle them.
"""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Collection
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from deepseal.errors import InputError, understood

_FOLDER = "data/weights/"
_TABLE = "_weights_config.json"
_OLD = "serialized_state_dict.pt"
_STRIDED = 7  # torch._export.serde.schema.Layout
_TYPES = {  # torch._export.serde.schema.ScalarType
    1: torch.uint8,
    2: torch.int8,
    3: torch.int16,
    4: torch.int32,
    5: torch.int64,
    6: torch.float16,
    7: torch.float32,
    8: torch.float64,
    10: torch.complex64,
    11: torch.complex128,
    12: torch.bool,
    13: torch.bfloat16,
}


def pickled_member(names: Collection[str]) -> str | None:
    """The member with the weights of an archive of an older torch, if the names are of one: a pickle."""
    old = [n for n in names if PurePosixPath(n).name == _OLD or (n.endswith(".pt") and f"/{_FOLDER}" in f"/{n}")]
    return old[0] if old else None


def exported_tensors(path: Path, data: bytes) -> dict[str, Tensor]:
    """Parameters and persistent buffers by qualified name.

    Args:
        path: for errors.
        data: the archive.

    Raises:
        InputError: not one program with plain weights, or a damaged archive.
    """
    what, do = f"an exported program at {path}", "export it again"
    with understood(what, do), zipfile.ZipFile(io.BytesIO(data)) as archive:  # a stranger's can raise anything
        return _tensors(path, archive, len(data))


def _tensors(path: Path, archive: zipfile.ZipFile, size: int) -> dict[str, Tensor]:
    entries = archive.infolist()
    names = [entry.filename for entry in entries]
    if len(set(names)) < len(names) or sum(entry.file_size for entry in entries) > size:
        raise ValueError("members that occur twice, overlap or are compressed")  # torch stores each once, as it is
    order = [name for name in names if PurePosixPath(name).name == "byteorder"]
    if any(archive.read(name) != b"little" for name in order):
        raise ValueError("another byte order")
    tables = [name for name in names if name.endswith(_TABLE) and f"/{_FOLDER}" in f"/{name}"]
    if len(tables) != 1:
        raise InputError(f"one program with weights in {path}", found=str(len(tables)), do="export one at a time")
    root = tables[0].rpartition("/")[0]
    table = json.loads(archive.read(tables[0]))["config"]
    pickled = [name for name, entry in table.items() if entry["use_pickle"]]
    if pickled:
        raise InputError(
            f"plain weights in {path}",
            found=f"{len(pickled)} pickled, which can run any code when loaded ({', '.join(pickled[:4])})",
            do="save the state dict as safetensors",
        )
    members: dict[str, bytearray] = {}
    result = {}
    for name, entry in table.items():
        member = f"{root}/{entry['path_name']}"
        if member not in members:
            members[member] = bytearray(archive.read(member))  # a tensor keeps the member it views
        result[name] = _tensor(members[member], entry["tensor_meta"])
    return result


def _tensor(content: bytearray, meta: dict[str, Any]) -> Tensor:
    dtype = _TYPES.get(meta["dtype"])
    if dtype is None or meta["layout"] != _STRIDED:
        raise ValueError(f"a tensor of type {meta['dtype']} and layout {meta['layout']}")
    shape, strides = ([int(entry["as_int"]) for entry in meta[part]] for part in ("sizes", "strides"))
    offset = int(meta["storage_offset"]["as_int"])
    if len(shape) != len(strides) or min([offset, *shape, *strides]) < 0:
        raise ValueError("a shape that is none")
    if 0 in shape:
        return torch.empty(shape, dtype=dtype)
    last = offset + sum((count - 1) * stride for count, stride in zip(shape, strides, strict=True))
    if (last + 1) * dtype.itemsize > len(content) or len(content) % dtype.itemsize:
        raise ValueError("a tensor that ends after its bytes")
    return torch.frombuffer(content, dtype=dtype).as_strided(shape, strides, offset)
