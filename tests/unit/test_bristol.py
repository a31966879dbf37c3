"""Bristol Fashion files: reading, writing, and refusing."""

from __future__ import annotations

import json
import os
import random
import resource
import time
from pathlib import Path

import numpy as np
import pytest
from drawn_netlists import clear, netlists
from hypothesis import given, settings
from hypothesis import strategies as st

from deepseal.errors import InputError
from deepseal.secure_inference.netlist import Netlist, Op, read_bristol, record, subtract, write_bristol

OWN = Path(__file__).parents[1] / "data" / "bristol"
ADDER = "5 8\n3 1 1 1\n1 2\n\n2 1 0 2 3 XOR\n2 1 1 2 4 XOR\n2 1 3 1 6 XOR\n2 1 3 4 5 AND\n2 1 5 2 7 XOR\n"


def public(name: str) -> Path:
    """One of the public circuits, where there are any."""
    folder = os.environ.get("DEEPSEAL_DATA")
    if not folder:
        pytest.skip("no public circuits here: DEEPSEAL_DATA is not set")
    path = Path(folder) / "bristol" / name
    if not path.exists():
        pytest.skip(f"no {path}")
    return path


class TestReading:
    def test_all_kinds_of_gates(self):
        netlist = read_bristol(OWN / "all_gates.txt")
        assert netlist.inputs == (3, 3)
        assert netlist.outputs == (4, 3)
        assert [Op(op).name for op in netlist.ops] == "CONST NOT XOR COPY AND AND COPY AND CONST".split()
        for x in range(8):
            for y in range(8):
                bit = [x >> i & 1 for i in range(3)] + [y >> i & 1 for i in range(3)]
                not2 = 1 - bit[2]
                first = [bit[0] ^ bit[3], bit[0] ^ bit[3], bit[0] & bit[3], not2 & 1]
                second = [bit[4], bit[1] & bit[5], 0]
                words = [sum(b << i for i, b in enumerate(bits)) for bits in (first, second)]
                assert netlist.evaluate([x, y]) == words

    def test_our_own_file(self):
        netlist = read_bristol(OWN / "subtract8.txt")
        assert netlist.inputs == (8, 8)
        assert netlist.outputs == (9,)
        for x, y in ((0, 0), (255, 1), (1, 255), (77, 78)):
            assert netlist.evaluate([x, y]) == [(x - y) % 256 | (x < y) << 8]
        assert (OWN / "subtract8.txt").read_text() == write_bristol(record(subtract, 8, 8, borrow_out=True))

    @pytest.mark.parametrize(
        "text",
        [
            ADDER.replace("\n", "\r\n"),
            ADDER.replace("\n", " \n"),
            ADDER.replace("\n", "\n\n"),
            "\n \n" + ADDER,
            ADDER.rstrip(),
            ADDER + "\n\n \n",
            ADDER.replace(" ", "\t  "),
        ],
    )
    def test_blanks_do_not_matter(self, text):
        assert read_bristol(text) == read_bristol(ADDER)

    def test_outputs_may_be_inputs(self):
        assert read_bristol("0 4\n1 4\n1 2\n").evaluate([0b1101]) == [0b11]

    def test_without_inputs(self):
        assert read_bristol("2 2\n0\n1 2\n1 1 1 1 EQ\n1 1 0 0 EQ\n").evaluate([]) == [2]


class TestWriting:
    @given(netlists(), st.data())
    @settings(max_examples=100, deadline=None)
    def test_round_trip(self, netlist, data):
        again = read_bristol(write_bristol(netlist))
        assert again.inputs == netlist.inputs
        assert again.outputs == netlist.outputs
        bits = data.draw(st.lists(st.booleans(), min_size=netlist.input_bits, max_size=netlist.input_bits))
        assert clear(again, bits) == clear(netlist, bits)
        assert again.and_gates == netlist.and_gates
        assert read_bristol(write_bristol(again)) == again

    def test_outputs_that_share_a_wire_or_are_inputs_get_copies(self):
        netlist = Netlist((2,), (4,), [Op.AND], [0], [1], [2, 0, 2, 1])
        text = write_bristol(netlist)
        assert text.count("EQW") == 3
        assert read_bristol(text).evaluate([3]) == [15]
        assert read_bristol(text).evaluate([1]) == [2]


BAD = {
    "empty": ("", "line 1"),
    "one number": ("5\n", "line 1"),
    "three numbers": ("5 8 1\n", "line 1"),
    "old format": ("5 8\n1 1 2\n\n2 1 0 2 3 XOR\n", "line 2"),
    "negative": ("-5 8\n", "line 1"),
    "plus": ("+5 8\n", "line 1"),
    "underscore": ("5_0 8\n", "line 1"),
    "huge": (f"{10**30} 8\n", "line 1"),
    "very huge": ("9" * 100_000 + " 8\n", "line 1"),
    "more gates than text": ("4000000000 4000000000\n1 1\n1 1\n", "line 3"),
    "gates without room": ("1000 1001\n1 1\n1 1\n2 1 0 0 1 XOR\n", "room"),
    "wires without room": ("1 30000000\n1 1\n1 1\n1 1 0 1 INV\n", "room"),
    "inputs without room": ("0 33554432\n1 33554432\n1 1\n", "at most 4194304 bits"),
    "wide inputs": ("0 9\n1 9999999999\n1 1\n", "at most"),
    "inputs of 0 bits": ("0 1\n2 0 1\n1 1\n", "line 2"),
    "no outputs": ("0 1\n1 1\n0\n", "line 3"),
    "fewer wires than outputs": ("0 1\n1 1\n1 2\n", "line 3"),
    "widths missing": (ADDER.replace("3 1 1 1", "3 1 1"), "line 2"),
    "widths too many": (ADDER.replace("3 1 1 1", "3 1 1 1 1"), "line 2"),
    "one gate missing": (ADDER[: ADDER.rindex("2 1 5")], "line 9"),
    "one gate too many": (ADDER + "2 1 5 2 7 XOR\n", "line 10"),
    "rubbish at the end": (ADDER + "# end\n", "line 10"),
    "unknown gate": (ADDER.replace("AND", "NAND"), "line 8"),
    "lower case": (ADDER.replace("AND", "and"), "line 8"),
    "input overwritten": (ADDER.replace("1 6 XOR", "1 2 XOR"), "line 7"),
    "written twice": (ADDER.replace("2 7 XOR", "2 6 XOR"), "line 9"),
    "read before written": (ADDER.replace("2 1 0 2 3", "2 1 5 2 3"), "line 5"),
    "reads itself": (ADDER.replace("2 1 0 2 3", "2 1 3 2 3"), "line 5"),
    "reads beyond": (ADDER.replace("2 1 0 2 3", "2 1 8 2 3"), "line 5"),
    "writes beyond": (ADDER.replace("2 7 XOR", "2 8 XOR"), "line 9"),
    "operand count": (ADDER.replace("2 1 0 2 3", "3 1 0 2 3"), "line 5"),
    "result count": (ADDER.replace("2 1 0 2 3", "2 2 0 2 3"), "line 5"),
    "operand missing": (ADDER.replace("2 1 0 2 3", "2 1 0 3"), "line 5"),
    "operand no number": (ADDER.replace("2 1 0 2 3", "2 1 0 x 3"), "line 5"),
    "operand huge": (ADDER.replace("2 1 0 2 3", f"2 1 0 {10**30} 3"), "line 5"),
    "wire never written": (ADDER.replace("5 8", "5 9", 1), "line 10"),
    "EQ of 2": ("1 2\n1 1\n1 1\n1 1 2 1 EQ\n", "line 4"),
    "MAND count": ("1 4\n1 2\n1 2\n4 2 0 1 1 2 3 MAND\n", "line 4"),
    "MAND reads its result": ("1 4\n1 2\n1 2\n4 2 0 1 1 2 2 3 MAND\n", "line 4"),
    "MAND of nothing": ("1 2\n1 1\n1 1\n0 0 MAND\n", "line 4"),
    "lone kind": ("1 2\n1 1\n1 1\nXOR\n", "line 4"),
    "other alphabet": (ADDER.replace("2 1 0 2 3", "2 1 ٠ 2 3"), "line 5"),
    "control characters": (ADDER.replace("2 1 0 2 3", "2 1 0 \0\x1b[2J 3"), "line 5"),
}


class TestRefusing:
    @pytest.mark.parametrize("name", BAD)
    def test_what_is_wrong_and_where(self, name):
        text, where = BAD[name]
        with pytest.raises(InputError) as error:
            read_bristol(text)
        message = str(error.value)
        assert where in message
        assert message.isprintable()
        assert len(message) < 300

    def test_files(self, tmp_path):
        with pytest.raises(InputError, match="no such file"):
            read_bristol(tmp_path / "none.txt")
        (tmp_path / "bytes.txt").write_bytes(b"5 8\n\xff\xfe\n")
        with pytest.raises(InputError, match="line 2"):
            read_bristol(tmp_path / "bytes.txt")
        with (tmp_path / "large.txt").open("wb") as stream:
            stream.truncate(1 << 30)
        with pytest.raises(InputError, match="at most"):
            read_bristol(tmp_path / "large.txt")

    def test_promises_allocate_nothing(self):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for text in ("33554431 33554432\n1 1\n1 1\n", "0 33554432\n1 33554432\n1 33554432\n", "0 9\n" + "1 " * 9):
            with pytest.raises(InputError):
                read_bristol(text)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 30_000  # KiB

    def test_mutated_files_give_a_netlist_or_our_error(self):
        base = (OWN / "all_gates.txt").read_text()
        chance = random.Random(1)
        sound = 0
        for _ in range(3000):
            text = list(base)
            for _ in range(chance.randint(1, 3)):
                i = chance.randrange(len(text))
                text[i : i + chance.randint(0, 2)] = chance.choice(["", " ", "\n", "9", "0", "-", "EQ", "AND", "\0"])
            try:
                netlist = read_bristol("".join(text))
            except InputError:
                continue
            netlist.evaluate([0] * len(netlist.inputs))
            sound += 1
        assert sound < 1000


class TestPublicCircuits:
    def test_aes(self):
        path = public("aes_128.txt")
        vectors = json.loads(public("vectors.json").read_text())["vectors"]
        start = time.process_time()
        netlist = read_bristol(path)
        assert time.process_time() - start < 1
        assert (netlist.and_gates, netlist.xor_gates, netlist.not_gates, netlist.depth) == (6400, 28176, 2087, 60)
        cases = [vector for vector in vectors if vector["circuit"] == "aes_128"]
        assert cases
        for case in cases:
            assert netlist.evaluate([int(value, 16) for value in case["in"]]) == [int(v, 16) for v in case["out"]]
        again = read_bristol(write_bristol(netlist))
        bits = np.random.default_rng(0).integers(0, 2, (256, 100)).astype(bool)
        assert np.array_equal(again.evaluate_bits(bits), netlist.evaluate_bits(bits))

    @pytest.mark.parametrize(
        ("name", "function"),
        [
            ("adder64", lambda x, y: x + y),
            ("sub64", lambda x, y: x - y),
            ("mult64", lambda x, y: x * y),
            ("neg64", lambda x: -x),
            ("zero_equal", lambda x: x == 0),
        ],
    )
    def test_arithmetic(self, name, function):
        netlist = read_bristol(public(f"{name}.txt"))
        chance = random.Random(name)
        edges = [0, 1, 2**63, 2**64 - 1]
        for _ in range(50):
            values = [chance.choice([*edges, chance.getrandbits(64)]) for _ in netlist.inputs]
            assert netlist.evaluate(values) == [function(*values) % 2 ** netlist.outputs[0]]
