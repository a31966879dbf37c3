"""``deepseal report show | html``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepseal.apps.cli.common import Force, Json, Out, running, show

app = typer.Typer(help="Turn records into text and pages.", no_args_is_help=True)

Records = Annotated[list[Path], typer.Argument(help="Record files, as --record wrote them.", show_default=False)]


@app.command("show")
def show_(records: Records, json: Json = False) -> None:
    """Print records for people."""
    from deepseal.record import read_record

    for record in [read_record(path) for path in records]:
        show(record, json=json)


@app.command()
def html(
    records: Records,
    out: Out,
    title: Annotated[str | None, typer.Option("--title", help="Title of the page.")] = None,
    force: Force = False,
    json: Json = False,
) -> None:
    """One self-contained page from records."""
    with running("report.html", json=json, record=None) as (run, _):
        from deepseal.apps.report.html import render
        from deepseal.files import check_writable, write_atomically
        from deepseal.record import read_record

        check_writable(out, force=force)
        page = render([read_record(path) for path in records], title=title)
        write_atomically(out, page.encode(), force=force)
        run.params.update(records=[str(path) for path in records])
        run.results.update(file=str(out), records=len(records), bytes=len(page.encode()))
