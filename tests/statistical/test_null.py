"""The null hypothesis, measured: p-values of unmarked pairs are uniform, and a fixed message would break that."""

from __future__ import annotations

import numpy as np
import pytest
from models import trained
from scipy import stats

from deepseal.rng import Rng, expand_normal
from deepseal.watermark import verify
from deepseal.watermark.key import text_bits
from deepseal.watermark.scheme import scheme_of
from deepseal.watermark.verify import strangers

KEYS = 1000


@pytest.fixture(scope="module")
def errors(marked, base, key):
    """Wrong bits of random keys: 1,000 on the marked model, 1,000 on the base."""
    return {name: strangers(model, key, KEYS)[:, 0] for name, model in (("marked", marked), ("base", base))}


@pytest.mark.parametrize("name", ["marked", "base"])
class TestStrangers:
    def test_none_is_owned(self, name, errors):
        assert stats.binom.cdf(errors[name], 256, 0.5).min() > 1e-9

    @pytest.mark.parametrize("level", [1e-2, 1e-3])
    def test_rejections_are_as_many_as_promised(self, name, errors, level):
        values = stats.binom.cdf(errors[name], 256, 0.5)
        attained = stats.binom.cdf(stats.binom.ppf(level, 256, 0.5) - 1, 256, 0.5)
        low, high = stats.binom.interval(0.99, KEYS, attained)
        assert low <= (values <= level).sum() <= high

    def test_p_values_are_uniform(self, name, errors):
        jitter = Rng(12).numpy().random(KEYS) * stats.binom.pmf(errors[name], 256, 0.5)
        assert stats.kstest(stats.binom.cdf(errors[name], 256, 0.5) - jitter, "uniform").pvalue > 1e-3

    def test_errors_have_binomial_variance(self, name, errors):
        ratio = errors[name].var(ddof=1) / 64.0
        low, high = stats.chi2.interval(0.999, KEYS - 1)
        assert low / (KEYS - 1) < ratio < high / (KEYS - 1)


def test_a_fixed_message_under_a_shared_projection_is_not_binomial(base, key):
    """The counter-example that the mask cures: too large a variance, so that the binomial p-value would be wrong."""
    observation = scheme_of(key).observe(base, key)
    means = observation.values["fc2"].numpy()
    message = text_bits("Example Ltd", 25)
    counts = []
    for index in range(KEYS):
        shared = expand_normal(index.to_bytes(8, "little"), "shared", (means.shape[1], 25))
        bits = (means @ shared > 0).astype(np.uint8)
        counts.append(int((bits != message).sum()))
    ratio = np.var(counts, ddof=1) / (means.shape[0] * 25 / 4)
    assert ratio > 1.3, ratio


def test_independent_models_are_not_owned(digits, key):
    results = [verify(trained(digits, 100 + index, epochs=8), key, max_false_positive=1e-9) for index in range(10)]
    assert [result.verdict for result in results] == ["not-owned"] * 10
    total = sum(result.bit_errors for result in results)
    assert stats.binomtest(total, 2560, 0.5).pvalue > 1e-4
