"""How far a model in training is from the answers that it is held to."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from deepseal.adapter import Classifier, InputSpec
from deepseal.adapter.training import Imitation, Step

X = torch.rand(16, 3, generator=torch.Generator().manual_seed(0))


class Scaled(nn.Module):
    """Three numbers, each at a scale of its own, and a constant."""

    def __init__(self, scales: tuple[float, ...], constant: float) -> None:
        super().__init__()
        self.scales = nn.Parameter(torch.tensor(scales))
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scales + self.constant


def loss(change: Tensor, scales: tuple[float, ...] = (1.0, 1.0, 1.0), constant: float = 0.0) -> float:
    """Of answers that are off by ``change``, (3,) or (N, 3)."""
    model = Classifier(Scaled(scales, constant), InputSpec(shape=(3,), num_classes=0))
    rows, generator = torch.arange(len(X)), torch.Generator()
    step = Step(model.module, X, rows, rows, lambda: model.query(X) + change, 0, 1, generator)
    return float(Imitation(model)(step))


def test_nothing_where_the_answers_are_equal():
    assert loss(torch.zeros(3)) == 0.0


def test_an_answer_that_varies_less_is_held_more_closely():
    small, large = (loss(0.01 * torch.eye(3)[index], (0.3, 1.0, 1.0)) for index in (0, 1))
    assert small > 3 * large


@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_does_not_depend_on_the_unit(scale):
    change = torch.tensor([0.01, 0.02, 0.03])
    assert loss(scale * change, (scale,) * 3) == pytest.approx(loss(change), rel=1e-3)


def test_a_constant_does_not_hide_what_varies():
    change = torch.tensor([0.01, 0.01, 0.01])
    assert loss(change, constant=5.0) > 0.5 * loss(change)


def test_answers_that_never_vary_are_held_to_a_hundredth_of_their_size():
    assert loss(torch.tensor([0.05, 0.0, 0.0]), (0.0, 0.0, 0.0), constant=5.0) == pytest.approx(1 / 3, rel=0.1)


def test_remembers_answers_by_their_place_in_the_data():
    model = Classifier(Scaled((1.0, 2.0, 3.0), 0.0), InputSpec(shape=(3,), num_classes=0))
    imitation, answers = Imitation(model), model.query(X)
    half = torch.arange(8)
    first = Step(model.module, X[:8], half, half, lambda: answers[:8], 0, 2, torch.Generator())
    assert float(imitation(first)) == 0.0
    back = torch.arange(15, -1, -1)
    assert (
        float(imitation(dataclasses.replace(first, x=X[back], y=back, rows=back, forward=lambda: answers[back]))) == 0.0
    )
