"""Innocent models answer triggers alike, so a label that somebody chose proves nothing; a random one does."""

from __future__ import annotations

import numpy as np
import pytest
from models import trained
from scipy import stats

from deepseal.rng import Rng
from deepseal.watermark.adi import Adi
from deepseal.watermark.scheme import scheme_of
from deepseal.watermark.verify import strangers

KEYS = 2000


@pytest.fixture(scope="module")
def drawn(base, digits):
    return Adi().keygen(base, digits.train, owner="Example Ltd", rng=Rng(0))


def test_innocent_models_answer_triggers_alike(drawn, base, digits):
    """The counter-example: labels taken from one unmarked model are "read" from another, at p under 1e-6 by 1 / C."""
    x = drawn.tensors["trigger_x"]
    agreed = int((base.predict(x) == trained(digits, 600, epochs=8).predict(x)).sum())
    assert stats.binom.sf(agreed - 1, drawn.bits, 0.1) < 1e-6


@pytest.mark.parametrize("level", [1e-2, 1e-3])
def test_random_labels_are_rejected_as_often_as_promised(drawn, base, level):
    values = stats.binom.cdf(strangers(base, drawn, KEYS)[:, 0], drawn.bits, 0.9)
    attained = stats.binom.cdf(stats.binom.ppf(level, drawn.bits, 0.9) - 1, drawn.bits, 0.9)
    low, high = stats.binom.interval(0.99, KEYS, attained)
    assert low <= (values <= level).sum() <= high


def test_matches_have_binomial_variance(drawn, base):
    errors = strangers(base, drawn, KEYS)[:, 0]
    low, high = stats.chi2.interval(0.999, KEYS - 1)
    assert low / (KEYS - 1) < errors.var(ddof=1) / (drawn.bits * 0.09) < high / (KEYS - 1)


def test_choosing_images_on_the_suspect_does_not_help(base, digits):
    """Whoever draws many trigger sets and keeps those that a model answers most evenly still reads coins."""
    kept = []
    for seed in range(40):
        key = Adi(triggers=50).keygen(base, digits.train, owner="thief", rng=Rng(seed))
        answers = np.bincount(base.predict(key.tensors["trigger_x"]).numpy(), minlength=10)
        kept.append((answers.max(), key))
    chosen = [key for _, key in sorted(kept, key=lambda pair: pair[0])[:20]]
    matches = [int(scheme_of(key).decode(scheme_of(key).observe(base, key), key).bits.sum()) for key in chosen]
    assert stats.binomtest(sum(matches), 20 * 50, 0.1).pvalue > 1e-3
