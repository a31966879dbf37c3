"""Sparse codes against scikit-learn's, patch by patch, and the input defender that is built of them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.linear_model import orthogonal_mp
from torch import Tensor, nn

from deepseal.adapter import Classifier, Dataset, InputSpec, Split
from deepseal.defense.context import Reference, contexts, differentiable_context
from deepseal.defense.dictionary import Dictionary
from deepseal.defense.omp import code, residuals
from deepseal.errors import InputError
from deepseal.rng import Rng

SMALL = Dictionary(atoms=32, rounds=3, patches=600, patch=4)


def _atoms(count: int, width: int, seed: int = 0) -> Tensor:
    drawn = torch.randn(count, width, generator=Rng(seed).torch(), dtype=torch.float64)
    return drawn / drawn.norm(dim=1, keepdim=True)


@pytest.mark.parametrize(("nonzeros", "width"), [(1, 49), (5, 49), (32, 49), (9, 12)])
def test_codes_are_scikit_learns(nonzeros: int, width: int) -> None:
    atoms = _atoms(100, width)
    rows = torch.randn(700, width, generator=Rng(1).torch(), dtype=torch.float64)  # more than one block of rows
    found = code(rows, atoms, nonzeros)
    expected = orthogonal_mp(atoms.T.numpy(), rows.T.numpy(), n_nonzero_coefs=nonzeros).T
    np.testing.assert_allclose(found.dense(100).numpy(), expected, atol=1e-8)
    np.testing.assert_allclose(found.residual.numpy(), rows.numpy() - expected @ atoms.numpy(), atol=1e-9)
    torch.testing.assert_close(residuals(rows, atoms, nonzeros), found.residual)


def test_single_precision_leaves_as_little() -> None:
    atoms, rows = _atoms(225, 49), torch.randn(300, 49, generator=Rng(1).torch(), dtype=torch.float64)
    single = residuals(rows.float(), atoms.float(), 32).square().sum(dim=1)
    double = residuals(rows, atoms, 32).square().sum(dim=1)
    assert float((single.double().log() - double.log()).abs().median()) < 1e-4
    assert abs(float(single.mean()) / float(double.mean()) - 1.0) < 1e-3


def test_a_row_that_is_matched_leaves_nothing_whatever_comes_after() -> None:
    atoms = _atoms(20, 6)
    rows = torch.cat([atoms[:5] * 3.0, torch.randn(5, 6, generator=Rng(2).torch(), dtype=torch.float64)])
    found = code(rows, atoms, 20)  # more atoms than dimensions
    assert float(found.residual.abs().max()) < 1e-9
    assert bool(torch.isfinite(found.coefficients).all())
    torch.testing.assert_close(found.dense(20) @ atoms, rows, atol=1e-9, rtol=0.0)
    twice = torch.cat([atoms[:1], atoms[:1]])  # an atom that is there twice adds nothing
    assert code(rows[:1], twice, 2).coefficients.count_nonzero() == 1


def _model(shape: tuple[int, ...], bounds: tuple[float, float] = (0.0, 1.0), classes: int = 3) -> Classifier:
    torch.manual_seed(0)
    width = int(np.prod(shape))
    return Classifier(nn.Sequential(nn.Flatten(), nn.Linear(width, classes)), InputSpec(shape, classes, bounds))


def _slow(images: np.ndarray, predicted: list[int], bank: np.ndarray, patch: int, step: int, nonzeros: int) -> list:
    scores = []
    for image, label in zip(images, predicted, strict=True):
        errors, values = 0.0, 0
        height, width = image.shape[1:]
        tops, lefts = (
            [*range(0, n - patch + 1, step), *([n - patch] if (n - patch) % step else [])] for n in (height, width)
        )
        for top in tops:
            for left in lefts:
                row = image[:, top : top + patch, left : left + patch].reshape(-1)
                atoms = bank[label if len(bank) > 1 else 0]
                weights = orthogonal_mp(atoms.T, row, n_nonzero_coefs=nonzeros)
                errors += float(np.sum((row - weights @ atoms) ** 2))
                values += row.size
        scores.append(10 * np.log10(errors / values + 1e-10))
    return scores


@pytest.mark.parametrize(("shape", "step"), [((1, 10, 9), 4), ((3, 8, 8), 2), ((2, 11, 6), 3)])
@pytest.mark.parametrize("shared", [True, False])
def test_score_is_the_signal_to_noise_ratio_patch_by_patch(shape: tuple[int, ...], step: int, shared: bool) -> None:
    model = _model(shape, bounds=(-1.0, 3.0))
    x = torch.rand(40, *shape, generator=Rng(3).torch(), dtype=torch.float64) * 4.0 - 1.0
    detector = Dictionary(atoms=30, rounds=2, patch=4, stride=step, nonzeros=3, shared=shared).placed(model)
    state = detector.fit(Reference(model, Split(x, torch.arange(40) % 3)), rng=Rng(0))
    state = {"atoms": state["atoms"].double()}
    (context,) = contexts(model, x, ())
    bank = state["atoms"].numpy()
    expected = _slow((x.numpy() + 1.0) / 4.0, context.predicted.tolist(), bank, 4, step, 3)
    np.testing.assert_allclose(detector.score(context, state).numpy(), expected, atol=1e-6)


def test_gradient_is_that_of_finite_differences() -> None:
    model = _model((1, 8, 8))
    model.module.double()
    x = torch.rand(6, 1, 8, 8, generator=Rng(4).torch(), dtype=torch.float64)
    detector = Dictionary(atoms=30, rounds=2, patch=4, nonzeros=3, stride=3).placed(model)
    clean = torch.rand(60, 1, 8, 8, generator=Rng(7).torch(), dtype=torch.float64)
    state = detector.fit(Reference(model, Split(clean, torch.arange(60) % 3)), rng=Rng(0))
    leaf = x.clone().requires_grad_(True)
    scores = detector.score(differentiable_context(model, leaf, (), surrogate="identity"), state)
    (gradient,) = torch.autograd.grad(scores.sum(), leaf)
    along = torch.randn(x.shape, generator=Rng(5).torch(), dtype=torch.float64)
    ends = []
    for step in (1e-6, -1e-6):
        (context,) = contexts(model, x + step * along, ())
        ends.append(detector.score(context, state))
    slopes = (ends[0] - ends[1]) / 2e-6
    torch.testing.assert_close((gradient * along).flatten(1).sum(dim=1), slopes, rtol=1e-4, atol=1e-4)


def test_each_score_is_of_its_own_input_alone(base: Classifier, digits: Dataset) -> None:
    detector = SMALL.placed(base)
    state = detector.fit(Reference(base, digits.train), rng=Rng(0))
    x = digits.test.tensor[:40]
    (together,) = contexts(base, x, ())
    alone = torch.cat([detector.score(context, state) for context in contexts(base, x, (), batch=1)])
    torch.testing.assert_close(detector.score(together, state), alone, rtol=1e-4, atol=1e-3)


def test_learning_matches_unseen_images_better_and_tells_noise(base: Classifier, digits: Dataset) -> None:
    drawn, learned = (Dictionary(atoms=32, rounds=rounds, patch=4).placed(base) for rounds in (0, 6))
    scores = {}
    for detector in (drawn, learned):
        state = detector.fit(Reference(base, digits.train), rng=Rng(0))
        assert torch.allclose(state["atoms"].norm(dim=2), torch.tensor(1.0), atol=1e-4)
        (context,) = contexts(base, digits.test.tensor, (), batch=10_000)
        scores[detector.rounds] = detector.score(context, state)
    assert float(scores[6].mean()) < float(scores[0].mean()) - 0.5  # decibels
    noise = torch.rand(len(digits.test), *base.spec.shape, generator=Rng(1).torch()) * base.spec.bounds[1]
    (context,) = contexts(base, noise, (), batch=10_000)
    assert float(learned.score(context, state).min()) > float(scores[6].median())


def test_a_class_without_samples_has_the_dictionary_of_all(base: Classifier, digits: Dataset) -> None:
    some = digits.train.take(torch.nonzero(digits.train.y != 9).reshape(-1))
    state = SMALL.placed(base).fit(Reference(base, some), rng=Rng(0))
    assert state["atoms"].shape == (10, 32, 16)
    (context,) = contexts(base, digits.test.tensor[:50], ())
    assert 9 in context.predicted.tolist()
    assert bool(torch.isfinite(SMALL.placed(base).score(context, state)).all())


def test_fewer_patches_than_atoms_and_blank_or_constant_images() -> None:
    model = _model((1, 8, 8))
    x = torch.rand(3, 1, 8, 8, generator=Rng(6).torch())
    detector = Dictionary(atoms=100, patch=4).placed(model)
    state = detector.fit(Reference(model, Split(x, torch.arange(3))), rng=Rng(0))
    probes = torch.cat([torch.zeros(1, 1, 8, 8), torch.full((1, 1, 8, 8), 0.5), x])
    (context,) = contexts(model, probes, ())
    scores = detector.score(context, state)
    assert bool(torch.isfinite(scores).all())
    assert float(scores[0]) == pytest.approx(-100.0)  # matched exactly
    blank = Reference(model, Split(torch.zeros(3, 1, 8, 8), torch.arange(3)))
    with pytest.raises(InputError, match="not blank"):
        detector.fit(blank, rng=Rng(0))


def test_same_seed_same_dictionary(base: Classifier, digits: Dataset) -> None:
    reference = Reference(base, digits.train)
    first, second, other = (SMALL.placed(base).fit(reference, rng=Rng(seed))["atoms"] for seed in (0, 0, 1))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_what_is_no_image_is_refused_and_small_images_get_small_patches(base: Classifier) -> None:
    flat = Classifier(nn.Linear(5, 2), InputSpec((5,), 2))
    with pytest.raises(InputError, match="images of shape"):
        Dictionary().placed(flat)
    assert Dictionary(patch=64).placed(base).patch == min(base.spec.shape[1:])
