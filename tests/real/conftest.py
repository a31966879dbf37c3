"""``--record FILE``: how the tests of real models went, as a record."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from deepseal.record import Run

RUN = pytest.StashKey[Run]()
COUNTS = pytest.StashKey[Counter[str]]()
LONGEST = pytest.StashKey[dict[str, float]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record", type=Path, help="write a record of these tests to this file")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[RUN], config.stash[COUNTS], config.stash[LONGEST] = Run("test.real"), Counter(), {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item):
    report = yield
    if report.when == "call" or report.outcome != "passed":
        item.config.stash[COUNTS][report.outcome] += 1
        item.config.stash[LONGEST][item.nodeid.partition("tests/real/")[2]] = report.duration
    return report


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    path, stash = session.config.getoption("--record", None), session.config.stash
    if path is None:
        return
    run = stash[RUN]
    longest = sorted(stash[LONGEST].items(), key=lambda row: -row[1])[:20]
    run.results.update(tests=dict(stash[COUNTS]), exit_status=int(exitstatus), longest_seconds=dict(longest))
    status = {0: "ok", 2: "interrupted"}.get(int(exitstatus), "failed")
    run.record(status).write(path, force=True)
