"""Pruning: the thief sets weights to zero, the smallest first or at random.

Source: S. Han, J. Pool, J. Tran, W. Dally, "Learning both weights and connections for efficient neural networks",
NeurIPS 2015 (magnitude); used against marks by Rouhani et al. (2019), section 6.3.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import torch
from torch import Tensor

from deepseal.adapter import Classifier, Split
from deepseal.adapter.capture import PARAMETRIC, require_layers
from deepseal.adapter.training import Progress
from deepseal.attacks.base import Removed, weight_change
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prune(Parameters):
    """Unstructured pruning of the weights of linear and convolutional layers (not biases, not normalisation)."""

    name: ClassVar[str] = "prune"

    sparsity: float = parameter(0.9, "share of the weights set to zero", minimum=0.0, maximum=1.0)
    scope: str = parameter("global", "one ranking for all layers, or one a layer", choices=("global", "layer"))
    criterion: str = parameter("magnitude", "smallest weights, or random ones", choices=("magnitude", "random"))

    def remove(self, model: Classifier, data: Split, *, rng: Rng, progress: Progress | None = None) -> Removed:
        """Zero weights of a copy. The thief's data are not needed.

        Raises:
            InputError: TorchScript, no linear or convolutional layer, or one whose weight is computed from others.
        """
        require_layers(model.module)
        result = model.copy()
        layers = {name: layer for name, layer in result.module.named_modules() if isinstance(layer, PARAMETRIC)}
        computed = [name for name, layer in layers.items() if "weight" not in layer._parameters]
        if computed:
            do = "remove the parametrizations first"
            raise InputError("layers whose weight is a parameter of theirs", found=f"others: {computed}", do=do)
        distinct = {id(layer.weight): name for name, layer in reversed(layers.items())}  # tied weights count once
        weights = {name: layers[name].weight for name in layers if distinct[id(layers[name].weight)] == name}
        if not weights:
            raise InputError("linear or convolutional layers to prune", found="none", do="use another attack")
        scores = {name: self._scores(name, weight, rng) for name, weight in weights.items()}
        groups = [scores] if self.scope == "global" else [{name: score} for name, score in scores.items()]
        with torch.no_grad():
            for group in groups:
                for name, keep in _kept(group, self.sparsity).items():
                    weights[name].mul_(keep.to(weights[name]))
        zeros = {name: float((weight == 0).double().mean()) for name, weight in weights.items()}
        total = sum(weight.numel() for weight in weights.values())
        reached = sum(zeros[name] * weights[name].numel() for name in weights) / total
        evidence = {
            "sparsity_reached": reached,
            "sparsity_by_layer": zeros,
            "weights": total,
            "relative_weight_change": weight_change(model, result),
        }
        return Removed(result, evidence)

    def _scores(self, name: str, weight: Tensor, rng: Rng) -> Tensor:
        if self.criterion == "magnitude":
            return weight.detach().abs().float().cpu()
        return torch.rand(weight.shape, generator=rng.child("random", name).torch())


def _kept(scores: Mapping[str, Tensor], sparsity: float) -> dict[str, Tensor]:
    """Exactly round(sparsity * count) entries of all scores together are dropped, ties by position."""
    flat = torch.cat([score.reshape(-1) for score in scores.values()])
    keep = torch.ones(len(flat), dtype=torch.bool)
    keep[flat.argsort(stable=True)[: round(sparsity * len(flat))]] = False
    parts = keep.split([score.numel() for score in scores.values()])
    return {name: part.reshape(scores[name].shape) for name, part in zip(scores, parts, strict=True)}
