"""What embedding costs, as a share of the owner's training: updates of both kinds, timed in turn."""

from __future__ import annotations

import dataclasses
import statistics
import time
from typing import Any

from deepseal.adapter import Classifier, Recipe, Split
from deepseal.adapter.training import Imitation, Training, cross_entropy
from deepseal.rng import Rng
from deepseal.watermark.key import Key
from deepseal.watermark.scheme import scheme_of

_ENOUGH_SECONDS = 30.0


@dataclasses.dataclass(frozen=True)
class Cost:
    """Medians of interleaved updates. ``share_of_training`` is None when the owner's number of updates is unknown."""

    updates: int
    seconds_per_update: float
    seconds_per_training_update: float
    owner_updates: int | None

    @property
    def share_of_training(self) -> float | None:
        """Embedding time over the owner's training time."""
        if not self.owner_updates:
            return None
        if not self.updates:
            return 0.0
        return self.updates * self.seconds_per_update / (self.owner_updates * self.seconds_per_training_update)

    def times(self, rounds: int) -> Cost:
        """The cost of so many rounds."""
        return dataclasses.replace(self, updates=rounds * self.updates)

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        return {**dataclasses.asdict(self), "share_of_training": self.share_of_training}


def embedding_cost(model: Classifier, data: Split, key: Key, *, rng: Rng, pairs: int = 15) -> Cost:
    """Time ``pairs`` plain and embedding updates in turn, after two of each to warm up. The model is not changed.

    Fewer pairs of a large model, whose updates take seconds: none begins after half a minute.
    """
    owner = model.metadata.get("training", {})
    recipe = Recipe.from_mapping({k: v for k, v in owner.get("recipe", {}).items() if k in Recipe.__dataclass_fields__})
    task = cross_entropy if model.spec.num_classes else Imitation(model)
    plain = Training(model, data, recipe=recipe, rng=rng.child("plain"), loss=task)
    marking = scheme_of(key).embedding(model, data, key, rng=rng.child("marking"))
    seconds: dict[Training, list[float]] = {plain: [], marking: []}
    if len(marking):
        begun = time.perf_counter()
        for pair in range(pairs + 2):
            if pair and time.perf_counter() - begun > _ENOUGH_SECONDS:
                break
            for training, times in seconds.items():
                start = time.perf_counter()
                training.step()
                times.append(time.perf_counter() - start)
    usual, own = (statistics.median(times[2:] or times) if times else 0.0 for times in seconds.values())
    settling = getattr(scheme_of(key), "settling", 0) / max(1, len(marking))  # share of updates that do not mark
    return Cost(len(marking), (1.0 - settling) * own + settling * usual, usual, owner.get("updates"))
