"""Rotation: residual streams are written and read in other coordinates, and the network computes the same.

Source: S. Ashkboos, M. L. Croci, M. G. do Nascimento, T. Hoefler, J. Hensman, "SliceGPT: compress large language models
by deleting rows and columns", ICLR 2024, section 3 (computational invariance); with random rotations S. Ashkboos and
others, "QuaRot", NeurIPS 2024. There it serves compression; to a thief it is a permutation of the neurons and more.
Ours: LayerNorm stays LayerNorm, since the rotation keeps the mean over the features.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from deepseal.adapter import Classifier, Split
from deepseal.adapter.rotation import random_rotation, rotated
from deepseal.adapter.streams import streams_of
from deepseal.adapter.training import Progress
from deepseal.adapter.wiring import Wiring
from deepseal.attacks.base import Removed
from deepseal.attacks.removal.preserving import preserving
from deepseal.errors import InputError
from deepseal.parameters import Parameters
from deepseal.rng import Rng


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rotate(Parameters):
    """A uniformly random rotation of every residual stream, after the gains of RMSNorm and LayerNorm are folded."""

    name: ClassVar[str] = "rotate"

    def remove(self, model: Classifier, data: Split, *, rng: Rng, progress: Progress | None = None) -> Removed:
        """Rotate a copy; ``data`` prove that the function is the same.

        Raises:
            InputError: no stream that can be rotated, or what ``preserving`` raises.
        """

        def change(_wiring: Wiring) -> tuple[Classifier, dict[str, Any]]:
            streams = streams_of(model)
            if not streams.free:
                reasons = "; ".join(f"{layer}: {reason}" for layer, reason in streams.fixed.items()) or "no layers"
                expected = "a residual stream that layers only add to and read linearly, through RMSNorm or LayerNorm"
                raise InputError(expected, found=f"none ({reasons[:200]})", do="use another attack, such as permute")
            rotations = {
                stream: random_rotation(stream.width, rng.child("rotation", index).torch(), centred=stream.centred)
                for index, stream in enumerate(streams.free)
            }
            result = model.copy()
            rotated(model, rotations, result.module)
            rows = [
                {"width": s.width, "writers": [*s.writers, *s.parameters], "readers": [r.layer for r in s.readers]}
                for s in streams.free
            ]
            return result, {"streams_rotated": rows, "layers_left_alone": streams.fixed}

        return preserving(model, data, change)
