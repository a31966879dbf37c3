"""Feature squeezing: an answer that changes much when the input is simplified is suspicious.

Source: W. Xu, D. Evans, Y. Qi, "Feature squeezing: detecting adversarial examples in deep neural networks", NDSS 2018:
colour depth reduction and median smoothing, L1 distance of the softmax, maximum over the squeezers. It helps much on
MNIST because digits are nearly binary; that says little about other images.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepseal.adapter import BlackBox
from deepseal.defense.base import Needs, State
from deepseal.defense.context import Context, Reference
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureSqueezing(Parameters):
    """Xu et al., 2018: the largest change of the softmax under fewer grey levels and under a median filter."""

    name: ClassVar[str] = "squeeze"

    bits: int = parameter(1, "bits a value that are left; 0: no such squeezer", minimum=0, maximum=16)
    window: int = parameter(2, "side of the median filter; 0: no such squeezer", minimum=0, maximum=9)

    @property
    def needs(self) -> Needs:
        """One pass a squeezer; rounding and medians have a surrogate's gradient."""
        return Needs(passes=int(self.bits > 0) + int(self.window > 1), differentiable=False, images=self.window > 1)

    def placed(self, model: BlackBox) -> FeatureSqueezing:
        """Itself.

        Raises:
            InputError: a median filter for inputs that are no images, or no squeezer at all.
        """
        if self.bits == 0 and self.window < 2:
            raise InputError("at least one squeezer", found="bits=0 and window=0", do="set one of them")
        if self.window > 1 and len(model.spec.shape) != 3:
            found = f"inputs of shape {model.spec.shape}"
            raise InputError("images (C, H, W) for a median filter", found=found, do="set window=0, or leave it out")
        return self

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Nothing to learn."""
        return {}

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) L1 distances of the softmax, 0 … 2."""
        before = context.logits.softmax(dim=1)
        smooth = context.graph and context.surrogate == "smooth"
        found = []
        if self.bits:
            found.append(self._rounded(context.x, context.model.spec.bounds, smooth))
        if self.window > 1:
            found.append(self._median(context.x, context.graph, smooth))
        changes = [(context.ask(x).softmax(dim=1) - before).abs().sum(dim=1) for x in found]
        return torch.stack(changes).amax(dim=0)

    def _rounded(self, x: Tensor, bounds: tuple[float, float], smooth: bool) -> Tensor:
        (low, high), levels = bounds, 2**self.bits - 1
        scaled = (x - low) / (high - low) * levels
        through = scaled
        if smooth:
            whole = scaled.detach().floor()
            through = whole + torch.sigmoid(10.0 * (scaled - whole - 0.5))
        rounded: Tensor = through + (scaled.round() - through).detach()
        limited: Tensor = (rounded / levels * (high - low) + low).clamp(low, high)
        return limited

    def _median(self, x: Tensor, graph: bool, smooth: bool) -> Tensor:
        size, before = self.window, (self.window - 1) // 2
        padded = nn.functional.pad(x, [before, size - 1 - before] * 2, mode="replicate")
        patches = padded.unfold(2, size, 1).unfold(3, size, 1).flatten(4)
        median: Tensor = patches.median(dim=4).values
        if not graph:
            return median
        through = patches.mean(dim=4) if smooth else x
        return through + (median - through).detach()
