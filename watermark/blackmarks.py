"""BlackMarks: bits in the answers to adversarial keys, each answer read as one of two clusters of classes.

Source: H. Chen, B. D. Rouhani, F. Koushanfar, "BlackMarks: blackbox multibit watermarking for deep neural networks",
2019 (arXiv 1904.00344), sections 4.1 (encoding), 4.2 (keys), 4.3 (embedding). Ours: the bit that a key is taught is
random, whatever unmarked models say; keys lie at the border of several models; several keys vote for a bit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from sklearn.cluster import KMeans
from torch import Tensor

from deepseal.adapter import BlackBox, Classifier, Differentiable, Recipe, Split, train
from deepseal.adapter.classifier import BATCH
from deepseal.adapter.training import Loss
from deepseal.attacks.evasion.pgd import ascent
from deepseal.errors import InputError
from deepseal.parameters import parameter
from deepseal.rng import Rng, expand_bits, expand_choice, expand_integers
from deepseal.watermark.key import Key
from deepseal.watermark.scheme import Extraction, Observation, Published
from deepseal.watermark.triggers import TriggerLoss, Triggers, TriggerScheme, check_complete
from deepseal.watermark.votes import deciding_gaps

_STRANGERS = 16  # sets of coins, for the unit of margins


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlackMarks(TriggerScheme):
    """BlackMarks (Chen et al., 2019): adversarial images across the border between two clusters of classes.

    ``recipe="paper"``: clusters by K-means; each key is labelled with its source class, so that an unmarked model reads
    the other bit; many are made, and those stay that a marked copy reads right and all fine-tuned, unmarked ones wrong.
    Models trained adversarially undo such keys, and then carry a "mark" that nobody gave them: ``verify`` says that no
    rate is known.

    ``recipe="robust"``: clusters of equal size; the images lie at the border of the model and of at least ``models``
    independent ones, where fine-tuning pulls to neither side; none is dropped for what a model answers; each of a bit's
    ``votes`` images is taught the bit or its opposite by a coin of the secret. So a model that is independent of the
    key reads fair coins (exact null).
    """

    name: ClassVar[str] = "blackmarks"

    bits: int = parameter(64, "length of the message", minimum=1, maximum=100_000)
    votes: int = parameter(41, "keys a bit (robust)", minimum=1, maximum=10_000)
    epsilon: float = parameter(0.15, "size of the perturbation, as a share of the range", minimum=0.0, maximum=1.0)
    ascent: int = parameter(20, "gradient steps to a key", minimum=1, maximum=10_000)
    models: int = parameter(
        3,
        "independent models at whose border the keys lie too (robust), or that must not read them (paper)",
        minimum=0,
        maximum=1000,
    )
    hinge: float = parameter(5.0, "log-odds of its bit that each key is taught (robust)", minimum=0.0, maximum=1e3)
    overdraw: int = parameter(20, "candidates for each key (paper)", minimum=2, maximum=1000)
    regulariser: float = parameter(0.5, "weight of the bits' distance (paper)", minimum=0.0, maximum=1e6)
    recipe: str = parameter("robust", "how to choose and teach the keys", choices=("robust", "paper"))
    significance: float = parameter(1e-3, "p of the paper's rule", minimum=1e-300, maximum=1.0)
    batch: int = parameter(256, "triggers an update", minimum=1, maximum=4096)
    settle: int = parameter(500, "updates a round on the task alone, after the marking", minimum=0, maximum=1_000_000)

    @property
    def models_needed(self) -> int:
        """Independent models that keygen trains where none are given."""
        return self.models if self.recipe == "robust" else 0

    def draw(self, model: Classifier, data: Split, secret: bytes, independent: Sequence[BlackBox]) -> Triggers:
        """The keys, and the bit that each class stands for."""
        if self.recipe == "paper":
            return self._published_choice(model, data, secret)
        others = [other for other in independent if isinstance(other, Classifier)]
        if len(others) < max(self.models, len(independent)):
            found = f"{len(others)} of {len(independent)} given"
            raise InputError(f"{self.models} independent models with weights", found=found, do="pass more of them")
        means = class_means(model, data)
        codes = balanced(means, secret)
        sources = data.take(_drawn(secret, len(data), self.bits * self.votes))
        x = self._moved([model, *others], sources, codes, across=False)
        sizes = {"cluster_sizes": _sizes(codes), "k_means_sizes": _sizes(k_means(means, secret))}
        return Triggers(x, self.bits, codes=codes, consulted=len(independent), public=sizes)

    def _moved(self, models: Sequence[Differentiable], sources: Split, codes: Tensor, *, across: bool) -> Tensor:
        """The sources, moved across the border between the clusters, or to the border of all models at once."""
        parts = []
        for x, y in zip(sources.tensor.split(BATCH), sources.y.split(BATCH), strict=True):
            other = 1 - codes[y]

            def objective(z: Tensor, other: Tensor = other) -> Tensor:
                gaps = torch.stack([log_odds(model.logits(z), codes, other) for model in models])
                return gaps.mean(dim=0) if across else -gaps.abs().mean(dim=0)

            size = 2.5 * self.epsilon / self.ascent
            parts.append(ascent(x, objective, models[0].spec, epsilon=self.epsilon, steps=self.ascent, step_size=size))
        return torch.cat(parts)

    def _published_choice(self, model: Classifier, data: Split, secret: bytes) -> Triggers:
        """Keys that a copy tuned on them reads right, and copies tuned on the data alone read wrong.

        Raises:
            InputError: too few of them in a cluster.
        """
        codes = k_means(class_means(model, data), secret)
        pool = data.take(_drawn(secret, len(data), self.overdraw * self.bits))
        pool = Split(self._moved([model], pool, codes, across=True), pool.y)
        rng = Rng(int.from_bytes(secret[:8], "little"))
        recipe = Recipe(epochs=2, learning_rate=8e-4)
        mixed = Split(torch.cat([data.tensor, pool.tensor]), torch.cat([data.y, pool.y]))
        read = codes[train(model, mixed, recipe=recipe, rng=rng.child("marked")).predict(pool.tensor)]
        kept = read == codes[pool.y]
        for index in range(self.models):
            variant = train(model, data, recipe=recipe, rng=rng.child("variant", index))
            kept &= codes[variant.predict(pool.tensor)] != codes[pool.y]
        signature = torch.from_numpy(expand_bits(secret, "signature", self.bits))
        chosen = torch.empty(self.bits, dtype=torch.int64)
        for bit in (0, 1):
            places = torch.nonzero(signature == bit).reshape(-1)
            candidates = torch.nonzero(kept & (codes[pool.y] == bit)).reshape(-1)
            if len(candidates) < len(places):
                found, do = str(len(candidates)), "use a larger overdraw or epsilon"
                raise InputError(f"{len(places)} keys that read {bit} only when marked", found=found, do=do)
            chosen[places] = candidates[: len(places)]
        sizes = {"cluster_sizes": _sizes(codes)}
        return Triggers(pool.tensor[chosen], self.bits, codes=codes, fixed=pool.y[chosen], public=sizes)

    def loss(self, model: Classifier, data: Split, key: Key) -> Loss:
        """What embedding minimises."""
        return PublishedKeyLoss(model, key, self) if self.recipe == "paper" else KeyLoss(model, key, self)

    def decode(self, observation: Observation, key: Key) -> Extraction:
        """Each key's cluster, less its coin, is a vote for the bit. No vote: a tie between classes; no bit: of votes.

        The score of ``margin`` is the gap between the clusters' largest logits in the key that turns the vote; of
        labels alone, the share of votes for the message less that against it.
        """
        check_complete(key)
        codes, clear = key.tensors["codes"], observation.values["clear"].numpy()
        ones = np.where(codes[observation.values["labels"]].numpy() == 1, 1.0, -1.0) * clear
        known = "scores" in observation.values
        if known:
            high = [observation.values["scores"].masked_fill(codes != bit, -torch.inf).amax(dim=1) for bit in (0, 1)]
            ones = ones * (high[1] - high[0]).abs().nan_to_num(0.0).numpy()
        total, own = _tally(ones, clear, taught(key), key, known)
        coins = Rng(0).numpy().integers(0, 2, (_STRANGERS, len(ones)))
        unit = float(np.std([_tally(ones, clear, other, key, known)[1][total != 0] for other in coins]))
        bits = np.where(total > 0, key.message(), 1 - key.message()).astype(np.uint8)
        chance = np.full(key.bits, 1.0 if "trigger_y" in key.tensors else 0.5)
        return Extraction(bits, total != 0, chance, own / (unit if unit > 0 else 1.0))

    def published(self, extraction: Extraction, key: Key) -> Published:
        """Fewer wrong bits than fair coins give with probability p (section 4.4)."""
        matches = int((extraction.bits == key.message())[extraction.usable].sum())
        needed = int(stats.binom.isf(self.significance, key.bits, 0.5)) + 1
        return Published(f"p under {self.significance:g} at 1 / 2", matches >= needed, matches, key.bits, needed)


class KeyLoss(TriggerLoss):
    """CE on the data + strength * mean max(0, hinge - log-odds of its bit) of a draw of the keys.

    The keys are read through noisy weights, with batch normalisation in evaluation mode (see ``TriggerLoss``).
    """

    def __init__(self, model: Classifier, key: Key, scheme: BlackMarks) -> None:
        super().__init__(model, key, scheme)
        self._blackmarks, self._codes = scheme, key.tensors["codes"]
        self._bits = torch.from_numpy(taught(key)).to(torch.int64)

    def taught(self, logits: Tensor, index: Tensor) -> Tensor:
        """The keys' part of the loss."""
        gap = log_odds(logits, self._codes, self._bits[index])
        return torch.relu(self._blackmarks.hinge - gap).mean()


class PublishedKeyLoss(KeyLoss):
    """CE on data and keys + lambda * distance of softmax(z) . f from the bits (section 4.3)."""

    def taught(self, logits: Tensor, index: Tensor) -> Tensor:
        """The keys' part of the loss."""
        labels = torch.nn.functional.cross_entropy(logits, self._y[index].to(logits.device))
        ones = logits.softmax(dim=1) @ self._codes.to(logits)
        distance = (ones - self._bits[index].to(logits)).abs().mean()
        return labels + self._blackmarks.regulariser * distance


def _tally(
    ones: NDArray[np.float64], clear: NDArray[np.bool_], bits: NDArray[Any], key: Key, gaps_known: bool
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """(bits,) votes for less votes against, and scores.

    Args:
        ones: (bits * votes,) score of bit 1 in each key: a gap, or 1 or -1.
        clear: (bits * votes,) whether it is a vote.
        bits: (bits * votes,) what each key should decode to.
        key: says how many votes there are.
        gaps_known: whether ``ones`` are gaps.
    """
    towards = np.where(bits == 1, ones, -ones)
    votes = np.stack([(towards > 0) & clear, (towards < 0) & clear], axis=1).astype(np.int64)
    votes = votes.reshape(key.bits, -1, 2).sum(axis=1)
    total = votes[:, 0] - votes[:, 1]
    if not gaps_known:
        return total, total / int(key.public["votes"])
    gaps = torch.from_numpy(np.stack([towards, -towards], axis=1))
    return total, deciding_gaps(gaps, votes, votes[:, ::-1])[:, 0]


def taught(key: Key) -> NDArray[np.uint8]:
    """(bits * votes,) the bit that each key's answer should decode to.

    The message's bit or its opposite, by a coin that is expanded from the secret and bound to everything else in the
    key; the label's bit where labels are fixed.
    """
    if "trigger_y" in key.tensors:
        labels = key.tensors["trigger_y"].repeat_interleave(int(key.public["votes"]))
        return key.tensors["codes"][labels].numpy().astype(np.uint8)
    votes = int(key.public["votes"])
    coins = expand_bits(key.secret, f"coins/{key.binding}", key.bits * votes)
    result: NDArray[np.uint8] = np.repeat(key.message(), votes) ^ coins
    return result


def log_odds(logits: Tensor, codes: Tensor, bits: Tensor) -> Tensor:
    """(N,) log of the probability of a bit's cluster over that of the other.

    Args:
        logits: (N, C).
        codes: (C,) the bit that each class stands for.
        bits: (N,) the bits asked for.
    """
    own = codes.to(logits.device)[None] == bits.to(logits.device)[:, None]
    lowest = torch.finfo(logits.dtype).min
    inside, outside = logits.masked_fill(~own, lowest), logits.masked_fill(own, lowest)
    return inside.logsumexp(dim=1) - outside.logsumexp(dim=1)


def class_means(model: Classifier, data: Split) -> NDArray[np.float64]:
    """(C, C) mean logits of the samples of each class (section 4.1).

    Raises:
        InputError: a class without samples.
    """
    logits = model.query(data.tensor).double()
    present = torch.bincount(data.y, minlength=model.spec.num_classes)
    if int(present.min()) == 0:
        missing = torch.nonzero(present == 0).reshape(-1).tolist()
        raise InputError("samples of every class", found=f"none of classes {missing}", do="pass data with all classes")
    means = [logits[data.y == c].mean(dim=0) for c in range(model.spec.num_classes)]
    values: NDArray[np.float64] = torch.stack(means).numpy()
    return values


def k_means(means: NDArray[np.float64], secret: bytes) -> Tensor:
    """(C,) cluster of each class by K-means with k = 2 (section 4.1)."""
    return torch.from_numpy(_clusters(means, secret).labels_.astype(np.int64))


def balanced(means: NDArray[np.float64], secret: bytes) -> Tensor:
    """(C,) two clusters of equal size (+-1): the classes in their order between the centres of K-means, cut in half."""
    first, second = _clusters(means, secret).cluster_centers_
    order = np.argsort(means @ (second - first), kind="stable")
    codes = torch.zeros(len(means), dtype=torch.int64)
    codes[torch.from_numpy(order[len(means) // 2 :].copy())] = 1
    return codes


def _clusters(means: NDArray[np.float64], secret: bytes) -> KMeans:
    seed = int(expand_integers(secret, "clusters", 1, 2**31)[0])
    return KMeans(n_clusters=2, n_init=10, random_state=seed).fit(means)


def _sizes(codes: Tensor) -> list[int]:
    return [int((codes == bit).sum()) for bit in (0, 1)]


def _drawn(secret: bytes, population: int, count: int) -> Tensor:
    """Positions, distinct where there are enough."""
    distinct = population >= count
    drawn = (
        expand_choice(secret, "sources", population, count)
        if distinct
        else expand_integers(secret, "sources", count, population)
    )
    return torch.from_numpy(drawn)
