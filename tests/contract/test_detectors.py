"""What holds for every registered detector, whatever it measures."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn

from deepseal.adapter import Classifier, InputSpec, Split
from deepseal.defense.base import DETECTORS, Detector
from deepseal.defense.context import Context, Reference, contexts, differentiable_context
from deepseal.errors import InputError
from deepseal.rng import Rng

NoTrace = Callable[[Classifier], AbstractContextManager[None]]
QUICK: dict[str, dict[str, object]] = {
    "dictionary": {"rounds": 1, "atoms": 20, "patches": 500},
    "magnet": {"updates": 10},
    "deepfense-latent": {"epochs": 1},
}
NAMES = DETECTORS.names()
SIDE, CLASSES = 8, 4


class Failing(nn.Module):
    """Passes its input on until it is told to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.broken = False

    def forward(self, x: Tensor) -> Tensor:
        if self.broken:
            raise RuntimeError("the forward pass fails here")
        return x


def network(answers: int = CLASSES, seed: int = 0) -> nn.Sequential:
    """Batch normalisation, dropout, mixed training flags, a frozen parameter, a hook of the user's."""
    torch.manual_seed(seed)
    module = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(1, 6, 3),
            norm=nn.BatchNorm2d(6),
            act1=nn.ReLU(inplace=True),
            conv2=nn.Conv2d(6, 6, 3),
            act2=nn.ReLU(),
            flatten=nn.Flatten(),
            drop=nn.Dropout(0.5),
            fc1=nn.Linear(96, 12),
            fail=Failing(),
            act3=nn.ReLU(),
            fc2=nn.Linear(12, answers),
        )
    )
    module.train()
    module.drop.eval()
    module.fc1.bias.requires_grad_(False)
    module.act1.register_forward_hook(lambda *_: None)
    return module


def model(answers: int = CLASSES, classes: int = CLASSES) -> Classifier:
    return Classifier(network(answers), InputSpec((1, SIDE, SIDE), classes))


def data(count: int, classes: int = CLASSES, seed: int = 0) -> Split:
    y = torch.arange(count) % classes
    x = torch.rand(count, 1, SIDE, SIDE, generator=Rng(seed).torch()) * 0.6
    x[torch.arange(count), 0, y] += 0.4
    return Split(x, y)


def placed(name: str, victim: Classifier) -> Detector:
    return DETECTORS.build(name, QUICK.get(name, {})).placed(victim)


def only(victim: Classifier, x: Tensor, detector: Detector) -> Context:
    (context,) = contexts(victim, x, detector.needs.taps, batch=10_000)
    return context


@pytest.mark.parametrize("name", NAMES)
def test_leaves_no_trace_and_its_state_is_plain_tensors(name: str, no_trace: NoTrace) -> None:
    victim, split = model(), data(120)
    with no_trace(victim):
        detector = placed(name, victim)
        state = detector.fit(Reference(victim, split), rng=Rng(0))
        scores = detector.score(only(victim, split.tensor[:20], detector), state)
    assert scores.shape == (20,)
    assert scores.dtype.is_floating_point
    assert not scores.requires_grad
    assert bool(torch.isfinite(scores).all())
    assert all(not value.requires_grad for value in state.values())
    kept = safetensors.torch.load(safetensors.torch.save({name: value.contiguous() for name, value in state.items()}))
    torch.testing.assert_close(detector.score(only(victim, split.tensor[:20], detector), kept), scores)
    again = DETECTORS.build(name, detector.as_dict()).placed(victim)
    assert again == detector
    shared = {p.data_ptr() for p in victim.module.parameters()} & {value.data_ptr() for value in state.values()}
    assert not shared


@pytest.mark.parametrize("name", NAMES)
def test_leaves_no_trace_when_the_model_fails(name: str, no_trace: NoTrace) -> None:
    victim, split = model(), data(120)
    detector = placed(name, victim)
    state = detector.fit(Reference(victim, split), rng=Rng(0))
    context = only(victim, split.tensor[:5], detector)
    victim.module.fail.broken = True
    with no_trace(victim):
        if detector.needs.passes:
            with pytest.raises(RuntimeError, match="fails here"):
                detector.score(context, state)
        if detector.needs.taps:
            with pytest.raises(RuntimeError, match="fails here"):
                detector.fit(Reference(victim, split), rng=Rng(0))


@pytest.mark.parametrize("name", NAMES)
def test_same_seed_same_state_and_global_randomness_is_not_used(name: str) -> None:
    victim, split = model(), data(120)
    detector = placed(name, victim)
    first = detector.fit(Reference(victim, split), rng=Rng(3))
    torch.manual_seed(99)
    second = detector.fit(Reference(victim, split), rng=Rng(3))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[tensor], second[tensor]) for tensor in first)


@pytest.mark.parametrize("name", NAMES)
def test_one_input_scores_as_it_does_among_many(name: str) -> None:
    victim, split = model(), data(120)
    detector = placed(name, victim)
    state = detector.fit(Reference(victim, split), rng=Rng(0))
    x = data(24, seed=1).tensor
    together = detector.score(only(victim, x, detector), state)
    for batch in (1, 7):
        parts = [detector.score(one, state) for one in contexts(victim, x, detector.needs.taps, batch=batch)]
        torch.testing.assert_close(torch.cat(parts), together, rtol=5e-3, atol=5e-3)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_there_where_they_are_promised(name: str) -> None:
    victim, split = model(), data(120)
    detector = placed(name, victim)
    state = detector.fit(Reference(victim, split), rng=Rng(0))
    for surrogate in ("identity", "smooth"):
        leaf = (0.1 + 0.5 * torch.rand(6, 1, SIDE, SIDE, generator=Rng(2).torch())).requires_grad_(True)
        context = differentiable_context(victim, leaf, detector.needs.taps, surrogate=surrogate)
        scores = detector.score(context, state)
        torch.testing.assert_close(
            scores.detach(), detector.score(only(victim, leaf.detach(), detector), state), rtol=5e-3, atol=5e-3
        )
        if name == "constant":
            continue
        (gradient,) = torch.autograd.grad(scores.sum(), leaf)
        assert bool(torch.isfinite(gradient).all())
        if name != "gram":  # 0 within the bounds of clean data
            assert bool((gradient.flatten(1).abs().amax(dim=1) > 0).any())


@pytest.mark.parametrize("name", NAMES)
def test_an_absent_class_few_samples_and_constant_features(name: str) -> None:
    """Either scores that are finite, or an error for people."""
    victim = model()
    with torch.no_grad():
        victim.module.fc1.weight[4:].zero_()
        victim.module.conv2.weight[3:].zero_()
    full, fitted = data(160), 0
    for split in (full.take(torch.nonzero(full.y != 1).reshape(-1)), data(16), data(4), data(1)):
        detector = placed(name, victim)
        try:
            state = detector.fit(Reference(victim, split), rng=Rng(0))
        except InputError as error:
            assert len(split) <= 16, error
            continue
        fitted += 1
        scores = detector.score(only(victim, data(30, seed=1).tensor, detector), state)
        assert bool(torch.isfinite(scores).all())
    assert fitted


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["bfloat16", "one logit", "two classes"])
def test_half_precision_and_one_logit(name: str, kind: str) -> None:
    victim = {"bfloat16": model, "one logit": lambda: model(1, 2), "two classes": lambda: model(2, 2)}[kind]()
    if kind == "bfloat16":
        victim.module.to(torch.bfloat16)
    split = data(120, classes=victim.spec.num_classes)
    detector = placed(name, victim)
    state = detector.fit(Reference(victim, split), rng=Rng(0))
    scores = detector.score(only(victim, split.tensor[:10], detector), state)
    assert scores.shape == (10,)
    assert scores.dtype in (torch.float32, torch.float64)
    assert bool(torch.isfinite(scores).all())


@pytest.mark.parametrize("name", NAMES)
def test_inputs_that_are_no_images_and_models_that_only_answer(name: str) -> None:
    torch.manual_seed(0)
    layers = [nn.Linear(9, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3)]
    flat = Classifier(nn.Sequential(*layers), InputSpec((9,), 3))
    split = Split(torch.rand(120, 9, generator=Rng(0).torch()), torch.arange(120) % 3)
    detector = DETECTORS.build(name, QUICK.get(name, {}))
    if detector.needs.images:
        with pytest.raises(InputError):
            detector.placed(flat)
    else:
        fitted = detector.placed(flat)
        state = fitted.fit(Reference(flat, split), rng=Rng(0))
        assert bool(torch.isfinite(fitted.score(only(flat, split.tensor[:9], fitted), state)).all())
    oracle = model().oracle(output="logits")
    if detector.needs.access == "query":
        known = detector.placed(oracle)
        state = known.fit(Reference(oracle, data(120)), rng=Rng(0))
        (context,) = contexts(oracle, data(9).tensor, ())
        assert bool(torch.isfinite(known.score(context, state)).all())
    else:
        with pytest.raises(InputError):
            detector.placed(oracle)


@pytest.mark.parametrize("name", NAMES)
def test_parameters_are_documented_and_instances_frozen(name: str) -> None:
    kind = DETECTORS.get(name)
    assert kind.name == name
    assert all(row["help"] for row in kind.table())  # type: ignore[attr-defined]
    detector = DETECTORS.build(name, {})
    with pytest.raises(dataclasses.FrozenInstanceError):
        detector.name = "other"  # type: ignore[misc]
