"""What an attack is. A removal attack gets what a thief has, a model and data; it never sees the owner's key."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

from deepseal.adapter import Classifier, Split
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
    },
)


def weight_change(before: Classifier, after: Classifier) -> float:
    """Norm of the change of all floating-point parameters, relative to the norm before."""
    change = total = 0.0
    for old, new in zip(before.module.parameters(), after.module.parameters(), strict=True):
        change += float((new.detach().double() - old.detach().double()).pow(2).sum())
        total += float(old.detach().double().pow(2).sum())
    return float((change / total) ** 0.5) if total else 0.0
