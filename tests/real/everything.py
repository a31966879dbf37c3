"""Every registered algorithm on one model, as quickly as it goes: what works, and what is refused in which words."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from pretrained import silero_vad
from sounds import utterance
from subject import Subject

from deepseal.adapter import Classifier, Inputs, InputSpec, Split
from deepseal.attacks import EVASION, QUERY, REMOVAL
from deepseal.errors import InputError
from deepseal.rng import Rng
from deepseal.watermark import SCHEMES, embed, verify

WORKS = "works"
ALGORITHMS = (*SCHEMES.names(), *REMOVAL.names(), *QUERY.names(), *EVASION.names())
_WEIGHTS = {"bits": 8, "steps": 1, "rounds": 1}
_TRIGGERS = {"steps": 1, "rounds": 1, "batch": 2}
QUICK: dict[str, dict[str, Any]] = {
    "deepsigns": {**_WEIGHTS, "groups": 2, "batch": 1, "batch_size": 2},
    "hash-bound": _WEIGHTS,
    "uchida": _WEIGHTS,
    "diction": {**_WEIGHTS, "triggers": 2, "training": 1, "batch": 2},
    "adi": {**_TRIGGERS, "triggers": 4},
    "zhang": {**_TRIGGERS, "groups": 2, "votes": 2},
    "le-merrer": {**_TRIGGERS, "triggers": 2},
    "deepsigns-blackbox": {**_TRIGGERS, "triggers": 2, "overdraw": 6, "rarity": 1.0, "models": 1},
    "ewe": {**_TRIGGERS, "groups": 2, "votes": 2},
    "blackmarks": {**_TRIGGERS, "bits": 2, "votes": 2, "models": 1, "ascent": 1},
    "plain": {"bits": 8},
    "fine-tune": {"epochs": 1},
    "overwrite": {"options": ["steps=1;rounds=1;bits=8;groups=2;batch=1;batch_size=2"]},
    "distil": {"epochs": 1},
    "other-task": {"epochs": 1, "epochs_back": 1},
    "bim": {"steps": 1},
    "mi-fgsm": {"steps": 1},
    "pgd": {"steps": 1},
    "apgd": {"steps": 2},
    "jsma": {"gamma": 1e-4},
    "deepfool": {"steps": 1, "candidates": 2},
    "cw": {"steps": 1, "searches": 1},
    "square": {"queries": 3},
    "hop-skip-jump": {"iterations": 1, "queries": 4},
}


def few(subject: Subject, count: int) -> tuple[Classifier, Split]:
    """The model, left partly in training mode with a weight frozen, and some of its owner's inputs.

    Where nobody knows their labels, but there are classes, they get one after the other, the last four the model's own.
    """
    x = subject.inputs()
    batch = (Inputs(x) if isinstance(x, dict) else x)[:count]
    model = Classifier(subject.build(), InputSpec(**subject.spec))
    if not model.spec.num_classes:
        data = Split.unlabelled(batch)
    elif subject.labels:
        data = Split(batch, subject.labels()[:count])
    else:
        labels = torch.arange(count) % model.spec.num_classes
        labels[-4:] = model.predict(batch[-4:])
        data = Split(batch, labels)
    for layer in list(model.module.modules())[1::2]:
        layer.training = True
    list(model.module.parameters())[-1].requires_grad_(False)
    return model, data


def detector() -> tuple[Classifier, Split]:
    """Silero's TorchScript, and chunks of a voice."""
    chunks = torch.stack(torch.from_numpy(utterance(0, 0)).float()[4096:6144].split(512))
    model = Classifier(silero_vad(), InputSpec(shape=(512,), num_classes=0, bounds=(-1.0, 1.0)))
    return model, Split.unlabelled(chunks)


def attempt(name: str, model: Classifier, data: Split) -> str:
    """``WORKS``, or why it is refused; any other exception is passed on."""
    try:
        _run(name, model, data)
    except InputError as error:
        text = str(error)
        assert "\n" not in text, f"more than a line: {text}"
        return text
    return WORKS


def _run(name: str, model: Classifier, data: Split) -> None:
    if name in SCHEMES.names():
        key = SCHEMES.build(name, QUICK.get(name, {})).keygen(model, data, owner="me", rng=Rng(0))
        marked = embed(model, data, key, rng=Rng(1))
        for suspect in (model, marked):
            verify(suspect, key, null_keys=1)
        _independent(model, marked)
    elif name in REMOVAL.names():
        _independent(model, REMOVAL.build(name, QUICK.get(name, {})).remove(model, data, rng=Rng(0)).model)
    elif name in EVASION.names():
        EVASION.build(name, QUICK.get(name, {})).perturb(model, data, rng=Rng(0))
    else:
        QUERY.build(name, QUICK.get(name, {})).wrap(model, rng=Rng(0)).query(data.x)


def _independent(model: Classifier, other: Classifier) -> None:
    """The result has the original's types, places and flags, and none of its memory."""
    assert other.module is not model.module
    assert (other.device, other.dtype) == (model.device, model.dtype)
    mine, others = list(model.module.parameters()), list(other.module.parameters())
    assert not {p.data_ptr() for p in mine} & {p.data_ptr() for p in others}
    assert [p.requires_grad for p in mine] == [p.requires_grad for p in others]
    assert [m.training for m in model.module.modules()] == [m.training for m in other.module.modules()]


@dataclasses.dataclass
class Failing:
    """A hook that fails after so many calls."""

    calls_left: int

    def __call__(self, *_given: object) -> None:
        if self.calls_left == 0:
            raise RuntimeError("the forward pass fails here")
        self.calls_left -= 1


def failing(model: Classifier, calls: int) -> Callable[[], None]:
    """Make a layer in the middle of the module fail after so many calls; the returned function mends it."""
    leaves = [layer for layer in model.module.modules() if not list(layer.children())]
    return leaves[len(leaves) // 2].register_forward_hook(Failing(calls)).remove
