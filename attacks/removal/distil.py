"""Distillation: a fresh student learns the model's answers, and never sees its weights or the labels.

Source: G. Hinton, O. Vinyals, J. Dean, "Distilling the knowledge in a neural network", 2015, section 2: the student
minimises the cross-entropy with the teacher's answers at a temperature, times the temperature squared.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepseal.adapter import Classifier, Split, initialise
from deepseal.adapter.capture import NORMALISATION, PARAMETRIC
from deepseal.adapter.training import Progress, Step, reinitialise, train
from deepseal.attacks.base import Removed, owner_recipe, weight_change
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class Distil(Parameters):
    """Train a student from scratch on softmax(logits / temperature) of the model."""

    name: ClassVar[str] = "distil"

    temperature: float = parameter(3.0, "softens the answers", minimum=0.1, maximum=1000.0)
    epochs: int = parameter(10, "passes over the thief's inputs", minimum=1, maximum=10_000)
    student: str | None = parameter(None, "package.module:factory of the student; none takes the model's structure")

    def remove(self, model: Classifier, data: Split, *, rng: Rng, progress: Progress | None = None) -> Removed:
        """Train a student. The labels are not used.

        Raises:
            InputError: a model without classes, a layer that cannot be reset, or data that do not fit the model.
        """
        model.spec.require_classes()
        data.check(model.spec)
        start = self._student(model, rng.child("student"))
        teacher = model.copy()

        def loss(step: Step) -> Tensor:
            with torch.no_grad():
                answers = torch.softmax(teacher.logits(step.x).float() / self.temperature, dim=1)
            own = torch.log_softmax(step.logits.float() / self.temperature, dim=1)
            return self.temperature**2 * nn.functional.kl_div(own, answers, reduction="batchmean")

        recipe = owner_recipe(model, epochs=self.epochs)
        student = train(start, data, recipe=recipe, rng=rng.child("train"), loss=loss, progress=progress)
        same = student.predict(data.x) == model.predict(data.x)
        evidence = {
            "relative_weight_change": weight_change(model, student) if self.student is None else None,
            "agreement_with_the_teacher": float(same.double().mean()),
            "updates": recipe.total_steps(len(data)),
            "samples": len(data),
            "recipe": recipe.as_dict(),
        }
        return Removed(student, evidence)

    def _student(self, model: Classifier, rng: Rng) -> Classifier:
        if self.student is not None:
            built = initialise(self.student, model.spec, rng)
            return Classifier(built.module, built.spec, architecture=self.student, metadata=_kept(model))
        result = Classifier(model.copy().module, model.spec, architecture=model.architecture, metadata=_kept(model))
        for name, layer in model.module.named_modules():
            if isinstance(layer, (*PARAMETRIC, *NORMALISATION)) and "weight" in layer._parameters:
                result = reinitialise(result, name, rng.child(name))
            elif list(layer.parameters(recurse=False)):
                found = f"{name} ({type(layer).__name__})" if name else type(layer).__name__
                raise InputError("layers that can be reset", found=found, do="name a student with -p student=…")
        return result


def _kept(model: Classifier) -> dict[str, object]:
    return {name: model.metadata[name] for name in ("training", "resized") if name in model.metadata}
