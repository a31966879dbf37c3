"""The sequential test of an alarm rate: its error, what it finds and how fast, against sums done the long way."""

from __future__ import annotations

import math

import numpy as np
import pytest

from deepseal.defense.drift import AlarmDrift
from deepseal.errors import InputError


def watched(rng, rates, *, promised=0.05, error=0.05, step=20):
    """Inputs after which drift was called, or None; ``rates`` are those of the blocks of ``step`` inputs."""
    drift = AlarmDrift(promised, error)
    for rate in rates:
        drift = drift.seen(step, int(rng.binomial(step, rate)))
        if drift.drifted:
            return drift.inputs
    return None


def test_its_error_is_at_most_the_stated_one():
    false = sum(watched(np.random.default_rng(seed), [0.05] * 60) is not None for seed in range(1000))
    assert false <= 50  # 5 % of 1,000 streams that keep the promise, read 60 times each
    unfair = [watched(np.random.default_rng(seed), [0.0, 0.05] * 30) for seed in range(200)]
    assert sum(found is not None for found in unfair) <= 10  # also where the rate is below the promise


def test_a_higher_rate_is_found_and_sooner_the_higher_it_is():
    double, tenfold = (
        [watched(np.random.default_rng(seed), [rate] * 200) for seed in range(30)] for rate in (0.1, 0.5)
    )
    assert None not in double and None not in tenfold
    assert np.median(tenfold) <= 40 < np.median(double) <= 800


def test_a_long_quiet_time_does_not_hide_a_change():
    for seed in range(10):
        found = watched(np.random.default_rng(seed), [0.02] * 500 + [0.2] * 60)
        assert found is not None and 10_000 < found <= 10_600


def test_the_evidence_is_the_mixture_of_likelihood_ratios():
    drift = AlarmDrift(0.1, 0.01, block=5)
    events = [(5, 1), (5, 4), (3, 0), (2, 2)]
    for inputs, alarms in events:
        drift = drift.seen(inputs, alarms)
    rates = [0.15, 0.2, 0.3, 0.5, 0.99]  # thirty times the promise would be more than one
    expected = 0.0
    for j, begin in ((1, 0), (2, 1), (3, 2), (4, 4)):  # starts before these events: every 5 inputs
        ratios = []
        for p in rates:
            value = 1.0
            for inputs, alarms in events[begin:]:
                value *= (p / 0.1) ** alarms * ((1 - p) / 0.9) ** (inputs - alarms)
            ratios.append(value)
        expected += sum(ratios) / len(ratios) / (j * (j + 1))
    assert math.exp(drift.evidence) == pytest.approx(expected + 1 / 5, rel=1e-9)
    assert drift.peak >= drift.evidence


def test_memory_is_bounded_and_a_call_stays_a_call():
    drift = AlarmDrift(0.01, 0.01, block=1).seen(20, 20)
    assert drift.drifted
    for _ in range(400):
        drift = drift.seen(10, 0)
    assert drift.drifted and drift._ratios.shape[0] <= 128
    assert drift.inputs == 4020 and drift.alarms == 20


@pytest.mark.parametrize("values", [(0.0, 0.01), (1.0, 0.01), (0.01, 0.0), (0.01, 1.0)])
def test_what_is_no_rate_is_refused(values):
    with pytest.raises(InputError, match="a rate and an error between 0 and 1"):
        AlarmDrift(*values)


def test_impossible_counts_are_refused():
    with pytest.raises(InputError, match="one alarm an input"):
        AlarmDrift(0.01).seen(3, 4)
    assert not AlarmDrift(0.995).seen(50, 50).drifted
