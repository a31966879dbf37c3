"""The command line of monitors: fit, calibrate, evaluate, detect, and what it refuses."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
from command_line import run
from pypdf import PdfReader

from deepseal.adapter import save
from deepseal.record import read_record


def deepseal(*words: object, cwd) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deepseal", *map(str, words)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, base):
    """A folder with a model and its calibrated monitor."""
    place = tmp_path_factory.mktemp("monitors")
    save(base, place / "base.safetensors")
    fitted = deepseal(
        "defense", "fit", "--model", "base.safetensors", "--data", "digits", "--out", "monitor", "--json", cwd=place
    )
    assert fitted.returncode == 0, fitted.stderr
    results = json.loads(fitted.stdout)["results"]
    assert [member["title"] for member in results["members"]][:2] == ["max-softmax", "inrel"]
    words = ("defense", "calibrate", "monitor", "--data", "digits", "--false-positive", 0.05, "--json")
    calibrated = deepseal(*words, cwd=place)
    assert calibrated.returncode == 0, calibrated.stderr
    results = json.loads(calibrated.stdout)["results"]
    low, high = results["interval"]
    assert low < 0.05
    assert high > low
    assert results["n"] == results["exceeding"] + (results["n"] - results["exceeding"])
    assert results["threshold"] > 0
    assert results["false_alarms_a_day"]["at_most"] == pytest.approx(5000)
    return place


class Done:
    """How a command ended."""

    def __init__(self, returncode: int, stdout: str, stderr: str) -> None:
        self.returncode, self.stdout, self.stderr = returncode, stdout, stderr


@pytest.fixture
def command(capsys, monkeypatch, folder):
    """Runs a command line in the folder, in this process."""

    def call(*words: object) -> Done:
        return Done(*run(capsys, monkeypatch, folder, *map(str, words)))

    return call


def test_evaluation_names_what_it_measured(command, folder):
    attacks = ("--attack", "pgd:epsilon=0.3,steps=10", "--attack", "pgd:epsilon=0.1,steps=10")
    words = ("defense", "evaluate", "monitor", "--data", "digits", *attacks, "--limit", 30)
    done = command(*words, "--json", "--record", "evaluation.json")
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    first = results["attacks"][0]
    assert first["name"] == "pgd:epsilon=0.3,steps=10"
    for name in ("success", "auroc", "tpr_at_1", "tpr_at_5", "silent_errors_at_1", "silent_errors_at_5"):
        assert name in first
    assert first["attacked"] <= 30
    assert results["samples"] > 300  # all clean test inputs are negatives, whatever --limit says
    assert first["auroc"] > 0.7
    ticks = {row["what"]: row["done"] for row in results["checklist"]}
    assert not ticks["an attacker who knows the monitor"]
    assert any("no adaptive attack" in note for note in read_record(folder / "evaluation.json").notes)
    shown = command("report", "show", "evaluation.json")
    assert "silent" in shown.stdout
    page = command("report", "html", "evaluation.json", "--out", "evaluation.html")
    assert page.returncode == 0, page.stderr
    text = (folder / "evaluation.html").read_text()
    assert "<h1>Evaluation of a monitor</h1>" in text
    assert text.count("<polyline") >= 3
    assert "<script" not in text
    printed = command("report", "pdf", "evaluation.json", "--out", "evaluation.pdf")
    assert printed.returncode == 0, printed.stderr
    words = " ".join(" ".join(page.extract_text() for page in PdfReader(folder / "evaluation.pdf").pages).split())
    assert "Evaluation of a monitor" in words and "Attacked inputs that are found, against false alarms" in words
    assert f"area {first['auroc']:.4f}" in words and "What this does not show" in words


def test_an_adaptive_attack_runs_against_model_and_monitor(command):
    attack = "adaptive-pgd:epsilon=0.2,steps=5,restarts=1,loss=selective,surrogate=identity"
    words = ("defense", "evaluate", "monitor", "--data", "digits", "--attack", attack, "--limit", 15, "--json")
    done = command(*words)
    assert done.returncode == 0, done.stderr
    row = json.loads(done.stdout)["results"]["attacks"][0]
    assert row["adaptive"] is True
    assert row["silent_errors_at_5"]["value"] == pytest.approx(row["success"]["value"])


def test_detection_exits_with_1_when_an_input_alarms(command, folder, digits):
    np.save(folder / "clean.npy", digits.test.tensor[100:101].numpy())
    np.save(folder / "odd.npy", np.random.default_rng(0).random((3, 1, 8, 8), dtype=np.float32))
    clean = command("defense", "detect", "monitor", "--input", "clean.npy", "--json")
    odd = command("defense", "detect", "monitor", "--input", "odd.npy", "--json")
    rows = json.loads(clean.stdout)["results"]["rows"]
    assert clean.returncode == int(rows[0]["alarm"])
    assert odd.returncode == 1
    results = json.loads(odd.stdout)["results"]
    assert results["inputs"] == 3
    assert results["alarms"] >= 1
    assert all(0 < row["p_value"] <= 1 for row in results["rows"])


@pytest.mark.parametrize(
    "words",
    [
        ("detect", "monitor", "--input", "missing.npy"),
        ("detect", "base.safetensors", "--input", "clean.npy"),
        ("detect", "monitor", "--input", "base.safetensors"),
        ("detect", "monitor", "--input", "shape.npy"),
        ("detect", "monitor", "--input", "nan.npy"),
        ("detect", "monitor", "--input", "text.npy"),
        ("fit", "--model", "base.safetensors", "--data", "digits", "--out", "monitor"),
        ("fit", "--model", "base.safetensors", "--data", "digits", "--out", "new", "--detector", "magic"),
        ("fit", "--model", "base.safetensors", "--data", "digits", "--out", "new", "--detector", "ratio?layer=nowhere"),
        ("fit", "--model", "base.safetensors", "--data", "digits", "--out", "no/such/folder"),
        ("calibrate", "monitor", "--data", "digits", "--false-positive", "0.0001"),
        ("calibrate", "monitor", "--data", "digits", "--false-positive", "2"),
        ("evaluate", "monitor", "--data", "seen.npz"),
        ("evaluate", "monitor", "--data", "digits", "--attack", "magic"),
        ("evaluate", "monitor", "--data", "digits", "--attack", "pgd:epsilon=nan"),
    ],
)
def test_bad_input_is_one_line_and_leaves_nothing(command, folder, digits, words):
    np.save(folder / "shape.npy", np.zeros((2, 1, 9, 9), dtype=np.float32))
    np.save(folder / "nan.npy", np.full((2, 1, 8, 8), np.nan, dtype=np.float32))
    np.save(folder / "text.npy", np.array(["a", "b"]))
    train, test = digits.train, digits.train
    np.savez(folder / "seen.npz", x_train=train.tensor, y_train=train.y, x_test=test.tensor, y_test=test.y)
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    done = command("defense", *words)
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "Traceback" not in done.stderr
    assert {path: path.stat().st_mtime_ns for path in folder.rglob("*")} == before
