"""A server and its clients: many at once, some of them broken; the server lives."""

import contextlib
import datetime
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from test_mixed import NETWORKS, compiled, drawn

import deepseal.secure_inference.roles.client
from deepseal.errors import InputError, ProtocolError, TransportError
from deepseal.secure_inference.compile.simulate import simulate
from deepseal.secure_inference.roles.client import Client
from deepseal.secure_inference.roles.modes import PROTOCOLS, client_ready
from deepseal.secure_inference.roles.server import Server
from deepseal.secure_inference.transport import Tls, connect
from deepseal.secure_inference.transport.certificates import make_certificates


@contextlib.contextmanager
def serving(where="127.0.0.1:0", tls=None, **options):
    """A running server: its address, program, weights, and what it reports."""
    program, weights = compiled(NETWORKS["dense"]())
    found, up = [], threading.Event()
    address = []
    server = Server(program, weights, **{"most_clients": 3, "timeout": 3.0, "report": found.append, **options})

    def ready(where):
        address.append(where)
        up.set()

    thread = threading.Thread(target=server.serve, args=(where,), kwargs={"ready": ready, "tls": tls})
    thread.start()
    assert up.wait(10)
    try:
        yield address[0], program, weights, found
    finally:
        server.stop()
        thread.join(10)
    assert not thread.is_alive()


@pytest.fixture
def served():
    with serving() as running:
        yield running


def reals(program, integers):
    """Samples in data space that encode to these integers."""
    encoding, fraction = program.encoding, program.wires[program.input].number.fraction
    x = integers * encoding.unit / 2.0**fraction
    if encoding.std is not None:
        x = x * encoding.std[0]
    return x + (encoding.mean[0] if encoding.mean is not None else 0.0)


def wait_for(condition, seconds=10):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_answers(protocol):
    with serving(protocol=protocol) as (address, program, weights, found):
        x = drawn(program, 3)
        with Client.connect(program, address, protocol=protocol) as client:
            for _ in range(2):
                answer = client.ask(reals(program, x))
                assert np.array_equal(answer.values, simulate(program, weights, x).reshape(-1))
                assert answer.bytes_sent + answer.bytes_received > 1000
        other = PROTOCOLS[PROTOCOLS.index(protocol) - 1]
        with pytest.raises(ProtocolError, match="protocol|role"):
            Client.connect(program, address, protocol=other)
        wait_for(lambda: len(found) == 2)
        assert (found[0].questions, found[0].error) == (2, None)


def test_many_samples_are_several_questions(monkeypatch):
    monkeypatch.setattr(deepseal.secure_inference.roles.client, "MOST", 1)
    with serving() as (address, program, weights, found):
        x = drawn(program, 5)
        with Client.connect(program, address) as client:
            answer = client.ask(reals(program, x))
            assert np.array_equal(answer.values, simulate(program, weights, x).reshape(-1))
            client.prepare(2)
            assert len(client.ask(reals(program, x[:2])).values) == 2
            assert len(client.ask(reals(program, x[:3])).values) == 3
        wait_for(lambda: found)
        assert found[0].questions == 5 + 1 + 3


def test_quota_in_the_garbled_mode():
    with serving(protocol="yao", most_samples=2) as (address, program, _, _):
        x = reals(program, drawn(program, 1))
        with (
            pytest.raises(ProtocolError, match="used its share"),
            Client.connect(program, address, protocol="yao") as client,
        ):
            for _ in range(3):
                client.ask(x)


def test_protocols_that_there_are_not():
    program, weights = compiled(NETWORKS["dense"]())
    with pytest.raises(InputError, match="mixed, yao, yao-client"):
        Server(program, weights, protocol="gmw")
    with pytest.raises(InputError, match="made ready for mixed"):
        client_ready(client_ready(program, "yao"), "mixed")


def test_many_at_once_and_one_too_many(served):
    address, program, weights, found = served
    x = drawn(program, 1)
    clients = [Client.connect(program, address) for _ in range(3)]
    with pytest.raises(ProtocolError, match="busy with 3 clients"):
        Client.connect(program, address)
    for client in reversed(clients):
        assert np.array_equal(client.ask(reals(program, x)).values, simulate(program, weights, x).reshape(-1))
        client.close()
    wait_for(lambda: len(found) == 4)
    assert sum(one.error is None for one in found) == 3


def test_broken_clients_do_not_end_it(served):
    address, program, weights, found = served
    host, port = address.rsplit(":", 1)
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(100)):  # hangs up, a browser, zeros
        with socket.create_connection((host, int(port))) as sock:
            sock.sendall(data)
    wait_for(lambda: len(found) == 3)  # each takes a place until it is found out
    leaves = Client.connect(program, address)
    leaves._channel.refuse("gone in the middle")
    wait_for(lambda: len(found) == 4)
    other, _ = compiled(NETWORKS["tanh"]())
    with pytest.raises(ProtocolError, match="program"):
        Client.connect(other, address)
    stalls = connect(address, tls=None, timeout=5)  # says nothing
    wait_for(lambda: len(found) == 6)
    stalls.close()
    assert all(one.error for one in found)
    x = drawn(program, 1)
    with Client.connect(program, address) as client:
        assert np.array_equal(client.ask(reals(program, x)).values, simulate(program, weights, x).reshape(-1))


def test_a_server_that_goes_away(served):
    address, program, _, _ = served
    client = Client.connect(program, address)
    client._channel._sock.shutdown(socket.SHUT_RDWR)  # as when its machine dies
    with pytest.raises(TransportError), client:
        client.ask(reals(program, drawn(program, 1)))


def test_a_hundred_clients_at_once():
    """Each gets the right answer or one line that says why not, and then the server has places again."""
    with serving(most_clients=16, timeout=20.0) as (address, program, weights, found):
        x, outcomes = drawn(program, 1), []
        wanted = simulate(program, weights, x).reshape(-1)

        def ask():
            try:
                with Client.connect(program, address, timeout=20.0) as client:
                    outcomes.append(np.array_equal(client.ask(reals(program, x)).values, wanted))
            except ProtocolError as error:
                outcomes.append("busy with 16 clients" in str(error) and str(error).count("\n") == 0)

        threads = [threading.Thread(target=ask) for _ in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert outcomes == [True] * 100
        wait_for(lambda: len(found) == 100, 20)
        answered = sum(one.questions for one in found)
        assert answered >= 16
        assert sum(one.error is None for one in found) == answered
        with Client.connect(program, address) as client:
            assert np.array_equal(client.ask(reals(program, x)).values, wanted)


CLIENT = """
import sys
from pathlib import Path
import numpy as np
from deepseal.secure_inference.compile.program import Program
from deepseal.secure_inference.roles.client import Client
with Client.connect(Program.load(Path(sys.argv[1])), sys.argv[2]) as client:
    client.prepare()
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_a_client_that_is_killed(served, tmp_path):
    address, program, weights, found = served
    program.save(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(tmp_path), address], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout.readline() == b"ready\n"
        child.kill()
    wait_for(lambda: found)
    assert "expected the other party to stay" in found[0].error
    x = drawn(program, 1)
    with Client.connect(program, address) as client:
        assert np.array_equal(client.ask(reals(program, x)).values, simulate(program, weights, x).reshape(-1))


def test_a_server_that_is_restarted():
    """The old session is over, with what was prepared in it; a new one works."""
    with serving() as (address, program, weights, _):
        x = reals(program, drawn(program, 1))
        client = Client.connect(program, address)
        client.prepare()
        client._channel._sock.shutdown(socket.SHUT_RDWR)
    with serving(address), pytest.raises(TransportError, match="found"), client:
        client.ask(x)
    assert client._session.ahead == ()
    with serving(address), Client.connect(program, address) as again:
        assert np.array_equal(again.ask(x).values, simulate(program, weights, drawn(program, 1)).reshape(-1))


def test_each_certificate_has_its_share_of_samples(tmp_path):
    made = make_certificates(tmp_path, ("server", "one", "two"))
    tls = {name: Tls(made.certificates[name], made.keys[name], made.ca) for name in made.certificates}
    with serving(tls=tls["server"], most_samples=3) as (address, program, _, _):
        x = reals(program, drawn(program, 2))
        with Client.connect(program, address, tls=tls["one"]) as client:
            client.ask(x)
        with (
            pytest.raises(ProtocolError, match="used its share"),
            Client.connect(program, address, tls=tls["one"]) as client,
        ):
            client.ask(x[:1])
            client.prepare()
        with Client.connect(program, address, tls=tls["two"]) as client:
            client.ask(x)


def test_callers_that_say_nothing_keep_nobody_waiting(tmp_path):
    """Their TLS greeting is waited for apart from the others'."""
    made = make_certificates(tmp_path, ("server", "client"))
    tls = {name: Tls(made.certificates[name], made.keys[name], made.ca) for name in made.certificates}
    with serving(tls=tls["server"], timeout=8.0) as (address, program, _, found):
        host, port = address.rsplit(":", 1)
        with contextlib.ExitStack() as stack:
            for _ in range(5):
                stack.enter_context(socket.create_connection((host, int(port))))
            with Client.connect(program, address, tls=tls["client"]) as client:
                client.ask(reals(program, drawn(program, 1)))
            wait_for(lambda: found, 5)
            assert (found[0].questions, found[0].error) == (1, None), "before any of the silent ones was given up"
        wait_for(lambda: len(found) == 6)


def test_a_session_has_its_share_of_questions():
    with serving(most_questions=2) as (address, program, _, found):
        x = reals(program, drawn(program, 1))
        with pytest.raises(TransportError, match="may ask 2 questions"), Client.connect(program, address) as client:
            for _ in range(3):
                client.ask(x)
        wait_for(lambda: found)
        assert found[0].questions == 2


@pytest.mark.parametrize("who", ["expired", "foreign", "none"])
def test_certificates_that_do_not_count(tmp_path, who):
    past = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=30)
    made = make_certificates(
        tmp_path / "ours", ("server", "client"), **({"now": past, "days": 2} if who == "expired" else {})
    )
    other = make_certificates(tmp_path / "theirs", ("client",)) if who == "foreign" else made
    tls = {
        name: Tls(found.certificates[name], found.keys[name], made.ca)
        for name, found in (("server", made), ("client", other))
    }
    with serving(tls=tls["server"]) as (address, program, _, found):
        with pytest.raises(TransportError, match="TLS|certificate"):
            Client.connect(program, address, tls=None if who == "none" else tls["client"])
        wait_for(lambda: found)
        assert "certificate" in found[0].error or "TLS" in found[0].error


def test_weights_of_another_program():
    (program, _), (_, weights) = compiled(NETWORKS["dense"]()), compiled(NETWORKS["tanh"]())
    with pytest.raises(InputError, match="weights of"):
        Server(program, weights)
