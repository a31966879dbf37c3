"""What a watermarking scheme is: keygen, embedding, observe, decode. Whether a mark is there, ``verify`` decides."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal, Protocol, cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from deepseal.adapter import BlackBox, Classifier, Split
from deepseal.adapter.training import Progress, Training, Watch
from deepseal.errors import InputError
from deepseal.registry import Registry
from deepseal.rng import Rng
from deepseal.watermark.key import Key

Access = Literal["black-box", "white-box"]


@dataclasses.dataclass(frozen=True)
class Observation:
    """What a suspect shows to the holder of the triggers, before any secret is used.

    Attributes:
        values: named tensors.
        noise: half-width, relative to a unit-variance score, within which a sign is numerical noise.
        rounding: norms that rounding errors of the rows of ``values`` may have, by name, where a scheme knows them.
    """

    values: Mapping[str, Tensor]
    noise: float = 0.0
    rounding: Mapping[str, Tensor] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Extraction:
    """Bits read from a model.

    Attributes:
        bits: (n,) extracted bits, 0 or 1.
        usable: (n,) False where the score is within numerical noise, or not finite: an erasure, no vote.
        chance: (n,) probability that the bit equals the message's although there is no mark.
        margin: (n,) signed distance of the score from its decision boundary, positive when the bit is right; 1 is a
            standard deviation of the scores that strangers' keys (same triggers, another secret) read from this model.
    """

    bits: NDArray[np.uint8]
    usable: NDArray[np.bool_]
    chance: NDArray[np.float64]
    margin: NDArray[np.float64]


@dataclasses.dataclass(frozen=True)
class Published:
    """What the paper's own rule says of the same reading, beside ours and never instead of it.

    Attributes:
        rule: the rule in words, with the paper's threshold.
        accepts: whether it would accept the claim.
        matches: triggers or bits that agree, out of ``total``; ``needed`` is how many the rule asks for.
    """

    rule: str
    accepts: bool
    matches: int
    total: int
    needed: int


class Scheme(Protocol):
    """One paper's watermark. Instances are frozen parameters; all state is in keys and models."""

    name: ClassVar[str]
    access: ClassVar[Access]

    @property
    def rounds(self) -> int:
        """Most rounds of embedding; another one follows while a bit reads wrong, or the answers have not settled."""
        ...

    def as_dict(self) -> dict[str, Any]:
        """The parameters as plain values."""
        ...

    def keygen(self, model: Classifier, data: Split, *, owner: str, rng: Rng | None = None) -> Key:
        """A key for this model. Without ``rng`` its secret comes from the operating system."""
        ...

    def embedding(
        self, model: Classifier, data: Split, key: Key, *, rng: Rng, start: Classifier | None = None
    ) -> Training:
        """The training that puts the mark into a copy of the model, ready to run.

        ``start`` is a copy that an earlier round has marked already, where this one goes on.
        """
        ...

    def observe(self, model: Classifier, key: Key) -> Observation:
        """What the suspect shows on the key's triggers; independent of the key's secret.

        A scheme whose access is black-box takes any ``BlackBox`` here, and asks for nothing but its answers.
        """
        ...

    def decode(self, observation: Observation, key: Key) -> Extraction:
        """The bits that the key reads from an observation."""
        ...


SCHEMES: Registry[Scheme] = Registry(
    "watermark scheme",
    "deepseal.schemes",
    {
        "deepsigns": "deepseal.watermark.deepsigns:DeepSigns",
        "hash-bound": "deepseal.watermark.hash_bound:HashBound",
        "uchida": "deepseal.watermark.uchida:Uchida",
        "adi": "deepseal.watermark.adi:Adi",
        "zhang": "deepseal.watermark.zhang:Zhang",
        "le-merrer": "deepseal.watermark.le_merrer:LeMerrer",
        "deepsigns-blackbox": "deepseal.watermark.deepsigns_blackbox:DeepSignsBlackBox",
        "ewe": "deepseal.watermark.ewe:EWE",
        "blackmarks": "deepseal.watermark.blackmarks:BlackMarks",
        "diction": "deepseal.watermark.diction:Diction",
        "plain": "deepseal.watermark.plain:Plain",
    },
)


def published_rule(scheme: Scheme, extraction: Extraction, key: Key) -> Published | None:
    """The verdict of the scheme's paper, where the scheme knows it (its method ``published``)."""
    rule = getattr(scheme, "published", None)
    return None if rule is None else cast("Published", rule(extraction, key))


def scheme_of(key: Key) -> Scheme:
    """The scheme, with its parameters, that a key was made by; what an older key does not state is as it was then.

    Raises:
        UnknownNameError: a scheme that is not installed.
        InputError: parameters that it does not know.
    """
    earlier = getattr(SCHEMES.get(key.scheme), "earlier", {})
    return SCHEMES.build(key.scheme, {**earlier, **key.params})


def embed(model: Classifier, data: Split, key: Key, *, rng: Rng, progress: Progress | None = None) -> Classifier:
    """A marked copy of the model, after as many rounds as ``embedding_rounds`` needs.

    Raises:
        InputError: data or key that do not fit the model.
        TrainingError: the embedding diverged.
    """
    *_, marked = embedding_rounds(model, data, key, rng=rng, progress=progress)
    return marked


def embedding_rounds(
    model: Classifier,
    data: Split,
    key: Key,
    *,
    rng: Rng,
    progress: Progress | None = None,
    watch: Watch | None = None,
) -> Iterator[Classifier]:
    """The copy as each round of embedding leaves it, until every bit reads right or the scheme's rounds are spent.

    A scheme that has a method ``settled(model, marked, data)`` goes on as well until that says yes.

    ``watch`` sees the training and its loss after each update.

    Raises:
        InputError: data or key that do not fit the model.
        TrainingError: the embedding diverged.
    """
    scheme, marked = scheme_of(key), None
    settled = getattr(scheme, "settled", lambda *_: True)
    for index in range(scheme.rounds):
        own = rng.child("round", index) if index else rng
        marked = scheme.embedding(model, data, key, rng=own, start=marked).run(progress, watch)
        yield marked
        read = scheme.decode(scheme.observe(marked, key), key)
        if bool(np.all(read.usable & (read.bits == key.message()))) and settled(model, marked, data):
            return


def observed(scheme: Scheme, model: BlackBox, key: Key) -> Observation:
    """What a suspect shows, where the scheme needs no more access than there is.

    Raises:
        InputError: a scheme that reads weights, and a suspect that only answers; or one that the key cannot read.
    """
    if scheme.access == "white-box" and not isinstance(model, Classifier):
        found, do = f"a model that only answers, {model!r}", "pass the suspect's weights"
        raise InputError(f"a model with its weights, which {scheme.name} reads", found=found, do=do)
    return scheme.observe(cast("Classifier", model), key)


def extract(model: BlackBox, key: Key) -> Extraction:
    """The bits that a key reads from a model."""
    scheme = scheme_of(key)
    return scheme.decode(observed(scheme, model, key), key)
