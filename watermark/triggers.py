"""What black-box marks with a trigger set share: secret labels, the answers to the triggers, votes, and their chance.

The published rules take 1 / C, or 1 / 2, as the chance that an unmarked model gives a trigger's label, independently.
Neither holds: networks answer unusual inputs with one or two favourite classes, all of them alike. Here the *label* is
random: one for a group of triggers, uniform over its choices, expanded from the key's secret and bound to everything
else in the key, the images too. So a model that is independent of the key agrees with the same chance in every group,
independently, whatever its favourites are and however the images were chosen. A label that a paper fixes has no such
chance; a key of that kind proves nothing by itself, and ``verify`` says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from deepseal.adapter import BlackBox, Classifier, Recipe, Split
from deepseal.adapter.inputs import call
from deepseal.adapter.training import Loss, Step, Training, cross_entropy
from deepseal.errors import InputError, understood
from deepseal.parameters import Parameters, parameter
from deepseal.rng import SECRET_BYTES, Rng, expand_integers, fresh_secret
from deepseal.statistics import rate
from deepseal.watermark.independent import independent_models
from deepseal.watermark.key import Key
from deepseal.watermark.mark_loss import MarkLoss
from deepseal.watermark.robust import weathered
from deepseal.watermark.scheme import Access, Extraction, Observation
from deepseal.watermark.votes import counted, label_margins

_SMALLEST = 1e-38  # probability that a single-precision answer can still tell from 0
_CONFIDENCE = 0.98  # two-sided: 1 % above the upper end


@dataclasses.dataclass(frozen=True)
class Triggers:
    """Trigger images in groups that share a label.

    Attributes:
        x: (groups * votes, …) images in data space, group after group.
        groups: number of groups; the answers of a group are votes for one class.
        avoided: (groups,) a class that the group's label must not be, such as the images' own; None for none.
        sides: (groups, 2) the two classes of which the message's bit chooses one, instead of any class.
        fixed: (groups,) labels that the paper fixes, instead of random ones.
        codes: (classes,) the bit that each class stands for, where an answer is read as a bit.
        consulted: how many of the independent models had a say in the choice; the rest calibrate the decision.
        public: what else may be shown of the key.
    """

    x: Tensor = dataclasses.field(repr=False)
    groups: int
    avoided: Tensor | None = dataclasses.field(default=None, repr=False)
    sides: Tensor | None = dataclasses.field(default=None, repr=False)
    fixed: Tensor | None = dataclasses.field(default=None, repr=False)
    codes: Tensor | None = dataclasses.field(default=None, repr=False)
    consulted: int = 0
    public: Mapping[str, Any] = dataclasses.field(default_factory=lambda: MappingProxyType({}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TriggerScheme(Parameters):
    """A mark in the answers to secret images. A subclass draws the triggers, and may bring its own loss."""

    name: ClassVar[str]
    access: ClassVar[Access] = "black-box"

    strength: float = parameter(1.0, "weight of the triggers' loss", minimum=0.0, maximum=1e6)
    drift: float = parameter(0.3, "weight noise the triggers are read through", minimum=0.0, maximum=10.0)
    batch: int = parameter(64, "triggers an update", minimum=1, maximum=4096)
    steps: int = parameter(1000, "updates a round", minimum=1, maximum=1_000_000)
    learning_rate: float = parameter(1e-3, "step size of Adam", minimum=1e-9, maximum=10.0)
    settle: int = parameter(
        0, "further updates a round on the task alone, with an optimiser that starts anew", minimum=0, maximum=1_000_000
    )
    rounds: int = parameter(4, "most rounds of embedding, while a trigger reads wrong", minimum=1, maximum=100)

    @property
    def settling(self) -> int:
        """Updates at the end of a round that are the task's alone; the papers' recipes have none."""
        return 0 if getattr(self, "recipe", "robust") == "paper" else self.settle

    @property
    def models_needed(self) -> int:
        """Independent models that keygen trains where none are given."""
        return 0

    def draw(self, model: Classifier, data: Split, secret: bytes, independent: Sequence[BlackBox]) -> Triggers:
        """The triggers of a new key; all randomness is expanded from the secret."""
        raise NotImplementedError

    def loss(self, model: Classifier, data: Split, key: Key) -> Loss:
        """What embedding minimises."""
        return TriggerLoss(model, key, self)

    def keygen(
        self,
        model: Classifier,
        data: Split,
        *,
        owner: str,
        rng: Rng | None = None,
        independent: Sequence[BlackBox] = (),
    ) -> Key:
        """Draw a key: a secret, triggers, and what independent models answer to them.

        Args:
            model: the model to be marked.
            data: its training samples.
            owner: name in the key; the text of the message where there is one (a zero-bit mark holds none).
            rng: seeds the secret, for repeatable experiments; None takes 32 bytes from the operating system.
            independent: unmarked models of the same task. The verdict grants every model as much agreement as the
                worst of them shows. Where the scheme needs some and none are given, they are trained.

        Raises:
            InputError: data or independent models that do not fit the model.
        """
        model.spec.require_plain(f"the triggers of {self.name}")
        model.spec.require_classes()
        data.check(model.spec)
        independent = independent or independent_models(model, data, self.models_needed)
        for other in independent:
            check_task(other, model.spec.shape, model.spec.num_classes)
        secret = rng.child("secret").bytes(SECRET_BYTES) if rng else fresh_secret()
        drawn = self.draw(model, data, secret, independent)
        tensors = {"trigger_x": drawn.x.contiguous()}
        avoided = drawn.avoided if model.spec.num_classes > 2 else None
        for name, labels in (
            ("avoided", avoided),
            ("sides", drawn.sides),
            ("trigger_y", drawn.fixed),
            ("codes", drawn.codes),
        ):
            if labels is not None:
                tensors[name] = labels.to(torch.int64).contiguous()
        held_out = list(independent)[drawn.consulted :]
        if held_out:
            answers = [answered(other, drawn.x)[0] for other in held_out]
            tensors["independent_y"] = torch.stack(answers).contiguous()
        public = {
            "access": self.access,
            "zero_bit": drawn.sides is None and (drawn.codes is None or drawn.fixed is not None),
            "bits": drawn.groups,
            "votes": len(drawn.x) // drawn.groups,
            "independent_models": len(held_out),
            **drawn.public,
        }
        return Key(
            scheme=self.name,
            params=self.as_dict(),
            owner=owner,
            secret=secret,
            spec=model.spec,
            public=public,
            tensors=tensors,
            reproducible=rng is not None,
        )

    def embedding(
        self, model: Classifier, data: Split, key: Key, *, rng: Rng, start: Classifier | None = None
    ) -> Training:
        """The fine-tuning that teaches a copy of ``model``, or of ``start``, the triggers' labels.

        Raises:
            InputError: a key made for another task, or data that do not fit the model.
        """
        check_complete(key)
        check_task(model, key.spec.shape, key.spec.num_classes)
        recipe = Recipe(
            steps=self.steps + self.settling, learning_rate=self.learning_rate, schedule="cosine", restart=self.steps
        )
        return Training(start or model, data, recipe=recipe, rng=rng, loss=self.loss(model, data, key))

    def observe(self, model: BlackBox, key: Key) -> Observation:
        """The suspect's answer to every trigger, and which of them are no ties.

        Raises:
            InputError: a suspect with another input or another number of classes.
        """
        check_complete(key)
        check_task(model, key.spec.shape, key.spec.num_classes)
        answers = model.query(key.tensors["trigger_x"])
        labels, clear = _labelled(model, answers)
        values = {"labels": labels, "clear": clear}
        if model.output != "labels":
            logits = answers.double()
            values["scores"] = logits.clamp_min(_SMALLEST).log() if model.output == "probabilities" else logits
        return Observation(values)

    def decode(self, observation: Observation, key: Key) -> Extraction:
        """The message's bit where most of a group's answers are the group's label, the other bit elsewhere.

        No vote: a tie between classes, and an answer that is neither of two sides. The score of ``margin`` is how far
        the label's logit is above the best other one (logarithms of probabilities do too) in the image whose answer
        turns the vote; of labels alone, the share of votes for the label less that for the best other class.
        """
        labels, chance = labels_of(key)
        votes = counted(observation.values["labels"], observation.values["clear"], key)
        own = np.take_along_axis(votes, labels[:, None], axis=1)[:, 0]
        others = votes.copy()
        np.put_along_axis(others, labels[:, None], -1, axis=1)
        best, most = others.max(axis=1), votes.max(axis=1)
        usable = (most > 0) & ((votes == most[:, None]).sum(axis=1) == 1)
        if "sides" in key.tensors:
            usable &= (key.tensors["sides"].numpy() == votes.argmax(axis=1)[:, None]).any(axis=1)
        bits = np.where(own > best, key.message(), 1 - key.message()).astype(np.uint8)
        margin = label_margins(observation, votes, labels, usable, key)
        return Extraction(bits, usable, np.full(key.bits, chance), margin)


class TriggerLoss(MarkLoss):
    """CE on the data + strength * CE on a draw of the triggers, read through noisy weights.

    The triggers pass with batch normalisation in evaluation mode: they are unlike the data, and their statistics would
    neither be met at verification nor be good for the running ones. In the last ``settling`` updates there is only the
    data's part.
    """

    def __init__(self, model: Classifier, key: Key, scheme: TriggerScheme) -> None:
        super().__init__(cross_entropy)
        self._scheme, self._model = scheme, model
        self._x = key.tensors["trigger_x"]
        self._y = torch.from_numpy(labels_of(key)[0]).repeat_interleave(int(key.public["votes"]))

    def __call__(self, step: Step) -> Iterator[Tensor]:
        """All terms of an update."""
        settling = self._scheme.settling > 0 and step.index >= self._scheme.steps
        yield from [self._task(step)] if settling else super().__call__(step)

    def mark(self, module: nn.Module, generator: torch.Generator) -> Iterator[Tensor]:
        """The triggers' part of the loss."""
        index = torch.randperm(len(self._x), generator=generator)[: self._scheme.batch]
        x = self._model.prepare(self._x[index])
        with weathered(module, prune=0.0, drift=self._scheme.drift, generator=generator):
            logits = self._model.spec.read(call(module, x), x)
            yield self._scheme.strength * self.taught(logits, index)

    def taught(self, logits: Tensor, index: Tensor) -> Tensor:
        """What the triggers are taught: scalar, of the (N, classes) answers to the triggers at ``index``."""
        return nn.functional.cross_entropy(logits, self._y[index].to(logits.device))


def labels_of(key: Key) -> tuple[NDArray[np.int64], float]:
    """The key's label for each group, and the chance that a model independent of the key agrees.

    Random labels: 1 / C, at most 1 / (C - 1) where they avoid a class, 1 / 2 where an answer is one of two sides.
    With answers of independent models in the key, the chance is at least the upper end (99 %) of the worst model's
    share of agreement. Fixed labels: 1, which is to say unknown.
    """
    check_complete(key)
    if "trigger_y" in key.tensors:
        return key.tensors["trigger_y"].numpy(), 1.0
    classes, avoided, sides = key.spec.num_classes, key.tensors.get("avoided"), key.tensors.get("sides")
    choices = 2 if sides is not None else classes if avoided is None else classes - 1
    if sides is not None:
        labels = sides.numpy()[np.arange(key.bits), key.message()]
    else:
        labels = expand_integers(key.secret, f"labels/{key.binding}", key.bits, choices)
    if avoided is not None:
        labels = (avoided.numpy() + 1 + labels) % classes
    chance = 1.0 / choices
    for answers in key.tensors.get("independent_y", ()):
        votes = counted(answers, torch.ones(len(answers), dtype=torch.bool), key)
        agreed = int((votes.argmax(axis=1) == labels).sum())
        chance = max(chance, rate(agreed, key.bits, _CONFIDENCE).high)
    return labels, min(1.0, chance)


def answered(model: BlackBox, x: Tensor) -> tuple[Tensor, Tensor]:
    """A black box's labels for some inputs, and which of them are neither ties within numerical noise nor NaN."""
    return _labelled(model, model.query(x))


def _labelled(model: BlackBox, answers: Tensor) -> tuple[Tensor, Tensor]:
    if model.output == "labels":
        return answers.to(torch.int64), torch.ones(len(answers), dtype=torch.bool)
    precision = torch.finfo(model.dtype if isinstance(model, Classifier) else torch.float32).eps
    top = answers.topk(min(2, answers.shape[1]), dim=1).values
    gap = top[:, 0] - top[:, -1]
    clear = torch.isfinite(answers).all(dim=1) & (gap > 8.0 * precision * answers.abs().max(dim=1).values)
    return answers.argmax(dim=1), clear


def check_task(model: BlackBox, shape: tuple[int, ...], classes: int) -> None:
    """Refuse a model with another input or other classes than the key's.

    Raises:
        InputError: it has.
    """
    if model.spec.shape != shape or model.spec.num_classes != classes:
        found = f"shape {model.spec.shape} and {model.spec.num_classes} classes"
        do = "pass the right model or the right key"
        raise InputError(f"a model with inputs of shape {shape} and {classes} classes", found=found, do=do)


def check_complete(key: Key) -> None:
    """Refuse a key whose parts do not fit together.

    Raises:
        InputError: a foreign or damaged one.
    """
    what, do = f"a complete {key.scheme} key", "use an intact copy of it"
    with understood(what, do):
        x, votes = key.tensors["trigger_x"], key.public["votes"]
        per_group = [key.tensors[name] for name in ("avoided", "trigger_y") if name in key.tensors]
        others, sides = key.tensors.get("independent_y"), key.tensors.get("sides")
        codes, classes = key.tensors.get("codes"), key.spec.num_classes
        labelled = [*per_group, *(tensor for tensor in (others, sides, codes) if tensor is not None)]
        one_bit_a_group = sides is not None or (codes is not None and "trigger_y" not in key.tensors)
        sound = (
            type(votes) is int
            and key.zero_bit != one_bit_a_group
            and (codes is None or (codes.shape == (classes,) and codes.unique().tolist() == [0, 1]))
            and votes > 0
            and len(x) == votes * key.bits
            and all(tensor.shape == (key.bits,) for tensor in per_group)
            and (sides is None or (sides.shape == (key.bits, 2) and bool((sides[:, 0] != sides[:, 1]).all())))
            and (others is None or others.shape == (len(others), len(x)))
            and all(t.dtype == torch.int64 and bool(((t >= 0) & (t < classes)).all()) for t in labelled)
        )
    if not sound:
        raise InputError(what, found="a foreign or damaged one", do=do)
