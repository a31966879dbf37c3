"""The overview in a browser: filter, open, compare, take away; on a phone, in the dark, by keyboard alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from driving import NARROW, RECORDS, Dashboard, choose, opened, settled, shot, tab_to
from playwright.sync_api import BrowserContext, Download, Page, expect
from pypdf import PdfReader

from deepseal.apps.report.html import render
from deepseal.record import Record, read_record

VERIFIED = "05-verify-marked.json"
OTHER = "27-verify-other.json"


def taken(page: Page, name: str) -> Path:
    with page.expect_download() as waiting:
        page.get_by_role("button", name=name, exact=True).click()
    download: Download = waiting.value
    return Path(download.path())


def record(name: str) -> Record:
    return read_record(RECORDS / name)


def test_records_are_found_opened_and_taken_away(page: Page) -> None:
    every = len(list(RECORDS.glob("*.json")))
    expect(page.get_by_text(f"{every} of {every} records")).to_be_visible()
    shot(page, "overview")
    page.get_by_label("Find").fill("marked verify")
    page.get_by_label("Find").press("Enter")
    expect(page.get_by_text(f"1 of {every} records")).to_be_visible()
    choose(page, "Open", VERIFIED)
    expect(page.get_by_text("Owned: this model carries the mark of this key.")).to_be_visible()
    expect(page.get_by_text("0 of 256", exact=True)).to_be_visible()
    inside = page.frame_locator("iframe").first
    expect(inside.get_by_role("heading", name="Model ownership report")).to_be_visible()
    settled(page)
    shot(page, "overview-opened")
    assert json.loads(taken(page, "JSON").read_text()) == json.loads(record(VERIFIED).to_json())
    assert taken(page, "HTML").read_text() == render([record(VERIFIED)])
    text = "".join(sheet.extract_text() for sheet in PdfReader(taken(page, "PDF")).pages)
    assert "Owned: the model “marked.safetensors”" in " ".join(text.split())


def test_filters_narrow_and_say_how_many_are_left(page: Page) -> None:
    choose(page, "How it ended", "not owned")
    expect(page.get_by_text("2 of 27 records")).to_be_visible()
    page.get_by_label("Find").fill("no such words")
    page.get_by_label("Find").press("Enter")
    expect(page.get_by_text("0 of 27 records")).to_be_visible()


def test_two_records_lie_side_by_side(page: Page) -> None:
    choose(page, "Open", VERIFIED)
    choose(page, "Compare with", OTHER)
    expect(page.get_by_role("heading", name="Side by side")).to_be_visible()
    said = page.get_by_role("main").get_by_role("paragraph")
    expect(said.filter(has_text="not owned: 127 of 256 bits wrong")).to_be_visible()
    expect(said.filter(has_text="owned: 0 of 256 bits wrong")).to_be_visible()
    settled(page)
    shot(page, "overview-compared")
    both = json.loads(taken(page, "JSON").read_text())
    assert both == [json.loads(record(name).to_json()) for name in (VERIFIED, OTHER)]


def test_two_rows_that_are_ticked_are_compared(page: Page) -> None:
    box = page.get_by_test_id("stDataFrame").bounding_box()
    assert box is not None
    for row in (1, 2):
        page.mouse.click(box["x"] + 17, box["y"] + 35 * row + 18)
        settled(page)
    expect(page.get_by_role("heading", name="Side by side")).to_be_visible()


def test_nothing_is_wider_than_a_phone(visitor: Callable[..., BrowserContext], dashboard: Dashboard) -> None:
    page = opened(visitor(viewport=NARROW).new_page(), dashboard)
    choose(page, "Open", VERIFIED)
    expect(page.get_by_role("heading", name="The record")).to_be_visible()
    settled(page)
    wide = page.evaluate("() => document.querySelector('[data-testid=stMain]').scrollWidth - innerWidth")
    assert wide <= 0
    shot(page, "overview-phone")
    for button in ("JSON", "HTML", "PDF"):
        box = page.get_by_role("button", name=button, exact=True).bounding_box()
        assert box is not None and box["x"] >= 0 and box["x"] + box["width"] <= NARROW["width"]


def test_the_dark_is_dark(visitor: Callable[..., BrowserContext], dashboard: Dashboard) -> None:
    page = opened(visitor(color_scheme="dark").new_page(), dashboard)
    colour = page.evaluate("() => getComputedStyle(document.querySelector('[data-testid=stApp]')).backgroundColor")
    assert sum(int(part) for part in colour.removeprefix("rgb(").rstrip(")").split(",")[:3]) < 150
    choose(page, "Open", VERIFIED)
    expect(page.get_by_role("heading", name="The record")).to_be_visible()
    settled(page)
    shot(page, "overview-dark")


def test_the_keyboard_is_enough(page: Page) -> None:
    tab_to(page, "Find")
    page.keyboard.type("marked verify")
    page.keyboard.press("Enter")
    expect(page.get_by_text("1 of 27 records")).to_be_visible()
    settled(page)
    tab_to(page, "Open", role="combobox")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    expect(page.get_by_text("Owned: this model carries the mark of this key.")).to_be_visible()
    settled(page)
    tab_to(page, "JSON")
    with page.expect_download():
        page.keyboard.press("Enter")
