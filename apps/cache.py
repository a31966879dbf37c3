"""The folder of what may be deleted and is then made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """``DEEPSEAL_CACHE``, or ``~/.cache/deepseal``."""
    stated = os.environ.get("DEEPSEAL_CACHE")
    return Path(stated) if stated else Path.home() / ".cache" / "deepseal"
