"""What the weight owner knows about a linear layer that is added in circuits: see ``sums``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from deepseal.secure_inference.compile.arrays import LinearWeights
from deepseal.secure_inference.protocol.extension import Array
from deepseal.secure_inference.roles.sums import Ints, Part, Sums


@dataclass(frozen=True, eq=False, repr=False)
class Secrets:
    """What the weight owner knows about a group.

    Attributes:
        signs: (m, 2 pairs) uint32, w + 2^(n-1); a product that is none has its neighbour's.
        constants: (m,) uint64, K modulo 2^(l+1); where there are no products, the bias modulo 2^l.
    """

    signs: NDArray[np.uint32]
    constants: NDArray[np.uint64]

    def __repr__(self) -> str:
        return f"Secrets({len(self.constants)} outputs)"

    def digits(self, outputs: Ints, part: Part, bits: int) -> Iterator[tuple[Array, Array]]:
        """For each bit of the weights: where the difference is taken, and where it is negated, both (pairs, lanes)."""
        pairs = self.signs[outputs, 2 * part.first : 2 * part.last].T
        first, second = np.ascontiguousarray(pairs[0::2]), np.ascontiguousarray(pairs[1::2])
        unlike, negative = first ^ second, ~first
        for place in range(bits):
            yield _bit(unlike, place), _bit(negative, place)


def _bit(words: NDArray[np.uint32], place: int) -> Array:
    found: Array = ((words >> np.uint32(place)) & np.uint32(1)).astype(np.uint8)
    return found


def secrets_of(sums: Sums, weights: LinearWeights, channels: Ints) -> Secrets:
    """What the owner of these weights knows; channels: (outputs of the layer,) index of the bias."""
    group, numbers = sums.group, sums.numbers
    n, k, pairs = numbers.weight_bits, numbers.source_bits, group.pairs
    bias = weights.bias.astype(np.int64)[channels[group.outputs]].view(np.uint64)
    if not pairs:
        return Secrets(np.empty((len(group.outputs), 0), np.uint32), bias & mask(numbers.ring_bits))
    flat = np.append(weights.weight.reshape(-1).astype(np.int32), np.int32(0))  # -1 reads the last one
    found = flat[group.weights]
    total = found.sum(axis=1, dtype=np.int64)
    signs = (found + (1 << (n - 1))).astype(np.uint32)
    signs[:, 1::2] = np.where(group.weights[:, 1::2] < 0, signs[:, 0::2], signs[:, 1::2])
    ones = (1 << n) - 1
    negative = pairs * ones - signs[:, 0::2].sum(axis=1, dtype=np.int64)
    public = pairs * (1 << k) * (1 - ones)
    constants = negative + public + 2 * bias.view(np.int64)
    if not numbers.signed:
        constants += total << k
    return Secrets(signs, constants.view(np.uint64) & mask(numbers.ring_bits + 1))


def mask(bits: int) -> np.uint64:
    """The ``bits`` low bits."""
    found: np.uint64 = np.uint64((1 << bits) - 1)
    return found
