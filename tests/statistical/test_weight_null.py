"""Marks in weights and activations: fresh keys are rejected as often as promised, and a forger gains nothing."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from deepseal.rng import Rng, expand_choice
from deepseal.statistics import allowed_errors
from deepseal.watermark import SCHEMES, verify
from deepseal.watermark.scheme import scheme_of
from deepseal.watermark.verify import strangers

KEYS = 400
SCHEMES_HERE = ("uchida", "hash-bound", "diction")


@pytest.fixture(scope="module", params=SCHEMES_HERE)
def drawn(request, base, digits):
    name = request.param
    return SCHEMES.build(name, {"bits": 64}).keygen(base, digits.train, owner="Example Ltd", rng=Rng(5))


@pytest.mark.parametrize("level", [1e-1, 1e-2])
def test_fresh_keys_are_rejected_as_often_as_promised(drawn, base, level):
    errors, bits = strangers(base, drawn, KEYS).T
    assert (bits == 64).all()
    most = allowed_errors(np.full(64, 0.5), level)
    low, high = stats.binom.interval(0.999, KEYS, stats.binom.cdf(most, 64, 0.5))
    assert low <= (errors <= most).sum() <= high
    assert stats.binom.cdf(errors, 64, 0.5).min() > 1e-6


def test_errors_have_binomial_variance(drawn, base):
    errors = strangers(base, drawn, KEYS)[:, 0]
    low, high = stats.chi2.interval(0.999, KEYS - 1)
    assert low / (KEYS - 1) < errors.var(ddof=1) / 16.0 < high / (KEYS - 1)


def test_a_forger_who_climbs_towards_a_secret_reads_coins(drawn, base):
    """Each trial flips bits of the best secret so far, as if nearness counted: 64 fresh coins a trial all the same."""
    scheme = scheme_of(drawn)
    seen = scheme.observe(base, drawn)
    best, secret, wrong = drawn.bits, drawn.secret, []
    for trial in range(KEYS):
        flipped = np.unpackbits(np.frombuffer(secret, np.uint8))
        flipped[expand_choice(drawn.secret, f"forge/{trial}", len(flipped), 1 + trial // 256)] ^= 1
        forged = drawn.with_secret(np.packbits(flipped).tobytes())
        wrong.append(int((scheme.decode(seen, forged).bits != forged.message()).sum()))
        if wrong[-1] < best:
            best, secret = wrong[-1], forged.secret
    assert stats.binomtest(sum(wrong), KEYS * 64, 0.5).pvalue > 1e-4
    assert stats.binom.ppf(1 - (1 - 1e-3) ** (1 / KEYS), 64, 0.5) <= best
    assert verify(base, drawn.with_secret(secret), max_false_positive=1e-3, tried=KEYS).verdict == "not-owned"
