"""Records as text for a terminal. Everything is built from plain ``Text``, so that a record cannot carry markup."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deepseal.apps.report import comparison, detection, story, words
from deepseal.apps.report.headline import sentence
from deepseal.record import Record

_STYLES = {
    "owned": "bold green",
    "not-owned": "bold",
    "inconclusive": "bold yellow",
    "failed": "bold red",
    "interrupted": "bold red",
}


def show(record: Record) -> RenderableType:
    """One record: what it says in a sentence, the details, warnings and notes, and what it came from."""
    parts: list[RenderableType] = [Text(sentence(record), style=_style(record))]
    if comparison.is_comparison(record):
        record = record.model_copy(update={"results": comparison.brief(record.results)})
    if detection.is_evaluation(record):
        record = record.model_copy(update={"results": detection.brief(record.results)})
    if asked := words.requests(record.results.get("query_log")):
        record = record.model_copy(update={"results": {**record.results, "query_log": asked}})
    tables = {name: grid for name, value in record.results.items() if (grid := words.grid(value)) is not None}
    if record.kind == "watermark.verify" and record.status == "ok":
        parts += [Text(), _pairs("read from the model", _details(record))]
    else:
        rest = {name: value for name, value in record.results.items() if name not in tables and name != "warnings"}
        parts += _section("results", rest)
    for name, (columns, rows) in tables.items():
        parts += [Text(), _grid(words.clean(name, 60), columns, rows)]
    warnings = record.results.get("warnings")
    remarks = [("warning", text) for text in (warnings if isinstance(warnings, list) else [])]
    remarks += [("note", text) for text in record.notes]
    parts += [Text()] * bool(remarks) + [Text(f"{kind}: {words.clean(text)}", style="yellow") for kind, text in remarks]
    if record.kind == "demo" and record.status == "ok":
        return Group(*parts, Text(f"\nOpen {words.text(record.results.get('report'))} in a browser.", style="bold"))
    prints = {name.removeprefix("data."): value for name, value in record.fingerprints.items()}
    parts += _section("parameters", record.params) + _section("fingerprints", prints, 64)
    return Group(*parts, Text(), Text(_provenance(record), style="dim"))


def table(records: Sequence[Record]) -> Table:
    """One row a model: accuracy, wrong bits, probability without the mark, verdict."""
    grid = Table(box=None, pad_edge=False, header_style="bold")
    grid.add_column("model", min_width=13, overflow="fold")
    grid.add_column("made by", min_width=18, overflow="fold")
    for name in ("accuracy", "wrong bits", "p-value"):
        grid.add_column(name, justify="right", overflow="fold")
    grid.add_column("verdict", min_width=9, overflow="fold")
    for row in story.rows(records):
        name = f"{row.name} ({row.file})" if row.role == "other" and row.file else row.name
        says = Text(row.verdict_in_words, style=_STYLES.get(row.verdict, ""))
        if row.failure is not None:
            says.append(f": {words.text(row.failure.error)}", style="not bold")
        wrong = p_value = "–"
        if row.reading is not None:
            wrong = words.wrong_bits(row.reading.results)
            p_value = words.probability(row.reading.results.get("p_value"), words.limit(row.reading))
        accuracy = "–" if row.failure is not None else words.percent(row.accuracy)
        grid.add_row(Text(name), Text(row.how or "–"), Text(accuracy), Text(wrong), Text(p_value), says)
    return grid


def _style(record: Record) -> str:
    verdict = record.results.get("verdict")
    code = record.status if record.status != "ok" else verdict if isinstance(verdict, str) else ""
    return _STYLES.get(code, "bold")


def _details(record: Record) -> list[tuple[str, str]]:
    """A verification in words, with the empirical null."""
    results = record.results
    shown = (("on average", "mean"), ("median", "median"), ("at 5 %", "5_percent"), ("lowest", "lowest"))
    margins = ", ".join(
        f"{words.general(results[f'margin_{name}'])} {title}" for title, name in shown if f"margin_{name}" in results
    )
    aligned = [("aligned to", words.alignment(record))] if results.get("alignment") else []
    return [
        ("model", words.text(record.params.get("model", words.suspect(record.params)))),
        ("key", words.text(record.params.get("key"))),
        *aligned,
        *([("queries", words.clean(results["query_log"]))] if "query_log" in results else []),
        ("readable bits", f"{words.count(results.get('bits'))}, unreadable {words.count(results.get('erasures'))}"),
        ("wrong bits", f"{words.count(results.get('bit_errors'))} ({words.percent(results.get('bit_error_rate'))})"),
        ("allowed wrong bits", words.allowed(results)),
        ("p-value", words.general(results.get("p_value"))),
        (
            "false-positive rate",
            f"{words.probability(words.rate(record))}, for {words.count(results.get('tried'))} tried",
        ),
        ("margin", f"{margins} (in standard deviations of strangers' keys)"),
        ("message", words.clean(results.get("message"))),
        ("random keys", words.null(results.get("null"))),
        ("independent models", words.null(results.get("null_models"))),
        ("the paper's own rule", words.published(results.get("published"))),
    ]


def _section(title: str, values: Mapping[str, Any], width: int | None = None) -> list[RenderableType]:
    return [Text(), _pairs(title, words.flat(values), width)] if values else []


def _pairs(title: str, rows: Sequence[tuple[str, str]], width: int | None = None) -> Table:
    """Names and values; a value of ``width`` characters is not broken where the terminal has 80."""
    grid = Table.grid(padding=(0, 2 if width is None else 1))
    grid.add_column(style="dim", overflow="fold", max_width=34 if width is None else 15)
    grid.add_column(overflow="fold", min_width=width)
    grid.add_row(Text(title, style="bold"), Text())
    for name, shown in rows:
        grid.add_row(Text(name), Text(shown))
    return grid


def _grid(title: str, columns: list[str], rows: list[list[Any]]) -> Table:
    grid = Table(title=Text(title, style="bold"), title_justify="left", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        grid.add_column(Text(words.clean(column, 40)), overflow="fold")
    for row in rows:
        grid.add_row(*(Text(words.cell(column, value)) for column, value in zip(columns, row, strict=True)))
    return grid


def _provenance(record: Record) -> str:
    version, python = words.text(record.environment.get("deepseal")), words.text(record.environment.get("python"))
    seed = "no seed" if record.seed is None else f"seed {words.clean(record.seed)}"
    when = f"{words.moment(record.started)}, {words.seconds(record.seconds)}"
    return f"{words.clean(record.kind, 60)}, {when}; {seed}; deepseal {version}, Python {python}"
