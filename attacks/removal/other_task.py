"""Another task and back: the thief teaches the network something else, and then the old task again.

Source: Y. Uchida, Y. Nagai, S. Sakazawa, S. Satoh, "Embedding watermarks into deep neural networks", ICMR 2017
(fine-tuning to another data set); permuted inputs as another task: I. Goodfellow, M. Mirza, D. Xiao, A. Courville,
Y. Bengio, "An empirical investigation of catastrophic forgetting in gradient-based neural networks", ICLR 2014.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch

from deepseal.adapter import Classifier, Recipe, Split, load_data
from deepseal.adapter.training import Progress, output_layer, reinitialise, train
from deepseal.attacks.base import Removed, owner_recipe, weight_change
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class OtherTask(Parameters):
    """Fine-tune all layers, under a fresh last layer each time, to another task and back to the thief's own."""

    name: ClassVar[str] = "other-task"

    task: str | None = parameter(None, "data of the other task; none takes the thief's own with its inputs permuted")
    epochs: int = parameter(5, "passes over the other task's data", minimum=1, maximum=10_000)
    epochs_back: int = parameter(5, "passes over the thief's own data", minimum=1, maximum=10_000)
    learning_rate: float | None = parameter(None, "none takes the owner's", minimum=1e-9, maximum=10.0)

    def remove(self, model: Classifier, data: Split, *, rng: Rng, progress: Progress | None = None) -> Removed:
        """Train away and back.

        Raises:
            InputError: a model without classes, data of another shape, or a task with more classes.
        """
        model.spec.require_classes()
        data.check(model.spec)
        away, away_test = self._other(model, data, rng.child("task"))
        there = self._recipe(model, self.epochs)
        back = self._recipe(model, self.epochs_back)
        last = output_layer(model)
        start = reinitialise(model, last, rng.child("reset-away"))
        moved = train(start, away, recipe=there, rng=rng.child("away"), progress=progress)
        again = reinitialise(moved, last, rng.child("reset-back"))
        result = train(again, data, recipe=back, rng=rng.child("back"), progress=progress)
        evidence = {
            "relative_weight_change": weight_change(model, result),
            "relative_weight_change_away": weight_change(model, moved),
            "task": self.task or "the thief's own inputs, permuted",
            "accuracy_on_the_other_task": moved.accuracy(away_test).as_dict(),
            "updates": there.total_steps(len(away)) + back.total_steps(len(data)),
            "recipe": back.as_dict(),
        }
        return Removed(result, evidence)

    def _recipe(self, model: Classifier, epochs: int) -> Recipe:
        given = {} if self.learning_rate is None else {"learning_rate": self.learning_rate}
        return owner_recipe(model, epochs=epochs, **given)

    def _other(self, model: Classifier, data: Split, rng: Rng) -> tuple[Split, Split]:
        """Training and test samples of the other task; of the thief's own data one in six is kept for the test."""
        if self.task is not None:
            dataset = load_data(self.task)
            found = f"{dataset.spec.shape} and {dataset.spec.num_classes} classes"
            if dataset.spec.shape != model.spec.shape or dataset.spec.num_classes > model.spec.num_classes:
                expected = f"another task with inputs {model.spec.shape}, at most {model.spec.num_classes} classes"
                raise InputError(expected, found=found, do="give -p task=… another data set, or none")
            return dataset.train, dataset.test
        places = torch.randperm(data.tensor[0].numel(), generator=rng.child("places").torch())
        permuted = Split(data.tensor.flatten(1)[:, places].reshape(data.tensor.shape), data.y)
        order = torch.randperm(len(data), generator=rng.child("held-out").torch())
        held_out = max(1, len(data) // 6)
        return permuted.take(order[held_out:]), permuted.take(order[:held_out])
