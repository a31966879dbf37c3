"""Whether a stream of alarms is more frequent than promised: a test that may be read after every input, for ever.

An alarm's rate is promised to be at most a. For a rate p > a, the likelihood ratio (an alarm: p/a, none: (1-p)/(1-a))
does not grow on average while each input alarms with probability at most a, given all before it. So it, and every
mixture of such ratios, is a nonnegative supermartingale of start 1, which ever exceeds 1/e with probability at most e
(J. Ville, "Étude critique de la notion de collectif", 1939; A. Wald, "Sequential tests of statistical hypotheses",
1945).

The mixture is over rates, and over when the rate changed (H. Robbins, "Statistical methods related to the law of the
iterated logarithm", 1970; the weights 1/j(j+1) sum to 1), so that a long quiet time before does not hide a change.
Only the most promising starts are kept: leaving others out makes the test slower, never wrong.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import InputError

_RATIOS = (1.5, 2.0, 3.0, 5.0, 10.0, 30.0)  # rates that are looked for, in multiples of the promised one
_HIGHEST = 0.99
_KEPT = 128


@dataclasses.dataclass(frozen=True)
class AlarmDrift:
    """What is known of a stream of alarms. ``seen`` gives the state after further inputs.

    Attributes:
        rate: that the alarms are promised not to exceed.
        error: probability that this ever calls drift what is none.
        block: inputs between two moments at which a change is looked for.
        inputs, alarms: seen so far.
        peak: largest log evidence so far.
    """

    rate: float
    error: float = 0.01
    block: int = 250
    inputs: int = 0
    alarms: int = 0
    peak: float = 0.0
    _ratios: NDArray[np.float64] | None = dataclasses.field(default=None, repr=False)  # (starts, rates), in logs
    _weights: NDArray[np.float64] | None = dataclasses.field(default=None, repr=False)  # (starts,), in logs
    _begun: int = 1
    _latest: int = 0

    def __post_init__(self) -> None:
        if not 0.0 < self.rate < 1.0 or not 0.0 < self.error < 1.0 or self.block < 1:
            found = f"{self.rate:g} and {self.error:g}"
            raise InputError("a rate and an error between 0 and 1", found=found, do="use for instance 0.01 and 0.01")
        if self._ratios is None:
            object.__setattr__(self, "_ratios", np.zeros((1, len(self._rates()))))
            object.__setattr__(self, "_weights", np.array([-math.log(2.0)]))

    @property
    def drifted(self) -> bool:
        """Whether the alarms were ever too frequent to be what was promised."""
        return self.peak >= -math.log(self.error)

    @property
    def evidence(self) -> float:
        """Log of the mixture now: how much better higher rates explain the alarms than the promised one."""
        to_come = -math.log(self._begun + 1.0)  # later starts, which stand at 1 each
        return float(np.logaddexp(_log_sum(self._of_starts()), to_come))

    def seen(self, inputs: int, alarms: int) -> AlarmDrift:
        """After ``inputs`` more, ``alarms`` of which alarmed.

        Raises:
            InputError: more alarms than inputs.
        """
        if not 0 <= alarms <= inputs:
            raise InputError("at most one alarm an input", found=f"{alarms} of {inputs}", do="correct the counts")
        assert self._ratios is not None  # noqa: S101 - __post_init__ made it
        rates = self._rates()
        gained = alarms * np.log(rates / self.rate) + (inputs - alarms) * np.log((1.0 - rates) / (1.0 - self.rate))
        after = dataclasses.replace(
            self, inputs=self.inputs + inputs, alarms=self.alarms + alarms, _ratios=self._ratios + gained
        )
        after = dataclasses.replace(after, peak=max(self.peak, after.evidence))
        return after._started() if after.inputs - self._latest >= self.block else after

    def _started(self) -> AlarmDrift:
        assert self._ratios is not None and self._weights is not None  # noqa: S101 - __post_init__ made them
        begun = self._begun + 1
        ratios, weights = self._ratios, self._weights
        if len(weights) == _KEPT:
            kept = np.arange(_KEPT) != self._of_starts().argmin()
            ratios, weights = ratios[kept], weights[kept]
        ratios = np.concatenate([ratios, np.zeros((1, ratios.shape[1]))])
        weights = np.append(weights, -math.log(begun * (begun + 1.0)))
        return dataclasses.replace(self, _ratios=ratios, _weights=weights, _begun=begun, _latest=self.inputs)

    def _of_starts(self) -> NDArray[np.float64]:
        """(starts,) log of weight times mean likelihood ratio over the rates."""
        assert self._ratios is not None and self._weights is not None  # noqa: S101 - __post_init__ made them
        top = self._ratios.max(axis=1)
        means = np.exp(self._ratios - top[:, None]).mean(axis=1)
        found: NDArray[np.float64] = top + np.log(means) + self._weights
        return found

    def _rates(self) -> NDArray[np.float64]:
        highest = max(_HIGHEST, 0.5 * (1.0 + self.rate))
        return np.unique(np.minimum(np.array(_RATIOS) * self.rate, highest))


def _log_sum(values: NDArray[np.float64]) -> float:
    top = float(values.max())
    return top + math.log(float(np.exp(values - top).sum()))
