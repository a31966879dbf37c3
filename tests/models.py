"""Models that the tests train."""

from __future__ import annotations

from deepseal.adapter import Classifier, Dataset, Recipe, initialise, train
from deepseal.rng import Rng


def trained(dataset: Dataset, seed: int, arch: str = "deepseal.adapter.zoo:mlp", epochs: int = 15) -> Classifier:
    """A model trained on digits, with the metadata that the command line writes."""
    recipe = Recipe(epochs=epochs, batch_size=64)
    model = train(initialise(arch, dataset.spec, Rng(seed)), dataset.train, recipe=recipe, rng=Rng(seed))
    training = {"recipe": recipe.as_dict(), "updates": recipe.total_steps(len(dataset.train))}
    return model.copy(metadata={"training": training})
