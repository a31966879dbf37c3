"""Inputs that no attack made and that a monitor should still notice: what detectors are compared on before any attack.

Two clean inputs of different answers are mixed just so far that the victim's answer changes: the content is still
mostly that of one, the answer that of the other, which is what an adversarial input is, found without a gradient and
without a search of the victim's weaknesses. ``mixed`` is that (an answer of low confidence); ``rough`` goes further and
has a random sign pattern on top, of a strength that leaves the answer as it is.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from deepseal.adapter import BlackBox
from deepseal.errors import InputError
from deepseal.rng import Rng

_HALVINGS = 8
_FURTHER = 0.1
_ROUGH = 0.1  # of the bounds' width
_LEAST = 20


def proxies(model: BlackBox, x: Tensor, *, rng: Rng) -> Mapping[str, Tensor]:
    """(M, …) inputs of each kind, from (N, …) clean ones.

    Raises:
        InputError: hardly any clean inputs with different answers.
    """
    predicted = model.query(x).argmax(dim=1)
    partner = torch.randperm(len(x), generator=rng.child("pairs").torch())
    differ = predicted != predicted[partner]
    first, second = x[differ], x[partner][differ]
    low, high = torch.zeros(len(first)), torch.ones(len(first))
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        changed = model.query(_mixed(first, second, middle)).argmax(dim=1) != predicted[differ]
        low, high = torch.where(changed, low, middle), torch.where(changed, middle, high)
    signs = torch.randint(0, 2, first.shape, generator=rng.child("signs").torch()) * 2.0 - 1.0
    least, most = model.spec.bounds
    rough = _mixed(first, second, (high + _FURTHER).clamp_max(1.0)) + _ROUGH * (most - least) * signs
    rough = rough.clamp(least, most)
    fools = model.query(rough).argmax(dim=1) != predicted[differ]
    found = {"mixed": _mixed(first, second, high), "rough": rough[fools]}
    few = min(len(one) for one in found.values())
    if few < _LEAST:
        raise InputError(f"at least {_LEAST} clean pairs with different answers", found=str(few), do="pass more data")
    return found


def _mixed(first: Tensor, second: Tensor, share: Tensor) -> Tensor:
    share = share.reshape(-1, *(1,) * (first.ndim - 1)).to(first)
    return first + share * (second - first)
