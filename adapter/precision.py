"""Reading a network in single precision, whatever its weights are kept in."""

from __future__ import annotations

import torch
from torch import nn

from deepseal.adapter.capture import require_layers
from deepseal.adapter.parametrised import deep_copy

# What rounding adds to an input's activations in a layer, at most, in units of their norm. Measured in epsilons: 0.5 to
# 13 in trained networks, up to 570 in a ResNet-50 with random weights; a score feels up to three times as much of it.
# Errors of different inputs are independent: a mean over n of them has 1 / sqrt(n).
ROUNDING = 1024.0 * torch.finfo(torch.float32).eps


def in_single_precision(module: nn.Module) -> nn.Module:
    """The module, or a float32 copy where numbers of it are shorter.

    The weights say the same, and no bound on what activations lose in bfloat16 fits all networks: in units of the last
    layer's own rounding it is 0.2 in a decoder, of whose activations nearly all is common to all inputs, and 70 in a
    ResNet-50. In float32 both are far below what a bit is read from.

    Raises:
        InputError: a TorchScript module.
    """
    require_layers(module)
    tensors = [*module.parameters(), *module.buffers()]
    short = any(tensor.is_floating_point() and tensor.dtype.itemsize < 4 for tensor in tensors)
    return deep_copy(module).float() if short else module
