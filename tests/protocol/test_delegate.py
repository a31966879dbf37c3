"""Delegation: results equal the simulator's, and what server and proxy see says nothing."""

from __future__ import annotations

import contextlib
import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from delegations import LOOPBACK, Place, background, opened, question_of
from lines import payloads, tapped
from parties import together
from test_mixed import NETWORKS, compiled, drawn, separation
from test_server import reals, wait_for
from torch import nn

from deepseal.errors import ProtocolError
from deepseal.secure_inference.compile.program import Program
from deepseal.secure_inference.roles.desk import Desk
from deepseal.secure_inference.roles.halves import greet, pack_input, receive_half, send_question
from deepseal.secure_inference.roles.proxy import Proxy
from deepseal.secure_inference.roles.server import Server
from deepseal.secure_inference.transport import Kind, connect


@pytest.mark.parametrize("permits", ["label", "logits"])
@pytest.mark.parametrize("name", NETWORKS)
def test_equal_to_the_simulator(name, permits):
    program, weights = compiled(NETWORKS[name](), permits=permits)
    with opened(program, weights) as place:
        with place.client() as client:
            for count in (1, 3):
                x = drawn(program, count, count)
                assert np.array_equal(client.ask(reals(program, x)).values, place.expected(x)), name
        wait_for(lambda: place.found["desk"] and place.found["proxy"])
    for side in ("desk", "proxy"):
        assert [(one.questions, one.error) for one in place.found[side]] == [(2, None)]
    assert [(one.questions, one.error) for one in place.found["server"]] == [(2, None)]


def test_clients_at_once_share_a_session_with_the_server():
    program, weights = compiled(NETWORKS["dense"]())
    with opened(program, weights, most_sessions=1) as place:
        x = drawn(program, 3)

        def ask(index):
            def run():
                with place.client() as client:
                    return [int(client.ask(reals(program, x[index : index + 1])).values[0]) for _ in range(5)]

            return run

        answers = together(*(ask(index) for index in range(3)))
        assert answers == [[label] * 5 for label in place.expected(x)]
    assert [(one.questions, one.error) for one in place.found["server"]] == [(15, None)]


@dataclass
class Seen:
    """What went over the lines for questions about the lowest (0) and the highest input (1)."""

    program: Program
    labels: np.ndarray
    inputs: list
    setup: dict[str, list]
    questions: dict[str, list[list]]

    def bits(self, line, kind, which):
        """(questions, bits) of one frame of a kind for each question."""
        rows = [payloads(frames, kind)[which] for frames in self.questions[line]]
        return np.unpackbits(np.stack([np.frombuffer(row, np.uint8) for row in rows]), axis=1, bitorder="little")


@pytest.fixture(scope="module")
def seen():
    """240 questions of one client to a small network, in random order."""
    program, weights = compiled(nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.ReLU(), nn.Linear(3, 3)))
    wire = program.wires[program.input]
    inputs = [np.full((1, *wire.shape), value) for value in (wire.number.low, wire.number.high)]
    labels = np.random.default_rng(7).random(240) < 0.5
    between = []

    @contextlib.contextmanager
    def via(target):
        with tapped(target) as tap:
            between.append(tap)
            yield tap.address

    with (
        opened(program, weights, timeout=20, via=via) as place,
        tapped(place.desk) as desk,
        tapped(place.proxy) as proxy,
        place.client(server=desk.address, proxy=proxy.address) as client,
    ):
        lines = {
            "client to server": desk.asked,
            "client to proxy": proxy.asked,
            "proxy to server": between[0].asked,
            "server to proxy": between[0].answered,
            "server to client": desk.answered,
            "proxy to client": proxy.answered,
        }
        answers = [reals(program, x) for x in inputs], [place.expected(x) for x in inputs]
        ends = []
        for label in (0, *labels.astype(int)):  # the first question opens the session between proxy and server
            assert np.array_equal(client.ask(answers[0][label]).values, answers[1][label])
            ends.append({name: len(frames) for name, frames in lines.items()})
        setup = {name: frames[: ends[0][name]] for name, frames in lines.items()}
        questions = {
            name: [frames[one[name] : two[name]] for one, two in itertools.pairwise(ends)]
            for name, frames in lines.items()
        }
    return Seen(program, labels, inputs, setup, questions)


def test_lengths_do_not_depend_on_the_input(seen):
    for name, questions in seen.questions.items():
        shapes = {
            tuple((frame.kind, len(frame.payload)) for frame in question if frame.kind != Kind.PING)
            for question in questions
        }
        assert len(shapes) == 1, name


def test_the_server_never_tells_the_proxy_how_to_read_the_answer(seen):
    frames = [*seen.setup["server to proxy"], *(frame for part in seen.questions["server to proxy"] for frame in part)]
    kinds = {Kind(frame.kind) for frame in frames}
    assert Kind.OUTPUT not in kinds
    assert {Kind.LINEAR, Kind.TABLES} <= kinds
    for side in ("server", "proxy"):
        assert all(payloads(part, Kind.OUTPUT) for part in seen.questions[f"{side} to client"])


def test_each_half_alone_is_uniform(seen):
    """Each bit is 1 in half of the questions: 5.5 standard deviations, 4e-8 a bit, under 1e-4 for all of them."""
    size, used = seen.program.wires[seen.program.input], seen.program.wires[seen.program.output].number.bits
    shares = [seen.bits(f"client to {side}", Kind.INPUT, 1) for side in ("server", "proxy")]
    halves = [seen.bits(f"{side} to client", Kind.OUTPUT, 0)[:, :used] for side in ("server", "proxy")]
    assert shares[0].shape == (len(seen.labels), size.number.bits * size.size)
    for part in (*shares, *halves):
        for label in (False, True):
            rows = part[seen.labels == label]
            assert np.abs(rows.mean(0) - 0.5).max() < 5.5 * 0.5 / len(rows) ** 0.5
    for row, label in zip(shares[0] ^ shares[1], seen.labels, strict=True):  # a control: both together are the input
        packed = np.packbits(row, bitorder="little").tobytes()
        assert packed == pack_input(seen.program, seen.inputs[int(label)])
    heads = [
        payloads(question, Kind.INPUT)[0]
        for side in ("server", "proxy")
        for question in seen.questions[f"client to {side}"]
    ]
    assert len(set(heads)) == len(seen.labels)  # a ticket is the same in both halves, and never again


def test_neither_transcript_tells_inputs_apart(seen):
    """By chance the area under the curve is 0.5 with a standard deviation of 0.053 (about 60 transcripts of each)."""

    def rows(*names):
        views = [
            b"".join(frame.payload for name in names for frame in seen.questions[name][i] if frame.kind != Kind.PING)
            for i in range(len(seen.labels))
        ]
        return np.stack([np.frombuffer(view, np.uint8) for view in views])

    assert abs(separation(rows("client to proxy", "server to proxy"), seen.labels) - 0.5) < 0.27
    assert abs(separation(rows("client to server", "proxy to server"), seen.labels) - 0.5) < 0.27
    together_ = rows("client to proxy") ^ rows("client to server")
    assert separation(together_, seen.labels) > 0.99, "a control: both together"


def test_proxy_outlives_a_server_that_goes_away_and_comes_back():
    program, weights = compiled(NETWORKS["dense"]())
    x, found = drawn(program, 1), []

    @contextlib.contextmanager
    def served(where):
        desk = Desk(program, timeout=3)
        server = Server(program, weights, timeout=1, halves=desk)
        with desk.open(LOOPBACK) as at, background(server.serve, server.stop, where) as address:
            yield at, address

    with served(LOOPBACK) as (desk, address):
        proxy = Proxy(program, address, timeout=10, report=found.append)
        stack = contextlib.ExitStack()
        where = stack.enter_context(background(proxy.serve, proxy.stop, LOOPBACK))
        place = Place(program, weights, address, desk, where)
        place.check(x)
    with stack:  # the idle session is dead now: the server gave it up
        channel = connect(where, tls=None, timeout=5)
        with channel, pytest.raises(ProtocolError, match="got no answer from the server"):
            greet(channel, program.digest(), "client", "proxy")
            send_question(channel, question_of(place))
            receive_half(channel, program, 1)
        with served(address) as (desk, _):
            Place(program, weights, address, desk, where).check(x)
