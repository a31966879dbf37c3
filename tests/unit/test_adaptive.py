"""Adaptive attacks: as strong as the exact answer where there is one, and no claim that the guard does not confirm."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from scipy.optimize import linprog, minimize
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Split
from deepseal.attacks import EVASION
from deepseal.attacks.evasion.adaptive_cw import AdaptiveCW
from deepseal.attacks.evasion.adaptive_pgd import AdaptivePGD, _without
from deepseal.attacks.evasion.carlini_wagner import CarliniWagner
from deepseal.attacks.evasion.pgd import PGD
from deepseal.defense.guarded import GuardedModel
from deepseal.defense.monitor import calibrate, fit_monitor
from deepseal.defense.presets import choose
from deepseal.errors import InputError
from deepseal.rng import Rng

EPSILON = 0.08
CLASSES, FEATURES = 4, 12


@dataclasses.dataclass
class Watched:
    """A model and a detector whose suspicion is linear: ``watch`` . x."""

    inner: Classifier
    watch: torch.Tensor
    limit: float
    calls: int = 0

    output = "logits"

    @property
    def spec(self):
        return self.inner.spec

    def query(self, x):
        return self.inner.query(x)

    def logits(self, x):
        return self.inner.logits(x)

    def suspicion(self, x, *, surrogate="identity"):
        self.calls += 1
        return x.flatten(1) @ self.watch

    def alarms(self, x):
        return self.suspicion(x) > self.limit


@pytest.fixture(scope="module")
def linear():
    generator = Rng(7).torch()
    layer = nn.Linear(FEATURES, CLASSES)
    with torch.no_grad():
        layer.weight.copy_(torch.randn(CLASSES, FEATURES, generator=generator))
        layer.bias.copy_(torch.randn(CLASSES, generator=generator) * 0.1)
    return Classifier(layer, InputSpec(shape=(FEATURES,), num_classes=CLASSES, bounds=(-1.0, 2.0)))


@pytest.fixture(scope="module")
def points(linear):
    x = torch.rand(80, FEATURES, generator=Rng(8).torch()) * 3.0 - 1.0
    return Split(x, linear.predict(x))


@pytest.fixture(scope="module")
def watched(linear, points):
    """The detector minds what leads away from the points' classes; seven in ten of them raise the alarm as they are."""
    watch = torch.randn(FEATURES, generator=Rng(9).torch())
    return Watched(linear, watch, float((points.x @ watch).quantile(0.3)))


def feasible(watched, points, slack=0.0):
    """For each point whether a wrong and unflagged one lies in its ball: a linear programme for each wrong class."""
    weight, bias = (t.detach().double().numpy() for t in watched.inner.module.parameters())
    watch, (low, high) = watched.watch.double().numpy(), watched.spec.bounds
    found = []
    for x, y in zip(points.x.double().numpy(), points.y.tolist(), strict=True):
        radius = EPSILON * (high - low)
        box = list(zip(np.maximum(x - radius, low), np.minimum(x + radius, high), strict=True))
        results = [
            linprog(weight[y] - weight[k], A_ub=[watch], b_ub=[watched.limit - slack], bounds=box)
            for k in range(CLASSES)
            if k != y
        ]
        others = [k for k in range(CLASSES) if k != y]
        found.append(
            any(r.success and r.fun + bias[y] - bias[k] < -slack for r, k in zip(results, others, strict=True))
        )
    return torch.tensor(found)


@pytest.fixture(scope="module")
def truth(watched, points):
    return feasible(watched, points), feasible(watched, points, slack=0.03)


class TestAgainstLinearProgrammes:
    @pytest.mark.parametrize(
        ("loss", "least"), [("selective", 0.8), ("orthogonal", 0.95), ("joint", 0.95), ("all", 1.0)]
    )
    def test_finds_what_there_is_and_nothing_else(self, loss, least, watched, points, truth):
        possible, easily = truth
        found = AdaptivePGD(epsilon=EPSILON, loss=loss, margin=0.01).perturb(watched, points, rng=Rng(0))
        assert 20 < int(easily.sum()) <= int(possible.sum()) < 60
        assert not bool((found.fooled & ~possible).any())
        assert float(found.fooled[easily].double().mean()) >= least

    def test_an_attack_that_does_not_know_of_the_detector_is_weaker(self, watched, points, truth):
        found = PGD(epsilon=EPSILON, restarts=4).perturb(watched, points, rng=Rng(0))
        oblivious = found.fooled & ~watched.alarms(found.x)
        assert int(oblivious.sum()) < 0.6 * int(truth[1].sum())


@pytest.fixture(scope="module")
def found(watched, points):
    return AdaptivePGD(epsilon=EPSILON).perturb(watched, points, rng=Rng(0))


class TestWhatItClaims:
    def test_wrong_unflagged_and_in_the_ball(self, found, watched, points):
        wrong = watched.query(found.x).argmax(dim=1) != points.y
        assert torch.equal(found.fooled, wrong & ~watched.alarms(found.x))
        assert torch.equal(found.x[~found.fooled], points.x[~found.fooled])
        assert float((found.x - points.x).abs().max()) <= EPSILON * 3.0 + 1e-6
        low, high = watched.spec.bounds
        assert low <= float(found.x.min()) <= float(found.x.max()) <= high

    def test_evidence(self, found, points):
        evidence = found.evidence
        assert evidence["attacked"] == len(points)
        assert evidence["wrong"] >= evidence["wrong_and_unflagged"] == int(found.fooled.sum()) == evidence["fooled"]
        assert evidence["fooled_alone"] == evidence["asked_alone"]
        assert len(evidence["trials"]) == 4 * 3 * 2
        assert sum(trial["first"] for trial in evidence["trials"]) == evidence["fooled"]

    def test_what_the_deployed_detector_flags_does_not_count(self, watched, points):
        """The graph's score says unflagged, the deployed detector alarms at everything."""

        class Strict(Watched):
            def alarms(self, x):
                return torch.ones(len(x), dtype=torch.bool)

        strict = Strict(watched.inner, watched.watch, watched.limit)
        found = AdaptivePGD(epsilon=EPSILON, restarts=1).perturb(strict, points, rng=Rng(0))
        assert found.evidence["fooled"] == 0 < found.evidence["wrong"]
        assert torch.equal(found.x, points.x)

    def test_same_seed_same_inputs(self, found, watched, points):
        again = AdaptivePGD(epsilon=EPSILON).perturb(watched, points, rng=Rng(0))
        assert torch.equal(again.x, found.x)
        assert again.evidence == found.evidence

    def test_l2_ball(self, watched, points):
        found = AdaptivePGD(epsilon=0.8, norm="l2").perturb(watched, points, rng=Rng(0))
        assert found.evidence["fooled"] > 20
        assert float((found.x - points.x).norm(dim=1).max()) <= 0.8 + 1e-5

    def test_draws_of_the_detectors_noise(self, linear, points, watched):
        counted = Watched(linear, watched.watch, -1e9)  # nothing passes: no search ends early
        params = {"epsilon": EPSILON, "steps": 3, "restarts": 1, "loss": "joint", "surrogate": "identity"}
        numbers = []
        for eot in (1, 5):
            counted.calls = 0
            AdaptivePGD(eot=eot, **params).perturb(counted, points, rng=Rng(0))
            numbers.append(counted.calls)
        assert numbers[1] - numbers[0] == 4 * 3  # four more draws at each point of the way but the first, not yet wrong

    def test_gradients_that_are_no_numbers_stop_nobody(self, watched, points):
        class Broken(Watched):
            def suspicion(self, x, *, surrogate="identity"):
                return x.flatten(1) @ self.watch + (0.0 * (x - x).square().sum(dim=1)).sqrt()

        found = AdaptivePGD(epsilon=EPSILON, restarts=1, loss="selective").perturb(
            Broken(watched.inner, watched.watch, watched.limit), points, rng=Rng(0)
        )
        assert found.evidence["fooled"] > 0


def test_the_orthogonal_part_is_orthogonal_and_never_nothing():
    a, b = torch.randn(2, 9, 3, 4, generator=Rng(0).torch())
    rest = _without(a, b)
    assert float((rest * b).flatten(1).sum(dim=1).abs().max()) < 1e-4
    assert torch.equal(_without(a, a), a)
    assert torch.equal(_without(a, torch.zeros_like(a)), a)


def test_surrogates_reach_the_detector(watched, points):
    asked = set()

    class Noting(Watched):
        def suspicion(self, x, *, surrogate="identity"):
            if x.requires_grad:
                asked.add(surrogate)
            return super().suspicion(x)

    noting = Noting(watched.inner, watched.watch, -1e9)
    for choice, expected in (("smooth", {"smooth"}), ("both", {"smooth", "identity"})):
        asked.clear()
        AdaptivePGD(surrogate=choice, steps=2, restarts=1).perturb(noting, points, rng=Rng(0))
        assert asked == expected


class TestCarliniWagner:
    def nearest(self, watched, points):
        """(N,) length of the smallest silent change: a quadratic programme for each wrong class."""
        weight, bias = (t.detach().double().numpy() for t in watched.inner.module.parameters())
        watch, (low, high) = watched.watch.double().numpy(), watched.spec.bounds
        lengths = []
        for x, y in zip(points.x.double().numpy(), points.y.tolist(), strict=True):
            best = np.inf
            for k in range(CLASSES):
                if k == y:
                    continue
                rows = np.stack([weight[k] - weight[y], -watch])
                least = np.array([bias[y] - bias[k], -watched.limit])
                fit = minimize(
                    lambda z, x=x: ((z - x) ** 2).sum(),
                    x,
                    jac=lambda z, x=x: 2 * (z - x),
                    bounds=[(low, high)] * FEATURES,
                    constraints={
                        "type": "ineq",
                        "fun": lambda z, r=rows, b=least: r @ z - b,
                        "jac": lambda z, r=rows: r,
                    },
                )
                if fit.success:
                    best = min(best, fit.fun**0.5)
            lengths.append(best)
        return torch.tensor(lengths)

    def test_the_smallest_silent_change(self, watched, points):
        some = points.take(torch.arange(30))
        found = AdaptiveCW(steps=200, surrogate="identity").perturb(watched, some, rng=Rng(0))
        wrong = watched.query(found.x).argmax(dim=1) != some.y
        assert torch.equal(found.fooled, wrong & ~watched.alarms(found.x))
        assert float(found.fooled.double().mean()) >= 0.95
        ratio = ((found.x - some.x).norm(dim=1) / self.nearest(watched, some))[found.fooled]
        assert float(ratio.min()) > 0.99
        assert float(ratio.median()) < 1.1

    def test_confidence(self, watched, points):
        some = points.take(torch.arange(30))
        found = AdaptiveCW(confidence=0.5, searches=4, surrogate="identity").perturb(watched, some, rng=Rng(0))
        z, y = watched.query(found.x)[found.fooled], some.y[found.fooled]
        gap = z.scatter(1, y[:, None], float("-inf")).amax(dim=1) - z.gather(1, y[:, None])[:, 0]
        assert len(gap) > 15
        assert float(gap.min()) >= 0.5 - 1e-4


@pytest.fixture(scope="module")
def monitored(base, digits):
    """A network with real detectors, one of which has steps without a gradient."""
    chosen = choose(base, ["inrel", "density", "squeeze"])
    monitor = fit_monitor(base, digits.train, chosen.detectors, rng=Rng(0))
    return GuardedModel(calibrate(monitor, digits.calibration, rng=Rng(0), false_positive=0.05))


class TestARealMonitor:
    @pytest.fixture(scope="class")
    def some(self, digits):
        return digits.test.take(torch.arange(60))

    def test_knowing_of_it_finds_more(self, monitored, some, no_trace):
        with no_trace(monitored.monitor.model):
            found = AdaptivePGD(epsilon=0.3, steps=20, restarts=1).perturb(monitored, some, rng=Rng(0))
        right = monitored.query(some.x).argmax(dim=1) == some.y
        wrong = monitored.query(found.x).argmax(dim=1) != some.y
        assert torch.equal(found.fooled, right & wrong & ~monitored.alarms(found.x))
        unaware = PGD(epsilon=0.3, steps=20).perturb(monitored.monitor.model, some, rng=Rng(0))
        assert int(found.fooled.sum()) > int((unaware.fooled & ~monitored.alarms(unaware.x)).sum()) + 5

    def test_the_nearest_silent_one_is_further_than_the_nearest_wrong_one(self, monitored, some):
        few, params = some.take(torch.arange(15)), {"steps": 60, "searches": 4}
        found = AdaptiveCW(surrogate="identity", **params).perturb(monitored, few, rng=Rng(0))
        plain = CarliniWagner(**params).perturb(monitored.monitor.model, few, rng=Rng(0))
        both = found.fooled & plain.fooled
        assert int(both.sum()) > 8
        assert not bool(monitored.alarms(found.x)[found.fooled].any())
        sizes = [float((one.x - few.x).flatten(1).norm(dim=1)[both].mean()) for one in (plain, found)]
        assert sizes[0] <= sizes[1] + 1e-3


@pytest.mark.parametrize("name", ["adaptive-pgd", "adaptive-cw"])
def test_a_model_without_a_detector_is_refused(name, base, digits):
    with pytest.raises(InputError, match="guarded model"):
        EVASION.build(name, {}).perturb(base, digits.test, rng=Rng(0))
