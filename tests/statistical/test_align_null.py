"""Alignment makes no evidence: unrelated models and relatives of the same initialisation stay innocent."""

from __future__ import annotations

import numpy as np
import pytest

from deepseal.adapter import Recipe, initialise, train
from deepseal.rng import Rng
from deepseal.watermark import aligned_view, verify, verify_aligned

EACH = 18
RELATIVES = (
    Recipe(epochs=3, batch_size=64),
    Recipe(epochs=6, batch_size=32, learning_rate=3e-4),
    Recipe(epochs=6, batch_size=128, learning_rate=3e-3),
    Recipe(epochs=6, batch_size=64, optimizer="sgd", learning_rate=0.05),
)
KINDS = ("unrelated", "sibling", "relative")


@pytest.fixture(scope="module")
def innocents(digits):
    """54 models: other initialisations; the owner's with another order of the data; and with other recipes too."""
    found = {}
    for kind in KINDS:
        for index in range(EACH):
            weights = Rng(1000 + index) if kind == "unrelated" else Rng(0)  # the owner's seed in conftest
            epochs = 15 if kind == "sibling" else 5
            recipe = RELATIVES[index % 4] if kind == "relative" else Recipe(epochs=epochs, batch_size=64)
            start = initialise("deepseal.adapter.zoo:mlp", digits.spec, weights)
            model = train(start, digits.train, recipe=recipe, rng=Rng(2000 + index).child(kind))
            found.setdefault(kind, []).append(model)
    return found


@pytest.mark.parametrize("original", ["unmarked", "marked"])
def test_none_of_54_is_owned(original, innocents, base, marked, key):
    owner = base if original == "unmarked" else marked
    for kind, models in innocents.items():
        results = [verify_aligned(model, key, owner, max_false_positive=1e-4).verification for model in models]
        verdicts = {result.verdict for result in results}
        if kind == "unrelated":
            assert verdicts == {"inconclusive"}
            continue
        assert verdicts == {"not-owned"}, kind
        aligned = np.array([result.bit_error_rate for result in results])
        plain = np.array([verify(model, key).bit_error_rate for model in models])
        assert abs(aligned.mean() - plain.mean()) < 0.03, kind  # of 256 bits, 8


def test_why_the_gate_is_low(innocents, marked, key):
    """Keeping just what resembles the marked weights most keeps what agreed with the message before."""
    rates = {}
    for gate in (0.5, 0.8):
        views = [aligned_view(marked, model, gate=gate, minimum=0.0) for model in innocents["sibling"][:6]]
        rates[gate] = np.mean([verify(view, key).bit_error_rate for view in views])
    assert rates[0.5] > 0.42
    assert rates[0.8] < 0.36
