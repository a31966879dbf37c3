"""The process of a job: runs its commands one after the other and writes down how they go on."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from deepseal.apps.dashboard.background import ADDRESS, serving
from deepseal.errors import InputError

_APART = 0.2  # seconds between two notes of progress
_VERDICTS = (1, 3)


class _Notes:
    """``status.json`` and ``live.jsonl`` of a job; an observer of its commands."""

    def __init__(self, folder: Path, steps: int) -> None:
        self._folder = folder
        self.state = "running"
        self.steps: list[dict[str, Any]] = [{"state": "waiting"} for _ in range(steps)]
        self._progress: dict[str, Any] = {}
        self._written = 0.0

    def progress(self, title: str, done: int, total: int) -> None:
        self._progress = {"title": title, "done": done, "total": total}
        if time.monotonic() - self._written > _APART or done == total:
            self.write()

    def reading(self, values: Mapping[str, Any]) -> None:
        with (self._folder / "live.jsonl").open("a") as stream:
            stream.write(json.dumps(dict(values)) + "\n")

    def write(self) -> None:
        temporary = self._folder / ".status"
        temporary.write_text(json.dumps({"state": self.state, "steps": self.steps, "progress": self._progress}))
        temporary.replace(self._folder / "status.json")
        self._written = time.monotonic()


def main() -> None:
    """Run the job of the folder that is our only argument; its secret is the first line of standard input."""
    folder = Path(sys.argv[1])
    secret = json.loads(sys.stdin.buffer.readline() or b"{}").get("passphrase")
    os.environ.pop("DEEPSEAL_PASSPHRASE", None)
    if secret is not None:
        os.environ["DEEPSEAL_PASSPHRASE"] = secret
    threading.Thread(target=_end_with_server, daemon=True).start()
    plan = json.loads((folder / "job.json").read_bytes())
    notes = _Notes(folder, len(plan["steps"]))
    with contextlib.suppress(KeyboardInterrupt):
        _run(plan, notes, folder)
    if notes.state == "running":
        notes.state = "cancelled"
        for step in notes.steps:
            if step["state"] == "running":
                step["state"] = "cancelled"
    notes.write()


def _run(plan: Mapping[str, Any], notes: _Notes, folder: Path) -> None:
    signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.ExitStack() as servers:
        if not _steps(plan, notes, folder, servers):
            return
    failed = sum(note["state"] == "failed" for note in notes.steps)
    notes.state = "failed" if failed == len(notes.steps) else "done"


def _steps(plan: Mapping[str, Any], notes: _Notes, folder: Path, servers: contextlib.ExitStack) -> bool:
    """Whether all were run that were to be."""
    address = ""
    before: dict[str, Any] | None = None
    for step, note in zip(plan["steps"], notes.steps, strict=True):
        if (folder / "cancel").exists():
            return False
        if step.get("after") and before is not None and before["state"] == "failed":
            note["state"] = "failed"
            continue
        before = note
        note["state"] = "running"
        notes.progress(step["title"], 0, 0)
        notes.write()
        if step.get("serves"):
            address = _serve(step, note, notes, servers)
            if not address:
                notes.state = "failed"
                return False
            continue
        clock = time.perf_counter()
        words = [address if word == ADDRESS else word for word in step["words"]]
        code, said = _command({**step, "words": words}, notes)
        note["seconds"] = round(time.perf_counter() - clock, 3)
        note["code"] = code
        if code == 130 or (folder / "cancel").exists():
            note["state"] = "cancelled"
            return False
        if code and not (step["verdict"] and code in _VERDICTS):
            note.update(state="failed", error=said or f"the command ended with code {code} and said nothing")
            if not plan["go_on"]:
                notes.state = "failed"
                return False
        else:
            note["state"] = "done"
    return True


def _serve(step: Mapping[str, Any], note: dict[str, Any], notes: _Notes, servers: contextlib.ExitStack) -> str:
    """Where a step serves from now on; "" where it does not."""
    with contextlib.suppress(InputError):
        words = [*step["words"], *(["--record", step["record"]] if step["record"] else [])]
        address = servers.enter_context(serving(words, note, lambda line: notes.reading({"remark": line})))
        notes.write()
        return address
    return ""


def _command(step: Mapping[str, Any], notes: _Notes) -> tuple[int, str]:
    """Exit code and the last line on standard error."""
    from deepseal.apps.cli import main as deepseal
    from deepseal.apps.reporter import observed_by

    words = [*step["words"], "--json", *(["--record", step["record"], "--force"] if step["record"] else [])]
    output, errors = io.StringIO(), _Tee(notes)
    code = 0
    with observed_by(notes), contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        try:
            deepseal(words)
        except SystemExit as ended:
            code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    return code, errors.last()


class _Tee(io.TextIOBase):
    """Standard error of a command: what it remarks is shown while it runs."""

    def __init__(self, notes: _Notes) -> None:
        self._notes = notes
        self._text = ""

    def write(self, text: str) -> int:
        self._text = (self._text + text)[-20_000:]
        sys.__stderr__.write(text)  # type: ignore[union-attr]
        for line in text.splitlines():
            if line.startswith("deepseal: "):
                self._notes.reading({"remark": line.removeprefix("deepseal: ")})
        return len(text)

    def isatty(self) -> bool:
        return False

    def last(self) -> str:
        lines = [line for line in self._text.splitlines() if line.startswith("deepseal: ")]
        return lines[-1].removeprefix("deepseal: ") if lines else ""


def _interrupt(_number: int, _frame: object) -> None:
    raise KeyboardInterrupt


def _end_with_server() -> None:
    while os.read(0, 4096):  # not through sys.stdin, whose lock would be held when the process ends
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(8.0)
    os.killpg(os.getpid(), signal.SIGKILL)
