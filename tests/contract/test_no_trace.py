"""Leave no trace: a law for everything that is registered, also when a forward pass fails in the middle."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

from deepseal.adapter import Classifier, Dataset, InputSpec, Split
from deepseal.adapter.capture import execution_order, forward_to
from deepseal.adapter.training import output_layer
from deepseal.attacks import EVASION, REMOVAL
from deepseal.rng import Rng
from deepseal.watermark import SCHEMES, embed, extract, verify

QUICK = {
    "deepsigns": {"steps": 2, "bits": 40},
    "hash-bound": {"steps": 2, "bits": 40},
    "uchida": {"steps": 2, "bits": 40},
    "adi": {"steps": 2, "rounds": 1},
    "zhang": {"steps": 2, "rounds": 1},
    "deepsigns-blackbox": {"steps": 2, "rounds": 1, "triggers": 10, "models": 2},
    "ewe": {"steps": 2, "rounds": 1},
    "blackmarks": {"steps": 2, "rounds": 1, "bits": 8, "votes": 3, "models": 1, "ascent": 2},
    "diction": {"steps": 2, "bits": 40, "rounds": 1},
    "le-merrer": {"steps": 2, "rounds": 1, "triggers": 8},
    "fine-tune": {"epochs": 1},
    "overwrite": {"options": ["steps=2;bits=40"]},
    "distil": {"epochs": 1},
    "other-task": {"epochs": 1, "epochs_back": 1},
}


DRAWN_WITHOUT_RUNNING = {"adi", "ewe", "zhang"}  # their triggers do not depend on the model


class Failing(nn.Module):
    """Passes its input on until it is told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.calls_left = -1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.calls_left == 0:
            raise RuntimeError("the forward pass fails here")
        return x


class Rows(nn.Module):
    """Flattens as many networks do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.view(len(x), -1)


@pytest.fixture
def awkward(digits: Dataset) -> Classifier:
    """BatchNorm, dropout, mixed training flags, a frozen parameter, and a hook of the user's."""
    torch.manual_seed(0)
    module = nn.Sequential(
        OrderedDict(
            conv=nn.Conv2d(1, 8, 3, bias=False),
            norm=nn.BatchNorm2d(8),
            act=nn.ReLU(inplace=True),
            drop=nn.Dropout(0.5),
            flatten=nn.Flatten(),
            fc1=nn.Linear(8 * 36, 64),
            fail=Failing(),
            act1=nn.ReLU(inplace=True),
            fc2=nn.Linear(64, 10),
        )
    )
    module.train()
    module.drop.eval()
    module.fc1.bias.requires_grad_(False)
    module.act.register_forward_hook(lambda *_: None)
    return Classifier(module, digits.spec)


class Residual(nn.Module):
    """A residual stream that the rotation attack turns, with the same awkwardness."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.drop = nn.Linear(64, 32), nn.LayerNorm(32), nn.Dropout(0.5)
        self.up, self.fail, self.act = nn.Linear(32, 64), Failing(), nn.ReLU(inplace=True)
        self.down, self.head = nn.Linear(64, 32), nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.embed(x.flatten(1))
        h = h + self.drop(self.down(self.act(self.fail(self.up(self.norm(h))))))
        return self.head(h)


@pytest.fixture
def attacked(name: str, awkward: Classifier, digits: Dataset) -> Classifier:
    """The awkward model; for an attack that needs a residual stream, one that has it."""
    if name != "rotate":
        return awkward
    module = Residual()
    module.train()
    module.drop.eval()
    module.down.bias.requires_grad_(False)
    module.act.register_forward_hook(lambda *_: None)
    return Classifier(module, digits.spec)


@pytest.fixture
def some(digits: Dataset) -> Split:
    return digits.train.take(torch.arange(300))


@pytest.mark.parametrize("name", SCHEMES.names())
def test_schemes(name, awkward, some, no_trace):
    scheme = SCHEMES.build(name, QUICK.get(name, {}))
    with no_trace(awkward):
        key = scheme.keygen(awkward, some, owner="me", rng=Rng(0))
        marked = embed(awkward, some, key, rng=Rng(1))
        extract(awkward, key)
        verify(awkward, key, null_keys=3, null_models=[awkward])
    assert marked.module is not awkward.module
    shared = {p.data_ptr() for p in awkward.module.parameters()} & {p.data_ptr() for p in marked.module.parameters()}
    assert not shared


@pytest.mark.parametrize("name", REMOVAL.names())
def test_removal_attacks(name, attacked, some, no_trace):
    attack = REMOVAL.build(name, QUICK.get(name, {}))
    with no_trace(attacked):
        removed = attack.remove(attacked, some, rng=Rng(0))
    assert removed.model.module is not attacked.module
    flags = [layer.training for layer in attacked.module.modules()]
    assert [layer.training for layer in removed.model.module.modules()] == flags
    frozen = [p.requires_grad for p in attacked.module.parameters()]
    assert [p.requires_grad for p in removed.model.module.parameters()] == frozen


@pytest.mark.parametrize("name", [n for n in SCHEMES.names() if n != "plain"])
def test_schemes_that_fail(name, awkward, some, no_trace):
    scheme = SCHEMES.build(name, QUICK[name])
    key = scheme.keygen(awkward, some, owner="me", rng=Rng(0))
    awkward.module.fail.calls_left = 0
    calls = [lambda: embed(awkward, some, key, rng=Rng(1))]
    if name not in DRAWN_WITHOUT_RUNNING:
        calls.append(lambda: scheme.keygen(awkward, some, owner="me", rng=Rng(0)))
    if scheme.access == "black-box":
        calls.append(lambda: extract(awkward, key))
    for call in calls:
        with no_trace(awkward), pytest.raises(RuntimeError, match="fails here"):
            call()


@pytest.mark.parametrize("name", [n for n in REMOVAL.names() if n not in ("none", "prune", "quantise")])
def test_attacks_that_fail(name, attacked, some, no_trace):
    attacked.module.fail.calls_left = 0
    with no_trace(attacked), pytest.raises(RuntimeError, match="fails here"):
        REMOVAL.build(name, QUICK.get(name, {})).remove(attacked, some, rng=Rng(0))


def test_adapter_calls(awkward, some, no_trace):
    with no_trace(awkward):
        awkward.query(some.x)
        awkward.features(some.x, ["norm", "fc1"])
        awkward.accuracy(some)
        awkward.fingerprint()
        awkward.oracle(output="logits").query(some.x[:4])
        output_layer(awkward)
        execution_order(awkward.module, awkward.probe())
        x = some.x[:4].clone().requires_grad_(True)
        (gradient,) = torch.autograd.grad(awkward.logits(x).sum(), x)
    assert gradient.abs().sum() > 0


def test_hooks_go_when_a_layer_fails(awkward, some, no_trace):
    awkward.module.fail.calls_left = 0
    with no_trace(awkward):
        with pytest.raises(RuntimeError, match="fails here"):
            awkward.query(some.x)
        with pytest.raises(RuntimeError, match="fails here"):
            awkward.features(some.x, ["fc2"])
        awkward.module.eval()
        with pytest.raises(RuntimeError, match="fails here"):
            forward_to(awkward.module, awkward.prepare(some.x), ["fc2"])
        awkward.module.train()
        awkward.module.drop.eval()


def test_in_place_activation_does_not_change_what_is_read(awkward, some):
    awkward.module.eval()
    read = awkward.features(some.x, ["fc1"])["fc1"]
    assert (read < 0).any()


def test_user_s_gradients_stay(awkward, some, no_trace):
    awkward.module.eval()
    awkward.module(awkward.prepare(some.x)).sum().backward()
    kept = awkward.module.fc2.weight.grad.clone()
    marked = embed(
        awkward, some, SCHEMES.build("deepsigns", QUICK["deepsigns"]).keygen(awkward, some, owner="me"), rng=Rng(1)
    )
    assert torch.equal(awkward.module.fc2.weight.grad, kept)
    assert all(p.grad is None for p in marked.module.parameters())


@pytest.mark.parametrize("name", ["noise", "pgd", "deepfool"])
def test_evasion_where_the_model_gets_nothing_right(name, awkward, some):
    """A network may not take a batch of none."""
    awkward.module.flatten = Rows()
    wrong = Split(some.x, (awkward.predict(some.x) + 1) % 10)
    found = EVASION.build(name, {}).perturb(awkward, wrong, rng=Rng(0))
    assert torch.equal(found.x, some.x)


@pytest.mark.parametrize("name", ["fine-tune", "overwrite"])
def test_what_is_done_with_is_freed_at_once(name, awkward, some, monkeypatch):
    """Python looks for rings of objects when there are many; a few large networks are not many."""
    made: list[weakref.ref[nn.Module]] = []
    attack, copied = REMOVAL.build(name, QUICK[name]), Classifier.copy

    def noted(self: Classifier, **given: object) -> Classifier:
        result = copied(self, **given)
        made.append(weakref.ref(result.module))
        return result

    attack.remove(awkward, some, rng=Rng(0))  # the first use of an optimiser leaves some of torch's own behind
    monkeypatch.setattr(Classifier, "copy", noted)
    gc.collect()
    gc.disable()
    try:
        removed = attack.remove(awkward, some, rng=Rng(0))
        kept = [module() for module in made if module() is not None]
    finally:
        gc.enable()
    assert len(made) > 1
    assert [module is removed.model.module for module in kept] == [True]


def test_spec_is_only_shape():
    assert InputSpec(shape=(3,), num_classes=2).as_dict()["shape"] == [3]
