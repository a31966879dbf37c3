"""Where the bits of a mark are: hidden layers, their capacity, and cells of a layer and a carrier class."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from deepseal.adapter.layers import Reading
from deepseal.rng import expand_normal
from deepseal.watermark.key import Key

_NARROW = 32  # features; a router or a gate is no place for bits
_WEIGHTS = 8  # a bit, where nothing before the layer changes


@dataclasses.dataclass(frozen=True)
class Cell:
    """One Gaussian of the mixture: the mean activation of a carrier class in a layer holds ``bits`` bits."""

    layer: str
    carrier: int
    bits: int
    start: int


@dataclasses.dataclass(frozen=True)
class LayerCapacity:
    """What a layer can hold. ``limit`` bits can be embedded at all; ``advised`` leave margin against removal.

    ``margin`` is the most that all ``advised`` bits can have at once, in standard deviations of strangers' scores: the
    square root of features over bits of a cell.
    """

    layer: str
    kind: str
    features: int
    limit: int
    advised: int
    margin: float


def thin_layers(
    hidden: Sequence[tuple[str, str, Reading]], bits: int, carriers: int, *, inner: bool = False
) -> list[str]:
    """The last two hidden layers, or as many more as the bits need to stay thinly spread; no narrow one.

    Args:
        hidden: all of them, in order.
        bits: length of the message.
        carriers: number of carriers.
        inner: leave out the last, which is nearly the answer, and those with too few weights to move so many means by
            themselves; prefer the wider half of the later layers, where bits find directions that the answer hardly
            depends on, and take others where the bits find no room there.
    """
    usable = [row for row in hidden if row[2].width >= _NARROW] or list(hidden)
    others: list[tuple[str, str, Reading]] = []
    if inner:
        able = [row for row in usable if row[2].weights >= _WEIGHTS * row[2].advised * carriers] or usable
        within = [row for row in able if row is not hidden[-1]] or able
        later = within[len(within) // 2 :]
        widest = sorted(later, key=lambda row: row[2].width)[-len(later) // 2 :]
        usable, others = [row for row in within if row in widest], [row for row in within if row not in widest]
    chosen: set[str] = set()
    room = 0
    for row in (*reversed(usable), *reversed(others)):
        if room >= bits and (len(chosen) >= 2 or row in others):
            break
        chosen.add(row[0])
        room += row[2].advised * carriers
    return [name for name, _, _ in hidden if name in chosen]


def cells_of(key: Key) -> list[Cell]:
    """The message dealt out: each layer's bits evenly over the carriers."""
    cells: list[Cell] = []
    start, carriers = 0, key.public["carriers"]
    for layer in key.public["layers"]:
        bits = int(key.public["layer_bits"][layer])
        for index, carrier in enumerate(carriers):
            size = bits // len(carriers) + (index < bits % len(carriers))
            cells.append(Cell(layer, int(carrier), size, start))
            start += size
    return [cell for cell in cells if cell.bits]


def deal(bits: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Bits in proportion to the weights, the rest to the largest remainders."""
    total = sum(weights.values())
    dealt = {name: bits * weight // total for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: -(bits * weights[name] % total))
    for name in by_remainder[: bits - sum(dealt.values())]:
        dealt[name] += 1
    return dealt


def projection_of(secret: bytes, cell: Cell, width: int) -> NDArray[np.float32]:
    """The cell's secret matrix A, (width, bits), i.i.d. N(0, 1)."""
    return expand_normal(secret, f"projection/{cell.layer}/{cell.carrier}", (width, cell.bits))
