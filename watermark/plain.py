"""The null scheme: marks nothing and reads coins, a baseline for tables and for tests of the machinery."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import ClassVar

import numpy as np

from deepseal.adapter import BlackBox, Classifier, Recipe, Split
from deepseal.adapter.training import Training
from deepseal.parameters import Parameters, parameter
from deepseal.rng import SECRET_BYTES, Rng, expand_bits, fresh_secret
from deepseal.watermark.key import Key
from deepseal.watermark.scheme import Access, Extraction, Observation


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plain(Parameters):
    """No mark: embedding is a copy, and every bit read is a coin that depends on key and nothing else."""

    name: ClassVar[str] = "plain"
    access: ClassVar[Access] = "black-box"
    rounds: ClassVar[int] = 1

    bits: int = parameter(256, "length of the message", minimum=1, maximum=100_000)

    def keygen(self, model: Classifier, data: Split, *, owner: str, rng: Rng | None = None) -> Key:
        """A key with a secret and no triggers."""
        data.check(model.spec)
        secret = rng.child("secret").bytes(SECRET_BYTES) if rng else fresh_secret()
        public = {"bits": self.bits, "access": self.access}
        return Key(
            scheme=self.name,
            params=self.as_dict(),
            owner=owner,
            secret=secret,
            spec=model.spec,
            public=public,
            reproducible=rng is not None,
        )

    def embedding(
        self, model: Classifier, data: Split, key: Key, *, rng: Rng, start: Classifier | None = None
    ) -> Training:
        """No update at all."""
        return Training(model, data, recipe=Recipe(steps=0), rng=rng)

    def observe(self, model: BlackBox, key: Key) -> Observation:
        """Nothing."""
        return Observation({})

    def decode(self, observation: Observation, key: Key) -> Extraction:
        """Coins from a digest of the secret."""
        bits = expand_bits(hashlib.sha256(key.secret).digest(), "coins", key.bits)
        right = np.where(bits == key.message(), 1.0, -1.0)
        return Extraction(bits, np.ones(key.bits, dtype=bool), np.full(key.bits, 0.5), right)
