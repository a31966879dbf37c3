"""Number, kind and place of the detectors for a budget of time and memory on this machine.

DeepFense's automated customisation (B. Rouhani, M. Samragh, M. Javaheripi, T. Javidi, F. Koushanfar, ICCAD 2018,
section 6) fits its defenders into the resources at hand. Here every candidate is fitted and its cost measured; what it
is worth is measured without any attack (``proxies``); and detectors are added greedily by worth for cost, where worth
is what one more detector adds to the area under the curve of the sum.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from deepseal.adapter import BlackBox, Split
from deepseal.adapter.training import Progress
from deepseal.defense.base import Detector
from deepseal.defense.context import Reference, contexts
from deepseal.defense.monitor import Member, Monitor, fit_monitor
from deepseal.defense.platform import Cost, added_cost, victim_milliseconds
from deepseal.defense.presets import choose, title_of
from deepseal.defense.proxies import proxies
from deepseal.defense.tails import MINIMUM, Tails, fit_tail
from deepseal.errors import InputError
from deepseal.rng import Rng

CANDIDATES = (
    "max-softmax",
    "energy",
    "inrel",
    "input-pca",
    "magnet",
    *(f"{name}?layer={place}" for name in ("density", "ratio") for place in ("first", "early", "middle", "last")),
    "squeeze",
    "odds",
    "flip",
    "dist",
)
_HELD = 0.2
_MOST = 2000
_GAIN = 0.002  # of area: what a further detector must add


@dataclasses.dataclass(frozen=True)
class Budget:
    """What a monitor may add to the victim.

    Attributes:
        milliseconds: of one batch.
        mebibytes: of learned tensors and working memory.
        batch: inputs a batch.
        rounds: measurements of each time.
    """

    milliseconds: float
    mebibytes: float
    batch: int = 1
    rounds: int = 30

    def __post_init__(self) -> None:
        if self.milliseconds <= 0 or self.mebibytes <= 0 or self.batch < 1 or self.rounds < 1:
            found = f"{self.milliseconds:g} ms, {self.mebibytes:g} MiB, batch {self.batch}"
            raise InputError("a budget above 0", found=found, do="state what a batch may cost")

    def allows(self, cost: Cost) -> bool:
        """Whether it is enough."""
        return cost.milliseconds <= self.milliseconds and cost.memory <= self.mebibytes

    def share(self, cost: Cost) -> float:
        """The larger of the shares of time and memory that a cost takes."""
        return max(cost.milliseconds / self.milliseconds, cost.memory / self.mebibytes)


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A detector, what it costs, its worth alone by proxy, and what became of it."""

    title: str
    passes: int
    cost: Cost
    worth: Mapping[str, float]
    decision: str


@dataclasses.dataclass(frozen=True)
class Customised:
    """The monitor, not calibrated yet, and why it is what it is.

    Attributes:
        monitor: fitted on all of the data.
        victim: milliseconds of the victim's own pass over a batch.
        candidates: all that fit the model.
        total: cost of the chosen ones together, as measured.
        worth: area under the curve of their sum by kind of proxy.
    """

    monitor: Monitor
    victim: float
    candidates: tuple[Candidate, ...]
    total: Cost
    worth: Mapping[str, float]


def customise(
    model: BlackBox,
    split: Split,
    budget: Budget,
    *,
    rng: Rng,
    words: Sequence[str] = CANDIDATES,
    progress: Progress | None = None,
) -> Customised:
    """A monitor that stays within a budget on this machine.

    Args:
        model: the victim.
        split: clean labelled data, for instance the training data; a fifth of it is held back to compare candidates.
        budget: what may be added to the victim.
        rng: all randomness.
        words: candidates, as for ``choose``.
        progress: called with candidates done and all.

    Raises:
        InputError: data that are too few, or nothing that fits the model and the budget.
    """
    split.check(model.spec)
    placed, notes = _placed(model, words)
    order = torch.randperm(len(split), generator=rng.child("held").torch())
    count = max(2 * MINIMUM, round(_HELD * len(split)))
    if count >= len(split):
        found, do = str(len(split)), "pass more clean data"
        raise InputError(f"more than {count} clean samples", found=found, do=do)
    held, learning = split.take(order[:count][:_MOST]), Reference(model, split.take(order[count:]))
    inputs = {"clean": held.tensor, **proxies(model, held.tensor, rng=rng.child("proxies"))}
    batch = _batch(held.tensor, budget.batch)
    members, costs, columns = [], [], []
    for index, detector in enumerate(placed):
        try:
            member = Member(detector, detector.fit(learning, rng=rng.child(title_of(detector))))
            column = _surprises(model, member, inputs)
        except InputError as error:
            notes.append(f"{title_of(detector)} is off: {error}")
        else:
            members.append(member)
            columns.append(column)
            costs.append(added_cost(model, [member], batch, budget.rounds))
        if progress:
            progress(index + 1, len(placed))
    chosen, why = _greedy([member.title for member in members], columns, costs, budget)
    total = added_cost(model, [members[index] for index in chosen], batch, budget.rounds) if chosen else None
    while total is not None and not budget.allows(total):  # together they may cost more than one by one
        dropped = chosen.pop()
        why[dropped] = f"left out again: together {total.milliseconds:.3g} ms and {total.memory:.3g} MiB"
        total = added_cost(model, [members[index] for index in chosen], batch, budget.rounds) if chosen else None
    if total is None:
        cheapest = min(costs, key=budget.share, default=None)
        found = "nothing that fits the model" if cheapest is None else _said(cheapest)
        raise InputError(f"a detector within {_said(budget)}", found=found, do="allow more, or a larger --batch")
    rows = tuple(
        Candidate(member.title, member.detector.needs.passes, cost, _areas(column), why[index])
        for index, (member, cost, column) in enumerate(zip(members, costs, columns, strict=True))
    )
    detectors = [members[index].detector for index in chosen]
    monitor = fit_monitor(model, split, detectors, rng=rng, notes=notes)
    worth = _areas(_sum([columns[index] for index in chosen]))
    return Customised(monitor, victim_milliseconds(model, batch, budget.rounds), rows, total, worth)


def _placed(model: BlackBox, words: Sequence[str]) -> tuple[list[Detector], list[str]]:
    found: dict[str, Detector] = {}
    notes: list[str] = []
    for word in words:
        try:
            for detector in choose(model, [word]).detectors:
                found.setdefault(title_of(detector), detector)
        except InputError as error:
            notes.append(f"{word} is off: {error}")
    return list(found.values()), notes


def _batch(x: Tensor, size: int) -> Tensor:
    return x[torch.arange(size) % len(x)]


def _surprises(model: BlackBox, member: Member, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """-log p of a detector for every kind of input: the tail is of one half of the clean ones, the other is kept."""
    found = {}
    for kind, x in inputs.items():
        parts = contexts(model, x, member.detector.needs.taps)
        found[kind] = torch.cat([member.detector.score(part, member.state) for part in parts]).double()
    half = len(found["clean"]) // 2
    tails = Tails.of([fit_tail(found["clean"][:half])])
    found["clean"] = found["clean"][half:]
    return {kind: tails.surprise(scores[:, None])[:, 0] for kind, scores in found.items()}


def _greedy(
    titles: Sequence[str], columns: Sequence[Mapping[str, Tensor]], costs: Sequence[Cost], budget: Budget
) -> tuple[list[int], dict[int, str]]:
    """The chosen in their order, and a word on each candidate."""
    why = {index: f"too much by itself: {_said(cost)}" for index, cost in enumerate(costs) if not budget.allows(cost)}
    chosen: list[int] = []
    area, left = 0.5, [index for index in range(len(costs)) if index not in why]
    while left:
        gains = {index: _mean([*(columns[one] for one in chosen), columns[index]]) - area for index in left}
        fits = [index for index in left if budget.allows(_together([costs[one] for one in [*chosen, index]]))]
        useful = [index for index in fits if gains[index] >= _GAIN]
        if not useful:
            for index in left:
                why[index] = f"adds {gains[index]:+.3f}" if index in fits else f"no room: {_said(costs[index])}"
            break
        best = max(useful, key=lambda index: gains[index] / max(1e-3, budget.share(costs[index])))
        chosen.append(best)
        left.remove(best)
        area += gains[best]
        why[best] = f"chosen, number {len(chosen)}: adds {gains[best]:+.3f}"
    alone = [index for index, cost in enumerate(costs) if budget.allows(cost)]
    best_alone = max(alone, key=lambda index: _mean([columns[index]]), default=None)
    if best_alone is not None and _mean([columns[best_alone]]) > area:
        for index in chosen:
            why[index] = f"gives way to {titles[best_alone]}"
        chosen, why[best_alone] = [best_alone], f"chosen alone: area {_mean([columns[best_alone]]):.3f}"
    return chosen, why


def _together(costs: Sequence[Cost]) -> Cost:
    """At most this much: detectors score one after the other."""
    return Cost(
        sum(cost.milliseconds for cost in costs),
        sum(cost.state for cost in costs),
        max(cost.working for cost in costs),
    )


def _sum(columns: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    return {kind: torch.stack([column[kind] for column in columns]).sum(dim=0) for kind in columns[0]}


def _mean(columns: Sequence[Mapping[str, Tensor]]) -> float:
    areas = _areas(_sum(columns))
    return sum(areas.values()) / len(areas)


def _areas(column: Mapping[str, Tensor]) -> dict[str, float]:
    """Area under the curve of each kind of proxy against clean inputs; ties count one half."""
    clean = column["clean"].sort().values
    found = {}
    for kind, scores in column.items():
        if kind != "clean":
            below = torch.searchsorted(clean, scores.contiguous(), right=False)
            upto = torch.searchsorted(clean, scores.contiguous(), right=True)
            found[kind] = float((below + upto).double().mean()) / (2.0 * len(clean))
    return found


def _said(cost: Cost | Budget) -> str:
    memory = cost.memory if isinstance(cost, Cost) else cost.mebibytes
    return f"{cost.milliseconds:.3g} ms and {memory:.3g} MiB"
