"""The same network with its residual streams in other coordinates."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

import torch
from torch import Tensor, nn

from deepseal.adapter.classifier import Classifier
from deepseal.adapter.streams import Stream

_SMALLEST = 1e-3  # a gain, relative to the largest, that readers can be divided by
_NONE: Mapping[str, Tensor] = MappingProxyType({})


def rotated(
    model: Classifier,
    rotations: Mapping[Stream, Tensor],
    template: nn.Module,
    *,
    gains: Mapping[str, Tensor] = _NONE,
) -> nn.Module:
    """``template`` with the weights of ``model``, in which each stream h is Q h.

    Gains of normalisations are moved into the readers, and those of ``gains`` taken out of them again; where such a
    gain is too small to divide by, it stays 1. Computed in float64.

    Args:
        model: where the weights come from; not changed.
        rotations: (d, d) orthogonal Q by stream; those of LayerNorm must keep the mean over the features.
        template: a module of the model's structure.
        gains: (d,) by normalisation.
    """
    state: dict[str, Tensor] = dict(model.module.state_dict())

    def change(name: str, value: Tensor) -> None:
        state[name] = value.to(state[name])

    def layer(name: str) -> nn.Module:
        return model.module.get_submodule(name)

    for stream, given in rotations.items():
        q = given.to(model.device, torch.float64)
        for name in stream.writers:
            weight = state[f"{name}.weight"].double()
            change(f"{name}.weight", weight @ q.T if isinstance(layer(name), nn.Embedding) else q @ weight)
            if layer(name)._parameters.get("bias") is not None:
                change(f"{name}.bias", q @ state[f"{name}.bias"].double())
        for name in stream.parameters:
            change(name, state[name].double() @ q.T)
        old, new = {}, {}
        for name in stream.norms:
            old[name], new[name] = _gains(layer(name), stream.width, gains.get(name), q)
        for reader in stream.readers:
            weight = state[f"{reader.layer}.weight"].double()
            if reader.norm is None:
                change(f"{reader.layer}.weight", weight @ q.T)
            else:
                change(f"{reader.layer}.weight", (weight * old[reader.norm]) @ q.T / new[reader.norm])
        for name in stream.norms:
            if layer(name)._parameters.get("weight") is not None:
                change(f"{name}.weight", new[name])
            if layer(name)._parameters.get("bias") is not None:
                bias = state[f"{name}.bias"].double()
                shift = torch.where(bias != 0, bias / old[name], 0.0)
                change(f"{name}.bias", new[name] * (q @ shift))
    template.load_state_dict(state, strict=True)
    return template


def random_rotation(width: int, generator: torch.Generator, *, centred: bool) -> Tensor:
    """(width, width) orthogonal matrix in float64, uniform (F. Mezzadri, 2007); ``centred`` ones keep the mean.

    Those are uniform on the complement of (1, …, 1), which they leave in its place.
    """
    size = width - centred
    q, r = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))
    q = q * torch.sign(torch.diagonal(r))
    return embedded(q, width) if centred else q


def embedded(q: Tensor, width: int) -> Tensor:
    """The rotation of the complement of (1, …, 1) as one of the whole space."""
    basis = complement(width).to(q)
    return basis @ q @ basis.T + torch.full((width, width), 1.0 / width).to(q)


def complement(width: int) -> Tensor:
    """(width, width - 1) orthonormal columns that are orthogonal to (1, …, 1), in float64 (Helmert, 1876)."""
    basis = torch.triu(torch.ones(width, width - 1, dtype=torch.float64))
    rows = torch.arange(1, width, dtype=torch.float64)
    basis[1:].diagonal().copy_(-rows)
    return basis / (rows * (rows + 1.0)).sqrt()


def _gains(norm: nn.Module, width: int, wanted: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """Gains before and after."""
    ones = torch.ones(width).to(like)
    weight = norm._parameters.get("weight")
    if weight is None:
        return ones, ones
    after = ones if wanted is None else wanted.detach().to(like)
    after = torch.where(after.abs() > _SMALLEST * after.abs().max(), after, 1.0)
    return weight.detach().to(like), after
