"""The dashboard in a real browser: seconds to the first page, of interactions, and of a comparison of 10,000 trials."""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "browser"))

from driving import CHROMIUM, FLAGS, RECORDS, Dashboard, choose, opened, person, settled
from playwright.sync_api import Browser, Page, expect, sync_playwright

from deepseal.record import Run, read_record

RUNS = 3
SCHEMES, ATTACKS = 100, 100
LIMITS = {"first_page": 3.0, "interaction": 0.5, "large_comparison": 2.0}
COMPARED = Path(__file__).parent / "watermark-compare" / "mnist-mlp.json"


def large(folder: Path) -> Path:
    """A comparison of 100 schemes by 100 attacks, made of the rows of a measured one."""
    record = read_record(COMPARED)
    pair = record.results["pairs"][0]
    measured = [row for scheme in pair["schemes"] for row in scheme["robustness"] if row["n"]]
    rows = [{**measured[i % len(measured)], "attack": f"attack {i}"} for i in range(ATTACKS)]
    schemes = [
        {**pair["schemes"][i % len(pair["schemes"])], "scheme": f"scheme {i}", "robustness": rows}
        for i in range(SCHEMES)
    ]
    results = {**record.results, "pairs": [{**pair, "schemes": schemes}]}
    path = folder / "large.json"
    record.model_copy(update={"results": results}).write(path)
    return path


def first_page(browser: Browser, place: Path) -> float:
    """From the start of the server's process until its first page is complete."""
    context = person(browser)
    page = context.new_page()
    server = Dashboard(place).wait()
    try:
        page.goto(server.url)
        expect(page.get_by_role("combobox", name="Open", exact=True)).to_be_visible()
        return time.monotonic() - server.started
    finally:
        server.stop()
        context.close()


def shown_after(page: Page, act: Callable[[], object], *, seen: Callable[[], object]) -> float:
    """From an action until what it gives, or its progress, is seen."""
    settled(page)
    start = time.monotonic()
    act()
    seen()
    return time.monotonic() - start


def interactions(browser: Browser, server: Dashboard) -> dict[str, float]:
    page = opened(person(browser).new_page(), server)
    every = len(list(RECORDS.glob("*.json"))) + 1
    find = page.get_by_label("Find")
    settled(page)
    find.fill("05-verify")
    found = {
        "filter records": shown_after(
            page,
            lambda: find.press("Enter"),
            seen=lambda: expect(page.get_by_text(f"1 of {every} records")).to_be_visible(),
        )
    }
    box = page.get_by_role("combobox", name="Open", exact=True)
    settled(page)
    box.click()
    found["open a record"] = shown_after(
        page,
        lambda: page.get_by_role("option").first.click(),
        seen=lambda: expect(page.get_by_role("heading", name="The record")).to_be_visible(),
    )
    settled(page)
    for name, heading in (("Mark and verify", "Mark and verify"), ("Attack", "Attack")):
        link = page.get_by_role("link", name=name)
        found[f"go to {name}"] = shown_after(
            page,
            link.click,
            seen=lambda h=heading: expect(page.get_by_role("heading", name=h, level=1)).to_be_visible(),
        )
    page.context.close()
    return found


def large_comparison(browser: Browser, server: Dashboard) -> float:
    """From asking for comparisons until the squares of 10,000 trials are drawn."""
    page = opened(person(browser).new_page(), server, "attack")
    settled(page)
    start = time.monotonic()
    page.get_by_role("radio", name="Look at a comparison").click()
    expect(page.get_by_text(f"{SCHEMES * ATTACKS} squares", exact=False)).to_be_visible()
    expect(page.get_by_role("img", name=f"{SCHEMES * ATTACKS} squares")).to_be_visible()
    taken = time.monotonic() - start
    page.context.close()
    return taken


def strengths(browser: Browser, server: Dashboard) -> dict[str, list[float]]:
    """From a press on the slider of an attack's strength until the attacked input, judged again, is there."""
    page = opened(person(browser).new_page(), server, "defend")
    page.get_by_role("button", name="Train a small model on the digits and fit a monitor").click()
    expect(page.get_by_role("heading", name="Try it")).to_be_visible(timeout=120_000)
    slider = page.get_by_role("slider", name="Strength ε").first
    found: dict[str, list[float]] = {}
    for attack, title in (("fgsm", "FGSM: one step"), ("pgd", "PGD: many small steps")):
        choose(page, "Attack", title)
        taken = []
        for _ in range(RUNS + 1):
            settled(page)
            larger = float(slider.evaluate("e => e.getAttribute('aria-valuenow') ?? e.value")) + 0.01
            answer = page.get_by_text(f"by at most {larger:.3g};", exact=False)
            taken.append(
                shown_after(page, lambda: slider.press("ArrowRight"), seen=lambda a=answer: expect(a).to_be_visible())
            )
        found[f"strength of {attack}"] = taken[1:]  # what is loaded once is loaded now
    page.context.close()
    return found


def main() -> None:
    run = Run("benchmark.dashboard", params={"runs": RUNS, "limits_seconds": LIMITS, "trials": SCHEMES * ATTACKS})
    with sync_playwright() as playwright, tempfile.TemporaryDirectory() as folder:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        run.params["browser"] = browser.version
        starts = [first_page(browser, Path(folder) / f"start-{number}") for number in range(RUNS)]
        records = Path(folder) / "records"
        records.mkdir()
        for path in RECORDS.glob("*.json"):
            (records / path.name).write_bytes(path.read_bytes())
        large(records)
        server = Dashboard(Path(folder) / "server", records=records).wait()
        try:
            interactions(browser, server)  # what is loaded once is loaded now
            acts = [interactions(browser, server) for _ in range(RUNS)]
            matrices = [large_comparison(browser, server) for _ in range(RUNS)]
            moved = strengths(browser, server)
        finally:
            server.stop()
        browser.close()
    run.results.update(
        first_page_seconds=spread(starts),
        interaction_seconds={name: spread([act[name] for act in acts]) for name in acts[0]}
        | {name: spread(taken) for name, taken in moved.items()},
        large_comparison_seconds=spread(matrices),
    )
    run.params["load_average"] = [round(load, 2) for load in os.getloadavg()]
    run.params["cores"] = len(os.sched_getaffinity(0))
    record = run.record()
    record.write(Path(__file__).with_name("dashboard.json"), force=True)
    print(json.dumps(record.results, indent=2))


def spread(values: list[float]) -> dict[str, float]:
    shown = {"median": statistics.median(values), "lowest": min(values), "highest": max(values), "first": values[0]}
    return {name: round(value, 3) for name, value in shown.items()}


if __name__ == "__main__":
    main()
