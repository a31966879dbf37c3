"""``deepseal private compile`` and ``simulate`` as users run them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from deepseal.adapter import checkpoint, initialise
from deepseal.rng import Rng


def deepseal(*words, expect=0):
    """Run the command line in a fresh process."""
    done = subprocess.run(
        [sys.executable, "-m", "deepseal", *map(str, words)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == expect, done.stderr
    return done


@pytest.fixture(scope="module")
def compiled(files, tmp_path_factory):
    out = tmp_path_factory.mktemp("private") / "program"
    done = deepseal(
        "private", "compile", "--model", files / "base.safetensors", "--data", "digits", "--out", out, "--json"
    )
    return out, json.loads(done.stdout)


def test_compile_writes_both_halves(compiled):
    out, record = compiled
    assert record["kind"] == "private.compile" and record["status"] == "ok"
    assert (out / "public" / "program.json").is_file()
    for name in ("weights.npz", "model.safetensors"):
        assert (out / "secret" / name).stat().st_mode & 0o777 == 0o600
    assert [layer["name"] for layer in record["results"]["layers"]][0] == "fc1"
    assert record["results"]["calibration_agreement_with_float"] > 0.98
    assert len(record["fingerprints"]["program"]) == 64


def test_simulate_says_how_good_it_is(compiled, files, digits):
    out, record = compiled
    found = json.loads(deepseal("private", "simulate", out, "--data", "digits", "--limit", "100", "--json").stdout)
    results = found["results"]
    assert results["n"] == 100 and results["clamped_values"] == 0
    assert results["accuracy"] > 0.9 and results["agreement_with_float"] > 0.97
    low, high = results["accuracy_interval"]
    assert low <= results["accuracy"] <= high
    assert found["fingerprints"]["program"] == record["fingerprints"]["program"]
    (out / "secret" / "model.safetensors").rename(out / "aside")
    try:
        found = json.loads(deepseal("private", "simulate", out, "--data", "digits", "--json").stdout)
        assert found["results"]["agreement_with_float"] is None and found["notes"]
        assert found["results"]["n"] == len(digits.test)
    finally:
        (out / "aside").rename(out / "secret" / "model.safetensors")


def test_simulate_as_text(compiled):
    out, _ = compiled
    assert "agreement_with_float" in deepseal("private", "simulate", out, "--data", "digits").stdout


@pytest.fixture
def refused(capsys, monkeypatch, tmp_path):
    """Run a command line that is refused, in this process; gives its one line."""
    from deepseal.apps import cli

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["deepseal", *map(str, words)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, said = capsys.readouterr()
        assert (caught.value.code, out) == (2, "")
        assert said.count("\n") == 1 and said.startswith("deepseal: ")
        return said

    monkeypatch.chdir(tmp_path)
    return run


def test_bad_input_is_one_line(compiled, files, tmp_path, refused):
    out, _ = compiled
    model = files / "base.safetensors"
    assert "no program in" in refused("private", "compile", "--model", model, "--data", "digits", "--out", out)
    common = ("private", "compile", "--model", model, "--data", "digits", "--out", tmp_path / "new")
    assert "activation_bits" in refused(*common, "-p", "activation_bits=99")
    assert "parameter" in refused(*common, "-p", "bits=8")
    assert "sums that fit 10 bits" in refused(*common, "-p", "ring_bits=10")
    assert "permits" in refused(*common, "--permits", "everything")
    assert not (tmp_path / "new").exists()
    assert "a program" in refused("private", "simulate", tmp_path, "--data", "digits")
    (out / "secret" / "weights.npz").rename(out / "aside")
    try:
        assert "weights" in refused("private", "simulate", out, "--data", "digits")
    finally:
        (out / "aside").rename(out / "secret" / "weights.npz")


ODD = """
from torch import nn


def make(spec):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ELU(), nn.LayerNorm(8), nn.Linear(8, 10))
"""


def test_unsupported_layers_are_named(tmp_path, digits, refused):
    (tmp_path / "odd_network.py").write_text(ODD)
    checkpoint.save(initialise("odd_network:make", digits.spec, Rng(0)), tmp_path / "odd.safetensors")
    said = refused("private", "compile", "--model", "odd.safetensors", "--data", "digits", "--arch",
                   "odd_network:make", "--out", "program")  # fmt: skip
    assert "elu in '2'" in said and "layer_norm in '3'" in said
