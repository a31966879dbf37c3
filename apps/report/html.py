"""Records as one self-contained HTML page: no script, nothing loaded, readable on a phone, in print and in the dark."""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

import jinja2
from markupsafe import Markup

from deepseal.apps.report import comparison, detection, plots, story, words
from deepseal.apps.report.headline import sentence
from deepseal.record import Record

_PAGE = "page.html.j2"
_COMPARISON = "comparison.html.j2"
_DETECTION = "detection.html.j2"


def render(records: Sequence[Record], *, title: str | None = None) -> str:
    """The records as one HTML file; a comparison, or a monitor's evaluation, alone has a page of its own.

    Args:
        records: in the order of their numbers on the page; an empty list gives a page that says so.
        title: heading and title of the page; None for one that fits the records.
    """
    if len(records) == 1 and comparison.is_comparison(records[0]):
        page = _environment().get_template(_COMPARISON)
        return page.render(title=words.clean(title or "Watermarks compared", 200), **comparison.view(records[0]))
    if len(records) == 1 and detection.is_evaluation(records[0]):
        page = _environment().get_template(_DETECTION)
        return page.render(title=words.clean(title or "Evaluation of a monitor", 200), **detection.view(records[0]))
    rows = story.rows(records)
    numbers = {id(record): number for number, record in enumerate(records, start=1)}
    headline, remarks = story.headline(records, rows)
    decided = [row for row in rows if row.reading is not None]
    return (
        _environment()
        .get_template(_PAGE)
        .render(
            title=words.clean(title or "Model ownership report", 200),
            tone=decided[0].verdict if decided else "none",
            headline=headline,
            remarks=remarks,
            rows=rows,
            decided=decided,
            several_keys=len({row.key for row in rows if row.key}) > 1,
            panels=plots.panels(rows),
            canvas=plots,
            nulls=[row for row in decided if _has_null(row)],
            rates=list(dict.fromkeys(_rates(decided))),
            keys=_of_kind(records, "watermark.keygen"),
            embeds=_of_kind(records, "watermark.embed"),
            models=_of_kind(records, "model.train") + _of_kind(records, "model.evaluate"),
            others=[record for record in records if record.kind not in story.KNOWN_KINDS and record.status == "ok"],
            failed=[record for record in records if record.status != "ok"],
            warnings=_warnings(records, numbers),
            records=records,
            times=sorted(words.moment(record.started) for record in records),
            number_of=lambda record: numbers[id(record)],
            environments=_environments(records, numbers),
            fingerprints=_fingerprints(records, numbers),
        )
    )


@functools.cache
def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for name in ("count", "percent", "points", "seconds", "scientific"):
        environment.filters[name] = _exact(getattr(words, name))
    for name in ("clean", "text", "attack", "parameters", "one_in", "file_name", "moment"):
        environment.filters[name] = getattr(words, name)
    environment.globals.update(
        at=words.at,
        number=words.number,
        accuracy=words.accuracy,
        yes_no=words.yes_no,
        rate_of=words.rate,
        limit_of=words.limit,
        cell=words.cell,
        flat=words.flat,
        grid=words.grid,
        sentence=lambda record: sentence(record, words.scientific),
        reading=lambda record: words.reading(record, words.scientific),
        meanings=_MEANINGS,
        missing=words.MISSING,
    )
    return environment


def _exact(shown: Callable[..., str]) -> Callable[..., str]:
    """A filter that shows a rounded number and keeps the exact one in the page."""

    def filtered(value: object, *rest: object) -> str:
        if words.number(value) is None:
            return Markup('<span class="missing">{}</span>').format(words.MISSING)
        return Markup('<data value="{}">{}</data>').format(words.clean(value), shown(value, *rest))

    return filtered


def _of_kind(records: Sequence[Record], kind: str) -> list[Record]:
    return [record for record in records if record.kind == kind and record.status == "ok"]


def _has_null(row: story.Row) -> bool:
    return row.reading is not None and any(row.reading.results.get(name) for name in ("null", "null_models"))


def _rates(rows: Sequence[story.Row]) -> list[float]:
    rates = [words.rate(row.reading) for row in rows if row.reading is not None]
    return [rate for rate in rates if rate is not None]


def _warnings(records: Sequence[Record], numbers: dict[int, int]) -> list[tuple[str, list[int]]]:
    """Each warning and note once, with the numbers of the runs that gave it."""
    found: dict[str, list[int]] = defaultdict(list)
    for record in records:
        given = record.results.get("warnings")
        for text in [*(given if isinstance(given, list) else []), *record.notes]:
            found[words.clean(text)].append(numbers[id(record)])
    return list(found.items())


def _environments(records: Sequence[Record], numbers: dict[int, int]) -> list[tuple[list[tuple[str, str]], list[int]]]:
    """Each different environment once, with the numbers of the runs in it."""
    found: dict[str, tuple[list[tuple[str, str]], list[int]]] = {}
    for record in records:
        rows = words.flat(record.environment)
        found.setdefault(repr(rows), (rows, []))[1].append(numbers[id(record)])
    return list(found.values())


def _fingerprints(records: Sequence[Record], numbers: dict[int, int]) -> list[tuple[str, list[tuple[str, list[int]]]]]:
    """Each fingerprint once, with the names it has and the numbers of the runs."""
    found: dict[str, dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for name, value in record.fingerprints.items():
            found[value][name].append(numbers[id(record)])
    return [
        (words.clean(value), [(words.clean(name, 60), runs) for name, runs in names.items()])
        for value, names in found.items()
    ]


_MEANINGS = (
    (
        "owned",
        "owned",
        "The model carries the mark of this key. It gave the key’s bits back with so few errors that a model made "
        "without this mark would do so no more often than the stated false-positive rate.",
    ),
    (
        "not-owned",
        "not owned",
        "The mark was not found. The model was made without it, or the mark was removed; the check cannot tell which.",
    ),
    (
        "inconclusive",
        "could not decide",
        "The check could not reach the stated rate: too few bits can be read from the model, or keys that nobody "
        "embedded are found in it too. This is neither for nor against the owner.",
    ),
)
