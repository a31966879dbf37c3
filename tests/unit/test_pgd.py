"""PGD: in the ball, in the bounds, and as strong as the exact answer where there is one."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Split
from deepseal.attacks import EVASION
from deepseal.attacks.evasion.pgd import PGD, ascent
from deepseal.errors import InputError
from deepseal.rng import Rng


@pytest.fixture(scope="module")
def some(digits):
    return digits.test.take(torch.arange(120))


@pytest.fixture
def linear():
    """Two classes of five features between -2 and 3, told apart by a weight vector."""
    layer = nn.Linear(5, 2)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -2.0, 0.5, 0.0, 3.0], [0.0] * 5]))
        layer.bias.zero_()
    return Classifier(layer, InputSpec(shape=(5,), num_classes=2, bounds=(-2.0, 3.0)))


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_stays_in_ball_and_bounds(norm, base, some, no_trace):
    attack = PGD(epsilon=0.2 if norm == "linf" else 1.5, norm=norm, steps=10)
    with no_trace(base):
        found = attack.perturb(base, some, rng=Rng(0))
    change = (found.x - some.x).flatten(1)
    size = change.abs().max(dim=1).values if norm == "linf" else change.norm(dim=1)
    assert float(size.max()) <= attack.epsilon + 1e-5
    assert float(found.x.min()) >= 0.0
    assert float(found.x.max()) <= 1.0
    right = base.predict(some.x) == some.y
    fooled = right & (base.predict(found.x) != some.y)
    assert (found.evidence["attacked"], found.evidence["fooled"]) == (int(right.sum()), int(fooled.sum()))
    assert torch.equal(found.fooled, fooled)
    assert int(fooled.sum()) > 0.5 * int(right.sum())
    assert torch.equal(found.x[~right], some.x[~right])


def test_same_seed_same_images(base, some):
    first, second, other = (PGD(steps=3).perturb(base, some, rng=Rng(seed)).x for seed in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_restarts_fool_no_fewer(base, some):
    fooled = [PGD(epsilon=0.05, steps=3, restarts=n).perturb(base, some, rng=Rng(0)).evidence["fooled"] for n in (1, 8)]
    assert fooled[0] <= fooled[1]


@pytest.mark.parametrize("norm", ["linf", "l2"])
def test_is_exact_on_a_linear_model(norm, linear):
    """The most that a ball inside the bounds gives: epsilon times the dual norm of the weights' difference."""
    x = torch.full((1, 5), 0.5)
    weights = linear.module.weight[0] - linear.module.weight[1]

    def margin(z):
        logits = linear.logits(z)
        return logits[:, 0] - logits[:, 1]

    epsilon = 0.1
    found = ascent(x, margin, linear.spec, epsilon=epsilon, norm=norm, steps=20, step_size=0.02)
    gain = float((margin(found) - margin(x)).detach())
    expected = epsilon * 5.0 * float(weights.abs().sum()) if norm == "linf" else epsilon * float(weights.norm())
    assert gain == pytest.approx(expected, rel=1e-3)


def test_inputs_at_a_bound_can_leave_it(linear):
    """A clamp in the graph has gradient 0 there; ours is no part of it."""
    x = torch.full((1, 5), -2.0)
    found = ascent(x, lambda z: linear.logits(z)[:, 0], linear.spec, epsilon=0.1, steps=5, step_size=0.05)
    assert torch.allclose(found, torch.tensor([[-1.5, -2.0, -1.5, -2.0, -1.5]]), atol=1e-6)


def test_one_step_is_the_signed_gradient(base, some):
    moved = ascent(some.x, lambda z: base.logits(z)[:, 3], base.spec, epsilon=0.1, steps=1, step_size=0.1)
    leaf = some.x.clone().requires_grad_(True)
    (gradient,) = torch.autograd.grad(base.logits(leaf)[:, 3].sum(), leaf)
    assert torch.allclose(moved, (some.x + 0.1 * gradient.sign()).clamp(0.0, 1.0), atol=1e-6)


def test_is_registered_and_refuses_what_has_no_gradients(base, some):
    assert EVASION.get("pgd") is PGD
    foreign = Split(torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64))
    with pytest.raises(InputError, match="shape"):
        PGD().perturb(base, foreign, rng=Rng(0))
    embedding = Classifier(nn.Linear(5, 3), InputSpec(shape=(5,), num_classes=0))
    with pytest.raises(InputError, match="classes"):
        PGD().perturb(embedding, Split.unlabelled(torch.zeros(2, 5)), rng=Rng(0))


def test_a_model_of_nan_is_one_clear_error(linear):
    with torch.no_grad():
        linear.module.weight.fill_(float("nan"))
    with pytest.raises(InputError, match="finite gradients"):
        ascent(torch.zeros(2, 5), lambda z: linear.logits(z)[:, 0], linear.spec, epsilon=0.1, steps=1, step_size=0.1)


def test_no_step_is_lost_in_batches(base, some):
    """What an input becomes does not depend on its neighbours."""
    alone = ascent(some.x[:1], lambda z: base.logits(z)[:, 3], base.spec, epsilon=0.1, steps=5, step_size=0.05)
    together = ascent(some.x, lambda z: base.logits(z)[:, 3], base.spec, epsilon=0.1, steps=5, step_size=0.05)
    assert torch.allclose(alone[0], together[0], atol=1e-5)
