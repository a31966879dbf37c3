"""``deepseal watermark compare`` on real digits: what it says is worked out again from the files that it leaves."""

from __future__ import annotations

import html.parser
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from command_line import ENVIRONMENT, run
from scipy import stats

from deepseal.adapter import load
from deepseal.apps.compare import tables
from deepseal.attacks import QUERY, REMOVAL
from deepseal.rng import Rng
from deepseal.watermark import extract, load_key, verify
from deepseal.watermark.verify import strangers

ARCH = "deepseal.adapter.zoo:mlp"
LINE = (
    f"watermark compare --data digits --arch {ARCH} --schemes uchida,adi --attacks"
    " prune?sparsity=0.7,permute,rotate,query-noise?deviation=0.05"
    " --seeds 2 --nets 1 --keys 300 --sizes 0.25 --epochs 5 -p adi.steps=150 -p uchida.steps=60 --json --out compare"
).split()
RATE = 1e-6


@pytest.fixture(scope="module")
def story(tmp_path_factory) -> tuple[Path, dict, set[Path], str]:
    """A comparison that was killed in the middle and gone on with: folder, record, cells before, second stderr."""
    place = tmp_path_factory.mktemp("compare")
    command = [sys.executable, "-m", "deepseal", *LINE]
    first = subprocess.Popen(
        command, cwd=place, env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    for line in first.stderr:
        if ": embed:" in line:
            break
    os.kill(first.pid, signal.SIGKILL)
    first.communicate()
    assert first.returncode == -signal.SIGKILL
    before = set((place / "compare" / "cells").glob("*.json"))
    stamps = {path: path.stat().st_mtime_ns for path in before}
    assert 4 <= len(before) <= 6
    done = subprocess.run(command, cwd=place, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert {path: path.stat().st_mtime_ns for path in before} == stamps, "a finished cell was measured again"
    return place / "compare", json.loads(done.stdout), before, done.stderr


@pytest.fixture(scope="module")
def folder(story) -> Path:
    return story[0]


@pytest.fixture(scope="module")
def pair(story) -> dict:
    (found,) = story[1]["results"]["pairs"]
    return found


def scheme_of(pair, name) -> dict:
    return next(scheme for scheme in pair["schemes"] if scheme["scheme"] == name)


def files(folder, name, net):
    """Unmarked net, marked net and key, from their files alone."""
    (base,), (marked,), (key,) = (
        list(folder.glob(pattern))
        for pattern in (
            f"models/net_digits_mlp_{net}_*",
            f"models/marked_digits_mlp_{net}_{name}_0_*",
            f"keys/key_digits_mlp_{net}_{name}_0_*",
        )
    )
    return load(base), load(marked), load_key(key)


def test_it_goes_on_where_it_was_killed(story):
    folder, record, before, err = story
    cells = record["results"]["pairs"][0]["cells"]
    assert cells["measured"] == cells["planned"] == len(list((folder / "cells").glob("*.json")))
    assert f"{cells['planned']} cells, {len(before)} of them measured" in err.splitlines()[0]
    assert "should take about" in err.splitlines()[0]
    assert not list(folder.rglob(".*")), "temporary files are left"


def test_the_record_is_the_folder_s(story):
    folder, record, _, _ = story
    kept = json.loads((folder / "record.json").read_text())
    assert kept["results"] == record["results"]
    assert record["kind"] == "watermark.compare"


@pytest.mark.parametrize("name", ["uchida", "adi"])
class TestAgainstTheFiles:
    def test_fidelity(self, name, folder, pair, digits):
        changes = []
        for net in (0, 1):
            base, marked, _ = files(folder, name, net)
            right = [(model.query(digits.test.x).argmax(1) == digits.test.y).numpy() for model in (base, marked)]
            changes.append(100 * (right[1].mean() - right[0].mean()))
        found = scheme_of(pair, name)["fidelity"]["change_points"]
        assert (found["mean"], found["n"]) == (pytest.approx(np.mean(changes)), 2)
        if found["low"] is not None:
            low, high = stats.t.interval(0.95, 1, np.mean(changes), stats.sem(changes))
            assert (found["low"], found["high"]) == pytest.approx((low, high))
        assert {one["net"] for one in scheme_of(pair, name)["fidelity"]["paired"]} == {"0", "1"}

    def test_reliability(self, name, folder, pair):
        wrong, owned = [], 0
        for net in (0, 1):
            _, marked, key = files(folder, name, net)
            read = extract(marked, key)
            wrong.append(int((read.bits != key.message())[read.usable].sum()))
            owned += stats.binom.cdf(wrong[-1], int(read.usable.sum()), 1 - read.chance[0]) <= RATE
        found = scheme_of(pair, name)["reliability"]
        assert found["bit_errors"] == wrong
        assert (found["owned"]["count"], found["owned"]["n"]) == (owned, 2)
        assert owned == 2

    def test_integrity(self, name, folder, pair):
        """Net 0's key on the independent net and on net 1, and the other way round: 150 strangers each."""
        other = load(next(folder.glob("models/net_digits_mlp_i0_*")))
        owned, count = 0, 0
        for net in (0, 1):
            _, _, key = files(folder, name, net)
            sibling, _, _ = files(folder, name, 1 - net)
            chance = extract(other, key).chance[0]
            for model, own in ((other, slice(0, 150)), (sibling, slice(150, 300))):
                wrong, bits = strangers(model, key, 300)[own].T
                count += int((stats.binom.cdf(wrong, bits, 1 - chance) <= 1e-2).sum())
                owned += verify(model, key, max_false_positive=RATE).verdict == "owned"
        found = scheme_of(pair, name)["integrity"]
        assert (found["strangers"]["0.01"]["count"], found["strangers"]["0.01"]["n"]) == (count, 600)
        assert found["strangers"]["0.01"]["place"] != "above"
        assert (found["independent_models"]["count"], found["independent_models"]["n"]) == (owned, 4)
        assert owned == 0

    def test_pruning(self, name, folder, pair, digits):
        wrong, lost = [], []
        for net in (0, 1):
            _, marked, key = files(folder, name, net)
            pruned = REMOVAL.build("prune", {"sparsity": 0.7}).remove(marked, digits.train, rng=None).model
            wrong.append(verify(pruned, key).bit_errors)
            lost.append(100 * (marked.accuracy(digits.test).value - pruned.accuracy(digits.test).value))
        found = scheme_of(pair, name)["robustness"][0]
        assert found["attack"] == "prune sparsity=0.7"
        assert found["bit_errors"] == wrong
        assert found["accuracy_lost_points"]["mean"] == pytest.approx(np.mean(lost))

    def test_nnw(self, name, pair):
        found = scheme_of(pair, name)["nnw"]
        assert (found["M"], found["D"], found["nets"]) == (2, 1, 4)
        assert found["imperceptibility_points"] == scheme_of(pair, name)["fidelity"]["change_points"]
        assert found["cost"]["embedding_cpu_seconds"]["mean"] > 0 < found["cost"]["verify_seconds"]["mean"]
        ran = [attack for attack in scheme_of(pair, name)["robustness"] if attack["n"]]
        assert [row["modification"] for row in found["rows"]] == ["none", *(attack["attack"] for attack in ran)]
        for row, attack in zip(found["rows"][1:], ran, strict=True):
            assert row["false_positive"]["count"] == 0 and row["false_positive"]["n"] == 2
            assert row["false_negative"]["count"] == 2 - attack["owned"]["count"]

    def test_capacity_and_efficiency(self, name, pair):
        scheme = scheme_of(pair, name)
        sizes = [row["bits"] for row in scheme["capacity"]]
        assert sizes == sorted({scheme["bits"] // 4, scheme["bits"]})
        assert all(row["n"] == 2 for row in scheme["capacity"])
        assert scheme["efficiency"]["share_of_training"]["mean"] > 0
        queries = scheme["efficiency"]["queries"]
        assert queries is None if name == "uchida" else queries["mean"] == 100

    def test_security_says_what_two_nets_can_show(self, name, pair):
        for found in scheme_of(pair, name)["security"].values():
            assert found["lowest_p_value"] == 0.5
            assert found["told_apart"]["n"] == 4


def test_alignment_brings_a_moved_mark_back(pair):
    moved = scheme_of(pair, "uchida")["robustness"][1]
    assert moved["attack"] == "permute"
    assert moved["owned"]["count"] == 0 and moved["aligned_owned"]["count"] == 2
    assert scheme_of(pair, "adi")["robustness"][1]["owned"]["count"] == 2


def test_what_removes_a_mark_is_one_table(pair):
    (table,) = [table for table in tables.tables(pair) if table.name == "removal"]
    rows = {tuple(row[:2]): row[2:] for row in table.rows}
    assert rows["uchida", "permute"][:4] == ["2/2", "2/2", "2/2", "0.0"]
    assert ("adi", "permute") not in rows and ("uchida", "prune sparsity=0.7") not in rows


def test_what_does_not_apply_is_listed_and_not_counted(story, pair):
    """An MLP has no stream to rotate, and who reads weights asks no question that noise could disturb."""
    (refused,) = story[1]["results"]["refused"]
    assert refused["attack"] == "rotate" and "residual stream" in refused["reason"]
    for name in ("uchida", "adi"):
        rotated = scheme_of(pair, name)["robustness"][2]
        assert (rotated["attack"], rotated["n"], rotated["owned"]) == ("rotate", 0, None)
        assert rotated["refused"] == refused["reason"]
    noisy = scheme_of(pair, "uchida")["robustness"][3]
    assert (noisy["n"], noisy["refused"]) == (0, None) and "asks nothing" in noisy["not_applicable"]
    (row,) = [line for line in tables.markdown(story[1]["results"], rate=RATE).splitlines() if "query-noise" in line][
        :1
    ]
    assert row.split("|")[2].strip() == "not applicable" and "2/2" in row.split("|")[3]


def test_noisy_queries(folder, pair, digits):
    """A server that answers with labels and shakes what it is asked, asked again by hand: other noise, same verdict."""
    found = scheme_of(pair, "adi")["robustness"][3]
    assert (found["attack"], found["n"]) == ("query-noise deviation=0.05", 2)
    for net, errors in zip((0, 1), found["bit_errors"], strict=True):
        _, marked, key = files(folder, "adi", net)
        asked = QUERY.build("query-noise", {"deviation": 0.05}).wrap(marked.oracle(), rng=Rng(net))
        again = verify(asked, key)
        assert again.verdict == "owned" and abs(again.bit_errors - errors) <= 10
        right = (asked.query(digits.test.x) == digits.test.y).double().mean()
        lost = 100 * (marked.accuracy(digits.test).value - float(right))
        assert abs(lost) <= 5 and abs(found["accuracy_lost_points"]["mean"]) <= 5


class _Page(html.parser.HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.text, self.open = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def test_the_page_shows_the_record(folder, pair, tmp_path, capsys, monkeypatch):
    page = _Page()
    page.feed((folder / "report.html").read_text())
    text = " ".join(" ".join(page.text).split())
    assert page.open == []
    assert not {"script", "link", "img"} & {tag for tag, _ in page.tags}
    for part in (
        "mlp on digits",
        "uchida",
        "adi",
        "prune sparsity=0.7",
        "MPAI-NNW",
        "Security",
        "Capacity",
        "1 × 10⁻⁶",
    ):
        assert part in text.replace("\u00a0", " ")
    owned = scheme_of(pair, "uchida")["robustness"][1]["aligned_owned"]
    assert f"aligned {owned['count']}/{owned['n']}" in text
    code, _, err = run(capsys, monkeypatch, tmp_path, "report", "html", folder / "record.json", "--out", "again.html")
    assert code == 0, err
    again = (tmp_path / "again.html").read_text()
    assert again == (folder / "report.html").read_text()


def test_the_tables_are_markdown(folder):
    lines = (folder / "tables.md").read_text().splitlines()
    widths = {}
    for index, line in enumerate(lines):
        if line.startswith("|---"):
            widths[index] = line.count("|")
            assert lines[index - 1].count("|") == line.count("|")
    assert len(widths) >= 7


def test_only_the_estimate(tmp_path, capsys, monkeypatch):
    line = [word for word in LINE if word != "--json"]
    code, out, err = run(capsys, monkeypatch, tmp_path, *line, "--estimate", "--json")
    assert code == 0, err
    assert json.loads(out)["results"]["estimated_seconds"] > 0
    assert not (tmp_path / "compare").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("--schemes", "adi,zhan"), "zhang"),
        (("--schemes", ""), "at least one scheme"),
        (("--attacks", "prun"), "prune"),
        (("--attacks", "prune?sparsity=2"), "sparsity"),
        (("-p", "zhang.steps=3"), "one of"),
        (("-p", "owner.epochs=3"), "--epochs"),
        (("-p", "owner.nope=3"), "owner.nope"),
        (("-p", "owner.schedule=square"), "cosine"),
        (("--arch", "no.such:net"), "no.such"),
        (("--record", "compare/record.json"), "different files"),
        (("--report-only",), "a comparison in"),
        (("--sizes", "big"), "sizes"),
        (("--false-positive", "2"), "between 0 and 1"),
        (("--arch", "deepseal.adapter.zoo:nothing"), "nothing"),
        (("--data", "digit"), "digits"),
        (("--seeds", "0"), "--seeds"),
        (("--out", "taken"), "an empty folder"),
        (("--out", "file"), "a folder"),
    ],
)
def test_bad_input_is_one_line(change, says, tmp_path, capsys, monkeypatch):
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "mine.txt").write_text("mine")
    (tmp_path / "file").write_text("mine")
    words = list(LINE)
    if change[0] in words and change[0] != "-p":
        words[words.index(change[0]) + 1] = change[1]
    else:
        words += change
    code, out, err = run(capsys, monkeypatch, tmp_path, *words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1 and says in err, err
    assert not (tmp_path / "compare").exists()


def test_a_misspelt_network_is_refused_beside_a_good_one(tmp_path, capsys, monkeypatch):
    code, out, err = run(capsys, monkeypatch, tmp_path, *LINE, "--arch", "deepseal.adapter.zoo:nothing")
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert not (tmp_path / "compare").exists()


def test_several_networks_and_payloads_and_what_does_not_fit(tmp_path, capsys, monkeypatch):
    """A network that takes no such image, and a scheme that has not as much room as is asked for, are listed."""
    archs = (ARCH, "deepseal.adapter.zoo:deepsecure_b3", "torchvision:inception_v3")
    line = (
        f"watermark compare --data digits --arch {' --arch '.join(archs)} --schemes uchida,plain --payloads 2"
        " --seeds 1 --nets 0 --keys 20 --sizes none --attacks rescale --epochs 1 -p uchida.bits=99999"
        " --json --out compare"
    )
    code, out, err = run(capsys, monkeypatch, tmp_path, *line.split())
    assert code == 0, err
    results = json.loads(out)["results"]
    assert [pair["arch"] for pair in results["pairs"]] == list(archs[:2])
    for pair in results["pairs"]:
        (plain,) = pair["schemes"]
        assert plain["scheme"] == "plain" and plain["reliability"]["owned"]["count"] == 0
        assert (plain["nnw"]["M"], plain["nnw"]["D"], plain["nnw"]["nets"]) == (1, 2, 3)
        assert plain["nnw"]["rows"][1]["false_negative"]["n"] == 2
        assert plain["fidelity"]["change_points"]["mean"] == 0.0
    assert [row["scheme"] for row in results["generalisability"]] == ["plain"]
    assert results["generalisability"][0]["models"] == "2 of 2"
    reasons = {(row["arch"], row.get("scheme")): row["reason"] for row in results["refused"]}
    assert set(reasons) == {(archs[2], None), (ARCH, "uchida"), (archs[1], "uchida")}
    assert "99999" in reasons[ARCH, "uchida"]


def test_a_damaged_record_is_refused(folder, tmp_path, capsys, monkeypatch):
    record = json.loads((folder / "record.json").read_text())
    del record["results"]["pairs"][0]["schemes"][0]["fidelity"]
    (tmp_path / "damaged.json").write_text(json.dumps(record))
    code, out, err = run(capsys, monkeypatch, tmp_path, "report", "html", "damaged.json", "--out", "page.html")
    assert (code, out) == (2, "")
    assert "complete record" in err and len(err.splitlines()) == 1


def test_a_record_carries_no_markup(folder, tmp_path, capsys, monkeypatch):
    text = (folder / "record.json").read_text().replace('"prune sparsity=0.7"', '"<b onclick=alert(1)>"')
    (tmp_path / "foreign.json").write_text(text.replace('"uchida"', '"<script>x</script>"'))
    code, _, err = run(capsys, monkeypatch, tmp_path, "report", "html", "foreign.json", "--out", "page.html")
    assert code == 0, err
    page = (tmp_path / "page.html").read_text()
    assert "<script" not in page and "<b onclick" not in page and "&lt;script&gt;" in page


def test_everything_refused_is_no_success(tmp_path, capsys, monkeypatch):
    line = "watermark compare --data digits --arch deepseal.adapter.zoo:mlp --out c --schemes uchida --seeds 1 --nets 0"
    few = " --epochs 1 --limit 200 --attacks none --sizes none --keys 0 -p uchida.bits=99999 --json"
    code, out, err = run(capsys, monkeypatch, tmp_path, *(line + few).split())
    assert (code, err.splitlines()[-1]) == (3, "deepseal: no mark could be embedded: see `refused`")
    (reason,) = json.loads(out)["results"]["refused"]
    assert "99999" in reason["reason"]
