"""Zhang: a class that a pattern turns into another one.

Source: J. Zhang, Z. Gu, J. Jang, H. Wu, M. P. Stoecklin, H. Huang, I. Molloy, "Protecting intellectual property of deep
neural networks with watermarking", AsiaCCS 2018, section 4. Ours: many patterns with random targets, read by vote.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepseal.adapter import BlackBox, Classifier, InputSpec, Split, load_data
from deepseal.errors import InputError
from deepseal.parameters import parameter
from deepseal.rng import expand_choice, expand_integers
from deepseal.watermark import images
from deepseal.watermark.key import Key
from deepseal.watermark.labels import LabelScheme
from deepseal.watermark.scheme import Extraction, Published
from deepseal.watermark.triggers import Triggers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Zhang(LabelScheme):
    """Zhang et al., 2018: a stamp on images of a source class (content), a noise pattern on them, or unrelated images.

    The paper teaches one pattern and one target class. All its triggers then stand or fall together: a model that takes
    the pattern for the target by itself agrees on all of them, at chance 1 / (C - 1) and not to the power of their
    number. So ``recipe="robust"`` teaches ``groups`` patterns, each with its own source class and a random other class
    as target; the answers to a pattern's ``votes`` images are one vote. ``recipe="paper"`` is one group, of which
    ``verify`` can say no more than that.
    """

    name: ClassVar[str] = "zhang"

    kind: str = parameter("content", "what the triggers are", choices=("content", "noise", "unrelated"))
    recipe: str = parameter("robust", "how many patterns", choices=("robust", "paper"))
    groups: int = parameter(32, "patterns (robust)", minimum=1, maximum=10_000)
    votes: int = parameter(8, "images a pattern (robust)", minimum=1, maximum=10_000)
    keys: int = parameter(100, "images of the one pattern (paper)", minimum=1, maximum=100_000)
    size: float = parameter(0.4, "side of the stamp, as a share of the image's (content)", minimum=0.01, maximum=1.0)
    std: float = parameter(0.4, "standard deviation of the noise, as a share of the range", minimum=0.0, maximum=10.0)
    settle: int = parameter(
        150, "updates a round on the task alone, after the marking (robust)", minimum=0, maximum=1_000_000
    )
    source: str | None = parameter(None, "data set of the unrelated images; none draws abstract ones (unrelated)")

    def draw(self, model: Classifier, data: Split, secret: bytes, independent: Sequence[BlackBox]) -> Triggers:
        """One pattern a group, on ``votes`` images of the group's source class.

        Raises:
            InputError: a source of unrelated images with fewer classes than groups.
        """
        groups, votes = (1, self.keys) if self.recipe == "paper" else (self.groups, self.votes)
        if self.kind == "unrelated":
            return Triggers(self._unrelated(secret, groups, votes, model.spec), groups)
        x, avoided = sourced(data, secret, groups, votes)
        low, high = model.spec.bounds
        if self.kind == "noise":
            pattern = images.noise(secret, "zhang", groups, model.spec, self.std).repeat_interleave(votes, 0)
            return Triggers((x + pattern).clamp(low, high), groups, avoided)
        stamps = images.stamps(secret, "zhang", groups, model.spec, self.size)
        values, places = (part.repeat_interleave(votes, 0) for part in stamps)
        return Triggers(torch.where(places, values, x), groups, avoided)

    def _unrelated(self, secret: bytes, groups: int, votes: int, spec: InputSpec) -> Tensor:
        """A group's images are of one class of ``source``, or variations of one abstract image."""
        low, high = spec.bounds
        if self.source is None:
            motif = images.abstract(secret, "zhang", groups, spec).repeat_interleave(votes, 0)
            return (motif + images.noise(secret, "zhang/variation", groups * votes, spec, 0.1)).clamp(low, high)
        other = load_data(self.source)
        if other.spec.num_classes < groups or len(spec.shape) < 2 or len(other.spec.shape) < 2:
            found = f"{other.spec.num_classes} classes of shape {other.spec.shape}"
            do = "use fewer groups or other data"
            raise InputError(f"images of {groups} classes in {self.source}", found=found, do=do)
        classes = expand_choice(secret, "zhang/classes", other.spec.num_classes, groups)
        x = torch.cat([_members(other.train, int(c), secret, f"zhang/images/{c}", votes) for c in classes])
        x = (x - other.spec.bounds[0]) / (other.spec.bounds[1] - other.spec.bounds[0])
        grey = x.reshape(len(x), -1, *x.shape[-2:]).mean(dim=1, keepdim=True)
        fitted = nn.functional.interpolate(grey, size=spec.shape[-2:], mode="bilinear")
        return (low + (high - low) * fitted).expand(-1, math.prod(spec.shape[:-2]), -1, -1).reshape(len(x), *spec.shape)

    def published(self, extraction: Extraction, key: Key) -> Published:
        """The paper compares the share with a threshold that it does not state; nine in ten is taken."""
        matches, needed = int(extraction.bits.sum()), math.ceil(0.9 * key.bits)
        return Published("nine in ten (the paper states no number)", matches >= needed, matches, key.bits, needed)


def sourced(data: Split, secret: bytes, groups: int, votes: int) -> tuple[Tensor, Tensor]:
    """(groups * votes, …) images, each group of one class, and (groups,) those source classes."""
    present = data.y.unique()
    classes = present[torch.from_numpy(expand_integers(secret, "sources", groups, len(present)))]
    x = [_members(data, int(c), secret, f"sources/{group}", votes) for group, c in enumerate(classes)]
    return torch.cat(x), classes


def _members(data: Split, label: int, secret: bytes, purpose: str, count: int) -> Tensor:
    """Images of a class, distinct where there are enough."""
    members = torch.nonzero(data.y == label).reshape(-1)
    if len(members) >= count:
        chosen = expand_choice(secret, purpose, len(members), count)
    else:
        chosen = expand_integers(secret, purpose, count, len(members))
    return data.tensor[members[torch.from_numpy(chosen)]]
