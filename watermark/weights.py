"""What marks in the weights share: a secret projection of a vector that a scheme reads from one layer's weights."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deepseal.adapter import Classifier, Recipe, Split
from deepseal.adapter.capture import PARAMETRIC, execution_order, find_layer
from deepseal.adapter.training import Imitation, Loss, Training, cross_entropy
from deepseal.errors import InputError, understood
from deepseal.parameters import Parameters, parameter
from deepseal.rng import SECRET_BYTES, Rng, expand_normal, fresh_secret
from deepseal.watermark.key import Key
from deepseal.watermark.mark_loss import MarkLoss
from deepseal.watermark.robust import magnitude_quantile
from deepseal.watermark.scheme import Access, Extraction, Observation


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeightScheme(Parameters):
    """A mark in one layer's weights: bit i is the sign of (X v)_i, v read from the weights, X ~ N(0, 1) secret.

    The message is masked with secret coins, so every bit of a model that is independent of the key is a fair coin,
    whatever its weights. A subclass says what v is (``place`` and ``vector``).
    """

    name: ClassVar[str]
    access: ClassVar[Access] = "white-box"

    bits: int = parameter(256, "length of the message", minimum=1, maximum=100_000)
    layer: str | None = parameter(None, "layer that holds the mark; none chooses the one with most room")
    recipe: str = parameter("robust", "how to embed", choices=("robust", "paper"))
    weight: float = parameter(0.01, "weight of the binary cross-entropy (paper)", minimum=0.0, maximum=1e6)
    strength: float = parameter(1.0, "weight of the margin loss (robust)", minimum=0.0, maximum=1e6)
    margin: float = parameter(
        5.0, "score of each bit, in standard deviations of the original's (robust)", minimum=0.0, maximum=1000.0
    )
    prune: float = parameter(0.9, "highest pruning rate the mark is read through (robust)", minimum=0.0, maximum=0.99)
    drift: float = parameter(0.5, "weight noise it is read through (robust)", minimum=0.0, maximum=10.0)
    steps: int = parameter(320, "updates", minimum=1, maximum=1_000_000)
    learning_rate: float = parameter(1e-3, "step size of Adam", minimum=1e-9, maximum=10.0)
    rounds: int = parameter(3, "most rounds of embedding, while a bit reads wrong", minimum=1, maximum=100)

    def width(self, shape: tuple[int, ...]) -> int:
        """Length of v for a weight tensor of this shape."""
        raise NotImplementedError

    def vector(self, weight: Tensor, key: Key) -> Tensor:
        """v, of length ``key.public["features"]``, differentiable in the layer's weights."""
        raise NotImplementedError

    def keygen(self, model: Classifier, data: Split, *, owner: str, rng: Rng | None = None) -> Key:
        """Draw a key: a layer, and a secret that fixes mask and projection.

        Args:
            model: the model to be marked.
            data: its training samples; only checked.
            owner: text of the message.
            rng: seeds the secret, for repeatable experiments; None takes 32 bytes from the operating system.

        Raises:
            UnknownNameError: a layer that the model does not have.
            InputError: more bits than features, a layer without weights, or data that do not fit the model.
        """
        data.check(model.spec)
        room = {name: self.width(tuple(weight_of(model.module, name).shape)) for name in weight_layers(model)}
        layer = self.layer or max(room, key=lambda name: room[name])
        shape = tuple(weight_of(model.module, layer).shape)
        width = self.width(shape)
        if self.bits > width:
            do = f"use fewer than {self.bits} bits or another layer; room: {room}"
            raise InputError(f"at most {width} bits in layer {layer}", found=str(self.bits), do=do)
        public = {
            "access": self.access,
            "bits": self.bits,
            "layers": [layer],
            "shape": list(shape),
            "features": width,
        }
        return Key(
            scheme=self.name,
            params=self.as_dict(),
            owner=owner,
            secret=rng.child("secret").bytes(SECRET_BYTES) if rng else fresh_secret(),
            spec=model.spec,
            public=public,
            reproducible=rng is not None,
        )

    def embedding(
        self, model: Classifier, data: Split, key: Key, *, rng: Rng, start: Classifier | None = None
    ) -> Training:
        """The fine-tuning that embeds the key's message into a copy of ``model``, or goes on with ``start``.

        Raises:
            InputError: a model without the key's layer, or data that do not fit the model.
        """
        recipe = Recipe(steps=self.steps, learning_rate=self.learning_rate, schedule="cosine")
        return Training(start or model, data, recipe=recipe, rng=rng, loss=self.loss(model, data, key))

    def loss(self, model: Classifier, data: Split, key: Key) -> Loss:
        """What embedding minimises."""
        return WeightLoss(model, key, self)

    def observe(self, model: Classifier, key: Key) -> Observation:
        """The layer's weights, as they are.

        Raises:
            InputError: a suspect without this layer, or with weights of another shape.
        """
        layer, shape = place_of(key)
        if layer not in {name for name, _ in model.module.named_modules()}:
            do = "pass a copy of the marked architecture, or the key of this one"
            raise InputError(f"a model with the key's layer {layer}", found="none called so", do=do)
        weight = weight_of(model.module, layer)
        if tuple(weight.shape) != shape:
            do = "pass a copy of the marked architecture (structural changes need alignment)"
            raise InputError(f"weights of shape {shape} in layer {layer}", found=str(tuple(weight.shape)), do=do)
        return Observation({"weight": weight.detach().to("cpu", torch.float64).clone()}, noise=1e-9)

    def decode(self, observation: Observation, key: Key) -> Extraction:
        """Sign of (X v)_i / |v|, which has unit variance under no mark."""
        vector = self.vector(observation.values["weight"], key).numpy()
        norm = np.linalg.norm(vector)
        scores = np.zeros(key.bits)
        if norm > 0 and np.isfinite(norm):
            scores = projection_of(key) @ (vector / norm)
        usable = np.abs(scores) > observation.noise
        margin = np.where(key.message() == 1, scores, -scores)
        return Extraction((scores > 0).astype(np.uint8), usable, np.full(key.bits, 0.5), margin)


class WeightLoss(MarkLoss):
    """CE, or agreement with the unmarked model's answers where there are no classes, + the mark's loss on v, by recipe.

    paper: ``weight`` times the mean binary cross-entropy of sigmoid(X v) and the message.
    robust: ``strength`` times mean [relu(margin - s / nu) + relu(relative - s / |v|)], s = b X v, read through pruned
    and noisy weights; nu is the original's |v|, and relative half of sqrt(features / bits), the most that all can have.
    """

    def __init__(self, model: Classifier, key: Key, scheme: WeightScheme) -> None:
        super().__init__(cross_entropy if model.spec.num_classes else Imitation(model))
        self._scheme, self._key = scheme, key
        layer, _ = place_of(key)
        self._layer = layer
        signed = projection_of(key) * (2.0 * key.message()[:, None] - 1.0)
        self._projection = torch.from_numpy(signed).to(model.device, model.dtype)
        original = scheme.vector(scheme.observe(model, key).values["weight"], key)
        self._norm = max(1e-12, float(original.norm()))
        self._relative = min(2.5, 0.5 * math.sqrt(int(key.public["features"]) / key.bits))

    def mark(self, module: nn.Module, generator: torch.Generator) -> Iterator[Tensor]:
        """The mark's loss on v."""
        scheme = self._scheme
        weight = weight_of(module, self._layer)
        if scheme.recipe == "paper":
            scores = self._projection @ scheme.vector(weight, self._key)
            yield scheme.weight * nn.functional.softplus(-scores).mean()
            return
        vector = scheme.vector(self._weathered(weight, generator), self._key)
        scores = self._projection @ vector
        absolute, relative = scores / self._norm, scores / vector.norm().clamp_min(1e-12)
        shortfall = torch.relu(scheme.margin - absolute) + torch.relu(self._relative - relative)
        yield scheme.strength * shortfall.mean()

    def _weathered(self, weight: Tensor, generator: torch.Generator) -> Tensor:
        rate = self._scheme.prune * float(torch.rand((), generator=generator))
        spread = self._scheme.drift * float(weight.detach().std())
        if rate > 0:
            pruned = nn.functional.hardshrink(weight, magnitude_quantile([weight], rate, generator))
            weight = weight + (pruned - weight).detach()  # straight through: small weights are to grow
        if spread > 0:
            weight = weight + spread * torch.randn(weight.shape, generator=generator).to(weight)
        return weight


def weight_layers(model: Classifier) -> list[str]:
    """Names of the hidden linear and convolutional layers in the order of the forward pass, each once.

    Raises:
        InputError: a model without one.
    """
    order = execution_order(model.module, model.probe())
    found = list(dict.fromkeys(name for name, layer, _ in order if isinstance(layer, PARAMETRIC)))
    if len(found) < 2:
        raise InputError("a model with a hidden linear or convolutional layer", found="none", do="name layers yourself")
    return found[:-1]


def weight_of(module: nn.Module, layer: str) -> Tensor:
    """The weights of a layer, worked out where they are parametrised.

    Raises:
        UnknownNameError: no such layer.
        InputError: a layer without weights.
    """
    weight = getattr(find_layer(module, layer), "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim < 2:
        raise InputError("a linear or convolutional layer", found=f"{layer}, without weights", do="name another")
    return weight


def projection_of(key: Key) -> NDArray[np.float32]:
    """The secret matrix X, (bits, features), i.i.d. N(0, 1); it depends on everything in the key."""
    return expand_normal(key.secret, f"projection/{key.binding}", (key.bits, int(key.public["features"])))


def place_of(key: Key) -> tuple[str, tuple[int, ...]]:
    """The key's layer and the shape of its weights.

    Raises:
        InputError: a foreign or damaged key.
    """
    what, do = f"a complete {key.scheme} key", "use an intact copy of it"
    with understood(what, do):
        public = key.public
        (layer,), shape, features = public["layers"], tuple(public["shape"]), public["features"]
        sound = all(type(size) is int and size > 0 for size in (*shape, features)) and key.bits <= features
        if sound and isinstance(layer, str) and features <= math.prod(shape):
            return layer, shape
    raise InputError(what, found="a foreign or damaged one", do=do)
