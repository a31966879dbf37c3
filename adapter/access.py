"""Access as a type: a function asks for the least that it needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

from torch import Tensor, nn

from deepseal.adapter.inputs import Batch
from deepseal.adapter.spec import InputSpec

Output = Literal["logits", "probabilities", "labels"]


class BlackBox(Protocol):
    """Answers queries; nothing else is known of the model."""

    @property
    def spec(self) -> InputSpec:
        """What the model takes."""
        ...

    @property
    def output(self) -> Output:
        """What ``query`` answers: (N, classes) logits or probabilities, or (N,) labels."""
        ...

    def query(self, x: Batch) -> Tensor:
        """The detached answers to a batch, on the CPU."""
        ...


class Differentiable(BlackBox, Protocol):
    """Gradients of the logits reach the input."""

    def logits(self, x: Batch) -> Tensor:
        """(N, classes) scores before softmax, with a graph back to ``x``."""
        ...


class WhiteBox(Differentiable, Protocol):
    """The module itself, with its weights and hidden layers."""

    @property
    def module(self) -> nn.Module:
        """The user's module: read it, never change it."""
        ...

    def features(self, x: Batch, layers: Sequence[str], *, pool: Mapping[str, str] | None = None) -> dict[str, Tensor]:
        """Outputs of the named layers, detached, on the CPU, flattened or pooled to (N, features)."""
        ...
