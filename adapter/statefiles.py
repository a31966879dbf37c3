"""Weights files of every kind to tensors by name; the content says which kind, and no code runs unless allowed.

Safetensors, in one file or in shards with an index, and ``torch.export`` archives (``exported``) are read as data.
Pickles and TorchScript can run code, and are read only with ``insecure_allow_pickle``.
"""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
import warnings
import zipfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from deepseal.adapter.exported import exported_tensors, pickled_member
from deepseal.errors import InputError, one_line
from deepseal.files import read_bytes

ENTRY = "deepseal"
INDEX = ".safetensors.index.json"
_INDEX_LIMIT = 256 * 2**20  # bytes of an index; a model of 10^6 tensors needs about a third
_SHOWN = 8
_PICKLE, _SCRIPT, _SAFE, _EXPORTED, _OTHER = "a pickle", "TorchScript", "safetensors", "torch.export", "something else"
_WARNED = {
    _PICKLE: "a pickle, which can run any code when it is loaded",
    _SCRIPT: "TorchScript, a program that can run when it is loaded",
    _EXPORTED: "an exported program",
}


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a weights file holds.

    Attributes:
        tensors: by name.
        metadata: ours, if it has any.
        aliases: further names for a tensor that is stored once.
        program: the TorchScript module, if the file is one; it answers queries, and its layers cannot be watched.
    """

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    program: nn.Module | None = None


def read(path: Path | str, *, insecure_allow_pickle: bool = False) -> Checkpoint:
    """Read a weights file, or the folder or index of a sharded one, without running any code from it.

    Args:
        path: a file; ``NAME.safetensors.index.json``; or a folder that holds one index or one safetensors file.
        insecure_allow_pickle: also read pickles and TorchScript, which can run any code. Never applies to what is
            called ``.safetensors``, nor to shards.

    Raises:
        InputError: no such file, one that may not or cannot be read, or one that is not what its name says.
    """
    path = Path(path)
    if path.is_dir():
        path = _inside(path)
    if path.suffix == ".json":
        return _sharded(path)
    data = read_bytes(path, "a weights file")
    kind = _kind(path, data)
    if kind == _SAFE or (kind == _OTHER and path.suffix == ".safetensors"):
        return _safetensors(path, data)
    if path.suffix == ".safetensors":
        raise InputError(f"safetensors in {path}, as its name says", found=_WARNED[kind], do="ask for the real file")
    if kind == _EXPORTED:
        return Checkpoint(exported_tensors(path, data), {})
    if kind == _OTHER:
        return _safetensors(path, data)  # for its error
    if not insecure_allow_pickle:
        raise InputError(
            f"safetensors in {path}",
            found=_WARNED[kind],
            do="convert it, or add --insecure-allow-pickle if you trust whoever made it",
        )
    if kind == _SCRIPT:
        program = _program(path, data)
        return Checkpoint(program.state_dict(), {}, program=program)
    return Checkpoint(_unpickle(path, data), {})


def _kind(path: Path, data: bytes) -> str:
    if data[8:9] == b"{":
        return _SAFE
    if data[:1] == b"\x80":
        return _PICKLE
    if data[:4] != b"PK\x03\x04":
        return _OTHER
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            listed = archive.namelist()
    except (zipfile.BadZipFile, ValueError, NotImplementedError) as error:
        raise InputError(
            f"a weights file at {path}", found=f"a damaged archive ({error})", do="copy it again"
        ) from error
    names = [PurePosixPath(name) for name in listed]
    ends = {name.name for name in names}
    if "constants.pkl" in ends or any("code" in name.parts[1:-1] for name in names):
        return _SCRIPT
    if ends & {"archive_format", "serialized_exported_program.json"} and pickled_member(listed) is None:
        return _EXPORTED
    return _PICKLE


def _safetensors(path: Path, data: bytes) -> Checkpoint:
    try:
        tensors = safetensors.torch.load(data)
        text = data[8 : 8 + int.from_bytes(data[:8], "little")]
        named = json.loads(text, object_pairs_hook=_distinct).get("__metadata__") or {}
        metadata = json.loads(named.get(ENTRY, "{}"))
    except (safetensors.SafetensorError, ValueError, KeyError, AttributeError, TypeError, RuntimeError) as error:
        found = f"{len(data)} bytes of something else or a truncated file ({one_line(str(error))[:80]})"
        raise InputError(f"a safetensors file at {path}", found=found, do="copy or export it again") from error
    if not isinstance(metadata, dict) or not isinstance(metadata.get("tied", {}), dict):
        raise InputError(f"DeepSeal metadata in {path}", found="something else", do="export it again")
    taken = [alias for alias in metadata.get("tied", {}) if alias in tensors]
    if taken:
        raise InputError(f"tied names in {path} that have no tensor", found=str(taken[:4]), do="export it again")
    # safetensors' own save_model notes the names that it left out, as name -> name of the tensor kept
    aliases = {alias: name for alias, name in named.items() if name in tensors and alias not in tensors}
    return Checkpoint(tensors, metadata, aliases)


def _inside(folder: Path) -> Path:
    """The index or the one safetensors file of a folder."""
    found = sorted(folder.glob(f"*{INDEX}")) or sorted(folder.glob("*.safetensors"))
    if len(found) != 1:
        names = ", ".join(path.name for path in found[:_SHOWN]) or "none"
        raise InputError(f"one index or one safetensors file in {folder}", found=names, do="name the file itself")
    return found[0]


def _sharded(index: Path) -> Checkpoint:
    """All tensors of the shards beside an index; each shard must hold exactly what the index says."""
    try:
        content = json.loads(read_bytes(index, "an index", limit=_INDEX_LIMIT), object_pairs_hook=_distinct)
        shards = {str(name): PurePosixPath(shard) for name, shard in content["weight_map"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        found = f"something else ({one_line(str(error))[:80]})"
        raise InputError(f"an index with a weight_map at {index}", found=found, do="copy it again") from error
    files = sorted(set(shards.values()))
    outside = [str(f) for f in files if f.suffix != ".safetensors" or len(f.parts) != 1 or "\\" in str(f)]
    if outside or not files:
        found = f"{outside[:_SHOWN]}" if outside else "no names"
        raise InputError(f"plain names of safetensors files in {index}", found=found, do="ask for the real index")
    missing = [str(name) for name in files if not (index.parent / name).is_file()]
    if missing:
        found = f"{len(missing)} missing: {', '.join(missing[:_SHOWN])}{', …' if len(missing) > _SHOWN else ''}"
        raise InputError(f"the {len(files)} shards that {index} names", found=found, do="copy them beside it")
    tensors: dict[str, Tensor] = {}
    for file in files:
        path = index.parent / file
        part = _safetensors(path, read_bytes(path, "a shard")).tensors
        stated = {name for name, shard in shards.items() if shard == file}
        if stated != part.keys():
            names = sorted(stated ^ part.keys())
            found = f"{len(names)} others: {', '.join(names[:_SHOWN])}{', …' if len(names) > _SHOWN else ''}"
            raise InputError(f"in {path} the tensors that {index.name} says", found=found, do="copy both again")
        tensors.update(part)
    return Checkpoint(tensors, {})


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    twice = sorted(name for name, count in Counter(name for name, _ in pairs).items() if count > 1)
    if twice:
        raise ValueError(f"names that occur twice: {twice[:4]}")
    return dict(pairs)


def _program(path: Path, data: bytes) -> torch.jit.ScriptModule:
    try:
        with warnings.catch_warnings():
            for kind in (DeprecationWarning, FutureWarning):  # of TorchScript as a whole
                warnings.simplefilter("ignore", kind)
            program = torch.jit.load(io.BytesIO(data), map_location="cpu")
    except Exception as error:
        raise InputError(f"TorchScript at {path}", found=one_line(str(error))[:120], do="export it again") from error
    return program  # type: ignore[no-any-return]


def _unpickle(path: Path, data: bytes) -> dict[str, Tensor]:
    try:
        if zipfile.is_zipfile(io.BytesIO(data)):  # an export by an older torch holds a whole torch.save inside
            with zipfile.ZipFile(io.BytesIO(data)) as archive:
                inner = pickled_member(archive.namelist())
                data = data if inner is None else archive.read(inner)
        try:
            content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    except Exception as error:
        raise InputError(
            f"a torch checkpoint at {path}", found=one_line(str(error))[:120], do="export it again"
        ) from error
    if isinstance(content, nn.Module):
        content = content.state_dict()
    if isinstance(content, Mapping):
        for key in ("state_dict", "model_state_dict", "model"):
            if isinstance(content.get(key), Mapping):
                content = content[key]
        tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
    raise InputError(f"a state dict in {path}", found=type(content).__name__, do="save model.state_dict()")
