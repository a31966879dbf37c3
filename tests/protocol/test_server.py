"""A server and its clients: many at once, some of them broken; the server lives."""

import socket
import threading
import time

import numpy as np
import pytest
from test_mixed import NETWORKS, compiled, drawn

from deepseal.errors import InputError, ProtocolError, TransportError
from deepseal.secure_inference.compile.simulate import simulate
from deepseal.secure_inference.roles.client import Client
from deepseal.secure_inference.roles.server import Server
from deepseal.secure_inference.transport import connect


@pytest.fixture
def served():
    """A running server: its address, program, weights, and what it reports."""
    program, weights = compiled(NETWORKS["dense"]())
    found, up = [], threading.Event()
    address = []
    server = Server(program, weights, most_clients=3, timeout=3.0, report=found.append)

    def ready(where):
        address.append(where)
        up.set()

    thread = threading.Thread(target=server.serve, args=("127.0.0.1:0",), kwargs={"ready": ready})
    thread.start()
    assert up.wait(10)
    yield address[0], program, weights, found
    server.stop()
    thread.join(10)
    assert not thread.is_alive()


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


def test_answers(served):
    address, program, weights, found = served
    x = drawn(program, 3)
    with Client.connect(program, address) as client:
        for _ in range(2):
            answer = client.ask(reals(program, x))
            assert np.array_equal(answer.values, simulate(program, weights, x).reshape(-1))
            assert answer.bytes_received > 1000
    wait_for(lambda: found)
    assert (found[0].questions, found[0].error) == (2, None)


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


def test_weights_of_another_program():
    (program, _), (_, weights) = compiled(NETWORKS["dense"]()), compiled(NETWORKS["tanh"]())
    with pytest.raises(InputError, match="weights of"):
        Server(program, weights)
