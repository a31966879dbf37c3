"""Unmarked models of the owner's, from fresh weights: what innocents answer is measured on them."""

from __future__ import annotations

import torch

from deepseal.adapter import Classifier, Recipe, Split, initialise, train
from deepseal.adapter.training import Progress
from deepseal.errors import InputError
from deepseal.rng import Rng


def independent_models(model: Classifier, data: Split, count: int) -> list[Classifier]:
    """``count`` models trained from fresh weights by the recipe in the model's metadata, or the default one.

    They are no secret: the same model and data give the same ones, so that they can be kept.

    Raises:
        InputError: a model without classes, or an architecture whose weights cannot be drawn again.
        TrainingError: a training diverged.
    """
    return [independent_model(model, data, index) for index in range(count)]


def independent_model(model: Classifier, data: Split, index: int, progress: Progress | None = None) -> Classifier:
    """One of ``independent_models``."""
    model.spec.require_classes()
    rng = Rng(0).child("independent", index)
    return train(fresh(model, rng), data, recipe=stated_recipe(model), rng=rng, progress=progress)


def stated_recipe(model: Classifier) -> Recipe:
    """The training recipe in the model's metadata, or the default one."""
    stated = model.metadata.get("training", {}).get("recipe", {})
    return Recipe.from_mapping({name: stated[name] for name in stated if name in Recipe.__dataclass_fields__})


def fresh(model: Classifier, rng: Rng) -> Classifier:
    """A copy with newly drawn weights; the global random state is left alone.

    Raises:
        InputError: parameters that only the architecture's own code could draw, and no architecture named.
    """
    if model.architecture is not None:
        return Classifier(initialise(model.architecture, model.spec, rng).module, model.spec)
    result = model.copy()
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(rng.integer())
        for name, layer in result.module.named_modules():
            own = list(layer.parameters(recurse=False))
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
            elif own:
                do = "train independent models yourself and pass them"
                raise InputError("layers whose weights can be drawn again", found=name or "the module", do=do)
    return result
