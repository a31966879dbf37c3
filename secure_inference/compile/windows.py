"""Views of a wire: short descriptions of which element each lane reads."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import InputError

_MOST = 1 << 26


@dataclasses.dataclass(frozen=True)
class Axis:
    """One dimension of a window: ``count`` lanes, lane i at coordinate start + i step.

    Attributes:
        count: lanes.
        stride: elements of the source from one coordinate to the next.
        start: first coordinate; may be negative.
        step: from lane to lane.
        size: coordinates outside 0 … size - 1 are padding; None: there is no limit.
    """

    count: int
    stride: int
    start: int = 0
    step: int = 1
    size: int | None = None


@dataclasses.dataclass(frozen=True)
class Window:
    """A box of regularly spaced elements: pooling windows, slices, permutations, channels."""

    axes: tuple[Axis, ...]
    offset: int = 0

    @property
    def shape(self) -> tuple[int, ...]:
        """Lanes along each dimension."""
        return tuple(axis.count for axis in self.axes)

    def index(self) -> NDArray[np.int64]:
        """(lanes,) elements, row by row; -1 for padding."""
        total = np.full(self.shape, self.offset, dtype=np.int64)
        padding = np.zeros(self.shape, dtype=np.bool_)
        for place, axis in enumerate(self.axes):
            coordinates = axis.start + axis.step * np.arange(axis.count, dtype=np.int64)
            shape = [-1 if i == place else 1 for i in range(len(self.axes))]
            total += (coordinates * axis.stride).reshape(shape)
            if axis.size is not None:
                padding |= ((coordinates < 0) | (coordinates >= axis.size)).reshape(shape)
        total[padding] = -1
        return total.reshape(-1)


@dataclasses.dataclass(frozen=True)
class Gather:
    """Elements one by one, for views that are no box."""

    shape: tuple[int, ...]
    indices: tuple[int, ...]

    def index(self) -> NDArray[np.int64]:
        """(lanes,) elements; -1 for padding."""
        return np.array(self.indices, dtype=np.int64)


View: TypeAlias = "Window | Gather"


def view_index(view: View | None, size: int) -> NDArray[np.int64]:
    """(lanes,) elements that a view of a wire of ``size`` elements reads; -1 for padding.

    Raises:
        InputError: an element that is not there.
    """
    if view is None:
        return np.arange(size, dtype=np.int64)
    lanes = math.prod(view.shape)
    if not 0 < lanes <= _MOST or any(count < 1 for count in view.shape):
        raise InputError(f"a view of 1 to {_MOST} elements", found=str(view.shape), do="correct the program")
    index = view.index()
    if len(index) != lanes or int(index.min()) < -1 or int(index.max()) >= size:
        found = f"elements {index.min()} … {index.max()} in a view of shape {view.shape}"
        raise InputError(f"elements 0 … {size - 1} of a wire", found=found, do="correct the program")
    return index


def view_of(index: NDArray[np.int64], source: tuple[int, ...]) -> View | None:
    """The shortest description of an index array of any shape (-1: padding) into a wire of shape ``source``.

    None when it reads the wire as it is, shape included.
    """
    size = math.prod(source)
    if index.shape == source and np.array_equal(index.reshape(-1), np.arange(size)):
        return None
    for guess in (_strided(index), _boxed(index, source)):
        if guess is not None and np.array_equal(guess.index(), index.reshape(-1)):
            return guess
    return Gather(tuple(index.shape), tuple(index.reshape(-1).tolist()))


def _strided(index: NDArray[np.int64]) -> Window:
    first = int(index.flat[0])
    axes = []
    for place, count in enumerate(index.shape):
        step = index[tuple(1 if i == place else 0 for i in range(index.ndim))] - first if count > 1 else 0
        axes.append(Axis(count, int(step)))
    return Window(tuple(axes), first)


def _boxed(index: NDArray[np.int64], source: tuple[int, ...]) -> Window | None:
    """The window whose axes are those of the source, with padding, if it is one."""
    where = np.argwhere(index >= 0)
    if index.ndim != len(source) or not len(where):
        return None
    coordinates = np.stack(np.unravel_index(index[index >= 0], source), axis=1)
    axes = []
    for place, size in enumerate(source):
        lanes, values = where[:, place], coordinates[:, place]
        low, high = int(lanes.argmin()), int(lanes.argmax())
        span = int(lanes[high] - lanes[low])
        step = int(values[high] - values[low]) // span if span else 1
        start = int(values[low] - step * lanes[low])
        axes.append(Axis(index.shape[place], math.prod(source[place + 1 :]), start, step, size))
    # A single lane inside the wire says nothing of the step: one that leads outside fits the rest.
    for place, axis in enumerate(axes):
        if axis.count > 1 and len(np.unique(where[:, place])) == 1:
            lane = int(where[0, place])
            step = source[place]
            axes[place] = dataclasses.replace(axis, step=step, start=int(coordinates[0, place]) - step * lane)
    return Window(tuple(axes))


def view_from_dict(plain: Mapping[str, Any]) -> View:
    """The inverse of a view's plain form."""
    if plain["view"] == "window":
        return Window(tuple(Axis(**axis) for axis in plain["axes"]), plain["offset"])
    return Gather(tuple(plain["shape"]), tuple(plain["indices"]))
