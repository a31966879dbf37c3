"""The handshake: a session starts on both sides or on none, and both sides learn why."""

from __future__ import annotations

import hashlib
import json
import random
import threading

import pytest
from parties import together

from deepseal.errors import InputError, ProtocolError, TransportError
from deepseal.secure_inference.transport import Channel, Hello, Kind, Session, connect, handshake, listen, memory_pair
from deepseal.secure_inference.transport.handshake import HELLO_LIMIT, parse_hello

PROGRAM, OTHER = "ab" * 32, "cd" * 32


def hello(role="garbler", program=PROGRAM, engine="native", number="fixed16.12", **parameters):
    return Hello(role, program, engine, number, parameters or {"batch": 8, "order": "depth"})


def meet(ours, theirs, *, timeout=5.0):
    left, right = memory_pair(timeout=timeout)
    with left, right:
        return together(lambda: handshake(left, ours), lambda: handshake(right, theirs))


def framed(*items):
    return hashlib.sha256(b"".join(len(item).to_bytes(8, "little") + item for item in items)).digest()


def test_both_sides_get_the_same_session():
    one, two = meet(hello(), hello("evaluator"))
    assert isinstance(one, Session) and isinstance(two, Session)
    assert one.id == two.id and len(one.id) == 32
    assert (one.peer, two.peer) == (hello("evaluator"), hello())
    again, _ = meet(hello(), hello("evaluator"))
    assert again.id != one.id


def test_session_is_the_documented_hash_over_tls(certified):
    nonces = {"garbler": bytes(range(32)), "evaluator": bytes(range(32, 64))}
    with listen("0", tls=certified.garbler, timeout=5) as listener:
        outer, inner = together(
            lambda: connect(listener.address, tls=certified.evaluator, timeout=5), lambda: listener.accept()
        )
    with outer, inner:
        one, two = together(
            lambda: handshake(outer, hello("evaluator"), random=lambda n: nonces["evaluator"]),
            lambda: handshake(inner, hello(), random=lambda n: nonces["garbler"]),
        )
        certificates = [hashlib.sha256(c).digest() for c in (inner.own_certificate, outer.own_certificate)]
        assert inner.peer_certificate == outer.own_certificate != inner.own_certificate == outer.peer_certificate
    expected = framed(
        b"deepseal session 1", *nonces.values(), hello().canonical(), hello("evaluator").canonical(), *certificates
    )
    assert one.id == two.id == expected


@pytest.mark.parametrize(
    ("theirs", "values"),
    [
        (hello("evaluator", program=OTHER), (PROGRAM, OTHER)),
        (hello("evaluator", engine="emp"), ("native", "emp")),
        (hello("evaluator", number="fixed8.4"), ("fixed16.12", "fixed8.4")),
        (hello("evaluator", number=None), ("fixed16.12", "None")),
        (hello("evaluator", batch=9, order="depth"), ("batch", "8", "9")),
        (hello("evaluator", batch=8), ("order", "depth", "none")),
        (hello("evaluator", batch=8, order="depth", extra="x"), ("extra", "none", "x")),
        (hello("garbler"), ("role", "garbler")),
    ],
)
def test_a_difference_is_refused_on_both_sides_with_both_values(theirs, values):
    errors = meet(hello(), theirs)
    for error in errors:
        assert isinstance(error, ProtocolError), error
        assert all(value in str(error) for value in values), error
        assert "\n" not in str(error)
    if theirs.role == "evaluator":
        assert "ours" in str(errors[0]) and "theirs" in str(errors[0])


def test_ours_and_theirs_are_right_for_each_reader():
    one, two = meet(hello(engine="left"), hello("evaluator", engine="right"))
    assert "engine: ours left, theirs right" in str(one)
    assert "engine: ours right, theirs left" in str(two)


def test_reason_of_the_other_side_is_in_our_words():
    """The garbler finds the difference first; the evaluator has not read anything yet."""
    left, right = memory_pair(timeout=2)
    with left, right:
        right.send(Kind.HELLO, bytes(32) + hello("evaluator", engine="right").canonical())
        right.flush()
        with pytest.raises(ProtocolError, match="ours left, theirs right"):
            handshake(left, hello(engine="left"))
        right.receive(Kind.HELLO, at_most=HELLO_LIMIT)
        with pytest.raises(ProtocolError, match="stopped: .*ours right, theirs left"):
            right.receive(Kind.READY, at_most=32)


def test_many_differences_stay_one_short_line():
    wide = {f"name{index}": index for index in range(200)}
    error, _ = meet(hello(**wide), hello("evaluator", **{name: value + 1 for name, value in wide.items()}))
    assert "196 more differences" in str(error)
    assert len(str(error)) < 1000


def test_control_characters_of_the_peer_do_not_reach_the_terminal():
    text = hello("evaluator", engine="emp").canonical().replace(b'"emp"', b'"\\u001b[31m\\u0007"')
    left, right = memory_pair(timeout=2)
    with left, right:
        right.send(Kind.HELLO, bytes(32) + text)
        right.flush()
        with pytest.raises(ProtocolError) as caught:
            handshake(left, hello())
    assert str(caught.value).isprintable()


class Echo:
    """A peer that sends back whatever it gets."""

    def __init__(self, channel: Channel) -> None:
        self.sock = channel._sock
        self.thread = threading.Thread(target=self.run, daemon=True)
        self.thread.start()

    def run(self) -> None:
        try:
            while data := self.sock.recv(65536):
                self.sock.sendall(data)
        except OSError:
            pass


def test_reflection_is_refused():
    left, right = memory_pair(timeout=2)
    with left:
        echo = Echo(right)
        with pytest.raises(ProtocolError, match="sent back"):
            handshake(left, hello())
    echo.thread.join(5)
    right.close()


def test_a_replayed_transcript_is_refused():
    """All that an evaluator once sent does not start a second session."""
    sent = bytearray()
    left, right = memory_pair(timeout=2)
    with left, right:
        put = right._put
        right._put = lambda body: (sent.extend(right._pending), sent.extend(body), put(body))
        assert all(
            isinstance(end, Session)
            for end in together(lambda: handshake(left, hello()), lambda: handshake(right, hello("evaluator")))
        )
    left, right = memory_pair(timeout=2)
    with left, right:
        right._sock.sendall(sent)
        with pytest.raises(ProtocolError, match="digest of this session"):
            handshake(left, hello())


def canonical(**changes):
    content = json.loads(hello("evaluator").canonical()) | changes
    return json.dumps(content, sort_keys=True, separators=(",", ":")).encode()


BAD = {
    "empty": b"",
    "text": b"hello",
    "list": b"[]",
    "deep": b"[" * 30_000,
    "deep objects": b'{"a":' * 10_000 + b"1" + b"}" * 10_000,
    "number": b"1" * 60_000,
    "huge number": canonical().replace(b'"batch":8', b'"batch":' + b"9" * 50_000),
    "float": canonical(parameters={"batch": 8.5}),
    "exponent": canonical().replace(b'"batch":8', b'"batch":8e99'),
    "NaN": canonical().replace(b'"batch":8', b'"batch":NaN'),
    "true": canonical(parameters={"batch": True}),
    "null": canonical(parameters={"batch": None}),
    "nested": canonical(parameters={"batch": {}}),
    "65 bits": canonical(parameters={"batch": 2**64}),
    "unknown field": canonical(extra=1),
    "missing field": canonical().replace(b'"engine":"native",', b""),
    "twice": canonical().replace(b'"engine":"native",', b'"engine":"native","engine":"native",'),
    "spaces": canonical().replace(b",", b", "),
    "order": b'{"version":1,' + canonical().replace(b',"version":1', b"")[1:],
    "not UTF-8": canonical().replace(b"native", b"nat\xffve"),
    "surrogate": canonical(engine="\ud800"),
    "line break": canonical(engine="a\nb"),
    "role": canonical(role="judge"),
    "role type": canonical(role=["garbler"]),
    "program": canonical(program="AB" * 32),
    "program type": canonical(program=7),
    "number type": canonical(number=7),
    "parameters type": canonical(parameters=[]),
    "parameter name": canonical(parameters={"a b": 1}),
    "long engine": canonical(engine="x" * 201),
    "version type": canonical(version="1"),
    "version true": canonical(version=True),
    "too large": canonical(parameters={f"n{index}": "x" * 4000 for index in range(20)}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_hello_that_is_not_strict_is_refused(name):
    with pytest.raises(ProtocolError) as caught:
        parse_hello(BAD[name])
    assert str(caught.value).isprintable() and len(str(caught.value)) < 500


def test_another_version_is_named():
    with pytest.raises(ProtocolError, match="version: ours 1, theirs 2"):
        parse_hello(canonical(version=2, new_field=3))


def test_mutated_hellos_never_crash():
    rng, text = random.Random(3), canonical()
    for _ in range(5000):
        data = bytearray(text)
        for _ in range(rng.randint(1, 3)):
            place = rng.randrange(len(data))
            choice = rng.randrange(4)
            if choice == 0:
                data[place] ^= 1 << rng.randrange(8)
            elif choice == 1:
                del data[place : place + rng.randint(1, 9)]
            elif choice == 2:
                data[place:place] = rng.choice([b"{", b"[", b'"', b"\\u0000", b"1e9", b"null", rng.randbytes(3)])
            else:
                data = data[:place] + data[place - 5 :]
        try:
            assert parse_hello(bytes(data)).canonical() == bytes(data)
        except ProtocolError as error:
            assert str(error).isprintable()


@pytest.mark.parametrize("bad", [{"role": "judge"}, {"program": "x"}, {"engine": ""}, {"number": "a\n"}, {"a b": 1}])
def test_own_mistakes_are_found_before_anything_is_sent(bad):
    with pytest.raises(InputError):
        hello(**bad)


def test_largest_hello_passes_in_both_directions():
    wide = {f"n{index}": "x" * 4000 for index in range(16)}
    assert HELLO_LIMIT - 2000 < len(hello(**wide).canonical()) <= HELLO_LIMIT
    assert all(isinstance(end, Session) for end in meet(hello(**wide), hello("evaluator", **wide)))


def test_a_trickle_cannot_stretch_the_handshake():
    left, right = memory_pair(timeout=0.6)
    done = threading.Event()

    def trickle():
        data = b"\xd5\x5e\x01\x00" + bytes([200, 0, 0, 0]) + bytes(200)
        for byte in data:
            if done.wait(0.1):
                return
            right._sock.sendall(bytes([byte]))

    thread = threading.Thread(target=trickle, daemon=True)
    thread.start()
    with left, right, pytest.raises(TransportError, match="within 0.6 s"):
        try:
            handshake(left, hello())
        finally:
            done.set()
            thread.join(5)


def test_hello_is_frozen_and_copies_its_parameters():
    parameters = {"batch": 1}
    made = Hello("garbler", PROGRAM, "native", None, parameters)
    parameters["batch"] = 2
    assert made.parameters["batch"] == 1
    with pytest.raises(TypeError):
        made.parameters["batch"] = 3
