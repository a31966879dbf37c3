"""Pictures of records. Each has a caption that says the same in words, and no meaning is in a colour alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import altair as alt
import pandas as pd
import streamlit as st

from deepseal.apps.dashboard.look import plain
from deepseal.apps.dashboard.settings import BAD, GOOD, PALETTE, PLAIN, SHARES, UNSURE
from deepseal.apps.report import words

_VERDICT_COLOURS = {"owned": GOOD, "could not decide": UNSURE, "not owned": BAD, "failed": PLAIN}
_VERDICT_SIGNS = {"owned": "●", "could not decide": "?", "not owned": "✗", "failed": "–"}


def margins(values: Sequence[float], wrong: int, bits: int) -> None:
    """Each bit's margin, from the lowest to the highest."""
    ordered = sorted(float(value) for value in values)
    data = pd.DataFrame(
        {
            "bit": range(1, len(ordered) + 1),
            "margin": ordered,
            "reads": ["wrong" if value < 0 else "right" for value in ordered],
        }
    )
    colour = alt.Color("reads:N", scale=alt.Scale(domain=["right", "wrong"], range=[GOOD, BAD]), legend=None)
    chart = (
        alt.Chart(data)
        .mark_bar()
        .encode(
            x=alt.X(
                "bit:Q",
                title="bits, from the least to the most certain",
                axis=alt.Axis(tickMinStep=1),
                scale=alt.Scale(domain=[0, len(ordered) + 1], nice=False),
            ),
            y=alt.Y("margin:Q", title="margin"),
            color=colour,
            tooltip=["reads", alt.Tooltip("margin:Q", format=".2f")],
        )
        .properties(height=220)
    )
    st.altair_chart(chart, width="stretch")
    least = f" The least certain bit has a margin of {ordered[0]:.2f}." if ordered else ""
    st.caption(f"{wrong} of {bits} bits read wrong (bars below zero).{least}")


def learning(readings: Sequence[Mapping[str, Any]]) -> None:
    """Loss and wrong bits against updates."""
    data = pd.DataFrame([{"updates": r["updates"], "loss": r["loss"], "wrong bits": r["bit_errors"]} for r in readings])
    left, right = st.columns(2)
    for column, name, colour in ((left, "loss", PALETTE[0]), (right, "wrong bits", PALETTE[4])):
        line = alt.Chart(data).mark_line(point=True, color=colour)
        chart = line.encode(
            x=alt.X("updates:Q"),
            y=alt.Y(f"{name}:Q", title=name, scale=alt.Scale(zero=True)),
            tooltip=list(data.columns),
        ).properties(height=180)
        column.altair_chart(chart, width="stretch")
        column.caption(f"{name.capitalize()}: {data[name].iloc[0]:.4g} at first, {data[name].iloc[-1]:.4g} now.")


def null(results: Mapping[str, Any]) -> None:
    """Wrong bits of strangers' keys on the same model, the suspect's own, and the border of the decision."""
    counts = (results.get("null") or {}).get("wrong_bits")
    wrong, bits, most = results.get("bit_errors"), results.get("bits"), results.get("threshold")
    if not counts or wrong is None:
        return
    data = pd.DataFrame(counts, columns=["wrong bits", "keys"])
    marks = [("this key", wrong, GOOD), *([("allowed", most, BAD)] if most is not None else [])]
    lines = pd.DataFrame([{"wrong bits": at, "what": f"{what}: {at}"} for what, at, _ in marks])
    colours = alt.Scale(domain=list(lines["what"]), range=[colour for _, _, colour in marks])
    strangers = (
        alt.Chart(data)
        .mark_bar(color=PLAIN)
        .encode(
            x=alt.X("wrong bits:Q", scale=alt.Scale(domain=[0, bits], nice=False)),
            y=alt.Y("keys:Q", title="strangers' keys"),
            tooltip=["wrong bits", "keys"],
        )
    )
    own = (
        alt.Chart(lines)
        .mark_rule(size=3)
        .encode(
            x="wrong bits:Q",
            color=alt.Color("what:N", scale=colours, legend=alt.Legend(title=None, orient="top")),
            strokeDash=alt.StrokeDash("what:N", legend=None),
            tooltip=["what"],
        )
    )
    st.altair_chart((strangers + own).properties(height=240), width="stretch")
    lowest = min(int(pair[0]) for pair in counts)
    total = sum(int(pair[1]) for pair in counts)
    allowed = "no number of wrong bits is small enough" if most is None else f"at most {most} are allowed"
    st.caption(
        f"{total} keys that nobody embedded read at least {lowest} of {bits} bits wrong; this key reads {wrong} wrong; "
        f"{allowed} for the false-positive rate."
    )


def curves(rows: Sequence[Mapping[str, Any]]) -> None:
    """Accuracy and wrong bits against an attack's strength.

    Args:
        rows: attack, strength (a number), accuracy and wrong bits (shares), verdict.
    """
    data = pd.DataFrame(rows)
    for attack, own in data.groupby("attack", sort=False):
        if own["strength"].nunique() < 2:
            continue
        long = own.melt(["strength", "verdict"], ["accuracy", "wrong bits"], var_name="what", value_name="share")
        chart = (
            alt.Chart(long)
            .mark_line(point=alt.OverlayMarkDef(size=60))
            .encode(
                x=alt.X(
                    "strength:Q",
                    title=str(own["parameter"].iloc[0]),
                    scale=alt.Scale(zero=False),
                    axis=alt.Axis(tickMinStep=1) if (own["strength"] % 1 == 0).all() else alt.Axis(),
                ),
                y=alt.Y("share:Q", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[0, 1]), title=None),
                color=alt.Color(
                    "what:N",
                    scale=alt.Scale(domain=["accuracy", "wrong bits"], range=[PALETTE[0], PALETTE[4]]),
                    legend=alt.Legend(title=None, orient="top"),
                ),
                strokeDash=alt.StrokeDash("what:N", legend=None),
                shape=alt.Shape("what:N", legend=None),
                tooltip=["what", "strength", alt.Tooltip("share:Q", format=".1%"), "verdict"],
            )
            .properties(height=240)
        )
        st.markdown(f"**{plain(str(attack))}**: what it costs the thief, and what is left of the mark")
        st.altair_chart(chart, width="stretch")


def verdicts(rows: Sequence[Mapping[str, Any]]) -> None:
    """A square an attack and strength, with the verdict."""
    data = pd.DataFrame(rows)
    data["place"] = data.groupby("attack", sort=False).cumcount()
    data["text"] = [f"{_VERDICT_SIGNS.get(v, '–')} {s}" for v, s in zip(data["verdict"], data["short"], strict=True)]
    base = alt.Chart(data).encode(x=alt.X("place:O", axis=None), y=alt.Y("attack:N", title=None, sort=None))
    scale = alt.Scale(domain=list(_VERDICT_COLOURS), range=list(_VERDICT_COLOURS.values()))
    squares = base.mark_rect(stroke="white", strokeWidth=2).encode(
        color=alt.Color("verdict:N", scale=scale, legend=alt.Legend(title=None, orient="top")),
        tooltip=["attack", "setting", "verdict", alt.Tooltip("wrong bits:Q", format=".1%")],
    )
    signs = base.mark_text(size=14, color="white", fontWeight="bold", limit=140).encode(text="text:N")
    attacks = data["attack"].nunique()
    st.altair_chart((squares + signs).properties(height=40 * attacks + 90), width="stretch")
    owned = int((data["verdict"] == "owned").sum())
    st.caption(f"Owned after {owned} of {len(data)} attacks (● owned, ? could not decide, ✗ not owned).")


def shares(rows: Sequence[Mapping[str, Any]], *, few: int = 400) -> None:
    """Schemes by attacks: in how many of the attacked models the mark was still found.

    Args:
        rows: attack, scheme, share (0 to 1, or None), says.
        few: up to so many squares carry their share as text.
    """
    data = pd.DataFrame(rows)
    base = alt.Chart(data).encode(
        x=alt.X("scheme:N", title=None, sort=None, axis=alt.Axis(labelAngle=-40, labelLimit=140, labelOverlap=False)),
        y=alt.Y("attack:N", title=None, sort=None, axis=alt.Axis(labelLimit=260, labelOverlap=False)),
    )
    scale = alt.Scale(domain=[0.0, 1.0], range=list(SHARES))
    chart: alt.Chart | alt.LayerChart = base.mark_rect().encode(
        color=alt.Color("share:Q", scale=scale, legend=alt.Legend(title="still owned", format="%")),
        tooltip=["attack", "scheme", "says"],
    )
    if len(data) <= few:
        dark = alt.condition("datum.share > 0.6", alt.value("white"), alt.value("black"))
        written = base.transform_filter("isValid(datum.share)").mark_text()
        chart = chart + written.encode(text=alt.Text("share:Q", format=".0%"), color=dark)
    attacks = data["attack"].nunique()
    st.altair_chart(chart.properties(height=min(2400, 26 * attacks + 130)), width="stretch")
    known = data["share"].dropna()
    marked = data[data["scheme"] != "plain"]["share"].dropna()  # the null scheme marks nothing
    st.caption(
        f"{len(data)} squares, {len(known)} of them measured; the mark was found in {words.percent(marked.mean())} "
        "(plain, which marks nothing, left out)."
    )
