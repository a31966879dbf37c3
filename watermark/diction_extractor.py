"""DICTION's extractor, how it is trained, and what embedding minimises against it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from deepseal.adapter import Classifier, InputSpec, Recipe, Split
from deepseal.adapter.outputs import pool
from deepseal.adapter.training import Step, cross_entropy, train
from deepseal.rng import Rng, expand_bits, expand_normal
from deepseal.watermark import images
from deepseal.watermark.key import Key
from deepseal.watermark.mark_loss import MarkLoss
from deepseal.watermark.robust import weathered_features

if TYPE_CHECKING:
    from deepseal.watermark.diction import Diction


_LOGIT = 2.0  # of a bit whose message is added at full size, before training


class Extractor(nn.Module):
    """Activations (N, features) to the logits of the message's bits (N, bits): P = W2 relu(W1 a / scale).

    Args:
        inner: W1, (width, features).
        outer: W2, (bits, width).
        scale: norm of the unmarked model's activations, (1,).
    """

    scale: Tensor

    def __init__(self, inner: Tensor, outer: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.inner, self.outer = nn.Parameter(inner), nn.Parameter(outer)
        self.register_buffer("scale", scale)

    def forward(self, activations: Tensor) -> Tensor:
        """(N, bits) logits."""
        hidden = torch.relu(activations / self.scale @ self.inner.T)
        return hidden @ self.outer.T

    @property
    def sizes(self) -> tuple[int, int]:
        """Features and bits."""
        return self.inner.shape[1], self.outer.shape[0]

    def tensors(self) -> dict[str, Tensor]:
        """The weights, as a key stores them."""
        return {f"extractor.{name}": value.detach().clone() for name, value in self.state_dict().items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> Extractor:
        """The inverse of ``tensors``."""
        parts = (tensors[f"extractor.{name}"].detach().float().clone() for name in ("inner", "outer", "scale"))
        return cls(*parts)


def train_extractor(activations: Tensor, scheme: Diction, secret: bytes) -> Extractor:
    """Train it to read a random word from the activations as they are, and every message from those with its code.

    The code of a message m (signs) is m D, D a secret (bits, features) matrix, at 0.2 to 1 times the activation's size.
    Training starts from the matched filter D a, as relu(D a) - relu(-D a).
    """
    features, bits = activations.shape[1], scheme.bits
    code = torch.from_numpy(expand_normal(secret, "extractor/code", (bits, features))) / math.sqrt(bits)
    scale = activations.norm(dim=1).mean().clamp_min(1e-12).reshape(1)
    word = 2.0 * torch.from_numpy(expand_bits(secret, "extractor/word", bits)).float() - 1.0
    gain, unit = _LOGIT * bits / math.sqrt(features), torch.eye(bits)
    start = Extractor(gain * torch.cat([code, -code]), torch.cat([unit, -unit], dim=1), scale)

    def loss(step: Step) -> Tensor:
        messages = torch.randint(0, 2, (len(step.y), bits), generator=step.generator) * 2.0 - 1.0
        size = 0.2 + 0.8 * torch.rand((len(step.y), 1), generator=step.generator)
        a = step.x if isinstance(step.x, Tensor) else step.logits
        shift = size * a.norm(dim=1, keepdim=True) * messages @ code / math.sqrt(features)
        read = nn.functional.softplus(-messages * step.module(a + shift)).mean()
        return read + nn.functional.softplus(-word * step.logits).mean()

    low, high = float(activations.min()), float(activations.max())
    spec = InputSpec(shape=(features,), num_classes=bits, bounds=(low, max(high, low + 1e-6)))
    recipe = Recipe(steps=scheme.training, batch_size=max(2, min(64, len(activations))))
    samples = Split(activations, torch.zeros(len(activations), dtype=torch.int64))
    rng = Rng(int.from_bytes(secret, "little")).child("extractor")
    trained = train(Classifier(start, spec), samples, recipe=recipe, rng=rng, loss=loss).module
    assert isinstance(trained, Extractor)  # noqa: S101
    return trained


class DictionLoss(MarkLoss):
    """CE + strength * mean relu(margin - s), s = b P(a) averaged over fresh noise, read through weathered weights."""

    def __init__(self, model: Classifier, key: Key, scheme: Diction) -> None:
        super().__init__(cross_entropy)
        self._scheme, self._spec = scheme, model.spec
        self._layer, self._rule = key.public["layers"][0], str(key.public["pool"])
        extractor = Extractor.from_tensors(key.tensors).to(model.device, model.dtype)
        self._extractor = extractor.requires_grad_(False)
        self._signs = (2.0 * torch.from_numpy(key.message()).float() - 1.0).to(model.device, model.dtype)
        self._own = key.tensors["trigger_x"]

    def mark(self, module: nn.Module, generator: torch.Generator) -> Iterator[Tensor]:
        """The bits' shortfall."""
        scheme = self._scheme
        fresh = images.gaussian(torch.randn((scheme.batch, *self._spec.shape), generator=generator), self._spec)
        own = self._own[torch.randint(len(self._own), (scheme.batch,), generator=generator)]
        x = self._spec.prepare(torch.cat([fresh, own]), self._signs.device, self._signs.dtype)
        rate = scheme.prune * float(torch.rand((), generator=generator))
        with weathered_features(
            module,
            x,
            [self._layer],
            prune=rate,
            drift=scheme.drift,
            generator=generator,
            running_statistics=True,
        ) as read:
            logits = self._extractor(pool(read[self._layer], self._rule, None).flatten(1)).mean(dim=0)
            yield scheme.strength * torch.relu(scheme.margin - self._signs * logits).mean()
