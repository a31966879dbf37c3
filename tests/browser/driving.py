"""Dashboards that are started as users start them, and what people do with their pages."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
RECORDS = ROOT / "tests" / "data" / "records"
SCREENSHOTS = ROOT / "build" / "screenshots"
AXE = Path(os.environ.get("DEEPSEAL_AXE", ROOT / "build" / "axe" / "node_modules" / "axe-core" / "axe.min.js"))
WIDE, NARROW = {"width": 1280, "height": 900}, {"width": 390, "height": 844}
PAGES = {
    "overview": "What was done, and what it showed",
    "mark": "Mark and verify",
    "attack": "Attack",
    "defend": "Watch a deployed model",
    "private": "Ask without showing",
}
START_SECONDS = 60.0
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
]

pytest.importorskip("streamlit", reason="the dashboard's extra is not installed")
pytest.importorskip("playwright.sync_api", reason="playwright is not installed: run make test-browser")
CHROMIUM = os.environ.get("DEEPSEAL_CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")

from playwright.sync_api import Browser, BrowserContext, Page, expect  # noqa: E402

expect.set_options(timeout=20_000)


QUIET_MS = 300
# Streamlit says that a page is busy once the server has begun; under load a click may wait for that. So this notes what
# was sent, and looks in what arrives (protobuf: pairs of a tag and a value) for field 4, with which a run begins.
WATCHED = """(() => {
  const begins = bytes => {
    let at = 0;
    const varint = () => {
      let value = 0, scale = 1, byte;
      do { byte = bytes[at++]; value += (byte & 127) * scale; scale *= 128; } while (byte & 128);
      return value;
    };
    while (at < bytes.length) {
      const tag = varint(), kind = tag & 7;
      if (tag >> 3 === 4) return true;
      if (kind !== 0 && kind !== 2) return false;
      const value = varint();
      if (kind === 2) at += value;
    }
    return false;
  };
  window.deepsealAsked = -Infinity;
  window.WebSocket = class extends window.WebSocket {
    constructor(...words) {
      super(...words);
      this.addEventListener('message', event => {
        if (event.data instanceof ArrayBuffer && begins(new Uint8Array(event.data))) window.deepsealAsked = -Infinity;
      });
    }
    send(data) {
      window.deepsealAsked = performance.now();
      super.send(data);
    }
  };
})()"""
# Whether the last request was answered (few are without a run, such as for an upload's address: they wait for LATE_MS),
# the script has ended, every part of the page has arrived, and nothing has changed for a while.
LATE_MS = 5000
_SETTLED = """([quiet, late]) => {
  const app = document.querySelector('[data-testid=stApp]');
  const asked = performance.now() - window.deepsealAsked < late;
  const runs = app?.dataset.testScriptState !== 'notRunning';
  const busy = asked || runs || document.querySelector('[data-testid=stSkeleton]');
  const now = busy ? null : document.querySelector('[data-testid=stMain]').innerText;
  if (now === null || window.deepsealText !== now) {
    window.deepsealText = now;
    window.deepsealSince = performance.now();
  }
  return now !== null && performance.now() - window.deepsealSince >= quiet;
}"""


class Dashboard:
    """A server that was started as a user starts it."""

    def __init__(self, place: Path, *words: str, records: Path | None = RECORDS) -> None:
        place.mkdir(parents=True, exist_ok=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.cache = place / "cache"
        self.log = place / "log"
        command = [sys.executable, "-m", "deepseal", "dashboard", *([str(records)] if records else [])]
        command += ["--port", str(self.port), "--no-browser", *words]
        environment = {name: value for name, value in os.environ.items() if name != "DEEPSEAL_PASSPHRASE"}
        environment.update(DEEPSEAL_CACHE=str(self.cache), OMP_NUM_THREADS="1", HOME=str(place))
        self.started = time.monotonic()
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, cwd=place, env=environment)

    def wait(self) -> Dashboard:
        """Until it answers."""
        while time.monotonic() - self.started < START_SECONDS:
            assert self.process.poll() is None, self.log.read_text()
            try:
                with urllib.request.urlopen(f"{self.url}/_stcore/health", timeout=2):
                    return self
            except (OSError, urllib.error.URLError):
                time.sleep(0.05)
        raise AssertionError(f"the dashboard did not answer:\n{self.log.read_text()}")

    def children(self) -> list[int]:
        """Every process below it."""
        found, parents = [], [self.process.pid]
        table = [line.split() for line in _ps("-eo", "pid,ppid").splitlines()[1:]]
        while parents:
            parents = [int(pid) for pid, parent in table if int(parent) in parents]
            found += parents
        return found

    def stop(self) -> int:
        """Ctrl-C, and its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGINT)
        try:
            return self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise


def alive(pid: int) -> bool:
    """Whether a process runs (one that has ended and was not waited for does not)."""
    return _ps("-o", "stat=", "-p", str(pid)).strip()[:1] not in ("", "Z")


def _ps(*words: str) -> str:
    return subprocess.run(["ps", *words], capture_output=True, text=True, check=False).stdout


def person(browser: Browser, **options: Any) -> BrowserContext:
    """Cookies and storage of their own; `settled` knows what their pages ask the server."""
    context = browser.new_context(**{"viewport": WIDE, "accept_downloads": True, **options})
    context.set_default_timeout(20_000)
    context.add_init_script(WATCHED)
    return context


def opened(page: Page, server: Dashboard, name: str = "overview") -> Page:
    """A page of the dashboard, once it is complete."""
    page.goto(f"{server.url}/{'' if name == 'overview' else name}")
    return settled(page, PAGES[name])


def settled(page: Page, title: str | None = None) -> Page:
    """The page, once its script has run."""
    if title is not None:
        expect(page.get_by_role("heading", name=title, level=1)).to_be_visible()
    page.wait_for_function(_SETTLED, arg=[QUIET_MS, LATE_MS], polling=50)
    return page


def shot(page: Page, name: str) -> Path:
    """A screenshot of the whole page."""
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    path = SCREENSHOTS / f"{re.sub(r'[^a-z0-9-]+', '-', name.lower())}.png"
    tall = page.evaluate(
        "() => Math.max(document.querySelector('[data-testid=stMain]')?.scrollHeight ?? 0, innerHeight)"
    )
    size = page.viewport_size
    assert size is not None
    page.set_viewport_size({"width": size["width"], "height": min(int(tall), 6000)})
    page.wait_for_timeout(300)
    page.screenshot(path=path)
    page.set_viewport_size(size)
    return path


def choose(page: Page, label: str, text: str) -> None:
    """Pick what contains a text from a list."""
    box = page.get_by_role("combobox", name=label, exact=True)
    box.click()
    box.fill(text)
    page.get_by_role("option").filter(has_text=text).first.click()
    if page.get_by_role("listbox").count():  # a list of which several can be chosen stays open
        page.keyboard.press("Tab")
    settled(page)


def tab_to(page: Page, name: str, *, role: str | None = None, most: int = 80) -> None:
    """Press Tab until what has this name has the focus."""
    for _ in range(most):
        page.keyboard.press("Tab")
        found, kind = page.evaluate(
            "() => { const e = document.activeElement;"
            " return [e.getAttribute('aria-label') ?? e.innerText ?? '', e.getAttribute('role')]; }"
        )
        if found.strip() == name and role in (None, kind):
            return
    raise AssertionError(f"{most} presses of Tab did not reach {name!r}")


# Of Streamlit's own widgets: (rule, the part of the page that it holds for, why).
EXCEPTIONS: tuple[tuple[str, str, str], ...] = ()
SERIOUS = ("serious", "critical")


def violations(page: Page) -> list[tuple[str, str, str]]:
    """(rule, selector, element) of what axe-core finds serious or critical, but for the exceptions."""
    if not AXE.is_file():
        return []  # test_accessibility.py says so
    page.evaluate(AXE.read_text())
    found: dict[str, Any] = page.evaluate(
        "async () => await axe.run(document, {resultTypes: ['violations'], iframes: true})"
    )
    bad = []
    for rule in found["violations"]:
        if rule["impact"] not in SERIOUS:
            continue
        for node in rule["nodes"]:
            excused = any(
                rule["id"] == name and page.locator(where).and_(page.locator(str(node["target"][0]))).count()
                for name, where, _ in EXCEPTIONS
            )
            if not excused:
                bad.append((rule["id"], str(node["target"][0]), node["html"][:200]))
    return bad
