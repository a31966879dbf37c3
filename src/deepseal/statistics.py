"""The statistics behind every verdict: exact tails of bit errors, thresholds, and intervals of rates."""

from __future__ import annotations

import dataclasses
import functools

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special


def error_distribution(chance: ArrayLike) -> NDArray[np.float64]:
    """Probability of 0, 1, …, n wrong bits when bit i is right with probability ``chance[i]``, independently.

    The Poisson binomial distribution by direct convolution: only additions of positive terms, so the relative error of
    a tail is at most about n times the machine epsilon, however small the tail is.

    Args:
        chance: (n,) probabilities that a bit matches although there is no mark; 0.5 for a fair coin.

    Returns:
        (n + 1,) probabilities.
    """
    chances = np.asarray(chance, dtype=np.float64)
    if chances.size and np.all(chances == chances[0]):
        return _binomial(chances.size, float(chances[0]))
    return _convolved(chances)


def _convolved(chances: NDArray[np.float64]) -> NDArray[np.float64]:
    distribution = np.zeros(chances.size + 1)
    distribution[0] = 1.0
    for count, match in enumerate(chances, start=1):
        distribution[1 : count + 1] = distribution[1 : count + 1] * match + distribution[:count] * (1.0 - match)
        distribution[0] *= match
    return distribution


@functools.lru_cache(maxsize=64)
def _binomial(n: int, chance: float) -> NDArray[np.float64]:
    """Equal chances: convolved up to 2,048 bits (exact to the last digit for coins), beyond that in logarithms."""
    if n <= 2048:
        distribution = _convolved(np.full(n, chance))
    else:
        wrong = np.arange(n + 1)
        ways = special.gammaln(n + 1) - special.gammaln(wrong + 1) - special.gammaln(n - wrong + 1)
        distribution = np.exp(ways + special.xlog1py(wrong, -chance) + special.xlogy(n - wrong, chance))
    distribution.setflags(write=False)
    return distribution


def p_value(errors: int, chance: ArrayLike) -> float:
    """Probability of at most ``errors`` wrong bits under no mark (one-sided, exact). 1.0 when there are no bits."""
    chances = np.asarray(chance, dtype=np.float64)
    if chances.size == 0:
        return 1.0
    return float(min(1.0, np.cumsum(error_distribution(chances))[errors]))


def allowed_errors(chance: ArrayLike, max_false_positive: float) -> int | None:
    """Most wrong bits whose p-value is at most the false-positive rate; None when not even 0 errors suffice."""
    tails = np.cumsum(error_distribution(chance)) if np.asarray(chance).size else np.ones(1)
    allowed = int(np.searchsorted(tails, max_false_positive, side="right")) - 1
    return allowed if allowed >= 0 else None


@dataclasses.dataclass(frozen=True)
class Rate:
    """``count`` of ``n`` with its exact (Clopper-Pearson, 1934) two-sided interval."""

    count: int
    n: int
    low: float
    high: float
    confidence: float

    @property
    def value(self) -> float:
        """The estimate count / n."""
        return self.count / self.n

    def as_dict(self) -> dict[str, float | int]:
        """Plain values for a record."""
        return {"value": self.value, **dataclasses.asdict(self)}


def rate(count: int, n: int, confidence: float = 0.95) -> Rate:
    """A rate with its interval.

    Raises:
        ValueError: n < 1 or count outside 0 … n.
    """
    if n < 1 or not 0 <= count <= n:
        raise ValueError(f"expected 0 <= count <= n and n >= 1; found count {count}, n {n}")
    tail = (1.0 - confidence) / 2.0
    low = 0.0 if count == 0 else float(special.betaincinv(count, n - count + 1, tail))
    high = 1.0 if count == n else float(special.betaincinv(count + 1, n - count, 1.0 - tail))
    return Rate(count, n, low, high, confidence)


@dataclasses.dataclass(frozen=True)
class Interval:
    """A mean with its two-sided interval; without one (None) where a single value says nothing of the spread."""

    mean: float
    low: float | None
    high: float | None
    n: int
    confidence: float
    method: str

    def as_dict(self) -> dict[str, float | int | str | None]:
        """Plain values for a record."""
        return dataclasses.asdict(self)


def student(values: ArrayLike, confidence: float = 0.95) -> Interval:
    """Mean of independent measurements with Student's (1908) interval; it rests on their being about normal.

    No interval where all values are equal, for they then say nothing of the spread.

    Raises:
        ValueError: no values.
    """
    known = np.asarray(values, dtype=np.float64)
    if known.size == 0:
        raise ValueError("expected at least one value; found none")
    mean = float(known.mean())
    if known.size == 1 or bool((known == known[0]).all()):
        return Interval(mean, None, None, int(known.size), confidence, "no spread" if known.size > 1 else "one value")
    reach = float(special.stdtrit(known.size - 1, 0.5 + confidence / 2.0) * known.std(ddof=1) / np.sqrt(known.size))
    return Interval(mean, mean - reach, mean + reach, int(known.size), confidence, "Student")


def paired_change(before: ArrayLike, after: ArrayLike, confidence: float = 0.95) -> Interval:
    """Change of the share of right answers when two models answer the same questions.

    The interval is Wald's after half a question was added to each of the four combinations of right and wrong (A.
    Agresti, Y. Min, "Simple improved confidence intervals for comparing matched proportions", 2005).

    Args:
        before: (n,) whether the first model is right.
        after: (n,) the same of the second.
        confidence: of the interval.

    Raises:
        ValueError: no questions, or two different numbers of them.
    """
    first, second = np.asarray(before, dtype=bool), np.asarray(after, dtype=bool)
    if first.shape != second.shape or first.size == 0:
        raise ValueError(f"expected two equal, non-empty rows; found {first.shape} and {second.shape}")
    n, gained, lost = first.size, int((second & ~first).sum()), int((first & ~second).sum())
    difference = (gained - lost) / (n + 2)
    deviation = np.sqrt((gained + lost + 1) - (gained - lost) ** 2 / (n + 2)) / (n + 2)
    reach = float(special.ndtri(0.5 + confidence / 2.0) * deviation)
    return Interval((gained - lost) / n, difference - reach, difference + reach, n, confidence, "Agresti-Min")
