"""Compression: the dictionary against its definition, masks and budgets, and whole networks on real digits."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from models import trained
from torch import nn

from deepseal.adapter import Classifier, InputSpec, checkpoint
from deepseal.errors import InputError
from deepseal.rng import Rng
from deepseal.secure_inference.compile import Linear, compile_model
from deepseal.secure_inference.compile.accuracy import compare
from deepseal.secure_inference.compile.projected import projection_of
from deepseal.secure_inference.compress import (
    CompressSettings,
    build_dictionary,
    compress,
    principal_axes,
    program_cost,
)
from deepseal.secure_inference.compress.projection import first_linear, project_layer, unproject
from deepseal.secure_inference.compress.pruning import add_masks, importance, lower_masks, masks, multiplications

B1, B2 = "deepseal.adapter.zoo:deepsecure_b1", "deepseal.adapter.zoo:mlp?hidden=(24,)"
QUICK = CompressSettings(max_loss=2.0, steps=4, epochs=6, step_epochs=2, batch_size=64, error=0.4)
FEW = settings(max_examples=25, deadline=None)


def by_definition(x, error, limit, order):
    """The paper's loop: the pseudo-inverse of the dictionary for every sample."""
    chosen = []
    for place in order:
        a = x[place]
        size = np.linalg.norm(a)
        if size == 0:
            continue
        d = np.stack([x[i] / np.linalg.norm(x[i]) for i in chosen], axis=1) if chosen else np.zeros((len(a), 1))
        if np.linalg.norm(d @ (np.linalg.pinv(d) @ a) - a) / size > error:
            if len(chosen) == limit:
                return chosen, True
            chosen.append(place)
    return chosen, False


@FEW
@given(seed=st.integers(0, 999), error=st.sampled_from([0.05, 0.2, 0.4, 0.7]), limit=st.sampled_from([1, 3, 50]))
def test_the_dictionary_is_the_papers(seed, error, limit):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((60, 4)) @ rng.standard_normal((4, 12)) + 0.1 * rng.standard_normal((60, 12))
    x[:3] = 0
    x[3] = 5 * x[4]
    found = build_dictionary(x, error=error, limit=limit, rng=Rng(seed))
    chosen, full = by_definition(x, error, min(limit, 12), Rng(seed).numpy().permutation(60))
    assert found.samples.tolist() == chosen and found.full == full
    np.testing.assert_allclose(found.basis @ found.basis.T, np.eye(len(chosen)), atol=1e-12)
    span = x[found.samples]
    np.testing.assert_allclose(span @ found.basis.T @ found.basis, span, atol=1e-10)


def test_blocks_do_not_matter_and_every_sample_is_near(digits):
    x = digits.train.x.flatten(1).double().numpy()
    found = build_dictionary(x, error=0.35, limit=64, rng=Rng(3))
    chosen, full = by_definition(x, 0.35, 64, Rng(3).numpy().permutation(len(x)))
    assert found.samples.tolist() == chosen and not full and len(x) > 512
    errors = np.linalg.norm(x - x @ found.basis.T @ found.basis, axis=1) / np.linalg.norm(x, axis=1)
    assert errors.max() <= 0.35
    other = build_dictionary(x, error=0.35, limit=64, rng=Rng(4))
    assert other.samples.tolist() != chosen


def test_nearly_dependent_samples_stay_orthonormal():
    rng = np.random.default_rng(0)
    x = np.ones((40, 50)) + 1e-7 * rng.standard_normal((40, 50))
    found = build_dictionary(x, error=1e-9, limit=40, rng=Rng(0))
    assert len(found.samples) == 40
    np.testing.assert_allclose(found.basis @ found.basis.T, np.eye(40), atol=1e-13)


def test_a_dictionary_of_nothing_is_refused():
    with pytest.raises(InputError, match="zeros only"):
        build_dictionary(np.zeros((5, 3)), error=0.1, limit=3, rng=Rng(0))


def test_principal_axes_are_the_same_space_and_no_sample(digits):
    x = digits.train.x.flatten(1).double().numpy()
    found = build_dictionary(x, error=0.4, limit=64, rng=Rng(0))
    axes = principal_axes(found.basis, x)
    np.testing.assert_allclose(axes.T @ axes, found.basis.T @ found.basis, atol=1e-10)
    power = np.square(x @ axes.T).mean(axis=0)
    assert np.all(np.diff(power) <= 1e-12)
    first = x[found.samples] / np.linalg.norm(x[found.samples], axis=1)[:, None]
    assert np.abs(found.basis @ first[0]).max() > 1 - 1e-9  # Gram-Schmidt publishes a sample
    assert np.abs(axes @ first.T).max() < 0.999


def test_projected_layers_start_and_end_as_the_network(digits, base, no_trace):
    x = digits.train.x.flatten(1).double().numpy()
    whole = principal_axes(np.eye(64), x)
    with no_trace(base):
        projected = project_layer(base, first_linear(base), whole)
        again = unproject(projected)
    torch.testing.assert_close(projected.query(digits.test.x), base.query(digits.test.x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(again.query(digits.test.x), base.query(digits.test.x), rtol=1e-4, atol=1e-4)
    assert {k: v.shape for k, v in again.tensors().items()} == {k: v.shape for k, v in base.tensors().items()}


def test_multiplications_are_the_programs(digits):
    module = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Conv2d(4, 6, 3, groups=2, dilation=1),
                           nn.ReLU(), nn.Flatten(), nn.Linear(24, 10))  # fmt: skip
    model = Classifier(module, digits.spec)
    program, _ = compile_model(model, digits.calibration)
    found = multiplications(model)
    steps = [step for step in program.steps if isinstance(step, Linear)]
    for step, counts in zip(steps, found.values(), strict=True):
        met = np.bincount(step.connections(program).weights, minlength=counts.numel())
        np.testing.assert_array_equal(met, counts.reshape(-1).numpy())
    assert sum(int(c.sum()) for c in found.values()) == program_cost(program).multiplications


@FEW
@given(seed=st.integers(0, 999), share=st.floats(0.0, 1.0))
def test_masks_fit_the_budget_and_never_grow(seed, share):
    generator = torch.Generator().manual_seed(seed)
    kept = {"a": torch.ones(4, 5), "b": torch.ones(3)}
    costs = {"a": torch.full((4, 5), 2.0), "b": torch.tensor([7.0, 1.0, 3.0])}
    scores = {name: torch.rand(mask.shape, generator=generator) for name, mask in kept.items()}
    total = sum(float(cost.sum()) for cost in costs.values())
    lower_masks(kept, scores, costs, share * total)
    left = sum(float((kept[name] * costs[name]).sum()) for name in kept)
    assert left <= share * total < left + max(float(cost.max()) for cost in costs.values()) or left == total
    flat = torch.cat([kept[name].reshape(-1) for name in kept]).bool()
    rank = torch.cat([scores[name].reshape(-1) for name in kept])
    if flat.any() and not flat.all():
        assert rank[flat].min() >= rank[~flat].max()
    before = {name: mask.clone() for name, mask in kept.items()}
    lower_masks(kept, {name: 1 - score for name, score in scores.items()}, costs, share * total / 2)
    assert all(bool((kept[name] <= before[name]).all()) for name in kept)


def test_saliency_sees_pixels_that_are_always_dark(digits):
    """The corner pixels of digits are always 0: their weights matter to nobody, however large they are."""
    model = trained(digits, 0, arch=B2, epochs=3)
    dark = (digits.train.x.flatten(1) == 0).all(dim=0)
    assert dark.any()
    costs = multiplications(model)
    scores = importance(model, digits.train, costs, "saliency", Rng(0))["fc1"]
    assert float(scores[:, dark].max()) == 0.0 < float(scores[:, ~dark].max())
    magnitude = importance(model, digits.train, costs, "magnitude", Rng(0))["fc1"]
    assert float(magnitude[:, dark].min()) > 0.0


@pytest.fixture(scope="module")
def small(digits):
    return trained(digits, 0, arch=B2, epochs=25)


@pytest.mark.parametrize("method", ["both", "projection", "pruning"])
def test_compressed_networks(method, digits, small, tmp_path, no_trace):
    settings = dataclasses.replace(QUICK, method=method, fold=None if method == "projection" else 4.0)
    with no_trace(small):
        made = compress(small, digits, settings=settings, rng=Rng(1))
    assert made.reached and (made.dictionary is None) == (method == "pruning")
    assert made.model.tensors().keys() == small.tensors().keys()
    checkpoint.save(made.model, tmp_path / "model.safetensors")
    loaded = checkpoint.load(tmp_path / "model.safetensors")
    assert loaded.accuracy(digits.calibration).value == made.curve[-1].accuracy
    base_program, _ = compile_model(small, digits.calibration)
    program, weights = compile_model(loaded, digits.calibration, sparsity="public" if made.pruned else "secret")
    before, after = program_cost(base_program), program_cost(program)
    assert before.multiplications == made.before
    assert after.multiplications <= made.curve[-1].multiplications  # quantisation makes a few more zeros
    assert after.multiplications > 0.8 * made.curve[-1].multiplications
    if method != "projection":
        assert before.multiplications / after.multiplications >= 4.0
    found = compare(program, weights, digits.test, loaded)
    assert found.agreement.value > 0.97 and found.accuracy.value > 0.88
    assert ("training samples span" in made.reveals) == (method != "pruning")
    assert ("map of the connections" in made.reveals) == (method != "projection")
    if method != "pruning":
        columns = len(made.dictionary.samples)
        assert projection_of(loaded).shape == (columns, *digits.spec.shape) and program.wires[0].shape == (columns,)
        weight = dict(loaded.module.named_parameters())["fc1.weight"].detach().double().numpy()
        axes = projection_of(loaded).reshape(columns, -1)
        assert np.abs(weight - weight @ np.linalg.pinv(axes) @ axes).max() < 1e-5


def test_same_seed_same_network(digits, small):
    settings = dataclasses.replace(QUICK, steps=2, epochs=1, step_epochs=1)
    made = [compress(small, digits, settings=settings, rng=Rng(seed)).model.fingerprint() for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]


def test_convolutions_are_pruned_only(digits):
    model = trained(digits, 0, arch=B1, epochs=10)
    made = compress(model, digits, settings=dataclasses.replace(QUICK, fold=3.0), rng=Rng(0))
    assert made.dictionary is None and "no projection" in made.remark and made.curve[-1].fold >= 3.0
    program, _ = compile_model(made.model, digits.calibration, sparsity="public")
    assert program_cost(program).multiplications <= made.curve[-1].multiplications
    every = [step.weight_shape for step in program.steps if isinstance(step, Linear)]
    assert len(every) == 3 and not all(live.all() for live in program.live.values())
    with pytest.raises(InputError, match="first layer is linear"):
        compress(model, digits, settings=dataclasses.replace(QUICK, method="projection"), rng=Rng(0))


def test_a_fold_out_of_reach_gives_the_curve_and_a_network_within_the_loss(digits, small):
    settings = dataclasses.replace(QUICK, method="pruning", fold=400.0, max_loss=1.0, steps=6)
    made = compress(small, digits, settings=settings, rng=Rng(0))
    assert not made.reached
    assert len(made.curve) == 7 and made.curve[5].fold >= 400.0
    last = made.curve[-1]
    assert 1.0 < last.fold < 400.0 and made.model.accuracy(digits.calibration).value == last.accuracy
    assert last.accuracy >= made.calibration_accuracy - 0.03 > made.curve[5].accuracy


def test_what_cannot_be_pruned_is_refused(digits):
    tied = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 10))
    tied[3].weight = tied[1].weight
    computed = nn.Sequential(nn.Flatten(), nn.utils.parametrizations.weight_norm(nn.Linear(64, 10)))
    for module, message in ((tied, "shared"), (computed, "parametriz"), (nn.Flatten(), "linear or convolutional")):
        spec = digits.spec if module is not computed else InputSpec((1, 8, 8), 10)
        with pytest.raises(InputError, match=message):
            add_masks(Classifier(module, spec).module)


def test_masked_weights_stay_zero_in_training(digits, small):
    from deepseal.adapter import Recipe, train

    model = small.copy()
    add_masks(model.module)
    masks(model.module)["fc1"][::2] = 0
    after = train(model, digits.train, recipe=Recipe(epochs=2, weight_decay=0.1, optimizer="adamw"), rng=Rng(0))
    weight = after.module.fc1.weight
    assert bool((weight[::2] == 0).all()) and bool((weight[1::2] != model.module.fc1.weight[1::2]).any())
