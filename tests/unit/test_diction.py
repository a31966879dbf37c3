"""DICTION: the mark on digits, the extractor, and damaged keys."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from models import trained
from scipy import stats

from deepseal.adapter import InputSpec, initialise
from deepseal.attacks import REMOVAL
from deepseal.errors import InputError
from deepseal.rng import Rng
from deepseal.watermark import Key, embed, extract, verify
from deepseal.watermark.diction import Diction, extractor_of
from deepseal.watermark.diction_extractor import Extractor
from deepseal.watermark.verify import strangers
from deepseal.watermark.verify_aligned import verify_aligned


@pytest.fixture(scope="module")
def own(base, digits):
    return Diction().keygen(base, digits.train, owner="Example Ltd", rng=Rng(0))


@pytest.fixture(scope="module")
def copy(base, digits, own):
    return embed(base, digits.train, own, rng=Rng(1))


def test_marks_every_bit_and_keeps_accuracy(own, copy, base, digits):
    result = verify(copy, own, max_false_positive=1e-9)
    assert (result.verdict, result.bits, result.bit_errors, result.message) == ("owned", 256, 0, "Example Ltd")
    assert result.published.accepts
    assert copy.accuracy(digits.test).value >= base.accuracy(digits.test).value - 0.01


def test_independent_models_read_coins(own, digits):
    results = [verify(trained(digits, 400 + index, epochs=3), own) for index in range(8)]
    assert [result.verdict for result in results] == ["not-owned"] * 8
    assert stats.binomtest(sum(result.bit_errors for result in results), 8 * 256, 0.5).pvalue > 1e-4


def test_fresh_secrets_read_coins_from_the_marked_model(own, copy):
    errors = strangers(copy, own, 1000)[:, 0]
    low, high = stats.chi2.interval(0.999, 999)
    assert abs(errors.mean() - 128) < 4 * 8 / np.sqrt(1000)
    assert low / 999 < errors.var(ddof=1) / 64 < high / 999


def test_an_extractor_chosen_after_the_model_meets_another_message(own, copy):
    """Whoever solves for an extractor that reads the message changes the key, and with it the message."""
    read = extract(copy, own).bits
    forged = dataclasses.replace(own, tensors={**own.tensors, "extractor.outer": own.tensors["extractor.outer"] + 1e-4})
    assert (extract(copy, forged).bits == read).mean() > 0.95
    assert verify(copy, forged).verdict == "not-owned"


def test_extractor_reads_any_message_that_is_added(own, base):
    """What it was trained for, on activations that it has not seen."""
    from deepseal.rng import expand_normal

    extractor = extractor_of(own)
    features, bits = extractor.sizes
    code = torch.from_numpy(expand_normal(own.secret, "extractor/code", (bits, features))) / np.sqrt(bits)
    spec, layer = base.spec, own.public["layers"][0]
    fresh = (0.5 + 0.25 * torch.randn(50, *spec.shape, generator=Rng(3).torch())).clamp(0, 1)
    a = base.features(fresh, [layer])[layer]
    messages = torch.randint(0, 2, (50, bits), generator=Rng(4).torch()) * 2.0 - 1.0
    shifted = a + a.norm(dim=1, keepdim=True) * messages @ code / np.sqrt(features)
    with torch.no_grad():
        agree = ((extractor(shifted) > 0) == (messages > 0)).float().mean()
    assert agree > 0.85


def test_extractor_is_its_formula():
    inner, outer, scale = torch.randn(4, 3), torch.randn(2, 4), torch.tensor([2.0])
    extractor, a = Extractor(inner, outer, scale), torch.randn(5, 3)
    assert torch.allclose(extractor(a), torch.relu(a / 2.0 @ inner.T) @ outer.T)
    again = Extractor.from_tensors(extractor.tensors())
    assert torch.equal(again(a), extractor(a))
    assert again.sizes == (3, 2)


def test_convolutions_with_normalisation(digits):
    model = initialise("deepseal.adapter.zoo:cnn", digits.spec, Rng(0))
    some = digits.train.take(torch.arange(300))
    key = Diction(bits=48, steps=150).keygen(model, some, owner="me", rng=Rng(0))
    assert verify(embed(model, some, key, rng=Rng(1)), key).verdict == "owned"


def test_permuted_neurons_hide_it_and_alignment_finds_it(own, copy, base, digits):
    moved = REMOVAL.build("permute", {}).remove(copy, digits.train, rng=Rng(4)).model
    assert verify(moved, own).verdict == "not-owned"
    assert verify_aligned(moved, own, base, max_false_positive=1e-9).verification.verdict == "owned"


def test_suspects_that_cannot_be_read(own, copy, digits):
    narrow = initialise("deepseal.adapter.zoo:mlp?hidden=(64,64)", digits.spec, Rng(0))
    with pytest.raises(InputError, match="512 features"):
        verify(narrow, own)
    with pytest.raises(InputError, match="with the key's layer"):
        verify(initialise("deepseal.adapter.zoo:wrn", digits.spec, Rng(0)), own)
    with pytest.raises(InputError, match="inputs of shape"):
        verify(initialise("deepseal.adapter.zoo:mlp", InputSpec(shape=(1, 9, 9), num_classes=10), Rng(0)), own)
    with pytest.raises(InputError, match="with its weights"):
        verify(copy.oracle(), own)
    silent = copy.copy()
    with torch.no_grad():
        for parameter in silent.module.parameters():
            parameter.zero_()
    assert verify(silent, own).verdict == "inconclusive"


@pytest.mark.parametrize("name", ["extractor.inner", "extractor.outer", "extractor.scale", "trigger_x"])
def test_a_damaged_key_is_one_clear_error(own, copy, name):
    cut = {key: value for key, value in own.tensors.items() if key != name}
    with pytest.raises(InputError, match="intact copy"):
        verify(copy, dataclasses.replace(own, tensors=cut))
    bad = dataclasses.replace(own, public={**own.public, "layers": []})
    with pytest.raises(InputError, match="intact copy"):
        verify(copy, Key.from_bytes(bad.to_bytes()))


def test_refuses_more_bits_than_activations(base, digits):
    with pytest.raises(InputError, match="at most 512 bits"):
        Diction(bits=600).keygen(base, digits.train, owner="me")
