"""How long work shows that it goes on: a title, then calls with what is done of how much."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, Protocol

from deepseal.adapter.training import Progress

Reporter = Callable[[str], AbstractContextManager[Progress | None]]


class Observer(Protocol):
    """Whoever started a command and wants to be told how it goes on, instead of a person at a terminal."""

    def progress(self, title: str, done: int, total: int) -> None:
        """So much of a piece of work is done."""
        ...

    def reading(self, values: Mapping[str, Any]) -> None:
        """What can be seen of an unfinished result, as plain values."""
        ...


_observer: ContextVar[Observer | None] = ContextVar("observer", default=None)


def observer() -> Observer | None:
    """Who looks on, if anybody does."""
    return _observer.get()


@contextmanager
def observed_by(who: Observer) -> Iterator[None]:
    """Commands inside tell ``who`` how they go on."""
    token = _observer.set(who)
    try:
        yield
    finally:
        _observer.reset(token)


def silent(_title: str) -> AbstractContextManager[Progress | None]:
    """A reporter that shows no progress."""
    return nullcontext()
