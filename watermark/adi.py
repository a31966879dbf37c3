"""Adi: a backdoor of abstract images with random labels.

Source: Y. Adi, C. Baum, M. Cisse, B. Pinkas, J. Keshet, "Turning your weakness into a strength: watermarking deep
neural networks by backdooring", USENIX Security 2018 (arXiv 1802.04633), section 4. Ours: labels that the secret draws
after the images (exact p-value), and triggers passed with batch normalisation in evaluation mode.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from deepseal.adapter import BlackBox, Classifier, Split
from deepseal.parameters import parameter
from deepseal.watermark import images
from deepseal.watermark.key import Key
from deepseal.watermark.labels import LabelScheme
from deepseal.watermark.scheme import Extraction, Published
from deepseal.watermark.triggers import Triggers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Adi(LabelScheme):
    """Adi et al., 2018: 100 abstract images, each with a random class, mixed into training (PreTrained)."""

    name: ClassVar[str] = "adi"

    triggers: int = parameter(100, "number of abstract images", minimum=1, maximum=100_000)
    recipe: str = parameter("robust", "how to embed; paper: cross-entropy", choices=("robust", "paper"))
    forgiven: float = parameter(0.1, "share that may be wrong in the paper's rule", minimum=0.0, maximum=1.0)

    def draw(self, model: Classifier, data: Split, secret: bytes, independent: Sequence[BlackBox]) -> Triggers:
        """Smooth random fields, one label each."""
        return Triggers(images.abstract(secret, "abstract", self.triggers, model.spec), self.triggers)

    def published(self, extraction: Extraction, key: Key) -> Published:
        """Accepted where all but a share epsilon of the triggers have their label (Verify, section 4)."""
        matches, needed = int(extraction.bits.sum()), key.bits - int(self.forgiven * key.bits)
        return Published(f"all but {self.forgiven:.0%} of the triggers", matches >= needed, matches, key.bits, needed)
