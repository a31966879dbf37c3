"""Sound ranges: interval arithmetic over the actual integer weights, so that no sum can wrap around."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from deepseal.secure_inference.compile.arrays import LinearWeights
from deepseal.secure_inference.compile.program import Circuit, Number

if TYPE_CHECKING:
    from collections.abc import Sequence

Interval = tuple[int, int]


def linear_interval(weights: LinearWeights, source: Interval, *, padded: bool) -> Interval:
    """Smallest and largest sum that any input within ``source`` can give; ``padded``: some inputs may be 0 instead."""
    low, high = (min(source[0], 0), max(source[1], 0)) if padded else source
    rows = weights.weight.reshape(len(weights.weight), -1)
    up = np.maximum(rows, 0).sum(axis=1)
    down = np.minimum(rows, 0).sum(axis=1)
    least = up * low + down * high + weights.bias
    most = up * high + down * low + weights.bias
    return int(least.min()), int(most.max())


def bits_for(interval: Interval) -> int:
    """Bits of the smallest signed word that holds an interval; at least 2."""
    low, high = interval
    return max(high.bit_length(), (-1 - low).bit_length() if low < 0 else 0, 1) + 1


def circuit_interval(step: Circuit, numbers: tuple[Number, ...], sources: Sequence[Interval]) -> Interval:
    """A range that holds every result of a circuit."""
    target = numbers[-1]
    low, high = target.low, target.high
    one = 1 << max(target.fraction, 0)
    if step.gadget == "sigmoid":
        return 0, min(high, one)
    if step.gadget == "tanh":
        return max(low, -one), min(high, one)
    if step.gadget == "clamp":
        return int(step.options.get("low", low)), int(step.options.get("high", high))
    if step.gadget == "relu" or (step.gadget == "add" and step.options.get("relu")):
        return 0, high
    if step.gadget in ("silu", "gelu", "gelu_tanh"):
        return max(low, -(one * 9 // 32) - 3), high
    if step.gadget in ("max", "join") and all(number == target for number in numbers):
        return min(0, *(s[0] for s in sources)), max(0, *(s[1] for s in sources))
    return low, high
