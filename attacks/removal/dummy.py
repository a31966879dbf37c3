"""Dummy neurons: the thief adds neurons that change nothing.

Source: Y. Yan et al., "Rethinking white-box watermarks on deep learning models under neural structural obfuscation",
USENIX Security 2023: dead neurons that nobody reads, pairs that cancel, and neurons split into parts.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deepseal.adapter import Classifier, Split
from deepseal.adapter.rewiring import Links, Move, rewired
from deepseal.adapter.training import Progress
from deepseal.adapter.wiring import Group, Wiring
from deepseal.attacks.base import Removed
from deepseal.attacks.removal.preserving import preserving
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

KINDS = ("dead", "duplicate", "split", "cancel")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Dummy(Parameters):
    """More neurons in every hidden layer. The result has other widths than its architecture, and its file says so.

    dead: random incoming weights, read with weight 0. duplicate: a copy, each read by half. split: a copy, each read by
    a random share. cancel: two neurons with the same random incoming weights, read with opposite random weights.
    """

    name: ClassVar[str] = "dummy"

    share: float = parameter(0.2, "added neurons over neurons", minimum=0.0, maximum=10.0)
    kind: str = parameter("mixed", "what is added; mixed: a quarter each", choices=("mixed", *KINDS))

    def remove(self, model: Classifier, data: Split, *, rng: Rng, progress: Progress | None = None) -> Removed:
        """Add neurons to a copy; ``data`` prove that the function is the same."""

        def change(wiring: Wiring) -> tuple[Classifier, dict[str, Any]]:
            free = wiring.free()
            counts = {index: self._counts(wiring.groups[index].width) for index in free}
            moves = {index: _move(wiring.groups[index], counts[index], rng.child("move", index)) for index in free}
            result = model.copy(metadata={"resized": True})
            rewired(model, wiring, moves, {}, result.module)
            with torch.no_grad():
                for index in free:
                    _fill(result.module, wiring.groups[index], counts[index], rng.child("fill", index))
            added = {kind: sum(count[kind] for count in counts.values()) for kind in KINDS}
            before = sum(wiring.groups[index].width for index in free)
            return result, {"neurons": before, "neurons_added": added}

        return preserving(model, data, change)

    def _counts(self, width: int) -> dict[str, int]:
        """Neurons of each kind, at least one where any are asked for; those that cancel come in pairs."""
        total = max(1, round(self.share * width)) if self.share > 0 else 0
        kinds = KINDS if self.kind == "mixed" else (self.kind,)
        counts = {kind: total // len(kinds) + (place < total % len(kinds)) for place, kind in enumerate(kinds)}
        counts["cancel"] = counts.get("cancel", 0) // 2 * 2 + (2 if self.kind == "cancel" and total == 1 else 0)
        copies = ("duplicate", "split")
        return {kind: min(counts.get(kind, 0), width // 2) if kind in copies else counts.get(kind, 0) for kind in KINDS}


def _move(group: Group, counts: dict[str, int], rng: Rng) -> Move:
    """Every neuron stays; the new ones are copies, with the readers' weights shared where they are to be read."""
    generator = rng.torch()
    copied = torch.randperm(group.width, generator=generator)[: counts["duplicate"] + counts["split"]]
    dead = torch.randint(group.width, (counts["dead"],), generator=generator)
    pairs = torch.randint(group.width, (counts["cancel"] // 2,), generator=generator)
    order = torch.cat([torch.arange(group.width), copied, dead, pairs, pairs])
    shares = torch.full((len(copied),), 0.5, dtype=torch.float64)
    shares[counts["duplicate"] :] = 0.2 + 0.6 * torch.rand(counts["split"], generator=generator, dtype=torch.float64)
    kept = torch.ones(group.width, dtype=torch.float64)
    kept[copied] -= shares
    links = Links(
        order[: group.width + len(copied)], torch.arange(group.width + len(copied)), torch.cat([kept, shares])
    )
    return Move(order, links)


def _fill(module: nn.Module, group: Group, counts: dict[str, int], rng: Rng) -> None:
    """Weights of dead and cancelling neurons, and of what reads the latter, drawn from the layers' own."""
    first = group.width + counts["duplicate"] + counts["split"]
    pairs = first + counts["dead"]
    half = counts["cancel"] // 2
    for name in group.makers:
        weight = module.get_submodule(name).get_parameter("weight")
        drawn = _resampled(weight[: group.width], (counts["dead"] + half, *weight.shape[1:]), rng.child("in", name))
        weight[first : pairs + half] = drawn
        weight[pairs + half :] = drawn[counts["dead"] :]
    for reader in group.readers:
        weight = module.get_submodule(reader.layer).get_parameter("weight")
        columns = weight.view(weight.shape[0], -1, reader.block, *weight.shape[2:])
        shape = (columns.shape[0], half, *columns.shape[2:])
        drawn = _resampled(columns[:, : group.width], shape, rng.child("out", reader.layer))
        columns[:, pairs : pairs + half] = drawn
        columns[:, pairs + half :] = -drawn


def _resampled(values: Tensor, shape: tuple[int, ...], rng: Rng) -> Tensor:
    """Values drawn with replacement from those that are there."""
    flat = values.reshape(-1)
    index = torch.randint(len(flat), shape, generator=rng.torch())
    return flat[index.to(flat.device)]
