"""Fine-tuning where nobody has labels: the network is held to its own answers, for inputs that are corrupted."""

from __future__ import annotations

import pytest
import torch
from networks import encoder, sentences
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Split
from deepseal.attacks import REMOVAL
from deepseal.attacks.removal.own_answers import corrupted
from deepseal.rng import Rng


def drawn(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_numbers_get_noise_of_so_many_standard_deviations():
    x = 0.5 + 0.1 * torch.randn(200, 50, generator=drawn(1))
    spec = InputSpec((50,), 0, bounds=(-2.0, 2.0))
    noise = corrupted(x, spec, 0.3, drawn()) - x
    assert float(noise.std() / x.std()) == pytest.approx(0.3, rel=0.03)
    assert abs(float(noise.mean())) < 0.001
    spec.check(corrupted(4 * x - 2, spec, 10.0, drawn()))
    assert torch.equal(corrupted(x, spec, 0.0, drawn()), x)


def test_tokens_are_drawn_anew_and_masks_stay():
    x, spec = sentences(200), encoder().spec
    y = corrupted(x, spec, 0.3, drawn())
    spec.check(y)
    assert torch.equal(y["mask"], x["mask"])
    assert y["tokens"].dtype == x["tokens"].dtype
    assert float((y["tokens"] != x["tokens"]).double().mean()) == pytest.approx(0.3 * 59 / 60, abs=0.02)


@pytest.mark.parametrize("mode", ["ftal", "ftll", "rtal", "rtll"])
def test_trains_and_says_what_it_did(mode, no_trace):
    torch.manual_seed(0)
    model = Classifier(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4)), InputSpec((8,), 0))
    data = Split.unlabelled(torch.rand(256, 8, generator=drawn(2)))
    with no_trace(model):
        removed = REMOVAL.build("fine-tune", {"mode": mode, "epochs": 40, "batch_size": 32}).remove(
            model, data, rng=Rng(0)
        )
    assert removed.evidence["relative_weight_change"] > 0.001
    kept = 0.3 if mode in ("ftal", "ftll") else 0.7
    assert 0 < removed.evidence["relative_change_of_answers"] < kept, "far nearer to the answers than a fresh layer"
    first = removed.model.module[0].weight
    assert torch.equal(first, model.module[0].weight) == (mode in ("ftll", "rtll"))


def test_without_corruption_there_is_nothing_to_learn():
    """What the answers to the inputs themselves would teach is their rounding."""
    model, data = encoder(), Split.unlabelled(sentences(64))
    change = {
        share: REMOVAL.build("fine-tune", {"epochs": 1, "optimizer": "sgd", "corruption": share})
        .remove(model, data, rng=Rng(0))
        .evidence["relative_weight_change"]
        for share in (0.0, 0.15)
    }
    assert change[0.15] > 100 * change[0.0]
