"""``deepseal report show | html | pdf``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepseal.apps.cli.common import Force, Json, Out, running, show

if TYPE_CHECKING:
    from deepseal.record import Record, Run

app = typer.Typer(help="Turn records into text, pages and PDF files.", no_args_is_help=True)

Title = Annotated[str | None, typer.Option("--title", help="Title of the report.")]
Records = Annotated[list[Path], typer.Argument(help="Record files, as --record wrote them.", show_default=False)]


@app.command("show")
def show_(records: Records, json: Json = False) -> None:
    """Print records for people."""
    from deepseal.record import read_record

    for record in [read_record(path) for path in records]:
        show(record, json=json)


@app.command()
def html(records: Records, out: Out, title: Title = None, force: Force = False, json: Json = False) -> None:
    """One self-contained page from records."""
    with running("report.html", json=json, record=None, out=out, inputs=tuple(records)) as (run, _):
        from deepseal.apps.report.html import render

        _write(run, records, out, lambda given: render(given, title=title).encode(), force=force)


@app.command()
def pdf(records: Records, out: Out, title: Title = None, force: Force = False, json: Json = False) -> None:
    """The same as a PDF file with numbered pages."""
    with running("report.pdf", json=json, record=None, out=out, inputs=tuple(records)) as (run, _):
        from deepseal.apps.report.pdf import render

        _write(run, records, out, lambda given: render(given, title=title), force=force)


def _write(run: Run, paths: list[Path], out: Path, render: Callable[[Sequence[Record]], bytes], *, force: bool) -> None:
    from deepseal.files import check_writable, write_atomically
    from deepseal.record import read_record

    check_writable(out, force=force)
    data = render([read_record(path) for path in paths])
    write_atomically(out, data, force=force)
    run.params.update(records=[str(path) for path in paths])
    run.results.update(file=str(out), records=len(paths), bytes=len(data))
