"""The true black box: detached answers, counted queries, an optional budget."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from deepseal.adapter.access import BlackBox, Output
from deepseal.adapter.data import Split
from deepseal.adapter.inputs import Batch, Inputs
from deepseal.adapter.spec import InputSpec
from deepseal.errors import InputError
from deepseal.statistics import Rate, rate


class Oracle:
    """Answers queries through a function from inputs to logits; no public attribute leads back to the model.

    Args:
        logits: maps (N, …) inputs, or ``Inputs``, to (N, classes) logits.
        spec: what the model takes.
        output: what a query answers.
        max_queries: number of inputs that may be asked; None for no limit.
    """

    __slots__ = ("_logits", "_queries", "max_queries", "output", "spec")

    def __init__(
        self,
        logits: Callable[[Batch], Tensor],
        spec: InputSpec,
        *,
        output: Output = "labels",
        max_queries: int | None = None,
    ) -> None:
        if output != "logits":
            spec.require_classes()
        self._logits = logits
        self._queries = 0
        self.spec = spec
        self.output: Output = output
        self.max_queries = max_queries

    @property
    def queries(self) -> int:
        """Inputs asked so far."""
        return self._queries

    @torch.no_grad()
    def query(self, x: Batch) -> Tensor:
        """Answers on the CPU: (N, classes) logits or probabilities, or (N,) labels.

        Raises:
            InputError: inputs that do not fit the spec, or more queries than the budget has left (none is spent).
        """
        self.spec.check(x)
        if self.max_queries is not None and self._queries + len(x) > self.max_queries:
            raise InputError(
                f"at most {self.max_queries - self._queries} more queries",
                found=str(len(x)),
                do="ask fewer inputs or raise the budget",
            )
        logits = self._logits(_copied(x)).detach().cpu()
        self._queries += len(x)
        if self.output == "labels":
            return logits.argmax(dim=1)
        return logits.softmax(dim=1) if self.output == "probabilities" else logits.clone()

    def __repr__(self) -> str:
        return f"Oracle({self.output}, {self._queries} queries of {self.max_queries or 'unlimited'})"


def accuracy(model: BlackBox, split: Split) -> Rate:
    """Share of samples to which a black box gives their label, with its 95 % interval; every sample is a query.

    Raises:
        InputError: no samples, labels outside the model's classes, or a model without classes.
    """
    model.spec.require_classes()
    split.check(model.spec)
    answers = model.query(split.x)
    labels = answers if model.output == "labels" else answers.argmax(dim=1)
    return rate(int((labels == split.y).sum()), len(split.y))


def _copied(x: Batch) -> Batch:
    return x.map(lambda tensor: tensor.detach().clone()) if isinstance(x, Inputs) else x.detach().clone()
