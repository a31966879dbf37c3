"""Rescaling: neurons are made larger or smaller, or change their sign, and their readers undo it.

Source: Y. Yan et al., USENIX Security 2023 (scaling of ReLU networks).
A ReLU passes on a positive factor, an odd function such as tanh a change of sign, and what lies between a convolution
and its batch normalisation both.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any, ClassVar

import torch

from deepseal.adapter import Classifier, Split
from deepseal.adapter.rewiring import Scale, rewired
from deepseal.adapter.training import Progress
from deepseal.adapter.wiring import Wiring
from deepseal.attacks.base import Removed
from deepseal.attacks.removal.preserving import preserving
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rescale(Parameters):
    """Factors drawn evenly on a logarithmic scale between 1 / ``factor`` and ``factor``, a neuron each."""

    name: ClassVar[str] = "rescale"

    factor: float = parameter(4.0, "largest factor", minimum=1.0, maximum=1e4)
    signs: bool = parameter(True, "also change signs where the function between layers is odd")

    def remove(self, model: Classifier, data: Split, *, rng: Rng, progress: Progress | None = None) -> Removed:
        """Rescale a copy; ``data`` prove that the function is the same."""

        def change(wiring: Wiring) -> tuple[Classifier, dict[str, Any]]:
            wiring.free()
            scales: dict[int, Scale] = {}
            scaled = flipped = 0
            for index, segment in enumerate(wiring.segments):
                width = wiring.groups[segment.group].width
                generator = rng.child("factor", index).torch()
                exponents = 2.0 * torch.rand(width, generator=generator, dtype=torch.float64) - 1.0
                signs = 1.0 - 2.0 * torch.randint(2, (width,), generator=generator, dtype=torch.float64)
                factors = torch.ones(width, dtype=torch.float64)
                if segment.law in ("any", "positive") and self.factor > 1:
                    factors = torch.exp(math.log(self.factor) * exponents)
                    scaled += width
                if segment.law in ("any", "sign") and self.signs:
                    factors = factors * signs
                    flipped += int((signs < 0).sum())
                if not bool((factors == 1).all()):
                    scales[index] = Scale(torch.ones(width, dtype=torch.float64), factors)
            if not scales:
                laws = sorted({s.law for s in wiring.segments})
                do = "use another attack; sigmoid and GELU, for instance, pass on no factor"
                raise InputError("activations that pass on a factor or a sign", found=str(laws), do=do)
            result = model.copy()
            rewired(model, wiring, {}, scales, result.module)
            return result, {"neurons_scaled": scaled, "signs_changed": flipped}

        return preserving(model, data, change)
