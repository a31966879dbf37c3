"""Weights on disk: safetensors with one canonical JSON entry; nothing that is loaded chooses what code runs."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import safetensors.torch
import torch
from torch import Tensor, nn

from deepseal.adapter.classifier import Classifier
from deepseal.adapter.names import fitted
from deepseal.adapter.parametrised import refresh
from deepseal.adapter.spec import InputSpec
from deepseal.adapter.statefiles import ENTRY, Checkpoint, read
from deepseal.adapter.targets import call_target, split_target
from deepseal.adapter.widths import widen
from deepseal.errors import InputError, UnknownNameError, understood
from deepseal.files import write_atomically

TRUSTED = ("deepseal.adapter.zoo:", "torchvision:")
__all__ = ["Checkpoint", "build_module", "load", "read", "save", "to_bytes"]


def build_module(architecture: str, spec: InputSpec) -> nn.Module:
    """The module of ``package.module:factory[?name=value]`` or ``torchvision:NAME``.

    A factory is offered the spec as ``spec`` if it has a parameter of that name. What it wraps in ``nn.DataParallel``
    is taken out again.

    Raises:
        InputError: it cannot be built.
    """
    if architecture.startswith("torchvision:"):
        return _torchvision(architecture.removeprefix("torchvision:"), spec)
    module = call_target(architecture, spec=spec)
    if not isinstance(module, nn.Module):
        raise InputError(f"a torch module from {architecture}", found=type(module).__name__, do="return an nn.Module")
    while isinstance(module, nn.DataParallel):
        module = cast(nn.Module, module.module)
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


def load(
    path: Path | str,
    *,
    architecture: str | None = None,
    spec: InputSpec | None = None,
    insecure_allow_pickle: bool = False,
    widths: bool = False,
) -> Classifier:
    """The classifier of a weights file (see ``statefiles.read`` for the kinds, and ``names.fitted`` for what fits).

    The file's own metadata may name only our zoo and torchvision; other code runs only if ``architecture`` names it.
    TorchScript without ``architecture`` gives a classifier that answers queries only.

    Args:
        path: safetensors file; the folder or index of a sharded one; an exported program, whose weights are read.
        architecture: overrides the metadata's.
        spec: input spec, for files without one.
        insecure_allow_pickle: also read pickles and TorchScript, which can run any code.
        widths: layers get the numbers of inputs and outputs that the file has, whatever the architecture says; files
            of models whose neurons were added or cut away ask for that themselves (``resized`` in the metadata).

    Raises:
        InputError: the file cannot be used.
        MismatchError: its tensors do not fit the architecture exactly.
    """
    what, do = f"a weights file that can be used at {path}", "check the file, --arch and --data"
    with understood(what, do):
        return _load(Path(path), architecture, spec, insecure_allow_pickle, widths)


def _load(
    path: Path, architecture: str | None, spec: InputSpec | None, insecure_allow_pickle: bool, widths: bool
) -> Classifier:
    checkpoint = read(path, insecure_allow_pickle=insecure_allow_pickle)
    metadata = checkpoint.metadata
    stated = metadata.get("architecture")
    chosen = architecture or stated
    if checkpoint.program is not None and architecture is None:
        return Classifier(checkpoint.program.eval(), _spec(path, metadata, spec))
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
    final_spec = _spec(path, metadata, spec)
    kept = {k: v for k, v in metadata.items() if k not in ("version", "architecture", "spec", "tied")}
    tied = {alias: checkpoint.tensors[name] for alias, name in metadata.get("tied", {}).items()}
    fit = functools.partial(
        fitted,
        tensors={**checkpoint.tensors, **tied},
        aliases=checkpoint.aliases,
        path=str(path),
        architecture=chosen,
    )
    resized = widths or kept.get("resized") is True

    def build() -> nn.Module:
        built = build_module(chosen, final_spec)
        if resized:
            widen(built, checkpoint.tensors)
        return built

    if architecture is None:
        with torch.device("meta"):  # a file that names a huge network is refused before memory is spent on it
            fit(build())
    module = build()
    _fill(module, fit(module))
    refresh(module.eval())
    model = Classifier(module, final_spec, architecture=chosen, metadata=kept)
    if resized:
        model.logits(final_spec.probe(1))  # fails where widths do not fit together
    return model


def _spec(path: Path, metadata: Mapping[str, Any], spec: InputSpec | None) -> InputSpec:
    if "spec" in metadata:
        return InputSpec.from_dict(metadata["spec"])
    if spec is None:
        raise InputError(
            f"an input spec in {path}", found="none in its metadata", do="add --data, whose spec is then used"
        )
    return spec


def _fill(module: nn.Module, state: dict[str, Tensor]) -> None:
    """Copy the state into the module, each tensor in the type that the file has."""
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if name in state and tensor.dtype != state[name].dtype:
            tensor.data = tensor.data.to(state[name].dtype)
    module.load_state_dict(state, strict=True)


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
