"""A monitor's evaluation as one self-contained page: ROC curves, silent errors against strength, what was not done."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from deepseal.apps.report import words
from deepseal.errors import understood
from deepseal.record import Record

KIND = "defense.evaluate"
WIDTH, HEIGHT = 390, 270
LEFT, RIGHT, TOP, BOTTOM = 52, 366, 14, 224
_FROM, _TO = -3.3, 0.0
_STYLES = 6


@dataclasses.dataclass(frozen=True)
class Curve:
    """A line on the canvas with its name; ``marks`` are points with a vertical interval (x, y, low, high)."""

    style: int
    name: str
    path: str
    marks: tuple[tuple[float, float, float, float], ...]
    says: str


@dataclasses.dataclass(frozen=True)
class Figure:
    """Axes and curves."""

    title: str
    x_label: str
    y_label: str
    x_ticks: tuple[tuple[float, str], ...]
    y_ticks: tuple[tuple[float, str], ...]
    curves: tuple[Curve, ...]
    uprights: tuple[tuple[float, str], ...] = ()


def is_evaluation(record: Record) -> bool:
    """Whether a record is that of a finished evaluation."""
    return record.kind == KIND and record.status == "ok" and isinstance(record.results.get("attacks"), list)


def brief(results: Mapping[str, Any]) -> dict[str, Any]:
    """What a terminal shows: rates and attacks with one figure a cell."""
    with understood("a complete record of an evaluation", "make the record again"):
        rates = [
            {
                "nominal": row["nominal"],
                **({"class": row["predicted_class"]} if "predicted_class" in row else {}),
                "realised": interval(row.get("realised")),
                "right answers only": interval(row.get("realised_on_right_answers")),
                "promised": words.yes_no(row["guaranteed"]),
            }
            for row in results["false_positives"]
        ]
        attacks = [
            {
                "attack": row["name"],
                "fooled": interval(row["success"], short=True),
                "AUROC": _figure(row["auroc"]),
                "found at 1%": "–" if row["adaptive"] else interval(row["tpr_at_1"], short=True),
                "found at 5%": "–" if row["adaptive"] else interval(row["tpr_at_5"], short=True),
                "silent at 1%": interval(row["silent_errors_at_1"], short=True),
                "silent at 5%": interval(row["silent_errors_at_5"], short=True),
            }
            for row in results["attacks"]
        ]
        shown: dict[str, Any] = {
            "accuracy": interval(results["accuracy"]),
            "clean against clean": _figure(results["controls"]["clean_against_clean"]),
            "alarms under benign noise": interval(results["controls"]["noise_alarms"]),
            "bound": results["bound"],
            "false positives": rates,
        }
        if attacks:
            shown["attacks"] = attacks
        shown["checklist"] = [{"what": row["what"], "done": words.yes_no(row["done"])} for row in results["checklist"]]
        return shown


def headline(results: Mapping[str, Any]) -> str:
    """The evaluation in a sentence."""
    rates = [row for row in results["false_positives"] if row["guaranteed"] and "predicted_class" not in row]
    said = [f"{row['nominal']:.2%} promised, {row['realised']['value']:.2%} found" for row in rates]
    text = f"False alarms: {'; '.join(said) or 'no rate could be promised'}."
    silent = [(row["silent_errors_at_1"] or row["silent_errors_at_5"], row["name"]) for row in results["attacks"]]
    known = [(value["value"], name) for value, name in silent if value]
    if known:
        worst, name = max(known)
        furthest = words.clean(name, 60)
        text += f" The attack that gets furthest, {furthest}, leaves {worst:.1%} of inputs wrong and unflagged."
    return text


def view(record: Record) -> dict[str, Any]:
    """What the page's template shows.

    Raises:
        InputError: a record that lacks what an evaluation's has.
    """
    with understood("a complete record of an evaluation", "make the record again"):
        results, shown = record.results, brief(record.results)
        return {
            "record": record,
            "headline": headline(results),
            "warnings": list(record.notes),
            "bound": results["bound"],
            "roc": _roc(results),
            "silent": _silent(results["attacks"]),
            "tables": {name: words.grid(value) for name, value in shown.items() if isinstance(value, list)},
            "facts": [
                (name, value) for name, value in brief(results).items() if isinstance(value, str) and name != "bound"
            ],
            "members": _members(results["attacks"]),
            "cost": results["cost"],
            "canvas": {"width": WIDTH, "height": HEIGHT, "left": LEFT, "right": RIGHT, "top": TOP, "bottom": BOTTOM},
        }


def interval(value: object, *, short: bool = False) -> str:
    """A rate of a record with its interval."""
    share = words.at(value, "value")
    if words.number(share) is None:
        return "–"
    text = f"{100 * share:.2f}%" if share < 0.1 else f"{100 * share:.1f}%"
    if short:
        return f"{100 * share:.1f}%"
    low, high, n = (words.at(value, name) for name in ("low", "high", "n"))
    return f"{text} ({100 * low:.2f}…{100 * high:.2f}, n {words.count(n)})"


def _figure(value: object) -> str:
    known = words.number(value)
    return "–" if known is None else f"{known:.4f}"


def _members(attacks: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]] | None:
    """Area under the curve of each member alone."""
    if not attacks:
        return None
    members = list(attacks[0]["members"])
    return ["attack", *members], [[row["name"], *(_figure(row["members"].get(m)) for m in members)] for row in attacks]


def _roc(results: Mapping[str, Any]) -> Figure | None:
    rows = [row for row in results["attacks"] if row["roc"] and not row["adaptive"]]
    if not rows:
        return None
    curves = []
    for index, row in enumerate(rows):
        points = [(_log_x(x), _y(y)) for x, y in row["roc"]]
        marks = []
        for percent in (1, 5):
            found = row[f"tpr_at_{percent}"]
            realised = next(
                (
                    r["realised_on_right_answers"]["value"]
                    for r in results["false_positives"]
                    if r["guaranteed"] and r["nominal"] == percent / 100 and "predicted_class" not in r
                ),
                None,
            )
            if found and realised:
                marks.append((_log_x(realised), _y(found["value"]), _y(found["low"]), _y(found["high"])))
        says = f"{words.clean(row['name'], 60)}: area {_figure(row['auroc'])}"
        curves.append(Curve(index % _STYLES, words.clean(row["name"], 40), _path(points), tuple(marks), says))
    ticks = tuple((_log_x(10.0**e), f"{100 * 10.0**e:g}%") for e in range(-3, 1))
    uprights = tuple((_log_x(rate), f"{rate:.0%}") for rate in (0.01, 0.05))
    return Figure(
        "Attacked inputs that are found, against false alarms",
        "clean inputs, answered rightly, that raise the alarm",
        "attacked inputs that do",
        ticks,
        _y_ticks(),
        tuple(curves),
        uprights,
    )


def _silent(attacks: Sequence[Mapping[str, Any]]) -> Figure | None:
    """Silent errors against epsilon, one line a method, where a method was run at two strengths or more."""
    groups: dict[tuple[str, int], list[tuple[float, Mapping[str, float]]]] = {}
    for row in attacks:
        name, _, options = row["name"].partition(":")
        given = dict(part.partition("=")[::2] for part in options.split(","))
        if "epsilon" not in given:
            continue
        for percent in (1, 5):
            if row[f"silent_errors_at_{percent}"]:
                groups.setdefault((name, percent), []).append(
                    (float(given["epsilon"]), row[f"silent_errors_at_{percent}"])
                )
    kept = {key: sorted(values, key=lambda pair: pair[0]) for key, values in groups.items() if len(values) > 1}
    if not kept:
        return None
    most = max(epsilon for values in kept.values() for epsilon, _ in values)

    def place(epsilon: float) -> float:
        return round(LEFT + (RIGHT - LEFT) * epsilon / most, 2)

    curves = []
    for index, ((name, percent), values) in enumerate(kept.items()):
        points = [(place(epsilon), _y(share["value"])) for epsilon, share in values]
        marks = tuple((place(e), _y(s["value"]), _y(s["low"]), _y(s["high"])) for e, s in values)
        said = ", ".join(f"{e:g}: {s['value']:.1%}" for e, s in values)
        title = f"{name} at {percent}%"
        curves.append(Curve(index % _STYLES, title, _path(points), marks, f"{title}: {said}"))
    step = 10 ** math.floor(math.log10(most))
    step = step if most / step >= 3 else step / 2
    ticks = tuple((place(i * step), f"{i * step:g}") for i in range(int(most / step) + 1))
    return Figure(
        "Silent errors against the attacker's ε", "ε", "wrong and unflagged", ticks, _y_ticks(), tuple(curves)
    )


def _y_ticks() -> tuple[tuple[float, str], ...]:
    return tuple((_y(share), f"{share:.0%}") for share in (0.0, 0.25, 0.5, 0.75, 1.0))


def _log_x(rate: float) -> float:
    exponent = max(_FROM, math.log10(max(rate, 1e-9)))
    return round(LEFT + (RIGHT - LEFT) * (exponent - _FROM) / (_TO - _FROM), 2)


def _y(share: float) -> float:
    return round(BOTTOM - (BOTTOM - TOP) * share, 2)


def _path(points: Sequence[tuple[float, float]]) -> str:
    return " ".join(f"{x:g},{y:g}" for x, y in points)
