"""A circuit between two parties: right results, and what each side sees."""

from __future__ import annotations

import functools
import json
import random

import numpy as np
import pytest
from circuits import DEALT, MASK, MEANINGS, OWN, PUBLIC, SUBTRACT, needs_circuits, outputs, over_memory, over_tcp, sides
from meddling import Relay, meddled
from parties import together
from scipy.stats import norm

from deepseal.secure_inference.netlist import Netlist, Op, multiply, read_bristol, record
from deepseal.secure_inference.protocol.extension import TransferSettings
from deepseal.secure_inference.protocol.parties import (
    EvaluatorParty,
    GarblerParty,
    Program,
    Settings,
    start_evaluator,
    start_garbler,
)
from deepseal.secure_inference.transport import Kind, memory_pair


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
