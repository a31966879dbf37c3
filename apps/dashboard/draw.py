"""A pad to draw small grey pictures on: with mouse, finger or keyboard."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import streamlit as st
from numpy.typing import NDArray

SMALLEST, LARGEST = 4, 64
_FULL = 255


def _part(ending: str) -> str:
    return Path(__file__).with_suffix(ending).read_text(encoding="utf-8")


_PAD = st.components.v2.component("deepseal_pad", html=_part(".html"), css=_part(".css"), js=_part(".js"))


def can_draw(shape: Sequence[int]) -> bool:
    """Whether inputs of this shape are pictures that a person can draw: one channel, 4 to 64 pixels a side."""
    return len(shape) == 3 and shape[0] == 1 and all(SMALLEST <= size <= LARGEST for size in shape[1:])


def pad(key: str, shape: Sequence[int], bounds: tuple[float, float]) -> NDArray[np.float32] | None:
    """What is drawn, of shape (1, rows, columns) within the bounds, no ink being the lower one; None while blank.

    What was drawn is kept when the page is left and comes back.
    """
    rows, columns = int(shape[1]), int(shape[2])
    kept = f"ink of {key} {rows} x {columns}"
    # Streamlit forgets a widget that is not on the page; this value it keeps.
    found: Any = _PAD(
        key=f"pad-{key}-{rows}-{columns}",
        data={
            "rows": rows,
            "columns": columns,
            "label": f"Drawing area of {rows} rows and {columns} columns",
            "start": st.session_state.get(kept),
        },
        on_ink_change=lambda: None,
    )
    ink = _sound(found.ink if found.ink is not None else st.session_state.get(kept), rows * columns)
    if ink:
        st.session_state[kept] = ink
    if not any(ink):
        return None
    low, high = bounds
    grey = np.array(ink, dtype=np.float32).reshape(1, rows, columns) / np.float32(_FULL)
    return np.asarray(low + (high - low) * grey, dtype=np.float32)


def _sound(ink: object, size: int) -> list[int]:
    """The ink; none where it is something else, for a browser can send anything."""
    if not isinstance(ink, list) or len(ink) != size:
        return []
    return ink if all(isinstance(value, int) and 0 <= value <= _FULL for value in ink) else []
