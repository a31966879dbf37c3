"""Virtual-logit matching: what a feature has outside the principal subspace, as one more logit.

Source: H. Wang, Z. Li, L. Feng, W. Zhang, "ViM: out-of-distribution with virtual-logit matching", CVPR 2022, equations
4 to 7. The features are what the last layer takes; their origin is moved to where the logits are 0 (least squares).
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepseal.adapter import BlackBox, Classifier
from deepseal.adapter.capture import execution_order
from deepseal.adapter.training import output_layer
from deepseal.defense.base import State
from deepseal.defense.context import Context, Reference
from deepseal.defense.gaussian import Moments
from deepseal.defense.layered import AtLayer
from deepseal.errors import InputError
from deepseal.parameters import parameter
from deepseal.rng import Rng

_CLOSE = 1e-2


@dataclasses.dataclass(frozen=True, kw_only=True)
class ViM(AtLayer):
    """Wang et al., 2022: the virtual logit minus the log of the sum of all others' exponentials."""

    name: ClassVar[str] = "vim"

    directions: int | None = parameter(None, "principal directions; none: 1000, 512 or half of the width", minimum=1)

    def placed(self: ViM, model: BlackBox) -> ViM:
        """The same with its layer settled: ``last`` is the one whose output the last linear layer takes.

        Raises:
            UnknownNameError: no such layer.
            InputError: a model whose layers cannot be read.
        """
        settled = super().placed(model)
        if self.layer != "last" or not isinstance(model, Classifier):
            return settled
        order, last = execution_order(model.module, model.probe()), output_layer(model)
        place = [name for name, _, _ in order].index(last)
        width = getattr(order[place][1], "in_features", None)
        before = [name for name, _, shape in order[:place] if shape == (width,)]
        return super(ViM, dataclasses.replace(self, layer=before[-1])).placed(model) if before else settled

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """The subspace, and the factor that makes the virtual logit as large as the largest true one.

        Raises:
            InputError: a model whose last layer is not linear in what is read.
        """
        weight, bias = self._last(reference.model)
        origin = -torch.linalg.pinv(weight) @ bias
        second: Moments | None = None
        for context, _ in reference.stream([self.tap]):
            rows = context.at(self.tap).double()
            self._check(rows, weight, bias, context.logits.double())
            second = (second or Moments.empty(rows.shape[1])).add(rows - origin)
        assert second is not None  # noqa: S101 - a split is never empty
        # Around the origin, not around the mean: as in the paper.
        scatter = second.scatter + second.count * torch.outer(second.mean, second.mean)
        vectors = torch.linalg.eigh(scatter).eigenvectors.flip(1)
        outside = vectors[:, self._count(len(origin)) :].contiguous()
        largest = residual = 0.0
        for context, _ in reference.stream([self.tap]):
            largest += float(context.logits.double().max(dim=1).values.sum())
            residual += float(((context.at(self.tap).double() - origin) @ outside).norm(dim=1).sum())
        factor = torch.tensor([largest / max(residual, 1e-12)])
        return {"origin": origin.float(), "outside": outside.float(), "factor": factor}

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) virtual logits minus energies."""
        rows = context.at(self.tap)
        outside = (rows - state["origin"].to(rows)) @ state["outside"].to(rows)
        length = outside.square().sum(dim=1).clamp_min(1e-12).sqrt()
        return state["factor"].to(rows) * length - context.logits.logsumexp(dim=1)

    def _count(self, width: int) -> int:
        if self.directions is not None:
            return min(self.directions, width - 1)
        return 1000 if width >= 2048 else 512 if width >= 768 else max(1, width // 2)

    def _last(self, model: object) -> tuple[Tensor, Tensor]:
        """(C, D) weights and (C,) bias of the last layer; one logit is the second of two."""
        if not isinstance(model, Classifier):
            do = "use detectors that read no layer, such as energy"
            raise InputError("a model whose layers can be read", found="a model that only answers", do=do)
        layer = dict(model.module.named_modules())[output_layer(model)]
        if not isinstance(layer, nn.Linear):
            raise InputError("a linear last layer", found=type(layer).__name__, do="use another detector, such as knn")
        weight = layer.weight.detach().double().cpu()
        bias = torch.zeros(len(weight), dtype=torch.float64)
        if layer.bias is not None:
            bias = layer.bias.detach().double().cpu()
        if len(weight) == 1 and model.spec.num_classes == 2:
            weight, bias = (torch.cat([torch.zeros_like(part), part]) for part in (weight, bias))
        return weight, bias

    def _check(self, rows: Tensor, weight: Tensor, bias: Tensor, logits: Tensor) -> None:
        fits = weight.shape == (logits.shape[1], rows.shape[1])
        if fits:
            error = (rows @ weight.T + bias - logits).square().mean().sqrt()
            fits = bool(error <= _CLOSE * (1.0 + logits.square().mean().sqrt()))
        if not fits:
            found = f"{self.layer!r} of {rows.shape[1]} features, from which it does not follow"
            do = "name the layer (and pool) whose output the last one takes"
            raise InputError("logits that are the last layer of what is read", found=found, do=do)
