"""Figures over several cells: means over nets and shares, each with its interval and number."""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from deepseal.apps.compare.jobs import Job
from deepseal.record import Record
from deepseal.statistics import rate, student

Found = list[tuple[Job, Record]]


def of_kind(cells: Found, kind: str) -> Found:
    """The cells of one kind."""
    return [(job, record) for job, record in cells if job.kind == kind]


def by_attack(cells: Found, *, marked: bool) -> dict[str, Found]:
    """Attack cells by the attack's title as the plan has it, in its order."""
    found: dict[str, Found] = defaultdict(list)
    for job, record in of_kind(cells, "attack"):
        if job.identity["marked"] == marked:
            found[job.attack].append((job, record))
    return found


def over_nets(
    cells: Iterable[tuple[Job, Record]],
    value: Callable[[Mapping[str, Any]], float],
    *,
    least: float = -math.inf,
    most: float = math.inf,
) -> dict[str, Any] | None:
    """The mean of a value over nets, with Student's interval; payloads of a net are averaged first.

    Args:
        cells: what to take it from.
        value: from a cell's results.
        least: what the value can be at least; the interval ends there.
        most: the same at most.
    """
    by_net: dict[str, list[float]] = defaultdict(list)
    for job, record in cells:
        by_net[job.identity["net"]].append(float(value(record.results)))
    means = [sum(values) / len(values) for values in by_net.values()]
    if not means:
        return None
    found = student(means)
    if found.low is not None and found.high is not None:
        found = dataclasses.replace(found, low=max(least, found.low), high=min(most, found.high))
    return found.as_dict()


def is_owned(results: Mapping[str, Any]) -> bool:
    """Whether a cell's verdict is ``owned``; what cannot be read is not."""
    return bool(results.get("reading", {}).get("verdict") == "owned")


def symbol_errors(cells: Found) -> dict[str, Any] | None:
    """Mean share of wrong among readable symbols, over nets; None where nothing can be read.

    Where no symbol was wrong, or every one was, Student's interval would have no width: then it is exact over symbols.
    """
    readable = [(job, record) for job, record in cells if record.results.get("reading", {}).get("bits")]
    found = over_nets(readable, lambda r: r["reading"]["bit_errors"] / r["reading"]["bits"], least=0.0, most=1.0)
    if found is None or found["mean"] not in (0.0, 1.0):
        return found
    bits = sum(record.results["reading"]["bits"] for _, record in readable)
    exact = rate(bits if found["mean"] else 0, bits)
    return {**found, "low": exact.low, "high": exact.high, "method": f"exact over {bits} symbols"}


def shares(cells: Found, holds: Callable[[Mapping[str, Any]], bool]) -> dict[str, Any] | None:
    """How many cells something holds for, with the exact interval."""
    return rate(sum(holds(record.results) for _, record in cells), len(cells)).as_dict() if cells else None


def points(results: Mapping[str, Any]) -> float:
    """Change of accuracy in percentage points."""
    return 100.0 * float(results["change"]["mean"])


def costs_of(marks: Found) -> dict[str, Any]:
    """What marks cost, over nets; None where it is unknown, such as the queries of a white-box mark."""
    names = ("embedding_seconds", "embedding_cpu_seconds", "share_of_training", "keygen_seconds", "verify_seconds")
    return {name: _cost(marks, name) for name in (*names, "queries", "updates", "rounds")}


def _cost(marks: Found, name: str) -> dict[str, Any] | None:
    known = [(job, record) for job, record in marks if record.results["cost"][name] is not None]
    return over_nets(known, lambda results: results["cost"][name], least=0.0)
