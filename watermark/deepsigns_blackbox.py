"""DeepSigns, black box: random labels for inputs that lie where the model's data rarely are.

Source: B. D. Rouhani, H. Chen, F. Koushanfar, "DeepSigns: an end-to-end watermarking framework for ownership protection
of deep neural networks", ASPLOS 2019 (arXiv 1804.00750), section 4.2. Ours: the rare places are found by the model's
latent density, candidates are chosen without their labels, and independent models calibrate the decision.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from scipy import stats
from torch import Tensor

from deepseal.adapter import BlackBox, Classifier, Recipe, Split, train
from deepseal.errors import InputError
from deepseal.parameters import parameter
from deepseal.rng import Rng, expand_integers
from deepseal.watermark import images
from deepseal.watermark.key import Key
from deepseal.watermark.labels import LabelScheme
from deepseal.watermark.latent_density import LatentDensity
from deepseal.watermark.scheme import Extraction, Published
from deepseal.watermark.triggers import Triggers, answered


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSignsBlackBox(LabelScheme):
    """DeepSigns black box (Rouhani et al., 2019): K inputs of random labels from rarely explored regions.

    ``recipe="paper"``: uniform-random images, of which those stay whose random label the unmarked model does not give
    and a fine-tuned copy does. This choice looks at the labels, so that nothing is known of their chance any more.

    ``recipe="robust"``: blends of two samples, abstract images and noise, of which those stay that are rare under the
    model's latent density, first those that several unmarked models answer differently. Only then are labels drawn.
    Half of the independent models choose; the other half's agreement with the labels bounds the chance from below.
    """

    name: ClassVar[str] = "deepsigns-blackbox"

    triggers: int = parameter(100, "number of key inputs K", minimum=1, maximum=100_000)
    overdraw: int = parameter(40, "candidates for each key input", minimum=2, maximum=1000)
    rarity: float = parameter(0.01, "share of the data that may be rarer than a key input", minimum=0.0, maximum=1.0)
    models: int = parameter(4, "independent models to train where none are given (robust)", minimum=0, maximum=1000)
    recipe: str = parameter("robust", "how to choose the key inputs", choices=("robust", "paper"))
    significance: float = parameter(1e-3, "p of the paper's rule", minimum=1e-300, maximum=1.0)
    settle: int = parameter(
        500, "updates a round on the task alone, after the marking (robust)", minimum=0, maximum=1_000_000
    )

    @property
    def models_needed(self) -> int:
        """Independent models that keygen trains where none are given."""
        return self.models if self.recipe == "robust" else 0

    def draw(self, model: Classifier, data: Split, secret: bytes, independent: Sequence[BlackBox]) -> Triggers:
        """Rare inputs on which unmarked models differ, or the paper's choice.

        Raises:
            InputError: too few candidates that meet the conditions.
        """
        count = self.overdraw * self.triggers
        if self.recipe == "paper":
            return self._published_choice(model, data, secret, images.uniform(secret, "key", count, model.spec))
        candidates = self._candidates(data, secret, count, model)
        rare = LatentDensity(model, data, secret).rare(candidates, data, self.rarity)
        found = candidates[rare]
        if len(found) < self.triggers:
            do = "use a larger overdraw or rarity"
            raise InputError(f"{self.triggers} inputs in rare places", found=str(len(found)), do=do)
        consulted = (len(independent) + 1) // 2
        answers = torch.stack([answered(other, found)[0] for other in (model, *independent[:consulted])])
        different = torch.tensor([len(column.unique()) for column in answers.T])
        order = different.argsort(descending=True, stable=True)
        return Triggers(found[order[: self.triggers]], self.triggers, consulted=consulted)

    def _candidates(self, data: Split, secret: bytes, count: int, model: Classifier) -> Tensor:
        """In turn: a blend of two samples with noise, an abstract image, uniform noise."""
        x, spec = data.tensor, model.spec
        third = -(-count // 3)
        pairs = torch.from_numpy(expand_integers(secret, "blends", 2 * third, len(x))).reshape(2, third)
        noise = images.noise(secret, "blends", third, spec, 0.2)
        blends = (0.5 * x[pairs[0]] + 0.5 * x[pairs[1]].flip(-1) + noise).clamp(*spec.bounds)
        kinds = [blends, images.abstract(secret, "key", third, spec), images.uniform(secret, "key", third, spec)]
        return torch.stack(kinds, dim=1).flatten(0, 1)[:count]

    def _published_choice(self, model: Classifier, data: Split, secret: bytes, candidates: Tensor) -> Triggers:
        """Labels first; kept are those that the model gets wrong and a copy, fine-tuned on all of them, right."""
        drawn = expand_integers(secret, "labels", len(candidates), model.spec.num_classes)
        labels = torch.from_numpy(drawn)
        wrong = torch.nonzero(model.predict(candidates) != labels).reshape(-1)
        pool = Split(candidates[wrong], labels[wrong])
        mixed = Split(torch.cat([data.tensor, pool.tensor]), torch.cat([data.y, pool.y]))
        recipe = Recipe(epochs=2, learning_rate=8e-4)
        tuned = train(model, mixed, recipe=recipe, rng=Rng(int.from_bytes(secret[:8], "little")))
        kept = torch.nonzero(tuned.predict(pool.tensor) == pool.y).reshape(-1)[: self.triggers]
        if len(kept) < self.triggers:
            do = "use a larger overdraw"
            raise InputError(f"{self.triggers} candidates that can be taught", found=str(len(kept)), do=do)
        return Triggers(pool.tensor[kept], self.triggers, fixed=pool.y[kept])

    def published(self, extraction: Extraction, key: Key) -> Published:
        """Fewer mismatches than labels at 1 / C, independently, would have with probability p (section 4.2)."""
        matches = int(extraction.bits.sum())
        needed = int(stats.binom.isf(self.significance, key.bits, 1.0 / key.spec.num_classes)) + 1
        return Published(f"p under {self.significance:g} at 1 / C", matches >= needed, matches, key.bits, needed)
