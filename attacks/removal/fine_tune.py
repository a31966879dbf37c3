"""Fine-tuning: the thief goes on training.

Source: Y. Adi, C. Baum, M. Cisse, B. Pinkas, J. Keshet, "Turning your weakness into a strength", USENIX Security 2018,
section 4.4: fine-tune the last layer (FTLL) or all layers (FTAL), or re-train either after the last layer was reset
(RTLL, RTAL).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from deepseal.adapter import Classifier, Recipe, Split
from deepseal.adapter.training import Progress, output_layer, reinitialise, train
from deepseal.attacks.base import Removed, owner_recipe, weight_change
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class FineTune(Parameters):
    """FTLL, FTAL, RTLL, RTAL (Adi et al., 2018). What is not given is the owner's, read from the model's metadata."""

    name: ClassVar[str] = "fine-tune"

    mode: str = parameter(
        "ftal", "which layers, and whether the last is reset", choices=("ftll", "ftal", "rtll", "rtal")
    )
    epochs: int = parameter(5, "passes over the thief's data", minimum=1, maximum=10_000)
    optimizer: str | None = parameter(None, "none takes the owner's", choices=("adam", "adamw", "sgd"))
    learning_rate: float | None = parameter(None, "none takes the owner's", minimum=1e-9, maximum=10.0)
    batch_size: int | None = parameter(None, "none takes the owner's", minimum=2)

    def remove(self, model: Classifier, data: Split, *, rng: Rng, progress: Progress | None = None) -> Removed:
        """Train on, with a fresh optimiser state.

        Raises:
            InputError: a model without classes, which has no labels to be tuned to; or data that do not fit the model.
        """
        model.spec.require_classes()
        recipe, source = self._recipe(model)
        last = output_layer(model)
        start = reinitialise(model, last, rng.child("reset")) if self.mode in ("rtll", "rtal") else model
        trained = [last] if self.mode in ("ftll", "rtll") else None
        tuned = train(start, data, recipe=recipe, rng=rng.child("train"), trained=trained, progress=progress)
        evidence = {
            "relative_weight_change": weight_change(model, tuned),
            "updates": recipe.total_steps(len(data)),
            "samples": len(data),
            "recipe": recipe.as_dict(),
            "recipe_source": source,
            "last_layer": last,
        }
        return Removed(tuned, evidence)

    def _recipe(self, model: Classifier) -> tuple[Recipe, str]:
        owner = model.metadata.get("training", {}).get("recipe")
        stated = {"optimizer": self.optimizer, "learning_rate": self.learning_rate, "batch_size": self.batch_size}
        given = {name: value for name, value in stated.items() if value is not None}
        recipe = owner_recipe(model, epochs=self.epochs, **given)
        return recipe, "the owner's, from the metadata" if owner else "defaults, since the metadata has none"
