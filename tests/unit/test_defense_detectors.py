"""Our own detectors against slow references and closed forms."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.ndimage
import torch
from scipy import stats
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Split
from deepseal.defense.base import DETECTORS
from deepseal.defense.boundary import BoundaryDistance
from deepseal.defense.confidence import Energy, MaxSoftmax
from deepseal.defense.context import Reference, contexts, differentiable_context
from deepseal.defense.density import LatentDensity
from deepseal.defense.gaussian import ClassGaussians, Moments, log_density, principal
from deepseal.defense.input_pca import Reconstruction, RelativeReconstruction
from deepseal.defense.odds import Odds
from deepseal.defense.placing import tap_at
from deepseal.defense.ratio import DistanceRatio
from deepseal.defense.squeezing import FeatureSqueezing
from deepseal.errors import InputError, UnknownNameError
from deepseal.rng import Rng

CLASSES, WIDTH = 3, 6


@pytest.fixture(scope="module")
def linear():
    torch.manual_seed(0)
    return Classifier(
        nn.Sequential(nn.Linear(WIDTH, 5), nn.Tanh(), nn.Linear(5, CLASSES)), InputSpec((WIDTH,), CLASSES)
    )


@pytest.fixture(scope="module")
def split():
    generator = Rng(0).torch()
    y = torch.arange(300) % CLASSES
    centres = torch.rand(CLASSES, WIDTH, generator=generator)
    return Split((centres[y] + 0.1 * torch.randn(300, WIDTH, generator=generator)).clamp(0, 1), y)


def one(model, x, detector):
    (found,) = contexts(model, x, detector.needs.taps)
    return found


def test_moments_in_batches_equal_numpy_also_far_from_zero():
    rows = torch.randn(1000, 4, generator=Rng(1).torch(), dtype=torch.float64) + 1e6
    moments = Moments.empty(4)
    for part in rows.split(77):
        moments = moments.add(part)
    assert moments.count == 1000
    assert np.allclose(moments.mean, rows.numpy().mean(axis=0))
    assert np.allclose(moments.covariance, np.cov(rows.numpy().T, bias=True), rtol=1e-6)
    halves = Moments.empty(4).add(rows[:400]).merged(Moments.empty(4).add(rows[400:]))
    assert np.allclose(halves.covariance, moments.covariance)


def test_log_density_equals_scipy_and_does_not_depend_on_the_batch():
    generator = Rng(2).torch()
    rows = torch.randn(400, 5, generator=generator, dtype=torch.float64)
    moments = [Moments.empty(5).add(rows[:200]), Moments.empty(5).add(2.0 * rows[200:] + 1.0)]
    found = ClassGaussians.of(moments, 0.1)
    classes = torch.arange(40) % 2
    ours = log_density(rows[:40], classes, found.means, found.whiten, found.offset)
    for index in range(40):
        own = moments[int(classes[index])]
        covariance = 0.9 * own.covariance + 0.1 * own.covariance.trace() / 5 * torch.eye(5, dtype=torch.float64)
        expected = stats.multivariate_normal(own.mean.numpy(), covariance.numpy()).logpdf(rows[index].numpy())
        assert float(ours[index]) == pytest.approx(expected)
    many = rows.repeat(200, 1)
    labels = torch.arange(len(many)) % 2
    looped = log_density(many, labels, found.means, found.whiten, found.offset)
    gathered = torch.cat(
        [
            log_density(part, label, found.means, found.whiten, found.offset)
            for part, label in zip(many.split(100), labels.split(100), strict=True)
        ]
    )
    assert torch.allclose(looped, gathered)


def test_principal_directions_hold_the_stated_share():
    rows = torch.randn(2000, 6, generator=Rng(3).torch(), dtype=torch.float64) * torch.tensor(
        [10, 5, 1, 0.5, 0.1, 0.01]
    )
    directions, variances = principal(Moments.empty(6).add(rows), 0.99, 6)
    assert directions.shape[1] == 2 or float(variances.sum() / rows.var(dim=0, correction=0).sum()) >= 0.99
    constant, _ = principal(Moments.empty(6).add(torch.ones(10, 6)), 0.99, 6)
    assert constant.shape == (6, 1)


def test_fewer_samples_than_features_and_constant_features_give_finite_densities():
    moments = [Moments.empty(50).add(torch.randn(5, 50, generator=Rng(4).torch())), Moments.empty(50)]
    found = ClassGaussians.of(moments, 0.0)
    constant = ClassGaussians.of([Moments.empty(4).add(torch.ones(9, 4))], 0.0)
    for gaussians in (found, constant):
        assert bool(torch.isfinite(gaussians.whiten).all())
        assert bool(torch.isfinite(gaussians.offset).all())
    assert torch.equal(found.means[1], found.means[0])  # the class without samples has all samples' Gaussian


def test_too_wide_a_layer_is_refused():
    with pytest.raises(InputError, match="at most 4096 features"):
        Moments.empty(5000)


def test_confidence_scores(linear, split):
    context = one(linear, split.tensor, MaxSoftmax())
    p = context.logits.double().softmax(dim=1).amax(dim=1)
    assert torch.allclose(MaxSoftmax().score(context, {}).double(), ((1 - p) / p).log(), atol=1e-4)
    assert torch.allclose(Energy().score(context, {}), -context.logits.logsumexp(dim=1))


def test_density_equals_a_reference(linear, split):
    detector = LatentDensity(layer="0", normalise=False, variance=1.0, shrinkage=0.05).placed(linear)
    state = detector.fit(Reference(linear, split), rng=Rng(0))
    context = one(linear, split.tensor, detector)
    ours = detector.score(context, state)
    features = linear.features(split.x, ["0"])["0"].double().numpy()
    for row in (0, 5, 17):
        label = int(context.predicted[row])
        own = features[split.y.numpy() == label]
        covariance = np.cov(own.T, bias=True)
        covariance = 0.95 * covariance + 0.05 * np.trace(covariance) / 5 * np.eye(5)
        expected = -stats.multivariate_normal(own.mean(axis=0), covariance).logpdf(features[row])
        assert float(ours[row]) == pytest.approx(expected, rel=1e-3, abs=1e-3)


def test_ratio_equals_brute_force(linear, split):
    detector = DistanceRatio(layer="0", variance=1.0, references=300, neighbours=3).placed(linear)
    state = detector.fit(Reference(linear, split), rng=Rng(0))
    context = one(linear, split.tensor[:20], detector)
    ours = detector.score(context, state)
    bank = nn.functional.normalize(linear.features(split.x, ["0"])["0"], dim=1).double().numpy()
    for row in range(20):
        distances = np.linalg.norm(bank - bank[row], axis=1)
        own = split.y.numpy() == int(context.predicted[row])
        near = [np.sort(np.maximum(distances[mask], 1e-6))[:3].mean() for mask in (own, ~own)]
        assert float(ours[row]) == pytest.approx(np.log(near[0]) - np.log(near[1]), rel=0.02, abs=0.05)


def test_ratio_refuses_one_class_and_too_few(linear, split):
    detector = DistanceRatio(layer="0").placed(linear)
    single = split.take(torch.nonzero(split.y == 0).reshape(-1))
    with pytest.raises(InputError, match="two classes"):
        detector.fit(Reference(linear, single), rng=Rng(0))
    with pytest.raises(InputError, match="at least 5 samples"):
        detector.fit(Reference(linear, split.take(torch.arange(9))), rng=Rng(0))


def test_reconstruction_errors_equal_numpy(linear, split):
    x = split.tensor.double().numpy()
    detector = Reconstruction(variance=0.7)
    state = detector.fit(Reference(linear, split), rng=Rng(0))
    context = one(linear, split.tensor, detector)
    _, _, directions = np.linalg.svd(x - x.mean(axis=0), full_matrices=False)
    kept = directions[: state["directions"].shape[1]]
    left = (x - x.mean(axis=0)) - (x - x.mean(axis=0)) @ kept.T @ kept
    assert np.allclose(detector.score(context, state).numpy(), np.log((left**2).sum(axis=1)), atol=1e-3)

    relative = RelativeReconstruction(directions=2)
    state = relative.fit(Reference(linear, split), rng=Rng(0))
    ours = relative.score(context, state).numpy()
    errors = []
    for label in range(CLASSES):
        own = x[split.y.numpy() == label]
        basis = np.linalg.svd(own - own.mean(axis=0), full_matrices=False)[2][:2]
        rest = (x - own.mean(axis=0)) - (x - own.mean(axis=0)) @ basis.T @ basis
        errors.append(np.log((rest**2).sum(axis=1)))
    errors = np.array(errors).T
    predicted = context.predicted.numpy()
    others = np.array([np.delete(row, label).min() for row, label in zip(errors, predicted, strict=True)])
    assert np.allclose(ours, errors[np.arange(300), predicted] - others, atol=2e-3)


def test_relative_reconstruction_of_a_missing_class_is_neutral(linear, split):
    some = split.take(torch.nonzero(split.y != 2).reshape(-1))
    detector = RelativeReconstruction(directions=2)
    state = detector.fit(Reference(linear, some), rng=Rng(0))
    context = one(linear, split.tensor, detector)
    found = detector.score(context, state)
    assert bool(torch.isfinite(found).all())
    assert bool((found[context.predicted == 2] == 0).all())


@pytest.mark.parametrize("conditional", [True, False])
def test_odds_standardise_clean_moves(linear, split, conditional):
    """Of clean inputs each pair's standardised moves have mean 0 and deviation 1, by construction."""
    detector = Odds(copies=4, spread=0.1, conditional=conditional)
    state = detector.fit(Reference(linear, split), rng=Rng(0))
    context = one(linear, split.tensor, detector)
    moves, differences = detector._moves(context, state)
    for label in context.predicted.unique().tolist():
        rows = context.predicted == label
        for other in range(CLASSES):
            if other == label or int(rows.sum()) < 20:
                continue
            expected = state["intercept"][label, other] + state["slope"][label, other] * differences[rows, other]
            standard = (moves[rows, other] - expected) / state["deviation"][label, other]
            assert abs(float(standard.mean())) < 1e-3
            assert float(standard.std(correction=0)) == pytest.approx(1.0, abs=1e-2)
            assert conditional or float(state["slope"][label, other]) == 0.0


def test_boundary_distance_is_exact_for_a_linear_model():
    torch.manual_seed(1)
    layer = nn.Linear(WIDTH, 2)
    model = Classifier(layer, InputSpec((WIDTH,), 2))
    x = torch.rand(50, WIDTH, generator=Rng(5).torch())
    detector = BoundaryDistance()
    found = detector.score(one(model, x, detector), {})
    difference = (layer.weight[0] - layer.weight[1]).detach()
    margin = ((x @ difference) + (layer.bias[0] - layer.bias[1]).detach()).abs()
    assert torch.allclose(found, -(margin / difference.norm()).log(), atol=1e-3)


def test_squeezers_equal_scipy():
    model = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), InputSpec((1, 6, 6), 3))
    x = torch.rand(8, 1, 6, 6, generator=Rng(6).torch())
    detector = FeatureSqueezing(bits=2, window=3)
    assert torch.allclose(detector._rounded(x, (0.0, 1.0), False), (x * 3).round() / 3)
    expected = np.stack([scipy.ndimage.median_filter(image[0].numpy(), 3, mode="nearest") for image in x])
    assert np.allclose(detector._median(x, False, False)[:, 0].numpy(), expected)
    found = detector.score(one(model, x, detector), {})
    assert bool((found >= 0).all())
    assert bool((found <= 2).all())


@pytest.mark.parametrize("surrogate", ["identity", "smooth"])
def test_a_surrogate_changes_gradients_and_not_scores(surrogate):
    torch.manual_seed(2)
    model = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), InputSpec((1, 6, 6), 3))
    x = torch.rand(8, 1, 6, 6, generator=Rng(6).torch()).requires_grad_(True)
    detector = FeatureSqueezing(bits=1, window=2)
    score = detector.score(differentiable_context(model, x, (), surrogate=surrogate), {})
    plain = detector.score(one(model, x.detach(), detector), {})
    assert torch.allclose(score.detach(), plain, atol=1e-5)
    (gradient,) = torch.autograd.grad(score.sum(), x)
    assert float(gradient.abs().sum()) > 0


def test_places_are_settled_after_activation_and_pooling():
    network = nn.Sequential(
        nn.Conv2d(1, 4, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(4, 6, 3),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(6 * 4 * 4, 10),
        nn.ReLU(),
        nn.Linear(10, 3),
    )
    model = Classifier(network, InputSpec((1, 14, 14), 3))
    assert tap_at(model, "first") == ("2", "none")
    assert tap_at(model, "early") == ("5", "none")
    assert tap_at(model, "last") == ("8", "none")
    with pytest.raises(UnknownNameError):
        tap_at(model, "nowhere")


def test_an_activation_that_is_shared_is_no_place():
    class Shared(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second, self.last, self.act = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3), nn.ReLU()

        def forward(self, x):
            return self.last(self.act(self.second(self.act(self.first(x)))))

    model = Classifier(Shared(), InputSpec((6,), 3))
    assert [tap_at(model, place).layer for place in ("first", "last")] == ["first", "second"]


def test_maps_that_are_too_large_are_pooled():
    network = nn.Sequential(nn.Conv2d(1, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 30 * 30, 3))
    assert tap_at(Classifier(network, InputSpec((1, 32, 32), 3)), "first") == ("1", "space")


def test_models_that_only_answer_get_what_needs_no_layer(linear, split):
    oracle = linear.oracle(output="logits")
    (context,) = contexts(oracle, split.tensor, ())
    assert MaxSoftmax().score(context, {}).shape == (300,)
    for name in ("density", "ratio", "dist"):
        with pytest.raises(InputError):
            DETECTORS.build(name, {}).placed(oracle)
