"""Quantisation as deployed: weights are rounded to few bits and back.

Source: B. Jacob et al., "Quantization and training of neural networks for efficient integer-arithmetic-only inference",
CVPR 2018; R. Krishnamoorthi, "Quantizing deep convolutional networks for efficient inference", 2018, section 2:
symmetric, one scale an output channel.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import Classifier, Split
from deepseal.adapter.capture import PARAMETRIC, require_layers
from deepseal.adapter.training import Progress
from deepseal.attacks.base import Removed, weight_change
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

_FLOATS = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantise(Parameters):
    """A round trip of the weights through integers (linear and convolutional layers) or half floats (everything)."""

    name: ClassVar[str] = "quantise"

    format: str = parameter("int", "numbers that the weights are rounded to", choices=("int", *_FLOATS))
    bits: int = parameter(8, "width of the integers", minimum=2, maximum=16)

    def remove(self, model: Classifier, data: Split, *, rng: Rng, progress: Progress | None = None) -> Removed:
        """Round the weights of a copy. The thief's data are not needed.

        Raises:
            InputError: TorchScript, no linear or convolutional layer, or one whose weight is computed from others.
        """
        require_layers(model.module)
        result = model.copy()
        layers = {name: layer for name, layer in result.module.named_modules() if isinstance(layer, PARAMETRIC)}
        computed = [name for name, layer in layers.items() if "weight" not in layer._parameters]
        if not layers or computed:
            found = f"others: {computed}" if computed else "none"
            do = "remove the parametrizations first" if computed else "use another attack"
            raise InputError("linear or convolutional layers with plain weights", found=found, do=do)
        levels: dict[str, int] = {}
        with torch.no_grad():
            if self.format in _FLOATS:
                for tensor in (*result.module.parameters(), *result.module.buffers()):
                    if tensor.is_floating_point():
                        tensor.copy_(tensor.to(_FLOATS[self.format]))
            for name, layer in layers.items():
                if self.format == "int":
                    layer.weight.copy_(rounded(layer.weight, self.bits))
                levels[name] = max(len(row.unique()) for row in layer.weight.detach().flatten(1))
        evidence = {
            "relative_weight_change": weight_change(model, result),
            "most_levels_of_a_channel": levels,
            "levels_allowed": 2**self.bits - 1 if self.format == "int" else None,
        }
        return Removed(result, evidence)


def rounded(weight: Tensor, bits: int) -> Tensor:
    """Weights as s round(w / s), s = max |w| / (2^(bits - 1) - 1) of each output channel (symmetric quantiser)."""
    rows = weight.flatten(1)
    scale = rows.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    return ((rows / scale).round() * scale).reshape(weight.shape)
