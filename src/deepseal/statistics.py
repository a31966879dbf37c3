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
