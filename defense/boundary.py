"""First-order distance to the decision boundary: the margin over the length of its gradient.

Source: the linearised minimum step of S. Moosavi-Dezfooli, A. Fawzi, P. Frossard, "DeepFool", CVPR 2016, equation 7,
towards the runner-up. Attacks that stop at the boundary leave their inputs near it.
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

_FLOOR = 1e-12


@dataclasses.dataclass(frozen=True, kw_only=True)
class BoundaryDistance(Parameters):
    """How near the decision boundary an input lies, to first order: minus the log of the distance."""

    name: ClassVar[str] = "dist"

    @property
    def needs(self) -> Needs:
        """One pass with gradients; its own gradient takes second derivatives."""
        return Needs(access="gradient", passes=1)

    def placed(self, model: BlackBox) -> BoundaryDistance:
        """Itself.

        Raises:
            InputError: a model that only answers.
        """
        if not hasattr(model, "logits"):
            found, do = "a model that only answers", "leave dist out"
            raise InputError("a model whose gradients reach the input, for dist", found=found, do=do)
        return self

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Nothing to learn."""
        return {}

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) log of gradient length over margin."""
        with torch.enable_grad():
            x = context.x if context.graph else context.x.detach().clone().requires_grad_(True)
            logits = context.logits if context.graph else context.model.logits(x)  # type: ignore[attr-defined]
            own = logits.gather(1, context.predicted[:, None])[:, 0]
            margin = own - logits.scatter(1, context.predicted[:, None], -torch.inf).amax(dim=1)
            (gradient,) = torch.autograd.grad(margin.sum(), x, create_graph=context.graph)
            length = gradient.flatten(1).square().sum(dim=1).clamp_min(_FLOOR).sqrt()
            found = length.log() - margin.clamp_min(_FLOOR).log()
        return found if context.graph else found.detach().float().cpu()
