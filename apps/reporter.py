"""How long work shows that it goes on: a title, then calls with what is done of how much."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

from deepseal.adapter.training import Progress

Reporter = Callable[[str], AbstractContextManager[Progress | None]]


def silent(_title: str) -> AbstractContextManager[Progress | None]:
    """A reporter that shows no progress."""
    return nullcontext()
