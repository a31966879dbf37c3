"""What a monitor costs on this machine: milliseconds and memory that it adds to the victim's own pass."""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from deepseal.adapter import BlackBox
from deepseal.defense.context import contexts
from deepseal.defense.monitor import Member

_WARM = 3


@dataclasses.dataclass(frozen=True)
class Cost:
    """Of one batch.

    Attributes:
        milliseconds: time that is added to the victim's pass.
        state: MiB of what was learned.
        working: MiB that are alive at once while it scores.
    """

    milliseconds: float
    state: float
    working: float

    @property
    def memory(self) -> float:
        """MiB together."""
        return self.state + self.working


def victim_milliseconds(model: BlackBox, x: Tensor, rounds: int) -> float:
    """Time of the victim's own pass over one batch."""
    return timed([lambda: list(contexts(model, x, ()))], rounds)[0]


def added_cost(model: BlackBox, members: Sequence[Member], x: Tensor, rounds: int) -> Cost:
    """What detectors add to the victim's pass over one batch: reading their layers, further passes, scoring."""
    taps = tuple(dict.fromkeys(tap for member in members for tap in member.detector.needs.taps))

    ready = list(contexts(model, x, taps))

    def scored() -> None:
        for context in ready:
            for member in members:
                member.detector.score(context, member.state)

    with torch.no_grad():
        alone, reading, scoring = timed(
            [lambda: list(contexts(model, x, ())), lambda: list(contexts(model, x, taps)), scored], rounds
        )
        working = peak_memory(scored)
    tensors = [value for member in members for value in member.state.values()]
    state = sum(value.numel() * value.element_size() for value in tensors) / 2**20
    return Cost(scoring + max(0.0, reading - alone), state, working)


def timed(parts: Sequence[Callable[[], Any]], rounds: int) -> list[float]:
    """Milliseconds of each part, in turns, after some that do not count: of ten runs the fastest.

    Other programs on the machine only ever add time, so that the fast runs are those that tell what the work takes.
    """
    seen: list[list[float]] = [[] for _ in parts]
    for index in range(_WARM + rounds):
        for part, times in zip(parts, seen, strict=True):
            begun = time.perf_counter()
            part()
            if index >= _WARM:
                times.append(1e3 * (time.perf_counter() - begun))
    return [sorted(times)[len(times) // 10] for times in seen]


def peak_memory(part: Callable[[], Any]) -> float:
    """Most MiB of tensors that are made and alive at once while ``part`` runs."""
    living = _Living()
    with living:
        part()
    return living.peak / 2**20


class _Living(TorchDispatchMode):
    """Counts the bytes of the storages that operations make, until they are gone."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.bytes = 0
        self.peak = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)}
        made = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if isinstance(leaf, Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in given:
                    self._known.add(storage._cdata)
                    self.bytes += storage.nbytes()
                    self.peak = max(self.peak, self.bytes)
                    weakref.finalize(storage, self._gone, storage._cdata, storage.nbytes())
        return made

    def _gone(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.bytes -= size
