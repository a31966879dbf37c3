"""Permutation: the neurons of every hidden layer change places, and the network computes the same.

Source: Y. Yan, X. Pan, M. Zhang, M. Yang, "Rethinking white-box watermarks on deep learning models under neural
structural obfuscation", USENIX Security 2023: function-preserving changes break white-box marks for free.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch

from deepseal.adapter import Classifier, Split
from deepseal.adapter.rewiring import Move, rewired
from deepseal.adapter.training import Progress
from deepseal.adapter.wiring import Wiring
from deepseal.attacks.base import Removed
from deepseal.attacks.removal.preserving import preserving
from deepseal.parameters import Parameters
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class Permute(Parameters):
    """A random order of the neurons (channels) of every hidden layer; added layers share theirs."""

    name: ClassVar[str] = "permute"

    def remove(self, model: Classifier, data: Split, *, rng: Rng, progress: Progress | None = None) -> Removed:
        """Permute a copy; ``data`` prove that the function is the same."""

        def change(wiring: Wiring) -> tuple[Classifier, dict[str, Any]]:
            orders = {
                index: torch.randperm(wiring.groups[index].width, generator=rng.child("order", index).torch())
                for index in wiring.free()
            }
            result = model.copy()
            moves = {index: Move.permutation(order) for index, order in orders.items()}
            rewired(model, wiring, moves, {}, result.module)
            moved = sum(int((order != torch.arange(len(order))).sum()) for order in orders.values())
            return result, {"neurons": sum(map(len, orders.values())), "neurons_moved": moved}

        return preserving(model, data, change)
