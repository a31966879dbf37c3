"""The small shared modules: errors, parameters, registry, rng, statistics, files, records."""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from deepseal import rng, statistics
from deepseal.errors import InputError, UnknownNameError
from deepseal.files import check_writable, pending, write_atomically
from deepseal.parameters import Parameters, pairs, parameter
from deepseal.record import Record, Run, read_record
from deepseal.registry import Registry
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example(Parameters):
    share: float = parameter(0.5, "a share", minimum=0.0, maximum=1.0)
    count: int | None = parameter(None, "a count", minimum=1)
    mode: str = parameter("fast", "how", choices=("fast", "slow"))
    names: tuple[str, ...] = parameter((), "some names")
    numbers: tuple[int, ...] | None = parameter(None, "some numbers", minimum=0)
    on: bool = parameter(False, "a switch")


class TestErrors:
    def test_one_line_with_the_three_parts(self):
        error = InputError("a file", found="a\nfolder", do="choose  another")
        assert str(error) == "expected a file; found a folder; choose another"

    def test_a_foreign_name_does_not_command_the_terminal(self):
        text = str(InputError("a layer", found="'\x1b[2J\u202efc\udc80 é'", do="choose another"))
        assert text == r"expected a layer; found '\x1b[2J\u202efc\udc80 é'; choose another"

    def test_near_names(self):
        assert "'conv1'" in str(UnknownNameError("layer", "conv", ["conv1", "norm1"]))
        assert "no layer" in str(UnknownNameError("layer", "conv", []))


class TestParameters:
    def test_read_from_text(self):
        texts = {"share": "0.25", "count": "3", "mode": "slow", "names": "a, b", "numbers": "1,2", "on": "true"}
        built = Example.from_mapping(texts)
        assert built == Example(share=0.25, count=3, mode="slow", names=("a", "b"), numbers=(1, 2), on=True)
        assert Example.from_mapping(built.as_dict()) == built
        assert Example.from_mapping({"count": "none"}).count is None

    @pytest.mark.parametrize(
        ("values", "message"),
        [
            ({"share": "1.5"}, "share in the range"),
            ({"share": "nan"}, "share in the range"),
            ({"share": "much"}, "share as a number"),
            ({"count": "0"}, "count in the range"),
            ({"mode": "fats"}, "'fast'"),
            ({"shore": "1"}, "'share'"),
            ({"numbers": "-1"}, "numbers in the range"),
            ({"on": "maybe"}, "on as true or false"),
        ],
    )
    def test_refuses(self, values, message):
        with pytest.raises(InputError, match=message):
            Example.from_mapping(values)

    def test_pairs(self):
        assert pairs(["a=1", "b=x=y"]) == {"a": "1", "b": "x=y"}
        for wrong in (["a"], ["=1"], ["a=1", "a=2"]):
            with pytest.raises(InputError):
                pairs(wrong)

    def test_table_names_every_parameter(self):
        assert [row["name"] for row in Example.table()] == [field.name for field in dataclasses.fields(Example)]


class TestRegistry:
    def test_is_lazy(self):
        registry: Registry[object] = Registry(
            "thing", "deepseal.nothing", {"broken": "no_such_module:X", "ok": "json:JSONDecoder"}
        )
        assert registry.names() == ["broken", "ok"]
        assert registry.get("ok") is json.JSONDecoder
        with pytest.raises(InputError, match="no_such_module"):
            registry.get("broken")
        with pytest.raises(UnknownNameError, match="'ok'"):
            registry.get("okay")


class TestRng:
    def test_xof_is_framed_shake256(self):
        framed = b"".join(len(p).to_bytes(8, "little") + p for p in (b"shake256/deepseal-v1", b"label", b"secret"))
        assert rng.expand(b"secret", "label", 40) == hashlib.shake_256(framed).digest(40)

    def test_known_answers(self):
        """Keys that exist must read for ever: these bytes may not change without a new XOF name."""
        assert rng.expand(b"secret", "label", 8).hex() == "afa1eef0ba146327"
        assert rng.expand_bits(b"secret", "label", 16).tolist() == [1, 1, 1, 1, 0, 1, 0, 1, 1, 0, 0, 0, 0, 1, 0, 1]
        assert rng.expand_normal(b"secret", "label", (2, 2)) == pytest.approx(
            np.array([[1.5644, -1.0200], [-1.6517, 0.0676]]), abs=1e-4
        )
        assert rng.expand_choice(b"secret", "label", 10, 4).tolist() == [3, 8, 0, 6]

    def test_labels_cannot_run_together(self):
        assert rng.expand(b"c", "ab", 16) != rng.expand(b"bc", "a", 16)
        assert Rng(1).child("a", "b").bytes(8) == Rng(1).child("a").child("b").bytes(8)
        assert Rng(1).child("ab").bytes(8) != Rng(1).child("a", "b").bytes(8)

    def test_normal_is_standard_normal(self):
        values = rng.expand_normal(b"secret", "normal", (200_000,))
        assert stats.kstest(values, "norm").pvalue > 1e-3
        assert np.isfinite(values).all()

    def test_bits_are_fair_and_choice_is_uniform(self):
        ones = rng.expand_bits(b"s", "bits", 100_000).sum()
        assert stats.binomtest(int(ones), 100_000, 0.5).pvalue > 1e-3
        counts = np.zeros(10)
        for index in range(3000):
            chosen = rng.expand_choice(b"s", f"choice/{index}", 10, 3)
            assert len(set(chosen.tolist())) == 3
            counts[chosen] += 1
        assert stats.chisquare(counts).pvalue > 1e-3

    def test_children_do_not_change_the_parent(self):
        root = Rng(5)
        first = root.child("a").integer()
        root.child("b").numpy().random(10)
        assert root.child("a").integer() == first
        assert root.child("a").torch().initial_seed() == first


class TestStatistics:
    @pytest.mark.parametrize(
        ("bits", "row"),
        [
            (16, (1, None, None, None, None)),
            (32, (6, 2, 0, None, None)),
            (64, (19, 13, 8, 5, None)),
            (128, (46, 36, 30, 24, 0)),
            (256, (102, 89, 80, 72, 29)),
        ],
    )
    def test_published_decision_table(self, bits, row):
        rates = (1e-3, 1e-6, 1e-9, 2.0**-40, 2.0**-128)
        assert tuple(statistics.allowed_errors(np.full(bits, 0.5), rate) for rate in rates) == row

    @given(st.lists(st.floats(0.01, 0.99), min_size=1, max_size=9), st.data())
    def test_poisson_binomial_against_enumeration(self, chances, data):
        errors = data.draw(st.integers(0, len(chances)))
        total = 0.0
        for outcome in range(2 ** len(chances)):
            wrong = [(outcome >> i) & 1 for i in range(len(chances))]
            if sum(wrong) <= errors:
                total += math.prod(1 - c if w else c for c, w in zip(chances, wrong, strict=True))
        assert statistics.p_value(errors, chances) == pytest.approx(total, rel=1e-9)

    @given(st.integers(1, 400), st.floats(0.05, 0.95), st.floats(1e-12, 0.5))
    def test_threshold_is_the_last_that_keeps_the_rate(self, bits, chance, rate):
        chances = np.full(bits, chance)
        allowed = statistics.allowed_errors(chances, rate)
        if allowed is None:
            assert statistics.p_value(0, chances) > rate
        else:
            assert statistics.p_value(allowed, chances) <= rate
            assert allowed == bits or statistics.p_value(allowed + 1, chances) > rate

    def test_far_tails_keep_their_digits(self):
        mixed = np.array([0.5] * 255 + [0.5000001])
        assert statistics.p_value(0, mixed) == pytest.approx(0.5**255 * 0.5000001, rel=1e-9)
        assert statistics.p_value(0, np.full(256, 0.5)) == pytest.approx(2.0**-256, rel=1e-9)
        assert statistics.p_value(3, np.empty(0)) == 1.0

    def test_long_messages(self):
        far = statistics.p_value(9_000, np.full(20_000, 0.5))
        assert far == pytest.approx(stats.binom.cdf(9_000, 20_000, 0.5), rel=1e-6)

    def test_interval_covers(self):
        measured = statistics.rate(7, 50)
        exact = stats.binomtest(7, 50).proportion_ci(0.95, "exact")
        assert (measured.low, measured.high) == pytest.approx((exact.low, exact.high))
        assert statistics.rate(0, 10).low == 0.0
        assert statistics.rate(10, 10).high == 1.0
        for wrong in ((1, 0), (-1, 5), (6, 5)):
            with pytest.raises(ValueError, match="expected"):
                statistics.rate(*wrong)


class TestFiles:
    def test_all_or_nothing(self, tmp_path: Path):
        target = tmp_path / "file"
        with pytest.raises(RuntimeError), pending(target) as temporary:
            temporary.write_bytes(b"half")
            raise RuntimeError
        assert list(tmp_path.iterdir()) == []
        write_atomically(target, b"whole", mode=0o600)
        assert target.read_bytes() == b"whole"
        assert target.stat().st_mode & 0o777 == 0o600

    def test_nothing_is_overwritten_unasked(self, tmp_path: Path):
        target = tmp_path / "file"
        target.write_bytes(b"old")
        with pytest.raises(InputError, match="--force"):
            write_atomically(target, b"new")
        assert target.read_bytes() == b"old"
        write_atomically(target, b"new", force=True)
        assert target.read_bytes() == b"new"
        assert list(tmp_path.iterdir()) == [target]

    def test_a_file_that_appears_meanwhile_is_kept(self, tmp_path: Path):
        target = tmp_path / "file"
        with pytest.raises(InputError, match="--force"), pending(target) as temporary:
            temporary.write_bytes(b"mine")
            target.write_bytes(b"theirs")
        assert target.read_bytes() == b"theirs"
        assert list(tmp_path.iterdir()) == [target]

    def test_mode_follows_the_umask(self, tmp_path: Path):
        old = os.umask(0o027)
        try:
            write_atomically(tmp_path / "file", b"x")
        finally:
            os.umask(old)
        assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640

    @pytest.mark.parametrize("bad", ["missing/file", ".", "x" * 300])
    def test_places_that_cannot_be_written(self, tmp_path: Path, bad):
        with pytest.raises(InputError):
            check_writable(tmp_path / bad)

    def test_failing_disk(self, tmp_path: Path):
        with pytest.raises(InputError, match="the disk is full"), pending(tmp_path / "file") as temporary:
            temporary.write_bytes(b"half")
            raise OSError(errno.ENOSPC, "No space left on device")
        assert list(tmp_path.iterdir()) == []


class TestRecord:
    def test_round_trip(self, tmp_path: Path):
        run = Run("watermark.verify", seed=3, params={"a": Path("x")})
        run.results.update(rate=np.float64(0.5), bad=float("nan"), worse=[1.0, float("-inf")], n=np.int64(4))
        record = run.record()
        record.write(tmp_path / "r.json")
        again = read_record(tmp_path / "r.json")
        assert again == record
        assert again.results == {"rate": 0.5, "bad": None, "worse": [1.0, None], "n": 4}
        assert again.notes == ["results.bad is null: it was nan", "results.worse[1] is null: it was -inf"]
        content = json.loads((tmp_path / "r.json").read_text())
        wanted = {"schema", "kind", "status", "environment", "seed", "params", "results", "started", "seconds"}
        assert wanted <= content.keys()

    def test_more_fields_are_tolerated_and_other_schemas_are_not(self, tmp_path: Path):
        content = json.loads(Run("info").record().to_json())
        (tmp_path / "more.json").write_text(json.dumps({**content, "later": 1}))
        assert read_record(tmp_path / "more.json").kind == "info"
        (tmp_path / "other.json").write_text(json.dumps({**content, "schema": 99}))
        with pytest.raises(InputError, match="schema 99"):
            read_record(tmp_path / "other.json")
        for name, text in (("empty", ""), ("list", "[]"), ("text", "hello"), ("partial", '{"schema": 1}')):
            (tmp_path / name).write_text(text)
            with pytest.raises(InputError, match="record"):
                read_record(tmp_path / name)

    def test_is_frozen_and_holds_plain_values_only(self):
        record = Run("info").record()
        with pytest.raises(ValueError, match="frozen"):
            record.kind = "other"  # type: ignore[misc]
        run = Run("info")
        run.results["object"] = object()
        with pytest.raises(TypeError, match="results.object"):
            run.record()
        assert isinstance(record, Record)
