"""Records: everything that a user sees is first one frozen, versioned JSON object."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

import deepseal
from deepseal.errors import InputError
from deepseal.files import read_bytes, write_atomically

SCHEMA = 1
_PACKAGES = ("torch", "torchvision", "numpy", "scipy", "scikit-learn", "safetensors", "cryptography")


class Record(BaseModel):
    """What one run did. Numbers carry their unit in their name; ``seed`` is None when nothing random was seeded.

    Fields: ``schema`` (version of this format), ``kind`` (noun.verb), ``status`` (ok, failed, interrupted),
    ``environment``, ``seed``, ``params``, ``fingerprints`` (SHA-256 of models, keys, data; never the key itself),
    ``results``, ``notes`` (remarks, such as why a number is null), ``error``, ``started`` (UTC), ``seconds``.
    """

    model_config = ConfigDict(frozen=True, extra="ignore", populate_by_name=True)

    schema_version: int = Field(default=SCHEMA, alias="schema")
    kind: str
    status: Literal["ok", "failed", "interrupted"]
    environment: dict[str, Any]
    seed: int | None = None
    params: dict[str, Any] = Field(default_factory=dict)
    fingerprints: dict[str, str] = Field(default_factory=dict)
    results: dict[str, Any] = Field(default_factory=dict)
    notes: list[str] = Field(default_factory=list)
    error: str | None = None
    started: str
    seconds: float

    def to_json(self) -> str:
        """The record as JSON text (NaN and infinity are already null, with a note)."""
        return json.dumps(self.model_dump(by_alias=True), indent=2, allow_nan=False, ensure_ascii=False)

    def write(self, path: Path, *, force: bool = False) -> None:
        """Write the record, all of it or nothing."""
        write_atomically(path, (self.to_json() + "\n").encode(), force=force)


def read_record(path: Path) -> Record:
    """A record from a file.

    Raises:
        InputError: not a record, or of another schema version.
    """
    return read_text(read_bytes(path, "a record", limit=64 * 2**20), str(path))


def read_text(data: bytes, name: str) -> Record:
    """A record from the content of a file, which errors call ``name``.

    Raises:
        InputError: not a record, or of another schema version.
    """
    try:
        content = json.loads(data)
        schema = content["schema"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(
            f"a DeepSeal record (JSON) in {name}", found="something else", do="pass a file made by --record"
        ) from error
    if schema != SCHEMA:
        raise InputError(
            f"record schema {SCHEMA} in {name}", found=f"schema {schema}", do="use the DeepSeal that wrote it"
        )
    try:
        return Record.model_validate(content)
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise InputError(
            f"a complete record in {name}", found=f"a bad field {field!r}", do="make the record again"
        ) from error


class Run:
    """A run under way: fill ``params``, ``fingerprints`` and ``results``; ``record()`` freezes it."""

    def __init__(self, kind: str, *, seed: int | None = None, params: Mapping[str, Any] | None = None) -> None:
        self.kind, self.seed = kind, seed
        self.params: dict[str, Any] = dict(params or {})
        self.fingerprints: dict[str, str] = {}
        self.results: dict[str, Any] = {}
        self.notes: list[str] = []
        self._started = datetime.datetime.now(datetime.timezone.utc)
        self._clock = time.perf_counter()

    def record(self, status: Literal["ok", "failed", "interrupted"] = "ok", error: str | None = None) -> Record:
        """The record of everything up to now."""
        notes = list(self.notes)
        params = plain(self.params, "params", notes)
        results = plain(self.results, "results", notes)
        return Record(
            kind=self.kind,
            status=status,
            environment=environment(),
            seed=self.seed,
            params=params,
            fingerprints=dict(self.fingerprints),
            results=results,
            notes=notes,
            error=error,
            started=self._started.isoformat(timespec="seconds"),
            seconds=round(time.perf_counter() - self._clock, 6),
        )


def plain(value: Any, where: str, notes: list[str]) -> Any:
    """``value`` as JSON values; non-finite numbers become None and are named in ``notes``."""
    if isinstance(value, Mapping):
        return {str(key): plain(item, f"{where}.{key}", notes) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item, f"{where}[{index}]", notes) for index, item in enumerate(value)]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, bool | str) or value is None:
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float) or hasattr(value, "item"):
        number = value if isinstance(value, float) else value.item()
        if isinstance(number, float) and not math.isfinite(number):
            notes.append(f"{where} is null: it was {number}")
            return None
        return number
    raise TypeError(f"{where}: {type(value).__name__} is not a plain value")


def environment() -> dict[str, Any]:
    """Versions and machine facts that a reader needs to repeat a run."""
    versions = {}
    for name in _PACKAGES:
        with _absent():
            versions[name] = importlib.metadata.version(name)
    return {
        "deepseal": deepseal.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS"),
        "packages": versions,
    }


@contextmanager
def _absent() -> Iterator[None]:
    try:
        yield
    except importlib.metadata.PackageNotFoundError:
        return
