"""Forms for the parameters of schemes, attacks and detectors, made from their own tables."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import streamlit as st


def choose(
    label: str,
    options: Sequence[str],
    *,
    key: str,
    index: int | None = 0,
    format_func: Callable[[str], str] = str,
    help: str | None = None,
    placeholder: str | None = None,
) -> str | None:
    """A choice from a list; None where there is none to make, or none was made yet."""
    chosen: object = st.selectbox(
        label, options, index=index, format_func=format_func, key=key, help=help, placeholder=placeholder
    )
    return chosen if isinstance(chosen, str) else None


def offered(table: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The parameters that a page may set: numbers, switches, and choices from a list.

    Free texts are left to the command line: some of them name code to run or files to read.
    """
    return [row for row in table if row["type"] in ("int", "float", "bool") or _choices(row)]


def parameters(table: Sequence[Mapping[str, Any]], key: str, *, without: Sequence[str] = ()) -> list[str]:
    """``-p name=value`` words of what differs from the defaults."""
    found: list[str] = []
    rows = [row for row in offered(table) if row["name"] not in without]
    for index, row in enumerate(rows):
        if index % 3 == 0:
            columns = st.columns(3)
        with columns[index % 3]:
            value = _field(row, f"{key}-{row['name']}")
        if value != row["default"] and value is not None:
            found += ["-p", f"{row['name']}={value}"]
    return found


def _field(row: Mapping[str, Any], key: str) -> Any:
    name, default, help_ = str(row["name"]), row["default"], f"{row['help']} ({row['allowed']})".replace("()", "")
    label = name.replace("_", " ")
    choices = _choices(row)
    if choices:
        index = choices.index(default) if default in choices else None
        return choose(label, choices, index=index, key=key, help=help_, placeholder="as usual")
    if row["type"] == "bool":
        return st.toggle(label, value=bool(default), key=key, help=help_)
    if row["type"] == "int":
        return st.number_input(label, value=default, step=1, key=key, help=help_)
    return st.number_input(label, value=None if default is None else float(default), key=key, help=help_, format="%g")


def _choices(row: Mapping[str, Any]) -> list[str]:
    allowed = str(row["allowed"])
    return [choice.strip() for choice in allowed.split(" | ")] if row["type"] == "str" and " | " in allowed else []
