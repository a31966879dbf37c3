"""Fine-tuning: the thief goes on training.

Source: Y. Adi, C. Baum, M. Cisse, B. Pinkas, J. Keshet, "Turning your weakness into a strength", USENIX Security 2018,
section 4.4: fine-tune the last layer (FTLL) or all layers (FTAL), or re-train either after the last layer was reset
(RTLL, RTAL). Ours: a model without classes, which has no labels, is held to its own answers (see ``own_answers``).
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from torch import Tensor

from deepseal.adapter import Classifier, Recipe, Split
from deepseal.adapter.training import Loss, Progress, cross_entropy, output_layer, reinitialise, train
from deepseal.attacks.base import Removed, owner_recipe, weight_change
from deepseal.attacks.removal.own_answers import OwnAnswers
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTune(Parameters):
    """FTLL, FTAL, RTLL, RTAL (Adi et al., 2018). Optimizer, step and batch size not given are the owner's."""

    name: ClassVar[str] = "fine-tune"

    mode: str = parameter(
        "ftal", "which layers, and whether the last is reset", choices=("ftll", "ftal", "rtll", "rtal")
    )
    epochs: int = parameter(5, "passes over the thief's data", minimum=1, maximum=10_000)
    optimizer: str | None = parameter(None, "none takes the owner's", choices=("adam", "adamw", "sgd"))
    learning_rate: float | None = parameter(None, "none takes the owner's", minimum=1e-9, maximum=10.0)
    batch_size: int | None = parameter(None, "none takes the owner's", minimum=2)
    corruption: float = parameter(
        0.1, "noise, or share of tokens drawn anew, where there are no classes", minimum=0.0, maximum=1.0
    )

    def remove(self, model: Classifier, data: Split, *, rng: Rng, progress: Progress | None = None) -> Removed:
        """Train on, with a fresh optimiser state.

        Raises:
            InputError: data that do not fit the model.
        """
        data.check(model.spec)
        labelled = model.spec.num_classes > 0
        recipe, source = self._recipe(model)
        last = output_layer(model)
        start = reinitialise(model, last, rng.child("reset")) if self.mode in ("rtll", "rtal") else model
        trained = [last] if self.mode in ("ftll", "rtll") else None
        loss: Loss = cross_entropy if labelled else OwnAnswers(model, self.corruption)
        own = rng.child("train")
        tuned = train(start, data, recipe=recipe, rng=own, loss=loss, trained=trained, progress=progress)
        evidence: dict[str, Any] = {
            "relative_weight_change": weight_change(model, tuned),
            "updates": recipe.total_steps(len(data)),
            "samples": len(data),
            "recipe": recipe.as_dict(),
            "recipe_source": source,
            "last_layer": last,
            "targets": "labels" if labelled else "its own answers, for corrupted inputs",
        }
        if not labelled:
            evidence["relative_change_of_answers"] = _change(model.query(data.x), tuned.query(data.x))
        return Removed(tuned, evidence)

    def _recipe(self, model: Classifier) -> tuple[Recipe, str]:
        owner = model.metadata.get("training", {}).get("recipe")
        stated = {"optimizer": self.optimizer, "learning_rate": self.learning_rate, "batch_size": self.batch_size}
        given = {name: value for name, value in stated.items() if value is not None}
        recipe = owner_recipe(model, epochs=self.epochs, **given)
        return recipe, "the owner's, from the metadata" if owner else "defaults, since the metadata has none"


def _change(before: Tensor, after: Tensor) -> float:
    """Norm of the change, relative to how much the answers differ from input to input."""
    spread = (before - before.mean(dim=0)).norm()
    return float((after - before).norm() / spread.clamp(min=1e-12))
