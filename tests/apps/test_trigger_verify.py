"""A black-box mark on the command line from keygen to a verdict through a socket, and --independent."""

from __future__ import annotations

import json

import pytest
from command_line import record_of, run
from served import serving

from deepseal.adapter import checkpoint
from deepseal.apps import workflow
from deepseal.rng import Rng
from deepseal.watermark import load_key
from deepseal.watermark.adi import Adi


@pytest.fixture(scope="module")
def folder(files, tmp_path_factory, digits):
    """A folder with base.safetensors and another model that somebody else trained."""
    from models import trained

    path = tmp_path_factory.mktemp("triggers")
    (path / "base.safetensors").write_bytes((files / "base.safetensors").read_bytes())
    checkpoint.save(trained(digits, 500, epochs=5), path / "other.safetensors")
    return path


def ok(capsys, monkeypatch, folder, line, code=0):
    found, out, err = run(capsys, monkeypatch, folder, *line.split(), "--json")
    assert found == code, err
    return record_of(out)["results"]


def test_keygen_embed_verify_and_a_server(capsys, monkeypatch, folder):
    keygen = "watermark keygen --model base.safetensors --data digits --scheme adi --owner me --out adi.key"
    made = ok(capsys, monkeypatch, folder, f"{keygen} -p steps=400 --independent other.safetensors")
    assert (made["triggers"], made["zero_bit"], made["independent_models"]) == (100, True, 1)
    embed = "watermark embed --model base.safetensors --data digits --key adi.key --out marked.safetensors"
    embedded = ok(capsys, monkeypatch, folder, embed)
    assert (embedded["verdict"], embedded["bit_errors"]) == ("owned", 0)
    shown = ok(capsys, monkeypatch, folder, "watermark inspect --key adi.key")
    assert (shown["scheme"], shown["triggers"]) == ("adi", 100)
    local = ok(capsys, monkeypatch, folder, "watermark verify --model marked.safetensors --key adi.key")
    assert local["verdict"] == "owned"
    for model, verdict, code in (("marked", "owned", 0), ("other", "not-owned", 1)):
        oracle = checkpoint.load(folder / f"{model}.safetensors").oracle(output="labels")
        with serving(oracle) as url:
            line = f"watermark verify --url {url}/v2/models/suspect --key adi.key --null-keys 50"
            result = ok(capsys, monkeypatch, folder, line, code)
        assert (result["verdict"], result["queries"], result["null"]["owned"]) == (verdict, 100, 0)
        assert result["published"]["accepts"] == (verdict == "owned")
    code, out, _ = run(
        capsys, monkeypatch, folder, *"watermark verify --model marked.safetensors --key adi.key".split()
    )
    assert code == 0
    assert "the paper's own rule" in out
    assert "accepts: 100 of 100 agree" in out
    secret = load_key(folder / "adi.key").secret.hex()
    assert secret not in json.dumps([made, embedded, shown, local])


def test_a_mark_that_costs_accuracy_says_how_a_key_would_cost_less(capsys, monkeypatch, folder):
    keygen = "watermark keygen --model base.safetensors --data digits --owner me --scheme deepsigns --out hard.key"
    ok(capsys, monkeypatch, folder, f"{keygen} -p steps=30 -p learning_rate=0.1")
    embed = "watermark embed --model base.safetensors --data digits --key hard.key --out hard.safetensors"
    embedded = ok(capsys, monkeypatch, folder, embed)
    assert embedded["accuracy_after"] < embedded["accuracy_before_interval"][0]
    (warning,) = embedded["warnings"]
    assert f"cost {-embedded['accuracy_change_points']:.1f} points" in warning
    assert "-p steps=60 (twice the updates)" in warning


@pytest.mark.parametrize(
    ("params", "advised"),
    [({}, "settle=500"), ({"settle": 600}, "settle=1200"), ({"recipe": "paper", "steps": 40}, "steps=80")],
)
def test_what_a_mark_in_answers_would_rather_be_made_with(params, advised, base, digits):
    key = Adi(**params).keygen(base, digits.train, owner="me", rng=Rng(0))
    assert f"; a new key with -p {advised} " in workflow._gentler(key)


def test_white_box_schemes_by_name(capsys, monkeypatch, folder):
    keygen = "watermark keygen --model base.safetensors --data digits --owner me -p bits=64"
    for scheme in ("hash-bound", "uchida"):
        ok(capsys, monkeypatch, folder, f"{keygen} --scheme {scheme} --out {scheme}.key")
        key = f"--key {scheme}.key --max-false-positive 1e-6"
        made = f"watermark embed --model base.safetensors --data digits --out {scheme}.safetensors {key}"
        assert ok(capsys, monkeypatch, folder, made)["verdict"] == "owned"
        found = ok(capsys, monkeypatch, folder, f"watermark verify --model other.safetensors {key}", 1)
        assert found["verdict"] == "not-owned"


def test_independent_models_where_nobody_asks_them(capsys, monkeypatch, folder):
    line = "watermark keygen --model base.safetensors --data digits --scheme uchida --owner me --out u.key"
    code, out, err = run(capsys, monkeypatch, folder, *line.split(), "--independent", "other.safetensors")
    assert (code, out, err.count("\n")) == (2, "", 2)
    assert "independent models" in err
    assert not (folder / "u.key").exists()
