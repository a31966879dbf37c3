"""A comparison's record as one self-contained page: tables, and two pictures of what decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from deepseal.apps.compare import tables
from deepseal.apps.report import words
from deepseal.apps.report.plots import nice
from deepseal.errors import understood
from deepseal.record import Record

KIND = "watermark.compare"
ROW, TOP, LEFT, RIGHT, WIDTH = 26, 14, 138, 366, 380
_MOST_POINTS = 30.0


@dataclasses.dataclass(frozen=True)
class Dot:
    """A scheme's change of accuracy on the canvas: mean, ends of the interval, single nets."""

    name: str
    y: float
    mean: float
    low: float | None
    high: float | None
    nets: tuple[float, ...]
    says: str


@dataclasses.dataclass(frozen=True)
class Dots:
    """Changes of accuracy of all schemes, one below the other."""

    height: float
    zero: float
    ticks: tuple[tuple[float, str], ...]
    rows: tuple[Dot, ...]


@dataclasses.dataclass(frozen=True)
class Square:
    """One scheme after one attack; ``tone`` is 0 (removed everywhere) … 4 (owned everywhere), or None."""

    share: str
    errors: str
    aligned: str
    tone: int | None
    says: str


def is_comparison(record: Record) -> bool:
    """Whether a record is that of a finished comparison."""
    return record.kind == KIND and record.status == "ok" and isinstance(record.results.get("pairs"), list)


def brief(results: Mapping[str, Any]) -> dict[str, Any]:
    """What a terminal shows: one row a scheme, and what was refused."""
    shown = ("overview", "refused", "generalisability", "report", "tables")
    return {name: results[name] for name in shown if results.get(name)}


def view(record: Record) -> dict[str, Any]:
    """What the page's template shows.

    Raises:
        InputError: a record that lacks what a comparison's has.
    """
    with understood("a complete record of a comparison", "make the record again"):
        return _view(record)


def _view(record: Record) -> dict[str, Any]:
    results = record.results
    return {
        "record": record,
        "pairs": [
            {
                "title": tables.title(pair),
                "about": tables.about(pair),
                "tables": [table for table in tables.tables(pair) if table.name not in ("robustness", "nnw")],
                "nnw": [table for table in tables.tables(pair) if table.name == "nnw"],
                "robustness": [table for table in tables.tables(pair) if table.name == "robustness"],
                "schemes": [scheme["scheme"] for scheme in pair["schemes"]],
                "squares": squares(pair["schemes"]),
                "dots": dots(pair["schemes"]),
                "unfinished": pair["cells"]["planned"] - pair["cells"]["measured"],
                "cells": pair["cells"],
            }
            for pair in results["pairs"]
        ],
        "closing": list(tables.closing(results)),
        "headlines": [headline(pair) for pair in results["pairs"]],
        "rate": record.params["false_positive"],
        "canvas": {"left": LEFT, "right": RIGHT, "width": WIDTH, "top": TOP},
    }


def headline(pair: Mapping[str, Any]) -> str:
    """How many schemes hold, in one sentence."""
    schemes = [scheme for scheme in pair["schemes"] if scheme["scheme"] != "plain"]
    sound = [s for s in schemes if s["reliability"]["owned"]["count"] == s["reliability"]["owned"]["n"]]
    text = f"{tables.title(pair)}: {len(sound)} of {len(schemes)} schemes read as owned from every saved file"
    standing = {s["scheme"]: _standing(s) for s in sound if any(row["n"] for row in s["robustness"])}
    if not standing:
        return f"{text}."
    best = max(standing.values())
    names = [name for name, value in standing.items() if value == best]
    told = "most often owned after the attacks, as it stands or aligned"
    return f"{text}; {told}: {', '.join(names)} ({words.percent(best)})."


def _standing(scheme: Mapping[str, Any]) -> float:
    """Share of the attacked nets that are owned, after alignment where there was one and it helped."""
    rows = [row for row in scheme["robustness"] if row["n"]]
    owned = sum(max(int(row["owned"]["count"]), int((row["aligned_owned"] or {}).get("count", 0))) for row in rows)
    return owned / sum(int(row["n"]) for row in rows)


def dots(schemes: Sequence[Mapping[str, Any]]) -> Dots | None:
    """The change of accuracy by each mark. What would leave the canvas ends at its edge."""
    if not schemes:
        return None
    changes = [_points(scheme["fidelity"]) for scheme in schemes]
    nets = [[100.0 * one["mean"] for one in scheme["fidelity"]["paired"]] for scheme in schemes]
    known = [0.0, *(value for own in nets for value in own)]
    known += [end for change in changes for end in (change["low"], change["high"]) if end is not None]
    low, high = max(-_MOST_POINTS, min(known)), min(_MOST_POINTS, max(known))
    pad = 0.06 * (high - low or 1.0)
    low, high = low - pad, high + pad

    def place(value: float) -> float:
        share = (min(high, max(low, float(value))) - low) / (high - low)
        return round(LEFT + (RIGHT - LEFT) * float(share), 2)

    rows = []
    for index, (scheme, change, own) in enumerate(zip(schemes, changes, nets, strict=True)):
        ends = [None if change[end] is None else place(change[end]) for end in ("low", "high")]
        rows.append(
            Dot(
                name=words.clean(scheme["scheme"], 24),
                y=TOP + ROW * index + ROW / 2,
                mean=place(change["mean"]),
                low=ends[0],
                high=ends[1],
                nets=tuple(map(place, own)),
                says=f"{scheme['scheme']}: {tables.between(change, '{:+.2f}')} points on {change['n']} nets",
            )
        )
    return Dots(TOP + ROW * len(rows), place(0.0), tuple((place(v), _signed(v)) for v in nice(low, high)), tuple(rows))


def _points(fidelity: Mapping[str, Any]) -> dict[str, Any]:
    """The change over nets; of a single net, with its interval over test samples."""
    (first, *others) = fidelity["paired"]
    if others:
        return dict(fidelity["change_points"])
    return {**first, **{name: 100.0 * first[name] for name in ("mean", "low", "high")}, "n": 1}


def _signed(value: float) -> str:
    return f"{value:+g}".replace("-", "−") if value else "0"


def squares(schemes: Sequence[Mapping[str, Any]]) -> list[tuple[str, list[Square]]]:
    """One row an attack, one square a scheme."""
    titles = list(dict.fromkeys(row["attack"] for scheme in schemes for row in scheme["robustness"]))
    return [(title, [_square(_row(scheme, title)) for scheme in schemes]) for title in titles]


def _row(scheme: Mapping[str, Any], title: str) -> Mapping[str, Any] | None:
    return next((row for row in scheme["robustness"] if row["attack"] == title), None)


def _square(row: Mapping[str, Any] | None) -> Square:
    if row is None:
        return Square("–", "", "", None, "not measured")
    if not row["n"]:
        return Square(tables.absent(row), "", "", None, words.clean(row["refused"] or row.get("not_applicable")))
    owned = row["owned"]
    wrong = f"{100 * row['symbol_error_rate']['mean']:.0f}% wrong" if row["symbol_error_rate"] else "unreadable"
    lost = f"{tables.between(row['accuracy_lost_points'], '{:.2f}')} points of accuracy lost"
    bits = ", ".join(f"{e} of {n}" for e, n in zip(row["bit_errors"], row["bits"], strict=True) if e is not None)
    aligned = f"aligned {tables.share(row['aligned_owned'])}" if row["aligned_owned"] else ""
    says = f"owned {tables.ratio(owned)}; wrong {bits or 'unreadable'}; {lost}"
    return Square(tables.share(owned), wrong, aligned, round(4 * owned["value"]), says)
