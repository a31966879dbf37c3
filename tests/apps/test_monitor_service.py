"""``deepseal defense serve``: answers to their own requests, limits, errors, metrics, drift, kill and restart."""

from __future__ import annotations

import asyncio
import http.client
import json
import random
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import torch
from command_line import ENVIRONMENT
from served import running
from test_model_server import call

from deepseal.adapter import Split
from deepseal.apps.batcher import Batcher
from deepseal.apps.http_service import Limits
from deepseal.apps.monitor_service import OUTPUTS, Batching, MonitorService, serve_monitor
from deepseal.defense.monitor import Detection, calibrate, fit_monitor
from deepseal.defense.monitor_file import save_monitor
from deepseal.defense.presets import choose
from deepseal.errors import InputError
from deepseal.rng import Rng

INFER = "/v2/models/monitor/infer"


@pytest.fixture(scope="module")
def fitted(base, digits):
    return fit_monitor(base, digits.train, choose(base, ["fast"]).detectors, rng=Rng(0))


@pytest.fixture(scope="module")
def monitor(fitted, digits):
    held = Split(
        torch.cat([digits.calibration.tensor, digits.test.tensor[:200]]),
        torch.cat([digits.calibration.y, digits.test.y[:200]]),
    )
    return calibrate(fitted, held, rng=Rng(0), false_positive=0.05)


@pytest.fixture(scope="module")
def inputs(digits):
    return digits.test.tensor[200:]


@contextmanager
def serving(monitor, **options):
    service = MonitorService(monitor, "monitor", **options)
    with running(service.app, lifespan=True) as url:
        yield url, service


@pytest.fixture(scope="module")
def url(monitor):
    with serving(monitor) as (address, _):
        yield address


def question(x, **fields):
    tensor = {"name": "input", "shape": list(x.shape), "datatype": "FP32", "data": x.reshape(-1).tolist()}
    return {"inputs": [tensor | fields]}


def columns(reply):
    return {output["name"]: output["data"] for output in reply["outputs"]}


def agrees(found, expected):
    """Whether a service's columns are what the monitor itself says; scores move a little with the batch's size."""
    assert found["prediction"] == expected.predicted.tolist()
    assert found["score"] == pytest.approx(expected.score.tolist(), abs=1e-3)
    assert found["p_value"] == pytest.approx(expected.p_value.tolist(), abs=0.02)


def metrics(url):
    parts = urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    connection.request("GET", "/metrics")
    reply = connection.getresponse()
    text = reply.read().decode()
    connection.close()
    assert reply.status == 200 and reply.headers["Content-Type"].startswith("text/plain")
    return {name: float(value) for name, value in re.findall(r"^(deepseal_[^ ]+) (\S+)$", text, re.M)}


def test_the_protocol(url, monitor):
    assert call(url, "GET", "/v2/health/live")[0] == 200
    assert call(url, "GET", "/v2/health/ready")[2] == {"live": True, "ready": True}
    assert call(url, "GET", "/v2/models/monitor/ready")[2] == {"name": "monitor", "ready": True}
    status, _, described = call(url, "GET", "/v2/models/monitor")
    assert status == 200 and described["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 1, 8, 8]}]
    assert [output["name"] for output in described["outputs"]] == [output.name for output in OUTPUTS]
    assert described["parameters"]["threshold"] == monitor.threshold().value
    assert described["parameters"]["members"] == [member.title for member in monitor.members]


def test_one_question_gives_class_score_p_value_and_alarm(url, monitor, inputs):
    x = torch.cat([inputs[:5], torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))])
    status, _, reply = call(url, "POST", INFER, question(x) | {"id": "seven"})
    assert status == 200 and reply["id"] == "seven" and reply["model_name"] == "monitor"
    assert {output["name"]: output["datatype"] for output in reply["outputs"]} == {
        output.name: output.datatype for output in OUTPUTS
    }
    agrees(columns(reply), monitor.judge(x))
    assert columns(reply)["alarm"] == monitor.judge(x).alarm.tolist()
    assert any(columns(reply)["alarm"][5:])  # noise
    wanted = question(x) | {"outputs": [{"name": "alarm"}, {"name": "prediction"}]}
    assert columns(call(url, "POST", INFER, wanted)[2]).keys() == {"prediction", "alarm"}


def malformed(x):
    """Requests that are wrong, each in its own way."""
    nan = question(x)
    nan["inputs"][0]["data"] = [float("nan")] * x.numel()
    return [
        b"{",
        b"\xff\xfe",
        b"[]",
        {},
        {"inputs": []},
        question(x, name="other"),
        question(x, datatype="INT64"),
        question(x, shape=[1, 64]),
        question(x, data=["a"] * x.numel()),
        question(x, data=x.reshape(-1).tolist()[:-1]),
        question(x * 300.0),
        nan,
        question(x) | {"outputs": [{"name": "logits"}]},
        question(x) | {"id": 3},
    ]


def test_malformed_requests_have_clear_answers(url, inputs):
    for body in malformed(inputs[:1]):
        status, _, reply = call(url, "POST", INFER, body)
        assert status == 400 and reply.keys() == {"error"}, body
        assert "\n" not in reply["error"] and "expected" in reply["error"] and "Traceback" not in reply["error"]
    assert call(url, "POST", INFER, question(inputs[:300].repeat(2, 1, 1, 1)))[0] == 400
    assert call(url, "POST", "/v2/models/other/infer", question(inputs[:1]))[0] == 404
    assert call(url, "GET", INFER)[0] == 405
    assert call(url, "GET", "/v2/health/live", headers={"Host": "example.org"})[0] == 403
    assert call(url, "POST", INFER, question(inputs[:1]))[0] == 200


def test_no_answer_is_lost_or_mixed_up(monitor, inputs):
    expected = monitor.judge(inputs)
    bad = malformed(inputs[:1])

    def client(number):
        order, found = random.Random(number), []
        for turn in range(38):
            if order.random() < 0.05:
                status = call(url, "POST", INFER, order.choice(bad))[0]
                found.append((status, None, None))
                continue
            rows = torch.tensor([order.randrange(len(inputs)) for _ in range(order.choice([1, 1, 1, 2, 5]))])
            name = f"{number}-{turn}"
            status, _, reply = call(url, "POST", INFER, question(inputs[rows]) | {"id": name})
            assert status == 200 and reply["id"] == name
            found.append((status, rows, columns(reply)))
        return found

    with serving(monitor, batching=Batching(wait=0.02)) as (url, service):
        with ThreadPoolExecutor(8) as pool:
            answers = [one for found in pool.map(client, range(8)) for one in found]
        counted = metrics(url)
    right = [answer for answer in answers if answer[1] is not None]
    assert {status for status, rows, _ in answers if rows is None} == {400} and len(answers) == 304
    for _, rows, found in right:
        agrees(found, Detection(*(part[rows] for part in vars(expected).values())))
    judged = sum(len(rows) for _, rows, _ in right)
    assert counted['deepseal_requests_total{status="200"}'] == len(right)
    assert counted['deepseal_requests_total{status="400"}'] == len(answers) - len(right)
    assert counted["deepseal_inputs_total"] == judged == service.drift.inputs
    assert counted["deepseal_alarms_total"] == sum(sum(found["alarm"]) for _, _, found in right)
    assert counted["deepseal_batch_inputs_count"] < len(right)  # requests that came together were judged together
    assert counted["deepseal_queue_inputs"] == 0 and counted["deepseal_alarm_drift"] == 0


def test_long_slow_and_too_many_requests(monitor, inputs):
    limits = Limits(body=4096, requests=1, seconds=1.0, batch=2)
    with serving(monitor, limits=limits) as (url, _):
        parts = urlsplit(url)
        assert call(url, "POST", INFER, b" " * 5000)[0] == 413
        chunked = iter([b" " * 3000, b" " * 3000])
        connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
        connection.request("POST", INFER, chunked, {"Transfer-Encoding": "chunked"}, encode_chunked=True)
        assert connection.getresponse().status == 413
        connection.close()
        with socket.create_connection((parts.hostname, parts.port), timeout=20) as slow:
            slow.sendall(f"POST {INFER} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n{{".encode())
            limit = time.monotonic() + 10
            while (refused := call(url, "POST", INFER, question(inputs[:1])))[0] == 200:
                assert time.monotonic() < limit
            assert refused[0] == 503 and refused[1]["Retry-After"] == "1" and "try again" in refused[2]["error"]
            assert b" 408 " in slow.recv(4096).split(b"\r\n")[0]
        assert call(url, "POST", INFER, question(inputs[:1]))[0] == 200


def test_drift_is_told_once_and_exported(monitor):
    told = []
    noise = torch.rand(200, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    with serving(monitor, say=told.append, drift_error=0.001) as (url, service):
        for start in range(0, 200, 20):
            assert call(url, "POST", INFER, question(noise[start : start + 20]))[0] == 200
        counted = metrics(url)
    assert counted["deepseal_alarm_drift"] == 1 and counted["deepseal_alarm_drift_log_evidence"] > 6.9
    assert service.drift.drifted and len(told) == 1
    assert "more frequent than the promised 0.05" in told[0] and "0.001" in told[0]


def detection(x):
    values = x.reshape(len(x), -1)[:, 0].double()
    return Detection(values.long(), values, values, values > 0)


def batched(judge, work, **options):
    async def inside():
        batcher = Batcher(judge, judged=lambda _found: None, **{"batch": 8, "wait": 0.02} | options)
        try:
            return await work(batcher)
        finally:
            await batcher.close()

    return asyncio.run(inside())


def test_a_request_that_fails_spoils_no_other():
    def judge(x):
        if bool((x < 0).any()):
            raise InputError("a finite score", found="none", do="check the input")
        return detection(x)

    async def work(batcher):
        asked = [batcher.submit(torch.full((2, 1), float(value)), seconds=5) for value in (1, -1, 3)]
        return await asyncio.gather(*asked, return_exceptions=True)

    first, second, third = batched(judge, work)
    assert first.predicted.tolist() == [1, 1] and third.predicted.tolist() == [3, 3]
    assert isinstance(second, InputError)


def test_batches_are_bounded_and_requests_whole():
    sizes = []

    def judge(x):
        sizes.append(len(x))
        return detection(x)

    async def work(batcher):
        asked = [batcher.submit(torch.full((3, 1), float(value)), seconds=5) for value in range(9)]
        return await asyncio.gather(*asked)

    found = batched(judge, work, batch=8)
    assert [one.predicted.tolist() for one in found] == [[value] * 3 for value in range(9)]
    assert sum(sizes) == 27 and max(sizes) <= 8 and len(sizes) < 9
    assert [one.predicted.tolist() for one in batched(judge, work, batch=2)] == [[value] * 3 for value in range(9)]


def test_waiting_ends():
    def judge(x):
        time.sleep(0.5)
        return detection(x)

    async def work(batcher):
        with pytest.raises(asyncio.TimeoutError):
            await batcher.submit(torch.zeros(1, 1), seconds=0.1)
        assert batcher.busy > 0
        with pytest.raises(asyncio.TimeoutError):
            await batcher.submit(torch.ones(1, 1), seconds=0.1)
        assert batcher.depth == 0
        return await batcher.submit(torch.full((1, 1), 2.0), seconds=5)

    assert batched(judge, work).predicted.tolist() == [2]


def test_what_cannot_be_served_is_refused(fitted, monitor):
    with pytest.raises(InputError, match="a calibrated monitor"):
        serve_monitor(fitted, "monitor", "127.0.0.1:0")
    with pytest.raises(InputError, match="an address of this machine only"):
        serve_monitor(monitor, "monitor", "0.0.0.0:0")
    with pytest.raises(InputError, match="a printable name without slashes"):
        MonitorService(monitor, "a/b")


@contextmanager
def process(folder: Path, record: Path | None = None):
    command = [sys.executable, "-m", "deepseal", "defense", "serve", str(folder), "--listen", "127.0.0.1:0"]
    command += ["--record", str(record)] if record else []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=ENVIRONMENT) as child:
        try:
            line = child.stderr.readline()
            url = re.search(r"http://\S+(?=;)", line)
            assert url, line + child.stderr.read()
            yield child, url[0]
        finally:
            child.kill()


@pytest.mark.slow
def test_killed_and_started_again_it_says_the_same(monitor, inputs, tmp_path):
    save_monitor(monitor, tmp_path / "monitor")
    body = question(inputs[:20])
    with process(tmp_path / "monitor") as (child, url):
        before = columns(call(url, "POST", INFER, body)[2])
        child.send_signal(signal.SIGKILL)
        assert child.wait(20) == -signal.SIGKILL
    with process(tmp_path / "monitor", tmp_path / "record.json") as (child, url):
        assert columns(call(url, "POST", INFER, body)[2]) == before
        agrees(before, monitor.judge(inputs[:20]))
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 0
        said = child.stderr.read() + child.stdout.read()
    record = json.loads((tmp_path / "record.json").read_text())
    assert record["kind"] == "defense.serve" and record["results"]["inputs"] == 20
    assert "Traceback" not in said and "[[" not in said
