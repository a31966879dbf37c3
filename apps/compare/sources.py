"""Digest of the code that a figure rests on: of some modules, and of everything of ours that they import."""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

# An entry of a registry names what is built by name, and whoever builds it names it as a root.
_ENTRY = re.compile(r'^\s*"[\w-]+": "[\w.]+:\w+",?\s*$', re.MULTILINE)


def digest(*roots: str) -> str:
    """SHA-256, shortened, over the modules and what of ``deepseal`` they import, directly or not.

    So a cell is made again when code that it rests on has changed, and only then: another scheme, or another line in a
    registry, changes nothing. Of ``deepseal.apps`` only the roots themselves count, for the rest of it lists and shows.
    """
    found = {name for root in roots for name in _reached(root)}
    total = hashlib.sha256()
    for name in sorted(found):
        total.update(f"{name}\x1f{_source(name)}\x1e".encode())
    return total.hexdigest()[:16]


@functools.cache
def _reached(root: str) -> frozenset[str]:
    found, waiting = set[str](), [root]
    while waiting:
        name = waiting.pop()
        if name not in found and _path(name) is not None:
            found.add(name)
            waiting += [other for other in _imports(name) if _counts(other)]
    return frozenset(found)


def _counts(name: str) -> bool:
    parts = name.split(".")
    return parts[0] == "deepseal" and parts[1:2] != ["apps"]


@functools.cache
def _path(name: str) -> Path | None:
    try:
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        return None
    return Path(spec.origin) if spec is not None and spec.origin is not None and spec.origin.endswith(".py") else None


@functools.cache
def _source(name: str) -> str:
    path = _path(name)
    return "" if path is None else _ENTRY.sub("", path.read_text(encoding="utf-8"))


@functools.cache
def _imports(name: str) -> tuple[str, ...]:
    return tuple(_named(ast.parse(_source(name))))


def _named(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                yield whole if node.module.startswith("deepseal") and _path(whole) is not None else node.module
