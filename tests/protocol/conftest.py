"""What the tests of two parties share: certificates, and a check that nothing stays open."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest
from delegations import Place, opened
from parties import Party, open_descriptors, party
from test_mixed import NETWORKS, compiled


@pytest.fixture(scope="session")
def certified(tmp_path_factory: pytest.TempPathFactory) -> Party:
    return party(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(autouse=True)
def nothing_stays_open(certified: Party) -> Iterator[None]:
    gc.collect()
    before, threads = open_descriptors(), threading.active_count()
    yield
    gc.disable()  # sockets must be closed by the code, not by the garbage collector
    try:
        end = time.monotonic() + 3
        while (open_descriptors(), threading.active_count()) > (before, threads) and time.monotonic() < end:
            time.sleep(0.01)
        assert open_descriptors() <= before
        assert threading.active_count() <= threads
    finally:
        gc.enable()


@pytest.fixture
def place() -> Iterator[Place]:
    """A server and a proxy of a small dense network."""
    with opened(*compiled(NETWORKS["dense"]())) as made:
        yield made
