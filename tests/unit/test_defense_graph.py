"""Victim and detectors as one graph: traced, compiled, and in ONNX Runtime, with the scores of the monitor itself."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Split
from deepseal.defense.graph import MonitorGraph, exported, write_onnx
from deepseal.defense.monitor import calibrate, fit_monitor
from deepseal.defense.presets import choose
from deepseal.errors import InputError
from deepseal.rng import Rng


def watched(model, split, words=("fast",), **options):
    half = len(split) // 2
    fitted = fit_monitor(model, split.take(torch.arange(half)), choose(model, list(words)).detectors, rng=Rng(0))
    return calibrate(fitted, split.take(torch.arange(half, len(split))), rng=Rng(0), false_positive=0.05, **options)


@pytest.fixture(scope="module")
def monitor(base, digits):
    return watched(base, digits.train)


@pytest.fixture(scope="module")
def images():
    """A convolutional network for images in [-1, 1] that normalises, with one logit for two classes."""
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(900, 2, 6, 6, generator=generator) * 2 - 1
    y = (x.mean(dim=(1, 2, 3)) > 0).long()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(64, 1))
    spec = InputSpec(shape=(2, 6, 6), num_classes=2, bounds=(-1.0, 1.0), mean=(0.1, -0.1), std=(0.5, 0.6))
    return Classifier(module, spec), Split(x, y)


def agrees(found, monitor, x):
    logits, score, alarm = (torch.as_tensor(part) for part in found)
    expected = monitor.judge(x)
    assert torch.allclose(logits, monitor.model.query(x), atol=1e-4)
    assert torch.allclose(score, expected.score, rtol=1e-3, atol=1e-3)
    near = (expected.score - monitor.limits(expected.predicted)).abs() < 1e-2
    assert torch.equal(alarm | near, expected.alarm | near)
    assert alarm.any() and not alarm.all()


def test_the_graph_says_what_the_monitor_says(monitor, digits):
    x = torch.cat([digits.test.tensor[:200], torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))])
    with torch.no_grad():
        agrees(MonitorGraph(monitor)(x), monitor, x)
        program = exported(monitor).module()
        agrees(program(x), monitor, x)
        assert [len(part) for part in program(x[:1])] == [1, 1, 1]


@pytest.mark.slow
def test_it_can_be_compiled(monitor, digits):
    x = torch.cat([digits.test.tensor[:200], torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))])
    with torch.no_grad():
        agrees(torch.compile(exported(monitor).module())(x), monitor, x)


@pytest.mark.slow
def test_onnx_runtime_says_the_same(monitor, images, digits, tmp_path):
    onnxruntime = pytest.importorskip(
        "onnxruntime", reason="onnxruntime is not installed: pip install 'deepseal[onnx]'"
    )
    pytest.importorskip("onnxscript")
    noise = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    one_logit = watched(*images, per_class=True)
    for number, (made, x) in enumerate(
        [(monitor, torch.cat([digits.test.tensor[:200], noise])), (one_logit, images[1].tensor[:150])]
    ):
        path = tmp_path / f"{number}.onnx"
        written = write_onnx(made, path)
        assert written.size == path.stat().st_size and written.difference < 1e-3
        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        assert [output.name for output in session.get_outputs()] == ["logits", "score", "alarm"]
        agrees(session.run(None, {"input": x.numpy()}), made, x)
        assert session.run(None, {"input": x[:1].numpy()})[1] == pytest.approx(
            made.judge(x[:1]).score.numpy(), abs=1e-3
        )
    with pytest.raises(InputError, match="no file at|exists"):
        write_onnx(monitor, path)


def test_what_is_no_single_pass_is_refused(base, digits, no_trace):
    for word in ("odds", "dist"):
        with pytest.raises(InputError, match="one shared pass"):
            MonitorGraph(watched(base, digits.train, [word]))
    fitted = fit_monitor(base, digits.train, choose(base, ["max-softmax"]).detectors, rng=Rng(0))
    with pytest.raises(InputError, match="a calibrated monitor"):
        MonitorGraph(fitted)
    oracle = base.oracle(output="logits")
    with pytest.raises(InputError, match="a model with weights"):
        MonitorGraph(watched(oracle, digits.train, ["max-softmax"]))
    with no_trace(base):
        MonitorGraph(watched(base, digits.train))
