"""The Jacobian-based saliency map attack: few features, changed a lot.

Source: N. Papernot, P. McDaniel, S. Jha, M. Fredrikson, Z. B. Celik, A. Swami, "The limitations of deep learning in
adversarial settings", IEEE EuroS&P 2016, algorithm 3 and equations 8, 9.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import Differentiable, Split
from deepseal.adapter.quick import quick_copy
from deepseal.attacks.base import Perturbed
from deepseal.attacks.evasion.pgd import gradient_of
from deepseal.attacks.evasion.search import attacked
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

_BATCH = 32  # every pair of features of every input is looked at
_WIDEST = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class JSMA(Parameters):
    """Papernot et al., 2016: the pair of features that helps a target class most and the others least, step by step.

    The target is the likeliest wrong class.
    """

    name: ClassVar[str] = "jsma"

    theta: float = parameter(1.0, "change of a feature in a step, as a share of the bounds' width", minimum=-1.0)
    gamma: float = parameter(0.15, "most features that are changed, as a share", minimum=0.0, maximum=1.0)

    def perturb(self, model: Differentiable, data: Split, *, rng: Rng) -> Perturbed:
        """Change pairs of features until the label changes.

        Raises:
            InputError: more than 4,096 features (every pair is looked at), or see ``search.attacked``.
        """
        model.spec.require_plain("an evasion attack")
        model.spec.require_classes()
        size = data.tensor[0].numel() if len(data) else 0
        if size > _WIDEST or self.theta == 0:
            found = f"{size} features, theta {self.theta:g}"
            raise InputError(f"at most {_WIDEST} features and a theta that is not 0", found=found, do="use cw or pgd")
        quick = quick_copy(model)

        def search(x: Tensor, y: Tensor, _generator: torch.Generator) -> Tensor:
            return self._walk(quick, x, y)

        return attacked(model, data, search, rng=rng, batch=_BATCH)

    def _walk(self, model: Differentiable, x: Tensor, y: Tensor) -> Tensor:
        low, high = model.spec.bounds
        step = self.theta * (high - low)
        if not len(x):
            return x
        target = model.query(x).scatter(1, y[:, None], float("-inf")).argmax(dim=1)
        moved, going = x.clone(), torch.arange(len(x))
        for _ in range(int(self.gamma * x[0].numel() / 2)):
            going = going[model.query(moved[going]).argmax(dim=1) == y[going]]
            if not len(going):
                break
            here = moved[going]
            pair, there = self._pair(model, here, target[going])
            going, here = going[there], here[there]
            flat = here.flatten(1).scatter_add(1, pair[there], torch.full(pair[there].shape, step))
            moved[going] = flat.clamp(low, high).reshape(here.shape)
        return moved

    def _pair(self, model: Differentiable, x: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """(N, 2) features of the greatest saliency, and (N,) whether any pair has one."""
        low, high = model.spec.bounds
        index = target[:, None]
        own = gradient_of(lambda z: model.logits(z).softmax(1).gather(1, index.to(z.device)).squeeze(1), x).flatten(1)
        rest = -own  # probabilities sum to 1
        free = (x < high if self.theta > 0 else x > low).flatten(1)
        direction = 1.0 if self.theta > 0 else -1.0
        alpha = direction * (own[:, :, None] + own[:, None, :])
        beta = direction * (rest[:, :, None] + rest[:, None, :])
        allowed = (alpha > 0) & (beta < 0) & free[:, :, None] & free[:, None, :]
        allowed &= ~torch.eye(own.shape[1], dtype=torch.bool)
        saliency = torch.where(allowed, -alpha * beta, torch.zeros_like(alpha)).flatten(1)
        best, place = saliency.max(dim=1)
        pair = torch.stack([place // own.shape[1], place % own.shape[1]], dim=1)
        return pair, best > 0
