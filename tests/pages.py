"""The dashboard's pages without a browser."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from streamlit.testing.v1 import AppTest

from deepseal.apps.dashboard import jobs as work
from deepseal.apps.dashboard.workspace import Workspace

SECONDS = 120.0


def ended(own: Workspace, name: str) -> work.Job:
    """A piece of work once it has ended."""
    return until(own, name, lambda job: not job.running)


def until(own: Workspace, name: str, holds: Callable[[work.Job], bool]) -> work.Job:
    """A piece of work once something holds of it."""
    end = time.monotonic() + SECONDS
    while time.monotonic() < end:
        found = work.job(own, name)
        assert found is not None
        if holds(found):
            return found
        assert found.running, found.error
        time.sleep(0.05)
    raise AssertionError("it did not come to that")


def page(function: Callable[[Workspace], None], own: Workspace) -> AppTest:
    """A page of a browser's folder, after its first run."""

    def script(module: str, name: str, root: str) -> None:
        import importlib
        from pathlib import Path

        from deepseal.apps.dashboard.workspace import Workspace

        getattr(importlib.import_module(module), name)(Workspace(Path(root)))

    given = (function.__module__, function.__name__, str(own.root))
    return AppTest.from_function(script, args=given, default_timeout=60).run()


def said(shown: AppTest) -> str:
    """Everything that a page says in words."""
    parts = [shown.markdown, shown.caption, shown.success, shown.info, shown.warning, shown.error]
    return "\n".join(element.value.replace("\\", "") for part in parts for element in part)


def fresh(root: Path) -> Workspace:
    """A browser's folder with nothing in it."""
    return Workspace(root / "mine")
