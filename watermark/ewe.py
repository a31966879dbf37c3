"""EWE: triggers entangled with the classes that they are labelled with, so that copying the one copies the other.

Source: H. Jia, C. A. Choquette-Choo, V. Chandrasekaran, N. Papernot, "Entangled watermarks as a defense against model
extraction", USENIX Security 2021 (arXiv 2002.12200), sections 3 and 4; the loss: N. Frosst, N. Papernot, G. Hinton,
"Analyzing and improving representations with the soft nearest neighbor loss", ICML 2019. Ours: many patterns with
random targets and random places, and a temperature that follows the distances instead of a trained one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepseal.adapter import BlackBox, Classifier, Split
from deepseal.adapter.capture import evaluating, forward_to
from deepseal.adapter.layers import hidden_layers
from deepseal.adapter.training import Loss
from deepseal.parameters import parameter
from deepseal.watermark import images
from deepseal.watermark.key import Key
from deepseal.watermark.labels import GapLoss, LabelScheme
from deepseal.watermark.scheme import Extraction, Published
from deepseal.watermark.triggers import Triggers
from deepseal.watermark.zhang import sourced


@dataclasses.dataclass(frozen=True, kw_only=True)
class EWE(LabelScheme):
    """Jia et al., 2021: CE on data and triggers - kappa * soft nearest neighbour loss of triggers against their target.

    ``recipe="paper"`` has one pattern, one source and one target class, which proves no more than 1 / (C - 1) (see
    ``Zhang``); ``recipe="robust"`` has ``groups`` of them, read by vote.
    """

    name: ClassVar[str] = "ewe"

    recipe: str = parameter("robust", "how many patterns", choices=("robust", "paper"))
    groups: int = parameter(32, "patterns (robust)", minimum=1, maximum=10_000)
    votes: int = parameter(8, "images a pattern (robust)", minimum=1, maximum=10_000)
    keys: int = parameter(100, "images of the one pattern (paper)", minimum=1, maximum=100_000)
    size: float = parameter(0.4, "side of the pattern, as a share of the image's", minimum=0.01, maximum=1.0)
    kappa: float = parameter(1.0, "weight of the soft nearest neighbour loss", minimum=0.0, maximum=1e6)
    temperature: float = parameter(0.5, "temperature, in mean squared distances", minimum=1e-6, maximum=1e6)
    layers: tuple[str, ...] | None = parameter(None, "layers to entangle in; none takes the last three hidden ones")

    def draw(self, model: Classifier, data: Split, secret: bytes, independent: Sequence[BlackBox]) -> Triggers:
        """One pattern a group, on images of the group's source class."""
        groups, votes = (1, self.keys) if self.recipe == "paper" else (self.groups, self.votes)
        x, avoided = sourced(data, secret, groups, votes)
        stamps = images.stamps(secret, "ewe", groups, model.spec, self.size)
        values, places = (part.repeat_interleave(votes, 0) for part in stamps)
        return Triggers(torch.where(places, values, x), groups, avoided)

    def loss(self, model: Classifier, data: Split, key: Key) -> Loss:
        """The triggers' cross-entropy less kappa times their entanglement."""
        return EntangledLoss(model, data, key, self)

    def published(self, extraction: Extraction, key: Key) -> Published:
        """The paper tests whether the share is above chance; a claim needs it clearly above: half is taken."""
        matches, needed = int(extraction.bits.sum()), math.ceil(0.5 * key.bits)
        return Published("half of them (the paper tests the mean)", matches >= needed, matches, key.bits, needed)


class EntangledLoss(GapLoss):
    """``GapLoss`` - kappa * mean over layers of the soft nearest neighbour loss; large where marks and data mix."""

    def __init__(self, model: Classifier, data: Split, key: Key, scheme: EWE) -> None:
        super().__init__(model, key, scheme)
        self._ewe, self._natural = scheme, data.tensor
        classes = range(model.spec.num_classes)
        self._members = [torch.nonzero(data.y == c).reshape(-1) for c in classes]
        readings = hidden_layers(model)
        self._layers = list(scheme.layers or [name for name, _, _ in readings[-3:]])

    def mark(self, module: nn.Module, generator: torch.Generator) -> Iterator[Tensor]:
        """The entanglement, and then the triggers' cross-entropy."""
        index = torch.randperm(len(self._x), generator=generator)[: self._scheme.batch]
        index = index[torch.tensor([len(self._members[c]) > 0 for c in self._y[index].tolist()])]
        if len(index) and self._ewe.kappa:
            yield from self._entanglement(module, index, generator)
        yield from super().mark(module, generator)

    def _entanglement(self, module: nn.Module, index: Tensor, generator: torch.Generator) -> Iterator[Tensor]:
        labels = self._y[index]
        drawn = [int(torch.randint(len(self._members[c]), (), generator=generator)) for c in labels.tolist()]
        natural = torch.stack([self._members[c][place] for c, place in zip(labels.tolist(), drawn, strict=True)])
        x = self._model.prepare(torch.cat([self._x[index], self._natural[natural]]))
        marked = torch.arange(2 * len(index)) < len(index)
        with evaluating(module):
            features = forward_to(module, x, self._layers)
            entangled = [
                soft_nearest_neighbour(f.flatten(1), marked, torch.cat([labels, labels]), self._ewe.temperature)
                for f in features.values()
            ]
            loss = torch.stack(entangled).mean()
            if loss.requires_grad:  # else no input has neighbours of both kinds
                yield -self._ewe.kappa * loss


def soft_nearest_neighbour(features: Tensor, marked: Tensor, classes: Tensor, temperature: float) -> Tensor:
    """-mean log (sum over neighbours of the same kind / sum over all) of exp(-d^2 / T), among inputs of one class.

    Args:
        features: (N, D) activations.
        marked: (N,) the two kinds: True for triggers, False for data.
        classes: (N,) what the inputs are taught as; only inputs of one class are neighbours.
        temperature: T as a multiple of the mean squared distance between neighbours.
    """
    marked, classes = marked.to(features.device), classes.to(features.device)
    squares = features.pow(2).sum(dim=1)
    distances = (squares[:, None] + squares[None] - 2.0 * features @ features.T).clamp_min(0.0)
    neighbours = (classes[:, None] == classes) & ~torch.eye(len(features), dtype=torch.bool, device=features.device)
    alike = neighbours & (marked[:, None] == marked)
    scale = temperature * distances.detach()[neighbours].mean().clamp_min(1e-12)
    closeness = -distances / scale
    lowest = torch.finfo(closeness.dtype).min
    same = torch.logsumexp(closeness.masked_fill(~alike, lowest), dim=1)
    every = torch.logsumexp(closeness.masked_fill(~neighbours, lowest), dim=1)
    counted = alike.any(dim=1) & (neighbours & ~alike).any(dim=1)
    if not bool(counted.any()):
        return features.new_zeros(())
    return (every - same)[counted].mean()
