"""A browser's own folder on the server: what it uploaded and made. Names are shown, paths never."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import re
import secrets
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import streamlit as st

from deepseal.apps.dashboard.settings import COOKIE, KEPT_SECONDS
from deepseal.errors import InputError
from deepseal.files import write_atomically

Kind = Literal["models", "keys", "data", "monitors", "programs", "inputs"]
KINDS: tuple[Kind, ...] = ("models", "keys", "data", "monitors", "programs", "inputs")
_ENDINGS: Mapping[str, str] = {"models": ".safetensors", "keys": ".key", "data": ".npz", "inputs": ".npy"}
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 _-]{0,59}")
MOST_BYTES = 8 * 2**30  # of a browser


@dataclasses.dataclass(frozen=True)
class Thing:
    """Something on a browser's shelf, such as a model.

    Attributes:
        kind: ``models``, ``keys``, ``data``, ``monitors``, ``programs`` or ``inputs``.
        name: what its owner calls it.
        path: where it lies; for commands, not for people.
        about: what is known of it, such as its architecture and the data that it was made with.
    """

    kind: Kind
    name: str
    path: Path
    about: Mapping[str, Any]

    def said(self, name: str, otherwise: str = "") -> str:
        """A text of ``about``."""
        value = self.about.get(name)
        return value if isinstance(value, str) else otherwise


class Workspace:
    """The folder of one browser."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._make_folders()

    def _make_folders(self) -> None:
        for name in (*KINDS, "records", "jobs"):
            (self.root / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        self.root.chmod(0o700)

    @property
    def records(self) -> Path:
        """Folder of the records of everything that was done here."""
        return self.root / "records"

    @property
    def jobs(self) -> Path:
        """Folder of the work that was started, a folder each."""
        return self.root / "jobs"

    def things(self, kind: Kind) -> list[Thing]:
        """The shelf, newest first."""
        found = []
        for path in (self.root / kind).iterdir():
            if path.name.startswith(".") or path.suffix == ".json" or not _whole(path):
                continue
            name = path.name.removesuffix(_ENDINGS.get(kind, ""))
            with contextlib.suppress(OSError):
                found.append((path.stat().st_mtime, Thing(kind, name, path, read_object(self._about(kind, name)))))
        return [thing for _, thing in sorted(found, key=lambda pair: (-pair[0], pair[1].name))]

    def thing(self, kind: Kind, name: str | None) -> Thing | None:
        """One thing by name."""
        return next((thing for thing in self.things(kind) if thing.name == name), None)

    def place(self, kind: Kind, name: str, about: Mapping[str, Any] | None = None) -> Thing:
        """Where a new thing is to be written; what is known of it is written down at once.

        Raises:
            InputError: a name that is taken, or that no file can have.
        """
        wanted = name.strip()
        if not _NAME.fullmatch(wanted):
            expected = "a name of letters, digits, spaces, dashes and underscores, up to 60"
            raise InputError(expected, found=repr(wanted[:80]), do="choose another name")
        path = self.root / kind / f"{wanted}{_ENDINGS.get(kind, '')}"
        if path.exists():
            raise InputError(f"a new name among your {kind}", found=f"{wanted!r}, which is taken", do="choose another")
        write_atomically(self._about(kind, wanted), json.dumps(dict(about or {})).encode(), force=True, mode=0o600)
        return Thing(kind, wanted, path, about or {})

    def free(self, kind: Kind, name: str) -> str:
        """A name that is not taken: this one, or with a number behind it."""
        base = re.sub(r"[^A-Za-z0-9_ -]+", "-", name).strip(" -_")[:48] or kind[:-1]
        taken = {thing.name for thing in self.things(kind)} | {p.stem for p in (self.root / kind).glob("*.json")}
        return next(c for c in [base, *(f"{base} {n}" for n in range(2, 10_000))] if c not in taken)

    def check_room(self, more: int = 0) -> None:
        """Refuse what would take more than a browser's share of the disk.

        Raises:
            InputError: there is no room for ``more`` bytes.
        """
        used = sum(path.stat().st_size for path in self.root.rglob("*") if path.is_file())
        if used + more > MOST_BYTES:
            found, do = f"{(used + more) / 2**30:.1f} GiB", "forget what you do not need (overview, at the end)"
            raise InputError(f"at most {MOST_BYTES // 2**30} GiB of your things here", found=found, do=do)

    def keep(self, kind: Kind, name: str, data: bytes, about: Mapping[str, Any] | None = None) -> Thing:
        """Put an upload on the shelf, under a name that is free.

        Raises:
            InputError: there is no room for it.
        """
        self.check_room(len(data))
        thing = self.place(kind, self.free(kind, name), about)
        write_atomically(thing.path, data, mode=0o600)
        return thing

    def remove(self, thing: Thing) -> None:
        """Take a thing off the shelf."""
        if thing.path.is_dir():
            shutil.rmtree(thing.path, ignore_errors=True)
        for path in (thing.path, self._about(thing.kind, thing.name)):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)

    def record_word(self, name: str) -> str:
        """Where the next record is to be written, as commands name it; records are in the order of their numbers."""
        with contextlib.suppress(FileExistsError):
            self.records.mkdir(mode=0o700)
        taken = [int(p.name[:4]) for p in self.records.glob("[0-9][0-9][0-9][0-9]-*") if p.name[:4].isdigit()]
        for number in range(max(taken, default=0) + 1, 10_000):
            path = self.records / f"{number:04d}-{re.sub(r'[^a-z0-9.-]+', '-', name.lower())[:60]}.json"
            with contextlib.suppress(FileExistsError):
                (self.records / f"{number:04d}-reserved").touch(exist_ok=False)
                return f"records/{path.name}"
        raise InputError("fewer than 10,000 records", found="no number left", do="forget what is here")

    def forget(self) -> None:
        """Delete everything."""
        shutil.rmtree(self.root, ignore_errors=True)
        self._make_folders()

    def _about(self, kind: Kind, name: str) -> Path:
        return self.root / kind / f"{name}.json"


def workspace() -> Workspace:
    """The folder of the browser that asks; of a page without a browser's cookie, one that ends with the page."""
    given = st.context.cookies.get(COOKIE)
    if not given:
        given = st.session_state.setdefault("_browser", secrets.token_urlsafe(32))
    digest = hashlib.sha256(f"deepseal dashboard {given}".encode()).hexdigest()[:32]
    own = Workspace(_root() / digest)
    (own.root / ".used").touch()
    return own


def sweep() -> None:
    """Delete the folders of browsers that were not here for a week."""
    with contextlib.suppress(OSError):
        for folder in list(_root().iterdir()):
            used = folder / ".used"
            if (used if used.exists() else folder).stat().st_mtime < time.time() - KEPT_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _root() -> Path:
    from deepseal.apps.cache import cache_folder

    root = cache_folder() / "dashboard"
    root.mkdir(parents=True, exist_ok=True, mode=0o700)
    return root


def _whole(path: Path) -> bool:
    """Not a folder that a command is still writing to."""
    return not path.is_dir() or any(not child.name.startswith(".") for child in path.iterdir())


def read_object(path: Path) -> dict[str, Any]:
    """A file of one JSON object; an empty one of anything else."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}
