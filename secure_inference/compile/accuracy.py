"""Accuracy of a program beside the network it came from, on labelled samples."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseal.adapter import Classifier, Split
from deepseal.errors import InputError
from deepseal.secure_inference.compile.program import Program
from deepseal.secure_inference.compile.simulate import decode_output, encode_input, simulate
from deepseal.secure_inference.compile.weights import Weights
from deepseal.statistics import Rate, rate

_Z = 1.959964  # of 95 %
_BATCH = 1024


@dataclasses.dataclass(frozen=True)
class Paired:
    """Difference of two rates on the same samples, with its 95 % interval.

    Attributes:
        value: the first rate minus the second.
        low: of the interval; likewise ``high``.
        gained: samples that only the first got right; ``lost``: only the second.
    """

    value: float
    low: float
    high: float
    gained: int
    lost: int

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return dataclasses.asdict(self)


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What ``compare`` found.

    Attributes:
        accuracy: of the program.
        float_accuracy: of the network; None without it; likewise ``agreement`` (same labels) and ``difference``.
        clamped: input values that were outside the bounds.
    """

    accuracy: Rate
    float_accuracy: Rate | None
    agreement: Rate | None
    difference: Paired | None
    clamped: int


def compare(program: Program, weights: Weights, split: Split, model: Classifier | None = None) -> Comparison:
    """Run a program in the clear on labelled samples, and the network that it came from.

    Raises:
        InputError: no samples, or samples that do not fit.
    """
    if len(split) == 0:
        raise InputError("at least one sample", found="none", do="raise the limit")
    if int(split.y.max()) >= program.labels:
        found = f"label {int(split.y.max())}"
        raise InputError(f"labels 0 … {program.labels - 1}", found=found, do="use the data of the program")
    labels, clamped = [], 0
    for x in split.tensor.split(_BATCH):
        encoded = encode_input(program, x)
        clamped += encoded.clamped
        answer = decode_output(program, simulate(program, weights, encoded.values))
        labels.append(answer if answer.ndim == 1 else answer.argmax(axis=1))
    got, truth = np.concatenate(labels), split.y.numpy()
    right = got == truth
    accuracy = rate(int(right.sum()), len(truth))
    if model is None:
        return Comparison(accuracy, None, None, None, clamped)
    real = model.predict(split.x).numpy()
    return Comparison(
        accuracy,
        rate(int((real == truth).sum()), len(truth)),
        rate(int((real == got).sum()), len(truth)),
        paired_difference(right, real == truth),
        clamped,
    )


def paired_difference(first: NDArray[np.bool_], second: NDArray[np.bool_]) -> Paired:
    """Difference of two success rates on the same samples, by the hybrid score of Newcombe (Stat. Med. 17, 1998).

    Args:
        first: (n,) successes.
        second: (n,) successes on the same samples.
    """
    n = len(first)
    both = int((first & second).sum())
    gained, lost = int((first & ~second).sum()), int((~first & second).sum())
    neither = n - both - gained - lost
    p, q = (both + gained) / n, (both + lost) / n
    (l1, u1), (l2, u2) = _wilson(p, n), _wilson(q, n)
    product = (both + gained) * (lost + neither) * (both + lost) * (gained + neither)
    phi = 0.0 if product == 0 else (both * neither - gained * lost) / math.sqrt(product)
    if both * neither - gained * lost > n / 2 and product:  # Edwards' correction
        phi = (both * neither - gained * lost - n / 2) / math.sqrt(product)
    down = math.sqrt(max((p - l1) ** 2 - 2 * phi * (p - l1) * (u2 - q) + (u2 - q) ** 2, 0.0))
    up = math.sqrt(max((q - l2) ** 2 - 2 * phi * (q - l2) * (u1 - p) + (u1 - p) ** 2, 0.0))
    return Paired(p - q, p - q - down, p - q + up, gained, lost)


def _wilson(p: float, n: int) -> tuple[float, float]:
    middle, spread = p + _Z**2 / (2 * n), _Z * math.sqrt(p * (1 - p) / n + _Z**2 / (4 * n * n))
    scale = 1 + _Z**2 / n
    return (middle - spread) / scale, (middle + spread) / scale
