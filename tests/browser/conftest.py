"""A dashboard of its own for every module, Debian's Chromium, and as many people as a test asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from driving import Dashboard
    from playwright.sync_api import Browser, BrowserContext, Page


@pytest.fixture(scope="session")
def chromium() -> Iterator[Browser]:
    from driving import CHROMIUM, FLAGS
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.skip("there is no chromium on the path, and DEEPSEAL_CHROMIUM names none: apt install chromium")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield browser
        browser.close()


@pytest.fixture(scope="module")
def dashboard(chromium: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Dashboard]:
    from driving import Dashboard

    server = Dashboard(tmp_path_factory.mktemp("dashboard"))
    try:
        yield server.wait()
    finally:
        server.stop()


@pytest.fixture
def visitor(chromium: Browser) -> Iterator[Callable[..., BrowserContext]]:
    """Makes people: each has cookies and storage of their own."""
    from driving import person

    made: list[BrowserContext] = []

    def new(**options: Any) -> BrowserContext:
        made.append(person(chromium, **options))
        return made[-1]

    yield new
    for context in made:
        context.close()


@pytest.fixture
def page(visitor: Callable[..., BrowserContext], dashboard: Dashboard) -> Page:
    """The overview of a new visitor."""
    from driving import opened

    return opened(visitor().new_page(), dashboard)
