"""axe-core on every page: nothing serious in what we render."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from driving import AXE, PAGES, Dashboard, choose, opened, settled, violations
from playwright.sync_api import BrowserContext


@pytest.mark.skipif(not AXE.is_file(), reason="axe-core is not installed: run make test-browser where there is npm")
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", PAGES)
def test_a_page_has_no_serious_violation(
    name: str, scheme: str, visitor: Callable[..., BrowserContext], dashboard: Dashboard
) -> None:
    page = opened(visitor(color_scheme=scheme, bypass_csp=True).new_page(), dashboard, name)
    found = violations(page)
    if name == "overview":
        choose(page, "Open", "05-verify-marked.json")
        settled(page)
        found += violations(page)
    assert not found
