"""A course of the global random state that nobody else sees: for dropout, which takes no generator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from deepseal.rng import Rng


class PrivateRandom:
    """Each ``with`` goes on where the last one ended, and leaves the global state as it was.

    Args:
        rng: the seed.
        device: where random numbers are drawn beside the CPU.
    """

    def __init__(self, rng: Rng, device: torch.device) -> None:
        self._state = rng.torch().get_state()
        self._devices = [device] if device.type == "cuda" else []
        self._uses = 0

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """The private state inside."""
        with torch.random.fork_rng(devices=self._devices):
            torch.set_rng_state(self._state)
            for device in self._devices:
                torch.cuda.default_generators[device.index or 0].manual_seed(self._uses)
            yield
            self._state = torch.get_rng_state()
            self._uses += 1
