"""A mark inside the owner's own training: the scheme's term of the loss, for a loop that is not ours.

``loss = task + mark()``, in any loop; with callbacks for two libraries in ``lightning_loop`` and ``transformers_loop``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from deepseal.adapter import Classifier, Split
from deepseal.adapter.capture import require_layers
from deepseal.adapter.parallel import Workers
from deepseal.adapter.private_random import PrivateRandom
from deepseal.errors import InputError
from deepseal.rng import Rng
from deepseal.watermark.key import Key
from deepseal.watermark.mark_loss import MarkLoss
from deepseal.watermark.scheme import scheme_of

Gradients = Sequence[Tensor | None]


class MarkTerm:
    """What ``embedding`` of the key's scheme adds to the task's loss, on inputs of its own, for the model in training.

    The model as it is when the term is made is its reference: DeepSigns and marks in the weights ask for margins in
    units of that model's activations or weights. Train with the mark from the first epoch on a new model, or warm it up
    first, and make the key and then the term from what it is by then.

    Each call differentiates the term at once, while the pruned and noisy weights that it is read through are in place,
    and gives a scalar whose backward pass hands these gradients on, scaled as the loss is (mixed precision, accumulated
    batches). Its graph is gone by then; called before the task's forward pass, the two are never in memory together.
    Nothing stays on the module, and the global random state is not used.

    Args:
        key: what to embed.
        model: the module that is trained, on the device where it is trained, or the part of it that the key was made
            for; and what it takes.
        data: training samples, of every carrier class where the scheme has carriers.
        rng: all randomness; that of ``embedding`` gives the same draws.

    Raises:
        InputError: a scheme or recipe whose mark is no term of the loss, or a key, data or model that do not fit.
    """

    def __init__(self, key: Key, model: Classifier, data: Split, *, rng: Rng) -> None:
        data.check(model.spec)
        require_layers(model.module)
        if model.dtype == torch.float16:
            raise InputError("weights to train in float32 or bfloat16", found="float16", do="convert the model first")
        scheme = scheme_of(key)
        scheme.observe(model, key)
        make = getattr(scheme, "loss", None)
        loss = None if make is None else make(model, data, key)
        if not isinstance(loss, MarkLoss):
            recipe = f", recipe={key.params['recipe']}" if "recipe" in key.params else ""
            do = "draw the key with recipe=robust, or mark the trained model with embed"
            raise InputError("a scheme whose mark is a term of the loss", found=f"{key.scheme}{recipe}", do=do)
        self._loss, self._model, self._device = loss, model, model.device
        self._generator = rng.child("loss").torch()
        self._private_random = PrivateRandom(rng.child("dropout"), model.device)

    def __call__(self) -> Tensor:
        """The term as a scalar; its backward pass adds the gradients of the model's parameters.

        Raises:
            InputError: the model has moved to another device, or all its parameters are frozen.
        """
        parameters = self._parameters()
        value, gradients = self._differentiated(parameters)
        result: Tensor = _Known.apply(value, gradients, *parameters)
        return result

    def add_gradients(self, to: Iterable[Tensor] | None = None) -> float | None:
        """Add the term's gradients to those of the parameters, for a loop that gives no access to its loss.

        Between the backward pass and the optimiser's step, where gradients are those of one update: accumulated,
        averaged over processes (so are the term's here) and no longer scaled.

        Args:
            to: the parameters that the optimiser updates; None for all of the model's.

        Returns:
            The value of the term; None where none of the parameters are the model's.

        Raises:
            InputError: see ``__call__``.
        """
        own = self._parameters()
        wanted = {id(parameter) for parameter in (own if to is None else to)}
        parameters = [parameter for parameter in own if id(parameter) in wanted]
        if not parameters:
            return None
        value, gradients = self._differentiated(parameters)
        pairs = [(p, g.clone()) for p, g in zip(parameters, gradients, strict=True) if g is not None]
        if dist.is_available() and dist.is_initialized():
            Workers(dist.get_rank(), dist.get_world_size()).average([gradient for _, gradient in pairs])
        for parameter, gradient in pairs:
            parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
        return float(value)

    def _parameters(self) -> list[nn.Parameter]:
        if self._model.device != self._device:
            do = "make the term after the model has moved"
            raise InputError(f"the model on {self._device}, where the term is", found=str(self._model.device), do=do)
        parameters = [parameter for parameter in self._model.module.parameters() if parameter.requires_grad]
        if not parameters:
            raise InputError("parameters to train", found="all of them frozen", do="set requires_grad on some")
        return parameters

    def _differentiated(self, parameters: Sequence[nn.Parameter]) -> tuple[Tensor, Gradients]:
        """The term's value and its gradients; None for parameters that it does not depend on."""
        total = torch.zeros((), device=self._device)
        gradients: list[Tensor | None] = [None] * len(parameters)
        with self._private_random(), torch.enable_grad():
            for term in self._loss.mark(self._model.module, self._generator):
                parts = torch.autograd.grad(term, parameters, allow_unused=True)
                gradients = [
                    a if b is None else b if a is None else a + b for a, b in zip(gradients, parts, strict=True)
                ]
                total += term.detach()
        return total, gradients


class _Known(torch.autograd.Function):
    """A value whose gradients have been worked out."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, gradients: Gradients, *_parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return value.clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        parts = (None if gradient is None else (upstream * gradient).to(gradient) for gradient in ctx.gradients)
        return None, None, *parts
