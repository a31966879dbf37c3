"""Circuits between two parties: right results over every transport; one clear error, whatever the other side does."""

from __future__ import annotations

import functools
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from meddling import Dealt, Frame, Relay, meddled
from parties import together
from scipy.stats import norm

from deepseal.errors import InputError, ProtocolError
from deepseal.secure_inference.netlist import Netlist, Op, multiply, read_bristol, record
from deepseal.secure_inference.protocol.circuit import CircuitResult, run_circuit
from deepseal.secure_inference.protocol.extension import TransferSettings
from deepseal.secure_inference.protocol.parties import (
    EvaluatorParty,
    GarblerParty,
    Program,
    Settings,
    start_evaluator,
    start_garbler,
)
from deepseal.secure_inference.transport import Channel, Kind, TransportError, connect, listen, memory_pair

OWN = Path(__file__).parents[1] / "data" / "bristol"
PUBLIC = Path(os.environ.get("DEEPSEAL_DATA", "/nonexistent")) / "bristol"
needs_circuits = pytest.mark.skipif(not PUBLIC.is_dir(), reason="DEEPSEAL_DATA names no folder with bristol/")
SUBTRACT = read_bristol(OWN / "subtract8.txt")
DEALT = Settings(TransferSettings(base=Dealt()))
MASK = 2**64 - 1
MEANINGS = {
    "adder64": lambda x, y: x + y & MASK,
    "sub64": lambda x, y: x - y & MASK,
    "mult64": lambda x, y: x * y & MASK,
    "neg64": lambda x: -x & MASK,
    "zero_equal": lambda x: int(x == 0),
}


def over_memory(netlist, x, y, **options):
    left, right = memory_pair(timeout=20)
    return played(left, right, netlist, x, y, **options)


def played(left, right, netlist, x, y, **options):
    def side(channel, role, values):
        def run():
            with channel:
                return run_circuit(channel, role, netlist, values, **options)

        return run

    return together(side(left, "garbler", x), side(right, "evaluator", y))


def over_tcp(netlist, x, y, tls=(None, None), **options):
    with listen("127.0.0.1:0", tls=tls[0], timeout=20) as listener:
        channels = together(listener.accept, lambda: connect(listener.address, tls=tls[1], timeout=20))
    return played(*channels, netlist, x, y, **options)


def outputs(results):
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result.output for result in results]


class TestResults:
    @needs_circuits
    @pytest.mark.parametrize("name", MEANINGS)
    def test_arithmetic_over_every_transport(self, name, certified):
        netlist, rng = read_bristol(PUBLIC / f"{name}.txt"), random.Random(name)
        files = (certified.garbler, certified.evaluator)
        over_tls = functools.partial(over_tcp, tls=files)
        runs = [(over_memory, 0, DEALT), (over_memory, MASK, DEALT), (over_tcp, 1 << 63, DEALT), (over_tls, 77, DEALT)]
        for run, edge, options in (*runs, (over_memory, rng.getrandbits(64), Settings())):
            for values in ([edge, rng.getrandbits(64)][: len(netlist.inputs)],):
                results = run(netlist, values[:1], values[1:], settings=options)
                expected = (MEANINGS[name](*values),)
                assert outputs(results) == [expected, expected]
                assert {result.and_gates for result in results} == {netlist.and_gates}
                assert results[0].security == "semi-honest"

    @needs_circuits
    def test_aes_against_its_vectors(self, certified):
        netlist = read_bristol(PUBLIC / "aes_128.txt")
        vectors = json.loads((PUBLIC / "vectors.json").read_text())["vectors"]
        files = (certified.garbler, certified.evaluator)
        for vector, run in zip(vectors, (over_memory, lambda *words: over_tcp(*words, tls=files)), strict=True):
            assert vector["circuit"] == "aes_128"
            key, text = (int(word, 16) for word in vector["in"])
            expected = tuple(int(word, 16) for word in vector["out"])
            results = run(netlist, [key], [text])
            assert outputs(results) == [expected, expected]
            tables = results[0].counters.phases["tables"]["bytes_sent"]
            assert 32 * 6400 <= tables < 32 * 6400 + 16 * 10

    @pytest.mark.parametrize("k", [1, 4, 8])
    def test_own_circuits(self, k):
        settings = Settings(TransferSettings(k=k, checks=k == 4))
        every = read_bristol(OWN / "all_gates.txt")
        for netlist in (SUBTRACT, every):
            values = [[5], [7]]
            expected = tuple(netlist.evaluate([5, 7]))
            assert outputs(over_memory(netlist, *values, settings=settings)) == [expected, expected]

    def test_owners_and_readers(self):
        netlist = Netlist((3, 2, 4), (4, 3), [Op.AND, Op.XOR, Op.NOT], [0, 3, 9], [5, 6, 0], [9, 10, 11, 1, 2, 4, 8])
        rng = random.Random(3)
        for owners in (
            ("garbler", "evaluator", "garbler"),
            ("evaluator", "evaluator", "garbler"),
            ("garbler",) * 3,
            ("evaluator",) * 3,
        ):
            for readers in ("both", "garbler", "evaluator"):
                values = [rng.randrange(1 << width) for width in netlist.inputs]
                x, y = (
                    [v for v, o in zip(values, owners, strict=True) if o == role] for role in ("garbler", "evaluator")
                )
                got = outputs(over_memory(netlist, x, y, owners=owners, readers=readers, settings=DEALT))
                expected = tuple(netlist.evaluate(values))
                wanted = [expected if readers in ("both", role) else None for role in ("garbler", "evaluator")]
                assert got == wanted, (owners, readers)

    def test_odd_netlists(self):
        """No inputs, no gates, constants only, and hundreds of input values."""
        constant = Netlist((), (2,), [Op.CONST, Op.CONST], [1, 0], [0, 0], [0, 1])
        assert outputs(over_memory(constant, [], [], settings=DEALT)) == [(1,), (1,)]
        wire = Netlist((1,), (1,), [], [], [], [0])
        assert outputs(over_memory(wire, [1], [], settings=DEALT)) == [(1,), (1,)]
        many = Netlist((1,) * 600, (1,), [Op.AND], [0], [599], [600])
        owners = ("garbler", "evaluator") * 300
        assert outputs(over_memory(many, [1] * 300, [1] * 300, owners=owners, settings=DEALT)) == [(1,), (1,)]

    def test_constants_cost_no_bytes_no_transfer_and_no_round_trip(self):
        plain = Netlist((2, 2), (2,), [Op.AND, Op.XOR], [0, 1], [2, 3], [4, 5])
        ops = [Op.CONST, Op.CONST, Op.AND, Op.XOR, Op.AND, Op.XOR, Op.COPY, Op.AND]
        padded = Netlist((2, 2), (2,), ops, [1, 0, 0, 3, 4, 6, 7, 8], [0, 0, 2, 4, 6, 1, 0, 4], [11, 9])
        results = [over_memory(netlist, [1], [1], settings=DEALT) for netlist in (plain, padded)]
        for one, two in zip(*results, strict=True):
            counted = [
                (c.bytes_sent, c.bytes_received, c.frames_sent, c.frames_received) for c in (one.counters, two.counters)
            ]
            assert counted[0] == counted[1]
            assert one.and_gates == two.and_gates == 1

    def test_wide_layers_agree_with_clear_results(self):
        """A small netlist on 3,000 lanes, twice in one session, and outputs that become inputs."""
        netlist = record(multiply, 4, 4, signed=False)
        bits = np.random.default_rng(6).integers(0, 2, (8, 3000), dtype=np.uint8)
        program = Program(netlist)

        def garble(channel):
            party = start_garbler(channel, program=netlist.digest(), parameters={}, settings=DEALT)
            own, other = party.own_labels(bits[:4].ravel()), party.peer_labels(4 * 3000)
            labels = np.concatenate([own, other]).reshape(8, 3000, 16)
            for _ in range(2):
                labels = party.garble(program, labels)[:8]
            party.reveal(labels)
            return party.learn(labels), party.and_gates

        def evaluate(channel):
            party = start_evaluator(channel, program=netlist.digest(), parameters={}, settings=DEALT)
            labels = np.concatenate([party.peer_labels(4 * 3000), party.own_labels(bits[4:].ravel())]).reshape(
                8, 3000, 16
            )
            for _ in range(2):
                labels = party.evaluate(program, labels)[:8]
            result = party.reveal(labels)
            party.tell(labels)
            return result, party.and_gates

        one, two = meddled(Relay(), garble, evaluate)
        clear = netlist.evaluate_bits(netlist.evaluate_bits(bits.astype(bool))[:8])[:8]
        for result, gates in (one, two):
            assert np.array_equal(result, clear.ravel())
            assert gates == 2 * netlist.and_gates * 3000

    def test_several_sessions_at_once(self):
        values = [(x, 3 * x % 256) for x in range(0, 256, 32)]
        results = together(*(lambda x=x, y=y: over_memory(SUBTRACT, [x], [y]) for x, y in values))
        for (x, y), pair in zip(values, results, strict=True):
            assert outputs(pair) == [tuple(SUBTRACT.evaluate([x, y]))] * 2


class TestWhatTheOtherSees:
    def test_a_garbler_that_may_not_read(self):
        """It receives what it would receive for any input: the same kinds and lengths, and no label of an output."""
        seen = []
        for y in (0, 255):
            relay = Relay()
            results = meddled(relay, *sides([9], [y], readers="evaluator"))
            assert [result.output for result in results] == [None, tuple(SUBTRACT.evaluate([9, y]))]
            seen.append([(frame.kind, len(frame.payload)) for frame in relay.seen["evaluator"]])
        assert seen[0] == seen[1]
        kinds = [kind for kind, _ in seen[0]]
        assert Kind.OUTPUT not in kinds
        assert kinds.count(Kind.OT) == 1

    def test_an_evaluator_that_may_not_read(self):
        """It gets no colour bits; what it can compute, the active labels' colours, is as often 0 as 1 (level 1e-6)."""
        kinds, ones, runs = set(), np.zeros(9), 200
        for x in range(runs):
            relay, held = Relay(), []

            def evaluate(channel, held=held):
                party = start_evaluator(channel, program=SUBTRACT.digest(), parameters={}, settings=DEALT)
                labels = np.concatenate([party.peer_labels(8), party.own_labels(np.zeros(8, np.uint8))]).reshape(
                    16, 1, 16
                )
                held.append(party.evaluate(Program(SUBTRACT), labels))
                party.tell(held[0])

            def garble(channel):
                party = start_garbler(channel, program=SUBTRACT.digest(), parameters={}, settings=DEALT)
                own, other = party.own_labels(np.ones(8, np.uint8)), party.peer_labels(8)
                labels = np.concatenate([own, other]).reshape(16, 1, 16)
                return party.learn(party.garble(Program(SUBTRACT), labels))

            if x < 3:
                got, _ = meddled(relay, garble, evaluate)
                kinds |= {frame.kind for frame in relay.seen["garbler"]}
            else:
                left, right = memory_pair(timeout=20)
                with left, right:
                    got, _ = together(lambda left=left: garble(left), lambda right=right: evaluate(right))
            assert got.tolist() == [1] * 8 + [0]  # 255 - 0, no borrow: the same value each time
            ones += held[0][:, 0, 0] & 1
        assert kinds == {Kind.HELLO, Kind.READY, Kind.INPUT, Kind.TABLES}  # of the garbler
        assert np.abs(ones - runs / 2).max() < norm.isf(1e-6 / 18) * runs**0.5 / 2

    def test_evaluators_trace_never_has_the_offset_or_both_labels(self):
        """Every 16 bytes in a row of all that it receives and computes, in a real session with real base OTs."""
        netlist = record(multiply, 6, 6, signed=False)
        every = Netlist(netlist.inputs, (netlist.wires,), netlist.ops, netlist.a, netlist.b, np.arange(netlist.wires))
        x, y = (np.array([1, 0, 1, 1, 0, 1], np.uint8), np.array([0, 1, 1, 0, 1, 1], np.uint8))
        relay, settings = Relay(), Settings()

        def garble(channel):
            party = start_garbler(channel, program=every.digest(), parameters={}, settings=settings)
            labels = np.concatenate([party.own_labels(x), party.peer_labels(6)]).reshape(12, 1, 16)
            zero = party.garble(Program(every), labels)
            party.reveal(zero)
            return zero, party._garbler.offset(np.zeros(16, np.uint8), np.ones(1, np.uint8))[0]

        def evaluate(channel):
            party = start_evaluator(channel, program=every.digest(), parameters={}, settings=settings)
            labels = np.concatenate([party.peer_labels(6), party.own_labels(y)]).reshape(12, 1, 16)
            active = party.evaluate(Program(every), labels)
            return active, party.reveal(active)

        (zero, delta), (active, bits) = meddled(relay, garble, evaluate)
        assert np.array_equal(active, zero ^ bits[:, None, None] * delta)
        received = b"".join(frame.payload for frame in relay.seen["garbler"])
        trace = received + active.tobytes()
        windows = {trace[i : i + 16] for i in range(len(trace) - 15)}
        assert len(received) > 32 * netlist.and_gates
        for offset in (delta, delta ^ np.eye(1, 16, dtype=np.uint8)[0]):  # with and without its lowest bit
            assert offset.tobytes() not in windows
            assert not [label for label in active[:, 0] if (label ^ offset).tobytes() in windows]
        tables = b"".join(frame.payload for frame in relay.seen["garbler"] if frame.kind == Kind.TABLES)
        blocks = [np.frombuffer(tables[i : i + 16], np.uint8) for i in range(0, len(tables), 16)] + list(active[:, 0])
        known = {block.tobytes() for block in blocks}
        assert not [block for block in blocks if (block ^ delta).tobytes() in known]

    def test_offsets_and_sessions_are_never_the_same(self):
        """200 sessions: all offsets differ, and so do the ids, from which the public keys come."""
        offsets, ids = set(), set()
        for _ in range(200):
            left, right = memory_pair(timeout=20)
            with left, right:
                one, two = together(
                    lambda left=left: start_garbler(left, program="ab" * 32, parameters={}, settings=DEALT),
                    lambda right=right: start_evaluator(right, program="ab" * 32, parameters={}, settings=DEALT),
                )
            assert isinstance(one, GarblerParty) and isinstance(two, EvaluatorParty)
            offsets.add(one._garbler.offset(np.zeros(16, np.uint8), np.ones(1, np.uint8)).tobytes())
            ids.add(one.session_id)
            assert one.session_id == two.session_id
        assert len(offsets) == len(ids) == 200


def sides(x=(9,), y=(5,), **options):
    """Both sides of the subtraction; a call that fails must have closed its channel by itself."""

    def side(role, values):
        def run(channel):
            try:
                return run_circuit(channel, role, SUBTRACT, values, **options)
            except TransportError:
                assert repr(channel) == "<Channel plain, closed>"
                raise

        return run

    return side("garbler", x), side("evaluator", y)


class TestDisagreements:
    def test_both_sides_are_told_both_values(self):
        cases = [
            ({}, {"role": "garbler"}, "two different roles"),
            ({}, {"netlist": read_bristol(OWN / "all_gates.txt")}, "program: ours"),
            (
                {"owners": ("garbler", "evaluator")},
                {"owners": ("evaluator", "garbler")},
                "owners: ours garbler,evaluator",
            ),
            ({"readers": "both"}, {"readers": "evaluator"}, "readers: ours both, theirs evaluator"),
            ({}, {"settings": Settings(TransferSettings(k=4))}, "ot: ours softspoken-2, theirs softspoken-4"),
            ({}, {"settings": Settings(TransferSettings(checks=True))}, "theirs softspoken-2-checked"),
            ({}, {"settings": DEALT}, "base_ot: ours chou-orlandi, theirs dealt-in-tests"),
        ]

        def run(channel, role="evaluator", netlist=SUBTRACT, **options):
            return run_circuit(channel, role, netlist, [5], **options)

        for mine, theirs, text in cases:
            start = time.monotonic()
            one, two = meddled(
                Relay(), lambda c, mine=mine: run(c, role="garbler", **mine), lambda c, theirs=theirs: run(c, **theirs)
            )
            assert time.monotonic() - start < 5
            for error in (one, two):
                assert isinstance(error, ProtocolError), text
                assert "\n" not in str(error)
            assert text in str(one)

    def test_own_arguments_are_checked_before_anything_is_sent(self):
        left, right = memory_pair(timeout=5)
        with left, right:
            for options in (
                {"role": "reader"},
                {"readers": "nobody"},
                {"values": []},
                {"values": [1, 2]},
                {"values": [256]},
                {"values": [-1]},
                {"owners": ("garbler",)},
                {"owners": ("garbler", "nobody")},
            ):
                words = {"role": "garbler", "netlist": SUBTRACT, "values": [7]} | options
                with pytest.raises(InputError) as caught:
                    run_circuit(left, **words)
                assert not isinstance(caught.value, TransportError)
            assert left.counters.bytes_sent == 0
        with pytest.raises(InputError, match="kernels that run here"):
            Settings(kernels="none")
        with pytest.raises(InputError) as caught:
            run_circuit(left, "garbler", SUBTRACT, [0xABCDEF])
        assert "abcdef" not in str(caught.value).lower() and str(0xABCDEF) not in str(caught.value)


# Who lies, in which frame of a kind, how, and what the honest side says.
LIES = [
    ("evaluator", Kind.HELLO, 0, lambda b: b[:20], "hello"),
    ("evaluator", Kind.HELLO, 0, lambda b: b + b" ", "canonical"),
    ("evaluator", Kind.READY, 0, lambda b: bytes(32), "digest of this session"),
    ("evaluator", Kind.BASE_OT, 0, lambda b: bytes(32), "points of ed25519"),
    ("evaluator", Kind.BASE_OT, 0, lambda b: b[:31], "points of ed25519"),
    ("garbler", Kind.BASE_OT, 0, lambda b: b[:-32] + b"\1" + bytes(31), "points of ed25519"),
    ("garbler", Kind.BASE_OT, 0, lambda b: b[:-1], "points of ed25519"),
    ("evaluator", Kind.BASE_OT, 1, lambda b: b[:-16], "right length"),
    ("evaluator", Kind.BASE_OT, 1, lambda b: b[:-1], "right length"),
    ("evaluator", Kind.BASE_OT, 1, lambda b: b"", "right length"),
    ("evaluator", Kind.BASE_OT, 1, lambda b: b + bytes(1 << 16), "at most 65536 bytes"),
    ("garbler", Kind.INPUT, 0, lambda b: b[:15], "seed of 16 bytes"),
    ("garbler", Kind.INPUT, 0, lambda b: b"", "seed of 16 bytes"),
    ("garbler", Kind.INPUT, 0, lambda b: b + b"x", "at most 16 bytes"),
    ("evaluator", Kind.OT, 0, lambda b: b + bytes(16), "at most"),
    ("evaluator", Kind.OT, 0, lambda b: b[:-16], "bytes of corrections"),
    ("evaluator", Kind.OT, 0, lambda b: b[:-1], "bytes of corrections"),
    ("garbler", Kind.TABLES, 0, lambda b: b[:-1], "bytes of tables"),
    ("garbler", Kind.TABLES, 0, lambda b: b"", "bytes of tables"),
    ("garbler", Kind.TABLES, 0, lambda b: b + bytes(32), "bytes of tables"),
    ("garbler", Kind.TABLES, 0, lambda b: b[:-32], "bytes of tables"),
    ("garbler", Kind.TABLES, 0, lambda b: b + bytes(1 << 20), "at most 524288 bytes"),
    ("garbler", Kind.TABLES, 0, lambda b: b[32:] + b[:32], "that it stopped"),  # the garbler finds out
    ("garbler", Kind.OUTPUT, 0, lambda b: b[:-1], "bytes of colour bits"),
    ("garbler", Kind.OUTPUT, 0, lambda b: b + b"x", "at most"),
    ("evaluator", Kind.OUTPUT, 0, lambda b: bytes(len(b)), "active labels of this circuit"),
    ("evaluator", Kind.OUTPUT, 0, lambda b: os.urandom(len(b)), "active labels of this circuit"),
    ("evaluator", Kind.OUTPUT, 0, lambda b: b[16:] + b[:16], "active labels of this circuit"),
    ("evaluator", Kind.OUTPUT, 0, lambda b: bytes([b[0] ^ 1]) + b[1:], "active labels of this circuit"),
    ("evaluator", Kind.OUTPUT, 0, lambda b: b[:-16], "active label for each output"),
    ("evaluator", Kind.OUTPUT, 0, lambda b: b + bytes(16), "at most"),
    ("evaluator", Kind.DONE, 0, lambda b: b"x", "at most 0 bytes"),
    ("garbler", Kind.DONE, 0, lambda b: bytes(1000), "at most 0 bytes"),
]


class TestAttacks:
    @pytest.mark.parametrize("victim", ["garbler", "evaluator"])
    def test_a_replayed_transcript(self, victim):
        """All bytes of the other side of an honest session, played to a fresh party."""
        relay = Relay()
        results = meddled(relay, *sides())
        assert all(isinstance(result, CircuitResult) for result in results)
        other = {"garbler": "evaluator", "evaluator": "garbler"}[victim]
        data = b"".join(frame.packed() for frame in relay.seen[other])
        near, far = socket.socketpair()
        with far, Channel(near, timeout=5) as channel:
            far.sendall(data)
            with pytest.raises(ProtocolError, match="the digest of this session"):
                run_circuit(channel, victim, SUBTRACT, [9])
            assert repr(channel) == "<Channel plain, closed>"

    @pytest.mark.parametrize("sender", ["garbler", "evaluator"])
    @pytest.mark.parametrize("deed", ["drop", "repeat", "swap"])
    def test_frames_lost_repeated_and_swapped(self, sender, deed):
        """At each place; with the numbers they had, and with those that an attacker would give them."""
        honest = Relay()
        meddled(honest, *sides(settings=DEALT))
        count = len(honest.seen[sender])
        assert count >= 6
        noticed = []
        for place in range(count):
            for numbers in (False, True):
                held = []

                def change(side, index, frame, place=place, held=held):
                    if side != sender or index not in (place, place + 1):
                        return [frame]
                    if deed == "swap":
                        held.append(frame)
                        return [] if index == place else held[::-1]
                    if index == place + 1:
                        return [frame]
                    return [frame, frame] if deed == "repeat" else []

                relay = Relay(change, numbers=numbers)
                results = meddled(relay, *sides(settings=DEALT), timeout=0.5)
                last = place == count - 1
                if deed == "repeat" and last:  # more DONE than wanted, once all is done
                    assert all(isinstance(result, CircuitResult) for result in results)
                    continue
                errors = [result for result in results if not isinstance(result, CircuitResult)]
                assert errors, (place, numbers)
                for error in errors:
                    assert isinstance(error, TransportError) and "\n" not in str(error)
                noticed += [error for error in errors if "lost, repeated or swapped" in str(error)]
                if deed == "repeat" and not numbers:
                    assert noticed
                    noticed.clear()
        assert noticed or deed == "repeat"  # elsewhere the sender waits for an answer, and both for too long

    @pytest.mark.parametrize(
        "kinds", [(Kind.HELLO, Kind.READY, Kind.BASE_OT), (Kind.INPUT, Kind.OT, Kind.TABLES), (Kind.OUTPUT, Kind.DONE)]
    )
    def test_a_lie_at_each_step(self, kinds):
        tested = [case for case in LIES if case[1] in kinds]
        assert len(tested) >= 8
        for sender, kind, nth, lie, text in tested:
            victim, count = {"garbler": 1, "evaluator": 0}[sender], [0]

            def change(side, _index, frame, sender=sender, kind=kind, nth=nth, lie=lie, count=count):
                if side == sender and frame.kind == kind:
                    count[0] += 1
                    if count[0] == nth + 1:
                        return [Frame(kind, lie(frame.payload), 0)]
                return [frame]

            start = time.monotonic()
            results = meddled(Relay(change), *sides(), timeout=5)
            assert time.monotonic() - start < 4.5
            error = results[victim]
            assert isinstance(error, ProtocolError) and text in str(error), (sender, kind, text, error)
            assert "\n" not in str(error) and str(error).isprintable()
            assert isinstance(results[1 - victim], TransportError | CircuitResult)

    def test_frames_that_nobody_asked_for(self):
        """One more frame of each kind, before each frame of a session."""
        kinds = [kind for kind in Kind if kind not in (Kind.PING, Kind.REFUSED)]
        for sender in ("garbler", "evaluator"):
            honest = Relay()
            meddled(honest, *sides(settings=DEALT))
            places = len(honest.seen[sender])
            for place in range(places):
                kind = kinds[place % len(kinds)]

                def change(side, index, frame, place=place, kind=kind, sender=sender):
                    extra = [Frame(kind, b"extra", 0)] if (side, index) == (sender, place) else []
                    return [*extra, frame]

                results = meddled(Relay(change), *sides(settings=DEALT), timeout=2)
                victim = results[sender == "garbler"]
                assert isinstance(victim, ProtocolError | ValueError), (sender, place, kind, victim)

    def test_pings_are_harmless_and_a_refusal_ends_it(self):
        def pinging(_side, _index, frame):
            return [Frame(Kind.PING, b"", 0)] * 3 + [frame]

        assert all(isinstance(result, CircuitResult) for result in meddled(Relay(pinging), *sides(settings=DEALT)))

        def refusing(side, index, frame):
            return [Frame(Kind.REFUSED, b"no \x1b[31m more", 0)] if (side, index) == ("garbler", 4) else [frame]

        error = meddled(Relay(refusing), *sides(settings=DEALT), timeout=2)[1]
        assert isinstance(error, ProtocolError) and "that it stopped: no ?[31m more" in str(error)


# The command line, and two commands more that compute for hours: alone, and between two processes.
COMMANDS = """
import sys
from deepseal.apps.cli import app, main
from deepseal.secure_inference.protocol import bench

@app.command()
def memory():
    bench.bench_memory("portable", seconds=3600)

@app.command()
def pair():
    bench.bench_pair(gates=10**14)

sys.argv = ["deepseal", *sys.argv[1:]]
main()
"""


def deepseal(*words):
    command = [sys.executable, "-c", COMMANDS, *map(str, words)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )


def interrupted(process):
    """Send Ctrl-C: seconds to the end, and what was written to stderr."""
    start = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does
    out, err = process.communicate(timeout=30)
    seconds = time.monotonic() - start
    assert (process.returncode, out) == (130, "")
    assert "Traceback" not in err and "Error" not in err
    assert len(err.splitlines()) <= 1
    return seconds


class TestInterrupts:
    def test_a_party_that_waits_for_the_other(self):
        with deepseal(
            "private", "circuit", "run", OWN / "subtract8.txt", "--role", "garbler", "--listen", "0", "--input", "5"
        ) as process:
            assert "waiting for the other party on" in process.stderr.readline()
            assert interrupted(process) < 2

    @pytest.mark.parametrize("role", ["garbler", "evaluator"])
    def test_a_party_whose_peer_stalls_in_the_session(self, role):
        other = {"garbler": "evaluator", "evaluator": "garbler"}[role]
        with listen("127.0.0.1:0", tls=None, timeout=20) as listener:
            words = ["--role", role, "--connect", listener.address, "--input", "5"]
            with (
                deepseal("private", "circuit", "run", OWN / "subtract8.txt", *words) as process,
                listener.accept() as channel,
            ):
                start = start_garbler if other == "garbler" else start_evaluator
                parameters = {"owners": "garbler,evaluator", "readers": "both"}
                start(channel, program=SUBTRACT.digest(), parameters=parameters, settings=Settings())
                time.sleep(0.3)
                assert interrupted(process) < 2
                with pytest.raises(TransportError):
                    channel.receive(Kind.INPUT, at_most=16)
                    channel.receive(Kind.DONE, at_most=0)

    @pytest.mark.parametrize("phase", ["memory", "pair"])
    def test_a_party_that_computes(self, phase):
        with deepseal(phase) as process:
            deadline = time.monotonic() + 60
            while not computing(process.pid, children=phase == "pair"):
                assert process.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
            time.sleep(1)
            descendants = children_of(process.pid)
            assert interrupted(process) < 2
            for pid in descendants:  # and nothing is left behind
                deadline = time.monotonic() + 5
                while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline:
                    time.sleep(0.05)
                assert not Path(f"/proc/{pid}").exists()


def children_of(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


def computing(pid, *, children):
    """Whether the engine is loaded, and the second process too, if there is to be one."""
    every = [str(pid), *children_of(pid)]
    loaded = all("_native" in Path(f"/proc/{each}/maps").read_text() for each in every)
    return loaded and len(every) == 1 + children
