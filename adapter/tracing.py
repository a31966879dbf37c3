"""The operations of a forward pass, traced symbolically, with the shapes of what they give."""

from __future__ import annotations

import torch
from torch import fx, nn
from torch.fx.passes.shape_prop import ShapeProp

from deepseal.adapter.capture import evaluating, require_layers
from deepseal.adapter.classifier import Classifier
from deepseal.adapter.inputs import single
from deepseal.errors import InputError


def traced(model: Classifier) -> fx.Graph:
    """The graph of a model's forward pass in evaluation mode; ``shape_of`` reads the shapes of its nodes.

    Raises:
        InputError: a forward pass that cannot be traced, or a model with several inputs.
    """
    require_layers(model.module)
    probe = single(model.probe())
    with evaluating(model.module), torch.no_grad():
        model.module(probe)  # what fails here is the model's own error
        try:
            graph = _Tracer(model.module).trace(model.module)
            ShapeProp(fx.GraphModule(model.module, graph)).propagate(probe)
        except Exception as error:
            said = str(error).partition(". ")[0].partition("\n")[0]
            found = f"{type(error).__name__}: {said}"[:200]
            do = "use a module without data-dependent control flow"
            raise InputError("a network whose forward pass can be traced", found=found, do=do) from error
    return graph


def is_rms_norm(layer: nn.Module) -> bool:
    """Whether a module is RMSNorm (B. Zhang, R. Sennrich, 2019, eq. 4) over its last axis: x / rms(x) * weight.

    Libraries bring classes of their own: one counts if it has nothing but that weight and computes just this.
    """
    if isinstance(layer, nn.RMSNorm):
        return len(layer.normalized_shape) == 1
    tensors = [*layer.named_parameters(), *layer.named_buffers()]
    if [name for name, _ in tensors] != ["weight"] or type(layer).__module__.startswith("torch.nn"):
        return False
    weight = tensors[0][1].detach()
    if weight.ndim != 1 or len(weight) < 2 or not weight.is_floating_point():
        return False
    x = 10.0 * torch.randn(4, 3, len(weight), generator=torch.Generator().manual_seed(0)).to(weight)
    try:
        with torch.no_grad():
            y = layer.forward(x)
    except Exception:
        return False
    if not isinstance(y, torch.Tensor) or y.shape != x.shape:
        return False
    wanted = x * torch.rsqrt(x.double().pow(2).mean(dim=-1, keepdim=True)).to(x) * weight
    tolerance = 1e-3 if weight.dtype in (torch.float32, torch.float64) else 0.05
    return bool(torch.allclose(y, wanted, rtol=tolerance, atol=tolerance * float(weight.abs().max())))


class _Tracer(fx.Tracer):
    """Traces into everything but torch's own layers and what computes RMSNorm."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._norms = {id(layer) for layer in module.modules() if is_rms_norm(layer)}  # tracing changes what they are

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return super().is_leaf_module(m, module_qualified_name) or id(m) in self._norms
