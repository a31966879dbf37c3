"""Thresholds that keep their word: exact order statistics with a stated confidence.

If n clean scores and the next one are exchangeable and continuous, the share of clean inputs above the (k+1)-th largest
of the n is Beta(k + 1, n - k) distributed (S. Wilks, "Determination of sample sizes for setting tolerance limits",
1941). It is at most ``rate`` with confidence 1 - P(Binomial(n, rate) <= k); ties only make alarms rarer.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from deepseal.errors import InputError


@dataclasses.dataclass(frozen=True)
class Threshold:
    """Scores above ``value`` are alarms.

    Attributes:
        value: the (exceeding + 1)-th largest of ``n`` clean scores.
        false_positive: rate that is promised not to be exceeded.
        confidence: with which it is promised, over the draw of the clean samples.
        n: clean samples.
        exceeding: how many of them lie above.
        low, high: 95 % interval of the rate that this threshold really has (Beta).
    """

    value: float
    false_positive: float
    confidence: float
    n: int
    exceeding: int
    low: float
    high: float

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return dataclasses.asdict(self)


def allowed_exceedances(n: int, false_positive: float, confidence: float) -> int | None:
    """Most clean samples that may lie above the threshold; None where n are too few for the promise."""
    allowed = int(stats.binom.ppf(1.0 - confidence, n, false_positive))
    while allowed >= 0 and stats.binom.cdf(allowed, n, false_positive) > 1.0 - confidence:
        allowed -= 1
    return allowed if allowed >= 0 else None


def samples_needed(false_positive: float, confidence: float) -> int:
    """Fewest clean samples with which the rate can be promised: none of them may lie above."""
    needed = math.ceil(math.log(1.0 - confidence) / math.log1p(-false_positive))
    return needed if (1.0 - false_positive) ** needed <= 1.0 - confidence else needed + 1


def threshold(scores: Tensor, false_positive: float, confidence: float) -> Threshold:
    """The lowest threshold whose false-positive rate is at most the stated one with the stated confidence.

    Raises:
        InputError: too few samples, a rate or confidence outside (0, 1), or scores that are not finite.
    """
    check_rates(false_positive, confidence)
    n = len(scores)
    allowed = allowed_exceedances(n, false_positive, confidence)
    if allowed is None:
        needed = samples_needed(false_positive, confidence)
        promise = f"a false-positive rate of {false_positive:g} with {100 * confidence:g} % confidence"
        raise InputError(f"at least {needed} clean samples for {promise}", found=str(n), do="pass more clean data")
    if not bool(torch.isfinite(scores).all()):
        raise InputError("finite scores", found="NaN or infinity", do="check model and data")
    value = float(scores.double().sort(descending=True).values[allowed])
    real = stats.beta(allowed + 1, n - allowed)
    low, high = real.ppf(0.025), real.ppf(0.975)
    return Threshold(value, false_positive, confidence, n, allowed, float(low), float(high))


def class_thresholds(
    scores: Tensor, predicted: Tensor, classes: int, false_positive: float, confidence: float
) -> Mapping[int, Threshold]:
    """A threshold for each predicted class with enough samples; all promises hold together (Bonferroni).

    Args:
        scores: (N,) of clean data.
        predicted: (N,) classes that the model answers: what is known of an input when it comes.
        classes: number of classes, among which the doubt 1 - confidence is divided.
        false_positive: rate that is promised not to be exceeded.
        confidence: with which it is promised for all classes together.
    """
    check_rates(false_positive, confidence)
    each = 1.0 - (1.0 - confidence) / classes
    found = {}
    for label in range(classes):
        own = scores[predicted == label]
        if allowed_exceedances(len(own), false_positive, each) is not None:
            found[label] = threshold(own, false_positive, each)
    return found


def p_values(scores: Tensor, clean: Tensor, *, ordered: bool = False) -> Tensor:
    """(N,) conformal p-values: (1 + clean scores at least as high) / (1 + clean scores) (V. Vovk et al., 2005).

    Args:
        scores: (N,).
        clean: (n,) of clean data.
        ordered: whether they rise already.
    """
    rising = clean.double() if ordered else clean.double().sort().values
    above = len(rising) - torch.searchsorted(rising, scores.double().contiguous(), right=False)
    return (1.0 + above) / (1.0 + len(rising))


def realised_interval(threshold: Threshold, n: int, confidence: float = 0.95) -> tuple[float, float]:
    """Where the share of alarms among ``n`` further clean inputs lies (beta-binomial), both ends included."""
    law = stats.betabinom(n, threshold.exceeding + 1, threshold.n - threshold.exceeding)
    tail = (1.0 - confidence) / 2.0
    return float(law.ppf(tail)) / n, float(law.ppf(1.0 - tail)) / n


def check_rates(false_positive: float, confidence: float) -> None:
    """Refuse what is no rate.

    Raises:
        InputError: outside (0, 1).
    """
    for what, value in (("a false-positive rate", false_positive), ("a confidence", confidence)):
        if not 0.0 < value < 1.0:
            raise InputError(f"{what} between 0 and 1", found=f"{value:g}", do="use for instance 0.01, and 0.95")
