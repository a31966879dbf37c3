"""The overview: records of a folder and one's own, to filter, open, compare and take away."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import streamlit as st

from deepseal.apps.dashboard import look, settings
from deepseal.apps.dashboard.forms import choose
from deepseal.apps.dashboard.jobs import cancel_all
from deepseal.apps.dashboard.library import Entry, entries, filtered
from deepseal.apps.dashboard.workspace import Workspace
from deepseal.apps.report import words

_SOURCES = {"folder": "folder", "yours": "made here"}


def show(own: Workspace) -> None:
    """The page."""
    look.heading(
        "What was done, and what it showed",
        "Every command and every page leaves a **record**: what was done, with which seeds, and what came out. "
        "Here you find them, open them, lay two side by side, and take them with you.",
    )
    found, cut = entries(own)
    if cut:
        st.warning(
            "There are more records in the folder than are listed here; start the dashboard on a smaller folder."
        )
    if not found:
        _nothing()
    else:
        _records(found)
    _end(own)


def _nothing() -> None:
    st.info(
        "There are no records yet. **Mark and verify** makes the first ones in a minute"
        + ("." if settings.current().folder else "; or start the dashboard with a folder of records.")
    )


def _records(found: list[Entry]) -> None:
    words_, kinds, ended = st.columns([2, 2, 2])
    text = words_.text_input("Find", key="find", placeholder="words of the record", max_chars=200)
    kind = kinds.multiselect("What was done", sorted({e.record.kind for e in found}), key="kinds")
    end = ended.multiselect("How it ended", sorted({e.verdict for e in found}), key="ended")
    shown = filtered(found, text, kind, end)
    st.caption(f"{len(shown)} of {len(found)} records")
    if not shown:
        st.info("Nothing matches. Take a filter away, or write less.")
        return
    picked = st.dataframe(
        {
            "when": [words.moment(e.record.started) for e in shown],
            "what": [e.record.kind for e in shown],
            "how it ended": [e.verdict for e in shown],
            "model": [e.model for e in shown],
            "in a sentence": [e.sentence for e in shown],
            "file": [e.name for e in shown],
            "from": [_SOURCES[e.source] for e in shown],
        },
        hide_index=True,
        on_select="rerun",
        selection_mode="multi-row",
        key="records",
        height=min(400, 36 * (len(shown) + 1) + 4),
    )
    rows = [row for row in picked["selection"]["rows"] if row < len(shown)]
    labels = {f"{entry.source}/{entry.name}": entry for entry in shown}
    left, right = st.columns(2)
    names = list(labels)
    with left:
        first = _choose("Open", names, labels, rows[0] if rows else None, f"open-{rows}")
    with right:
        second = _choose("Compare with", names, labels, rows[1] if len(rows) > 1 else None, f"beside-{rows}")
    if first and second and first != second:
        _beside(labels[first], labels[second])
    elif first:
        _open(labels[first])


def _choose(label: str, names: list[str], labels: Mapping[str, Entry], index: int | None, key: str) -> str | None:
    hint = "choose a record, or tick rows of the table"
    return choose(label, names, index=index, format_func=lambda name: labels[name].label, key=key, placeholder=hint)


def _open(entry: Entry) -> None:
    record = entry.record
    with look.card("The record"):
        if record.kind == "watermark.verify" and record.status == "ok":
            look.verdict(record)
        else:
            st.markdown(look.plain(entry.sentence))
        take_away([entry], "one")
    with look.said():
        st.iframe(_page([entry]), height=900)


def take_away(chosen: Sequence[Entry], key: str) -> None:
    """Buttons that download records as JSON, and as one page or PDF."""
    name = chosen[0].record.kind.replace(".", "-") if len(chosen) == 1 else "records"
    json_, html, pdf = st.columns(3)
    with look.said():
        json_.download_button(
            "JSON", lambda: _json(chosen), f"{name}.json", "application/json", key=f"json-{key}", on_click="ignore"
        )
        html.download_button(
            "HTML", lambda: _page(chosen), f"{name}.html", "text/html", key=f"html-{key}", on_click="ignore"
        )
        pdf.download_button(
            "PDF", lambda: _pdf(chosen), f"{name}.pdf", "application/pdf", key=f"pdf-{key}", on_click="ignore"
        )


def _json(chosen: Sequence[Entry]) -> str:
    if len(chosen) == 1:
        return chosen[0].record.to_json()
    return "[\n" + ",\n".join(entry.record.to_json() for entry in chosen) + "\n]"


def _page(chosen: Sequence[Entry]) -> str:
    from deepseal.apps.report.html import render

    return render([entry.record for entry in chosen])


def _pdf(chosen: Sequence[Entry]) -> bytes:
    from deepseal.apps.report.pdf import render

    return render([entry.record for entry in chosen])


def _beside(one: Entry, other: Entry) -> None:
    with look.card("Side by side"):
        left, right = st.columns(2)
        for column, entry in ((left, one), (right, other)):
            column.markdown(f"**{look.plain(entry.name)}**")
            column.markdown(look.plain(entry.sentence))
        both = [dict(_facts(entry)) for entry in (one, other)]
        names = list(dict.fromkeys(name for facts in both for name in facts))
        only = st.toggle("Only what differs", value=True, key="only-different")
        rows = [(name, *(facts.get(name, "–") for facts in both)) for name in names]
        rows = [row for row in rows if not only or row[1] != row[2]]
        st.dataframe(
            {"what": [r[0] for r in rows], "first": [r[1] for r in rows], "second": [r[2] for r in rows]},
            hide_index=True,
            key="beside",
        )
        take_away([one, other], "two")


def _facts(entry: Entry) -> list[tuple[str, str]]:
    record = entry.record
    parts = (("", record.results), ("asked: ", record.params), ("of: ", record.fingerprints))
    return [
        (f"{before}{name.replace('_', ' ')}", _short(value))
        for before, part in parts
        for name, value in words.flat(part)
    ]


def _short(text: str) -> str:
    """A number with as many digits as can be compared by eye; the JSON has all of them."""
    try:
        return f"{float(text):.6g}" if "." in text else text
    except ValueError:
        return text


def _end(own: Workspace) -> None:
    with st.expander("What is kept of you here"):
        st.markdown(
            "What you upload and make lies in a folder of this server that only your browser's cookie opens; it is "
            "deleted a week after your last visit. Passphrases are kept nowhere."
        )
        sure = st.checkbox("Yes, delete my models, keys, data and records on this server.", key="sure")
        if st.button("Forget everything of mine", disabled=not sure):
            cancel_all(own)
            own.forget()
            st.session_state.clear()
            st.rerun()
