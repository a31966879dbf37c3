"""Overwriting: the thief marks the model again, with the same public scheme and a key of the thief's own.

Source: Rouhani et al. (DeepSigns, 2019), section 6.3. The thief is given good cards: the owner's scheme, recipe and,
unless ``options`` say otherwise, the default layers and carrier classes; only the secret differs.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from deepseal.adapter import Classifier, Split
from deepseal.adapter.training import Progress
from deepseal.attacks.base import Removed, weight_change
from deepseal.errors import InputError
from deepseal.parameters import Parameters, pairs, parameter
from deepseal.rng import Rng
from deepseal.watermark import SCHEMES, embed, verify


@dataclasses.dataclass(frozen=True, kw_only=True)
class Overwrite(Parameters):
    """The scheme run by the thief; ``strength`` multiplies the thief's mark loss, the updates stay the same."""

    name: ClassVar[str] = "overwrite"

    strength: float = parameter(1.0, "factor of the thief's mark loss", minimum=0.0, maximum=1e6)
    scheme: str = parameter("deepsigns", "scheme that the thief runs")
    options: tuple[str, ...] = parameter((), "parameters of that scheme, as name=value;name=value")

    def remove(self, model: Classifier, data: Split, *, rng: Rng, progress: Progress | None = None) -> Removed:
        """Embed the thief's own key into a copy, and prove that it reads there."""
        options = pairs([part for option in self.options for part in option.split(";") if part])
        scheme = SCHEMES.build(self.scheme, options)
        if not hasattr(scheme, "strength"):
            raise InputError("a scheme whose mark has a strength", found=self.scheme, do="use scheme=deepsigns")
        stronger = SCHEMES.build(self.scheme, {**options, "strength": scheme.strength * self.strength})
        key = stronger.keygen(model, data, owner="thief", rng=rng.child("key"))
        marked = embed(model, data, key, rng=rng.child("embed"), progress=progress)
        read = verify(marked, key, max_false_positive=1e-9)
        evidence = {
            "relative_weight_change": weight_change(model, marked),
            "thief_bits": read.bits,
            "thief_bit_errors": read.bit_errors,
            "thief_verdict": read.verdict,
            "thief_layers": list(key.public.get("layers", [])),
            "thief_carriers": list(key.public.get("carriers", [])),
            "thief_key": key.fingerprint(),
        }
        return Removed(marked, evidence)
