"""Delegation: questions that are refused, and tickets that are used twice or made up."""

from __future__ import annotations

import time

import numpy as np
import pytest
from delegations import LOOPBACK, Place, background, opened, question_of
from test_mixed import NETWORKS, compiled, drawn
from test_server import reals, wait_for

from deepseal.errors import InputError, ProtocolError
from deepseal.secure_inference.roles.client import Client
from deepseal.secure_inference.roles.halves import TICKET, Question, greet, input_bits, receive_half, send_question
from deepseal.secure_inference.roles.proxy import Proxy
from deepseal.secure_inference.roles.server import Server
from deepseal.secure_inference.transport import Kind, connect


def ask_with_an_unknown_ticket(place):
    server, proxy = place.channels()
    with server:
        with pytest.raises(ProtocolError, match="does not know this ticket"), proxy:
            send_question(proxy, question_of(place))
            receive_half(proxy, place.program, 1)
        server.refuse("done")


def test_unknown_ticket(place):
    ask_with_an_unknown_ticket(place)
    place.check(drawn(place.program, 2))
    assert [one.error for one in place.found["server"]] == []  # the same session served both


def test_made_up_tickets_cost_no_quota():
    """Only questions that are answered count; then the proxy's clients are told that the share is used."""
    with opened(*compiled(NETWORKS["dense"]()), most_samples=3) as place:
        for _ in range(5):
            ask_with_an_unknown_ticket(place)
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
