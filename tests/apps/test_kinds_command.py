"""The command line on a network without classes that takes tokens and their mask: the owner's own code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
import torch

from deepseal.adapter import Classifier, save
from deepseal.adapter.http_client import HttpClient
from deepseal.adapter.remote import RemoteOracle

OWN_CODE = """
import torch
from torch import nn
from deepseal.adapter import Dataset, Field, Inputs, InputSpec, Split

SPEC = InputSpec(
    shape=(),
    num_classes=0,
    fields={
        "tokens": Field((-1,), bounds=(0, 49), integer=True),
        "mask": Field((-1,), bounds=(0, 1), integer=True, mask=True),
    },
    output="hidden",
    reduce="mask",
)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(50, 64)
        self.first, self.second, self.last = nn.Linear(64, 128), nn.Linear(128, 128), nn.Linear(128, 32)

    def forward(self, *, tokens, mask):
        x = self.words(tokens) + (self.words(tokens) * mask[..., None]).mean(dim=1, keepdim=True)
        return {"hidden": self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))}


def net():
    torch.manual_seed(0)
    return Net()


def batch(count, seed):
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(10) < torch.randint(3, 11, (count, 1), generator=generator)).long()
    return Split.unlabelled(
        Inputs({"tokens": torch.randint(1, 50, (count, 10), generator=generator) * mask, "mask": mask})
    )


def data():
    return Dataset("words", SPEC, batch(300, 0), batch(60, 1), batch(60, 2))
"""


@pytest.fixture
def deepseal(tmp_path, capsys, monkeypatch):
    """Runs the command line in this process: exit code, stdout, stderr."""
    (tmp_path / "own_words.py").write_text(OWN_CODE)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def call(*arguments):
        from deepseal.apps import cli

        monkeypatch.setattr(sys, "argv", ["deepseal", *map(str, arguments)])
        with pytest.raises(SystemExit) as caught:
            cli.main()
        return (caught.value.code, *capsys.readouterr())

    return call


def test_embeds_verifies_and_attacks(deepseal, tmp_path):
    import own_words  # type: ignore[import-not-found]

    save(Classifier(own_words.net(), own_words.SPEC), tmp_path / "base.safetensors")
    own = ["--arch", "own_words:net", "--data", "own_words:data"]
    code, out, err = deepseal("model", "inspect", "--model", "base.safetensors", *own[:2], "--json")
    assert code == 0, err
    assert json.loads(out)["results"]["spec"]["fields"]["mask"]["mask"] is True
    keygen = ["--owner", "me", "-p", "bits=64", "--out", "owner.key", "--json"]
    code, out, err = deepseal("watermark", "keygen", "--model", "base.safetensors", *own, *keygen)
    assert code == 0, err
    public = json.loads(out)["results"]
    assert (public["groups"], set(public["pool"].values())) == (16, {"mask"})
    marked = ["--out", "marked.safetensors", "--json"]
    code, out, err = deepseal("watermark", "embed", "--model", "base.safetensors", *own, "--key", "owner.key", *marked)
    assert code == 0, err
    result = json.loads(out)["results"]
    assert (result["verdict"], result["verified_from_file"]) == ("owned", True)
    assert 0 < result["output_change"] < 0.1
    code, out, err = deepseal("watermark", "embed", "--help")
    pruned = ["-p", "sparsity=0.3", "--out", "pruned.safetensors"]
    code, out, err = deepseal("attack", "run", "prune", "--model", "marked.safetensors", *own, *pruned)
    assert code == 0, err
    assert "answers moved by" in out or "output_change" in out
    for suspect, expected in (("marked", 0), ("pruned", 0), ("base", 1)):
        line = ["--model", f"{suspect}.safetensors", "--arch", "own_words:net", "--key", "owner.key"]
        code, out, err = deepseal("watermark", "verify", *line)
        assert code == expected, out + err
    code, _, err = deepseal("model", "evaluate", "--model", "base.safetensors", *own)
    assert code == 2
    assert "with classes" in err
    assert err.count("\n") == 1


def test_what_takes_one_float_tensor_says_so(deepseal, tmp_path):
    import own_words

    save(Classifier(own_words.net(), own_words.SPEC), tmp_path / "base.safetensors")
    own = ["--arch", "own_words:net", "--data", "own_words:data"]
    for command in (
        ["private", "compile", "--model", "base.safetensors", *own, "--out", "program"],
        ["private", "compress", "--model", "base.safetensors", *own, "--out", "small.safetensors"],
        ["attack", "run", "distil", "--model", "base.safetensors", *own, "--out", "student.safetensors"],
        ["attack", "run", "pgd", "--model", "base.safetensors", *own, "--out", "adversarial.npz"],
        ["watermark", "keygen", "--model", "base.safetensors", *own, "--scheme", "adi", "--owner", "me", "--out", "k"],
    ):
        code, out, err = deepseal(*command)
        assert (code, out) == (2, ""), (command, out, err)
        *_, last = err.splitlines()  # after the remark that a key is not encrypted
        assert last.startswith("deepseal: expected"), (command, err)
        assert len(last) < 300, last


def test_is_served_and_evaluated_from_the_command_line(deepseal, tmp_path):
    """Its classes have no test here: an embedding is asked by hand."""
    import own_words

    model = Classifier(own_words.net(), own_words.SPEC)
    save(model, tmp_path / "base.safetensors")
    command = [sys.executable, "-m", "deepseal", "model", "serve", "--model", "base.safetensors", "--name", "words"]
    command += ["--arch", "own_words:net", "--listen", "127.0.0.1:0", "--max-length", "16"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = re.search(r"on (http://\S+);", process.stderr.readline())[1]
            x = own_words.batch(9, 5).x
            with RemoteOracle.connect(HttpClient(url), "words", own_words.SPEC) as oracle:
                assert torch.equal(oracle.query(x), model.query(x))
            line = ["model", "evaluate", "--url", f"{url}/v2/models/words", "--data", "own_words:data"]
            code, out, err = deepseal(*line)
            assert (code, out, err.count("\n")) == (2, "", 1)
            assert "with classes" in err
        finally:
            process.kill()
