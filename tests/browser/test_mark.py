"""Marking and verifying in a browser: bad uploads, live progress, a reload, a cancel, two people, no secret left."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from driving import Dashboard, alive, choose, opened, person, settled, shot, violations
from playwright.sync_api import Browser, BrowserContext, Locator, Page, expect

PASSPHRASE = "correct-horse-battery-staple-7319"
WORK_MS = 90_000


@pytest.fixture(scope="module")
def owner(chromium: Browser, dashboard: Dashboard) -> Iterator[BrowserContext]:
    """Somebody who has a model on the shelf, trained here."""
    context = person(chromium)
    page = opened(context.new_page(), dashboard, "mark")
    train(page, "mine", 8)
    expect(work(page)).to_contain_text("Training mine: done", timeout=WORK_MS)
    yield context
    context.close()


def train(page: Page, name: str, passes: int) -> None:
    settled(page)
    choice = page.get_by_role("radio", name="Train a small one")
    if choice.get_attribute("aria-checked") != "true":
        choice.click()
        settled(page)
    page.get_by_label("Passes over the data").fill(str(passes))
    page.get_by_label("Name of the model").fill(name)
    page.get_by_role("button", name="Train", exact=True).click()


def work(page: Page) -> Locator:
    return page.locator(".st-key-work-mark")


def shelf(server: Dashboard) -> list[str]:
    """What lies in all workspaces, but for records and jobs."""
    kinds = ("models", "keys", "data", "monitors", "programs", "inputs")
    return sorted(str(path) for kind in kinds for path in (server.cache / "dashboard").glob(f"*/{kind}/*"))


def taken(page: Page, name: str) -> Path:
    with page.expect_download() as waiting:
        page.get_by_role("button", name=name).click()
    return Path(waiting.value.path())


def refused(page: Page, region: str, button: str, name: str, content: bytes, server: Dashboard) -> None:
    place = page.get_by_role("region", name=region)
    place.locator("input[type=file]").set_input_files(
        {"name": name, "mimeType": "application/octet-stream", "buffer": content}
    )
    expect(place.get_by_text(name, exact=False).first).to_be_visible()
    settled(page)
    page.get_by_role("button", name=button).click()
    error = page.get_by_role("alert").filter(has_text="expected")
    expect(error).to_be_visible()
    text = error.inner_text()
    assert name in text and "Traceback" not in text and str(server.cache) not in text
    assert len(text) < 400
    settled(page)
    shot(page, f"mark-refused-{name}")
    page.get_by_role("button", name=f"Remove {name}").click()
    settled(page)


def test_bad_files_are_refused_in_one_line_and_leave_nothing(
    visitor: Callable[..., BrowserContext], dashboard: Dashboard
) -> None:
    page = opened(visitor().new_page(), dashboard, "mark")
    before = shelf(dashboard)
    page.get_by_role("radio", name="Upload", exact=True).click()
    settled(page)
    bad = {
        "words.safetensors": b"not weights at all",
        "cut.safetensors": (900).to_bytes(8, "little") + b'{"a":',
        "pickle.pt": b"\x80\x04K\x01.",
    }
    for name, content in bad.items():
        refused(page, "Weights (.safetensors)", "Use these weights", name, content, dashboard)
    page.get_by_text("Use my own data").click()
    stream = io.BytesIO()
    np.savez(stream, x=np.zeros((4, 2)), y=np.array([0, 1, 2, "three"], dtype=object))
    refused(page, "Data file (.npz)", "Use this file", "objects.npz", stream.getvalue(), dashboard)
    assert shelf(dashboard) == before
    assert str(dashboard.cache) not in page.content()


def test_a_model_is_marked_while_one_watches_and_reloads(owner: BrowserContext, dashboard: Dashboard) -> None:
    page = opened(owner.new_page(), dashboard, "mark")
    page.get_by_label("Owner", exact=True).fill("Example Ltd")
    page.get_by_label("New passphrase", exact=True).fill(PASSPHRASE)
    page.get_by_label("The same again", exact=True).fill(PASSPHRASE)
    page.get_by_role("button", name="Make the key and mark a copy").click()
    expect(work(page)).to_contain_text("Marking mine: running")
    expect(page.get_by_role("heading", name="What the copy has learned")).to_be_visible(timeout=WORK_MS)
    expect(work(page).get_by_role("progressbar").first).to_be_visible()
    assert len(dashboard.children()) >= 1
    processes_keep_it(dashboard)
    page.reload()
    expect(page.get_by_role("heading", name="What the copy has learned")).to_be_visible(timeout=WORK_MS)
    expect(work(page)).to_contain_text("Marking mine", timeout=WORK_MS)
    shot(page, "mark-running")
    assert not violations(page)
    expect(work(page)).to_contain_text("Marking mine: done", timeout=WORK_MS)
    expect(page.get_by_text("Owned: this model carries the mark of this key.")).to_be_visible()
    settled(page)
    shot(page, "mark")
    assert not violations(page)
    weights = taken(page, "Download the marked model")
    assert int.from_bytes(weights.read_bytes()[:8], "little") < weights.stat().st_size
    key = taken(page, "Download the key (encrypted)")
    assert PASSPHRASE.encode() not in key.read_bytes() and b"Example" not in key.read_bytes()
    secrets_left(page, dashboard)


def test_a_marked_model_is_verified(owner: BrowserContext, dashboard: Dashboard) -> None:
    page = opened(owner.new_page(), dashboard, "mark")
    page.get_by_role("radio", name="Verify a suspect").click()
    settled(page)
    choose(page, "Suspect", "mine marked")
    page.get_by_label("Passphrase of the key", exact=True).fill("not the passphrase")
    page.get_by_role("button", name="Verify", exact=True).click()
    done = page.locator(".st-key-work-verify")
    expect(done).to_contain_text("failed", timeout=WORK_MS)
    expect(done).to_contain_text("passphrase")
    expect(done).not_to_contain_text("not the passphrase")
    page.get_by_label("Passphrase of the key", exact=True).fill(PASSPHRASE)
    page.get_by_role("button", name="Verify", exact=True).click()
    expect(page.get_by_role("heading", name="What was found")).to_be_visible(timeout=WORK_MS)
    expect(page.get_by_text("Owned: this model carries the mark of this key.")).to_be_visible()
    settled(page)
    shot(page, "verify")
    assert not violations(page)
    secrets_left(page, dashboard)


def secrets_left(page: Page, server: Dashboard) -> None:
    """The passphrase is nowhere where it could be found later."""
    settled(page)
    places = {
        "address": page.url,
        "log": server.log.read_text(),
        "storage": page.evaluate("() => JSON.stringify([{...localStorage}, {...sessionStorage}, document.cookie])"),
        "cookies": json.dumps([dict(cookie) for cookie in page.context.cookies()]),
    }
    assert not [where for where, text in places.items() if PASSPHRASE in text]
    secret = PASSPHRASE.encode()
    files = [path for path in server.cache.rglob("*") if path.is_file()]
    assert len(files) > 5 and not [path for path in files if secret in path.read_bytes()]
    processes_keep_it(server)


def processes_keep_it(server: Dashboard) -> None:
    """What other users of the machine see of the processes does not hold the passphrase."""
    for pid in [server.process.pid, *server.children()]:
        for name in ("cmdline", "environ"):
            with contextlib.suppress(OSError):  # it has ended
                assert PASSPHRASE.encode() not in Path(f"/proc/{pid}/{name}").read_bytes()


def test_work_is_cancelled_and_its_process_ends(visitor: Callable[..., BrowserContext], dashboard: Dashboard) -> None:
    page = opened(visitor().new_page(), dashboard, "mark")
    train(page, "endless", 1000)
    expect(work(page)).to_contain_text("Training endless: running")
    expect(work(page).get_by_role("progressbar")).to_be_visible()
    running = dashboard.children()
    assert running
    work(page).get_by_role("button", name="Cancel").click()
    expect(work(page)).to_contain_text("cancelled", timeout=WORK_MS)
    shot(page, "mark-cancelled")
    assert not [pid for pid in running if alive(pid)]


def test_two_people_see_nothing_of_each_other(
    owner: BrowserContext, visitor: Callable[..., BrowserContext], dashboard: Dashboard
) -> None:
    mine, theirs = opened(owner.new_page(), dashboard), opened(visitor().new_page(), dashboard)
    expect(theirs.get_by_text("27 of 27 records")).to_be_visible()
    assert mine.get_by_text("27 of 27 records").count() == 0
    theirs = opened(theirs, dashboard, "mark")
    assert theirs.get_by_role("radio", name="Train a small one").get_attribute("aria-checked") == "true"
    assert theirs.locator("[class*=st-key-work-]").count() == 0
    text = theirs.get_by_role("main").inner_text()
    assert "mine" not in text.split() and "Download" not in text
    mine = opened(mine, dashboard, "mark")
    assert mine.get_by_role("radio", name="On my shelf").get_attribute("aria-checked") == "true"
    expect(work(mine)).to_be_visible()


def test_forgetting_leaves_nothing(visitor: Callable[..., BrowserContext], dashboard: Dashboard) -> None:
    page = opened(visitor().new_page(), dashboard, "mark")
    before = set(shelf(dashboard))
    train(page, "forgotten", 1)
    expect(work(page)).to_contain_text("Training forgotten: done", timeout=WORK_MS)
    assert set(shelf(dashboard)) > before
    opened(page, dashboard)
    page.get_by_text("What is kept of you here").click()
    button = page.get_by_role("button", name="Forget everything of mine")
    expect(button).to_be_disabled()
    page.get_by_text("Yes, delete my models, keys, data and records on this server.").click()
    expect(button).to_be_enabled()
    button.click()
    expect(page.get_by_text("27 of 27 records")).to_be_visible()
    settled(page)
    assert set(shelf(dashboard)) == before
