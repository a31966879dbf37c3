"""Attacking in a browser: a comparison by upload, and a marked model, its attacks and what is left of the mark."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from driving import ROOT, Dashboard, opened, settled, shot, violations
from playwright.sync_api import BrowserContext, Page, expect

PASSPHRASE = "correct-horse-battery-staple-7319"
WORK_MS = 120_000
COMPARED = ROOT / "benchmarks" / "watermark-compare" / "mnist-mlp.json"


def test_a_comparison_is_opened_by_upload(visitor: Callable[..., BrowserContext], dashboard: Dashboard) -> None:
    page = opened(visitor().new_page(), dashboard, "attack")
    page.get_by_role("radio", name="Look at a comparison").click()
    settled(page)
    box = page.get_by_role("region", name="Open a record.json").locator("input[type=file]")
    box.set_input_files({"name": "other.json", "mimeType": "application/json", "buffer": b'{"schema": 1}'})
    expect(page.get_by_role("alert").filter(has_text="other.json")).to_be_visible()
    page.get_by_role("button", name="Remove other.json").click()
    settled(page)
    box.set_input_files(COMPARED)
    content = json.loads(COMPARED.read_text())["results"]["pairs"][0]
    squares = sum(len(scheme["robustness"]) for scheme in content["schemes"])
    expect(page.get_by_text(f"{squares} squares", exact=False)).to_be_visible()
    expect(page.get_by_test_id("stVegaLiteChart").first).to_be_visible()
    settled(page)
    page.get_by_label("Only attacks that contain").fill("prune")
    page.keyboard.press("Enter")
    fewer = sum("prune" in row["attack"] for scheme in content["schemes"] for row in scheme["robustness"])
    expect(page.get_by_text(f"{fewer} squares", exact=False)).to_be_visible()
    settled(page)
    shot(page, "attack-comparison")
    assert not violations(page)


def test_a_marked_model_is_attacked(visitor: Callable[..., BrowserContext], dashboard: Dashboard) -> None:
    context = visitor()
    page = opened(context.new_page(), dashboard, "mark")
    page.get_by_label("Passes over the data").fill("8")
    page.get_by_role("button", name="Train", exact=True).click()
    expect(page.get_by_role("heading", name="2. Your key, and the mark")).to_be_visible(timeout=WORK_MS)
    settled(page)
    page.get_by_label("Owner", exact=True).fill("Example Ltd")
    page.get_by_label("New passphrase", exact=True).fill(PASSPHRASE)
    page.get_by_label("The same again", exact=True).fill(PASSPHRASE)
    page.get_by_role("button", name="Make the key and mark a copy").click()
    expect(page.get_by_role("heading", name="3. The marked model")).to_be_visible(timeout=WORK_MS)
    page.get_by_role("link", name="Attack").click()
    settled(page, "Attack")
    for name in ("quantise", "fine-tune"):
        chip = page.get_by_role("button", name=f"Remove {name}", exact=False)
        chip.first.click()
        expect(chip).to_have_count(0)
        settled(page)
    strengths(page, "prune", "0.5, much")
    expect(page.get_by_role("alert").filter(has_text="expected numbers")).to_be_visible()
    strengths(page, "prune", "0.5, 0.99")
    page.get_by_label("Passphrase of the key", exact=True).fill(PASSPHRASE)
    page.get_by_role("button", name="Attack copies of it").click()
    done = page.locator(".st-key-work-attack")
    expect(done).to_contain_text(": done", timeout=WORK_MS)
    settled(page)
    expect(page.get_by_text("of 2 attacks", exact=False)).to_be_visible()
    shot(page, "attack-done")
    assert not violations(page)
    records = sorted((dashboard.cache / "dashboard").glob("*/records/*-attack-run.json"))
    assert [kept(path)["params"]["attack_params"]["sparsity"] for path in records] == [0.5, 0.99]


def strengths(page: Page, attack: str, text: str) -> None:
    field = page.get_by_label("Strengths", exact=True)
    expect(field).to_have_count(1)
    if not field.is_visible():
        page.get_by_text(f"{attack}: ", exact=False).first.click()
    field.fill(text)
    field.press("Enter")
    settled(page)


def kept(path: Path) -> dict[str, dict[str, dict[str, float]]]:
    found: dict[str, dict[str, dict[str, float]]] = json.loads(path.read_text())
    return found
