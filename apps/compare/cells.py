"""Cells of a comparison: one small record each, in a folder, found again by what they were made with."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from deepseal.adapter import Classifier, checkpoint
from deepseal.errors import InputError
from deepseal.record import Record, Run, plain, read_record
from deepseal.watermark import Key, load_key, save_key

Identity = Mapping[str, Any]


class Cells:
    """A folder with ``cells``, ``models`` and ``keys``. What is there, made the same way, is not made again.

    Nothing is written before ``open``.

    Raises:
        InputError: a folder that holds other things.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        if folder.exists() and not folder.is_dir():
            raise InputError("a folder", found=f"a file at {folder}", do="choose another --out")
        if folder.is_dir() and any(folder.iterdir()) and not (folder / "cells").is_dir():
            do = "choose another --out"
            raise InputError(f"an empty folder {folder}, or one of a comparison", found="other files in it", do=do)

    def open(self) -> None:
        """Make the folders, where they are not there yet.

        Raises:
            InputError: a folder that cannot be written.
        """
        try:
            for name in ("cells", "models", "keys"):
                (self.folder / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            found = error.strerror or str(error)
            raise InputError(f"{self.folder} to be writable", found=found, do="choose another --out") from error

    def get(self, kind: str, identity: Identity) -> Record | None:
        """The cell made with exactly this, or None; what cannot be read or did not finish counts as absent."""
        try:
            record = read_record(self._path("cells", kind, identity, ".json"))
        except InputError:
            return None
        return record if record.status == "ok" and record.params == plain(identity, "", []) else None

    def put(self, kind: str, identity: Identity, seed: int, fill: Callable[[Run], None]) -> Record:
        """Measure a cell and keep it."""
        run = Run(f"watermark.compare.{kind}", seed=seed, params=identity)
        fill(run)
        record = run.record()
        record.write(self._path("cells", kind, identity, ".json"), force=True)
        return record

    def model(self, kind: str, identity: Identity, make: Callable[[], Classifier]) -> Classifier:
        """A model from its file; made and saved first where there is none. Always what the file says."""
        path = self._path("models", kind, identity, ".safetensors")
        if not path.exists():
            checkpoint.save(make(), path, force=True)
        return checkpoint.load(path, architecture=identity["arch"])

    def save(self, kind: str, identity: Identity, model: Classifier) -> None:
        """Keep a model."""
        checkpoint.save(model, self._path("models", kind, identity, ".safetensors"), force=True)

    def save_key(self, identity: Identity, key: Key) -> None:
        """Keep a key; it is of an experiment, so it is not encrypted."""
        save_key(key, self._path("keys", "key", identity, ".key"), force=True)

    def key(self, identity: Identity) -> Key:
        """A key that was kept.

        Raises:
            InputError: no such file.
        """
        return load_key(self._path("keys", "key", identity, ".key"))

    def holds(self, identity: Identity) -> bool:
        """Whether both files of a marked model are there."""
        files = (self._path("models", "marked", identity, ".safetensors"), self._path("keys", "key", identity, ".key"))
        return all(path.exists() for path in files)

    def _path(self, folder: str, kind: str, identity: Identity, suffix: str) -> Path:
        text = json.dumps(plain(identity, "", []), sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        digest = hashlib.sha256(f"{kind}\x1f{text}".encode()).hexdigest()[:16]
        parts = [identity.get(name) for name in ("data", "arch", "net", "scheme", "payload", "attack")]
        words = [re.sub(r"[^\w-]+", "-", str(part).rpartition(":")[2])[:24] for part in parts if part is not None]
        return self.folder / folder / f"{'_'.join([kind, *words])}_{digest}{suffix}"
