"""What resumable benchmarks share: whether a cell's record stands for today's code and parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from deepseal.errors import InputError
from deepseal.record import read_record

HERE = Path(__file__).resolve().parent


def code(folders: Sequence[str] = ("adapter", "watermark", "attacks")) -> str:
    """SHA-256 over our sources that decide a figure: models and records made by other code are made again."""
    digest = hashlib.sha256()
    for folder in folders:
        for path in sorted((HERE.parent / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def is_done(path: Path, params: dict[str, Any]) -> bool:
    """Whether the cell's record is there, ok, and made with these parameters."""
    try:
        record = read_record(path)
    except InputError:
        return False
    return record.status == "ok" and record.params == params
