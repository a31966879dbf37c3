"""One model through all of it: key, embedding, its file, verdict, task, removal."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from subject import Subject, relative_change
from torch import nn

from deepseal.adapter import Classifier, Inputs, InputSpec, Split, load, save
from deepseal.attacks import REMOVAL
from deepseal.rng import Rng
from deepseal.watermark import DeepSigns, Key, Verification, embedding_rounds, load_key, save_key, verify

RATE = 1e-9
Watch = Callable[[Classifier], AbstractContextManager[None]]


def unwatched(_model: Classifier) -> AbstractContextManager[None]:
    """Looks at nothing."""
    return nullcontext()


def owned(subject: Subject) -> tuple[Classifier, Split]:
    """The model and its owner's data, as the library takes them."""
    x = subject.inputs()
    batch = Inputs(x) if isinstance(x, dict) else x
    data = Split(batch, subject.labels()) if subject.labels else Split.unlabelled(batch)
    return Classifier(subject.build(), InputSpec(**subject.spec)), data


def examine(subject: Subject, folder: Path, *, seed: int = 0, watch: Watch = unwatched) -> dict[str, Any]:
    """Mark, save, verify from the files, measure the task, attack: plain values of all of it.

    ``watch`` is given every model that must be as it was on leaving.
    """
    rng = Rng(seed).child("real")
    base, data = owned(subject)
    before = subject.task(base.module)
    scheme = DeepSigns(bits=subject.bits, **subject.params)
    with watch(base):
        key = scheme.keygen(base, data, owner="Example Ltd", rng=rng.child("key"))
        unmarked = verify(base, key, max_false_positive=RATE)
        clock = time.perf_counter()
        rounds = list(embedding_rounds(base, data, key, rng=rng.child("embed")))
        seconds = time.perf_counter() - clock
    save(rounds[-1], folder / "marked.safetensors")
    save_key(key, folder / "owner.key")
    suspect = load(folder / "marked.safetensors", architecture=subject.architecture)
    with watch(suspect):
        verdict = verify(suspect, load_key(folder / "owner.key"), max_false_positive=RATE, null_keys=50)
    same = {"left in training mode": _otherwise(suspect, key, lambda module: module.train())}
    same["bfloat16"] = _otherwise(suspect, key, lambda module: module.to(torch.bfloat16))
    after = subject.task(suspect.module)
    attacks = {}
    for name, attack, params in ATTACKS if subject.labels else ATTACKS[:-1]:
        with watch(suspect):
            removed = REMOVAL.build(attack, params).remove(suspect, data, rng=rng.child(name))
        found = verify(removed.model, key, max_false_positive=RATE)
        attacks[name] = {**_short(found), "task": subject.task(removed.model.module)}
    return {
        "parameters": sum(tensor.numel() for tensor in base.module.parameters()),
        "bits": key.bits,
        "layers": key.public["layer_bits"],
        "pool": key.public.get("pool", {}),
        "inputs": len(data),
        "triggers": len(key.tensors["trigger_y"]),
        "scheme": scheme.as_dict(),
        "unmarked": _short(unmarked),
        "marked": {**_short(verdict), "null": verdict.as_dict()["null"]},
        "same_model": same,
        "task_before": before,
        "task_after": after,
        "relative_change": relative_change(before, after),
        "embedding_seconds": seconds,
        "rounds": len(rounds),
        "attacks": attacks,
    }


ATTACKS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("prune-0.3", "prune", {"sparsity": 0.3}),
    ("prune-0.5", "prune", {"sparsity": 0.5}),
    ("fine-tune", "fine-tune", {"mode": "ftal", "epochs": 3, "learning_rate": 1e-4}),
)


def _otherwise(suspect: Classifier, key: Key, change: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """The verdict on a copy that was changed in a way that is none to its owner."""
    module = change(suspect.copy().module)
    found = verify(Classifier(module, suspect.spec), key, max_false_positive=RATE)
    return _short(found)


def _short(found: Verification) -> dict[str, Any]:
    return {
        "verdict": found.verdict,
        "bit_errors": found.bit_errors,
        "erasures": found.erasures,
        "threshold": found.threshold,
        "p_value": found.p_value,
        "margin_lowest": found.margin_lowest,
    }
