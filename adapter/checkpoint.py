"""Weights on disk: safetensors with one canonical JSON entry; nothing that is loaded chooses what code runs."""

from __future__ import annotations

import dataclasses
import io
import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
import torch
from torch import Tensor, nn

from deepseal.adapter.classifier import Classifier
from deepseal.adapter.spec import InputSpec
from deepseal.adapter.targets import call_target, split_target
from deepseal.errors import InputError, UnknownNameError, understood
from deepseal.files import read_bytes, write_atomically

ENTRY = "deepseal"
TRUSTED = ("deepseal.adapter.zoo:", "torchvision:")


def build_module(architecture: str, spec: InputSpec) -> nn.Module:
    """The module of ``package.module:factory[?name=value]`` or ``torchvision:NAME``.

    A factory is offered the spec as ``spec`` if it has a parameter of that name.

    Raises:
        InputError: it cannot be built.
    """
    if architecture.startswith("torchvision:"):
        return _torchvision(architecture.removeprefix("torchvision:"), spec)
    module = call_target(architecture, spec=spec)
    if not isinstance(module, nn.Module):
        raise InputError(f"a torch module from {architecture}", found=type(module).__name__, do="return an nn.Module")
    return module


def save(model: Classifier, path: Path | str, *, force: bool = False) -> None:
    """Write weights and metadata as one safetensors file, all of it or nothing. Tied weights are stored once.

    Raises:
        InputError: the file exists (without ``force``) or cannot be written.
    """
    write_atomically(Path(path), to_bytes(model), force=force)


def to_bytes(model: Classifier) -> bytes:
    """The content of the file that ``save`` writes; equal models give equal bytes."""
    kept: dict[str, Tensor] = {}
    tied: dict[str, str] = {}
    owners: dict[tuple[Any, ...], str] = {}
    for name, tensor in sorted(model.tensors().items()):
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in owners:
            tied[name] = owners[place]
            continue
        owners[place] = name
        kept[name] = tensor.detach().cpu().contiguous().clone()
    metadata = {
        "version": 1,
        "architecture": model.architecture,
        "spec": model.spec.as_dict(),
        "tied": tied,
        **{
            name: value
            for name, value in model.metadata.items()
            if name not in ("version", "architecture", "spec", "tied")
        },
    }
    text = json.dumps(metadata, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return safetensors.torch.save(kept, metadata={ENTRY: text})


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What a weights file holds: tensors by name, and our metadata if it has any."""

    tensors: Mapping[str, Tensor]
    metadata: Mapping[str, Any]


def read(path: Path | str, *, insecure_allow_pickle: bool = False) -> Checkpoint:
    """Read a weights file without running any code from it.

    Raises:
        InputError: no such file, a pickle (without ``insecure_allow_pickle``), or not safetensors.
    """
    path = Path(path)
    data = read_bytes(path, "a weights file")
    is_safetensors = data[8:9] == b"{"
    if not is_safetensors and (data[:4] == b"PK\x03\x04" or data[:1] == b"\x80"):
        if not insecure_allow_pickle:
            raise InputError(
                f"safetensors in {path}",
                found="a pickle, which can run any code when it is loaded",
                do="convert it, or add --insecure-allow-pickle if you trust whoever made it",
            )
        return Checkpoint(_unpickle(path, data), {})
    try:
        tensors = safetensors.torch.load(data)
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        metadata = json.loads(header.get("__metadata__", {}).get(ENTRY, "{}"))
    except (safetensors.SafetensorError, ValueError, KeyError, AttributeError) as error:
        found = f"{len(data)} bytes of something else or a truncated file"
        raise InputError(f"a safetensors file at {path}", found=found, do="copy or export it again") from error
    if not isinstance(metadata, dict) or not isinstance(metadata.get("tied", {}), dict):
        raise InputError(f"DeepSeal metadata in {path}", found="something else", do="export it again")
    return Checkpoint(tensors, metadata)


def load(
    path: Path | str,
    *,
    architecture: str | None = None,
    spec: InputSpec | None = None,
    insecure_allow_pickle: bool = False,
) -> Classifier:
    """The classifier of a weights file.

    The file's own metadata may name only our zoo and torchvision; other code runs only if ``architecture`` names it.

    Args:
        path: safetensors file.
        architecture: overrides the metadata's.
        spec: input spec, for files without one.
        insecure_allow_pickle: also read pickles, which can run any code.

    Raises:
        InputError: the file cannot be used, or its tensors do not fit the architecture exactly.
    """
    what, do = f"a weights file that can be used at {path}", "check the file, --arch and --data"
    with understood(what, do):
        return _load(Path(path), architecture, spec, insecure_allow_pickle)


def _load(path: Path, architecture: str | None, spec: InputSpec | None, insecure_allow_pickle: bool) -> Classifier:
    checkpoint = read(path, insecure_allow_pickle=insecure_allow_pickle)
    metadata = checkpoint.metadata
    stated = metadata.get("architecture")
    chosen = architecture or stated
    if not isinstance(chosen, str):
        raise InputError(
            f"an architecture in {path}", found="none in its metadata", do="add --arch package.module:factory"
        )
    if architecture is None and not chosen.startswith(TRUSTED):
        raise InputError(
            f"{path} to name an architecture of {' or '.join(TRUSTED)}",
            found=repr(chosen),
            do=f"add --arch {split_target(chosen)[0]} if you trust that code",
        )
    final_spec = InputSpec.from_dict(metadata["spec"]) if "spec" in metadata else spec
    if final_spec is None:
        raise InputError(
            f"an input spec in {path}", found="none in its metadata", do="add --data, whose spec is then used"
        )
    kept = {k: v for k, v in metadata.items() if k not in ("version", "architecture", "spec", "tied")}
    state = _normalise(checkpoint.tensors, metadata.get("tied", {}))
    if architecture is None:
        with torch.device("meta"):  # a file that names a huge network is refused before memory is spent on it
            _fitted(build_module(chosen, final_spec), state, path, chosen)
    module = build_module(chosen, final_spec)
    _fill(module, _fitted(module, state, path, chosen))
    module.eval()
    return Classifier(module, final_spec, architecture=chosen, metadata=kept)


def _normalise(tensors: Mapping[str, Tensor], tied: Mapping[str, str]) -> dict[str, Tensor]:
    state = dict(tensors)
    state.update({alias: state[owner] for alias, owner in tied.items() if owner in state})
    for name in [name for name in state if name.endswith("_orig")]:
        mask = name.removesuffix("_orig") + "_mask"
        if mask in state:
            state[name.removesuffix("_orig")] = state.pop(name) * state.pop(mask)
    return state


def _without_prefixes(name: str) -> str:
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    while parts and parts[0] == "module":
        parts.pop(0)
    return ".".join(parts)


def _fitted(module: nn.Module, state: dict[str, Tensor], path: Path, architecture: str) -> dict[str, Tensor]:
    """The state under the module's names: as they are, or without the prefixes of parallel and compiled training."""
    wanted = module.state_dict()
    if wanted.keys() != state.keys():
        state = {_without_prefixes(name): tensor for name, tensor in state.items()}
    missing = sorted(wanted.keys() - state.keys())
    unexpected = sorted(state.keys() - wanted.keys())
    shapes = [
        f"{name} {tuple(state[name].shape)} instead of {tuple(wanted[name].shape)}"
        for name in sorted(wanted.keys() & state.keys())
        if state[name].shape != wanted[name].shape
    ]
    if missing or unexpected or shapes:
        problems = [
            f"{len(names)} {what} ({', '.join(names[:4])}{', …' if len(names) > 4 else ''})"
            for what, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", shapes))
            if names
        ]
        raise InputError(
            f"{path} to fit {architecture} exactly",
            found="tensors " + "; ".join(problems),
            do="name the architecture that these weights were trained with",
        )
    return state


def _fill(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Copy the state into the module, each tensor in the type that the file has."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in state and tensor.dtype != state[name].dtype:
            tensor.data = tensor.data.to(state[name].dtype)
    module.load_state_dict(state, strict=True)


def _unpickle(path: Path, data: bytes) -> dict[str, Tensor]:
    try:
        try:
            content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
        except pickle.UnpicklingError:
            content = torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
    except Exception as error:
        raise InputError(f"a torch checkpoint at {path}", found=str(error)[:120], do="export it again") from error
    if isinstance(content, nn.Module):
        content = content.state_dict()
    if isinstance(content, Mapping):
        for inner in ("state_dict", "model_state_dict", "model"):
            if isinstance(content.get(inner), Mapping):
                content = content[inner]
        tensors = {str(name): value for name, value in content.items() if isinstance(value, Tensor)}
        if tensors:
            return tensors
    raise InputError(f"a state dict in {path}", found=type(content).__name__, do="save model.state_dict()")


def _torchvision(name: str, spec: InputSpec) -> nn.Module:
    import torchvision
    from torchvision.models import get_model, list_models

    classifiers = list_models(module=torchvision.models)  # the others would download a backbone
    if name not in classifiers:
        raise UnknownNameError("torchvision classifier", name, classifiers)
    module = get_model(name, weights=None, num_classes=spec.num_classes)
    if not isinstance(module, nn.Module):
        raise InputError(f"a torch module torchvision:{name}", found=type(module).__name__, do="name another model")
    return module
