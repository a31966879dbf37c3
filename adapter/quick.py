"""A private copy of a network that answers faster: for whoever asks thousands of times for gradients of the input."""

from __future__ import annotations

from typing import TypeVar, cast

import torch
from torch import Tensor, nn

from deepseal.adapter.access import BlackBox, Output
from deepseal.adapter.classifier import Classifier
from deepseal.adapter.inputs import Batch, call
from deepseal.adapter.parametrised import deep_copy
from deepseal.adapter.spec import InputSpec

Model = TypeVar("Model", bound=BlackBox)
_TOLERANCE = 1e-4
_PROBES = 3


class QuickCopy:
    """Logits of a frozen copy in evaluation mode, its convolutions with the channels last; inputs are not checked."""

    output: Output = "logits"

    def __init__(self, module: nn.Module, spec: InputSpec, device: torch.device, dtype: torch.dtype) -> None:
        self.spec = spec
        self._module, self._device, self._dtype = module, device, dtype

    def logits(self, x: Batch) -> Tensor:
        """(N, classes) logits, differentiable in ``x``."""
        prepared = self.spec.prepare(x, self._device, self._dtype)
        if isinstance(prepared, Tensor) and prepared.dim() == 4:
            prepared = prepared.contiguous(memory_format=torch.channels_last)
        return self.spec.read(call(self._module, prepared), prepared)

    @torch.no_grad()
    def query(self, x: Batch) -> Tensor:
        """Detached logits on the CPU in float32."""
        return self.logits(x).float().cpu()


def quick_copy(model: Model) -> Model:
    """A faster stand-in for a convolutional ``Classifier`` on the CPU, equal but for rounding; else the model itself.

    What is found with it is to be judged by the model.
    """
    if not isinstance(model, Classifier) or isinstance(model.module, torch.jit.ScriptModule):
        return model
    if model.device.type != "cpu" or not any(isinstance(layer, nn.Conv2d) for layer in model.module.modules()):
        return model
    try:
        module = deep_copy(model.module).eval().requires_grad_(False).to(memory_format=torch.channels_last)
        quick = QuickCopy(module, model.spec, model.device, model.dtype)
        probe = model.spec.probe(_PROBES)
        expected, found = model.query(probe), quick.query(probe)
    except (RuntimeError, TypeError):  # such as a view of what is no longer contiguous
        return model
    scale = float(expected.abs().max().clamp_min(1.0))
    same = torch.allclose(found, expected, rtol=0.0, atol=_TOLERANCE * scale)
    return cast("Model", quick) if same else model
