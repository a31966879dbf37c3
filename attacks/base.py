"""What an attack is. A removal attack gets what a thief has, a model and data; it never sees the owner's key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from torch import Tensor

from deepseal.adapter import BlackBox, Classifier, Differentiable, Recipe, Split
from deepseal.adapter.training import Progress
from deepseal.registry import Registry
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True)
class Removed:
    """The attacked copy and the proof that the attack did what it says.

    Attributes:
        model: a new classifier; the attacked one is unchanged.
        evidence: plain values that the attack measured on its own work, such as the sparsity that was reached.
    """

    model: Classifier
    evidence: Mapping[str, Any]


class Removal(Protocol):
    """Turns a model into one that should no longer carry its mark. Instances are frozen parameters."""

    name: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """The parameters as plain values."""
        ...

    def remove(self, model: Classifier, data: Split, *, rng: Rng, progress: Progress | None = None) -> Removed:
        """Attack a copy of ``model`` with the thief's ``data``.

        Raises:
            InputError: data that do not fit the model, or a model that the attack cannot be run on.
        """
        ...


REMOVAL: Registry[Removal] = Registry(
    "removal attack",
    "deepseal.removal",
    {
        "none": "deepseal.attacks.removal.none:NoAttack",
        "fine-tune": "deepseal.attacks.removal.fine_tune:FineTune",
        "prune": "deepseal.attacks.removal.prune:Prune",
        "overwrite": "deepseal.attacks.removal.overwrite:Overwrite",
        "quantise": "deepseal.attacks.removal.quantise:Quantise",
        "other-task": "deepseal.attacks.removal.other_task:OtherTask",
        "distil": "deepseal.attacks.removal.distil:Distil",
        "permute": "deepseal.attacks.removal.permute:Permute",
        "rescale": "deepseal.attacks.removal.rescale:Rescale",
        "dummy": "deepseal.attacks.removal.dummy:Dummy",
        "rotate": "deepseal.attacks.removal.rotate:Rotate",
    },
)


class Query(Protocol):
    """Stands between a stolen model and whoever asks it. Instances are frozen parameters."""

    name: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """The parameters as plain values."""
        ...

    def wrap(self, model: BlackBox, *, rng: Rng) -> BlackBox:
        """A black box that answers in the model's place; its ``evidence`` says what it did to the questions."""
        ...


QUERY: Registry[Query] = Registry(
    "query attack", "deepseal.query", {"query-noise": "deepseal.attacks.query.noise:QueryNoise"}
)


@dataclasses.dataclass(frozen=True)
class Perturbed:
    """Inputs as an evasion attack changed them, and the proof that it did what it says.

    Attributes:
        x: (N, …) in the order of the data, within the bounds; as they were where the attack failed.
        fooled: (N,) True where the model got the input right and gets the changed one wrong, checked again.
        evidence: plain values, such as how many inputs were attacked and how many of them fool the model.
        last: (N, …) the last that was tried of each input, also where it does not fool; None where nobody kept it.
    """

    x: Tensor = dataclasses.field(repr=False)
    fooled: Tensor = dataclasses.field(repr=False)
    evidence: Mapping[str, Any]
    last: Tensor | None = dataclasses.field(default=None, repr=False)


class Evasion(Protocol):
    """Changes inputs a little so that a model answers them wrongly. Instances are frozen parameters."""

    name: ClassVar[str]

    def as_dict(self) -> dict[str, Any]:
        """The parameters as plain values."""
        ...

    def perturb(self, model: Differentiable, data: Split, *, rng: Rng) -> Perturbed:
        """Attack the inputs of ``data``, whose labels are the right answers.

        Raises:
            InputError: data that do not fit the model, or a model that the attack cannot be run on.
        """
        ...


class Guarded(Differentiable, Protocol):
    """A model with a detector beside it, as an attacker who knows both sees them."""

    @property
    def limit(self) -> float:
        """Suspicion above which an input raises the alarm."""
        ...

    def suspicion(self, x: Tensor, *, surrogate: str = "identity") -> Tensor:
        """(N,) scores, differentiable in ``x``.

        Args:
            x: (N, …) inputs in data space.
            surrogate: what stands in the backward pass for steps without a useful gradient: ``identity`` or ``smooth``.
        """
        ...

    def alarms(self, x: Tensor) -> Tensor:
        """(N,) True where an input raises the alarm, as it is deployed."""
        ...


EVASION: Registry[Evasion] = Registry(
    "evasion attack",
    "deepseal.evasion",
    {
        "noise": "deepseal.attacks.evasion.noise:Noise",
        "fgsm": "deepseal.attacks.evasion.fgsm:FGSM",
        "bim": "deepseal.attacks.evasion.bim:BIM",
        "mi-fgsm": "deepseal.attacks.evasion.mi_fgsm:MIFGSM",
        "pgd": "deepseal.attacks.evasion.pgd:PGD",
        "apgd": "deepseal.attacks.evasion.apgd:APGD",
        "jsma": "deepseal.attacks.evasion.jsma:JSMA",
        "deepfool": "deepseal.attacks.evasion.deepfool:DeepFool",
        "fab": "deepseal.attacks.evasion.fab:FAB",
        "cw": "deepseal.attacks.evasion.carlini_wagner:CarliniWagner",
        "square": "deepseal.attacks.evasion.square:Square",
        "hop-skip-jump": "deepseal.attacks.evasion.hop_skip_jump:HopSkipJump",
        "auto": "deepseal.attacks.evasion.ensemble:Auto",
        "adaptive-pgd": "deepseal.attacks.evasion.adaptive_pgd:AdaptivePGD",
        "adaptive-cw": "deepseal.attacks.evasion.adaptive_cw:AdaptiveCW",
    },
)


def weight_change(before: Classifier, after: Classifier) -> float:
    """Norm of the change of all floating-point parameters, relative to the norm before.

    Where a parameter grew or shrank, what was added or cut away counts as a change from or to 0.
    """
    change = total = 0.0
    for old, new in zip(before.module.parameters(), after.module.parameters(), strict=True):
        first, second = old.detach().double().cpu(), new.detach().double().cpu()
        if first.shape != second.shape:
            size = [max(sizes) for sizes in zip(first.shape, second.shape, strict=True)]
            first, second = _padded(first, size), _padded(second, size)
        change += float((second - first).pow(2).sum())
        total += float(first.pow(2).sum())
    return float((change / total) ** 0.5) if total else 0.0


def _padded(values: Tensor, size: list[int]) -> Tensor:
    padded = values.new_zeros(size)
    padded[tuple(slice(0, length) for length in values.shape)] = values
    return padded


def owner_recipe(model: Classifier, *, epochs: int, **stated: Any) -> Recipe:
    """The owner's recipe from the model's metadata, or the defaults, for so many epochs at a constant step size."""
    known = {field.name for field in dataclasses.fields(Recipe)}
    owner = model.metadata.get("training", {}).get("recipe") or {}
    base = {name: value for name, value in owner.items() if name in known}
    return Recipe.from_mapping({**base, **stated, "epochs": epochs, "steps": None, "schedule": "constant"})
