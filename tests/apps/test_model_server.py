"""``deepseal model serve`` and ``model evaluate --remote``: the protocol's fields, limits, errors, a clean end."""

from __future__ import annotations

import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import torch
from command_line import ENVIRONMENT, deepseal, record_of, run
from served import description, scores, scripted, serving

from deepseal.adapter import InputSpec, Oracle
from deepseal.apps.model_server import Counts, Limits, serve_model
from deepseal.errors import InputError

SPEC = InputSpec(shape=(2,), num_classes=3)


def third(x):
    return torch.cat([x, x.sum(1, keepdim=True)], 1)


def call(url, method, path, body=None, headers=None):
    """One request with nothing but the standard library: status, headers, JSON."""
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    try:
        content = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        connection.request(method, path, content, headers or {})
        reply = connection.getresponse()
        return reply.status, reply.headers, json.loads(reply.read())
    finally:
        connection.close()


def question(**fields):
    tensor = {"name": "input", "shape": [2, 2], "datatype": "FP32", "data": [0.0, 0.25, 0.5, 1.0]} | fields
    return {"inputs": [tensor]}


@pytest.fixture(scope="module")
def url():
    with serving(Oracle(third, SPEC, output="logits"), limits=Limits(batch=4, body=4096)) as address:
        yield address


INFER = "/v2/models/suspect/infer"


class TestProtocol:
    """Fields as in the OpenAPI description of the Open Inference Protocol: required ones there, none invented."""

    def test_server(self, url):
        for path in ("/v2", "/v2/"):
            status, _, body = call(url, "GET", path)
            assert status == 200
            assert body.keys() == {"name", "version", "extensions"}
        assert call(url, "GET", "/v2/health/live")[::2] == (200, {"live": True})
        assert call(url, "GET", "/v2/health/ready")[0] == 200

    def test_model(self, url):
        status, headers, body = call(url, "GET", "/v2/models/suspect")
        assert status == 200
        assert headers["Content-Type"] == "application/json"
        assert "Server" not in headers
        assert body == {
            "name": "suspect",
            "platform": "pytorch",
            "inputs": [{"name": "input", "datatype": "FP32", "shape": [-1, 2]}],
            "outputs": [{"name": "logits", "datatype": "FP32", "shape": [-1, 3]}],
        }
        assert call(url, "GET", "/v2/models/suspect/ready")[::2] == (200, {"name": "suspect", "ready": True})

    @pytest.mark.parametrize(
        "data",
        [[0.0, 0.25, 0.5, 1.0], [[0.0, 0.25], [0.5, 1.0]], [0, 0.25, 0.5, 1]],
        ids=["flat", "nested", "integers"],
    )
    def test_inference(self, url, data):
        asked = {"id": "42", "parameters": {}, "outputs": [{"name": "logits"}]} | question(data=data)
        assert call(url, "POST", INFER, asked)[::2] == (
            200,
            {
                "model_name": "suspect",
                "id": "42",
                "outputs": [
                    {"name": "logits", "shape": [2, 3], "datatype": "FP32", "data": [0.0, 0.25, 0.25, 0.5, 1.0, 1.5]}
                ],
            },
        )

    def test_labels_are_integers(self):
        with serving(Oracle(third, SPEC)) as address:
            (output,) = call(address, "POST", INFER, question())[2]["outputs"]
        assert output == {"name": "labels", "shape": [2], "datatype": "INT64", "data": [1, 2]}


def test_a_foreign_client(url):
    triton = pytest.importorskip("tritonclient.http", reason="tritonclient[http] is not installed", exc_type=Exception)
    x = np.float32([[0.0, 0.25], [0.5, 1.0]])
    client = triton.InferenceServerClient(url.removeprefix("http://"))
    assert client.is_server_live() and client.is_server_ready() and client.is_model_ready("suspect")
    tensor = triton.InferInput("input", [2, 2], "FP32")
    tensor.set_data_from_numpy(x, binary_data=False)
    wanted = triton.InferRequestedOutput("logits", binary_data=False)
    reply = client.infer("suspect", [tensor], outputs=[wanted], request_id="7")
    assert np.array_equal(reply.as_numpy("logits"), third(torch.from_numpy(x)).numpy())
    assert reply.get_response()["id"] == "7"


class TestRefusals:
    """Every error is the protocol's JSON, and the server goes on."""

    @pytest.mark.parametrize(
        ("method", "path", "body", "status", "message"),
        [
            ("GET", "/", None, 404, "Not Found"),
            ("GET", "/docs", None, 404, "Not Found"),
            ("GET", "/openapi.json", None, 404, "Not Found"),
            ("GET", INFER, None, 405, "Method Not Allowed"),
            ("GET", "/v2/models/other", None, 404, "expected the model 'suspect'"),
            ("POST", "/v2/models/other/infer", question(), 404, "expected the model"),
            ("POST", INFER, b"", 400, "JSON as the request"),
            ("POST", INFER, b"\xff", 400, "JSON as the request"),
            ("POST", INFER, b"[" * 4000, 400, "JSON as the request"),
            ("POST", INFER, [], 400, "JSON object"),
            ("POST", INFER, {}, 400, "one input"),
            ("POST", INFER, {"inputs": question()["inputs"] * 2}, 400, "one input"),
            ("POST", INFER, {"id": 7, **question()}, 400, "text as the id"),
            ("POST", INFER, {"outputs": [{"name": "weights"}], **question()}, 400, "no other output"),
            ("POST", INFER, question(name="x"), 400, "the input 'input'"),
            ("POST", INFER, question(datatype="FP64"), 400, "of FP32"),
            ("POST", INFER, question(datatype="BYTES"), 400, "numeric datatype"),
            ("POST", INFER, question(data=[0.0, 1.0]), 400, "as many numbers"),
            ("POST", INFER, question(data=["a", "b", "c", "d"]), 400, "FP32 numbers"),
            ("POST", INFER, question(data=[0.0, 0.0, 0.0, float("nan")]), 400, "finite inputs"),
            ("POST", INFER, question(data=[0.0, 0.0, 0.0, 7.0]), 400, "inputs in [0, 1]"),
            ("POST", INFER, question(shape=[4], data=[0.0] * 4), 400, "inputs of shape"),
            ("POST", INFER, question(shape=[], data=[0.0]), 400, "1 to 4 inputs"),
            ("POST", INFER, question(shape=[0, 2], data=[]), 400, "1 to 4 inputs"),
            ("POST", INFER, question(shape=[5, 2], data=[0.0] * 10), 400, "1 to 4 inputs"),
            ("POST", INFER, b" " * 5000, 413, "at most 4096 bytes"),
        ],
    )
    def test_is_json(self, url, method, path, body, status, message):
        found, headers, content = call(url, method, path, body)
        assert found == status
        assert content.keys() == {"error"}
        assert message in content["error"]
        assert headers["Content-Type"] == "application/json"
        assert call(url, "POST", INFER, question())[0] == 200

    def test_a_long_body_without_its_length(self, url):
        parts = urlsplit(url)
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
        connection.request("POST", INFER, iter([b" " * 1000] * 5), encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()

    def test_binary_extension(self, url):
        status, _, body = call(url, "POST", INFER, question(), {"Inference-Header-Content-Length": "10"})
        assert (status, "binary extension" in body["error"]) == (400, True)

    @pytest.mark.parametrize("host", ["example.com", "127.0.0.1.example.com:8000"])
    def test_a_page_with_its_own_name_for_us(self, url, host):
        assert call(url, "POST", INFER, question(), {"Host": host})[0] == 403

    def test_a_model_that_fails_says_nothing_of_itself(self):
        def broken(_x):
            raise RuntimeError("weights at 0x1234")

        with serving(Oracle(broken, SPEC)) as address:
            assert call(address, "POST", INFER, question())[::2] == (
                500,
                {"error": "the model failed on this request"},
            )
            assert call(address, "GET", "/v2/health/ready")[0] == 200

    def test_scores_that_json_cannot_say(self):
        with serving(Oracle(lambda x: third(x) / 0.0, SPEC, output="logits")) as address:
            status, _, body = call(address, "POST", INFER, question())
        assert status == 400
        assert "finite FP32" in body["error"]

    def test_too_many_at_a_time_and_a_stalled_client(self):
        turn, counts = threading.Event(), Counts()

        def waits(x):
            turn.wait(10)
            return third(x)

        limits = Limits(requests=2, seconds=0.5)
        with serving(Oracle(waits, SPEC), limits=limits, counts=counts) as address:
            with ThreadPoolExecutor(4) as pool:
                pending = [pool.submit(call, address, "POST", INFER, question()) for _ in range(4)]
                deadline = time.monotonic() + 10
                while counts.refused < 2 and time.monotonic() < deadline:
                    time.sleep(0.02)
                turn.set()
                replies = [future.result() for future in pending]
            assert sorted(status for status, *_ in replies) == [200, 200, 503, 503]
            assert {headers["Retry-After"] for status, headers, _ in replies if status == 503} == {"1"}
            parts = urlsplit(address)
            with socket.create_connection((parts.hostname, parts.port), timeout=10) as stalled:
                stalled.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{{".encode())
                assert stalled.recv(4096).startswith(b"HTTP/1.1 408")
            assert call(address, "POST", INFER, question())[0] == 200
        assert (counts.requests, counts.refused) == (3, 3)

    def test_budget(self):
        with serving(Oracle(third, SPEC, max_queries=3)) as address:
            assert call(address, "POST", INFER, question())[0] == 200
            status, _, body = call(address, "POST", INFER, question())
        assert (status, "at most 1 more" in body["error"]) == (400, True)


class TestListening:
    @pytest.mark.parametrize("where", ["0.0.0.0:0", "[::]:0"])
    def test_beyond_this_machine_only_on_request(self, where):
        if where.startswith("[") and not socket.has_ipv6:
            pytest.skip("no IPv6 here")
        with pytest.raises(InputError, match="--allow-remote"):
            serve_model(Oracle(third, SPEC), "suspect", where)

    def test_taken_port_and_bad_names(self):
        with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(InputError, match="a free address"):
            serve_model(Oracle(third, SPEC), "suspect", f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(InputError, match="HOST:PORT"):
            serve_model(Oracle(third, SPEC), "suspect", "nonsense")
        with pytest.raises(InputError, match="without slashes"):
            serve_model(Oracle(third, SPEC), "a/b", "127.0.0.1:0")


@contextmanager
def started(folder: Path, *options):
    """``deepseal model serve`` in a process of its own: the process and its URL."""
    command = [sys.executable, "-m", "deepseal", "model", "serve", "--model", "base.safetensors", "--name", "suspect"]
    process = subprocess.Popen(
        [*command, "--listen", "127.0.0.1:0", *map(str, options)],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        said = process.stderr.readline()
        found = re.search(r"serving 'suspect' on (https?://127\.0\.0\.1:\d+); Ctrl-C ends it", said)
        assert found, said + process.stderr.read()
        yield process, found[1]
    finally:
        process.kill()
        process.communicate()


class TestCommandLine:
    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_serve_evaluate_and_end(self, files, tmp_path, number, base, digits):
        with started(files, "--json", "--output", "logits") as (process, url):
            done = deepseal(
                *f"model evaluate --remote {url} --name suspect --data digits --json --record r.json".split(),
                cwd=tmp_path,
            )
            assert done.returncode == 0, done.stderr
            process.send_signal(number)
            out, err = process.communicate(timeout=30)
        assert process.returncode == 0, err
        assert err == ""
        served = record_of(out)
        tested = len(digits.test)
        assert served["kind"] == "model.serve"
        assert served["results"] == {"requests": -(-tested // 64), "refused": 0, "queries": tested}
        record = record_of(done.stdout)
        assert json.loads((tmp_path / "r.json").read_text()) == record
        results, params = record["results"], record["params"]
        assert results["accuracy"] == base.accuracy(digits.test).value
        assert (params["remote"], params["name"], params["output"]) == (url, "suspect", "logits")
        assert "model" not in record["fingerprints"]
        assert results["queries"] == tested == sum(entry["inputs"] for entry in results["query_log"])
        assert {"time", "request_sha256", "reply_sha256", "attempts", "milliseconds"} <= results["query_log"][0].keys()

    def test_text_for_people(self, base, digits, tmp_path, capsys, monkeypatch):
        with serving(base.oracle()) as url:
            line = f"model evaluate --remote {url} --name suspect --data digits --batch 100"
            code, out, err = run(capsys, monkeypatch, tmp_path, *line.split())
        assert (code, err) == (0, "")
        assert out.startswith("accuracy 9")
        assert "query_log" in out

    def test_failed_run_keeps_what_was_asked(self, digits, tmp_path, capsys, monkeypatch):
        def infer(_request, number):
            return scores([0.1] * 640, [64, 10]) if number == 0 else scores([float("nan")] * 640, [64, 10])

        with scripted(description(digits.spec), infer) as url:
            line = f"model evaluate --remote {url} --name suspect --data digits --record r.json"
            code, out, err = run(capsys, monkeypatch, tmp_path, *line.split())
        assert (code, out) == (2, "")
        assert "found NaN or infinite values" in err
        record = json.loads((tmp_path / "r.json").read_text())
        assert record["status"] == "failed"
        assert record["results"]["queries"] == 128
        assert len(record["results"]["query_log"]) == 2

    def test_budget_and_dead_server(self, base, tmp_path, capsys, monkeypatch):
        with serving(base.oracle()) as url:
            line = f"model evaluate --remote {url} --name suspect --data digits --max-queries 10"
            code, _, err = run(capsys, monkeypatch, tmp_path, *line.split())
            assert (code, "at most 10 more queries" in err) == (2, True)
        code, _, err = run(capsys, monkeypatch, tmp_path, *line.split())
        assert (code, "no connection" in err, err.count("\n")) == (2, True, 1)

    def test_token_stays_out_of_everything(self, base, tmp_path, capsys, monkeypatch):
        with serving(base.oracle()) as url:
            line = f"model evaluate --remote {url} --name suspect --data digits --json"
            token = {"DEEPSEAL_REMOTE_TOKEN": "s3cr3t"}
            code, out, err = run(capsys, monkeypatch, tmp_path, *line.split(), env=token)
        assert code == 0
        assert "s3cr3t" not in out + err

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            ("evaluate --data digits", "either --model or --url"),
            ("evaluate --data digits --model a --remote http://127.0.0.1:1 --name b", "either --model or --url"),
            ("evaluate --data digits --remote http://127.0.0.1:1", "the URL of a model; found the server's alone"),
            ("evaluate --data digits --model a --name b", "--name with --url; found --name alone"),
            ("evaluate --data digits --url http://127.0.0.1:1/v2/models", "the URL of a model; found the path"),
            ("evaluate --data digits --url http://127.0.0.1:1/v2/models/a/versions/1", "found the path"),
            ("evaluate --data digits --url http://127.0.0.1:1/v1/a", "found the path '/v1/a'"),
            ("evaluate --data digits --url http://127.0.0.1:1/v2/models/a --name b", "the model 'b' in the URL"),
            ("evaluate --data digits --url ftp://a/v2/models/b", "found 'ftp' instead of http or https"),
            ("evaluate --data digits --url http://me:secret@127.0.0.1/v2/models/b", "found a user name or password"),
            ("evaluate --data digits --url 127.0.0.1:8000/v2/models/b", "found none of http:// and https:// in front"),
            ("evaluate --data digits --url http://127.0.0.1:99999/v2/models/b", "found no host, or a bad port"),
            ("evaluate --data digits --remote ftp://a --name b", "the URL of a server"),
            ("evaluate --data digits --remote http://192.0.2.1 --name b", "https to another machine"),
            ("evaluate --data digits --remote http://127.0.0.1:1 --name b --output x", "known kind of answer"),
            ("evaluate --data digits --remote http://127.0.0.1:1 --name b --timeout 0", "a time-out above 0"),
            ("evaluate --data digits --remote https://127.0.0.1:1 --name b --tls-ca none.pem", "certificates (PEM)"),
            ("serve --model base.safetensors --name b --output x", "known kind of answer"),
            ("serve --model base.safetensors --name b --listen 0.0.0.0:0", "--allow-remote"),
            ("serve --model base.safetensors --name b --tls-cert a.pem", "--tls-cert and --tls-key"),
            ("serve --model none.safetensors --name b", "none.safetensors"),
        ],
    )
    def test_bad_options(self, words, message, files, capsys, monkeypatch):
        code, out, err = run(capsys, monkeypatch, files, "model", *words.split())
        assert (code, out, err.count("\n")) == (2, "", 1)
        assert message in err


class TestTls:
    def test_verified_certificate_or_no_question(self, files, tmp_path, capsys, monkeypatch):
        made = deepseal(*"private certs --out certs --name localhost".split(), cwd=tmp_path)
        assert made.returncode == 0, made.stderr
        certs = tmp_path / "certs"
        with started(files, "--tls-cert", certs / "localhost.pem", "--tls-key", certs / "localhost.key") as (_, url):
            named = url.replace("127.0.0.1", "localhost")
            line = "model evaluate --name suspect --data digits --json --remote"
            code, out, err = run(capsys, monkeypatch, tmp_path, *line.split(), named, "--tls-ca", certs / "ca.pem")
            assert code == 0, err
            assert record_of(out)["params"]["remote"] == named
            for where, trust in ((named, []), (url, ["--tls-ca", certs / "ca.pem"])):
                code, out, err = run(capsys, monkeypatch, tmp_path, *line.split(), where, *trust)
                assert (code, out, err.count("\n")) == (2, "", 1)
                assert "certificate verify failed" in err
                assert "attempts" not in err

    def test_bad_files(self, files, capsys, monkeypatch):
        line = "model serve --model base.safetensors --name a --tls-cert base.safetensors --tls-key base.safetensors"
        code, out, err = run(capsys, monkeypatch, files, *line.split())
        assert (code, out) == (2, "")
        assert "a certificate and its key (PEM)" in err


def test_answers_do_not_depend_on_the_way(base, digits):
    """Decimal text carries float32 exactly."""
    x = digits.test.x[:64]
    with serving(base.oracle(output="logits")) as url:
        tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": x.flatten().tolist()}
        (output,) = call(url, "POST", INFER, {"inputs": [tensor]})[2]["outputs"]
    assert np.array_equal(np.float32(output["data"]).reshape(output["shape"]), base.query(x).numpy())
