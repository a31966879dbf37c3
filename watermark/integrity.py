"""Whether the stated false-positive rate holds: keys that nobody embedded, read from one observation.

A stranger's key has the triggers of the owner's and a secret of its own. Given what the suspect shows, its bits are
independent of those of other strangers, so the number of rejections at a level is binomial; the level that a discrete
p-value attains exactly is what it is compared with.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from deepseal.adapter import BlackBox
from deepseal.statistics import allowed_errors, error_distribution, p_value
from deepseal.watermark.key import Key
from deepseal.watermark.scheme import observed, scheme_of


@dataclasses.dataclass(frozen=True)
class Strangers:
    """What strangers' keys read from a model.

    Attributes:
        p_values: (n,) of each key, exact under no mark.
        attained: for each level, (n,) the exact probability that a key's p-value is at most the level.
    """

    p_values: NDArray[np.float64]
    attained: dict[float, NDArray[np.float64]]


@dataclasses.dataclass(frozen=True)
class Rejections:
    """Keys that reach a level, of ``n``, beside what is expected.

    Attributes:
        level: the stated level.
        count: keys with a p-value of at most that.
        attained: mean probability of it under no mark; at most the level, since p-values are discrete.
        low, high: the binomial interval of the count at that probability.
    """

    level: float
    count: int
    n: int
    attained: float
    low: float
    high: float
    confidence: float

    @property
    def place(self) -> str:
        """Where the count lies: ``inside``, ``below`` (the rule is stricter than it says) or ``above`` (it is not)."""
        return "below" if self.count < self.low else "above" if self.count > self.high else "inside"

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {**dataclasses.asdict(self), "place": self.place}


def read_strangers(
    model: BlackBox,
    key: Key,
    count: int,
    levels: Sequence[float],
    *,
    chance: float | None = None,
    first: int = 0,
) -> Strangers:
    """Read ``count`` strangers' keys from one observation of a model.

    Args:
        model: the suspect.
        key: whose triggers are read.
        count: number of strangers, expanded from the key's secret.
        levels: for which the attained probability is worked out.
        chance: of a bit under no mark, instead of each key's own (which calibration may have raised).
        first: number of the first stranger. Models are alike, so one key on several is no independent try: give each
            model strangers of its own.

    Raises:
        InputError: a suspect that the key cannot read.
    """
    scheme = scheme_of(key)
    observation = observed(scheme, model, key)
    p_values = np.empty(count)
    attained = {level: np.empty(count) for level in levels}
    for index, stranger in enumerate(itertools.islice(key.strangers(first + count), first, None)):
        read = scheme.decode(observation, stranger)
        usable = read.usable
        chances = read.chance[usable] if chance is None else np.full(int(usable.sum()), chance)
        p_values[index] = p_value(int((read.bits != stranger.message())[usable].sum()), chances)
        tails = np.cumsum(error_distribution(chances)) if chances.size else np.ones(1)
        for level in levels:
            most = allowed_errors(chances, level)
            attained[level][index] = 0.0 if most is None else tails[most]
    return Strangers(p_values, attained)


def rejections(read: Sequence[Strangers], level: float, confidence: float = 0.99) -> Rejections:
    """Rejections at a level over several readings."""
    p_values = np.concatenate([one.p_values for one in read])
    attained = float(np.concatenate([one.attained[level] for one in read]).mean())
    return counted(level, int((p_values <= level).sum()), len(p_values), attained, confidence)


def counted(level: float, count: int, n: int, attained: float, confidence: float = 0.99) -> Rejections:
    """A number of rejections with the interval of what is expected."""
    low, high = stats.binom.interval(confidence, n, attained)
    return Rejections(level, count, n, attained, float(low), float(high), confidence)
