"""Thousands of squares as one picture: what a chart with so many marks would take a browser seconds to draw."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import streamlit as st
from numpy.typing import NDArray

from deepseal.apps.dashboard.forms import choose
from deepseal.apps.dashboard.inputs import Picture, show_picture
from deepseal.apps.dashboard.look import plain
from deepseal.apps.dashboard.settings import SHARES
from deepseal.apps.report import words

_WIDTH, _LARGEST = 1200, 24  # dots of the picture, and of a square, at most
_UNKNOWN = 205  # grey of what was not measured


def mosaic(rows: Sequence[Mapping[str, Any]]) -> None:
    """Attacks from top to bottom, schemes from left to right, and one square to be read in words.

    Args:
        rows: attack, scheme, share (0 to 1, or None), says.
    """
    attacks, schemes = (list(dict.fromkeys(str(row[name]) for row in rows)) for name in ("attack", "scheme"))
    values = np.full((len(attacks), len(schemes)), np.nan)
    places = ({name: place for place, name in enumerate(names)} for names in (attacks, schemes))
    down, along = places
    for row in rows:
        if row["share"] is not None:
            values[down[row["attack"]], along[row["scheme"]]] = row["share"]
    known = values[~np.isnan(values)]
    found = words.percent(float(known.mean())) if len(known) else "none"
    show_picture(
        picture(values),
        f"{len(rows)} squares, {len(known)} of them measured: {len(attacks)} attacks from top to bottom, "
        f"{len(schemes)} schemes from left to right. Dark: still found in all; yellow: in none; grey: not measured. "
        f"The mark was found in {found}. Fewer attacks are shown as a chart with names.",
        width="100%",
    )
    left, right = st.columns(2)
    with left:
        attack = choose("Read the square of the attack", attacks, key="mosaic-attack")
    with right:
        scheme = choose("and of the scheme", schemes, key="mosaic-scheme")
    for row in rows:
        if row["attack"] == attack and row["scheme"] == scheme:
            st.markdown(f"{plain(str(attack))}, {plain(str(scheme))}: **{plain(str(row['says']))}**")


def picture(values: NDArray[np.float64]) -> Picture:
    """(rows, columns) shares as (…, 3) colours, each a square of several dots; NaN is grey."""
    stops = np.array([[int(colour[i : i + 2], 16) for i in (1, 3, 5)] for colour in SHARES], dtype=np.float64)
    at = np.clip(np.nan_to_num(values), 0.0, 1.0) * (len(stops) - 1)
    channels = [np.interp(at, np.arange(len(stops)), stops[:, channel]) for channel in range(3)]
    colours = np.where(np.isnan(values)[..., None], _UNKNOWN, np.stack(channels, axis=-1))
    times = max(1, min(_LARGEST, _WIDTH // max(1, values.shape[1])))
    return np.repeat(np.repeat(np.rint(colours).astype(np.uint8), times, axis=0), times, axis=1)
