"""DeepSigns, white box: a message in the class means of hidden activations.

Source: B. D. Rouhani, H. Chen, F. Koushanfar, "DeepSigns: an end-to-end watermarking framework for ownership protection
of deep neural networks", ASPLOS 2019 (arXiv 1804.00750). Ours: a uniformly masked message (so that the p-value is
exact), a projection of its own for every cell (a layer and a carrier class), and a robust recipe beside the paper's.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from deepseal.adapter import Classifier, Recipe, Split
from deepseal.adapter.capture import NORMALISATION, PARAMETRIC, evaluating, execution_order, forward_to
from deepseal.adapter.training import Step, Training, cross_entropy
from deepseal.errors import InputError
from deepseal.parameters import Parameters, parameter
from deepseal.rng import SECRET_BYTES, Rng, expand_choice, expand_normal, fresh_secret
from deepseal.watermark.key import Key
from deepseal.watermark.robust import weathered_features
from deepseal.watermark.scheme import Access, Extraction, Observation


@dataclasses.dataclass(frozen=True)
class Cell:
    """One Gaussian of the mixture: the mean activation of a carrier class in a layer holds ``bits`` bits."""

    layer: str
    carrier: int
    bits: int
    start: int


@dataclasses.dataclass(frozen=True)
class LayerCapacity:
    """What a layer can hold. ``limit`` bits can be embedded at all; ``advised`` leave margin against removal."""

    layer: str
    kind: str
    features: int
    limit: int
    advised: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeepSigns(Parameters):
    """DeepSigns white box (Rouhani et al., 2019).

    ``recipe="paper"`` minimises the paper's loss, CE + lambda1 L1 + lambda2 L2; ``recipe="robust"`` asks every bit for
    a margin that is read through pruned and noisy weights, and spreads the bits thinly over classes and layers.
    """

    name: ClassVar[str] = "deepsigns"
    access: ClassVar[Access] = "white-box"

    bits: int = parameter(256, "length N of the message over all cells", minimum=1, maximum=100_000)
    layers: tuple[str, ...] | None = parameter(None, "layers that hold the mark; none chooses them")
    carriers: tuple[int, ...] | None = parameter(None, "carrier classes T; none takes all classes", minimum=0)
    trigger_share: float = parameter(0.01, "share of the training samples kept as triggers", minimum=0.0, maximum=1.0)
    recipe: str = parameter("robust", "how to embed", choices=("robust", "paper"))
    lambda1: float = parameter(0.01, "weight of the centre loss L1 (paper)", minimum=0.0, maximum=1e6)
    lambda2: float = parameter(0.01, "weight of the binary cross-entropy L2 (paper)", minimum=0.0, maximum=1e6)
    epochs: int = parameter(1, "passes over the training data (paper)", minimum=1, maximum=10_000)
    strength: float = parameter(1.0, "weight of the margin loss (robust)", minimum=0.0, maximum=1e6)
    margin: float = parameter(
        5.0, "projection of each bit, in standard deviations of the original's (robust)", minimum=0.0, maximum=1000.0
    )
    relative_margin: float = parameter(
        2.5, "score of each bit, in standard deviations of chance (robust)", minimum=0.0, maximum=1000.0
    )
    prune: float = parameter(0.9, "highest pruning rate the mark is read through (robust)", minimum=0.0, maximum=0.99)
    drift: float = parameter(0.5, "weight noise it is read through (robust)", minimum=0.0, maximum=10.0)
    steps: int = parameter(320, "updates (robust)", minimum=1, maximum=1_000_000)
    learning_rate: float = parameter(1e-3, "step size of Adam", minimum=1e-9, maximum=10.0)
    batch: int = parameter(4, "inputs a carrier and update (robust)", minimum=1, maximum=1024)

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
        secret = rng.child("secret").bytes(SECRET_BYTES) if rng else fresh_secret()
        carriers = self.carriers if self.carriers is not None else tuple(range(model.spec.num_classes))
        layers = self.layers if self.layers is not None else self._choose_layers(model, len(carriers))
        shapes = _layer_shapes(model, layers)
        _check_carriers(carriers, model.spec.num_classes, data)
        layer_bits = _deal(self.bits, {name: _advised(shape) for name, shape in shapes.items()})
        for name, bits in layer_bits.items():
            width = math.prod(shapes[name])
            if bits > width * len(carriers):
                raise InputError(
                    f"at most {width} bits a carrier in layer {name}",
                    found=f"{-(-bits // len(carriers))}",
                    do=f"use fewer than {self.bits} bits, more carriers or more layers",
                )
        index = self._triggers(secret, data, carriers)
        public = {
            "access": self.access,
            "bits": self.bits,
            "layers": list(layers),
            "layer_bits": layer_bits,
            "features": {name: math.prod(shape) for name, shape in shapes.items()},
            "carriers": list(carriers),
            "centred": self.recipe == "robust" and len(carriers) > 1,
        }
        triggers = data.take(index)
        return Key(
            scheme=self.name,
            params=self.as_dict(),
            owner=owner,
            secret=secret,
            spec=model.spec,
            public=public,
            tensors={"trigger_x": triggers.x.contiguous(), "trigger_y": triggers.y.contiguous()},
            reproducible=rng is not None,
        )

    def embedding(self, model: Classifier, data: Split, key: Key, *, rng: Rng) -> Training:
        """The fine-tuning that embeds the key's message into a copy of ``model``.

        Raises:
            InputError: a key made for another input, or data that do not fit the model.
        """
        _check_same_input(model, key)
        if self.recipe == "paper":
            loss = _PaperLoss(model, data, key, self)
            recipe = Recipe(epochs=self.epochs, learning_rate=self.learning_rate)
            extra = [(loss.means, 10 * self.learning_rate)]
            return Training(model, data, recipe=recipe, rng=rng, loss=loss, extra=extra)
        recipe = Recipe(steps=self.steps, learning_rate=self.learning_rate, schedule="cosine")
        return Training(model, data, recipe=recipe, rng=rng, loss=_RobustLoss(model, data, key, self))

    def observe(self, model: Classifier, key: Key) -> Observation:
        """Mean activation of each carrier's triggers in each layer: (carriers, features) a layer.

        Raises:
            InputError: a suspect with another input, without these layers, or with layers of another width.
        """
        _check_same_input(model, key)
        _check_complete(key)
        layers = list(key.public["layers"])
        with torch.no_grad():
            features = model.features(key.tensors["trigger_x"], layers)
        for layer, width in key.public["features"].items():
            if features[layer].shape[1] != width:
                found = f"{features[layer].shape[1]}"
                do = "pass a copy of the marked architecture (structural changes need alignment)"
                raise InputError(f"{width} features in layer {layer}", found=found, do=do)
        labels = key.tensors["trigger_y"]
        means = {
            layer: torch.stack([values[labels == carrier].double().mean(dim=0) for carrier in key.public["carriers"]])
            for layer, values in features.items()
        }
        return Observation(means, noise=8.0 * torch.finfo(model.dtype).eps)

    def decode(self, observation: Observation, key: Key) -> Extraction:
        """Sign of every cell's projected mean; the score has unit variance under no mark."""
        scores = np.zeros(key.bits)
        means = {name: _centred(values, key.public["centred"]) for name, values in observation.values.items()}
        for cell in _cells(key):
            mean = means[cell.layer][list(key.public["carriers"]).index(cell.carrier)].numpy()
            norm = np.linalg.norm(mean)
            if norm > 0 and np.isfinite(norm):
                projection = _projection(key.secret, cell, len(mean))
                scores[cell.start : cell.start + cell.bits] = (mean / norm) @ projection
        message = key.message()
        usable = np.abs(scores) > observation.noise
        bits = (scores > 0).astype(np.uint8)
        margin = np.where(message == 1, scores, -scores)
        return Extraction(bits, usable, np.full(key.bits, 0.5), margin)

    def capacity(self, model: Classifier) -> list[LayerCapacity]:
        """What each hidden layer can hold before its activation function, in the order of the forward pass."""
        count = len(self.carriers) if self.carriers is not None else model.spec.num_classes
        return [
            LayerCapacity(name, kind, math.prod(shape), math.prod(shape) * count, _advised(shape) * count)
            for name, kind, shape in hidden_layers(model)
        ]

    def _choose_layers(self, model: Classifier, carriers: int) -> tuple[str, ...]:
        """The last two hidden layers, or as many more as the message needs to stay thinly spread."""
        hidden = hidden_layers(model)
        if self.recipe == "paper":
            return (_activation_after(model, hidden[-1][0]),)
        chosen: list[str] = []
        room = 0
        for name, _, shape in reversed(hidden):
            chosen.insert(0, name)
            room += _advised(shape) * carriers
            if len(chosen) >= 2 and room >= self.bits:
                break
        return tuple(chosen)

    def _triggers(self, secret: bytes, data: Split, carriers: Sequence[int]) -> Tensor:
        chosen = []
        for carrier in carriers:
            members = torch.nonzero(data.y == carrier).reshape(-1)
            count = min(len(members), max(8, round(self.trigger_share * len(data) / len(carriers))))
            chosen.append(members[torch.from_numpy(expand_choice(secret, f"triggers/{carrier}", len(members), count))])
        return torch.cat(chosen)


def hidden_layers(model: Classifier) -> list[tuple[str, str, tuple[int, ...]]]:
    """Hidden pre-activations in the order of the forward pass: name, kind, shape of one sample's output.

    The output of a linear or convolutional layer, or of the batch normalisation that follows it directly.

    Raises:
        InputError: a model without a hidden layer.
    """
    order = execution_order(model.module, model.probe())
    runs = [name for name, _, _ in order]
    found: list[tuple[str, str, tuple[int, ...]]] = []
    for position, (name, layer, shape) in enumerate(order):
        if not isinstance(layer, PARAMETRIC) or runs.count(name) > 1:
            continue
        after = order[position + 1] if position + 1 < len(order) else None
        if after is not None and isinstance(after[1], NORMALISATION) and after[2] == shape:
            name, layer = after[0], after[1]
        found.append((name, type(layer).__name__, shape))
    if len(found) < 2:
        raise InputError("a model with a hidden linear or convolutional layer", found="none", do="name layers yourself")
    return found[:-1]


class _RobustLoss:
    """CE + strength * mean [relu(margin - s / nu) + relu(relative_margin - s / ||mu||)], s = b A^T mu.

    mu is the centred mean over a few inputs, read through weathered weights; nu is the mean norm of the original's. The
    first term makes the mark large, so that drift does not reach it; the second keeps the rest of mu from hiding it.
    """

    def __init__(self, model: Classifier, data: Split, key: Key, scheme: DeepSigns) -> None:
        self._scheme, self._centred = scheme, bool(key.public["centred"])
        self._layers = list(key.public["layers"])
        self._targets = _targets(key, model)
        carriers, labels = key.public["carriers"], key.tensors["trigger_y"]
        _check_carriers(carriers, model.spec.num_classes, data)
        self._prepare, self._data, self._triggers = model.copy().prepare, data.x, key.tensors["trigger_x"]
        self._members = [torch.nonzero(data.y == carrier).reshape(-1) for carrier in carriers]
        self._own = [torch.nonzero(labels == carrier).reshape(-1) for carrier in carriers]
        observed = scheme.observe(model, key).values
        self._norms = {
            name: max(1e-12, float(_centred(means, self._centred).norm(dim=1).mean()))
            for name, means in observed.items()
        }

    def _draw(self, generator: torch.Generator) -> Tensor:
        """Inputs of every carrier in turn: half of them triggers, half any training samples of the class."""
        triggers = self._scheme.batch // 2
        drawn = []
        for own, members in zip(self._own, self._members, strict=True):
            drawn.append(self._triggers[own[torch.randint(len(own), (triggers,), generator=generator)]])
            rest = torch.randint(len(members), (self._scheme.batch - triggers,), generator=generator)
            drawn.append(self._data[members[rest]])
        return torch.cat(drawn)

    def __call__(self, step: Step) -> Tensor:
        scheme, generator, carriers = self._scheme, step.generator, len(self._own)
        rate = scheme.prune * float(torch.rand((), generator=generator))
        features = weathered_features(
            step.module,
            self._prepare(self._draw(generator)),
            self._layers,
            prune=rate,
            drift=scheme.drift,
            generator=generator,
        )
        shortfall = []
        for target in self._targets:
            means = _centred(_means(features[target.layer], carriers), self._centred)
            absolute = target.scores(means / self._norms[target.layer])
            relative = target.scores(nn.functional.normalize(means, dim=1))
            shortfall.append(torch.relu(scheme.margin - absolute) + torch.relu(scheme.relative_margin - relative))
        return cross_entropy(step) + scheme.strength * torch.cat(shortfall).mean()


class _PaperLoss:
    """CE + lambda1 L1 + lambda2 L2 with trainable centres (Rouhani et al., 2019, equations 2 to 5)."""

    def __init__(self, model: Classifier, data: Split, key: Key, scheme: DeepSigns) -> None:
        layers = list(key.public["layers"])
        if len(layers) != 1:
            raise InputError(
                "one layer for the paper's recipe", found=str(layers), do="give -p layers=NAME or recipe=robust"
            )
        self._scheme, self._layer, self._model = scheme, layers[0], model.copy()
        self._targets = _targets(key, model)
        self._carriers = torch.tensor(key.public["carriers"])
        sample = data.take(torch.arange(min(len(data), 5000)))
        features = model.features(sample.x, layers)[self._layer].to(model.device)
        overall = features.mean(dim=0)
        classes = range(model.spec.num_classes)
        centres = [features[sample.y == c].mean(dim=0) if bool((sample.y == c).any()) else overall for c in classes]
        self.means = torch.stack(centres).requires_grad_(True)

    def __call__(self, step: Step) -> Tensor:
        scheme, means = self._scheme, self.means
        features = forward_to(step.module, self._model.prepare(step.x), [self._layer])[self._layer].flatten(1)
        carriers = self._carriers.to(means.device)
        centre = means.new_zeros(())
        for carrier in self._carriers.tolist():
            members = features[step.y == carrier]
            if len(members):
                centre = centre + (means[carrier] - members.mean(dim=0)).pow(2).sum()
        others = torch.ones(len(means), dtype=torch.bool, device=means.device)
        others[carriers] = False
        centre = centre - torch.cdist(means[carriers], means[others]).pow(2).sum()
        scores = torch.cat([target.scores(means[carriers]) for target in self._targets])
        embedding = nn.functional.softplus(-scores).sum()
        return cross_entropy(step) + scheme.lambda1 * centre + scheme.lambda2 * embedding


@dataclasses.dataclass(frozen=True)
class _Target:
    """One layer's signed projections, (carriers, features, bits), and which entries are real bits."""

    layer: str
    projection: Tensor = dataclasses.field(repr=False)
    real: Tensor = dataclasses.field(repr=False)

    def scores(self, means: Tensor) -> Tensor:
        """Projections in the direction of the message, of all real bits; ``means`` is (carriers, features)."""
        return torch.einsum("cf,cfb->cb", means, self.projection)[self.real]


def _targets(key: Key, model: Classifier) -> list[_Target]:
    carriers, message = list(key.public["carriers"]), key.message()
    cells = _cells(key)
    targets = []
    for layer in key.public["layers"]:
        own = [cell for cell in cells if cell.layer == layer]
        width, most = int(key.public["features"][layer]), max((cell.bits for cell in own), default=0)
        projection = np.zeros((len(carriers), width, most), dtype=np.float32)
        real = np.zeros((len(carriers), most), dtype=bool)
        for row, cell in enumerate(own):
            signs = 2.0 * message[cell.start : cell.start + cell.bits] - 1.0
            projection[row, :, : cell.bits] = _projection(key.secret, cell, width) * signs
            real[row, : cell.bits] = True
        on_device = torch.from_numpy(projection).to(model.device, model.dtype)
        targets.append(_Target(layer, on_device, torch.from_numpy(real).to(model.device)))
    return targets


def _cells(key: Key) -> list[Cell]:
    """The message dealt out: each layer's bits evenly over the carriers."""
    cells: list[Cell] = []
    start, carriers = 0, key.public["carriers"]
    for layer in key.public["layers"]:
        bits = int(key.public["layer_bits"][layer])
        for index, carrier in enumerate(carriers):
            size = bits // len(carriers) + (index < bits % len(carriers))
            cells.append(Cell(layer, int(carrier), size, start))
            start += size
    return [cell for cell in cells if cell.bits]


def _deal(bits: int, weights: Mapping[str, int]) -> dict[str, int]:
    """Bits in proportion to the weights, the rest to the largest remainders."""
    total = sum(weights.values())
    dealt = {name: bits * weight // total for name, weight in weights.items()}
    by_remainder = sorted(weights, key=lambda name: -(bits * weights[name] % total))
    for name in by_remainder[: bits - sum(dealt.values())]:
        dealt[name] += 1
    return dealt


def _projection(secret: bytes, cell: Cell, width: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    return expand_normal(secret, f"projection/{cell.layer}/{cell.carrier}", (width, cell.bits))


def _centred(means: Tensor, centred: bool) -> Tensor:
    """What sets each carrier's mean apart from the average of all carriers, where attacks move all of them alike."""
    return means - means.mean(dim=0, keepdim=True) if centred else means


def _means(features: Tensor, carriers: int) -> Tensor:
    return features.flatten(1).reshape(carriers, -1, features[0].numel()).mean(dim=1)


def _advised(shape: tuple[int, ...]) -> int:
    """Bits a cell that leave margin against removal; maps of convolutions drift more than dense layers do."""
    return max(1, min(16 if len(shape) == 1 else 10, math.prod(shape) // 16))


def _layer_shapes(model: Classifier, layers: Sequence[str]) -> dict[str, tuple[int, ...]]:
    with evaluating(model.module), torch.no_grad():
        captured = forward_to(model.module, model.probe(), layers)
    return {name: tuple(captured[name].shape[1:]) for name in layers}


def _activation_after(model: Classifier, layer: str) -> str:
    names = [name for name, _, _ in execution_order(model.module, model.probe())]
    return names[names.index(layer) + 1]


def _check_carriers(carriers: Sequence[int], classes: int, data: Split) -> None:
    if not carriers or len(set(carriers)) != len(carriers):
        raise InputError("distinct carrier classes", found=str(list(carriers)), do="name each class once")
    outside = [carrier for carrier in carriers if carrier >= classes]
    if outside:
        raise InputError(f"carrier classes 0 … {classes - 1}", found=str(outside), do="name classes of this model")
    absent = [carrier for carrier in carriers if not bool((data.y == carrier).any())]
    if absent:
        raise InputError(
            "training samples of every carrier class",
            found=f"none of class {absent}",
            do="add samples or give -p carriers=…",
        )


def _check_complete(key: Key) -> None:
    public, labels, inputs = key.public, key.tensors.get("trigger_y"), key.tensors.get("trigger_x")
    sound = (
        isinstance(public.get("layers"), list)
        and isinstance(public.get("carriers"), list)
        and isinstance(public.get("centred"), bool)
        and isinstance(public.get("features"), dict)
        and isinstance(public.get("layer_bits"), dict)
        and set(public["features"]) == set(public["layer_bits"]) == set(public["layers"])
        and sum(public["layer_bits"].values()) == key.bits
        and all(isinstance(carrier, int) for carrier in public["carriers"])
        and labels is not None
        and inputs is not None
        and len(labels) == len(inputs)
    )
    if not sound:
        raise InputError("a complete DeepSigns key", found="a foreign or damaged one", do="use an intact copy of it")


def _check_same_input(model: Classifier, key: Key) -> None:
    if model.spec.shape != key.spec.shape:
        raise InputError(
            f"a model that takes inputs of shape {key.spec.shape}, as the key's triggers",
            found=str(model.spec.shape),
            do="pass the right model or the right key",
        )
