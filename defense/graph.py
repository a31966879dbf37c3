"""The victim and its one-pass detectors as one graph: for ``torch.compile``, and as a file for ONNX Runtime.

What comes out is what ``Monitor.judge`` says: the logits, the combined score, and whether it is an alarm. Inputs are
not checked here, as a graph has no branches: whoever runs it checks their shape and bounds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepseal.adapter import Classifier
from deepseal.adapter.capture import Hook, find_layer
from deepseal.adapter.outputs import pool, select
from deepseal.defense.context import Context
from deepseal.defense.monitor import Monitor
from deepseal.errors import InputError, understood
from deepseal.files import check_writable, write_atomically

OUTPUTS = ("logits", "score", "alarm")
_OPSET = 20
_PROBES = 16
_TOLERANCE = 1e-3  # of a score, relative and absolute: what other orders of summation may change


@dataclasses.dataclass(frozen=True)
class Written:
    """An ONNX file, and how far its answers were from the monitor's own on inputs that are always the same.

    Attributes:
        size: bytes.
        difference: largest of the scores'.
        inputs: how many were compared.
    """

    size: int
    difference: float
    inputs: int


class MonitorGraph(nn.Module):
    """A monitor as a module: (N, …) inputs to (N, classes) logits, (N,) scores and (N,) alarms.

    Args:
        monitor: calibrated; its model is copied. Members that ask the model again, or for gradients, have no place in
            one pass.

    Raises:
        InputError: a monitor that is not calibrated, of a model that only answers, or with such a member.
    """

    knots: Tensor
    heights: Tensor
    last: Tensor
    scale: Tensor
    limits: Tensor

    def __init__(self, monitor: Monitor) -> None:
        super().__init__()
        for member in monitor.members:
            needs = member.detector.needs
            if needs.passes or needs.access == "gradient":
                found = f"{member.title}, which asks the model {needs.passes} more times"
                raise InputError("detectors of one shared pass", found=found, do="fit the monitor with --detector fast")
        if not isinstance(monitor.model, Classifier):
            found, do = "one that only answers", "export where the weights are"
            raise InputError("a monitor of a model with weights", found=found, do=do)
        model = monitor.model.copy()
        self.victim = model.module.eval().requires_grad_(False)
        self._model, self._members, self._taps = model, monitor.members, monitor.taps
        for index, member in enumerate(monitor.members):
            for name, value in member.state.items():
                self.register_buffer(_buffer(index, name), value.detach().clone())
        tails = monitor.tails
        self.register_buffer("knots", tails.knots.clamp_max(torch.finfo(torch.float64).max))
        self.register_buffer("heights", tails.heights.clone())
        self.register_buffer("last", tails.last.clone())
        self.register_buffer("scale", tails.scale.clone())
        self.register_buffer("limits", monitor.limits(torch.arange(model.spec.num_classes)))
        self._captured: dict[str, Tensor] = {}
        self._dtype = model.dtype
        for layer in dict.fromkeys(tap.layer for tap in self._taps):
            find_layer(self.victim, layer).register_forward_hook(self._keep(layer))

    def _keep(self, layer: str) -> Hook:
        def keep(_module: nn.Module, _inputs: tuple[Any, ...], output: Any) -> None:
            self._captured[layer] = select(output, layer.partition(":")[2])

        return keep

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Logits, combined scores, alarms."""
        spec = self._model.spec
        prepared = spec.normalise(x.to(self._dtype))
        logits = self._read(self.victim(prepared)).float()
        features = {tap: pool(self._captured[tap.layer], tap.pool).float() for tap in self._taps}
        self._captured.clear()
        context = Context(self._model, x, logits, logits.argmax(dim=1), features)
        columns = []
        for index, member in enumerate(self._members):
            state = {name: getattr(self, _buffer(index, name)) for name in member.state}
            columns.append(member.detector.score(context, state))
        score = self._surprise(torch.stack(columns, dim=1).double()).sum(dim=1)
        return logits, score, score > self.limits[context.predicted]

    def _read(self, output: Any) -> Tensor:
        """As ``InputSpec.read`` of a plain model."""
        values = select(output, "")
        if self._model.spec.num_classes == 2 and values.ndim <= 2 and values[0].numel() == 1:
            logit = values.reshape(-1, 1)
            values = torch.cat([torch.zeros_like(logit), logit], dim=1)
        return values

    def _surprise(self, scores: Tensor) -> Tensor:
        """As ``Tails.surprise``, with a count in the place of a search, which ONNX does not have."""
        rows = scores.T
        place = (rows[:, :, None] >= self.knots[:, None, :]).sum(dim=2)
        place = torch.minimum(place, self.last[:, None]).clamp_min(1)
        low, high = self.knots.gather(1, place - 1), self.knots.gather(1, place)
        below, above = self.heights.gather(1, place - 1), self.heights.gather(1, place)
        within = below + ((rows - low) / (high - low)).clamp(0.0, 1.0) * (above - below)
        end, top = self.knots.gather(1, self.last[:, None]), self.heights.gather(1, self.last[:, None])
        return torch.where(rows > end, top + (rows - end) / self.scale[:, None], within).T


def _buffer(index: int, name: str) -> str:
    return f"member_{index}_{name.replace('.', '__')}"


def exported(monitor: Monitor) -> torch.export.ExportedProgram:
    """The graph of any number of inputs; ``torch.compile(exported(monitor).module())`` makes it fast.

    Raises:
        InputError: as ``MonitorGraph``; or a module that cannot be traced.
    """
    graph = MonitorGraph(monitor).eval()
    probe = _probe(monitor, 3)
    with understood("a model that torch.export traces", "serve the monitor as it is"), torch.no_grad(), _quiet():
        batch = torch.export.Dim("batch", min=1)
        return torch.export.export(graph, (probe,), dynamic_shapes=({0: batch},), strict=False)


def write_onnx(monitor: Monitor, path: Path | str, *, force: bool = False) -> Written:
    """Write the graph for ONNX Runtime, after its answers were compared with the monitor's own.

    Input ``input``, outputs ``logits``, ``score``, ``alarm``; any number of inputs.

    Raises:
        InputError: as ``exported``; missing packages; answers that differ; or a file that cannot be written.
    """
    try:
        import onnxruntime
        import onnxscript  # noqa: F401 - the exporter needs it
    except ImportError as error:
        do = "install them: pip install 'deepseal[onnx]'"
        raise InputError("the packages onnx, onnxscript and onnxruntime", found="none", do=do) from error
    check_writable(Path(path), force=force)
    program = exported(monitor)
    with understood("a model that ONNX can express", "serve the monitor as it is"), torch.no_grad(), _quiet():
        made = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=_OPSET,
            input_names=["input"],
            output_names=list(OUTPUTS),
            verbose=False,
        )
        if made is None:
            raise RuntimeError("nothing was exported")
        content = made.model_proto.SerializeToString()
        session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])
    probe = _probe(monitor, _PROBES)
    _, score, alarm = session.run(None, {"input": probe.numpy()})
    expected = monitor.judge(probe)
    found = torch.from_numpy(score)
    difference = float((found - expected.score).abs().max())
    near = (expected.score - monitor.limits(expected.predicted)).abs() <= _TOLERANCE * (1.0 + expected.score.abs())
    same = near | (torch.from_numpy(alarm) == expected.alarm)
    if not torch.allclose(found, expected.score, rtol=_TOLERANCE, atol=_TOLERANCE) or not bool(same.all()):
        do = "serve the monitor as it is"
        raise InputError("the monitor's own scores from ONNX", found=f"a difference of {difference:.3g}", do=do)
    write_atomically(Path(path), content, force=force)
    return Written(len(content), difference, len(probe))


def _probe(monitor: Monitor, count: int) -> Tensor:
    probe = monitor.model.spec.probe(count)
    assert isinstance(probe, Tensor)  # noqa: S101 - monitors take one tensor
    return probe


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Exporters speak of their progress on stdout, and warn of what they find in themselves."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
