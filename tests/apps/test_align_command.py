"""``watermark verify --align`` on files that thieves made."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from deepseal.adapter import Classifier, checkpoint, initialise, load
from deepseal.attacks import REMOVAL
from deepseal.rng import Rng
from deepseal.watermark import DeepSigns, embed, save_key

OWN_CODE = """
import torch

def net(width: int = 48):
    return torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, width), torch.nn.ReLU(), torch.nn.Linear(width, width),
        torch.nn.ReLU(), torch.nn.Linear(width, 10),
    )
"""


@pytest.fixture
def deepseal(capsys, monkeypatch):
    """Runs the command line in this process: exit code, stdout, stderr."""

    def call(folder, *arguments):
        from deepseal.apps import cli

        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "argv", ["deepseal", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return call


@pytest.fixture(scope="module")
def stolen(tmp_path_factory, base, marked, key, digits) -> Path:
    """The owner's files, and the marked model with dummy neurons, other scales and another order."""
    folder = tmp_path_factory.mktemp("stolen")
    checkpoint.save(base, folder / "base.safetensors")
    checkpoint.save(marked, folder / "marked.safetensors")
    save_key(key, folder / "owner.key")
    model = marked
    for name in ("dummy", "rescale", "permute"):
        model = REMOVAL.build(name, {}).remove(model, digits.train, rng=Rng(3)).model
    checkpoint.save(model, folder / "suspect.safetensors")
    bare = {name: tensor.clone() for name, tensor in model.tensors().items()}
    safetensors.torch.save_file(bare, folder / "bare.safetensors")
    prefixed = {f"module.{name}": tensor for name, tensor in bare.items()}
    safetensors.torch.save_file(prefixed, folder / "prefixed.safetensors")
    return folder


VERIFY = "watermark verify --key owner.key --max-false-positive 1e-9 --null-keys 20 --json --model".split()


@pytest.mark.parametrize("original", ["base", "marked"])
@pytest.mark.parametrize("suspect", ["suspect", "bare", "prefixed"])
def test_promised_line(suspect, original, stolen, deepseal):
    code, out, err = deepseal(stolen, *VERIFY, f"{suspect}.safetensors", "--align", f"{original}.safetensors")
    assert code == 0, err
    record = json.loads(out)
    results = record["results"]
    assert (results["verdict"], results["bits"], results["bit_errors"]) == ("owned", 256, 0)
    assert results["tried"] == results["alignment"]["readings"] == 2
    assert results["alignment"]["original_is_marked"] == (original == "marked")
    assert [group["layers"] for group in results["alignment"]["groups"]] == [["fc1"], ["fc2"]]
    assert record["params"]["align"] == f"{original}.safetensors"
    assert record["fingerprints"]["original"] == load(stolen / f"{original}.safetensors").fingerprint()


def test_without_align_the_widths_are_in_the_way(stolen, deepseal):
    code, out, err = deepseal(stolen, *VERIFY, "suspect.safetensors")
    assert (code, out) == (2, "")
    assert "512 features" in err and "alignment" in err


def test_stranger_is_inconclusive(stolen, deepseal, digits):
    checkpoint.save(
        initialise("deepseal.adapter.zoo:mlp", digits.spec, Rng(9)), stolen / "other.safetensors", force=True
    )
    code, out, err = deepseal(stolen, *VERIFY, "other.safetensors", "--align", "base.safetensors")
    assert (code, json.loads(out)["results"]["verdict"]) == (3, "inconclusive")
    assert "not read" in err


def test_text_says_what_was_found(stolen, deepseal):
    line = [word for word in VERIFY if word != "--json"]
    code, out, _ = deepseal(stolen, *line, "suspect.safetensors", "--align", "base.safetensors")
    assert code == 0
    assert "aligned to" in out and "neurons found" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--align-arch", "mine:net"], "--align-arch alone"),
        (["--align", "owner.key"], "safetensors file at owner.key"),
        (["--align", "lenet.safetensors"], "the original's layers, in its order"),
    ],
)
def test_refusals(options, message, stolen, deepseal, digits):
    checkpoint.save(
        initialise("deepseal.adapter.zoo:lenet", digits.spec, Rng(9)), stolen / "lenet.safetensors", force=True
    )
    code, out, err = deepseal(stolen, *VERIFY, "suspect.safetensors", *options)
    assert (code, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_network_of_the_owner_s_own(tmp_path, deepseal, digits, monkeypatch):
    """The owner's code on both sides, and a thief's file with neither metadata nor the owner's widths."""
    (tmp_path / "own_net.py").write_text(OWN_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    base = initialise("own_net:net", digits.spec, Rng(0))
    key = DeepSigns(bits=128, steps=150).keygen(base, digits.train, owner="me", rng=Rng(1))
    marked = embed(base, digits.train, key, rng=Rng(2))
    wide = REMOVAL.build("dummy", {"share": 0.5}).remove(marked, digits.train, rng=Rng(3)).model
    wide = REMOVAL.build("permute", {}).remove(wide, digits.train, rng=Rng(4)).model
    checkpoint.save(base, tmp_path / "base.safetensors")
    save_key(key, tmp_path / "owner.key")
    bare = {name: tensor.clone() for name, tensor in wide.tensors().items()}
    safetensors.torch.save_file(bare, tmp_path / "bare.safetensors")
    line = [*VERIFY, "bare.safetensors", "--align", "base.safetensors"]
    code, _, err = deepseal(tmp_path, *line)
    assert code == 2 and "--arch" in err  # a file may not choose whose code runs
    for options in (["--arch", "own_net:net"], ["--align-arch", "own_net:net"]):
        code, out, err = deepseal(tmp_path, *line, *options)
        assert code == 0, err
        assert json.loads(out)["results"]["bit_errors"] <= 8  # 48 inputs a neuron are few, and some stay unmatched


def test_files_of_other_widths(stolen, tmp_path):
    """A file that says so is read with its own widths; others are refused, and so are widths that do not fit."""
    wide = load(stolen / "suspect.safetensors")
    assert wide.metadata["resized"] is True
    assert wide.module.fc1.out_features == wide.module.fc2.in_features > 512
    spec = wide.spec
    with pytest.raises(ValueError, match="of another kind"):
        load(stolen / "bare.safetensors", architecture="deepseal.adapter.zoo:mlp", spec=spec)
    read = load(stolen / "bare.safetensors", architecture="deepseal.adapter.zoo:mlp", spec=spec, widths=True)
    assert read.fingerprint() == wide.fingerprint()
    torn = {**wide.tensors(), "fc2.weight": torch.zeros(512, 512)}
    safetensors.torch.save_file({n: t.clone() for n, t in torn.items()}, tmp_path / "torn.safetensors")
    with pytest.raises(ValueError, match="weights file that can be used"):
        load(tmp_path / "torn.safetensors", architecture="deepseal.adapter.zoo:mlp", spec=spec, widths=True)
    fewer = Classifier(wide.module, dataclasses.replace(spec, num_classes=9), architecture=wide.architecture)
    checkpoint.save(fewer.copy(metadata={"resized": True}), tmp_path / "fewer.safetensors")
    with pytest.raises(ValueError, match="9"):
        load(tmp_path / "fewer.safetensors")
