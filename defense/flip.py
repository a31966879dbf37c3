"""Whether the answer is the same for the mirror image: for networks that were trained on mirrored images.

Where training used flips, clean images and their mirror images are answered alike; a perturbation fitted to one is not
fitted to the other (compare C. Xie et al., "Mitigating adversarial effects through randomization", ICLR 2018).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import BlackBox
from deepseal.defense.base import Needs, State
from deepseal.defense.context import Context, Reference
from deepseal.errors import InputError
from deepseal.parameters import Parameters
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class FlipConsistency(Parameters):
    """How much less the mirror image belongs to the predicted class: log odds before minus after."""

    name: ClassVar[str] = "flip"

    @property
    def needs(self) -> Needs:
        """One pass over the mirror image."""
        return Needs(passes=1, images=True)

    def placed(self, model: BlackBox) -> FlipConsistency:
        """Itself.

        Raises:
            InputError: inputs that are no images.
        """
        if len(model.spec.shape) != 3:
            found = f"inputs of shape {model.spec.shape}"
            raise InputError("images (C, H, W) to mirror", found=found, do="leave flip out")
        return self

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Nothing to learn."""
        return {}

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) log odds against the predicted class in the mirror image."""
        logits = context.ask(context.x.flip(-1))
        own = logits.gather(1, context.predicted[:, None])
        return torch.logsumexp(logits.scatter(1, context.predicted[:, None], -torch.inf) - own, dim=1)
