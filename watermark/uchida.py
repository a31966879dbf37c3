"""Uchida: bits in the weights of one layer, averaged over its outputs.

Source: Y. Uchida, Y. Nagai, S. Sakazawa, S. Satoh, "Embedding watermarks into deep neural networks", ICMR 2017 (arXiv
1701.04082), section 3. Ours: a masked message (exact p-value), and a robust recipe beside the paper's loss.
"""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from torch import Tensor

from deepseal.parameters import parameter
from deepseal.watermark.key import Key
from deepseal.watermark.scheme import Extraction, Published
from deepseal.watermark.weights import WeightScheme


@dataclasses.dataclass(frozen=True, kw_only=True)
class Uchida(WeightScheme):
    """Uchida et al., 2017: w is the weight tensor's mean over output channels, bit i is 1 where (X w)_i > 0.

    ``recipe="paper"`` adds lambda E_R(w), the binary cross-entropy of sigmoid(X w) and the message (equations 2 to 4;
    lambda is 0.01).
    """

    name: ClassVar[str] = "uchida"

    bits: int = parameter(64, "length of the message (the paper: 256)", minimum=1, maximum=100_000)
    # A second mark only has to move the mean of a layer, which costs the network nothing: so ours is far out, and holds
    # few bits for the features. Further out, alignment no longer finds the neurons of the unmarked original in it.
    margin: float = parameter(
        10.0, "score of each bit, in standard deviations of the original's (robust)", minimum=0.0, maximum=1000.0
    )

    def width(self, shape: tuple[int, ...]) -> int:
        """S x S x D: kernel positions times input channels."""
        return math.prod(shape[1:])

    def vector(self, weight: Tensor, key: Key) -> Tensor:
        """The mean over outputs, flattened (section 3.2)."""
        return weight.mean(dim=0).flatten()

    def published(self, extraction: Extraction, key: Key) -> Published:
        """The paper states no threshold; its tables count a mark as present at a bit error rate of 0."""
        matches = int((extraction.bits == key.message()).sum())
        return Published("bit error rate 0", matches == key.bits, matches, key.bits, key.bits)
