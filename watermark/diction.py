"""DICTION: a trained network reads the message from activations on noise.

Source: R. Bellafqira, G. Coatrieux, "DICTION: dynamic robust white box watermarking scheme for deep neural networks",
Applied Sciences 15(13), 2025 (arXiv 2210.15745), section 4. Ours: the extractor never sees the message.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import numpy as np
import torch

from deepseal.adapter import Classifier, Recipe, Split
from deepseal.adapter.layers import hidden_layers, layer_readings
from deepseal.adapter.precision import ROUNDING
from deepseal.adapter.training import Loss, Training
from deepseal.errors import InputError, understood
from deepseal.parameters import Parameters, parameter
from deepseal.rng import SECRET_BYTES, Rng, fresh_secret
from deepseal.watermark import images
from deepseal.watermark.diction_extractor import DictionLoss, Extractor, train_extractor
from deepseal.watermark.key import Key
from deepseal.watermark.scheme import Access, Extraction, Observation, Published

_NARROW = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Diction(Parameters):
    """DICTION (Bellafqira and Coatrieux, 2025), which generalises DeepSigns: a network for A, noise for the triggers.

    In the paper extractor and model are trained together, the one to read the message from the marked model and a
    random word from the unmarked one. An extractor that has learned the message can give it for a model that it never
    saw, and no rate follows. Here the extractor is trained in ``keygen``, on the unmarked model: a random word from its
    activations as they are, and any message whose code is added to them. The message itself is drawn when the extractor
    is fixed (the mask covers it), so that every bit of a model independent of the key is a fair coin.
    """

    name: ClassVar[str] = "diction"
    access: ClassVar[Access] = "white-box"

    bits: int = parameter(256, "length of the message (the paper has up to 512)", minimum=1, maximum=100_000)
    layer: str | None = parameter(None, "layer whose activations hold the mark; none takes the last wide hidden one")
    triggers: int = parameter(64, "noise inputs that are read", minimum=1, maximum=100_000)
    training: int = parameter(200, "updates of the extractor", minimum=0, maximum=1_000_000)
    strength: float = parameter(1.0, "weight of the margin loss", minimum=0.0, maximum=1e6)
    margin: float = parameter(10.0, "logit of each bit that embedding asks for", minimum=0.0, maximum=1000.0)
    prune: float = parameter(0.8, "highest pruning rate the mark is read through", minimum=0.0, maximum=0.99)
    drift: float = parameter(0.5, "weight noise it is read through", minimum=0.0, maximum=10.0)
    batch: int = parameter(32, "fresh noise inputs an update", minimum=1, maximum=4096)
    steps: int = parameter(400, "updates a round", minimum=1, maximum=1_000_000)
    learning_rate: float = parameter(1e-3, "step size of Adam", minimum=1e-9, maximum=10.0)
    rounds: int = parameter(3, "most rounds of embedding, while a bit reads wrong", minimum=1, maximum=100)

    def keygen(self, model: Classifier, data: Split, *, owner: str, rng: Rng | None = None) -> Key:
        """Draw a key: noise inputs, and an extractor trained on the unmarked model.

        Args:
            model: the model to be marked.
            data: its training samples; only checked.
            owner: text of the message.
            rng: seeds the secret, for repeatable experiments; None takes 32 bytes from the operating system.

        Raises:
            UnknownNameError: a layer that the model does not have.
            InputError: more bits than activations, or data that do not fit the model.
        """
        model.spec.require_plain(self.name)
        data.check(model.spec)
        secret = rng.child("secret").bytes(SECRET_BYTES) if rng else fresh_secret()
        layer = self.layer or self._widest(model)
        reading = layer_readings(model, [layer])[layer]
        if self.bits > reading.width:
            do = f"use fewer than {self.bits} bits or another layer"
            raise InputError(f"at most {reading.width} bits in layer {layer}", found=str(self.bits), do=do)
        public = {
            "access": self.access,
            "bits": self.bits,
            "layers": [layer],
            "features": reading.width,
            "pool": reading.pool,
        }
        x = images.noisy(secret, "diction", self.triggers, model.spec)
        activations = model.features(x, [layer], pool={layer: reading.pool})[layer].flatten(1)
        extractor = train_extractor(activations, self, secret)
        return Key(
            scheme=self.name,
            params=self.as_dict(),
            owner=owner,
            secret=secret,
            spec=model.spec,
            public=public,
            tensors={"trigger_x": x.contiguous(), **extractor.tensors()},
            reproducible=rng is not None,
        )

    def embedding(
        self, model: Classifier, data: Split, key: Key, *, rng: Rng, start: Classifier | None = None
    ) -> Training:
        """The fine-tuning after which the key's extractor reads the message; the extractor stays as it is.

        Raises:
            InputError: a key made for another input, or data that do not fit the model.
        """
        self.observe(model, key)
        recipe = Recipe(steps=self.steps, learning_rate=self.learning_rate, schedule="cosine")
        return Training(start or model, data, recipe=recipe, rng=rng, loss=self.loss(model, data, key))

    def loss(self, model: Classifier, data: Split, key: Key) -> Loss:
        """What embedding minimises."""
        return DictionLoss(model, key, self)

    def observe(self, model: Classifier, key: Key) -> Observation:
        """(triggers, features) activations on the key's noise.

        Raises:
            InputError: a suspect with another input, without this layer, or with one of another width.
        """
        extractor_of(key)
        layer, rule = key.public["layers"][0], str(key.public["pool"])
        if not model.spec.same_inputs(key.spec):
            do = "pass the right model or the right key"
            raise InputError(f"a model with inputs of shape {key.spec.shape}", found=str(model.spec.shape), do=do)
        if layer not in {name for name, _ in model.module.named_modules()}:
            do = "pass a copy of the marked architecture, or the key of this one"
            raise InputError(f"a model with the key's layer {layer}", found="none called so", do=do)
        values = model.features(key.tensors["trigger_x"], [layer], pool={layer: rule})[layer].flatten(1)
        if values.shape[1] != key.public["features"]:
            do = "pass a copy of the marked architecture (structural changes need alignment)"
            raise InputError(f"{key.public['features']} features in {layer}", found=str(values.shape[1]), do=do)
        return Observation({"activations": values}, noise=ROUNDING)

    @torch.no_grad()
    def decode(self, observation: Observation, key: Key) -> Extraction:
        """Sign of the extractor's mean logit for each bit; the score is in root mean squares over all bits.

        Rounding errors of the triggers' logits, relative to their root mean square, are independent.
        """
        activations = observation.values["activations"]
        each = extractor_of(key).double()(activations.double()).numpy()
        logits = each.mean(axis=0)
        scale = np.sqrt(np.mean(logits**2))
        scores, noise = np.zeros(key.bits), 0.0
        if np.isfinite(scale) and scale > 0 and bool(activations.any()):
            scores = logits / scale
            noise = observation.noise * np.sqrt(np.mean(each**2) / len(each)) / scale
        usable = np.abs(scores) > noise
        margin = np.where(key.message() == 1, scores, -scores)
        return Extraction((scores > 0).astype(np.uint8), usable, np.full(key.bits, 0.5), margin)

    def published(self, extraction: Extraction, key: Key) -> Published:
        """The paper's claims are of a bit error rate of 0."""
        matches = int((extraction.bits == key.message()).sum())
        return Published("bit error rate 0", matches == key.bits, matches, key.bits, key.bits)

    def _widest(self, model: Classifier) -> str:
        """The last hidden layer with room for the message, or the widest."""
        hidden = hidden_layers(model)
        wide = [name for name, _, reading in hidden if reading.width >= max(_NARROW, self.bits)]
        return wide[-1] if wide else max(hidden, key=lambda row: row[2].width)[0]


def extractor_of(key: Key) -> Extractor:
    """The key's extractor.

    Raises:
        InputError: a foreign or damaged key.
    """
    what, do = "a complete diction key", "use an intact copy of it"
    with understood(what, do):
        (layer,), features, x = key.public["layers"], key.public["features"], key.tensors["trigger_x"]
        extractor = Extractor.from_tensors(key.tensors)
        sound = isinstance(layer, str) and extractor.sizes == (features, key.bits) and x.ndim > 1
        if sound and isinstance(key.public["pool"], str):
            return extractor
    raise InputError(what, found="a foreign or damaged one", do=do)
