"""The faster stand-in: the same numbers but for rounding, and the model itself where there is none."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepseal.adapter import Classifier, InputSpec
from deepseal.adapter.quick import QuickCopy, quick_copy
from deepseal.adapter.zoo import cnn
from deepseal.rng import Rng

SPEC = InputSpec(shape=(3, 16, 16), num_classes=5, bounds=(0.0, 255.0), mean=(100.0, 90.0, 80.0), std=(50.0,))


class Viewing(nn.Module):
    """Works with contiguous maps only."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(4 * 14 * 14, 5)

    def forward(self, x):
        return self.fc(self.conv(x).view(len(x), -1))


class Reading(nn.Module):
    """Its answer depends on how the map lies in memory."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(3, 4, 3), nn.Linear(14 * 14 * 4, 5)

    def forward(self, x):
        maps = self.conv(x)
        return self.fc(maps.as_strided((len(x), 14 * 14 * 4), (14 * 14 * 4, 1)))


@pytest.fixture
def model():
    torch.manual_seed(0)
    module = cnn(SPEC)
    for layer in module:
        if isinstance(layer, nn.BatchNorm2d):
            layer.running_mean.uniform_(-1, 1)
            layer.running_var.uniform_(0.5, 2)
    return Classifier(module.train(), SPEC)


def test_same_numbers_and_no_trace(model, no_trace):
    x = torch.rand(9, 3, 16, 16, generator=Rng(0).torch()) * 255.0
    with no_trace(model):
        quick = quick_copy(model)
        found, gradients = [], []
        for one in (model, quick):
            leaf = x.clone().requires_grad_(True)
            logits = one.logits(leaf)
            gradients.append(torch.autograd.grad(logits[:, 2].sum(), leaf)[0])
            found.append(logits.detach())
    assert isinstance(quick, QuickCopy)
    assert torch.allclose(found[0], found[1], atol=1e-4)
    assert torch.allclose(quick.query(x), found[0], atol=1e-4)
    assert torch.allclose(gradients[0], gradients[1], rtol=1e-3, atol=1e-6)
    assert all(p.requires_grad for p in model.module.parameters())
    assert model.module.training


@pytest.mark.parametrize("kind", [Viewing, Reading])
def test_a_module_that_cannot_be_laid_out_so_stays_itself(kind):
    model = Classifier(kind(), SPEC)
    assert quick_copy(model) is model


def test_what_would_not_be_faster_stays_itself(model):
    dense = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(768, 5)), SPEC)
    script = Classifier(torch.jit.trace(model.module.eval(), torch.rand(2, 3, 16, 16)), SPEC)
    oracle = model.oracle(output="logits")
    for one in (dense, script, oracle):
        assert quick_copy(one) is one
