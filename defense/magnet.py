"""MagNet's detector: how badly an autoencoder that has seen clean data only rebuilds an input.

Source: D. Meng, H. Chen, "MagNet: a two-pronged defense against adversarial examples", ACM CCS 2017, section 4.2 and
table 1, with its network for MNIST: 3 maps of 3 x 3 with sigmoids, halved and doubled again; trained on inputs with a
little noise. Inputs that are no images, or too small, have dense layers instead.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import threading
from typing import ClassVar

import torch
from torch import Tensor, nn

from deepseal.adapter import BlackBox, Classifier, InputSpec, Recipe, Split, Step
from deepseal.adapter.training import Training
from deepseal.defense.base import Needs, State
from deepseal.defense.context import Context, Reference
from deepseal.parameters import Parameters, parameter
from deepseal.rng import Rng

_LEAST = 4  # pixels


@dataclasses.dataclass(frozen=True, kw_only=True)
class MagNet(Parameters):
    """Meng and Chen, 2017: mean reconstruction error, L1 or L2."""

    name: ClassVar[str] = "magnet"

    norm: str = parameter("l1", "of the error", choices=("l1", "l2"))
    maps: int = parameter(3, "maps of the hidden convolutions", minimum=1, maximum=1024)
    noise: float = parameter(0.1, "standard deviation of the noise, as a share of the bounds' width", minimum=0.0)
    updates: int = parameter(2000, "updates of the autoencoder", minimum=1, maximum=1_000_000)
    rate: float = parameter(1e-2, "step size of Adam", minimum=1e-9, maximum=1.0)

    @property
    def needs(self) -> Needs:
        return Needs()

    def placed(self, model: BlackBox) -> MagNet:
        """Itself.

        Raises:
            InputError: inputs that are not one float tensor.
        """
        model.spec.require_plain("an autoencoder")
        return self

    def fit(self, reference: Reference, *, rng: Rng) -> dict[str, Tensor]:
        """Train the autoencoder."""
        spec = reference.model.spec
        start = self._autoencoder(spec)
        drawn = rng.child("start").torch()
        with torch.no_grad():
            for tensor in start.module.parameters():
                bound = 1.0 / math.sqrt(max(1, tensor[0].numel())) if tensor.ndim > 1 else 0.0
                tensor.uniform_(-bound, bound, generator=drawn)
        low, high = spec.bounds

        def loss(step: Step) -> Tensor:
            x = _scaled(step.x, spec.bounds)  # type: ignore[arg-type]
            noise = torch.randn(x.shape, generator=step.generator).to(x)
            rebuilt = step.module((low + (high - low) * (x + self.noise * noise)).clamp(low, high))
            return nn.functional.mse_loss(rebuilt, x.flatten(1))

        recipe = Recipe(steps=self.updates, learning_rate=self.rate)
        data = Split.unlabelled(reference.split.tensor)
        return dict(Training(start, data, recipe=recipe, rng=rng.child("train"), loss=loss).run().tensors())

    def score(self, context: Context, state: State) -> Tensor:
        """(N,) mean errors, of values 0 … 1."""
        bounds, shape = context.model.spec.bounds, context.model.spec.shape
        weights = {name: value.to(context.x.device) for name, value in state.items()}
        with torch.set_grad_enabled(context.graph):
            x = context.x.float()
            rebuilt = torch.func.functional_call(
                _rebuilder(shape, bounds, self.maps, threading.get_ident()), weights, (x,)
            )
            change: Tensor = rebuilt - _scaled(x, bounds).flatten(1)
            return change.abs().mean(dim=1) if self.norm == "l1" else change.square().mean(dim=1)

    def _autoencoder(self, spec: InputSpec) -> Classifier:
        """From inputs to (N, D) rebuilt values 0 … 1, with unset weights."""
        module = _Rebuilder(_body(spec.shape, self.maps), spec.bounds)
        return Classifier(module, InputSpec(spec.shape, 0, spec.bounds))


class _Rebuilder(nn.Module):
    def __init__(self, body: nn.Sequential, bounds: tuple[float, float]) -> None:
        super().__init__()
        self.body, self._bounds = body, bounds

    def forward(self, x: Tensor) -> Tensor:
        """(N, D) values 0 … 1."""
        rebuilt: Tensor = self.body(_scaled(x, self._bounds))
        return rebuilt.flatten(1)


@functools.lru_cache(maxsize=8)
def _rebuilder(shape: tuple[int, ...], bounds: tuple[float, float], maps: int, _thread: int) -> _Rebuilder:
    """The autoencoder without weights, for those of a state: one a thread, as a call lends it the state's."""
    return _Rebuilder(_body(shape, maps), bounds).requires_grad_(False).eval()


def _body(shape: tuple[int, ...], maps: int) -> nn.Sequential:
    images = len(shape) == 3 and min(shape[1:]) >= _LEAST
    return _convolutional(shape, maps) if images else _dense(shape)


def _convolutional(shape: tuple[int, ...], maps: int) -> nn.Sequential:
    channels, height, width = shape

    def layer(inputs: int, outputs: int) -> list[nn.Module]:
        return [nn.utils.skip_init(nn.Conv2d, inputs, outputs, 3, padding=1), nn.Sigmoid()]

    halved = [*layer(channels, maps), nn.AvgPool2d(2), *layer(maps, maps), *layer(maps, maps)]
    back = [nn.Upsample((height, width)), *layer(maps, maps), *layer(maps, channels)]
    return nn.Sequential(*halved, *back)


def _dense(shape: tuple[int, ...]) -> nn.Sequential:
    width = math.prod(shape)
    narrow = max(1, width // 4)
    first, second = (nn.utils.skip_init(nn.Linear, *sizes) for sizes in ((width, narrow), (narrow, width)))
    return nn.Sequential(nn.Flatten(), first, nn.Sigmoid(), second, nn.Sigmoid())


def _scaled(x: Tensor, bounds: tuple[float, float]) -> Tensor:
    low, high = bounds
    return (x - low) / (high - low)
