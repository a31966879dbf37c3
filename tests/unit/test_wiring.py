"""Which neurons hang together, and what may be done to them, in networks of every kind."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepseal.adapter import Classifier, InputSpec, initialise
from deepseal.adapter.rewiring import Move, Scale, rewired
from deepseal.adapter.wiring import wiring_of
from deepseal.errors import InputError
from deepseal.rng import Rng

IMAGES = InputSpec(shape=(1, 16, 16), num_classes=10)
ROWS = InputSpec(shape=(12,), num_classes=4)


class Functional(nn.Module):
    """Functions instead of modules, two ways to flatten, a residual addition, and a mean over space."""

    def __init__(self, flatten: str = "flatten"):
        super().__init__()
        self.flatten = flatten
        self.one, self.two = nn.Conv2d(1, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.three, self.fc1, self.fc2 = nn.Conv2d(6, 5, 3), nn.Linear(5 * 49, 7), nn.Linear(7, 10)

    def forward(self, x):
        x = torch.relu(self.one(x))
        x = x + nn.functional.relu(self.two(x))
        x = nn.functional.max_pool2d(self.three(x), 2)
        if self.flatten == "view":
            x = x.view(x.size(0), -1)
        elif self.flatten == "reshape":
            x = x.reshape(x.shape[0], -1)
        else:
            x = torch.flatten(x, 1)
        return self.fc2(self.fc1(x).tanh())


@pytest.mark.parametrize("flatten", ["view", "reshape", "flatten"])
def test_functions_are_followed(flatten):
    wiring = wiring_of(Classifier(Functional(flatten), IMAGES))
    by_maker = {group.makers: group for group in wiring.groups}
    assert by_maker[("one", "two")].width == 6
    assert [(r.layer, r.block) for r in by_maker[("three",)].readers] == [("fc1", 49)]
    laws = {name: wiring.segments[wiring.outputs[name].segment].law for name in ("one", "two", "three", "fc1")}
    assert laws == {"one": "positive", "two": "positive", "three": "positive", "fc1": "sign"}
    assert wiring.outputs["one"].segment == wiring.outputs["two"].segment
    assert not wiring.fixed()


def test_residual_stream_is_one_group_with_a_scale_between_normalisations():
    wiring = wiring_of(initialise("deepseal.adapter.zoo:wrn", IMAGES, Rng(0)))
    stream = next(group for group in wiring.groups if "conv" in group.makers)
    assert stream.makers == ("conv", "group1_0.conv2", "group1_1.conv2")
    assert len({wiring.outputs[name].segment for name in stream.makers}) == 1
    assert wiring.segments[wiring.outputs["conv"].segment].law == "any"
    assert wiring.segments[wiring.outputs["group1_0.norm1"].segment].law == "positive"


class Tokens(nn.Module):
    """(N, 3, 12) rows through a gate and a perceptron, token by token, to (N, 4)."""

    def __init__(self, way):
        super().__init__()
        self.gate, self.up, self.down, self.head = (nn.Linear(*pair) for pair in ((12, 9), (12, 9), (9, 12), (12, 4)))
        self.way = way

    def forward(self, x):
        return self.head(self.way(self, x).mean(dim=1))


TOKENS = InputSpec(shape=(3, 12), num_classes=4)


def test_neurons_of_tokens_lie_on_the_last_axis():
    model = Classifier(Tokens(lambda m, x: m.down(torch.relu(m.up(x)))), TOKENS)
    wiring = wiring_of(model)
    by_maker = {group.makers: group for group in wiring.groups}
    assert (by_maker[("up",)].width, by_maker[("up",)].fixed) == (9, None)
    assert by_maker[("down",)].readers[0].layer == "head"
    assert wiring.outputs["up"].last and wiring.outputs["down"].last and not wiring.outputs["head"].last
    assert wiring.segments[wiring.outputs["up"].segment].law == "positive"
    assert wiring.fixed() == {}


def test_gate_and_gated_change_places_together_and_are_not_scaled():
    model = Classifier(Tokens(lambda m, x: m.down(torch.sigmoid(m.gate(x)) * m.up(x))), TOKENS)
    wiring = wiring_of(model)
    group = next(group for group in wiring.groups if "gate" in group.makers)
    assert (group.makers, group.fixed, [r.layer for r in group.readers]) == (("gate", "up"), None, ["down"])
    assert {wiring.segments[wiring.outputs[name].segment].law for name in ("gate", "up")} == {"none"}
    order = torch.randperm(9, generator=Rng(0).torch())
    moved = Classifier(
        rewired(model, wiring, {wiring.groups.index(group): Move.permutation(order)}, {}, model.copy().module), TOKENS
    )
    x = torch.rand(5, 3, 12, generator=Rng(1).torch())
    torch.testing.assert_close(moved.query(x), model.query(x))
    assert torch.equal(moved.module.gate.weight, model.module.gate.weight[order])


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (lambda m, x: m.down(nn.functional.max_pool2d(m.up(x), 1)), "max_pool2d is not understood"),
        (lambda m, x: m.down(torch.relu(m.up(x)).roll(1, 2)), "roll is not understood"),
        (lambda m, x: m.down(m.up(x)[:, :, torch.arange(9)]), "getitem is not understood"),
        (lambda m, x: m.down(m.up(x).mean(dim=2, keepdim=True).expand(-1, -1, 9)), "mean is not understood"),
        (lambda m, x: m.down(torch.cat(m.up(x).split([4, 5], 2)[::-1], 2)), "split is not understood"),
    ],
)
def test_what_mixes_the_neurons_of_a_token_fixes_them(way, reason):
    assert wiring_of(Classifier(Tokens(way), TOKENS)).fixed()["up"] == reason


@pytest.mark.parametrize(
    ("layer", "law"),
    [
        (nn.ReLU(), "positive"),
        (nn.Tanh(), "sign"),
        (nn.GELU(), "none"),
        (nn.Identity(), "any"),
        (nn.LeakyReLU(), "positive"),
    ],
)
def test_law_of_what_lies_between(layer, law):
    model = Classifier(nn.Sequential(nn.Linear(12, 8), layer, nn.Dropout(0.5), nn.Linear(8, 4)), ROWS)
    wiring = wiring_of(model)
    assert wiring.segments[wiring.outputs["0"].segment].law == law
    assert wiring.outputs["1"] == wiring.outputs["2"] == wiring.outputs["0"]


class Two(nn.Module):
    """What the test makes of two layers."""

    def __init__(self, forward):
        super().__init__()
        self.one, self.two, self.three = nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 4)
        self.way = forward

    def forward(self, x):
        return self.way(self, x)


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        (lambda m, x: m.three(torch.softmax(m.one(x), dim=1)), "softmax is not understood"),
        (lambda m, x: m.three(torch.cat([m.one(x)[:, :6], m.two(x)[:, 6:]], 1)), "getitem is not understood"),
        (lambda m, x: m.three(m.one(x) * x.sum(1, keepdim=True)), "sum is not understood"),
        (lambda m, x: m.three(m.one(m.one(x))), "one runs twice"),
        (lambda m, x: m.three(m.one(x) + x), "the order of the inputs"),
        (lambda m, x: m.three(torch.add(m.one(x), m.two(x), alpha=2)), "add is not understood"),
    ],
)
def test_what_is_not_understood_is_left_alone(way, reason):
    wiring = wiring_of(Classifier(Two(way), ROWS))
    assert any(reason in str(group.fixed) for group in wiring.groups)
    with pytest.raises(InputError, match="that can be moved"):
        wiring.free()


def test_tied_weights_are_left_alone():
    model = Two(lambda m, x: m.three(torch.relu(m.two(torch.relu(m.one(x))))))
    model.two.weight = model.one.weight
    assert "shares weights" in wiring_of(Classifier(model, ROWS)).fixed()["one"]


def test_computed_weights_are_left_alone():
    model = Two(lambda m, x: m.three(torch.relu(m.two(torch.relu(m.one(x))))))
    nn.utils.parametrizations.weight_norm(model.two)
    wiring = wiring_of(Classifier(model, ROWS))
    assert "computed from other tensors" in wiring.fixed()["one"]


@pytest.mark.parametrize("arch", ["mlp", "cnn", "wrn"])
def test_moving_there_and_back_gives_the_same_weights(arch, no_trace):
    model = initialise(f"deepseal.adapter.zoo:{arch}", IMAGES, Rng(0))
    with no_trace(model):
        wiring = wiring_of(model)
        orders = {i: torch.randperm(wiring.groups[i].width, generator=Rng(i).torch()) for i in wiring.free()}
        there = {i: Move.permutation(order) for i, order in orders.items()}
        back = {i: Move.permutation(order.argsort()) for i, order in orders.items()}
        scales, undo = {}, {}
        for index, segment in enumerate(wiring.segments):
            if segment.law in ("any", "positive"):
                factors = 2.0 ** torch.randint(
                    -3, 4, (wiring.groups[segment.group].width,), generator=Rng(index).torch()
                )
                ones = torch.ones(len(factors), dtype=torch.float64)
                scales[index] = Scale(ones, factors.double())
                undo[index] = Scale(factors.double(), ones)
        moved = Classifier(rewired(model, wiring, there, {}, model.copy().module), IMAGES)
        scaled = Classifier(rewired(moved, wiring, {}, scales, moved.copy().module), IMAGES)
        unscaled = Classifier(rewired(scaled, wiring, {}, undo, scaled.copy().module), IMAGES)
        again = rewired(unscaled, wiring, back, {}, unscaled.copy().module)
    assert not torch.equal(next(moved.module.parameters()), next(model.module.parameters()))
    for name, tensor in again.state_dict().items():
        torch.testing.assert_close(tensor, model.module.state_dict()[name], rtol=1e-5, atol=1e-6)
