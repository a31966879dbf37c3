"""A key of a black-box scheme is verified through a server; one of a white-box scheme is refused there."""

from __future__ import annotations

import dataclasses
import json
from typing import ClassVar

import numpy as np
import pytest
import torch
from command_line import record_of, run
from served import scores, scripted, serving

from deepseal.adapter import InputSpec, Oracle
from deepseal.adapter.http_client import HttpClient
from deepseal.adapter.remote import RemoteOracle
from deepseal.adapter.remote_model import model_address
from deepseal.errors import InputError
from deepseal.rng import SECRET_BYTES, Rng
from deepseal.watermark import SCHEMES, Key, save_key, verify
from deepseal.watermark.plain import Plain
from deepseal.watermark.scheme import Extraction, Observation

SPEC = InputSpec(shape=(1,), num_classes=2)
BITS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class Asked(Plain):
    """A scheme for the tests: bit i of the message is the label of the input i / bits."""

    name: ClassVar[str] = "asked"

    def observe(self, model, key):
        x = torch.arange(key.bits).reshape(-1, 1) / key.bits
        return Observation({"labels": model.query(x) if model.output == "labels" else model.query(x).argmax(1)})

    def decode(self, observation, key):
        bits = observation.values["labels"].numpy().astype(np.uint8)
        right = np.where(bits == key.message(), 1.0, -1.0)
        return Extraction(bits, np.ones(key.bits, dtype=bool), np.full(key.bits, 0.5), right)


@pytest.fixture
def asked(monkeypatch):
    monkeypatch.setitem(SCHEMES._entries, "asked", f"{__name__}:Asked")
    public = {"bits": BITS, "access": "black-box"}
    secret = Rng(7).bytes(SECRET_BYTES)
    params = Asked(bits=BITS).as_dict()
    return Key(scheme="asked", params=params, owner="Example Ltd", secret=secret, spec=SPEC, public=public)


def model(bits):
    """Logits whose label at i / BITS is bit i."""
    table = torch.eye(2)[torch.from_numpy(np.asarray(bits, dtype=np.int64))]
    return lambda x: table[(x[:, 0] * BITS).round().long()]


@pytest.mark.parametrize("output", ["labels", "probabilities", "logits"])
def test_owned_and_not_owned_through_a_socket(asked, output):
    other = Rng(1).numpy().integers(0, 2, BITS)
    for bits, verdict in ((asked.message(), "owned"), (other, "not-owned")):
        with (
            serving(Oracle(model(bits), SPEC, output=output)) as url,
            RemoteOracle.connect(HttpClient(url), "suspect", SPEC) as oracle,
        ):
            result = verify(oracle, asked, max_false_positive=1e-9)
            assert oracle.queries == BITS
        assert result.verdict == verdict
        assert result.bits == BITS


def test_command_line(asked, tmp_path, capsys, monkeypatch):
    save_key(asked, tmp_path / "asked.key")
    with serving(Oracle(model(asked.message()), SPEC)) as url:
        line = f"watermark verify --remote {url} --name suspect --key asked.key --null-keys 0"
        code, out, err = run(capsys, monkeypatch, tmp_path, *line.split(), "--json")
        assert code == 0, err
        record = record_of(out)
        assert record["results"]["verdict"] == "owned"
        assert record["results"]["queries"] == BITS
        assert [entry["inputs"] for entry in record["results"]["query_log"]] == [64, 64]
        assert record["fingerprints"].keys() == {"key"}
        code, out, err = run(capsys, monkeypatch, tmp_path, *line.split())
        assert (code, err) == (0, "")
        assert url in out
        code, out, err = run(capsys, monkeypatch, tmp_path, *line.split(), "--max-queries", BITS - 1)
        assert (code, out) == (2, "")
        assert "more queries" in err


@pytest.mark.parametrize(
    "address", ["{url}/v2/models/suspect", "{url}/v2/models/suspect/infer", "{url} --name suspect"]
)
@pytest.mark.parametrize("option", ["--url", "--remote"])
def test_every_spelling_of_an_address(asked, tmp_path, capsys, monkeypatch, address, option):
    save_key(asked, tmp_path / "owner.key")
    with serving(Oracle(model(asked.message()), SPEC)) as url:
        line = f"watermark verify {option} {address.format(url=url)} --key owner.key --json"
        code, out, err = run(capsys, monkeypatch, tmp_path, *line.split())
    assert code == 0, err
    record = record_of(out)
    assert (record["results"]["verdict"], record["results"]["queries"]) == ("owned", BITS)
    assert (record["params"]["remote"], record["params"]["name"]) == (url, "suspect")


def test_a_name_that_needs_escapes_and_a_server_under_a_path(asked):
    assert model_address("https://a/in/front/v2/models/a%20b") == ("https://a/in/front", "a b")
    with serving(Oracle(model(asked.message()), SPEC), "a b") as url:
        server, name = model_address(f"{url}/v2/models/a%20b/")
        with RemoteOracle.connect(HttpClient(server), name, SPEC) as oracle:
            assert verify(oracle, asked, max_false_positive=1e-9).verdict == "owned"


@pytest.mark.parametrize("shape", [[], [1]], ids=["row", "column"])
def test_labels_under_any_name(asked, shape):
    """Another server's labels: whole numbers, one a sample, under a name that says nothing."""
    described = {
        "name": "suspect",
        "platform": "other",
        "inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 1]}],
        "outputs": [{"name": "predict", "datatype": "INT64", "shape": [-1, *shape]}],
    }

    def infer(request, _number):
        x = torch.tensor(request["inputs"][0]["data"]).reshape(-1, 1)
        labels = model(asked.message())(x).argmax(1).tolist()
        return scores(labels, [len(x), *shape], name="predict", datatype="INT64")

    with scripted(described, infer) as url, RemoteOracle.connect(HttpClient(url), "suspect", SPEC) as oracle:
        assert oracle.output == "labels"
        assert verify(oracle, asked, max_false_positive=1e-9).verdict == "owned"


def test_a_key_that_needs_the_weights(key, base, files, capsys, monkeypatch, tmp_path):
    with pytest.raises(InputError, match="a model with its weights, which deepsigns reads"):
        verify(base.oracle(), key)
    with serving(base.oracle()) as url:
        line = f"watermark verify --remote {url} --name suspect --key owner.key --record {tmp_path / 'r.json'}"
        code, out, err = run(capsys, monkeypatch, files, *line.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "with its weights" in err
    assert json.loads((tmp_path / "r.json").read_text())["results"]["queries"] == 0
