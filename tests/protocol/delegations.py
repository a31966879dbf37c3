"""A server, a proxy and a constrained client, for tests of delegation."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import threading
from dataclasses import dataclass, field

import numpy as np
from test_server import reals

from deepseal.secure_inference.compile.program import Program
from deepseal.secure_inference.compile.simulate import decode_output, simulate
from deepseal.secure_inference.compile.weights import Weights
from deepseal.secure_inference.roles.delegate import DelegatedClient
from deepseal.secure_inference.roles.desk import Desk
from deepseal.secure_inference.roles.halves import TICKET, Question, greet, input_bits
from deepseal.secure_inference.roles.proxy import Proxy
from deepseal.secure_inference.roles.server import Server
from deepseal.secure_inference.transport import connect

LOOPBACK = "127.0.0.1:0"
DEEPSEAL = [sys.executable, "-m", "deepseal"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@dataclass
class Place:
    """A server and a proxy, and what they report."""

    program: Program
    weights: Weights
    server: str = ""
    desk: str = ""
    proxy: str = ""
    found: dict[str, list] = field(default_factory=lambda: {"server": [], "desk": [], "proxy": []})

    def client(self, **options):
        words = {"server": self.desk, "proxy": self.proxy, "timeout": 5} | options
        return DelegatedClient.connect(words.pop("program", self.program), **words)

    def expected(self, x):
        return decode_output(self.program, simulate(self.program, self.weights, x))

    def check(self, x, **options):
        with self.client(**options) as client:
            assert np.array_equal(client.ask(reals(self.program, x)).values, self.expected(x))

    def channels(self):
        """To the desk and to the proxy, greeted."""
        ends = [connect(where, tls=None, timeout=5) for where in (self.desk, self.proxy)]
        for end, role in zip(ends, ("server", "proxy"), strict=True):
            greet(end, self.program.digest(), "client", role)
        return ends


@contextlib.contextmanager
def background(serve, stop, *args, **options):
    """The address of what serves in another thread."""
    address, up = [], threading.Event()

    def ready(where):
        address.append(where)
        up.set()

    thread = threading.Thread(target=serve, args=args, kwargs={"ready": ready, **options})
    thread.start()
    assert up.wait(20)
    try:
        yield address[0]
    finally:
        stop()
        thread.join(20)
        assert not thread.is_alive()


@contextlib.contextmanager
def opened(
    program, weights, *, timeout=3.0, tls=(None, None), via=contextlib.nullcontext, most_samples=None, **options
):
    """A server, its desk and a proxy that reaches it through ``via``."""
    place = Place(program, weights)
    report = {name: list_.append for name, list_ in place.found.items()}
    desk = Desk(program, timeout=timeout, most_clients=3, report=report["desk"])
    server = Server(program, weights, timeout=timeout, report=report["server"], halves=desk, most_samples=most_samples)
    with contextlib.ExitStack() as stack:
        place.server = stack.enter_context(background(server.serve, server.stop, LOOPBACK, tls=tls[0]))
        place.desk = stack.enter_context(desk.open(LOOPBACK, tls=tls[0]))
        between = stack.enter_context(via(place.server)) or place.server
        proxy = Proxy(program, between, timeout=timeout, tls=tls[1], report=report["proxy"], **options)
        place.proxy = stack.enter_context(background(proxy.serve, proxy.stop, LOOPBACK))
        yield place


def question_of(place, ticket=None):
    size = -(-input_bits(place.program, 1) // 8)
    return Question(ticket or secrets.token_bytes(TICKET), 1, secrets.token_bytes(size))
