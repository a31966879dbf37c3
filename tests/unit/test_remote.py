"""The remote oracle over real sockets: the project's own server at the other end, and servers that misbehave."""

from __future__ import annotations

import hashlib
import json
import socket
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from email.utils import formatdate

import numpy as np
import pytest
import torch
from served import description, scores, scripted, serving

from deepseal.adapter import InputSpec, Oracle
from deepseal.adapter.http_client import HttpClient, Patience
from deepseal.adapter.oracle import accuracy
from deepseal.adapter.remote import RemoteOracle
from deepseal.errors import InputError, ProtocolError, TransportError
from deepseal.rng import Rng

SPEC = InputSpec(shape=(2, 3), num_classes=4)
QUICK = Patience(timeout=5.0, attempts=3, first_wait=0.01, longest_wait=0.5)


def connect(url, *, spec=SPEC, patience=QUICK, max_reply_bytes=1 << 20, rng=Rng(0), token=None, **options):
    client = HttpClient(url, patience=patience, rng=rng, token=token, max_reply_bytes=max_reply_bytes)
    return RemoteOracle.connect(client, "suspect", spec, **options)


def inputs(count=5, spec=SPEC):
    return torch.from_numpy(Rng(3).numpy().random((count, *spec.shape), dtype=np.float32))


def right(request, _number=0):
    """Scores that depend on the inputs: the sums of four groups."""
    tensor = request["inputs"][0]
    x = np.asarray(tensor["data"]).reshape(tensor["shape"]).reshape(tensor["shape"][0], -1)
    values = np.stack([x[:, 0], x[:, 1], x[:, 2:4].sum(1), x[:, 4:].sum(1)], axis=1)
    return scores(values.ravel().tolist(), list(values.shape))


def expected(x):
    flat = x.flatten(1).double()
    return torch.stack([flat[:, 0], flat[:, 1], flat[:, 2:4].sum(1), flat[:, 4:].sum(1)], 1).float()


class TestOurServer:
    @pytest.mark.parametrize("output", ["labels", "probabilities", "logits"])
    def test_same_answers_as_the_local_oracle(self, base, digits, output):
        x = digits.test.x[:150]
        local = base.oracle(output=output)
        with serving(base.oracle(output=output)) as url, connect(url, spec=digits.spec) as remote:
            assert remote.output == output
            answers = remote.query(x)
            assert remote.queries == 150
            assert [entry["inputs"] for entry in remote.log] == [64, 64, 22]
        wanted = torch.cat([local.query(part) for part in x.split(64)])
        assert answers.dtype == wanted.dtype
        assert torch.equal(answers, wanted)

    def test_is_a_black_box_and_gives_the_accuracy(self, base, digits):
        with serving(base.oracle()) as url, connect(url, spec=digits.spec) as remote:
            assert accuracy(remote, digits.test) == base.accuracy(digits.test)

    def test_a_python_callable_is_served_too(self):
        oracle = Oracle(lambda x: expected(x), SPEC, output="logits")
        with serving(oracle) as url, connect(url) as remote:
            assert torch.equal(remote.query(inputs()), expected(inputs()))

    def test_no_inputs(self):
        oracle = Oracle(lambda x: expected(x), SPEC, output="logits")
        with serving(oracle) as url, connect(url) as remote:
            assert remote.query(inputs(0)).shape == (0, 4)
            assert remote.log == ()

    def test_concurrent_clients_get_their_own_answers(self, base, digits):
        x = digits.test.x[:96]
        wanted = torch.cat([base.query(part) for part in x.split(8)])
        with serving(base.oracle(output="logits")) as url, connect(url, spec=digits.spec) as remote:
            with ThreadPoolExecutor(8) as pool:
                answers = torch.cat(list(pool.map(remote.query, x.split(8))))
            assert remote.queries == 96
            assert len(remote.log) == 12
        assert torch.equal(answers, wanted)

    def test_survives_a_restart_of_the_server(self, base, digits):
        x, patience = digits.test.x[:8], Patience(timeout=10, attempts=12, first_wait=0.05, longest_wait=0.5)
        with serving(base.oracle()) as url:
            remote = connect(url, spec=digits.spec, patience=patience)
            before = remote.query(x)
        with ThreadPoolExecutor(1) as pool:
            pending = pool.submit(remote.query, x)
            time.sleep(0.3)
            with serving(base.oracle(), port=int(url.rpartition(":")[2])):
                after = pending.result(30)
                remote.close()
        assert torch.equal(before, after)
        assert remote.log[-1]["attempts"] > 1
        assert remote.queries == 16

    def test_unknown_model_and_too_large_batch(self, base, digits):
        from deepseal.apps.model_server import Limits

        with serving(base.oracle(), "other", limits=Limits(batch=4)) as url:
            with pytest.raises(TransportError, match="404.*'suspect'"):
                connect(url, spec=digits.spec)
            client = HttpClient(url, patience=QUICK)
            with (
                RemoteOracle.connect(client, "other", digits.spec) as remote,
                pytest.raises(TransportError, match="HTTP 400.*1 to 4 inputs"),
            ):
                remote.query(digits.test.x[:5])
            assert remote.log[0]["status"] == 400
            assert remote.log[0]["attempts"] == 1


class TestBudget:
    def test_refuses_beyond_it_and_spends_nothing(self):
        with scripted(description(SPEC), right) as url, connect(url, max_queries=7, batch=2) as remote:
            remote.query(inputs(5))
            with pytest.raises(InputError, match="at most 2 more"):
                remote.query(inputs(3))
            assert remote.queries == 5
            remote.query(inputs(2))
            assert remote.queries == 7

    def test_retries_do_not_count_twice(self):
        def infer(request, number):
            return (503, {}, b"") if number % 2 == 0 else right(request)

        with scripted(description(SPEC), infer) as url, connect(url, max_queries=5) as remote:
            assert torch.equal(remote.query(inputs()), expected(inputs()))
            assert remote.queries == 5
            assert remote.log[0]["attempts"] == 2

    def test_a_failed_query_counts_what_the_server_saw(self):
        def infer(request, number):
            return right(request) if number == 0 else (400, {}, b'{"error": "no"}')

        with scripted(description(SPEC), infer) as url, connect(url, batch=2, max_queries=20) as remote:
            with pytest.raises(TransportError, match="'no'"):
                remote.query(inputs(10))
            assert remote.queries == 4

    def test_nothing_is_spent_without_a_connection(self):
        with scripted(description(SPEC), right) as url:
            remote = connect(url, max_queries=5)
        with pytest.raises(TransportError, match="no connection.*3 attempts"):
            remote.query(inputs())
        remote.close()
        assert remote.queries == 0
        assert remote.log[0]["status"] is None
        assert "no connection" in remote.log[0]["error"]

    def test_threads_share_it(self):
        with scripted(description(SPEC), right) as url, connect(url, max_queries=10) as remote:

            def ask(_):
                try:
                    return len(remote.query(inputs(3)))
                except InputError:
                    return 0

            with ThreadPoolExecutor(6) as pool:
                assert sum(pool.map(ask, range(6))) == 9
            assert remote.queries == 9


class TestRetries:
    @pytest.mark.parametrize("status", [429, 502, 503, 504, 0])
    def test_busy_and_then_well(self, status):
        def infer(request, number):
            return (status, {}, b"") if number < 2 else right(request)

        with scripted(description(SPEC), infer) as url, connect(url) as remote:
            assert torch.equal(remote.query(inputs()), expected(inputs()))
            assert remote.log[0]["attempts"] == 3

    @pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 500, 501])
    def test_what_does_not_help_is_not_repeated(self, status):
        with scripted(description(SPEC), lambda *_: (status, {}, b"")) as url, connect(url) as remote:
            with pytest.raises(TransportError, match=f"HTTP {status}"):
                remote.query(inputs())
            assert remote.log[0]["attempts"] == 1

    def test_they_end(self):
        asked = []

        def infer(_request, number):
            asked.append(number)
            return 503, {}, b'{"error": "busy"}'

        with (
            scripted(description(SPEC), infer) as url,
            connect(url) as remote,
            pytest.raises(TransportError, match=r"503 'busy' \(3 attempts\)"),
        ):
            remote.query(inputs())
        assert asked == [0, 1, 2]

    def test_retry_after_is_honoured(self):
        def infer(request, number):
            return (503, {"Retry-After": "1"}, b"") if number == 0 else right(request)

        patience = Patience(timeout=5, attempts=3, first_wait=0.01, longest_wait=3)
        with scripted(description(SPEC), infer) as url, connect(url, patience=patience) as remote:
            start = time.monotonic()
            remote.query(inputs())
            assert time.monotonic() - start >= 1.0
            assert remote.log[0]["milliseconds"] >= 1000

    @pytest.mark.parametrize("when", ["3600", formatdate(time.time() + 3600, usegmt=True)], ids=["seconds", "date"])
    def test_retry_after_that_is_too_far_away_ends_the_attempts(self, when):
        busy = 429, {"Retry-After": when}, b""
        with scripted(description(SPEC), lambda *_: busy) as url, connect(url) as remote:
            with pytest.raises(TransportError, match="429"):
                remote.query(inputs())
            assert remote.log[0]["attempts"] == 1

    def test_waits_grow_and_their_jitter_is_seeded(self, monkeypatch):
        def waits(seed):
            waited = []
            monkeypatch.setattr(time, "sleep", waited.append)
            patience = Patience(timeout=5, attempts=6, first_wait=1.0, longest_wait=6.0)
            client = HttpClient(url, patience=patience, rng=Rng(seed))
            assert client.send("POST", "/", b"{}").attempts == 6
            client.close()
            monkeypatch.undo()
            return waited

        with scripted(description(SPEC), lambda *_: (503, {}, b"")) as url:
            first, again, other = waits(0), waits(0), waits(1)
        assert first == again != other
        assert all(cap / 2 <= wait <= cap for wait, cap in zip(first, [1, 2, 4, 6, 6], strict=True))

    def test_waits_until_the_server_is_ready(self):
        codes = iter([503, 400])
        with scripted(description(SPEC), right, ready=lambda: next(codes, 200)) as url, connect(url) as remote:
            remote.query(inputs())


class TestTimeouts:
    def test_slow_server(self):
        def infer(request, number):
            if number == 0:
                time.sleep(1.5)
            return right(request)

        patience = Patience(timeout=0.4, attempts=2, first_wait=0.01, longest_wait=1)
        with scripted(description(SPEC), infer) as url, connect(url, patience=patience) as remote:
            assert torch.equal(remote.query(inputs()), expected(inputs()))
            assert remote.log[0]["attempts"] == 2

    @pytest.mark.parametrize(
        "opening", [b"", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n"]
    )
    def test_a_byte_now_and_then_is_not_enough(self, opening):
        """Every single read is in time, the whole reply is not."""
        listener = socket.create_server(("127.0.0.1", 0))
        stop = threading.Event()

        def drip():
            sock, _ = listener.accept()
            with sock:
                sock.sendall(opening)
                while not stop.wait(0.1):
                    try:
                        sock.sendall(b"a")
                    except OSError:
                        return

        thread = threading.Thread(target=drip, daemon=True)
        thread.start()
        client = HttpClient(
            f"http://127.0.0.1:{listener.getsockname()[1]}",
            patience=Patience(timeout=0.7, attempts=1, first_wait=0.0, longest_wait=0.0),
        )
        start = time.monotonic()
        exchange = client.send("GET", "/v2/health/ready")
        stop.set()
        thread.join(5)
        listener.close()
        client.close()
        assert exchange.status is None
        assert exchange.sent
        assert "within 0.7 s" in exchange.failure
        assert time.monotonic() - start < 3


class TestReplies:
    """Nothing that a server sends becomes an answer unless it is one."""

    @pytest.mark.parametrize(
        ("reply", "message"),
        [
            ((200, {}, b"<html>"), "JSON as a reply"),
            ((200, {}, b"\xff\xfe\x00"), "JSON as a reply"),
            ((200, {}, b"[" * 100_000), "JSON as a reply"),
            ((200, {}, b"[]"), "JSON object"),
            ((200, {}, b"{}"), "an output 'logits'"),
            ((200, {}, b'{"outputs": {}}'), "list of outputs"),
            ((200, {}, b'{"outputs": [7]}'), "JSON object as an output"),
            ((200, {}, b'{"id": "x", "outputs": []}'), "another id"),
            (scores([0.0] * 20, [5, 4], name="embedding"), "an output 'logits'"),
            (scores([0.0] * 20, [5, 4], datatype="BYTES"), "numeric datatype"),
            (scores([0.0] * 20, [5, "4"]), "shape of an output"),
            (scores([0.0] * 20, [-5, -4]), "shape of an output"),
            (scores([0.0] * 20, [5, True]), "shape of an output"),
            (scores("AAAA", [5, 4]), "a list as the data"),
            (scores(["0"] * 20, [5, 4]), "FP32 numbers"),
            (scores([None] * 20, [5, 4]), "FP32 numbers"),
            (scores([[0.0], [0.0, 1.0]], [5, 4]), "rectangular"),
            (scores([0.5] * 20, [5, 4], datatype="INT32"), "INT32 numbers"),
            (scores([3_000_000_000] * 20, [5, 4], datatype="INT32"), "fit INT32"),
            (scores([0.0] * 19, [5, 4]), "as many numbers"),
            (scores([0.0] * 24, [6, 4]), r"shape \(6, 4\)"),
            (scores([0.0] * 16, [4, 4]), r"shape \(4, 4\)"),
            (scores([0.0] * 25, [5, 5]), r"shape \(5, 5\)"),
            (scores([0.0] * 20, [4, 5]), r"shape \(4, 5\)"),
            (scores([0.0] * 20, [20]), r"shape \(20,\)"),
            (scores([float("nan")] * 20, [5, 4]), "NaN or infinite"),
            (scores([float("inf")] * 20, [5, 4]), "NaN or infinite"),
            (scores([1e300] * 20, [5, 4]), "NaN or infinite"),
        ],
    )
    def test_rubbish(self, reply, message):
        with scripted(description(SPEC), lambda *_: reply) as url, connect(url) as remote:
            with pytest.raises(ProtocolError, match=message) as caught:
                remote.query(inputs())
            assert "\n" not in str(caught.value)
            assert remote.log[0]["attempts"] == 1
            assert remote.log[0]["reply_sha256"] == hashlib.sha256(reply[2]).hexdigest()

    @pytest.mark.parametrize("stated", [True, False])
    def test_huge(self, stated):
        body = b" " * 2_000_000
        reply = 200, {} if stated else {"Content-Length": "", "Connection": "close"}, body
        with scripted(description(SPEC), lambda *_: reply) as url, connect(url) as remote:
            with pytest.raises(TransportError, match=f"over {1 << 20} bytes"):
                remote.query(inputs())
            assert remote.log[0]["attempts"] == 1

    @pytest.mark.parametrize(("status", "match"), [(301, "redirect"), (307, "redirect"), (308, "redirect")])
    def test_redirects_are_not_followed(self, status, match):
        seen = []

        def other(request, number):
            seen.append(number)
            return right(request)

        with scripted(description(SPEC), other) as elsewhere:
            moved = status, {"Location": f"{elsewhere}/v2/models/suspect/infer"}, b""
            with (
                scripted(description(SPEC), lambda *_: moved) as url,
                connect(url) as remote,
                pytest.raises(TransportError, match=match),
            ):
                remote.query(inputs())
        assert seen == []

    def test_compressed(self):
        reply = 200, {"Content-Encoding": "gzip"}, b"x"
        with (
            scripted(description(SPEC), lambda *_: reply) as url,
            connect(url) as remote,
            pytest.raises(TransportError, match="compressed"),
        ):
            remote.query(inputs())

    @pytest.mark.parametrize(
        ("data", "shape", "message"),
        [([[0.5, 0.5, 0.5, 0.5]] * 5, [5, 4], "add up"), ([[2.0, -1.0, 0.0, 0.0]] * 5, [5, 4], "add up")],
    )
    def test_no_probabilities(self, data, shape, message):
        with (
            scripted(description(SPEC), lambda *_: scores(data, shape)) as url,
            connect(url, output="probabilities") as remote,
            pytest.raises(ProtocolError, match=message),
        ):
            remote.query(inputs())

    @pytest.mark.parametrize("data", [[0, 1, 2, 3, 4], [-1, 0, 0, 0, 0], [0.5, 0, 0, 0, 0], [float("nan")] * 5])
    def test_no_labels(self, data):
        with (
            scripted(description(SPEC), lambda *_: scores(data, [5])) as url,
            connect(url, output="labels") as remote,
            pytest.raises(ProtocolError, match="labels 0 … 3"),
        ):
            remote.query(inputs())

    @pytest.mark.parametrize("shape", [[5], [5, 1]])
    @pytest.mark.parametrize("datatype", ["INT64", "INT32", "UINT8", "FP32"])
    def test_labels_as_servers_write_them(self, shape, datatype):
        answer = scores([0, 1, 2, 3, 0], shape, datatype=datatype)
        with scripted(description(SPEC), lambda *_: answer) as url, connect(url, output="labels") as remote:
            assert torch.equal(remote.query(inputs()), torch.tensor([0, 1, 2, 3, 0]))

    def test_nested_data(self):
        answer = scores([[0.5, 1, 2, 3]] * 5, [5, 4])
        with scripted(description(SPEC), lambda *_: answer) as url, connect(url) as remote:
            assert torch.equal(remote.query(inputs()), torch.tensor([[0.5, 1, 2, 3]] * 5))


class TestDescriptions:
    def test_request_has_the_fields_of_the_protocol(self):
        seen = []

        def infer(request, number):
            seen.append(request)
            return right(request)

        with scripted(description(SPEC), infer) as url, connect(url) as remote:
            remote.query(inputs(2))
        (request,) = seen
        assert request.keys() == {"id", "inputs", "outputs"}
        assert request["outputs"] == [{"name": "logits"}]
        (tensor,) = request["inputs"]
        assert tensor.keys() == {"name", "shape", "datatype", "data"}
        assert (tensor["name"], tensor["shape"], tensor["datatype"]) == ("x", [2, 2, 3], "FP32")
        assert np.array_equal(np.float32(tensor["data"]), inputs(2).flatten().numpy())

    def test_without_tensors_and_with_flat_rows(self):
        with scripted({"name": "suspect", "platform": "x"}, right) as url, connect(url, output="logits") as remote:
            assert torch.equal(remote.query(inputs()), expected(inputs()))
        flat = description(SPEC, inputs=[{"name": "x", "datatype": "FP64", "shape": [-1, 6]}])
        with scripted(flat, right) as url, connect(url, output="logits") as remote:
            assert torch.equal(remote.query(inputs()), expected(inputs()))

    def test_one_sample_a_request(self):
        single = description(SPEC, inputs=[{"name": "x", "datatype": "FP32", "shape": [1, 2, 3]}])
        with scripted(single, right) as url, connect(url) as remote:
            assert torch.equal(remote.query(inputs(3)), expected(inputs(3)))
            assert len(remote.log) == 3

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 3, 3]}]}, "takes"),
            ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [8, 2, 3]}]}, "takes"),
            ({"inputs": [{"name": "x", "datatype": "FP32", "shape": []}]}, "takes"),
            ({"inputs": [{"name": "x", "datatype": "BYTES", "shape": [-1, 2, 3]}]}, "floating"),
            ({"inputs": [{"name": "x", "datatype": "FP32", "shape": [-1, 2, 3]}] * 2}, "one input"),
            ({"inputs": [{"name": n, "datatype": "FP32", "shape": [-1, 2, 3]} for n in "xy"]}, "one input"),
            ({"inputs": [{"name": "x", "datatype": 3, "shape": [-1, 2, 3]}]}, "datatype"),
            ({"inputs": 3}, "list of inputs"),
            ({"outputs": [{"name": "y", "datatype": "FP32", "shape": [-1, 4]}]}, "declare one of"),
            ({"outputs": []}, "declare one of"),
        ],
    )
    def test_that_do_not_fit(self, fields, message):
        with scripted(description(SPEC, **fields), right) as url, pytest.raises(InputError, match=message):
            connect(url)

    def test_several_outputs(self):
        names = ("logits", "embedding")
        outputs = [{"name": name, "datatype": "FP32", "shape": [-1, 4]} for name in names]
        with scripted(description(SPEC, outputs=outputs), right) as url:
            with connect(url) as remote:
                assert remote.output == "logits"
                assert torch.equal(remote.query(inputs()), expected(inputs()))
            with pytest.raises(InputError, match="the name of the output"):
                connect(url, output="labels")
            with pytest.raises(InputError, match="an output 'y'"):
                connect(url, output="labels", output_name="y")


class TestLog:
    def test_plain_values_and_digests_of_what_went_over_the_wire(self):
        bodies = []

        def infer(request, number):
            reply = right(request)
            bodies.append((json.dumps(request, separators=(",", ":")).encode(), reply[2]))
            return reply

        with scripted(description(SPEC), infer) as url, connect(url, batch=3) as remote:
            remote.query(inputs(5))
            values = remote.as_dict()
        assert json.loads(json.dumps(values, allow_nan=False)) == values
        assert values["queries"] == 5
        assert values["url"] == url
        digests = [tuple(hashlib.sha256(part).hexdigest() for part in pair) for pair in bodies]
        assert [(entry["request_sha256"], entry["reply_sha256"]) for entry in values["log"]] == digests
        assert [entry["inputs"] for entry in values["log"]] == [3, 2]
        assert all(entry["time"].endswith("+00:00") and entry["milliseconds"] > 0 for entry in values["log"])

    def test_it_is_a_copy(self):
        with scripted(description(SPEC), right) as url, connect(url) as remote:
            remote.query(inputs())
            remote.log[0]["inputs"] = 0
            assert remote.log[0]["inputs"] == 5


class TestClient:
    @pytest.mark.parametrize(
        "url",
        ["", "127.0.0.1:8000", "ftp://127.0.0.1", "http://", "http://a:b@127.0.0.1", "http://127.0.0.1/?a=b"]
        + [
            "http://127.0.0.1/#a",
            "http://127.0.0.1:99999",
            "http://[::1",
            "http://127.0.0.1/a b",
            "file:///etc/passwd",
        ],
    )
    def test_bad_urls(self, url):
        with pytest.raises(InputError, match="the URL of a server") as caught:
            HttpClient(url)
        assert "a:b" not in str(caught.value)

    def test_plain_http_beyond_this_machine(self):
        with pytest.raises(InputError, match="https to another machine"):
            HttpClient("http://192.0.2.1:8000")
        HttpClient("http://192.0.2.1:8000", allow_plain=True).close()
        with pytest.raises(InputError, match="https to another machine"):
            HttpClient("http://192.0.2.1:8000", allow_plain=True, token="secret")
        with pytest.raises(InputError, match="https to another machine"):
            HttpClient("http://127.0.0.1.example.com")

    def test_token_is_sent_and_not_shown(self):
        seen = []
        listener = socket.create_server(("127.0.0.1", 0))

        def answer():
            sock, _ = listener.accept()
            with sock:
                seen.append(sock.recv(65536))
                sock.sendall(b"HTTP/1.1 401 No\r\nContent-Length: 0\r\n\r\n")

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        client = HttpClient(f"http://127.0.0.1:{listener.getsockname()[1]}", token="s3cr3t", patience=QUICK)
        exchange = client.send("GET", "/v2")
        thread.join(5)
        listener.close()
        client.close()
        assert b"Authorization: Bearer s3cr3t\r\n" in seen[0]
        assert "s3cr3t" not in repr(client) + repr(exchange)

    def test_proxies_of_the_environment_are_not_used(self, monkeypatch):
        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.setenv(name, "http://127.0.0.1:9")
        with scripted(description(SPEC), right) as url, connect(url) as remote:
            assert torch.equal(remote.query(inputs()), expected(inputs()))

    @pytest.mark.parametrize("values", [{"timeout": 0}, {"attempts": 0}, {"first_wait": 3, "longest_wait": 1}])
    def test_bad_patience(self, values):
        with pytest.raises(InputError, match="time-out above 0"):
            Patience(**values)
