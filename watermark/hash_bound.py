"""Hash-bound weight mark: the bits are a hash of the secret, and choose the weights that carry them.

Source: Y. Yao, J. Song, J. Jin, "Hashed watermark as a filter: a unified defense against forging and overwriting
attacks in neural network watermarking" (NeuralMark), AAAI 2026 (arXiv 2507.11137). Ours: the hash also covers the
owner's text and everything else in the key, and a robust recipe stands beside the paper's loss.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepseal.parameters import parameter
from deepseal.watermark.key import Key
from deepseal.watermark.scheme import Extraction, Published
from deepseal.watermark.weights import WeightScheme

# Accepted at 88.3 % of 256 bits (the paper's security boundary).
_ACCEPTED = 0.883


@dataclasses.dataclass(frozen=True, kw_only=True)
class HashBound(WeightScheme):
    """NeuralMark (Yao et al., 2026): filter the weights by the message in several rounds, pool, project.

    Message b and projection X are expanded by SHAKE-256 from the secret and a digest of everything else in the key.
    Nobody can choose them: whoever wants a key for a given model has to guess secrets, at chance for every bit. A thief
    with another b overwrites other weights: after r rounds of filtering two keys share 2^-r of theirs.

    The null is exact although b also chooses the weights: given b, X is symmetric, so every bit is a fair coin.
    """

    name: ClassVar[str] = "hash-bound"

    filters: int = parameter(4, "rounds of filtering; each keeps about half of the weights", minimum=0, maximum=16)
    pooled: int = parameter(1024, "most features after average pooling", minimum=1, maximum=65_536)

    def width(self, shape: tuple[int, ...]) -> int:
        """Features after pooling: at most half of the weights that the rounds leave on average."""
        return max(1, min(self.pooled, math.prod(shape) >> (self.filters + 1)))

    def vector(self, weight: Tensor, key: Key) -> Tensor:
        """Filtered and pooled weights; zeros where the filter leaves none."""
        kept = weight.flatten()[filtered(key, weight.numel(), self.filters).to(weight.device)]
        features = int(key.public["features"])
        if not len(kept):
            return weight.new_zeros(features)
        return nn.functional.adaptive_avg_pool1d(kept[None], features)[0]

    def published(self, extraction: Extraction, key: Key) -> Published:
        """Accepted at 88.3 % of the bits and H(secret) = b; the second holds for every key by construction."""
        matches, needed = int((extraction.bits == key.message()).sum()), math.ceil(_ACCEPTED * key.bits)
        return Published("at least 88.3 % of the bits", matches >= needed, matches, key.bits, needed)


def filtered(key: Key, count: int, rounds: int) -> Tensor:
    """Positions of the weights that carry the mark: each round keeps those beside a 1 of the repeated message."""
    kept, message = torch.arange(count), torch.from_numpy(key.message()).bool()
    for _ in range(rounds):
        kept = kept[message.repeat(-(-len(kept) // len(message)))[: len(kept)]]
    return kept
