"""Query noise: the thief's server perturbs every input before the stolen model sees it, so that triggers miss.

Source: evasion of black-box verification by input transformations; Gaussian noise as in N. Lukas, E. Jiang, X. Li, F.
Kerschbaum, "SoK: How robust is image classification deep neural network watermarking?", IEEE S&P 2022.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from deepseal.adapter import BlackBox, InputSpec
from deepseal.adapter.access import Output
from deepseal.adapter.inputs import Batch, single
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class QueryNoise(Parameters):
    """Independent Gaussian noise on every input of every query, kept within the bounds."""

    name: ClassVar[str] = "query-noise"

    deviation: float = parameter(0.1, "standard deviation, as a share of the bounds' width", minimum=0.0, maximum=1.0)

    def wrap(self, model: BlackBox, *, rng: Rng) -> NoisyModel:
        """The model behind such a server; the model is not changed.

        Raises:
            InputError: a model of several inputs, or of integers.
        """
        if model.spec.fields or model.spec.integer:
            raise InputError("a model of one floating-point input", found="another", do="use another attack")
        return NoisyModel(model, self.deviation, rng.child("noise").torch())


class NoisyModel:
    """Answers queries with what the wrapped model says about perturbed inputs."""

    def __init__(self, model: BlackBox, deviation: float, generator: torch.Generator) -> None:
        self._model, self._deviation, self._generator = model, deviation, generator
        self._queries, self._squares, self._numbers = 0, 0.0, 0

    @property
    def spec(self) -> InputSpec:
        """What the model takes."""
        return self._model.spec

    @property
    def output(self) -> Output:
        """What a query answers, as the wrapped model."""
        return self._model.output

    @property
    def evidence(self) -> Mapping[str, Any]:
        """Inputs asked so far, and the root mean square of what was really added to them."""
        root = (self._squares / self._numbers) ** 0.5 if self._numbers else 0.0
        return {"queries": self._queries, "root_mean_square_change": root}

    @torch.no_grad()
    def query(self, x: Batch) -> Tensor:
        """Answers to perturbed inputs.

        Raises:
            InputError: inputs that do not fit the spec.
        """
        self.spec.check(x)
        clean = single(x)
        low, high = self.spec.bounds
        noise = torch.randn(clean.shape, generator=self._generator).to(clean)
        noisy = (clean + self._deviation * (high - low) * noise).clamp(low, high)
        self._queries += len(clean)
        self._numbers += clean.numel()
        self._squares += float((noisy - clean).double().pow(2).sum())
        return self._model.query(noisy)

    def __repr__(self) -> str:
        return f"NoisyModel({self._model!r}, {self._queries} queries)"
