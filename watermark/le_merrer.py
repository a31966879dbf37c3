"""Le Merrer: the frontier between classes, stitched elsewhere.

Source: E. Le Merrer, P. Perez, G. Tredan, "Adversarial frontier stitching for remote neural network watermarking",
Neural Computing and Applications 2020 (arXiv 1711.01894), section 4. Ours: a secret coin says on which side of the
frontier a trigger ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import torch
from scipy import stats
from torch import Tensor

from deepseal.adapter import BlackBox, Classifier, Split
from deepseal.adapter.classifier import BATCH
from deepseal.attacks.evasion.pgd import ascent, cross_entropy_of
from deepseal.errors import InputError
from deepseal.parameters import parameter
from deepseal.rng import expand_choice
from deepseal.watermark.key import Key
from deepseal.watermark.labels import LabelScheme
from deepseal.watermark.scheme import Extraction, Published
from deepseal.watermark.triggers import Triggers

_OVERDRAWN = 16  # samples tried for each trigger wanted


@dataclasses.dataclass(frozen=True, kw_only=True)
class LeMerrer(LabelScheme):
    """Le Merrer et al., 2020: adversarial examples of one signed gradient step, half of which fool the model.

    The paper teaches the model the true class of all of them, which unmarked models know of many (those that do not
    fool, and the more the better they are trained), so that no rate can be given. ``recipe="robust"`` lets each bit of
    the masked message choose between the true class and the one that the step leads to: half of the frontier moves one
    way, half the other. Of a model that is independent of the key an answer of one of the two is a fair coin; any other
    answer is no vote.
    """

    name: ClassVar[str] = "le-merrer"

    triggers: int = parameter(
        128, "number of adversarial examples, and bits of the message", minimum=1, maximum=100_000
    )
    epsilon: float = parameter(0.25, "size of the step, as a share of the range", minimum=0.0, maximum=1.0)
    recipe: str = parameter("robust", "what to teach", choices=("robust", "paper"))

    def draw(self, model: Classifier, data: Split, secret: bytes, independent: Sequence[BlackBox]) -> Triggers:
        """True adversaries (they fool the model) and false ones in equal numbers, as far as there are enough.

        Raises:
            InputError: fewer correctly classified samples than triggers.
        """
        drawn = data.take(_chosen(secret, len(data), _OVERDRAWN * self.triggers))
        right = drawn.take(torch.nonzero(model.predict(drawn.x) == drawn.y).reshape(-1))
        if len(right) < self.triggers:
            do = "use more data or fewer triggers"
            raise InputError(f"{self.triggers} samples that the model classifies right", found=str(len(right)), do=do)
        adversarial = signed_gradient_step(model, right, self.epsilon)
        scores = model.query(adversarial)
        fooled = scores.argmax(dim=1) != right.y
        other = scores.scatter(1, right.y[:, None], float("-inf")).argmax(dim=1)
        true, false = (torch.nonzero(mask).reshape(-1) for mask in (fooled, ~fooled))
        half = min(len(true), max(self.triggers // 2, self.triggers - len(false)))
        index = torch.cat([true[:half], false[: self.triggers - half]])
        sides = torch.stack([right.y, other], dim=1)[index]
        if self.recipe == "paper":
            return Triggers(adversarial[index], self.triggers, fixed=sides[:, 0])
        return Triggers(adversarial[index], self.triggers, sides=sides)

    def published(self, extraction: Extraction, key: Key) -> Published:
        """As many labels as a coin would give with a probability under 0.05 (section 4.2)."""
        matches = int((extraction.bits == key.message())[extraction.usable].sum())
        needed = int(stats.binom.isf(0.05, key.bits, 0.5)) + 1
        return Published("more labels than a coin gives in 95 %", matches >= needed, matches, key.bits, needed)


def signed_gradient_step(model: Classifier, data: Split, epsilon: float) -> Tensor:
    """One signed gradient step within the bounds (Goodfellow et al., 2015); epsilon is a share of the range."""
    parts = []
    for x, y in zip(data.tensor.split(BATCH), data.y.split(BATCH), strict=True):
        objective = cross_entropy_of(model, y)
        parts.append(ascent(x, objective, model.spec, epsilon=epsilon, steps=1, step_size=epsilon))
    return torch.cat(parts)


def _chosen(secret: bytes, population: int, count: int) -> Tensor:
    return torch.from_numpy(expand_choice(secret, "sources", population, min(population, count)))
