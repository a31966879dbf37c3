"""Running a comparison: what is missing is measured, cell by cell; what is there is kept."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from deepseal.adapter import load_data
from deepseal.adapter.targets import find_target, split_target
from deepseal.apps.compare.cells import Cells
from deepseal.apps.compare.jobs import Job, jobs, seconds_per_update
from deepseal.apps.compare.plan import Plan
from deepseal.apps.compare.subjects import Bench
from deepseal.apps.compare.summary import summarise
from deepseal.apps.compare.tables import markdown
from deepseal.apps.report.html import render
from deepseal.errors import InputError, UnknownNameError
from deepseal.files import write_atomically
from deepseal.record import Run

Say = Callable[[str], None]
Mode = Literal["all", "estimate", "report"]


def compare(run: Run, plan: Plan, out: Path, *, say: Say, mode: Mode = "all") -> None:
    """Measure what is missing in a folder, and put into the run's results what all its cells add up to.

    Args:
        run: filled.
        plan: what to measure.
        out: folder of the cells, models and keys; an interrupted comparison goes on there.
        say: takes one line a cell; the first says what the whole will take.
        mode: ``estimate`` only says what it would take, ``report`` measures nothing.

    Raises:
        InputError: a folder of other things, or no pair of data and architecture that fits.
    """
    cells = Cells(out)
    if mode == "report" and not (out / "cells").is_dir():
        raise InputError(f"a comparison in {out}", found="none", do="name its folder, or leave out --report-only")
    benches, refused = _benches(plan, cells)
    if mode != "estimate":
        cells.open()
    run.params.update(plan.as_dict())
    for bench in benches:
        run.fingerprints.update({f"{bench.source}, {name}": value for name, value in bench.prints.items()})
    if mode != "report":
        waiting = _waiting(benches, say)
        if mode == "estimate":
            run.results.update(cells=len(waiting), estimated_seconds=sum(seconds for _, _, seconds in waiting))
            return
        _measure(waiting, say)
    run.results.update(summarise(plan, benches, refused))
    files = {"report": out / "report.html", "tables": out / "tables.md"}
    run.results.update({name: str(path) for name, path in files.items()})
    record = run.record()
    record.write(out / "record.json", force=True)
    write_atomically(files["report"], render([record], title="Watermarks compared").encode(), force=True)
    write_atomically(files["tables"], markdown(record.results, rate=plan.false_positive).encode(), force=True)


def _benches(plan: Plan, cells: Cells) -> tuple[list[Bench], list[dict[str, str]]]:
    """The pairs that fit, and those that do not with the reason.

    Raises:
        InputError: an architecture that is not there, or none that fits; the first reason.
    """
    benches, refused, first = [], [], None
    for arch in plan.archs:
        if not arch.startswith("torchvision:"):
            find_target(split_target(arch)[0])
    for source in plan.data:
        data = load_data(source)
        for arch in plan.archs:
            try:
                benches.append(Bench(plan, cells, source, data, arch))
            except UnknownNameError:
                raise
            except (InputError, RuntimeError, ValueError) as error:
                first = first or error
                refused.append({"data": source, "arch": arch, "reason": str(error)})
    if not benches and first is not None:
        raise first
    return benches, refused


def _waiting(benches: Sequence[Bench], say: Say) -> list[tuple[Bench, Job, float]]:
    """Cells that are missing, with the seconds that each should take."""
    waiting: list[tuple[Bench, Job, float]] = []
    total = 0
    for bench in benches:
        listed = list(jobs(bench))
        missing = [job for job in listed if job.record(bench) is None]
        update = seconds_per_update(bench) if missing else 0.0
        waiting += [(bench, job, update * job.updates) for job in missing]
        total += len(listed)
    left = duration(sum(seconds for _, _, seconds in waiting))
    say(f"{total} cells, {total - len(waiting)} of them measured; the rest should take about {left}")
    return waiting


def _measure(waiting: Sequence[tuple[Bench, Job, float]], say: Say) -> None:
    left, planned, clock = sum(seconds for _, _, seconds in waiting), 0.0, time.perf_counter()
    for number, (bench, job, seconds) in enumerate(waiting, start=1):
        left -= seconds
        if not job.needs():
            continue
        wall = time.perf_counter()
        record = bench.cells.put(job.kind, job.identity, job.seed, job.measure)
        planned += seconds
        now = time.perf_counter()
        what = f"{bench.source} {bench.arch.rpartition(':')[2]}, {job.title}: {_found(record.results)}"
        remains = duration(left * (now - clock) / max(planned, 1e-9))
        say(f"{number} of {len(waiting)}: {what} ({now - wall:.1f} s; about {remains} left)")


def _found(results: dict[str, Any]) -> str:
    if "reason" in results:
        return f"{results['status']}: {results['reason']}"
    if "reading" in results:
        reading = results["reading"]
        return f"{reading['bit_errors']} of {reading['bits']} wrong, {reading['verdict']}"
    if "owned" in results:
        return f"{results['owned']['count']} of {results['owned']['n']} innocent nets owned"
    return "unreadable" if "unreadable" in results else "done"


def duration(seconds: float) -> str:
    """A time in words."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
