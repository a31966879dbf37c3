"""Comparisons that the command line made: schemes by attacks, also very large ones."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import streamlit as st

from deepseal.apps.dashboard import charts, look, settings
from deepseal.apps.dashboard.forms import choose
from deepseal.apps.dashboard.library import Entry, entries
from deepseal.apps.dashboard.mosaic import mosaic
from deepseal.apps.dashboard.overview import take_away
from deepseal.apps.dashboard.workspace import Workspace
from deepseal.apps.report import comparison, words
from deepseal.errors import understood
from deepseal.record import Record, read_text

_ROWS = 2_000
_DRAWN = 1_000  # squares that are drawn one by one


def show(own: Workspace) -> None:
    """Choose a comparison, and see it."""
    found = [entry for entry in entries(own)[0] if comparison.is_comparison(entry.record)]
    with look.card("1. The comparison"):
        labels = {f"{entry.source}/{entry.name}": entry for entry in found}
        given = st.file_uploader(
            "Open a record.json", type=["json"], key="matrix-upload",
            max_upload_size=min(64, settings.current().upload_mib),
            help="`deepseal watermark compare` writes it into its folder.",
        )  # fmt: skip
        chosen: Entry | None = None
        if given is not None:
            with look.said():
                chosen = Entry(given.name, "yours", read_text(given.getvalue(), given.name))
                if not comparison.is_comparison(chosen.record):
                    st.error("This record is not a comparison of marks: `deepseal watermark compare` makes one.")
                    return
        elif found:
            name = choose("Comparison", list(labels), format_func=lambda n: labels[n].label, key="matrix")
            chosen = labels[name] if name else None
        else:
            st.info("There is none in the folder of this dashboard: upload one, or make one on the command line.")
    if chosen is not None:
        with look.said(), understood("a complete record of a comparison", "make the record again"):
            _comparison(chosen)


def _comparison(entry: Entry) -> None:
    results = entry.record.results
    with look.card("2. What it says"):
        for pair in results["pairs"]:
            st.markdown(look.plain(comparison.headline(pair)))
        take_away([entry], "matrix")
    pairs = {f"{pair['data']}, {str(pair['arch']).rpartition(':')[2]}": pair for pair in results["pairs"]}
    with look.card("3. What removes which mark"):
        name = choose("Data and network", list(pairs), key="matrix-pair")
        if name is not None:
            _pair(pairs[name])
    with look.card("4. All figures"):
        _overview(entry.record)


def _pair(pair: Mapping[str, Any]) -> None:
    rows = squares(pair)
    attacks = list(dict.fromkeys(row["attack"] for row in rows))
    text = st.text_input("Only attacks that contain", key="matrix-find", max_chars=100)
    kept = [row for row in rows if text.lower() in row["attack"].lower()]
    if not kept:
        st.info(f"None of the {len(attacks)} attacks contains this.")
        return
    if len(kept) > _DRAWN:
        mosaic(kept)
    else:
        charts.shares(kept)
    if st.toggle("The same as a table", key="matrix-table"):
        st.dataframe(
            {name: [row[name] for row in kept[:_ROWS]] for name in ("attack", "scheme", "says")}, hide_index=True
        )
        if len(kept) > _ROWS:
            st.caption(f"The first {_ROWS} of {len(kept)} rows.")


def squares(pair: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One row a scheme and attack: the share of attacked models in which the mark was found, and what that says."""
    rows = []
    for scheme in pair["schemes"]:
        for row in scheme["robustness"]:
            owned = row["owned"] if row["n"] else None
            says = f"owned {words.count(owned['count'])} of {words.count(owned['n'])}" if owned else "not measured"
            rows.append(
                {
                    "scheme": words.clean(scheme["scheme"], 40),
                    "attack": words.clean(row["attack"], 80),
                    "share": words.number(owned["value"]) if owned else None,
                    "says": says,
                }
            )
    return rows


def _overview(record: Record) -> None:
    grid = words.grid(record.results.get("overview"))
    if grid is None:
        return
    columns, rows = grid
    st.dataframe(
        {name: [words.cell(name, row[index]) for row in rows] for index, name in enumerate(columns)}, hide_index=True
    )
