"""Independent models are trained once and kept."""

from __future__ import annotations

import json
import re
from contextlib import nullcontext

import pytest
import torch
from typer.testing import CliRunner

from deepseal.adapter import Classifier, Recipe
from deepseal.apps.cli import app
from deepseal.apps.kept import kept_models
from deepseal.watermark import load_key
from deepseal.watermark.independent import independent_models


@pytest.fixture
def quick(base):
    """The base with a recipe of one epoch."""
    return base.copy(metadata={"training": {"recipe": Recipe(epochs=1).as_dict()}})


class Titles:
    """What is reported."""

    def __init__(self):
        self.seen = []

    def __call__(self, title):
        self.seen.append(title)
        return nullcontext()


def test_the_second_key_reads_what_the_first_trained(quick, digits, tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPSEAL_CACHE", str(tmp_path))
    first, second, more = Titles(), Titles(), Titles()
    models = kept_models(quick, digits.train, 2, first)
    again = kept_models(quick, digits.train, 2, second)
    kept_models(quick, digits.train, 3, more)
    assert first.seen == ["training independent model 1 of 2", "training independent model 2 of 2"]
    assert second.seen == []
    assert more.seen == ["training independent model 3 of 3"]
    prints = [model.fingerprint() for model in models]
    assert prints == [model.fingerprint() for model in again]
    assert prints == [model.fingerprint() for model in independent_models(quick, digits.train, 2)]
    assert len({*prints, quick.fingerprint()}) == 3


def test_other_data_or_another_recipe_is_another_model(quick, base, digits, tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPSEAL_CACHE", str(tmp_path))
    some = digits.train.take(torch.arange(200))
    other = base.copy(metadata={"training": {"recipe": Recipe(epochs=2).as_dict()}})
    made = [kept_models(*given, 1, Titles())[0] for given in ((quick, digits.train), (quick, some), (other, some))]
    assert len({model.fingerprint() for model in made}) == 3


def test_a_damaged_file_is_made_again(quick, digits, tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPSEAL_CACHE", str(tmp_path))
    (model,) = kept_models(quick, digits.train, 1, Titles())
    (path,) = tmp_path.rglob("*.safetensors")
    path.write_bytes(path.read_bytes()[:1000])
    titles = Titles()
    (again,) = kept_models(quick, digits.train, 1, titles)
    assert len(titles.seen) == 1
    assert again.fingerprint() == model.fingerprint()
    assert kept_models(quick, digits.train, 1, Titles())[0].fingerprint() == model.fingerprint()


def test_a_folder_that_cannot_be_written_to_costs_time_only(quick, digits, tmp_path, monkeypatch):
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("DEEPSEAL_CACHE", str(blocked))
    assert len(kept_models(quick, digits.train, 1, Titles())) == 1


def test_a_module_without_a_name_is_trained_each_time(digits, tmp_path, monkeypatch):
    monkeypatch.setenv("DEEPSEAL_CACHE", str(tmp_path))
    net = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
    model = Classifier(net, digits.spec, metadata={"training": {"recipe": Recipe(epochs=1).as_dict()}})
    assert len(kept_models(model, digits.train, 1, Titles())) == 1
    assert list(tmp_path.rglob("*.safetensors")) == []


def test_blackmarks_on_the_command_line(files, tmp_path, cache):
    """Key, mark, verdict, as a user types it; the three independent models are trained on the way."""
    model, key, marked = files / "base.safetensors", tmp_path / "owner.key", tmp_path / "marked.safetensors"
    params = ["-p", "bits=24", "-p", "votes=5", "-p", "strength=0.3", "-p", "steps=300"]
    common = ["--data", "digits", "--model", str(model), "--json"]
    made = run("watermark", "keygen", *common, "--scheme", "blackmarks", *params, "--owner", "Own", "--out", str(key))
    assert made["results"]["cluster_sizes"] == [5, 5]
    assert made["results"]["triggers"] == 24 * 5
    assert load_key(key).scheme == "blackmarks"
    assert len(list(cache.rglob("*.safetensors"))) >= 3
    embedded = run(
        "watermark", "embed", *common, "--key", str(key), "--out", str(marked), "--max-false-positive", "1e-6"
    )
    assert embedded["results"]["verdict"] == "owned"
    found = run(
        "watermark", "verify", "--model", str(marked), "--key", str(key), "--max-false-positive", "1e-4", "--json"
    )
    assert (found["results"]["verdict"], found["results"]["message"]) == ("owned", "Own")


def run(*words):
    result = CliRunner().invoke(app, list(words))
    assert result.exit_code == 0, re.sub(r"\s+", " ", result.output + result.stderr)
    return json.loads(result.stdout)
