"""Delegation: a constrained client, a proxy and a server; those two see noise, and outlive broken clients."""

import contextlib
import inspect
import itertools
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field

import numpy as np
import pytest
from lines import payloads, tapped
from parties import party, together
from test_mixed import NETWORKS, compiled, drawn, separation
from test_server import reals, wait_for
from torch import nn

from deepseal.errors import InputError, ProtocolError, TransportError
from deepseal.secure_inference.compile.program import Program
from deepseal.secure_inference.compile.simulate import decode_output, simulate
from deepseal.secure_inference.compile.weights import Weights
from deepseal.secure_inference.roles.client import Client
from deepseal.secure_inference.roles.delegate import DelegatedClient
from deepseal.secure_inference.roles.desk import Desk
from deepseal.secure_inference.roles.halves import (
    TICKET,
    Question,
    greet,
    input_bits,
    pack_input,
    receive_half,
    send_question,
)
from deepseal.secure_inference.roles.proxy import Proxy
from deepseal.secure_inference.roles.server import Server
from deepseal.secure_inference.transport import Kind, Tls, connect

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


@pytest.fixture
def place():
    with opened(*compiled(NETWORKS["dense"]())) as made:
        yield made


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


def question_of(place, ticket=None):
    size = -(-input_bits(place.program, 1) // 8)
    return Question(ticket or secrets.token_bytes(TICKET), 1, secrets.token_bytes(size))


def test_unknown_ticket(place):
    server, proxy = place.channels()
    with server:
        with pytest.raises(ProtocolError, match="does not know this ticket"), proxy:
            send_question(proxy, question_of(place))
            receive_half(proxy, place.program, 1)
        server.refuse("done")
    place.check(drawn(place.program, 2))
    assert [one.error for one in place.found["server"]] == []  # the same session served both


def test_made_up_tickets_cost_no_quota():
    """Only questions that are answered count; then the proxy's clients are told that the share is used."""
    with opened(*compiled(NETWORKS["dense"]()), most_samples=3) as place:
        for _ in range(5):
            server, proxy = place.channels()
            with server:
                with pytest.raises(ProtocolError, match="does not know this ticket"), proxy:
                    send_question(proxy, question_of(place))
                    receive_half(proxy, place.program, 1)
                server.refuse("done")
        place.check(drawn(place.program, 3))
        with pytest.raises(ProtocolError, match="no answer from the server|used their share"):
            place.check(drawn(place.program, 1))


def test_ticket_used_twice(place):
    server, proxy = place.channels()
    with server, proxy:
        question = question_of(place)
        send_question(server, question)
        server.receive(Kind.READY, at_most=0)
        send_question(proxy, question)
        receive_half(proxy, place.program, 1)
        receive_half(server, place.program, 1)
        with pytest.raises(ProtocolError, match="does not know this ticket"):
            send_question(proxy, question)
            receive_half(proxy, place.program, 1)
        with pytest.raises(ProtocolError, match="one that was used before"):
            send_question(server, question)
            server.receive(Kind.READY, at_most=0)
    wait_for(lambda: place.found["desk"] and place.found["proxy"])
    told = " ".join(one.error for side in ("desk", "proxy") for one in place.found[side])
    assert question.ticket.hex() not in told and str(question.ticket) not in told + repr(question)
    place.check(drawn(place.program, 1))


def test_only_one_half(place):
    server, proxy = place.channels()
    with server:
        send_question(server, question_of(place))
        server.receive(Kind.READY, at_most=0)
        start = time.monotonic()
        with pytest.raises(ProtocolError, match="no proxy with this ticket within 3 s"):
            receive_half(server, place.program, 1)
        assert time.monotonic() - start < 8
        with pytest.raises(ProtocolError, match="nothing came"), proxy:  # greeted, then silent
            receive_half(proxy, place.program, 1)
    leaves, proxy = place.channels()
    send_question(leaves, question_of(place))
    leaves.receive(Kind.READY, at_most=0)
    leaves.refuse("gone")
    proxy.refuse("gone")
    wait_for(lambda: len(place.found["desk"]) == 2)
    place.check(drawn(place.program, 1))


def test_other_numbers_of_samples(place):
    server, proxy = place.channels()
    with server, proxy:
        size = -(-input_bits(place.program, 2) // 8)
        question = question_of(place)
        send_question(server, question)
        server.receive(Kind.READY, at_most=0)
        with pytest.raises(ProtocolError, match="does not know this ticket"):
            send_question(proxy, Question(question.ticket, 2, bytes(size)))
            receive_half(proxy, place.program, 2)
        with pytest.raises(ProtocolError, match="another number of samples"):
            receive_half(server, place.program, 1)
    place.check(drawn(place.program, 1))


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"x", "a question of 20 bytes"),
        (bytes(TICKET) + (5000).to_bytes(4, "little"), "1 to 4096 samples"),
        (bytes(TICKET) + (1).to_bytes(4, "little"), "bytes of a half"),
    ],
)
def test_questions_that_are_refused(place, side, data, reason):
    ends = place.channels()
    with pytest.raises(ProtocolError, match=reason), ends[0], ends[1]:
        ends[side].send(Kind.INPUT, data)
        ends[side].send(Kind.INPUT, b"short")
        ends[side].receive(Kind.OUTPUT, at_most=100)
    wait_for(lambda: place.found[("desk", "proxy")[side]])
    place.check(drawn(place.program, 1))


def test_wrong_program_role_or_shape(place):
    other, _ = compiled(NETWORKS["tanh"]())
    with pytest.raises(ProtocolError, match="program: ours .* theirs"):
        place.client(program=other)
    wait_for(lambda: place.found["desk"])
    assert "program" in place.found["desk"][0].error
    with pytest.raises(ProtocolError, match="expected server as the role that meets client; found proxy"):
        place.client(server=place.proxy, proxy=place.desk)
    wait_for(lambda: any("expected server as the role" in one.error for one in place.found["proxy"]))
    with pytest.raises(ProtocolError, match="expected server as the role that meets client; found garbler"):
        place.client(server=place.server)
    wrong = "expected evaluator as the role that meets garbler; found client"
    wait_for(lambda: any(wrong in one.error for one in place.found["server"]))
    with pytest.raises(ProtocolError, match="expected garbler as the role that meets evaluator; found server"):
        Client.connect(place.program, place.desk, timeout=5)
    with place.client() as client:
        with pytest.raises(InputError, match="inputs of shape"):
            client.ask(np.zeros((1, 9, 9)))
        x = drawn(place.program, 1)
        assert np.array_equal(client.ask(reals(place.program, x)).values, place.expected(x))


def test_proxy_of_another_program():
    """The proxy, not the client, has another program than the server."""
    (program, weights), (other, _) = compiled(NETWORKS["dense"]()), compiled(NETWORKS["tanh"]())
    found = []
    with opened(program, weights) as place:
        proxy = Proxy(other, place.server, timeout=3, report=found.append)
        with background(proxy.serve, proxy.stop, LOOPBACK) as where:
            with pytest.raises(ProtocolError, match="program"):
                place.client(proxy=where)
            channel = connect(where, tls=None, timeout=5)
            with channel, pytest.raises(ProtocolError, match="got no answer from the server"):
                greet(channel, other.digest(), "client", "proxy")
                send_question(channel, Question(bytes(TICKET), 1, bytes(-(-input_bits(other, 1) // 8))))
                receive_half(channel, other, 1)
        wait_for(lambda: len(found) == 2)
        assert "program: ours" in found[1].error
        place.check(drawn(program, 1))


def test_too_many_clients(place):
    stalled = [place.client() for _ in range(3)]
    with pytest.raises(ProtocolError, match="busy with 3 clients"):
        place.client()
    for client in stalled:
        client.close()
    wait_for(lambda: len(place.found["desk"]) == 4)
    place.check(drawn(place.program, 1))


def test_server_without_delegation():
    program, weights = compiled(NETWORKS["dense"]())
    server = Server(program, weights, timeout=3)
    with background(server.serve, server.stop, LOOPBACK) as where:
        proxy = Proxy(program, where, timeout=3)
        with background(proxy.serve, proxy.stop, LOOPBACK) as address:
            channel = connect(address, tls=None, timeout=5)
            with channel, pytest.raises(ProtocolError, match="takes no delegation"):
                greet(channel, program.digest(), "client", "proxy")
                send_question(channel, question_of(Place(program, weights)))
                receive_half(channel, program, 1)


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


def test_tls(tmp_path, certified):
    parties = ("server.example", "proxy.example", "client.example")
    made = party_of(tmp_path / "certificates", parties)
    tls = {name: Tls(made.certificates[name], made.keys[name], made.ca) for name in parties}
    server, proxy, client = (tls[name] for name in parties)
    x = drawn(compiled(NETWORKS["dense"]())[0], 2)
    names = {"server_name": "server.example", "proxy_name": "proxy.example"}
    with opened(*compiled(NETWORKS["dense"]()), tls=(server, proxy), server_name="server.example") as place:
        place.check(x, tls=client, **names)
        with pytest.raises(TransportError, match=r"a certificate for server\.example"):
            place.client(tls=client, server=place.proxy, proxy=place.desk, **names)
        with pytest.raises(TransportError):  # another CA
            place.client(tls=certified.garbler)
        with pytest.raises(TransportError, match="greeting|TLS"):
            place.client()
    with opened(*compiled(NETWORKS["dense"]()), tls=(server, server)) as place:  # noqa: SIM117
        with pytest.raises(ProtocolError, match="one certificate for both"):
            place.client(tls=client)
    with opened(*compiled(NETWORKS["dense"]()), tls=(server, proxy), server_name="other.example") as place:
        with place.client(tls=client) as asking, pytest.raises(ProtocolError, match="got no answer"):
            asking.ask(reals(place.program, x))
        wait_for(lambda: place.found["proxy"])
        assert "other.example" in place.found["proxy"][0].error


def party_of(folder, names):
    return party(folder, names=("garbler", "evaluator", *names)).files


def test_plain_beyond_this_machine_is_refused():
    program, _ = compiled(NETWORKS["dense"]())
    with pytest.raises(InputError, match="TLS for an address beyond"):
        DelegatedClient.connect(program, server="192.0.2.1:9", proxy="127.0.0.1:9")
    assert "allow_plain" not in inspect.signature(DelegatedClient.connect).parameters
    with pytest.raises(InputError, match="TLS for an address beyond"), Desk(program).open("0.0.0.0:0"):
        pass
    with pytest.raises(InputError, match="TLS for an address beyond"):
        Proxy(program, "127.0.0.1:9").serve("0.0.0.0:0")
    for wrong in ({"most_clients": 0}, {"most_sessions": 0}):
        with pytest.raises(InputError, match="at least one"):
            Proxy(program, "127.0.0.1:9", **wrong)


@contextlib.contextmanager
def process(*words, said):
    """A command as a real process; what it said after ``said``, and the process."""
    command = [*DEEPSEAL, "private", *map(str, words)]
    with subprocess.Popen(command, env=ENV, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as run:
        found = []
        try:
            while len(found) < len(said):
                line = run.stderr.readline()
                assert line, "it ended"
                found += [re.split(r"[;\s]|: ", line.split(text)[1])[0] for text in said if text in line]
            yield found, run
            if run.poll() is None:
                run.send_signal(signal.SIGINT)
                out, err = run.communicate(timeout=30)
                assert run.returncode == 0, err
                assert ": done" in out
        finally:
            if run.poll() is None:
                run.kill()


def test_three_processes_and_a_proxy_that_is_killed(tmp_path):
    program, weights = compiled(NETWORKS["dense"]())
    program.save(tmp_path / "program")
    weights.save(tmp_path / "program")
    x = drawn(program, 3)
    np.save(tmp_path / "x.npy", reals(program, x))
    labels = decode_output(program, simulate(program, weights, x)).tolist()
    serve = ("serve", tmp_path / "program", "--listen", LOOPBACK, "--delegates", LOOPBACK, "--accept-public")
    public = tmp_path / "program" / "public"

    def ask(desk, proxy):
        words = ("delegate", public, "--server", desk, "--proxy", proxy, "--input", tmp_path / "x.npy", "--json")
        command = [*DEEPSEAL, "private", *map(str, words)]
        return subprocess.run(command, env=ENV, capture_output=True, text=True, check=False, timeout=120)

    victims = []

    def kill(frame):
        if frame.kind == Kind.TABLES and victims:
            victims.pop().kill()

    with process(*serve, said=("constrained clients on ", "serving on ")) as ((desk, server), _):
        with tapped(server, kill) as tap:
            command = ("proxy", public, "--connect", tap.address, "--listen", LOOPBACK)
            with process(*command, said=("proxy on ",)) as ((where,), run):
                done = ask(desk, where)
                assert done.returncode == 0, done.stderr
                assert "secure only if the proxy and the server do not work together" in done.stderr
                record = json.loads(done.stdout)
                assert (record["kind"], record["results"]["label"]) == ("private.delegate", labels)
                assert {"bytes_sent", "bytes_received", "seconds"} <= record["results"].keys()
                victims.append(run)
                done = ask(desk, where)
                assert (done.returncode, done.stdout) == (2, ""), done.stderr
                assert run.wait(10) == -signal.SIGKILL
                assert done.stderr.splitlines()[-1].startswith("deepseal: expected the other party to stay")
        with process("proxy", public, "--connect", server, "--listen", LOOPBACK, said=("proxy on ",)) as ((where,), _):
            done = ask(desk, where)
            assert json.loads(done.stdout)["results"]["label"] == labels, done.stderr


def test_a_client_needs_neither_the_engine_nor_public_key_cryptography(tmp_path, place):
    place.program.save(tmp_path)
    x = drawn(place.program, 1)
    np.save(tmp_path / "x.npy", reals(place.program, x))
    code = (
        "import sys; sys.modules['deepseal._native'] = sys.modules['nacl'] = None\n"
        "import pathlib, numpy as np\n"
        "from deepseal.secure_inference.compile.program import Program\n"
        "from deepseal.secure_inference.roles.delegate import DelegatedClient\n"
        f"program = Program.load(pathlib.Path({str(tmp_path)!r}))\n"
        f"with DelegatedClient.connect(program, server={place.desk!r}, proxy={place.proxy!r}) as client:\n"
        f"    print(client.ask(np.load({str(tmp_path / 'x.npy')!r})).values.tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True, check=False)
    assert done.stdout == f"{place.expected(x).tolist()}\n", done.stderr
