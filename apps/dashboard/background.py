"""A command that serves while the other commands of its job run, as a process of its own that ends with the job."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from typing import IO, Any

from deepseal.errors import InputError

ADDRESS = "{address}"  # what later commands write for where it serves
_READY_SECONDS = 60.0
_GRACE = 4.0  # seconds between asking it to end and ending it
_SERVING = "deepseal: serving on "
# Without the working folder on the path, where a file named like one of our imports would be run.
_CHILD = (
    "import sys; sys.path = [p for p in sys.path if p]; from deepseal.apps.dashboard.background import main; main()"
)


@contextlib.contextmanager
def serving(words: Sequence[str], note: MutableMapping[str, Any], remark: Callable[[str], None]) -> Iterator[str]:
    """The address of a server that runs meanwhile; what became of it is noted afterwards.

    Args:
        words: the words behind ``deepseal``.
        note: gets ``pid`` at once, and in the end ``state`` and, where it ended before it was asked to, ``error``.
        remark: called with each line that it says.

    Raises:
        InputError: it did not start; the line says why.
    """
    with subprocess.Popen(
        [sys.executable, "-c", _CHILD, *words],
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    ) as child:  # fmt: skip
        assert child.stdin is not None and child.stderr is not None  # noqa: S101
        note["pid"] = child.pid
        heard = _Listener(child.stderr, remark)
        try:
            yield heard.address(child)
        except InputError as error:
            note.update(state="failed", error=str(error))
            raise
        except KeyboardInterrupt:
            note["state"] = "cancelled"
            raise
        finally:
            ended = child.poll()
            with contextlib.suppress(OSError):
                child.stdin.close()  # it reads the end of it and ends too
            try:
                child.wait(_GRACE)
            except subprocess.TimeoutExpired:
                child.kill()
            heard.thread.join(1.0)
            if note.get("state") == "running":
                early = f"the server ended in the middle, with code {ended}"
                note.update({"state": "done"} if ended is None else {"state": "failed", "error": early})


class _Listener:
    """Reads what a server says, until its end."""

    def __init__(self, stream: IO[str], remark: Callable[[str], None]) -> None:
        self._stream, self._remark = stream, remark
        self._found = ""
        self._last = ""
        self._ready = threading.Event()
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()

    def address(self, child: subprocess.Popen[str]) -> str:
        """Where it serves.

        Raises:
            InputError: it ended, or said nothing for a minute.
        """
        if not self._ready.wait(_READY_SECONDS):
            raise InputError("a server", found=f"none after {_READY_SECONDS:g} s", do="try again")
        if not self._found:
            child.wait(_GRACE)
            raise InputError(
                "a server", found=self._last or f"one that ended with code {child.returncode}", do="try again"
            )
        return self._found

    def _listen(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in self._stream:
                sys.__stderr__.write(line)  # type: ignore[union-attr]
                if line.startswith(_SERVING) and not self._found:
                    self._found = line.removeprefix(_SERVING).partition(";")[0].strip()
                    self._ready.set()
                elif line.startswith("deepseal: "):
                    self._last = line.removeprefix("deepseal: ").strip()
                    self._remark(self._last)
        self._ready.set()


def main() -> None:
    """Run one command, until it ends or standard input does."""
    from deepseal.apps.cli import main as deepseal

    signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started us may ignore it
    threading.Thread(target=_end_with_job, daemon=True).start()
    sys.argv = ["deepseal", *sys.argv[1:]]
    deepseal(sys.argv[1:])


def _end_with_job() -> None:
    while os.read(0, 4096):  # not through sys.stdin, whose lock would be held when the process ends
        pass
    os.kill(os.getpid(), signal.SIGINT)
