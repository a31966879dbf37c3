"""The records there are to look at: those of the folder that the server was started with, and the browser's own."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import streamlit as st

from deepseal.apps.dashboard import settings
from deepseal.apps.dashboard.workspace import Workspace
from deepseal.apps.report import words
from deepseal.apps.report.headline import sentence
from deepseal.errors import InputError
from deepseal.record import Record, read_record

_MOST_FILES = 5_000
_DEEPEST = 6
_LARGEST = 64 * 2**20
Source = Literal["folder", "yours"]


@dataclasses.dataclass(frozen=True)
class Entry:
    """A record that can be opened.

    Attributes:
        name: its file below the folder, as shown.
        source: whose folder it lies in.
        record: what it says.
    """

    name: str
    source: Source
    record: Record

    @property
    def verdict(self) -> str:
        """The verdict or, where there is none, how the run ended."""
        found = self.record.results.get("verdict")
        if self.record.status != "ok":
            return self.record.status
        return words.verdict(found) if isinstance(found, str) else "done"

    @property
    def model(self) -> str:
        """The file of the model that it is about, or that it made."""
        given = self.record.params.get("model", self.record.results.get("file"))
        return words.file_name(given) or ""

    @property
    def sentence(self) -> str:
        """What it says in one line."""
        return sentence(self.record)

    @property
    def label(self) -> str:
        """How it is called in lists."""
        return f"{self.name} · {self.record.kind}, {self.verdict} · {words.moment(self.record.started)}"


def entries(own: Workspace) -> tuple[list[Entry], bool]:
    """All records, the newest first, and whether there were more than are read."""
    found: list[Entry] = []
    stated = settings.current().folder
    roots: list[tuple[Source, Path]] = [("yours", own.records)]
    if stated is not None:
        roots.append(("folder", Path(stated)))
    files = [(source, root, path) for source, root in roots for path in _files(root, _DEEPEST)]
    for source, root, path in files[:_MOST_FILES]:
        with contextlib.suppress(OSError):
            about = path.stat()
            record = _record(str(path), about.st_mtime_ns, about.st_size)
            if record is not None:
                found.append(Entry(str(path.relative_to(root)), source, record))
    return sorted(found, key=lambda entry: entry.record.started, reverse=True), len(files) > _MOST_FILES


def filtered(found: Iterable[Entry], text: str, kinds: Iterable[str], ended: Iterable[str]) -> list[Entry]:
    """Those that hold every word of ``text``, of one of the kinds, with one of the ends; empty means any."""
    wanted, kinds, ended = text.lower().split(), set(kinds), set(ended)
    return [
        entry
        for entry in found
        if (not kinds or entry.record.kind in kinds)
        and (not ended or entry.verdict in ended)
        and all(word in f"{entry.name} {entry.record.kind} {entry.sentence}".lower() for word in wanted)
    ]


def _files(root: Path, deep: int) -> Iterator[Path]:
    """JSON files, without following links out of the folder."""
    with contextlib.suppress(OSError):
        for path in sorted(root.iterdir()):
            if path.name.startswith(".") or path.is_symlink():
                continue
            if path.is_dir() and deep:
                yield from _files(path, deep - 1)
            elif path.suffix == ".json" and path.stat().st_size <= _LARGEST:
                yield path


@st.cache_resource(max_entries=10_000, show_spinner=False)  # shared, not copied: records are frozen
def _record(path: str, modified: int, size: int) -> Record | None:
    """The record of a file, if it is one; read again when the file changes."""
    with contextlib.suppress(InputError):
        return read_record(Path(path))
    return None
