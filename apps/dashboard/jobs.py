"""Commands in the background: each job is a process of its own, and its folder is all that pages know of it.

A job outlives a reload of the page and ends with the server. A passphrase goes to it through a pipe, and nowhere else.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Literal

from deepseal.apps.dashboard.workspace import Workspace, read_object
from deepseal.errors import InputError
from deepseal.files import write_atomically

State = Literal["running", "done", "failed", "cancelled"]
MOST_OF_A_BROWSER, MOST_AT_ALL = 3, 6
_GRACE = 8.0  # seconds between asking a job to end and ending it
# Without the working folder on the path, where a file named like one of our imports would be run.
_CHILD = "import sys; sys.path = [p for p in sys.path if p]; from deepseal.apps.dashboard.worker import main; main()"


@dataclasses.dataclass(frozen=True)
class Step:
    """One command of a job.

    Attributes:
        title: what it does, for people.
        words: the words behind ``deepseal``.
        record: where its record is to be written; None for none.
        verdict: its exit codes 1 and 3 are verdicts and not failures.
        tag: whatever the page that made it wants to find it by.
        after: it is left out where the step before it failed.
        serves: it serves while the later steps run, which write ``background.ADDRESS`` for where.
    """

    title: str
    words: tuple[str, ...]
    record: str | None = None
    verdict: bool = False
    tag: str = ""
    after: bool = False
    serves: bool = False


@dataclasses.dataclass(frozen=True)
class Job:
    """What is known of a job.

    Attributes:
        id: name of its folder.
        kind: which page's it is.
        title: what it does, for people.
        steps: its commands, each with ``state`` (waiting, running, done, failed), ``error`` and ``seconds``.
        state: of the whole.
        progress: what the running step says of itself (title, done, total).
        started: seconds since 1970.
        about: what the page that started it wrote down.
    """

    id: str
    kind: str
    title: str
    steps: tuple[Mapping[str, Any], ...]
    state: State
    progress: Mapping[str, Any]
    started: float
    about: Mapping[str, Any]
    folder: Path

    @property
    def error(self) -> str:
        """What went wrong, in one line; empty if nothing did."""
        return next((str(step["error"]) for step in reversed(self.steps) if step.get("error")), "")

    @property
    def first_error(self) -> str:
        """What went wrong first, in one line; empty if nothing did."""
        return next((str(step["error"]) for step in self.steps if step.get("error")), "")

    @property
    def running(self) -> bool:
        """Whether it goes on."""
        return self.state == "running"

    def readings(self) -> list[dict[str, Any]]:
        """What the commands showed of unfinished results, in order."""
        return _lines(self.folder / "live.jsonl")


_children: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
_lock = threading.Lock()


def start(
    own: Workspace,
    kind: str,
    title: str,
    steps: Sequence[Step],
    *,
    passphrase: str | None = None,
    about: Mapping[str, Any] | None = None,
    go_on: bool = False,
) -> Job:
    """Start a job.

    Args:
        own: whose it is.
        kind: which page's it is.
        title: what it does, for people.
        steps: commands, one after the other.
        passphrase: of the key that the commands read or write.
        about: plain values to remember.
        go_on: do the other steps also after one has failed.

    Raises:
        InputError: too many are running, or too much is kept.
    """
    own.check_room()
    with _lock:
        _check_room(own, kind)
        name = f"{int(time.time() * 1000):013d}-{secrets.token_hex(4)}"
        folder = own.jobs / name
        folder.mkdir(mode=0o700)
        plan = {
            "kind": kind,
            "title": title,
            "steps": [dataclasses.asdict(step) for step in steps],
            "about": dict(about or {}),
            "started": time.time(),
            "go_on": go_on,
        }
        write_atomically(folder / "job.json", json.dumps(plan).encode(), mode=0o600)
        with (folder / "log").open("wb") as log:
            child = subprocess.Popen(
                [sys.executable, "-c", _CHILD, str(folder)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                cwd=own.root,
                start_new_session=True,
                env={**os.environ, "DEEPSEAL_PASSPHRASE": ""} if passphrase is None else dict(os.environ),
            )
        pipe = child.stdin
        assert pipe is not None  # noqa: S101
        _children[name] = child, pipe
    with contextlib.suppress(OSError):
        pipe.write(json.dumps({"passphrase": passphrase}).encode() + b"\n")
        pipe.flush()  # it stays open: when we end, the job reads the end of it and ends too
    found = job(own, name)
    assert found is not None  # noqa: S101
    return found


def jobs(own: Workspace, kind: str | None = None) -> list[Job]:
    """A browser's jobs, the newest first."""
    with contextlib.suppress(OSError):
        names = sorted((path.name for path in own.jobs.iterdir() if path.is_dir()), reverse=True)
        found = [job(own, name) for name in names]
        return [one for one in found if one is not None and kind in (None, one.kind)]
    return []


def busy(own: Workspace, kind: str) -> bool:
    """Whether work of a page goes on: there is one piece of it at a time."""
    return any(one.running for one in jobs(own, kind))


def job(own: Workspace, name: str) -> Job | None:
    """One job of a browser."""
    folder = own.jobs / name
    plan = read_object(folder / "job.json")
    if not plan:
        return None
    child = _children.get(name)
    gone = child is None or child[0].poll() is not None  # asked first: what it wrote before its end is then complete
    status = read_object(folder / "status.json")
    state: State = status.get("state", "running")
    told = status.get("steps", [])
    steps = [{"state": "waiting", **step, **(told[i] if i < len(told) else {})} for i, step in enumerate(plan["steps"])]
    if state == "running" and gone:
        state = "cancelled" if (folder / "cancel").exists() else "failed"
        for step in steps:
            if step["state"] == "running" or (step is steps[0] and step["state"] == "waiting"):
                step["state"] = state
                step["error"] = "" if state == "cancelled" else "the work ended without a word: was it killed?"
    return Job(
        name, plan["kind"], plan["title"], tuple(steps), state, status.get("progress", {}), plan["started"],
        plan["about"], folder,
    )  # fmt: skip


def cancel(own: Workspace, name: str) -> None:
    """Ask a job to end, and end it if it does not."""
    if (own.jobs / name).is_dir():
        (own.jobs / name / "cancel").touch()
    child = _children.get(name)
    if child is None or child[0].poll() is not None or not (own.jobs / name).is_dir():
        return
    process = child[0]
    _signal(process, signal.SIGTERM)
    timer = threading.Timer(_GRACE, _signal, (process, signal.SIGKILL))
    timer.daemon = True
    timer.start()


def cancel_all(own: Workspace) -> None:
    """End everything that a browser has started, and wait for that."""
    running = [one.id for one in jobs(own) if one.running]
    for name in running:
        cancel(own, name)
    for name in running:
        child = _children.get(name)
        if child is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child[0].wait(_GRACE + 2.0)


def _check_room(own: Workspace, kind: str) -> None:
    for name in [name for name, (child, _) in _children.items() if child.poll() is not None]:
        _children.pop(name)[1].close()
    mine = sum((own.jobs / name).is_dir() for name in _children)
    if mine >= MOST_OF_A_BROWSER or len(_children) >= MOST_AT_ALL:
        found = f"{mine} of yours" if mine >= MOST_OF_A_BROWSER else f"{len(_children)} on this server"
        do = "wait for one to end, or cancel one"
        raise InputError("fewer pieces of work at a time", found=f"{found} running", do=do)
    if busy(own, kind):
        raise InputError("one such work at a time", found="one running", do="wait for its end, or cancel it")


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, number)


def _lines(path: Path) -> list[dict[str, Any]]:
    found = []
    with contextlib.suppress(OSError):
        for line in path.read_bytes().splitlines():
            with contextlib.suppress(ValueError):  # the last line may be half written
                found.append(json.loads(line))
    return found
