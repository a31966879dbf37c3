"""The command line ``deepseal``: parse, one library call, write the record, render.

Result on stdout, progress and remarks on stderr. Exit codes are in ``deepseal.apps.cli.exits``.
"""

from __future__ import annotations

import os
import signal
import sys

import typer

from deepseal.apps.cli import attack, dashboard, defense, model, private, report, top, watermark
from deepseal.apps.cli.exits import Exit
from deepseal.errors import DeepSealError, InputError, VerificationError, one_line

app = typer.Typer(
    name="deepseal",
    help="Mark trained models, watch them, serve them privately, attack them, and prove ownership.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.add_typer(model.app, name="model")
app.add_typer(watermark.app, name="watermark")
app.add_typer(attack.app, name="attack")
app.add_typer(defense.app, name="defense")
app.add_typer(private.app, name="private")
app.add_typer(report.app, name="report")
app.command()(dashboard.dashboard)
top.register(app)


def main(words: list[str] | None = None) -> None:
    """Run the command line (``words``, else the process's own); every expected failure is one line on stderr."""
    debug = os.environ.get("DEEPSEAL_DEBUG") == "1"
    command = typer.main.get_command(app)
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        _check_text(sys.argv if words is None else words)
        result = command.main(args=words, prog_name="deepseal", standalone_mode=False)
        sys.exit(result if isinstance(result, int) else Exit.DONE)
    except KeyboardInterrupt:
        _say("interrupted")
        sys.exit(Exit.INTERRUPTED)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(Exit.DONE)
    except Exception as error:
        if debug:
            raise
        code = _code(error)
        if type(error).__name__ == "NoArgsIsHelpError" and hasattr(error, "format_message"):
            sys.stderr.write(error.format_message() + "\n")  # a group without a command: what it can do
        elif not isinstance(error, typer.Exit):
            _say(_message(error))
        sys.exit(code)


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _check_text(words: list[str]) -> None:
    for word in words:
        if any("\ud800" <= character <= "\udfff" for character in word):
            raise InputError("UTF-8 text", found=ascii(word), do="rename the file or retype the word")


def _code(error: Exception) -> int:
    if isinstance(error, VerificationError):
        return Exit.NEGATIVE
    if isinstance(error, DeepSealError | OSError | MemoryError | RuntimeError | ValueError) and not hasattr(
        error, "exit_code"
    ):
        return Exit.BAD_INPUT
    code = getattr(error, "exit_code", None)
    if not isinstance(code, int):
        return Exit.INTERNAL
    return (
        Exit.INTERRUPTED
        if type(error).__name__ == "Abort"
        else Exit.BAD_INPUT
        if hasattr(error, "format_message")
        else code
    )


def _message(error: Exception) -> str:
    if isinstance(error, DeepSealError):
        return str(error)
    if hasattr(error, "format_message"):
        context = getattr(error, "ctx", None)
        hint = f"; see {context.command_path} --help" if context else ""
        return " ".join(error.format_message().split()).rstrip(".") + hint
    if isinstance(error, OSError):
        return str(InputError("a usable file", found=str(error), do="check the name, permissions and room on the disk"))
    if isinstance(error, MemoryError):
        return str(InputError("enough memory", found="none left", do="use smaller data or a larger machine"))
    found = one_line(f"{type(error).__name__}: {error}")[:300]
    if isinstance(error, RuntimeError | ValueError):
        return str(
            InputError("a model that can run on the data", found=found, do="check --arch, --data and the weights")
        )
    return f"internal error, please report it: {found}; DEEPSEAL_DEBUG=1 shows the traceback"


def _say(text: str) -> None:
    sys.stderr.write(f"deepseal: {text}\n")
