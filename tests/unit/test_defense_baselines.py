"""The field's detectors against slow numpy versions of their papers' formulas."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from deepseal.adapter import Classifier, Dataset, InputSpec, Split
from deepseal.attacks.base import EVASION
from deepseal.defense.base import DETECTORS
from deepseal.defense.context import Context, Reference, contexts, differentiable_context
from deepseal.defense.gram import Gram
from deepseal.defense.kernel_density import KernelDensity
from deepseal.defense.knn import NearestNeighbours
from deepseal.defense.lid import LID
from deepseal.defense.magnet import MagNet
from deepseal.defense.mahalanobis import Mahalanobis
from deepseal.defense.vim import ViM
from deepseal.errors import InputError
from deepseal.rng import Rng

NoTrace = Callable[[Classifier], AbstractContextManager[None]]
NAMES = ("mahalanobis", "lid", "knn", "kernel-density", "magnet", "vim", "gram")
CLASSES, SIDE = 3, 8


def _net(seed: int = 0) -> Classifier:
    torch.manual_seed(seed)
    module = nn.Sequential(
        nn.Conv2d(1, 5, 3), nn.Tanh(), nn.Flatten(), nn.Linear(180, 10), nn.ReLU(), nn.Linear(10, CLASSES)
    )
    return Classifier(module, InputSpec((1, SIDE, SIDE), CLASSES))


def _data(count: int, seed: int = 0) -> Split:
    generator = Rng(seed).torch()
    y = torch.arange(count) % CLASSES
    x = torch.rand(count, 1, SIDE, SIDE, generator=generator) * 0.6
    x[torch.arange(count), :, y] += 0.4
    return Split(x, y)


def _context(model: Classifier, x: Tensor, detector: Any) -> Context:
    (context,) = contexts(model, x, detector.needs.taps, batch=10_000)
    return context


def _rows(model: Classifier, x: Tensor, detector: Any) -> list[np.ndarray]:
    context = _context(model, x, detector)
    return [context.at(tap).double().numpy() for tap in detector.needs.taps]


@pytest.fixture(scope="module")
def net() -> Classifier:
    return _net()


def test_mahalanobis_is_lees_distance_standardised(net: Classifier) -> None:
    data, probes = _data(200), _data(40, seed=1).tensor
    detector = Mahalanobis(shrinkage=0.02).placed(net)
    assert len(detector.layers) == 2
    state = detector.fit(Reference(net, data), rng=Rng(0))
    total = np.zeros(40)
    for rows, asked in zip(_rows(net, data.tensor, detector), _rows(net, probes, detector), strict=True):
        means = [rows[data.y.numpy() == label].mean(axis=0) for label in range(CLASSES)]
        centred = rows - np.stack(means)[data.y.numpy()]
        covariance = centred.T @ centred / len(rows)
        width = len(covariance)
        covariance = 0.98 * covariance + 0.02 * np.trace(covariance) / width * np.eye(width)
        inverse = np.linalg.inv(covariance)

        def distance(points: np.ndarray, means: Any = means, inverse: Any = inverse) -> np.ndarray:
            return np.array([min((p - m) @ inverse @ (p - m) for m in means) for p in points])

        clean = distance(rows)
        total += (distance(asked) - clean.mean()) / clean.std()
    np.testing.assert_allclose(
        detector.score(_context(net, probes, detector), state).numpy(), total / 2, rtol=1e-3, atol=1e-3
    )


def test_lid_is_the_maximum_likelihood_estimate(net: Classifier) -> None:
    data, probes = _data(90), _data(20, seed=1).tensor
    detector = LID(neighbours=7, references=45).placed(net)
    state = detector.fit(Reference(net, data), rng=Rng(0))
    total = np.zeros(20)
    for index, asked in enumerate(_rows(net, probes, detector)):
        references = state[f"{index}.references"].double().numpy()
        assert len(references) == 45
        estimates = []
        for row in asked:
            near = np.sort(np.linalg.norm(references - row, axis=1))[:7]
            estimates.append(-1.0 / np.mean(np.log(near / near[-1])))
        mean, spread = state["scale"][index].tolist()
        total += (np.array(estimates) - mean) / spread
    np.testing.assert_allclose(
        detector.score(_context(net, probes, detector), state).numpy(), total / 2, rtol=1e-2, atol=1e-2
    )
    many = detector.score(_context(net, _data(300, seed=5).tensor, detector), state)
    assert abs(float(many.mean())) < 0.4  # standardised on other inputs than the references themselves


def test_knn_is_the_distance_to_the_kth(net: Classifier) -> None:
    data, probes = _data(120), _data(20, seed=1).tensor
    detector = NearestNeighbours(neighbours=11).placed(net)
    state = detector.fit(Reference(net, data), rng=Rng(0))
    (rows,), (asked,) = _rows(net, data.tensor, detector), _rows(net, probes, detector)
    rows, asked = (part / np.linalg.norm(part, axis=1, keepdims=True) for part in (rows, asked))
    expected = [np.sort(np.linalg.norm(rows - row, axis=1))[10] for row in asked]
    np.testing.assert_allclose(detector.score(_context(net, probes, detector), state).numpy(), expected, rtol=1e-3)


def test_kernel_density_is_a_mean_of_gaussians(net: Classifier) -> None:
    data, probes = _data(90), _data(20, seed=1).tensor
    detector = KernelDensity().placed(net)
    state = detector.fit(Reference(net, data), rng=Rng(0))
    width = float(state["bandwidth"])
    (rows,), (asked,) = _rows(net, data.tensor, detector), _rows(net, probes, detector)
    context = _context(net, probes, detector)
    size = rows.shape[1]
    expected = []
    for row, label in zip(asked, context.predicted.tolist(), strict=True):
        own = rows[data.y.numpy() == label]
        squared = np.sum((own - row) ** 2, axis=1)
        kernels = np.exp(-squared / (2 * width**2)) / (2 * np.pi * width**2) ** (size / 2)
        expected.append(-np.log(np.mean(kernels)))
    np.testing.assert_allclose(detector.score(context, state).numpy(), expected, rtol=1e-3, atol=1e-3)

    def likelihood(candidate: float) -> float:
        logs = []
        for place, row in enumerate(rows):
            own = np.delete(rows, place, axis=0)[np.delete(data.y.numpy(), place) == int(data.y[place])]
            squared = np.sum((own - row) ** 2, axis=1)
            exponents = -squared / (2 * candidate**2)
            top = exponents.max()
            logs.append(top + np.log(np.mean(np.exp(exponents - top))) - size / 2 * np.log(2 * np.pi * candidate**2))
        return float(np.sort(logs)[(len(logs) - 1) // 2])

    assert likelihood(width) >= max(likelihood(width * factor) for factor in (0.3, 0.5, 2.0, 3.0))


@pytest.mark.parametrize("norm", ["l1", "l2"])
def test_magnet_is_the_autoencoders_error(norm: str, base: Classifier, digits: Dataset) -> None:
    detector = MagNet(updates=400, norm=norm, maps=8, noise=0.0).placed(base)
    state = detector.fit(Reference(base, digits.train), rng=Rng(0))
    x, low, high = digits.test.tensor[:30], *base.spec.bounds
    value = ((x - low) / (high - low)).clone()
    for place in (0, 3, 5, 8, 10):
        if place == 8:
            value = nn.functional.interpolate(value, size=x.shape[2:])
        value = (
            torch.sigmoid(
                nn.functional.conv2d(value, state[f"body.{place}.weight"], state[f"body.{place}.bias"], padding=1)
            )
            if f"body.{place}.weight" in state
            else value
        )
        if place == 0:
            value = nn.functional.avg_pool2d(value, 2)
    change = (value - (x - low) / (high - low)).flatten(1)
    expected = change.abs().mean(dim=1) if norm == "l1" else change.square().mean(dim=1)
    found = detector.score(_context(base, x, detector), state)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    mean = (digits.train.tensor.mean(dim=0) - x).flatten(1) / (high - low)
    blind = mean.abs().mean(dim=1) if norm == "l1" else mean.square().mean(dim=1)
    assert float(found.mean()) < 0.8 * float(blind.mean())  # it has learned more than the mean image


def test_vim_is_the_virtual_logit(net: Classifier) -> None:
    data, probes = _data(200), _data(30, seed=1).tensor
    detector = ViM(directions=4).placed(net)
    state = detector.fit(Reference(net, data), rng=Rng(0))
    (rows,), (asked,) = _rows(net, data.tensor, detector), _rows(net, probes, detector)
    last = net.module[5]
    W, b = last.weight.detach().double().numpy(), last.bias.detach().double().numpy()
    origin = -np.linalg.pinv(W) @ b
    values, vectors = np.linalg.eigh((rows - origin).T @ (rows - origin))
    R = vectors[:, np.argsort(values)[:-4]]
    factor = np.mean(np.max(rows @ W.T + b, axis=1)) / np.mean(np.linalg.norm((rows - origin) @ R, axis=1))
    virtual = factor * np.linalg.norm((asked - origin) @ R, axis=1)
    expected = virtual - np.log(np.sum(np.exp(asked @ W.T + b), axis=1))
    np.testing.assert_allclose(
        detector.score(_context(net, probes, detector), state).numpy(), expected, rtol=1e-3, atol=1e-3
    )


def test_vim_refuses_a_layer_from_which_the_answer_does_not_follow(net: Classifier) -> None:
    wrong = ViM(layer="first").placed(net)
    with pytest.raises(InputError, match="last layer of what is read"):
        wrong.fit(Reference(net, _data(30)), rng=Rng(0))


def test_gram_is_the_total_deviation_of_row_sums(net: Classifier) -> None:
    data, probes = _data(300), (_data(30, seed=1).tensor * 1.2).clamp_max(1.0)
    detector = Gram(orders=3).placed(net)
    assert detector.channels == (5, 10)
    state = detector.fit(Reference(net, data), rng=Rng(3))
    order = torch.randperm(300, generator=Rng(3).torch())
    most, rest = data.tensor[order[:270]], data.tensor[order[270:]]

    def sums(x: Tensor, index: int) -> np.ndarray:
        wide = detector.channels[index]
        found = []
        for row in _rows(net, x, detector)[index]:
            F = row.reshape(wide, -1)
            each = []
            for p in (1, 2, 3):
                G = (F**p) @ (F**p).T
                each.append((np.sign(G) * np.abs(G) ** (1 / p)).sum(axis=1))
            found.append(each)
        return np.array(found)

    predicted = {
        "most": net.predict(most).numpy(),
        "rest": net.predict(rest).numpy(),
        "probes": net.predict(probes).numpy(),
    }
    total = np.zeros(30)
    for index in range(2):
        own = sums(most, index)
        bounds = {}
        for label in range(CLASSES):
            rows = own[predicted["most"] == label]
            rows = rows if len(rows) else own
            bounds[label] = (rows.min(axis=0), rows.max(axis=0))

        def deviation(x: Tensor, labels: np.ndarray, index: int = index, bounds: Any = bounds) -> np.ndarray:
            found = []
            for row, label in zip(sums(x, index), labels, strict=True):
                low, high = bounds[label]
                least = 1e-3 * np.maximum(np.abs(low), np.abs(high)).max(axis=1, keepdims=True)  # silent channels
                under = np.maximum(low - row, 0) / np.maximum(np.abs(low), least)
                over = np.maximum(row - high, 0) / np.maximum(np.abs(high), least)
                found.append((under + over).sum())
            return np.array(found)

        total += deviation(probes, predicted["probes"]) / max(0.01, deviation(rest, predicted["rest"]).mean())
    found = detector.score(_context(net, probes, detector), state).numpy()
    np.testing.assert_allclose(found, total, rtol=2e-2, atol=1e-2)
    assert found.max() > 1.0


def test_gram_reads_maps_whole_where_densities_read_their_means() -> None:
    module = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 18 * 18, 4))
    detector = Gram().placed(Classifier(module, InputSpec((1, 20, 20), 4)))
    assert (detector.pools, detector.channels) == (("none",), (16,))
    assert Mahalanobis().placed(Classifier(module, InputSpec((1, 20, 20), 4))).pools == ("space",)


@pytest.mark.parametrize("name", NAMES)
def test_tells_attacked_inputs_and_leaves_no_trace(
    name: str, base: Classifier, digits: Dataset, no_trace: NoTrace
) -> None:
    some = digits.test.take(torch.arange(100))
    attacked = EVASION.build("fgsm", {"epsilon": 0.5}).perturb(base, some, rng=Rng(0))
    assert int(attacked.fooled.sum()) > 30
    with no_trace(base):
        detector = DETECTORS.build(name, {}).placed(base)
        state = detector.fit(Reference(base, digits.train), rng=Rng(0))
        clean = detector.score(_context(base, digits.test.tensor, detector), state)
        found = detector.score(_context(base, attacked.x[attacked.fooled], detector), state)
        leaf = digits.test.tensor[:4].clone().requires_grad_(True)
        scores = detector.score(differentiable_context(base, leaf, detector.needs.taps, surrogate="identity"), state)
        (gradient,) = torch.autograd.grad(scores.sum(), leaf)
    assert clean.shape == (len(digits.test),)
    assert not clean.requires_grad
    assert bool(torch.isfinite(gradient).all())
    if name != "gram":  # inside the bounds of clean data it is 0, and so is its gradient
        assert bool((gradient.flatten(1).abs().sum(dim=1) > 0).all())
    assert float((found[:, None] > clean[None, :]).float().mean()) > 0.6  # area under the curve
    assert not detector.needs.supervised
