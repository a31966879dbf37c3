"""Models of every kind through a socket: several inputs, tokens, masks, lengths that vary, one logit, no classes."""

from __future__ import annotations

import dataclasses
import http.client
import json
from urllib.parse import urlsplit

import pytest
import torch
from networks import Decoder, OneLogit, encoder, sentences
from served import scores, scripted, serving
from torch import nn

from deepseal.adapter import Classifier, Field, Inputs, InputSpec, Split
from deepseal.adapter.http_client import HttpClient, Patience
from deepseal.adapter.oracle import accuracy
from deepseal.adapter.remote import RemoteOracle
from deepseal.apps.model_server import Limits
from deepseal.errors import InputError, ProtocolError, TransportError

QUICK = Patience(timeout=10.0, attempts=2, first_wait=0.01, longest_wait=0.5)
INFER = "/v2/models/suspect/infer"


class Beside(nn.Module):
    """A picture and a row of numbers, by keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.picture, self.numbers, self.head = nn.Conv2d(3, 8, 3), nn.Linear(4, 8), nn.Linear(16, 5)

    def forward(self, *, picture, numbers):
        seen = torch.relu(self.picture(picture)).mean(dim=(2, 3))
        return self.head(torch.cat([seen, torch.relu(self.numbers(numbers))], dim=1))


def beside(count=7):
    torch.manual_seed(0)
    fields = {
        "picture": Field((3, 6, 6), bounds=(0, 1), mean=(0.4, 0.5, 0.6), std=(0.2,)),
        "numbers": Field((4,), bounds=(-3, 3)),
    }
    x = Inputs({"picture": torch.rand(count, 3, 6, 6), "numbers": torch.rand(count, 4) * 6 - 3})
    return Classifier(Beside(), InputSpec((), 5, fields=fields)), x


def decoder(count=7):
    torch.manual_seed(0)
    spec = InputSpec((-1,), 0, bounds=(0, 59), integer=True, output="logits", reduce="last")
    return Classifier(Decoder(), spec), torch.randint(0, 60, (count, 9))


def one_logit(count=7):
    torch.manual_seed(0)
    return Classifier(OneLogit(), InputSpec((1, 8, 8), 2)), torch.rand(count, 1, 8, 8)


CASES = {
    "two-inputs": beside,
    "classes": lambda: (encoder(3), sentences(7)),
    "embedding": lambda: (encoder(), sentences(7)),
    "tokens": decoder,
    "one-logit": one_logit,
}


def connect(url, spec, **options):
    return RemoteOracle.connect(HttpClient(url, patience=QUICK), "suspect", spec, **options)


def post(url, body):
    """Status and JSON of one request, with nothing but the standard library."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    try:
        connection.request("POST", INFER, json.dumps(body).encode())
        reply = connection.getresponse()
        return reply.status, json.loads(reply.read())
    finally:
        connection.close()


def described(url):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    try:
        connection.request("GET", "/v2/models/suspect")
        return json.loads(connection.getresponse().read())
    finally:
        connection.close()


@pytest.mark.parametrize("output", ["logits", "probabilities", "labels"])
@pytest.mark.parametrize("case", CASES)
def test_same_answers_as_the_local_oracle(case, output):
    model, x = CASES[case]()
    if model.spec.num_classes == 0 and output != "logits":
        with pytest.raises(InputError, match="with classes"):
            model.oracle(output=output)
        return
    local = model.oracle(output=output)
    with serving(model.oracle(output=output)) as url, connect(url, model.spec, batch=3) as remote:
        assert remote.output == output
        answers = remote.query(x)
        assert [entry["inputs"] for entry in remote.log] == [3, 3, 1]
        assert remote.queries == 7
        assert remote.query(x[:0]).shape[0] == 0
    assert torch.equal(answers, torch.cat([local.query(part) for part in x.split(3)]))


def test_what_the_server_says_it_takes():
    model, _ = beside()
    with serving(model.oracle(output="logits")) as url:
        assert described(url)["inputs"] == [
            {"name": "picture", "datatype": "FP32", "shape": [-1, 3, 6, 6]},
            {"name": "numbers", "datatype": "FP32", "shape": [-1, 4]},
        ]
    with serving(encoder().oracle(output="logits")) as url:
        assert described(url)["inputs"] == [
            {"name": "tokens", "datatype": "INT64", "shape": [-1, -1]},
            {"name": "mask", "datatype": "INT64", "shape": [-1, -1]},
        ]
        assert described(url)["outputs"] == [{"name": "logits", "datatype": "FP32", "shape": [-1, -1]}]


def test_a_foreign_client_asks_with_tokens_and_a_mask():
    triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed", exc_type=Exception)
    model, x = encoder(3), sentences(4)
    with serving(model.oracle(output="logits")) as url:
        client = triton.InferenceServerClient(url.removeprefix("http://"))
        inputs = []
        for name, values in x.tensors.items():
            inputs.append(triton.InferInput(name, list(values.shape), "INT64"))
            inputs[-1].set_data_from_numpy(values.numpy(), binary_data=False)
        wanted = triton.InferRequestedOutput("logits", binary_data=False)
        answers = client.infer("suspect", inputs, outputs=[wanted]).as_numpy("logits")
    assert torch.equal(torch.from_numpy(answers), model.query(x))


def test_lengths_vary_from_request_to_request():
    model, x = encoder(3), sentences(6)
    longer = x.map(lambda tensor: nn.functional.pad(tensor, (0, 9)))
    with serving(model.oracle(output="logits")) as url, connect(url, model.spec) as remote:
        for batch in (x, longer, x.map(lambda tensor: tensor[:, :4])):
            assert torch.equal(remote.query(batch), model.query(batch))


def test_is_a_black_box_with_an_accuracy():
    model, x = encoder(3), sentences(40)
    data = Split(x, model.predict(x))
    with serving(model.oracle()) as url, connect(url, model.spec) as remote:
        assert accuracy(remote, data).value == 1.0


def test_budgets_count_samples():
    model, x = encoder(), sentences(5)
    with serving(model.oracle(output="logits", max_queries=8)) as url, connect(url, model.spec) as remote:
        remote.query(x)
        with pytest.raises(TransportError, match="at most 3 more queries"):
            remote.query(x)
        assert remote.query(x[:3]).shape == (3, 32)
    with serving(model.oracle(output="logits")) as url, connect(url, model.spec, max_queries=7) as remote:
        remote.query(x)
        with pytest.raises(InputError, match="at most 2 more queries"):
            remote.query(x)
        assert remote.queries == 5


def tensor(name, data, datatype="INT64"):
    shape = [len(data), len(data[0])] if isinstance(data[0], list) else [len(data)]
    return {"name": name, "shape": shape, "datatype": datatype, "data": data}


TOKENS, MASK = tensor("tokens", [[5, 9, 0], [7, 3, 2]]), tensor("mask", [[1, 1, 0], [1, 1, 1]])


class TestRefusals:
    @pytest.mark.parametrize(
        ("inputs", "told"),
        [
            ([TOKENS], "expected 2 inputs, 'tokens', 'mask'; found 1"),
            ([TOKENS, TOKENS], "the input 'mask' of INT64; found 'tokens'"),
            ([TOKENS, {**MASK, "name": "masks"}], "the input 'mask' of INT64; found 'masks' of INT64"),
            ([{**TOKENS, "datatype": "FP32"}, MASK], "the input 'tokens' of INT64; found 'tokens' of FP32"),
            ([TOKENS, {**MASK, "datatype": "BOOL", "data": [True] * 6}], "'mask' of INT64; found 'mask' of BOOL"),
            ([{**TOKENS, "data": [0.5] * 6}, MASK], "INT64 numbers"),
            ([{**TOKENS, "data": [60] * 6}, MASK], "tokens in [0, 59]"),
            ([TOKENS, {**MASK, "data": [2] * 6}], "mask in [0, 1]"),
            ([{**TOKENS, "shape": [2, 3, 1]}, MASK], "tokens of shape (N, -1)"),
            ([{**TOKENS, "shape": [1, 6]}, MASK], "as many samples in every input"),
            ([{**TOKENS, "shape": [3, 3]}, MASK], "as many numbers as the shape"),
            ([tensor("tokens", [[1] * 9]), tensor("mask", [[1] * 9])], "sizes up to 8 in 'tokens'; found 9"),
            ([tensor("tokens", [[1]] * 5), tensor("mask", [[1]] * 5)], "1 to 4 inputs"),
        ],
    )
    def test_are_clear_and_cost_nothing(self, inputs, told):
        oracle = encoder().oracle(output="logits", max_queries=2)
        with serving(oracle, limits=Limits(batch=4, length=8)) as url:
            status, body = post(url, {"inputs": inputs})
            assert (status, list(body)) == (400, ["error"])
            assert told in body["error"]
            assert oracle.queries == 0
            assert post(url, {"inputs": [MASK, TOKENS]})[0] == 200

    @pytest.mark.parametrize(
        ("x", "told"),
        [
            (sentences(3)["tokens"], "inputs called tokens, mask"),
            (sentences(3).map(lambda t: t.float()), "tokens that are integers"),
            (sentences(3).map(lambda t: t + 60), "tokens in"),
        ],
    )
    def test_before_anything_is_sent(self, x, told):
        with serving(encoder().oracle(output="logits")) as url, connect(url, encoder().spec) as remote:
            with pytest.raises(InputError, match=told):
                remote.query(x)
            assert (remote.queries, remote.log) == (0, ())

    def test_models_that_do_not_fit_each_other(self):
        with serving(encoder().oracle(output="logits")) as url:
            with pytest.raises(InputError, match="a model with one input; found .*tokens.*mask"):
                connect(url, InputSpec((3,), 2))
            with pytest.raises(InputError, match="inputs called tokens, length"):
                connect(
                    url, dataclasses.replace(encoder().spec, fields={"tokens": Field((-1,)), "length": Field((1,))})
                )
            with pytest.raises(InputError, match="floating-point numbers in 'tokens'; found 'INT64'"):
                fields = {"tokens": Field((-1,)), "mask": encoder().spec.fields["mask"]}
                connect(url, dataclasses.replace(encoder().spec, fields=fields))


class TestForeignServers:
    """What other servers say and answer, from a script."""

    FIELDS = encoder().spec.fields

    def spec(self, **changed):
        return dataclasses.replace(encoder().spec, **changed)

    def described(self, *datatypes, shape=(-1, -1), outputs=("y", "FP32", (-1, 32))):
        inputs = [{"name": n, "datatype": d, "shape": list(shape)} for n, d in zip(self.FIELDS, datatypes, strict=True)]
        name, datatype, answer = outputs
        found = [{"name": name, "datatype": datatype, "shape": list(answer)}]
        return {"name": "suspect", "platform": "other", "inputs": inputs, "outputs": found}

    def test_datatypes_are_the_server_s(self):
        seen = []

        def infer(request, _number):
            seen.append(request)
            return scores([0.25] * 32, [1, 32], name="y")

        with scripted(self.described("INT32", "BOOL"), infer) as url, connect(url, self.spec()) as remote:
            assert remote.output == "logits", "a model without classes has nothing else to give"
            assert torch.equal(remote.query(sentences(1)), torch.full((1, 32), 0.25))
        tokens, mask = seen[0]["inputs"]
        assert (tokens["datatype"], mask["datatype"]) == ("INT32", "BOOL")
        assert tokens["data"] == sentences(1)["tokens"].flatten().tolist()
        assert mask["data"] == [bool(flag) for flag in sentences(1)["mask"].flatten()]

    def test_values_that_the_server_s_datatype_cannot_hold_are_not_sent(self):
        spec = self.spec(fields={**self.FIELDS, "tokens": Field((-1,), bounds=(0, 999), integer=True)})
        x = sentences(2).map(lambda tensor: tensor * 1)
        x = Inputs({"tokens": x["tokens"] + 300, "mask": x["mask"]})
        with (
            scripted(self.described("UINT8", "INT64"), lambda *_: scores([], [0])) as url,
            connect(url, spec) as remote,
        ):
            with pytest.raises(InputError, match="values that fit UINT8 in 'tokens'"):
                remote.query(x)
            assert (remote.queries, remote.log) == (0, ())

    def test_answers_a_token_are_reduced_as_the_spec_says(self):
        x = sentences(3)
        hidden = torch.arange(3 * 12 * 2.0).reshape(3, 12, 2)
        reply = scores(hidden.flatten().tolist(), [3, 12, 2], name="y")
        with scripted(self.described("INT64", "INT64"), lambda *_: reply) as url, connect(url, self.spec()) as remote:
            weights = x["mask"].float()[..., None]
            assert torch.allclose(remote.query(x), (hidden * weights).sum(1) / weights.sum(1))

    def test_one_score_of_two_classes(self):
        described = self.described("INT64", "INT64", outputs=("score", "FP32", (-1, 1)))
        reply = scores([0.25, 0.75], [2, 1], name="score")
        with scripted(described, lambda *_: reply) as url:
            with connect(url, self.spec(num_classes=2), output="probabilities") as remote:
                assert remote.query(sentences(2)).tolist() == [[0.75, 0.25], [0.25, 0.75]]
            with connect(url, self.spec(num_classes=2), output="logits") as remote:
                assert remote.query(sentences(2)).tolist() == [[0.0, 0.25], [0.0, 0.75]]

    def test_widths_that_change(self):
        def infer(_request, number):
            return scores([0.0] * (number + 1), [1, number + 1], name="y")

        with (
            scripted(self.described("INT64", "INT64"), infer) as url,
            connect(url, self.spec(), batch=1) as remote,
            pytest.raises(ProtocolError, match="answers of one width"),
        ):
            remote.query(sentences(2))

    @pytest.mark.parametrize("shape", [[2], [2, 0], [3, 32], [2, 3, 4, 5]])
    def test_no_embeddings(self, shape):
        count = int(torch.tensor(shape).prod())
        reply = scores([0.0] * count, shape, name="y")
        with (
            scripted(self.described("INT64", "INT64"), lambda *_: reply) as url,
            connect(url, self.spec(reduce="none")) as remote,
            pytest.raises(ProtocolError, match="scores of shape"),
        ):
            remote.query(sentences(2))

    def test_labels_where_there_are_no_classes(self):
        with (
            scripted(self.described("INT64", "INT64"), lambda *_: scores([], [0])) as url,
            pytest.raises(InputError, match="with classes"),
        ):
            connect(url, self.spec(), output="labels")
