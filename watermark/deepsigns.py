"""DeepSigns, white box: a message in the class means of hidden activations.

Source: B. D. Rouhani, H. Chen, F. Koushanfar, "DeepSigns: an end-to-end watermarking framework for ownership protection
of deep neural networks", ASPLOS 2019 (arXiv 1804.00750). Ours: a uniformly masked message (so that the p-value is
exact), a projection of its own for every cell (a layer and a carrier class), and a robust recipe beside the paper's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepseal.adapter import Classifier, InputSpec, Recipe, Split
from deepseal.adapter.capture import layer_name, running_between
from deepseal.adapter.inputs import named, stored
from deepseal.adapter.layers import activation_after, hidden_layers, layer_readings
from deepseal.adapter.outputs import POOLS
from deepseal.adapter.precision import ROUNDING
from deepseal.adapter.training import Imitation, Loss, Training
from deepseal.errors import InputError, understood
from deepseal.parameters import Parameters, parameter
from deepseal.rng import SECRET_BYTES, Rng, fresh_secret
from deepseal.watermark.carriers import draw_groups, draw_triggers
from deepseal.watermark.cells import LayerCapacity, cells_of, deal, projection_of, thin_layers
from deepseal.watermark.deepsigns_losses import PaperLoss, RobustLoss, centred_means
from deepseal.watermark.deepsigns_recipes import RECIPES, Settings
from deepseal.watermark.key import Key
from deepseal.watermark.scheme import Access, Extraction, Observation

_GROUPS = 16
_WORSE = 0.03  # of the owner's training samples, that may be answered wrong on top before another round follows
_ASKED = 5000  # training samples, at most, that this is measured on


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSigns(Parameters):
    """DeepSigns white box (Rouhani et al., 2019).

    ``recipe="paper"`` minimises the paper's loss, CE + lambda1 L1 + lambda2 L2; ``recipe="robust"`` asks every bit for
    a margin that is read through pruned and noisy weights, and spreads the bits thinly over classes and layers;
    ``recipe="gentle"``, for a pretrained network or one without classes, holds on to the network's own answers instead
    of labels, in evaluation mode, and changes nothing before the first marked layer and nothing after the last.
    Parameters that are none are the recipe's.
    """

    name: ClassVar[str] = "deepsigns"
    access: ClassVar[Access] = "white-box"

    bits: int = parameter(256, "length N of the message over all cells", minimum=1, maximum=100_000)
    layers: tuple[str, ...] | None = parameter(None, "layers that hold the mark; none chooses them")
    carriers: tuple[int, ...] | None = parameter(None, "carrier classes T; none takes all classes", minimum=0)
    groups: int | None = parameter(
        None, "carriers that are groups of triggers; none: 16 for a model without classes", minimum=1, maximum=10_000
    )
    pool: str = parameter("auto", "how maps and sequences become vectors", choices=("auto", *POOLS))
    trigger_share: float = parameter(0.01, "share of the training samples kept as triggers", minimum=0.0, maximum=1.0)
    recipe: str = parameter(
        "auto", "how to embed; auto: robust with carrier classes, gentle with groups", choices=("auto", *RECIPES)
    )
    lambda1: float = parameter(0.01, "weight of the centre loss L1 (paper)", minimum=0.0, maximum=1e6)
    lambda2: float = parameter(0.01, "weight of the binary cross-entropy L2 (paper)", minimum=0.0, maximum=1e6)
    epochs: int = parameter(1, "passes over the training data (paper)", minimum=1, maximum=10_000)
    strength: float = parameter(1.0, "weight of the margin loss", minimum=0.0, maximum=1e6)
    rounds: int = parameter(
        3,
        "most rounds of embedding, while a bit reads wrong or training data are answered worse",
        minimum=1,
        maximum=100,
    )
    margin: float | None = parameter(
        None, "projection of each bit, in standard deviations of the original's", minimum=0.0, maximum=1000.0
    )
    relative_margin: float | None = parameter(
        None, "score of each bit, in standard deviations of chance", minimum=0.0, maximum=1000.0
    )
    prune: float | None = parameter(None, "highest pruning rate it is read through", minimum=0.0, maximum=0.99)
    drift: float | None = parameter(None, "weight noise it is read through", minimum=0.0, maximum=10.0)
    hold: float | None = parameter(None, "weight of keeping the outputs (gentle)", minimum=0.0, maximum=1e6)
    steps: int | None = parameter(None, "updates", minimum=1, maximum=1_000_000)
    learning_rate: float | None = parameter(
        None, "step size of Adam; of gentle: in units of each weight tensor's size", minimum=1e-9, maximum=10.0
    )
    batch: int | None = parameter(None, "inputs a carrier and update, and of a group", minimum=1, maximum=1024)
    batch_size: int | None = parameter(None, "inputs of the task an update", minimum=2)

    def keygen(self, model: Classifier, data: Split, *, owner: str, rng: Rng | None = None) -> Key:
        """Draw a key: layers and carriers, and a secret that fixes mask, projections and triggers.

        Args:
            model: the model to be marked.
            data: its training samples; about ``trigger_share`` of the carriers' become triggers.
            owner: text of the message.
            rng: seeds the secret, for repeatable experiments; None takes 32 bytes from the operating system.

        Raises:
            UnknownNameError: a layer that the model does not have.
            InputError: too many bits for the layers, a carrier without samples, or data that do not fit the model.
        """
        data.check(model.spec)
        stated = self._resolved(model.spec)
        if stated != self:
            return stated.keygen(model, data, owner=owner, rng=rng)
        secret = rng.child("secret").bytes(SECRET_BYTES) if rng else fresh_secret()
        carriers = self._carriers(model.spec)
        layers = self._layers(model, len(carriers))
        readings = layer_readings(model, layers, self.pool)
        layer_bits = deal(self.bits, {name: reading.advised for name, reading in readings.items()})
        for name, bits in layer_bits.items():
            limit = readings[name].width * len(carriers)
            if bits > limit:
                raise InputError(
                    f"at most {limit} bits in layer {name}",
                    found=f"{bits} of {self.bits}",
                    do=f"use fewer than {self.bits} bits, more carriers or more layers",
                )
        public: dict[str, Any] = {
            "access": self.access,
            "bits": self.bits,
            "layers": list(layers),
            "layer_bits": layer_bits,
            "features": {name: reading.width for name, reading in readings.items()},
            "carriers": list(carriers),
            "centred": self.recipe != "paper" and len(carriers) > 1,
        }
        pools = {name: reading.pool for name, reading in readings.items() if reading.pool != "none"}
        if pools:
            public["pool"] = pools
        if self._grouped(model.spec):
            public["groups"] = len(carriers)
            triggers = draw_groups(secret, data, len(carriers), self.settings(model.spec).batch)
        else:
            triggers = draw_triggers(secret, data, carriers, self.trigger_share)
        return Key(
            scheme=self.name,
            params=self.as_dict(),
            owner=owner,
            secret=secret,
            spec=model.spec,
            public=public,
            tensors={**named(triggers.x, "trigger_x"), "trigger_y": triggers.y.contiguous()},
            reproducible=rng is not None,
        )

    def embedding(
        self, model: Classifier, data: Split, key: Key, *, rng: Rng, start: Classifier | None = None
    ) -> Training:
        """The fine-tuning that embeds the key's message into a copy of ``model``, or goes on with ``start``.

        Raises:
            InputError: a key made for another input, or data that do not fit the model.
        """
        _check_same_input(model, key)
        settings = self.settings(model.spec)
        if self.recipe == "paper":
            paper = PaperLoss(start or model, data, key, self)
            recipe = Recipe(epochs=self.epochs, learning_rate=settings.learning_rate)
            extra = [(paper.means, 10 * settings.learning_rate)]
            return Training(start or model, data, recipe=recipe, rng=rng, loss=paper, extra=extra)
        gentle = settings.hold is not None
        recipe = Recipe(
            steps=settings.steps,
            learning_rate=settings.learning_rate,
            schedule="cosine",
            batch_size=settings.batch_size,
            relative=gentle,
        )
        return Training(
            start or model,
            data,
            recipe=recipe,
            rng=rng,
            loss=self.loss(model, data, key),
            trained=running_between(model.module, model.probe(), key.public["layers"]) if gentle else None,
            evaluating=gentle,
        )

    def loss(self, model: Classifier, data: Split, key: Key) -> Loss:
        """What embedding minimises."""
        if self.recipe == "paper":
            return PaperLoss(model, data, key, self)
        hold = self.settings(model.spec).hold
        return RobustLoss(model, data, key, self, task=None if hold is None else Imitation(model, hold))

    def settled(self, model: Classifier, marked: Classifier, data: Split) -> bool:
        """Whether the owner's training samples are answered about as well as before, so that no further round is due.

        Where they are not, the network has not found its way back from the mark (WRN-16-1 loses 4 points of them and
        0.6 to 0.9 of the test's in the first round, and has both again after the second). Only the robust recipe has
        labels to find back to.
        """
        if self._recipe(model.spec) != "robust" or not model.spec.num_classes:
            return True
        asked = data.take(torch.linspace(0, len(data) - 1, min(len(data), _ASKED), dtype=torch.float64).long())
        return model.accuracy(asked).value - marked.accuracy(asked).value <= _WORSE

    def observe(self, model: Classifier, key: Key) -> Observation:
        """Mean activation of each carrier's triggers in each layer: (carriers, features) a layer.

        Raises:
            InputError: a suspect with another input, without these layers, or with layers of another width.
        """
        _check_same_input(model, key)
        _check_complete(key)
        layers = list(key.public["layers"])
        absent = sorted({layer_name(name) for name in layers} - {name for name, _ in model.module.named_modules()})
        if absent:
            do = "pass a copy of the marked architecture, or the key of this one"
            raise InputError(f"a model with the key's layers {layers}", found=f"none called {absent}", do=do)
        x = stored(key.tensors, "trigger_x")
        assert x is not None  # noqa: S101 - _check_complete
        carriers = list(key.public["carriers"])
        place = {carrier: row for row, carrier in enumerate(carriers)}
        rows = torch.tensor([place.get(label, -1) for label in key.tensors["trigger_y"].tolist()])
        sums: dict[str, Tensor] = {}
        squares: dict[str, Tensor] = {}
        done = 0
        for features in model.stream(x, layers, pool=key.public.get("pool")):
            for layer, values in features.items():
                if values.shape[1] != key.public["features"][layer]:
                    found, wanted = f"{values.shape[1]}", key.public["features"][layer]
                    do = "pass a copy of the marked architecture (structural changes need alignment)"
                    raise InputError(f"{wanted} features in layer {layer}", found=found, do=do)
                sums.setdefault(layer, torch.zeros(len(carriers), values.shape[1], dtype=torch.float64))
                squares.setdefault(layer, torch.zeros(len(carriers), dtype=torch.float64))
                own = rows[done : done + len(values)]
                ours, read = own[own >= 0], values[own >= 0].double()
                sums[layer].index_add_(0, ours, read)
                squares[layer].index_add_(0, ours, read.pow(2).sum(dim=1))
            done += len(values)
        counts = torch.bincount(rows[rows >= 0], minlength=len(carriers))
        means = {layer: total / counts.unsqueeze(1) for layer, total in sums.items()}
        rounding = {layer: ROUNDING * total.sqrt() / counts for layer, total in squares.items()}
        return Observation(means, rounding=rounding)

    def decode(self, observation: Observation, key: Key) -> Extraction:
        """Sign of every cell's projected mean; the score has unit variance under no mark.

        Rounding errors of the inputs of a carrier are independent, and a random projection adds their squares: it moves
        a score by as much as the errors' norm is of the centred mean's.
        """
        scores = np.zeros(key.bits)
        noise = np.zeros(key.bits)
        rows = {carrier: row for row, carrier in enumerate(key.public["carriers"])}
        centred = {name: centred_means(values, key.public["centred"]) for name, values in observation.values.items()}
        errors = {name: _after_centring(size, key.public["centred"]) for name, size in observation.rounding.items()}
        for cell in cells_of(key):
            row, place = rows[cell.carrier], slice(cell.start, cell.start + cell.bits)
            mean = centred[cell.layer][row].numpy()
            norm = np.linalg.norm(mean)
            if norm > 0 and np.isfinite(norm):
                scores[place] = (mean / norm) @ projection_of(key.secret, cell, len(mean))
                noise[place] = errors[cell.layer][row] / norm
        message = key.message()
        usable = np.abs(scores) > noise
        bits = (scores > 0).astype(np.uint8)
        margin = np.where(message == 1, scores, -scores)
        return Extraction(bits, usable, np.full(key.bits, 0.5), margin)

    def capacity(self, model: Classifier) -> list[LayerCapacity]:
        """What each hidden layer can hold before its activation function, in the order of the forward pass."""
        count = len(self._carriers(model.spec))
        return [
            LayerCapacity(name, kind, width, width * count, advised * count, margin=math.sqrt(width / max(1, advised)))
            for name, kind, reading in hidden_layers(model, self.pool)
            for width, advised in [(reading.width, reading.advised)]
        ]

    def _grouped(self, spec: InputSpec) -> bool:
        return self.groups is not None or (spec.num_classes == 0 and self.carriers is None)

    def _carriers(self, spec: InputSpec) -> tuple[int, ...]:
        """Numbers of the carrier classes, or of the groups.

        Raises:
            InputError: both named, or classes that the model does not have.
        """
        if self._grouped(spec):
            if self.carriers is not None:
                raise InputError("carriers or groups", found="both", do="leave one out")
            return tuple(range(self.groups or _GROUPS))
        carriers = self.carriers if self.carriers is not None else tuple(range(spec.num_classes))
        outside = [carrier for carrier in carriers if carrier >= spec.num_classes]
        if outside:
            known = f"carrier classes 0 … {spec.num_classes - 1}" if spec.num_classes else "no carrier classes"
            raise InputError(known, found=str(outside), do="name classes of this model, or give -p groups=16")
        return carriers

    def _layers(self, model: Classifier, carriers: int) -> Sequence[str]:
        if self.layers is not None:
            return self.layers
        hidden = hidden_layers(model, self.pool)
        if self.recipe == "paper":
            return [activation_after(model, hidden[-1][0])]
        return thin_layers(hidden, self.bits, carriers, inner=self.recipe == "gentle")

    def settings(self, spec: InputSpec) -> Settings:
        """The numbers of the recipe, with the parameters that replace them."""
        recipe = self._recipe(spec)
        stated = {field.name: getattr(self, field.name) for field in dataclasses.fields(Settings)}
        return dataclasses.replace(RECIPES[recipe], **{k: v for k, v in stated.items() if v is not None})

    def _recipe(self, spec: InputSpec) -> str:
        return self.recipe if self.recipe != "auto" else "gentle" if self._grouped(spec) else "robust"

    def _resolved(self, spec: InputSpec) -> DeepSigns:
        """With every number stated, as it goes into the key."""
        recipe = self._recipe(spec)
        return dataclasses.replace(self, recipe=recipe, **dataclasses.asdict(self.settings(spec)))


def _after_centring(errors: Tensor, centred: bool) -> NDArray[np.float64]:
    """(carriers,) norms of independent errors of the means, after the average of all means is taken from each."""
    squares, count = errors.pow(2), len(errors)
    left = squares * (1.0 - 2.0 / count) + squares.mean() / count if centred else squares
    return left.sqrt().numpy()


def _check_complete(key: Key) -> None:
    with understood("a complete DeepSigns key", "use an intact copy of it"):
        sound = _is_complete(key)
    if not sound:
        raise InputError("a complete DeepSigns key", found="a foreign or damaged one", do="use an intact copy of it")


def _is_complete(key: Key) -> bool:
    public, labels, inputs = key.public, key.tensors.get("trigger_y"), stored(key.tensors, "trigger_x")
    return (
        isinstance(public.get("layers"), list)
        and isinstance(public.get("carriers"), list)
        and isinstance(public.get("centred"), bool)
        and isinstance(public.get("features"), dict)
        and isinstance(public.get("layer_bits"), dict)
        and set(public["features"]) == set(public["layer_bits"]) == set(public["layers"])
        and sum(public["layer_bits"].values()) == key.bits
        and all(type(bits) is int and bits >= 0 for bits in public["layer_bits"].values())
        and all(type(carrier) is int for carrier in public["carriers"])
        and 0 < len(set(public["carriers"])) == len(public["carriers"]) <= 100_000
        and len(set(public["layers"])) == len(public["layers"])
        and labels is not None
        and inputs is not None
        and labels.shape == (len(inputs),)
        and len(public["carriers"]) <= len(labels)
        and all(layer in public["layers"] and rule in POOLS for layer, rule in public.get("pool", {}).items())
    )


def _check_same_input(model: Classifier, key: Key) -> None:
    if not model.spec.same_inputs(key.spec):
        wanted, found = (str(spec.shape or list(spec.fields)) for spec in (key.spec, model.spec))
        raise InputError(
            f"a model that takes inputs of shape {wanted}, as the key's triggers",
            found=found,
            do="pass the right model or the right key",
        )
