"""What a detector judges: inputs and all that one pass of the model says of them, computed once and shared."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from deepseal.adapter import BlackBox, Classifier, Differentiable, Split
from deepseal.adapter.capture import Tap
from deepseal.adapter.classifier import BATCH
from deepseal.errors import InputError
from deepseal.rng import Rng

SURROGATES = ("identity", "smooth")


@dataclasses.dataclass(frozen=True)
class Context:
    """A batch of inputs and the model's answers to it.

    Attributes:
        model: the victim, for detectors that ask it again.
        x: (N, …) inputs in data space.
        logits: (N, classes).
        predicted: (N,) the class that the model answers.
        features: (N, features) of each tap.
        graph: whether everything here is differentiable in ``x``; else it is detached, on the CPU.
        surrogate: what stands in the backward pass for steps without a useful gradient, such as rounding: ``identity``,
            or the ``smooth`` function nearest to them (backward pass differentiable approximation; A. Athalye, N.
            Carlini, D. Wagner, ICML 2018).
    """

    model: BlackBox
    x: Tensor = dataclasses.field(repr=False)
    logits: Tensor = dataclasses.field(repr=False)
    predicted: Tensor = dataclasses.field(repr=False)
    features: Mapping[Tap, Tensor] = dataclasses.field(repr=False)
    graph: bool = False
    surrogate: str = "identity"

    def __len__(self) -> int:
        return len(self.x)

    def ask(self, x: Tensor) -> Tensor:
        """(N, classes) answers to other inputs: one more pass, differentiable where the context is."""
        if self.graph:
            return _differentiable(self.model).logits(x)
        return self.model.query(x)

    def at(self, tap: Tap) -> Tensor:
        """(N, features) of a tap."""
        return self.features[tap]


def contexts(model: BlackBox, x: Tensor, taps: Sequence[Tap], *, batch: int = BATCH) -> Iterator[Context]:
    """Contexts of all inputs, batch by batch, detached, on the CPU.

    Raises:
        InputError: inputs that do not fit the model, one without classes, or layers of a model that only answers.
    """
    model.spec.require_plain("a detector")
    model.spec.require_classes()
    model.spec.check(x)
    for part in x.split(batch):
        with torch.no_grad():
            yield _context(model, part, taps)


def differentiable_context(model: Differentiable, x: Tensor, taps: Sequence[Tap], *, surrogate: str) -> Context:
    """A context whose parts are all differentiable in ``x``, for whoever attacks the detectors themselves."""
    found = _context(model, x, taps)
    return dataclasses.replace(found, graph=True, surrogate=surrogate)


def _context(model: BlackBox, x: Tensor, taps: Sequence[Tap]) -> Context:
    if isinstance(model, Classifier):
        logits, features = model.observe(x, taps)
    elif taps:
        found, do = "a model that only answers", "use detectors that read no layer, such as max-softmax"
        raise InputError(f"a model whose layer {taps[0].layer!r} can be read", found=found, do=do)
    else:
        logits, features = (_differentiable(model).logits(x) if torch.is_grad_enabled() else model.query(x)), {}
    if not torch.is_grad_enabled():
        logits, features = logits.cpu(), {tap: value.cpu() for tap, value in features.items()}
    return Context(model, x, logits.float(), logits.argmax(dim=1), features)


def _differentiable(model: BlackBox) -> Differentiable:
    if not hasattr(model, "logits"):
        found, do = "a model that only answers", "use detectors that need no gradient"
        raise InputError("a model whose gradients reach the input", found=found, do=do)
    return model  # type: ignore[return-value]


@dataclasses.dataclass(frozen=True)
class Reference:
    """Clean labelled data that detectors are fitted on, read through the model as often as they ask.

    Attributes:
        model: the victim.
        split: (N, …) inputs and (N,) labels.
    """

    model: BlackBox
    split: Split

    @property
    def classes(self) -> int:
        """Number of classes."""
        return self.model.spec.num_classes

    def __len__(self) -> int:
        return len(self.split)

    def stream(self, taps: Sequence[Tap] = ()) -> Iterator[tuple[Context, Tensor]]:
        """Contexts and (N,) labels, batch by batch."""
        labels = self.split.y.split(BATCH)
        yield from zip(contexts(self.model, self.split.tensor, taps), labels, strict=True)

    def sample(self, count: int, rng: Rng) -> Reference:
        """About as many samples of each class, ``count`` together at most, in the order of the data."""
        order = torch.randperm(len(self), generator=rng.torch())
        labels = self.split.y[order]
        ranks = torch.zeros(len(self), dtype=torch.int64)
        for label in labels.unique():
            rows = torch.nonzero(labels == label).reshape(-1)
            ranks[rows] = torch.arange(len(rows))
        chosen = order[torch.argsort(ranks, stable=True)[:count]].sort().values
        return Reference(self.model, self.split.take(chosen))
