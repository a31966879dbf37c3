"""Weights that torch stores in parts: pruning, weight normalisation, spectral normalisation, old style and new.

A module that has the parametrisation takes the parts as they are. For one that has not, ``rule_for`` finds the function
that makes the plain weight from the parts: the same torch calls as in the parametrised module's evaluation mode, so the
plain weight equals the one that it computed. The names in a state dict do not say which class made them: ``original0``
and ``original1`` are read as weight normalisation (their shapes must fit it), ``original`` with ``0._u`` and ``0._v``
as spectral normalisation; every other parametrisation is left to a module that has it.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Collection

import torch
from torch import Tensor, nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from deepseal.adapter.capture import evaluating
from deepseal.errors import InputError

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_DERIVING = (BasePruningMethod, SpectralNorm, WeightNorm)


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a plain weight comes from the parts that a file has.

    Attributes:
        parts: names of the parts, in the order that ``apply`` takes.
        apply: the weight from the layer and the parts.
    """

    parts: tuple[str, ...]
    apply: Callable[..., Tensor]


def rule_for(name: str, names: Collection[str]) -> Rule | None:
    """The rule that gives the tensor ``name`` from tensors among ``names``, if their names say one."""
    layer, dot, own = name.rpartition(".")
    new = f"{layer}{dot}parametrizations.{own}."
    candidates = (
        Rule((f"{name}_orig", f"{name}_mask"), _pruned),
        Rule((f"{name}_orig", f"{name}_u", f"{name}_v"), _spectral),
        Rule((f"{name}_g", f"{name}_v"), _weight_norm),
        Rule((f"{new}original", f"{new}0._u", f"{new}0._v"), _spectral),
        Rule((f"{new}original0", f"{new}original1"), _weight_norm),
    )
    return next((rule for rule in candidates if all(part in names for part in rule.parts)), None)


def refresh(module: nn.Module) -> None:
    """Recompute the plain weights that old-style parametrisations keep beside their parts, as detached tensors.

    They are otherwise those from before the parts were loaded, until the next forward pass.
    """
    with torch.no_grad(), evaluating(module):  # in which spectral normalisation takes no step of its power iteration
        for layer in module.modules():
            for hook in layer._forward_pre_hooks.values():
                if isinstance(hook, _DERIVING):
                    hook(layer, ())


def deep_copy(module: nn.Module) -> nn.Module:
    """A deep copy, also of a module whose layers keep tensors with a graph (which ``copy.deepcopy`` refuses).

    Old-style pruning and normalisation keep the derived weight as such an attribute; the copy gets its value.
    """
    memo: dict[int, object] = {}
    for layer in module.modules():
        for value in vars(layer).values():
            if isinstance(value, Tensor) and not value.is_leaf:
                memo[id(value)] = value.detach().clone()
    return copy.deepcopy(module, memo)


def _pruned(_layer: nn.Module, original: Tensor, mask: Tensor) -> Tensor:
    if mask.shape != original.shape:
        raise _wrong("a mask of the weight's shape", original, mask)
    return mask.to(dtype=original.dtype) * original


def _weight_norm(_layer: nn.Module, g: Tensor, v: Tensor) -> Tensor:
    """Salimans and Kingma (2016), eq. 2: v g / ||v||, the norm over all axes but the one that g has."""
    axes = [axis for axis in range(v.ndim) if g.shape == _only(v, axis)]
    if g.ndim == 0:
        axes = [-1]  # torch's mark for the norm over everything
    if not axes or g.dtype != v.dtype:
        raise _wrong("weight normalisation (original0 or g with one entry an output, original1 or v)", g, v)
    return torch._weight_norm(v, g, axes[0])


def _spectral(layer: nn.Module, original: Tensor, u: Tensor, v: Tensor) -> Tensor:
    """Miyato et al. (2018), eq. 8: W / (u^T W v), W as a matrix whose rows are the outputs."""
    outputs = 1 if isinstance(layer, _TRANSPOSED) else 0
    axes = [outputs, *(axis for axis in range(original.ndim) if axis != outputs)]
    for axis in axes:
        if original.ndim < 2 or u.shape != original.shape[axis : axis + 1]:
            continue
        matrix = original.movedim(axis, 0).flatten(1)
        if v.shape == matrix.shape[1:]:
            return original / torch.dot(u, torch.mv(matrix, v))
    raise _wrong("spectral normalisation (vectors u and v that fit the weight)", original, u, v)


def _only(v: Tensor, axis: int) -> tuple[int, ...]:
    return tuple(size if other == axis else 1 for other, size in enumerate(v.shape))


def _wrong(expected: str, *parts: Tensor) -> InputError:
    found = ", ".join(f"{tuple(part.shape)} {str(part.dtype).removeprefix('torch.')}" for part in parts)
    return InputError(expected, found=found, do="name an architecture that has the parametrisation")
