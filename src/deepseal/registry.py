"""Lazy registries: a name maps to ``module:Class``, which is imported when it is used; entry points add outsiders."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, cast

from deepseal.errors import InputError, UnknownNameError

T = TypeVar("T")


class Registry(Generic[T]):
    """Names to classes of one kind.

    Args:
        kind: what the entries are, in the user's words, such as "watermark scheme".
        group: entry-point group in which other distributions add entries.
        entries: name to ``module:Class``.
    """

    def __init__(self, kind: str, group: str, entries: Mapping[str, str]) -> None:
        self.kind, self.group = kind, group
        self._entries = dict(entries)

    def names(self) -> list[str]:
        """All names, ours first, without importing any of them."""
        return [*self._entries, *(name for name in self._outside() if name not in self._entries)]

    def get(self, name: str) -> type[T]:
        """The class behind the name.

        Raises:
            UnknownNameError: no such entry; the message has the nearest names.
            InputError: an outside entry that cannot be imported.
        """
        target = self._entries.get(name) or self._outside().get(name)
        if target is None:
            raise UnknownNameError(self.kind, name, self.names())
        module, _, attribute = target.partition(":")
        try:
            return cast("type[T]", getattr(importlib.import_module(module), attribute))
        except (ImportError, AttributeError) as error:
            raise InputError(
                f"{self.kind} {name!r} at {target}",
                found=str(error),
                do="repair or remove the package that provides it",
            ) from error

    def build(self, name: str, values: Mapping[str, Any]) -> T:
        """An instance with the given parameters (see ``Parameters.from_mapping``)."""
        return cast("T", cast("Any", self.get(name)).from_mapping(values))

    def _outside(self) -> dict[str, str]:
        return {point.name: point.value for point in entry_points(group=self.group)}
