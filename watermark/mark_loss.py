"""What embedding minimises: the loss of the task, and the mark's own, which a loop of the owner's can take alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn

from deepseal.adapter.training import Step


class MarkLoss:
    """The task's loss, and then the mark's terms; each is differentiated before the next is computed.

    Args:
        task: what the model is for, such as the cross-entropy of the batch.
    """

    def __init__(self, task: Callable[[Step], Tensor]) -> None:
        self._task = task

    def mark(self, module: nn.Module, generator: torch.Generator) -> Iterator[Tensor]:
        """The scalars of the mark alone, on inputs of its own; the module may be in any mode, and is left in it.

        Args:
            module: the network in training.
            generator: the only randomness.
        """
        raise NotImplementedError

    def __call__(self, step: Step) -> Iterator[Tensor]:
        """All terms of an update."""
        yield self._task(step)
        yield from self.mark(step.module, step.generator)
