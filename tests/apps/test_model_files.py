"""The same verdict from the command line, however the suspect's weights are stored."""

from __future__ import annotations

import json

import pytest
import safetensors.torch
import torch
from command_line import record_of, run
from torch import nn
from torch.nn.utils import parametrizations

ARCH = "deepseal.adapter.zoo:mlp"


def parametrised(model):
    module = model.copy().module
    parametrizations.weight_norm(module.fc1)
    return module.eval()


@pytest.fixture
def suspect(marked, digits, tmp_path):
    """Writes the marked model as ``kind`` and names it."""

    def write(kind: str) -> str:
        module = marked.copy().module
        if kind == "program":
            torch.export.save(torch.export.export(module, (digits.test.x[:2],)), tmp_path / "m.pt2")
            return "m.pt2"
        if kind == "pickle":
            torch.save({"state_dict": nn.DataParallel(module).state_dict(), "epoch": 7}, tmp_path / "m.pt")
            return "m.pt"
        made = {
            "prefixed": lambda: nn.DataParallel(torch.compile(module, backend="eager")),
            "half": lambda: module.half(),
            "bfloat16": lambda: module.to(torch.bfloat16),
            "normalised": lambda: parametrised(marked),
            "shards": lambda: module,
        }[kind]()
        state = {name: value.detach().clone() for name, value in made.state_dict().items()}
        if kind != "shards":
            safetensors.torch.save_file(state, tmp_path / "m.safetensors")
            return "m.safetensors"
        (tmp_path / "model").mkdir()
        names = {name: f"model-{i:05}-of-{len(state):05}.safetensors" for i, name in enumerate(state, 1)}
        for name, file in names.items():
            safetensors.torch.save_file({name: state[name]}, tmp_path / "model" / file)
        (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
        return "model"

    return write


@pytest.mark.parametrize("kind", ["prefixed", "half", "bfloat16", "normalised", "shards", "program", "pickle"])
def test_verdict(kind, suspect, files, tmp_path, capsys, monkeypatch):
    line = ["watermark", "verify", "--model", suspect(kind), "--arch", ARCH, "--key", files / "owner.key", "--json"]
    line += ["--max-false-positive", "1e-9"]
    if kind == "pickle":
        code, out, err = run(capsys, monkeypatch, tmp_path, *line)
        assert (code, out) == (2, "")
        assert "a pickle, which can run any code" in err
        line.append("--insecure-allow-pickle")
    code, out, err = run(capsys, monkeypatch, tmp_path, *line)
    assert code == 0, err
    results = record_of(out)["results"]
    assert (results["verdict"], results["bit_errors"]) == ("owned", 0)


def test_a_shard_is_not_written_over(suspect, files, tmp_path, capsys, monkeypatch):
    shard = next((tmp_path / suspect("shards")).glob("*.safetensors"))
    before = shard.read_bytes()
    for model in ("model", "model/model.safetensors.index.json"):
        line = f"watermark embed --model {model} --arch {ARCH} --data digits --out {shard} --force".split()
        code, _, err = run(capsys, monkeypatch, tmp_path, *line, "--key", files / "owner.key")
        assert code == 2
        assert "different files" in err
    assert shard.read_bytes() == before
