"""``deepseal private serve | query`` as real processes."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from deepseal.adapter import save
from deepseal.secure_inference.compile import compile_model

DEEPSEAL = [sys.executable, "-m", "deepseal"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, base, digits):
    place = tmp_path_factory.mktemp("private")
    program, weights = compile_model(base, digits.calibration)
    program.save(place / "program")
    weights.save(place / "program")
    save(base, place / "base.safetensors")
    np.save(place / "x.npy", digits.test.x[:3].numpy())
    np.save(place / "one.npy", digits.test.x[0].numpy())
    return place


@pytest.fixture(scope="module")
def server(folder):
    with serving(folder) as address:
        yield address


@contextlib.contextmanager
def serving(folder, *more):
    """The address of ``private serve``."""
    words = [*DEEPSEAL, "private", "serve", "program", "--listen", "127.0.0.1:0", "--accept-public", *more]
    with subprocess.Popen(words, cwd=folder, env=ENV, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as run:
        said = []
        for line in run.stderr:
            said.append(line)
            if "serving on" in line:
                break
        assert "public to every client: the architecture" in "".join(said)
        yield said[-1].split("serving on ")[1].split(";")[0]
        run.send_signal(signal.SIGINT)
        out, _ = run.communicate(timeout=30)
        assert run.returncode == 0, out
        assert out.startswith("served ") and "private.serve, " in out


def run_private(folder, *words):
    done = subprocess.run(
        [*DEEPSEAL, "private", *words], cwd=folder, env=ENV, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stdout, done.stderr


def query(folder, *words):
    return run_private(folder, "query", *words)


def test_query(folder, server, base, digits):
    code, out, err = query(folder, "program/public", "--connect", server, "--input", "x.npy", "--json")
    assert code == 0, err
    results = json.loads(out)["results"]
    assert results["label"] == base.predict(digits.test.x[:3]).tolist()
    assert {"bytes_sent", "bytes_received", "seconds_setup", "seconds_online"} <= results.keys()
    assert results["security"].startswith("semi-honest; a malicious client")
    words = ["program/public", "--connect", server, "--input", "one.npy", "--record", "one.json", "--json"]
    code, out, _ = query(folder, *words)
    assert code == 0
    assert json.loads(out)["results"]["label"] == int(base.predict(digits.test.x[:1])[0])
    code, _, err = query(folder, *words)
    assert (code, err.count("\n")) == (2, 1)
    assert query(folder, *words, "--force")[0] == 0


def test_estimate_is_what_a_query_takes(folder, server):
    """Bytes exactly, live and ahead; the record says what each layer adds."""
    for words in ([], ["--ahead"]):
        code, out, err = run_private(folder, "estimate", "program/public", "--samples", "3", *words, "--json")
        assert code == 0, err
        said = json.loads(out)["results"]
        code, out, err = query(folder, "program/public", "--connect", server, "--input", "x.npy", *words, "--json")
        assert code == 0, err
        found = json.loads(out)["results"]
        assert (said["bytes_sent"], said["bytes_received"]) == (found["bytes_sent"], found["bytes_received"])
        assert said["bytes"] == sum(layer["up"] + layer["down"] for layer in said["layers"])
        assert said["seconds"] > 0
        offline = found["offline"] or {"bytes_sent": 0, "bytes_received": 0}
        assert said["offline_bytes"] == offline["bytes_sent"] + offline["bytes_received"]


def test_refusals(folder, server, tmp_path):
    np.save(folder / "wide.npy", np.zeros((1, 9, 9)))
    np.save(folder / "pickle.npy", np.array([{}], dtype=object), allow_pickle=True)
    cases = [
        (["program/public", "--input", "wide.npy"], "inputs of shape"),
        (["program/public", "--input", "pickle.npy"], "an array in pickle.npy"),
        (["program/public", "--input", "none.npy"], "samples in a .npy file"),
        (["nowhere", "--input", "x.npy"], "a program"),
        (["program/public", "--input", "x.npy", "--protocol", "gmw"], "a protocol of mixed, yao, yao-client"),
        (["program/public", "--input", "x.npy", "--protocol", "yao"], "protocol"),
    ]
    for words, text in cases:
        code, out, err = query(folder, *words, "--connect", server)
        assert (code, out) == (2, ""), words
        assert text in err, (words, err)
        assert err.count("\n") == 1, err


@pytest.mark.parametrize("protocol", ["yao", "yao-client"])
def test_everything_garbled(folder, base, digits, protocol):
    """The same answer in the other protocols, and nearly the bytes of the estimate."""
    with serving(folder, "--protocol", protocol) as address:
        words = ["program/public", "--connect", address, "--input", "one.npy", "--protocol", protocol, "--json"]
        code, out, err = query(folder, *words)
    assert code == 0, err
    found = json.loads(out)["results"]
    assert found["label"] == int(base.predict(digits.test.x[:1])[0])
    if protocol == "yao":
        code, out, err = run_private(folder, "estimate", "program/public", "--protocol", "yao", "--json")
        assert code == 0, err
        said = json.loads(out)["results"]
        assert said["bytes_sent"] == found["bytes_sent"]
        assert said["bytes_received"] == pytest.approx(found["bytes_received"], rel=0.01)


def test_nobody_serves(folder):
    start = time.monotonic()
    code, out, err = query(folder, "program/public", "--connect", "127.0.0.1:9", "--input", "x.npy", "--timeout", "1")
    assert (code, out) == (2, "")
    assert err.count("\n") == 1
    assert time.monotonic() - start < 40
