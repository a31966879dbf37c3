"""Projected gradients through a model and its detector together: wrong answers that raise no alarm.

Sources: O. Bryniarski, N. Hingun, P. Pachuca, V. Wang, N. Carlini, "Evading adversarial example detection defenses with
orthogonal projected gradient descent", ICLR 2022 (arXiv 2106.15023), section 3: selective (equation 5) and orthogonal
(equation 6) gradients; F. Tramer, N. Carlini, W. Brendel, A. Madry, "On adaptive attacks to adversarial example
defenses", NeurIPS 2020: joint losses and surrogates for steps without a gradient.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import Differentiable, Split
from deepseal.attacks.base import Guarded, Perturbed
from deepseal.attacks.evasion.guarded import Walk, adaptive, averaged_suspicion, guarded, surrogates
from deepseal.attacks.evasion.search import Search, along, ranked_class
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

_LOSSES = ("selective", "orthogonal", "joint")
_RATE = 0.25  # change of the joint weight's logit a step


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdaptivePGD(Parameters):
    """Bryniarski et al., 2021: gradients of classifier and detector, so that an input becomes wrong and unflagged.

    ``selective`` follows the classifier until the input is wrong, and the detector from then on; ``orthogonal`` does so
    too, each without its part along the other; ``joint`` follows a weighted sum, whose weight rises for the detector
    while the input is wrong and falls while it is right. Until an input is wrong for the first time its detector is not
    asked. An input keeps its first success over all losses, surrogates and restarts. The first restart sets out from
    the input itself towards any wrong class, each further one from a random point towards the next likeliest class.
    """

    name: ClassVar[str] = "adaptive-pgd"

    epsilon: float = parameter(
        0.1, "radius of the ball; a share of the bounds' width (linf), an absolute length (l2)", minimum=0.0
    )
    norm: str = parameter("linf", "norm of the ball", choices=("linf", "l2"))
    steps: int = parameter(60, "gradient steps", minimum=1, maximum=100_000)
    step_size: float = parameter(10.0, "length of all steps together, in radii", minimum=1e-6, maximum=1e6)
    restarts: int = parameter(4, "starting points for each loss and surrogate", minimum=1, maximum=10_000)
    loss: str = parameter("all", "how the two gradients are combined", choices=(*_LOSSES, "all"))
    surrogate: str = parameter(
        "both", "backward pass of steps without a gradient", choices=("identity", "smooth", "both")
    )
    eot: int = parameter(1, "draws of a random detector's noise for each gradient", minimum=1, maximum=1000)
    margin: float = parameter(0.1, "by how much the wrong logit must win before the detector's turn", minimum=0.0)

    def perturb(self, model: Differentiable, data: Split, *, rng: Rng) -> Perturbed:
        """Attack both.

        Raises:
            InputError: a model without a detector, or see ``search.first_success``.
        """
        victim = guarded(model)
        losses = _LOSSES if self.loss == "all" else (self.loss,)
        trials = [
            ({"loss": loss, "surrogate": surrogate, "restart": restart}, self._search(victim, loss, surrogate, restart))
            for restart in range(self.restarts)
            for loss in losses
            for surrogate in surrogates(self.surrogate)
        ]
        return adaptive(victim, data, trials, rng=rng)

    def _search(self, model: Guarded, loss: str, surrogate: str, restart: int) -> Search:
        def search(x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
            start = x
            if restart:
                start = self._within(x, x + self._radius(model) * _drawn(x, self.norm, generator), model)
            target = ranked_class(model, x, y, restart - 1) if restart else None
            return self._descend(model, x, start, y, target, loss, surrogate)

        return search

    def _descend(
        self, model: Guarded, x: Tensor, start: Tensor, y: Tensor, target: Tensor | None, loss: str, surrogate: str
    ) -> Tensor:
        """Of all inputs on the way the least suspicious wrong one; an input that is wrong and unflagged stops."""
        walk, here = Walk(x), start.clone()
        weight = torch.zeros(len(x))  # of the detector in the joint loss, as a logit
        reached = torch.zeros(len(x), dtype=torch.bool)
        going = torch.arange(len(x))
        for index in range(self.steps + 1):
            at = here[going]
            gap, rise = _classifier(model, at, y[going], None if target is None else target[going])
            wrong, turned = gap > 0, gap > self.margin
            reached[going] |= wrong
            asked = wrong if loss == "selective" else reached[going]
            suspicion, fall = torch.full_like(gap, float("inf")), torch.zeros_like(at)
            if bool(asked.any()):
                suspicion[asked], fall[asked] = self._detector(model, at[asked], surrogate)
            walk.meet(going, at, wrong, suspicion)
            silent = wrong & (suspicion <= model.limit)
            if index == self.steps or bool(silent.all()):
                break
            if loss == "joint":
                weight[going] += torch.where(turned, _RATE, -_RATE) * reached[going]
            direction = _combined(loss, rise, fall, turned, weight[going].sigmoid())
            step = 2.0 * self.step_size / self.steps * (1.0 - index / self.steps) * self._radius(model)
            moved = at + step * _scaled(direction, self.norm, loss == "orthogonal")
            here[going] = self._within(x[going], moved, model)
            going = going[~silent]
        return walk.best

    def _detector(self, model: Guarded, x: Tensor, surrogate: str) -> tuple[Tensor, Tensor]:
        """(N,) suspicion, and the direction in which it falls."""
        with torch.enable_grad():
            leaf = x.detach().clone().requires_grad_(True)
            values = averaged_suspicion(model, leaf, surrogate, self.eot)
            (gradient,) = torch.autograd.grad(values.sum(), leaf)
        return values.detach().to(x).cpu(), -gradient.nan_to_num(0.0, 0.0, 0.0)

    def _radius(self, model: Guarded) -> float:
        low, high = model.spec.bounds
        return self.epsilon * (high - low) if self.norm == "linf" else self.epsilon

    def _within(self, x: Tensor, moved: Tensor, model: Guarded) -> Tensor:
        change, radius = moved.clamp(*model.spec.bounds) - x, self._radius(model)
        if self.norm == "linf":
            change = change.clamp(-radius, radius)
        else:
            change = change * (radius / _lengths(change).clamp_min(1e-30)).clamp_max(1.0)
        return (x + change).clamp(*model.spec.bounds)


def _classifier(model: Guarded, x: Tensor, y: Tensor, target: Tensor | None) -> tuple[Tensor, Tensor]:
    """(N,) by how much the best wrong logit wins, and the direction in which it, or the target's, gains."""
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_(True)
        logits = model.logits(leaf)
        own = logits.gather(1, y[:, None].to(logits.device))[:, 0]
        best = logits.scatter(1, y[:, None].to(logits.device), float("-inf")).amax(dim=1)
        aimed = best if target is None else logits.gather(1, target[:, None].to(logits.device))[:, 0]
        (gradient,) = torch.autograd.grad((aimed - own).sum(), leaf)
    return (best - own).detach().float().cpu(), gradient.nan_to_num(0.0, 0.0, 0.0)


def _combined(loss: str, rise: Tensor, fall: Tensor, turned: Tensor, weight: Tensor) -> Tensor:
    """(N, …) where to go: up the classifier's gradient, down the detector's, or both."""
    mask = along(turned, rise)
    if loss == "selective":
        return torch.where(mask, fall, rise)
    if loss == "orthogonal":
        return torch.where(mask, _without(fall, rise), _without(rise, fall))
    share = along(weight, rise)
    return (1.0 - share) * rise / _sizes(rise) + share * fall / _sizes(fall)


def _without(gradient: Tensor, other: Tensor) -> Tensor:
    """The gradient less its part along the other; itself where nothing else would be left."""
    a, b = gradient.flatten(1), other.flatten(1)
    part = (a * b).sum(dim=1, keepdim=True) / b.square().sum(dim=1, keepdim=True).clamp_min(1e-30)
    rest = a - part * b
    kept = rest.norm(dim=1, keepdim=True) > 1e-4 * a.norm(dim=1, keepdim=True)
    return torch.where(kept, rest, a).reshape(gradient.shape)


def _scaled(direction: Tensor, norm: str, keep: bool) -> Tensor:
    """A step of length 1; in the maximum norm its signs, with ``keep`` (signs are not orthogonal) of mean size 1."""
    if norm == "l2":
        return direction / _lengths(direction).clamp_min(1e-30)
    return direction / _sizes(direction) if keep else direction.sign()


def _drawn(x: Tensor, norm: str, generator: torch.Generator) -> Tensor:
    if norm == "linf":
        return torch.empty_like(x).uniform_(-1.0, 1.0, generator=generator)
    drawn = torch.randn(x.shape, generator=generator)
    return drawn / _lengths(drawn) * along(torch.rand(len(x), generator=generator), x)


def _sizes(values: Tensor) -> Tensor:
    return along(values.flatten(1).abs().mean(dim=1).clamp_min(1e-30), values)


def _lengths(values: Tensor) -> Tensor:
    return along(values.flatten(1).norm(dim=1), values)
