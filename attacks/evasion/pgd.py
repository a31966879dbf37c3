"""Projected gradient descent (PGD): the strongest first-order search in a small ball around an input.

Source: A. Madry, A. Makelov, L. Schmidt, D. Tsipras, A. Vladu, "Towards deep learning models resistant to adversarial
attacks", ICLR 2018 (arXiv 1706.06083), section 2.1.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from deepseal.adapter import Differentiable, InputSpec, Split
from deepseal.adapter.quick import quick_copy
from deepseal.attacks.base import Perturbed
from deepseal.attacks.evasion.search import attacked
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

Norm = Literal["linf", "l2"]
# (N, …) inputs in data space with a graph -> (N,) values, each of its own input alone.
Objective = Callable[[Tensor], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PGD(Parameters):
    """Madry et al., 2018: signed (L-inf) or normalised (L2) gradient steps, each projected back into the ball.

    Of several restarts an input keeps the first result that is misclassified; the rest go on. Inputs that the model
    gets wrong already are left as they are.
    """

    name: ClassVar[str] = "pgd"

    epsilon: float = parameter(
        0.3, "radius of the ball; a share of the bounds' width (linf), an absolute length (l2)", minimum=0.0
    )
    norm: str = parameter("linf", "norm of the ball", choices=("linf", "l2"))
    steps: int = parameter(40, "gradient steps", minimum=1, maximum=100_000)
    step_size: float = parameter(2.5, "length of all steps together, in radii", minimum=1e-6, maximum=1e6)
    restarts: int = parameter(1, "random starting points", minimum=1, maximum=10_000)

    def perturb(self, model: Differentiable, data: Split, *, rng: Rng) -> Perturbed:
        """Raise the cross-entropy of the true label.

        Raises:
            InputError: see ``search.attacked``.
        """
        quick = quick_copy(model)

        def search(x: Tensor, y: Tensor, generator: torch.Generator) -> Tensor:
            return ascent(
                x,
                cross_entropy_of(quick, y),
                model.spec,
                epsilon=self.epsilon,
                norm="l2" if self.norm == "l2" else "linf",
                steps=self.steps,
                step_size=self.step_size * self.epsilon / self.steps,
                generator=generator,
            )

        return attacked(model, data, search, rng=rng, restarts=self.restarts)


def cross_entropy_of(model: Differentiable, labels: Tensor) -> Objective:
    """(N,) cross-entropy of the labels, a function of the inputs."""

    def objective(z: Tensor) -> Tensor:
        logits = model.logits(z)
        return nn.functional.cross_entropy(logits, labels.to(logits.device), reduction="none")

    return objective


def ascent(
    x: Tensor,
    objective: Objective,
    spec: InputSpec,
    *,
    epsilon: float,
    steps: int,
    step_size: float,
    norm: Norm = "linf",
    generator: torch.Generator | None = None,
) -> Tensor:
    """Inputs in a ball around ``x``, and within the bounds, where the objective is higher.

    The bounds are no part of the graph, so that the gradient of an input at a bound is the model's and not 0.

    Args:
        x: (N, …) inputs in data space.
        objective: to be raised.
        spec: bounds of the inputs.
        epsilon: radius; a share of the bounds' width (linf), an absolute length (l2).
        steps: number of gradient steps.
        step_size: length of one, in the units of ``epsilon``.
        norm: of the ball.
        generator: draws a starting point in the ball; none starts at ``x``.

    Raises:
        InputError: a gradient that is not finite.
    """
    low, high = spec.bounds
    scale = high - low if norm == "linf" else 1.0
    radius, step = epsilon * scale, step_size * scale
    change = torch.zeros_like(x)
    if generator is not None:
        change = torch.empty_like(x).uniform_(-radius, radius, generator=generator)
    change = _within(x, change, radius, norm, low, high)
    for _ in range(steps):
        gradient = gradient_of(objective, x + change)
        change = _within(x, change + step * _direction(gradient, norm), radius, norm, low, high)
    return (x + change).clamp(low, high)


def gradient_of(objective: Objective, x: Tensor) -> Tensor:
    """(N, …) gradient of each input's own objective.

    Raises:
        InputError: one that is not finite.
    """
    with torch.enable_grad():
        leaf = x.detach().clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(objective(leaf).sum(), leaf)
    require_finite(gradient)
    return gradient


def require_finite(gradient: Tensor) -> None:
    """Refuse a gradient that is not finite.

    Raises:
        InputError: NaN or infinity in it.
    """
    if not bool(torch.isfinite(gradient.sum())) and not bool(torch.isfinite(gradient).all()):  # the sum: one pass
        raise InputError("finite gradients in the input", found="NaN or infinity", do="check model and data")


def _direction(gradient: Tensor, norm: Norm) -> Tensor:
    if norm == "linf":
        return gradient.sign()
    return gradient / _lengths(gradient).clamp_min(1e-30)


def _within(x: Tensor, change: Tensor, radius: float, norm: Norm, low: float, high: float) -> Tensor:
    """The change, cut to the bounds and then to the ball (around ``x``, which is in bounds: so it stays in bounds)."""
    change = (x + change).clamp(low, high) - x
    if norm == "linf":
        return change.clamp(-radius, radius)
    return change * (radius / _lengths(change).clamp_min(1e-30)).clamp_max(1.0)


def _lengths(values: Tensor) -> Tensor:
    lengths: Tensor = torch.linalg.vector_norm(values, dim=tuple(range(1, values.dim())), keepdim=True)
    return lengths
