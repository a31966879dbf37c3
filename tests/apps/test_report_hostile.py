"""Reports of records that nobody should trust."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from report_pages import check_page, parse, printed, section, squeezed
from report_records import ANY, HOSTILE, ODD, changed, hostile, oddly, of_kind

from deepseal.apps.report import text
from deepseal.apps.report.html import render
from deepseal.record import Record


def test_hostile_text_stays_text(records: list[Record]) -> None:
    bad = hostile(records)
    page = render(bad, title=HOSTILE)
    check_page(page)
    assert "<script>alert(1)</script>" in parse(page).text
    assert not re.search(r"<script|<img|\{\{ 49|\x1b|\x00|\u202e|\ud800", page)
    for record in bad:
        shown = printed(text.show(record))
        assert "\x1b" not in re.sub(r"\x1b\[[0-9;]*m", "", shown) and "\x00" not in shown and "\u202e" not in shown
        assert "\x1b[31m" not in shown
    assert "[bold]x[/bold]" in printed(text.table(bad))


def test_a_huge_owner_name_is_cut_and_counted(records: list[Record]) -> None:
    keygen = of_kind(records, "watermark.keygen")[0]
    huge = changed(keygen, params={**keygen.params, "owner": "<b>" * 1_000_000})
    page = render([huge if record is keygen else record for record in records])
    check_page(page)
    assert len(page) < 400_000 and "3,000,000 characters" in page


@pytest.mark.parametrize("odd", ODD, ids=lambda value: str(value)[:12])
def test_odd_fields_are_survived(records: list[Record], odd: Any) -> None:
    every = [oddly(record, odd) for record in records]
    check_page(render(every))
    squeezed(text.table(every))
    for record in every:
        squeezed(text.show(record))


def test_each_missing_field_is_survived_and_said(records: list[Record]) -> None:
    chosen = {record.kind: index for index, record in enumerate(records) if record.status == "ok"}
    for index in chosen.values():
        for part in ("params", "results", "fingerprints"):
            for name in getattr(records[index], part):
                rest = {key: value for key, value in getattr(records[index], part).items() if key != name}
                fewer = [*records[:index], changed(records[index], **{part: rest}), *records[index + 1 :]]
                render(fewer)
    bare = [changed(record, params={}, results={}, fingerprints={}, environment={}) for record in records]
    root = check_page(render(bare))
    assert "not recorded of not recorded" in section(root, "checks").text
    assert "not recorded" in section(root, "cost").text
    for record in bare:
        if record.kind == "watermark.verify":
            assert squeezed(text.show(record)).startswith("not recorded: not recorded of not recorded bits wrong")


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(ANY, max_size=6))
def test_no_record_can_break_a_report(some: list[Record]) -> None:
    check_page(render(some))
    printed(text.table(some), 80)
    for record in some:
        printed(text.show(record), 80)
