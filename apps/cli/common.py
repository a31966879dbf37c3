"""Options and bookkeeping that all commands share."""

from __future__ import annotations

import dataclasses
import getpass
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from deepseal.apps.cli.exits import Exit
from deepseal.errors import InputError

if TYPE_CHECKING:
    from deepseal.adapter.training import Progress
    from deepseal.record import Record, Run

PASSPHRASE = "DEEPSEAL_PASSPHRASE"  # noqa: S105

ModelFile = Annotated[
    Path,
    typer.Option("--model", help="Weights file (safetensors), or the folder of a sharded one.", show_default=False),
]
Arch = Annotated[
    str | None,
    typer.Option("--arch", help="package.module:factory[?name=value] or torchvision:NAME; only if the file has none."),
]
Data = Annotated[
    str,
    typer.Option(
        "--data",
        help="digits, mnist, fashion-mnist, isolet, a .npz file, an image folder, or module:factory.",
        show_default=False,
    ),
]
Out = Annotated[Path, typer.Option("--out", help="File to write.", show_default=False)]
KeyFile = Annotated[Path, typer.Option("--key", help="The owner's key file.", show_default=False)]
Params = Annotated[list[str] | None, typer.Option("--param", "-p", help="A parameter as name=value; repeatable.")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of everything random.", min=0)]
Force = Annotated[bool, typer.Option("--force", help="Replace files that exist.")]
Json = Annotated[bool, typer.Option("--json", help="Print the record as JSON.")]
RecordFile = Annotated[Path | None, typer.Option("--record", help="Also write the record to this file.")]
Pickle = Annotated[
    bool, typer.Option("--insecure-allow-pickle", help="Read pickled checkpoints, which can run any code.")
]
PassphraseFile = Annotated[
    Path | None,
    typer.Option("--passphrase-file", help=f"File with the key's passphrase (else {PASSPHRASE}, else a prompt)."),
]
Rate = Annotated[float, typer.Option("--max-false-positive", help="Greatest false-positive rate of `owned`.")]


@dataclasses.dataclass
class Finished:
    """How a command ends, set inside ``running``."""

    code: Exit = Exit.DONE


@contextmanager
def running(
    kind: str,
    *,
    json: bool,
    record: Path | None,
    force: bool = False,
    seed: int | None = None,
    out: Path | None = None,
    inputs: tuple[Path | None, ...] = (),
) -> Iterator[tuple[Run, Finished]]:
    """A run whose record is printed (``--json``: as JSON, else as text) and written to ``--record`` in the end.

    A failed or interrupted run writes its record too, and prints nothing on stdout. Neither the record nor ``out`` may
    be one of the ``inputs``, or the other, also with ``--force``.

    Raises:
        InputError: two of the files are the same, or the record cannot be written.
    """
    from deepseal.files import check_writable
    from deepseal.record import Run

    taken = {path.resolve(): str(path) for given in inputs if given is not None for path in (given, *_parts(given))}
    for path in (out, record):
        if path is not None and path.resolve() in taken:
            raise InputError("different files", found=f"{path} twice", do="choose another name for one of them")
        if path is not None:
            taken[path.resolve()] = str(path)
    if record is not None:
        force = force or _is_failed(record)
        check_writable(record, force=force)
    run, finished = Run(kind, seed=seed), Finished()
    try:
        yield run, finished
    except (Exception, KeyboardInterrupt) as error:
        if record is not None:
            stopped = run.record(
                "interrupted" if isinstance(error, KeyboardInterrupt) else "failed",
                error=str(error) or type(error).__name__,
            )
            stopped.write(record, force=force)
        raise
    final = run.record()
    if record is not None:
        final.write(record, force=force)
    show(final, json=json)
    if finished.code:
        raise typer.Exit(finished.code)


def _parts(path: Path) -> list[Path]:
    """The files that a model in a folder, or with an index, is made of."""
    if path.is_dir():
        return list(path.glob("*.safetensors*"))
    return list(path.parent.glob("*.safetensors")) if path.name.endswith(".index.json") else []


def _is_failed(path: Path) -> bool:
    """Whether a record of a run that failed is in the way of its own repetition."""
    from deepseal.record import read_record

    try:
        return read_record(path).status != "ok"
    except InputError:
        return False


def show(record: Record, *, json: bool) -> None:
    """The record on stdout."""
    if json:
        sys.stdout.write(record.to_json() + "\n")
        return
    from rich.console import Console

    from deepseal.apps.report.text import show as rendered

    Console().print(rendered(record))


@contextmanager
def progress(title: str) -> Iterator[Progress | None]:
    """A progress bar on stderr when that is a terminal; whoever observes us is told instead."""
    from deepseal.apps.reporter import observer

    watching = observer()
    if watching is not None:
        watching.progress(title, 0, 0)
        yield lambda done, total: watching.progress(title, done, total)
        return
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bar

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Bar(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(title)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def remark(text: str) -> None:
    """A line on stderr."""
    sys.stderr.write(f"deepseal: {text}\n")


def parameters(texts: list[str] | None) -> dict[str, Any]:
    """``-p name=value`` options as a mapping."""
    from deepseal.parameters import pairs

    return dict(pairs(texts or []))


def passphrase(file: Path | None, *, new: bool = False, prompt: bool = True) -> str | None:
    """The key's passphrase from a file, the environment, or a prompt; None when there is none.

    Raises:
        InputError: an unreadable or empty file, or two different answers for a new passphrase.
    """
    if file is not None:
        from deepseal.files import read_bytes

        try:
            text = read_bytes(file, "a passphrase file", limit=2**20, pipes=True).decode()
        except UnicodeDecodeError as error:
            raise InputError("a passphrase as UTF-8 text", found="other bytes", do="write it as text") from error
        return _sound(text.partition("\n")[0].removesuffix("\r"), f"the first line of {file}")
    if PASSPHRASE in os.environ:
        return _sound(os.environ[PASSPHRASE], PASSPHRASE)
    if not prompt or not sys.stdin.isatty():
        return None
    answer = _sound(getpass.getpass("passphrase of the key: "), "the answer")
    if new and getpass.getpass("again: ") != answer:
        raise InputError("the same passphrase twice", found="two different ones", do="try again")
    return answer


def _sound(secret: str, where: str) -> str:
    if not secret or not secret.isprintable():
        found = "an empty one" if not secret else "line breaks or control characters"
        raise InputError(f"a passphrase of printable characters in {where}", found=found, do="choose another")
    return secret
