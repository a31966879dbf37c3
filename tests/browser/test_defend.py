"""Defending in a browser: from nothing to a monitor, an attack on one input, a strength moved by keyboard."""

from __future__ import annotations

from collections.abc import Callable

from driving import Dashboard, choose, opened, settled, shot, violations
from playwright.sync_api import BrowserContext, expect

WORK_MS = 120_000


def test_a_newcomer_gets_a_monitor_and_sees_an_attack(
    visitor: Callable[..., BrowserContext], dashboard: Dashboard
) -> None:
    page = opened(visitor().new_page(), dashboard, "defend")
    page.get_by_role("button", name="Train a small model on the digits and fit a monitor").click()
    expect(page.locator(".st-key-work-defend")).to_contain_text("running")
    page.reload()
    expect(page.get_by_role("heading", name="Try it")).to_be_visible(timeout=WORK_MS)
    outcome = page.get_by_role("main").get_by_text("after the attack: the model answers", exact=False)
    expect(outcome).to_be_visible(timeout=WORK_MS)
    settled(page)
    shot(page, "defend")
    assert not violations(page)
    strength = page.get_by_role("slider", name="Strength ε").first
    read = "e => Number(e.getAttribute('aria-valuenow') ?? e.value)"
    before = strength.evaluate(read)
    for _ in range(5):
        strength.press("ArrowRight")
    settled(page)
    assert strength.evaluate(read) > before
    choose(page, "Attack", "harmless noise")
    expect(page.get_by_text("Nothing happened.")).to_be_visible(timeout=WORK_MS)
