"""``deepseal private compress`` as users run it, up to a question to a server."""

from __future__ import annotations

import json
import subprocess
import sys
import threading

import numpy as np
import pytest
from test_private_compile import deepseal, refused  # noqa: F401

from deepseal.adapter import checkpoint

QUICK = ("-p", "steps=4", "-p", "epochs=6", "-p", "step_epochs=2", "-p", "batch_size=64", "-p", "max_loss=2")


@pytest.fixture(scope="module")
def compressed(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("compress")
    done = deepseal("private", "compress", "--model", files / "base.safetensors", "--data", "digits", "--out",
                    folder / "small.safetensors", "-p", "fold=10", "-p", "error=0.4", *QUICK, "--json")  # fmt: skip
    return folder, json.loads(done.stdout), done.stderr


def test_the_record_says_what_was_gained_lost_and_revealed(compressed, files, digits):
    folder, record, said = compressed
    results = record["results"]
    assert record["kind"] == "private.compress" and record["status"] == "ok" and record["seed"] == 0
    assert results["reached"] and results["fold"] >= 10.0
    before, after = results["cost"]["before"], results["cost"]["after"]
    assert results["fold"] == before["multiplications"] / after["multiplications"]
    assert after["linear_bytes"] < before["linear_bytes"] / 5
    models = [checkpoint.load(path) for path in (files / "base.safetensors", folder / "small.safetensors")]
    for name, model in zip(("before", "after"), models, strict=True):
        assert results[f"accuracy_{name}"] == model.accuracy(digits.test).value
    low, high = results["difference_interval"]
    assert low <= results["difference"] <= high
    assert results["difference"] == pytest.approx(results["accuracy_after"] - results["accuracy_before"])
    assert results["n"] == len(digits.test) and results["program"]["accuracy"] > 0.9
    assert "training samples span" in results["reveals"] and results["reveals"] in said
    assert results["compile_with"] == ["sparsity=public"] and "-p sparsity=public" in said
    assert record["fingerprints"]["model"] == models[1].fingerprint() != record["fingerprints"]["base"]


def test_compile_simulate_serve_and_query_take_it(compressed, digits):
    folder, record, _ = compressed
    out = folder / "program"
    model = folder / "small.safetensors"
    done = deepseal("private", "compile", "--model", model, "--data", "digits", "--out", out, "-p", "sparsity=public",
                    "--json")  # fmt: skip
    products = json.loads(done.stdout)["results"]["products"]
    assert products == record["results"]["cost"]["after"]["multiplications"]
    found = json.loads(deepseal("private", "simulate", out, "--data", "digits", "--json").stdout)["results"]
    assert found["accuracy"] == record["results"]["program"]["accuracy"] and found["agreement_with_float"] > 0.97
    np.save(folder / "x.npy", digits.test.x[:3].numpy())
    command = [sys.executable, "-m", "deepseal", "private", "serve", str(out), "--listen", "127.0.0.1:0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as server:
        alarm = threading.Timer(60, server.kill)
        alarm.start()
        try:
            said = []
            for line in server.stderr:
                said.append(line)
                if "serving on " in line:
                    break
            assert "which weights are zero" in said[0] and "training samples span" in said[0]
            address = said[-1].partition("serving on ")[2].partition(";")[0]
            answer = deepseal("private", "query", out / "public", "--connect", address, "--input", folder / "x.npy",
                              "--json")  # fmt: skip
        finally:
            alarm.cancel()
            server.kill()
    model = checkpoint.load(folder / "small.safetensors")
    assert json.loads(answer.stdout)["results"]["label"] == model.predict(digits.test.x[:3]).tolist()


def test_inspect_stays_readable(compressed):
    shown = deepseal("model", "inspect", "--model", compressed[0] / "small.safetensors", "--json").stdout
    metadata = json.loads(shown)["results"]["metadata"]
    assert metadata["projection"]["float32"].endswith(" characters)") and metadata["compression"]["method"] == "both"
    assert len(shown) < 10_000


def test_a_fold_out_of_reach_is_said(files, tmp_path):
    common = ("--model", files / "base.safetensors", "--data", "digits", "--out", tmp_path / "small.safetensors")
    done = deepseal("private", "compress", *common, "-p", "method=pruning", "-p", "fold=3000", *QUICK, "--json")
    record = json.loads(done.stdout)
    assert not record["results"]["reached"] and "was not reached within 2 points" in record["notes"][0]
    assert record["notes"][0] in done.stderr
    folds = [point["fold"] for point in record["results"]["curve"]]
    assert max(folds) >= 3000 and folds[-1] < 3000


def test_bad_input_is_one_line(files, tmp_path, refused):  # noqa: F811
    common = ("private", "compress", "--model", files / "base.safetensors", "--data", "digits")
    out = ("--out", tmp_path / "small.safetensors")
    assert "method" in refused(*common, *out, "-p", "method=magic")
    assert "parameter" in refused(*common, *out, "-p", "share=0.5")
    assert "sparsity" in refused(*common, *out, "-p", "sparsity=2")
    assert "twice" in refused(*common, "--out", files / "base.safetensors", "--force")
    (tmp_path / "small.safetensors").write_text("mine")
    assert "one that exists" in refused(*common, *out)
