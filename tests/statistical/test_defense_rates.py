"""What a monitor promises about false alarms, held against simulation and against the exact laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from deepseal.defense.tails import fit_tail, surprise
from deepseal.defense.thresholds import (
    allowed_exceedances,
    class_thresholds,
    p_values,
    realised_interval,
    samples_needed,
    threshold,
)
from deepseal.errors import InputError
from deepseal.rng import Rng


def test_known_numbers_of_samples():
    assert samples_needed(0.01, 0.95) == 299
    assert allowed_exceedances(298, 0.01, 0.95) is None
    assert allowed_exceedances(299, 0.01, 0.95) == 0
    assert allowed_exceedances(1000, 0.01, 0.95) == 4
    assert allowed_exceedances(10_000, 0.01, 0.95) == 83
    assert samples_needed(0.01, 1 - 0.05 / 10) == 528  # ten classes together


@pytest.mark.parametrize(("n", "rate", "confidence"), [(299, 0.01, 0.95), (1000, 0.05, 0.9), (5000, 0.001, 0.95)])
def test_a_threshold_keeps_its_promise_as_often_as_it_says(n, rate, confidence):
    """On uniform scores the real rate is 1 - threshold: no second sample is needed to see it."""
    draws = 2000
    kept = 0
    generator = Rng(n).torch()
    for _ in range(draws):
        found = threshold(torch.rand(n, generator=generator, dtype=torch.float64), rate, confidence)
        kept += (1.0 - found.value) <= rate
    exact = 1.0 - stats.binom.cdf(allowed_exceedances(n, rate, confidence), n, rate)
    assert exact >= confidence
    low, high = stats.binom.ppf([1e-5, 1 - 1e-5], draws, exact)
    assert low <= kept <= high


def test_ties_only_make_alarms_rarer():
    scores = torch.tensor([0.0] * 500 + [1.0] * 500)
    found = threshold(scores, 0.1, 0.95)
    assert found.value == 1.0
    assert int((scores > found.value).sum()) == 0


def test_thresholds_of_classes_hold_together():
    """With ten classes the promises hold for all at once in at least 95 of 100 draws."""
    generator = Rng(7).torch()
    held = 0
    for _ in range(300):
        classes = torch.randint(10, (7500,), generator=generator)
        scores = torch.rand(7500, generator=generator, dtype=torch.float64)
        found = class_thresholds(scores, classes, 10, 0.01, 0.95)
        assert len(found) == 10
        held += all(1.0 - own.value <= 0.01 for own in found.values())
    assert held >= stats.binom.ppf(1e-5, 300, 0.95)


def test_a_rare_class_has_no_promise():
    classes = torch.tensor([0] * 600 + [1] * 500)
    found = class_thresholds(torch.rand(1100, generator=Rng(0).torch()), classes, 10, 0.01, 0.95)
    assert list(found) == [0]


@pytest.mark.parametrize(("rate", "confidence"), [(0.0, 0.95), (1.0, 0.95), (0.01, 1.0), (float("nan"), 0.9)])
def test_what_is_no_rate_is_refused(rate, confidence):
    with pytest.raises(InputError, match="between 0 and 1"):
        threshold(torch.rand(1000), rate, confidence)


def test_too_few_samples_and_odd_scores_are_refused():
    with pytest.raises(InputError, match="at least 299 clean samples"):
        threshold(torch.rand(298), 0.01, 0.95)
    with pytest.raises(InputError, match="finite"):
        threshold(torch.full((1000,), torch.nan), 0.01, 0.95)


def test_realised_share_lies_in_the_beta_binomial_interval():
    generator = np.random.default_rng(3)
    inside = 0
    for _ in range(400):
        found = threshold(torch.from_numpy(generator.random(1000)), 0.05, 0.95)
        low, high = realised_interval(found, 2000)
        inside += low <= float((generator.random(2000) > found.value).mean()) <= high
    assert inside >= stats.binom.ppf(1e-5, 400, 0.95)


def test_p_values_are_uniform_under_clean_data():
    generator = Rng(1).torch()
    clean = torch.randn(999, generator=generator, dtype=torch.float64)
    found = p_values(torch.randn(20_000, generator=generator, dtype=torch.float64), clean)
    assert float(found.min()) >= 1e-3
    for level in (0.05, 0.2, 0.5):
        share = float((found <= level).double().mean())
        spread = np.sqrt(level * (1 - level) * (1 / 20_000 + 1 / 999))
        assert abs(share - level) < 5 * spread
    assert float(p_values(torch.tensor([100.0]), clean)) == pytest.approx(1 / 1000)


def test_surprise_is_minus_log_of_the_survival_function():
    generator = Rng(2).torch()
    clean = torch.empty(20_000, dtype=torch.float64).exponential_(generator=generator)
    tail = fit_tail(clean)
    points = torch.linspace(0.05, 9.0, 60, dtype=torch.float64)
    assert torch.allclose(surprise(points, tail), points, rtol=0.08, atol=0.03)  # -log P(X > x) = x


def test_surprise_rises_and_has_a_gradient():
    clean = torch.randn(5000, generator=Rng(3).torch(), dtype=torch.float64)
    points = torch.linspace(-4, 12, 400, dtype=torch.float64).requires_grad_(True)
    found = surprise(points, fit_tail(clean))
    (gradient,) = torch.autograd.grad(found.sum(), points)
    assert bool((found.diff() >= 0).all())
    assert bool((gradient >= 0).all())
    assert bool((gradient[points > -2] > 0).all())


def test_equal_scores_surprise_nobody():
    tail = fit_tail(torch.zeros(500))
    assert float(surprise(torch.zeros(1, dtype=torch.float64), tail)) == 0.0
    assert float(surprise(torch.ones(1, dtype=torch.float64), tail)) > 10.0
