"""What an embedding under way shows to whoever looks on: the loss, the wrong bits, each bit's margin."""

from __future__ import annotations

import time

import numpy as np

from deepseal.adapter.training import Training, Watch
from deepseal.apps.reporter import Observer
from deepseal.watermark import Key, extract

_APART = 0.7  # seconds between two readings
_SHARE = 0.1  # of the time that reading may take


def watch_embedding(key: Key, who: Observer) -> Watch:
    """Reads the mark from the unfinished copy now and then, and tells ``who``; it takes a tenth of the time at most.

    A reading has ``updates``, ``loss`` (mean since the last one), ``bits``, ``bit_errors`` and ``margins`` (of each
    readable bit; negative where it is wrong).
    """
    losses: list[float] = []
    updates, due = 0, 0.0

    def watch(training: Training, loss: float) -> None:
        nonlocal updates, due
        updates += 1
        losses.append(loss)
        clock = time.monotonic()
        if clock < due:
            return
        read = extract(training.result(), key)
        usable = read.usable
        who.reading(
            {
                "updates": updates,
                "loss": float(np.mean(losses)),
                "bits": int(usable.sum()),
                "bit_errors": int((read.bits != key.message())[usable].sum()),
                "margins": [round(float(value), 4) for value in read.margin[usable]],
            }
        )
        losses.clear()
        now = time.monotonic()
        due = now + max(_APART, (now - clock) / _SHARE)

    return watch
