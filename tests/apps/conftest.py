"""The records of one demonstration, and their page."""

from __future__ import annotations

import pytest
from report_pages import Node, check_page
from report_records import RECORDS

from deepseal.apps.report.html import render
from deepseal.record import Record, read_record


@pytest.fixture(scope="module")
def records() -> list[Record]:
    return [read_record(path) for path in sorted(RECORDS.glob("*.json"))]


@pytest.fixture(scope="module")
def page(records: list[Record]) -> Node:
    return check_page(render(records))
