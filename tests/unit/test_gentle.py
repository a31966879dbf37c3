"""Marks that hold on to a model's own answers: which weights change."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Recipe, Split
from deepseal.adapter.capture import running_between
from deepseal.adapter.layers import Reading, hidden_layers
from deepseal.adapter.training import Training
from deepseal.rng import Rng
from deepseal.watermark import DeepSigns, Key
from deepseal.watermark.cells import thin_layers

NORMALISED = nn.Sequential(
    OrderedDict(
        first=nn.Conv1d(1, 4, 3),
        second=nn.Conv1d(4, 4, 3),
        act=nn.ReLU(),
        norm=nn.BatchNorm1d(4),
        flatten=nn.Flatten(),
        head=nn.Linear(16, 2),
    )
)
X = torch.zeros(2, 1, 8)


def test_from_the_first_marked_layer_to_the_last():
    assert running_between(NORMALISED, X, ["second"]) == ["second"]
    assert running_between(NORMALISED, X, ["head", "second"]) == ["second", "norm", "head"]
    assert running_between(NORMALISED, X, ["head"]) == ["head"]


def test_a_normalisation_is_marked_through_the_layer_before_it():
    assert running_between(NORMALISED, X, ["norm"]) == ["second", "norm"]
    assert running_between(NORMALISED, X, ["act"]) == ["second"]


def test_a_layer_of_few_weights_is_left_alone():
    rows = nn.Sequential(
        OrderedDict(
            first=nn.Linear(8, 64),
            act=nn.ReLU(),
            second=nn.Linear(64, 64),
            mix=nn.Conv1d(8, 8, 1),
            third=nn.Linear(64, 64),
            flatten=nn.Flatten(),
            head=nn.Linear(512, 4),
        )
    )
    model = Classifier(rows, InputSpec(shape=(8, 8), num_classes=0))
    hidden = hidden_layers(model)
    assert {name: reading.weights for name, _, reading in hidden} == {
        "first": 8 * 64 + 64,
        "second": 64 * 64 + 64,
        "mix": 8 * 8 + 8,
        "third": 64 * 64 + 64,
    }
    assert "mix" in thin_layers(hidden, 256, 16)
    assert thin_layers(hidden, 256, 16, inner=True) == ["first", "second"]


def layer(name: str, width: int, weights: int = 10_000) -> tuple[str, str, Reading]:
    return name, "Linear", Reading("none", (width,), weights)


@pytest.mark.parametrize(
    ("bits", "chosen"),
    [
        (40, ["wide"]),  # 4 carriers of 16 bits
        (64, ["wide"]),
        (65, ["wide", "late"]),
        (73, ["middle", "wide", "late"]),
        (81, ["early", "middle", "wide", "late"]),
        (10_000, ["early", "middle", "wide", "late"]),  # never the last, nor one with too few weights
    ],
)
def test_other_layers_hold_what_the_widest_have_no_room_for(bits, chosen):
    hidden = [layer("early", 32), layer("middle", 32), layer("few", 64, 100), layer("wide", 256), layer("late", 32)]
    assert thin_layers([*hidden, layer("last", 512)], bits, 4, inner=True) == chosen


@pytest.mark.parametrize("size", [0.01, 10.0])
def test_relative_steps_are_as_large_as_the_weights(size):
    module = nn.Sequential(nn.Linear(4, 8, bias=False), nn.Linear(8, 2, bias=False))
    with torch.no_grad():
        for scale, layer in zip((size, 1.0), module, strict=True):
            layer.weight.copy_(scale * torch.randn(layer.weight.shape, generator=torch.Generator().manual_seed(0)))
    model = Classifier(module, InputSpec(shape=(4,), num_classes=2))
    data = Split(torch.rand(8, 4), torch.arange(8) % 2)
    recipe = Recipe(steps=1, learning_rate=1e-2, relative=True, batch_size=8)
    after = Training(model, data, recipe=recipe, rng=Rng(0)).run().module
    for before, changed in zip(module.parameters(), after.parameters(), strict=True):
        step = (changed - before).detach().pow(2).mean().sqrt() / before.detach().pow(2).mean().sqrt()
        assert float(step) == pytest.approx(
            1e-2, rel=0.05
        )  # Adam's first update is the step size, whatever the gradient


def test_a_key_of_whole_numbers_reads_the_same_from_its_file():
    module = nn.Sequential(nn.Linear(4, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 2))
    spec = InputSpec(shape=(4,), num_classes=2, bounds=(0, 1), mean=(0,), std=(1,))
    data = Split(torch.rand(32, 4), torch.arange(32) % 2)
    key = DeepSigns(bits=64).keygen(Classifier(module, spec), data, owner="me", rng=Rng(0))
    stored = Key.from_bytes(key.to_bytes())
    assert stored.binding == key.binding
    assert (stored.message() == key.message()).all()
