"""Private inference in a browser: a digit is asked about, and a server that is killed in the middle is said."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from driving import Dashboard, alive, opened, person, settled, shot, violations
from playwright.sync_api import Browser, BrowserContext, expect

WORK_MS = 120_000


@pytest.fixture(scope="module")
def asker(chromium: Browser, dashboard: Dashboard) -> Iterator[BrowserContext]:
    """Somebody who pressed the button for newcomers."""
    context = person(chromium)
    page = opened(context.new_page(), dashboard, "private")
    page.get_by_role("button", name="Train a small model on the digits and make it ready").click()
    expect(page.get_by_role("heading", name="Your question")).to_be_visible(timeout=WORK_MS)
    yield context
    context.close()


def serving(dashboard: Dashboard) -> int:
    """The process of the model's owner, once there is one."""
    end = time.monotonic() + WORK_MS / 1000
    while time.monotonic() < end:
        for pid in dashboard.children():
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
                if b"private" in words and words[words.index(b"private") + 1] == b"serve":
                    return pid
        time.sleep(0.02)
    raise AssertionError("no process serves")


def asking(dashboard: Dashboard) -> None:
    """Until the process of whoever asks has begun."""
    end = time.monotonic() + WORK_MS / 1000
    while time.monotonic() < end:
        for path in dashboard.cache.glob("dashboard/*/jobs/*/status.json"):
            with contextlib.suppress(OSError, ValueError):
                steps = json.loads(path.read_bytes())["steps"]
                if [step["state"] for step in steps] == ["running", "running"]:
                    return
        time.sleep(0.02)
    raise AssertionError("nobody asks")


def test_a_picked_digit_is_asked_about_in_private(asker: BrowserContext, dashboard: Dashboard) -> None:
    page = opened(asker.new_page(), dashboard, "private")
    page.get_by_role("button", name="Ask in private").click()
    expect(page.get_by_role("heading", name="The answer")).to_be_visible(timeout=WORK_MS)
    expect(page.get_by_text("The same, bit for bit, as the program gives in the clear.")).to_be_visible()
    expect(page.get_by_role("heading", name="What each party saw")).to_be_visible()
    expect(page.get_by_role("heading", name="What each layer cost")).to_be_visible()
    settled(page)
    shot(page, "private")
    assert not violations(page)


def test_a_killed_server_is_said_and_the_question_asked_again(asker: BrowserContext, dashboard: Dashboard) -> None:
    page = opened(asker.new_page(), dashboard, "private")
    page.get_by_role("button", name="Ask in private").click()
    server = serving(dashboard)
    asking(dashboard)
    os.kill(server, signal.SIGSTOP)  # so that it is in the middle, however fast the machine is
    running = [pid for pid in dashboard.children() if pid != server]
    page.reload()
    expect(page.locator(".st-key-work-private-ask")).to_contain_text("running", timeout=WORK_MS)
    os.kill(server, signal.SIGKILL)
    expect(page.locator(".st-key-work-private-ask")).to_contain_text("failed", timeout=WORK_MS)
    settled(page)
    shot(page, "private-killed")
    said = page.get_by_text("the server ended in the middle", exact=False).filter(has_text="Nothing was learned")
    expect(said.first).to_be_visible()
    assert "Traceback" not in page.get_by_role("main").inner_text()
    end = time.monotonic() + 20
    while [pid for pid in running if alive(pid)] and time.monotonic() < end:
        time.sleep(0.1)
    assert not [pid for pid in running if alive(pid)]
    page.get_by_role("button", name="Try again").click()
    expect(page.get_by_role("heading", name="The answer")).to_be_visible(timeout=WORK_MS)
