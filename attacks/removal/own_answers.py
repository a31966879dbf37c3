"""Training without labels: the thief holds the network to its own answers while its inputs are corrupted.

Source: Q. Xie, Z. Dai, E. Hovy, M.-T. Luong, Q. V. Le, "Unsupervised data augmentation for consistency training",
NeurIPS 2020, section 2.2: the answer to a noised input is pulled to the answer to the input itself. Inputs as they are
would teach nothing: the network gives its own answers already.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from deepseal.adapter import Classifier, Field, Inputs, InputSpec
from deepseal.adapter.inputs import Batch, call
from deepseal.adapter.training import Imitation, Step


class OwnAnswers:
    """Distance of the answers to corrupted inputs from those that the model gave to the inputs (see ``Imitation``).

    Args:
        model: gives the answers; must not change meanwhile.
        corruption: see ``corrupted``.
    """

    def __init__(self, model: Classifier, corruption: float) -> None:
        self._model, self._corruption, self._imitation = model, corruption, Imitation(model)

    def __call__(self, step: Step) -> Tensor:
        """The loss of a batch."""
        model = self._model
        x = model.prepare(corrupted(step.x, model.spec, self._corruption, step.generator))

        def forward() -> Tensor:
            return model.spec.read(call(step.module, x), x)

        return self._imitation(dataclasses.replace(step, forward=forward))


def corrupted(x: Batch, spec: InputSpec, share: float, generator: torch.Generator) -> Batch:
    """Inputs with Gaussian noise of ``share`` standard deviations, or with that share of integers drawn anew.

    Within the bounds; attention masks stay as they are.
    """
    if isinstance(x, Inputs):
        return Inputs(
            {name: _corrupted(value, spec.fields[name], share, generator) for name, value in x.tensors.items()}
        )
    return _corrupted(x, Field(spec.shape, bounds=spec.bounds, integer=spec.integer), share, generator)


def _corrupted(x: Tensor, field: Field, share: float, generator: torch.Generator) -> Tensor:
    low, high = field.bounds
    if field.mask:
        return x
    if field.integer:
        drawn = torch.randint(int(low), int(high) + 1, x.shape, generator=generator).to(x)
        return torch.where((torch.rand(x.shape, generator=generator) < share).to(x.device), drawn, x)
    noise = torch.randn(x.shape, generator=generator).to(x)
    return (x + share * x.std(correction=0) * noise).clamp(low, high)
