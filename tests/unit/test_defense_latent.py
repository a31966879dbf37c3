"""Latent defenders against densities that scipy computes from the same moments, and what tuning does to a copy."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor, nn

from deepseal.adapter import Classifier, Dataset, InputSpec, Split
from deepseal.attacks.base import EVASION
from deepseal.defense.context import Reference, contexts, differentiable_context
from deepseal.defense.density import LatentDensity
from deepseal.defense.hdda import HDDA
from deepseal.defense.latent_defender import DeepFenseLatent, centre_terms
from deepseal.errors import InputError
from deepseal.rng import Rng

NoTrace = Callable[[Classifier], AbstractContextManager[None]]


def _small(width: int = 12, classes: int = 4, inputs: int = 6) -> Classifier:
    torch.manual_seed(1)
    layers = [nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, classes)]
    return Classifier(nn.Sequential(*layers), InputSpec((inputs,), classes, (-10.0, 10.0)))


def _split(count: int, classes: int = 4, inputs: int = 6, seed: int = 0) -> Split:
    generator = Rng(seed).torch()
    y = torch.randint(classes, (count,), generator=generator)
    return Split(torch.randn(count, inputs, generator=generator) + y[:, None].float(), y)


def _only(model: Classifier, x: Tensor, detector: object) -> object:
    (context,) = contexts(model, x, detector.needs.taps, batch=10_000)  # type: ignore[attr-defined]
    return context


@pytest.mark.parametrize(("variance", "noise"), [(0.9, 0.01), (0.6, 0.5), (1.0, 0.01)])
def test_hdda_is_a_gaussian_of_the_papers_covariance(variance: float, noise: float) -> None:
    model, split = _small(), _split(300)
    detector = HDDA(variance=variance, noise=noise, normalise=False).placed(model)
    state = detector.fit(Reference(model, split), rng=Rng(0))
    context = _only(model, _split(50, seed=1).tensor, detector)
    rows = model.features(split.tensor, [detector.layer])[detector.layer].double().numpy()
    probes = context.at(detector.tap).double().numpy()
    expected = np.empty(50)
    for label in range(4):
        own = rows[split.y.numpy() == label]
        covariance = np.cov(own.T, bias=True)
        values, vectors = np.linalg.eigh(covariance)
        values, vectors = values[::-1], vectors[:, ::-1]
        count = min(int(np.sum(np.cumsum(values) < variance * values.sum()) + 1), len(values) - 1)
        floor = noise * values.sum() / len(values)
        outside = max(values[count:].mean(), floor)
        rebuilt = np.concatenate([np.maximum(values[:count], outside), np.full(len(values) - count, outside)])
        law = multivariate_normal(own.mean(axis=0), vectors @ np.diag(rebuilt) @ vectors.T)
        mine = context.predicted.numpy() == label
        expected[mine] = -law.logpdf(probes)[mine]
    np.testing.assert_allclose(detector.score(context, state).numpy(), expected, rtol=1e-3, atol=1e-3)


def test_hdda_in_further_passes_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, split = _small(), _split(300)
    split = split.take(torch.nonzero(split.y != 2).reshape(-1))  # a class without samples, too
    detector = HDDA().placed(model)
    at_once = detector.fit(Reference(model, split), rng=Rng(0))
    monkeypatch.setattr("deepseal.defense.hdda._MEMORY", 1)  # one class at a time
    one_by_one = detector.fit(Reference(model, split), rng=Rng(0))
    for name in at_once:
        torch.testing.assert_close(at_once[name], one_by_one[name], msg=name, rtol=1e-4, atol=1e-5)


def test_many_rows_and_few_give_the_same_density(monkeypatch: pytest.MonkeyPatch) -> None:
    model, split = _small(), _split(300)
    detector = HDDA().placed(model)
    state = detector.fit(Reference(model, split), rng=Rng(0))
    context = _only(model, split.tensor, detector)
    gathered = detector.score(context, state)
    monkeypatch.setattr("deepseal.defense.hdda._GATHERED", 0)
    torch.testing.assert_close(detector.score(context, state), gathered, rtol=1e-4, atol=1e-4)


def test_centre_terms_are_the_papers() -> None:
    generator = Rng(0).torch()
    f, C = torch.randn(7, 5, generator=generator), torch.randn(3, 5, generator=generator)
    y = torch.tensor([0, 1, 2, 0, 1, 2, 2])
    total = 0.0
    for row, label in zip(f.numpy(), y.tolist(), strict=True):
        total += np.sum((row - C[label].numpy()) ** 2)
        total -= sum(np.sum((row - C[other].numpy()) ** 2) for other in range(3) if other != label)
    expected = total / 7 + sum((np.linalg.norm(C[c].numpy()) - 1) ** 2 for c in range(3))
    assert float(centre_terms(f, y, C)) == pytest.approx(expected, rel=1e-5)


def test_without_tuning_it_is_the_density_of_the_victims_own_layer(base: Classifier, digits: Dataset) -> None:
    reference = Reference(base, digits.train)
    own = LatentDensity(layer="last", directions=64).placed(base)
    copied = DeepFenseLatent(layer="last", directions=64, epochs=0).placed(base)
    expected = own.score(_only(base, digits.test.tensor, own), own.fit(reference, rng=Rng(0)))
    found = copied.score(_only(base, digits.test.tensor, copied), copied.fit(reference, rng=Rng(0)))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-2)


def test_tuned_copy_scores_as_scipy_does_from_its_own_features(digits: Dataset, base: Classifier) -> None:
    detector = DeepFenseLatent(epochs=1, shrinkage=0.05, directions=12).placed(base)
    state = detector.fit(Reference(base, digits.train), rng=Rng(0))
    layers = dict(base.copy().module.named_modules())
    copy = base.copy()
    copy.module.load_state_dict({name[6:]: value for name, value in state.items() if name.startswith("tuned.")})
    changed = sum(
        float((a - b).abs().sum()) for a, b in zip(copy.tensors().values(), base.tensors().values(), strict=True)
    )
    assert changed > 0.0
    assert detector.layer in layers

    def read(x: Tensor) -> np.ndarray:
        rows = copy.features(x, [detector.layer])[detector.layer]
        return (rows / rows.norm(dim=1, keepdim=True)).double().numpy()

    rows, probes = read(digits.train.tensor), read(digits.test.tensor)
    mean, labels = rows.mean(axis=0), digits.train.y.numpy()
    vectors = np.linalg.eigh(np.cov(rows.T, bias=True))[1][:, ::-1][:, :12]
    context = _only(base, digits.test.tensor, detector)
    expected = np.empty(len(digits.test))
    for label in range(10):
        own = (rows[labels == label] - mean) @ vectors
        covariance = np.cov(own.T, bias=True)
        covariance = 0.95 * covariance + 0.05 * np.trace(covariance) / 12 * np.eye(12)
        mine = context.predicted.numpy() == label
        expected[mine] = -multivariate_normal(own.mean(axis=0), covariance).logpdf((probes - mean) @ vectors)[mine]
    np.testing.assert_allclose(detector.score(context, state).numpy(), expected, rtol=2e-3, atol=2e-2)


def test_tuning_draws_classes_to_their_centres(base: Classifier, digits: Dataset) -> None:
    within = {}
    for gamma in (0.0, 0.01):
        detector = DeepFenseLatent(gamma=gamma, epochs=3, rate=1.0).placed(base)
        state = detector.fit(Reference(base, digits.train), rng=Rng(0))
        copy = base.copy()
        copy.module.load_state_dict({name[6:]: value for name, value in state.items() if name.startswith("tuned.")})
        rows = nn.functional.normalize(copy.features(digits.test.tensor, [detector.layer])[detector.layer], dim=1)
        means = torch.stack([rows[digits.test.y == label].mean(dim=0) for label in range(10)])
        own = (rows - means[digits.test.y]).square().sum(dim=1).mean()
        within[gamma] = float(own / (rows - rows.mean(dim=0)).square().sum(dim=1).mean())
    assert within[0.01] < within[0.0]


@pytest.mark.parametrize("detector", [HDDA(layer="last"), DeepFenseLatent(epochs=2)])
def test_tells_attacked_inputs_leaves_no_trace_and_has_a_gradient(
    detector: HDDA | DeepFenseLatent, base: Classifier, digits: Dataset, no_trace: NoTrace
) -> None:
    some = digits.test.take(torch.arange(150))
    attacked = EVASION.build("pgd", {"epsilon": 0.3}).perturb(base, some, rng=Rng(0))
    assert int(attacked.fooled.sum()) > 50
    with no_trace(base):
        placed = detector.placed(base)
        state = placed.fit(Reference(base, digits.train), rng=Rng(0))
        clean = placed.score(_only(base, digits.test.tensor, placed), state)
        found = placed.score(_only(base, attacked.x[attacked.fooled], placed), state)
        leaf = digits.test.tensor[:5].clone().requires_grad_(True)
        context = differentiable_context(base, leaf, placed.needs.taps, surrogate="identity")
        (gradient,) = torch.autograd.grad(placed.score(context, state).sum(), leaf)
    assert float((found[:, None] > clean[None, :]).float().mean()) > 0.75  # area under the curve
    assert not clean.requires_grad
    assert bool((gradient.flatten(1).abs().sum(dim=1) > 0).all())
    step = 1e-2 * gradient / gradient.flatten(1).norm(dim=1).reshape(-1, 1, 1, 1)
    inside = (digits.test.tensor[:5] + step).clamp(*base.spec.bounds)
    assert bool((placed.score(_only(base, inside, placed), state) >= clean[:5]).all())
    alone = torch.cat([placed.score(one, state) for one in contexts(base, some.tensor[:8], placed.needs.taps, batch=1)])
    torch.testing.assert_close(alone, clean[:8], rtol=1e-3, atol=1e-2)


def test_a_frozen_and_a_half_precision_victim_can_be_defended(base: Classifier, digits: Dataset) -> None:
    some = digits.train.take(torch.arange(300))
    frozen = base.copy()
    frozen.module.requires_grad_(False)
    half = base.copy()
    half.module.to(torch.bfloat16)
    for victim in (frozen, half):
        detector = DeepFenseLatent(epochs=1).placed(victim)
        state = detector.fit(Reference(victim, some), rng=Rng(0))
        assert all(value.dtype == torch.float32 for name, value in state.items() if name.startswith("tuned."))
        scores = detector.score(_only(victim, digits.test.tensor[:20], detector), state)
        assert bool(torch.isfinite(scores).all())
    assert half.dtype == torch.bfloat16


@pytest.mark.parametrize("detector", [HDDA(), DeepFenseLatent(epochs=1)])
def test_absent_classes_few_samples_and_constant_features(detector: HDDA | DeepFenseLatent) -> None:
    model = _small()
    with torch.no_grad():
        model.module[2].weight[3:].zero_()  # most features of the last hidden layer are constant
    for split in (_split(5), dataclasses.replace(_split(40), y=torch.zeros(40, dtype=torch.int64))):
        placed = detector.placed(model)
        state = placed.fit(Reference(model, split), rng=Rng(0))
        scores = placed.score(_only(model, _split(30, seed=2).tensor, placed), state)
        assert bool(torch.isfinite(scores).all())


def test_a_model_that_only_answers_is_refused(base: Classifier) -> None:
    for detector in (HDDA(), DeepFenseLatent()):
        with pytest.raises(InputError, match="layers can be read"):
            detector.placed(base.oracle())
