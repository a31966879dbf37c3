"""What attacks share that change the weights and not the function: the proof of both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from deepseal.adapter import Classifier, Split
from deepseal.adapter.wiring import Wiring, wiring_of
from deepseal.attacks.base import Removed, weight_change
from deepseal.errors import InputError

SAMPLES = 1024
_TOLERANCE = {torch.float32: 1e-3, torch.float64: 1e-9}  # of the largest logit; half precision: 0.1


def preserving(
    model: Classifier, data: Split, change: Callable[[Wiring], tuple[Classifier, dict[str, Any]]]
) -> Removed:
    """Run a change that shall keep the function, and measure on the thief's data that it did.

    Raises:
        InputError: data that do not fit, a network whose structure is not understood, or one whose function changed.
    """
    data.check(model.spec)
    x = data.x[:SAMPLES]
    before = model.query(x)
    wiring = wiring_of(model)
    changed, evidence = change(wiring)
    difference = float((changed.query(x) - before).abs().max())
    largest = float(before.abs().max())
    if not difference <= _TOLERANCE.get(model.dtype, 0.1) * max(1.0, largest):
        found = f"logits that differ by {difference:.3g} of {largest:.3g}"
        raise InputError("a network that computes the same afterwards", found=found, do="use another attack")
    proof = {
        "relative_weight_change": weight_change(model, changed),
        "largest_logit_difference": difference,
        "largest_logit": largest,
        "samples": len(x),
        "layers_left_alone": wiring.fixed(),
    }
    return Removed(changed, {**proof, **evidence})
