"""Gradient checkpointing: what is recomputed in the backward pass meets the same pruned and noisy weights again."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

from deepseal.adapter import Classifier, Recipe, train
from deepseal.rng import Rng
from deepseal.watermark import SCHEMES, DeepSigns, embed
from deepseal.watermark.robust import weathered


class Recomputing(nn.Sequential):
    """Recomputes all but its first and last layer in the backward pass, in evaluation mode too."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.passes = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def middle(x: torch.Tensor) -> torch.Tensor:
            self.passes += 1
            for layer in list(self)[1:-1]:
                x = layer(x)
            return x

        return self[-1](recomputed(middle, self[0](x), use_reentrant=False))


def layers() -> list[nn.Module]:
    torch.manual_seed(0)
    convolutions = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()]
    return [*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, 10)]


@pytest.fixture(scope="module")
def pair(digits):
    """The same trained network, plain and recomputing."""
    plain = train(Classifier(nn.Sequential(*layers()), digits.spec), digits.train, recipe=Recipe(epochs=2), rng=Rng(0))
    return plain, Classifier(Recomputing(*copy.deepcopy(list(plain.module))), digits.spec)


def distance(one: Classifier, other: Classifier) -> float:
    pairs = zip(one.module.parameters(), other.module.parameters(), strict=True)
    return max(float((p.detach() - q.detach()).abs().max()) for p, q in pairs)


@pytest.mark.parametrize("prune", [0.0, 0.8])
def test_gradients_are_those_of_the_same_weights(pair, digits, prune, no_trace):
    gradients = []
    for model in pair:
        with no_trace(model):
            x = model.prepare(digits.test.x[:8])
            with weathered(model.module, prune=prune, drift=0.5, generator=Rng(3).torch()):
                loss = model.module(x).logsumexp(dim=1).sum()
                gradients.append(torch.autograd.grad(loss, list(model.module.parameters())))
    assert pair[1].module.passes % 2 == 0, "forward and backward"
    for plain, again in zip(*gradients, strict=True):
        assert plain.abs().sum() > 0
        assert torch.allclose(plain, again, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["adi", "ewe", "deepsigns", "diction"])
def test_recomputing_gives_the_same_mark(pair, digits, name):
    plain, saving = pair
    some = digits.train.take(torch.arange(400))
    params = {"steps": 10, "rounds": 1}
    scheme = DeepSigns(bits=32, layers=("2", "6"), **params) if name == "deepsigns" else SCHEMES.build(name, params)
    key = scheme.keygen(plain, some, owner="me", rng=Rng(0))
    first, second = (embed(model, some, key, rng=Rng(1)) for model in (plain, saving))
    assert distance(first, plain) > 1e-3
    assert distance(first, second) < 0.01 * distance(first, plain)
