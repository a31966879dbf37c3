"""A folder to work in, the records of one demonstration, and their page."""

from __future__ import annotations

import shutil
from pathlib import Path

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


@pytest.fixture
def folder(files: Path, tmp_path: Path) -> Path:
    """A fresh working folder with base.safetensors, marked.safetensors and owner.key."""
    for path in files.iterdir():
        shutil.copy(path, tmp_path / path.name)
    return tmp_path
