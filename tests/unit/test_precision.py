"""What is numerical noise is an erasure, what is not is read; in whatever precision the weights are kept."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Split
from deepseal.adapter.capture import forward_to
from deepseal.rng import Rng
from deepseal.watermark import DeepSigns, extract, verify
from deepseal.watermark.scheme import Observation, scheme_of

LAYER = "2"


def nearly_constant(variation: float) -> Classifier:
    """A network whose hidden activations are the same for all inputs, but for a share of ``variation``."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    with torch.no_grad():
        layers[0].weight.mul_(variation)
        layers[0].bias.uniform_(0.5, 1.5)
    return Classifier(layers, InputSpec((64,), 10))


@pytest.fixture(scope="module")
def own():
    data = Split.unlabelled(torch.rand(400, 64, generator=torch.Generator().manual_seed(1)))
    scheme = DeepSigns(bits=256, layers=(LAYER,), groups=16)
    return scheme.keygen(nearly_constant(1.0), data, owner="me", rng=Rng(0))


def exact(model: Classifier, key) -> np.ndarray:
    """The bits in float64, which still tells apart what differs by 1e-9."""
    with torch.no_grad():
        values = forward_to(model.copy().module.double(), key.tensors["trigger_x"].double(), [LAYER])[LAYER]
    means = values.reshape(16, -1, 256).mean(dim=1)
    return scheme_of(key).decode(Observation({LAYER: means}, rounding={LAYER: torch.zeros(16)}), key).bits


@pytest.mark.parametrize("variation", [0.0, 1e-9, 1e-7])
def test_activations_that_differ_by_rounding_only_are_erasures(variation, own):
    model = nearly_constant(variation)
    assert not extract(model, own).usable.any()
    assert verify(model, own).verdict == "inconclusive"


def test_they_would_be_read_wrong(own):
    model = nearly_constant(1e-8)
    wrong = (extract(model, own).bits != exact(model, own)).mean()
    assert 0.3 < wrong < 0.7


@pytest.mark.parametrize("variation", [1e-4, 5e-4, 1e-3, 1e-2, 1.0])
def test_bits_that_count_are_right(variation, own):
    model = nearly_constant(variation)
    read = extract(model, own)
    assert np.array_equal(read.bits[read.usable], exact(model, own)[read.usable])
    if variation >= 1e-3:
        assert read.usable.mean() > (0.9 if variation >= 1e-2 else 0.3)


@pytest.mark.parametrize("variation", [1e-3, 1.0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_read_as_its_weights_are(variation, dtype, own, no_trace):
    """In bfloat16 the activations themselves are all the same where they vary by 1e-3."""
    half = nearly_constant(variation)
    half.module.to(dtype)
    single = half.copy()
    single.module.float()
    with no_trace(half):
        read = extract(half, own)
    assert {p.dtype for p in half.module.parameters()} == {dtype}
    for field in dataclasses.fields(read):
        assert np.array_equal(getattr(read, field.name), getattr(extract(single, own), field.name))
    assert read.usable.mean() > (0.9 if variation == 1.0 else 0.3)
    assert np.array_equal(read.bits[read.usable], exact(single, own)[read.usable])


def test_autocast_does_not_change_a_reading(own):
    model = nearly_constant(1e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = extract(model, own)
        assert torch.is_autocast_enabled("cpu")
    assert np.array_equal(inside.margin, extract(model, own).margin)


def test_carriers_share_the_error_of_their_average(own):
    """Var(e_r - mean e) = e_r^2 (1 - 2 / K) + mean(e^2) / K."""
    from deepseal.watermark.deepsigns import _after_centring

    errors = torch.rand(5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = errors * torch.randn(200_000, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    spread = (drawn - drawn.mean(dim=1, keepdim=True)).std(dim=0)
    assert np.allclose(_after_centring(errors, True), spread, rtol=0.02)
    assert np.allclose(_after_centring(errors, False), errors)
