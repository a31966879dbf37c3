"""Marks in the weights: Uchida and the hash-bound one."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from models import trained
from scipy import stats

from deepseal.adapter import Classifier, InputSpec, initialise
from deepseal.attacks import REMOVAL
from deepseal.errors import InputError
from deepseal.rng import Rng
from deepseal.watermark import SCHEMES, Key, embed, extract, verify
from deepseal.watermark.hash_bound import HashBound, filtered
from deepseal.watermark.scheme import scheme_of
from deepseal.watermark.uchida import Uchida
from deepseal.watermark.verify import strangers
from deepseal.watermark.verify_aligned import verify_aligned
from deepseal.watermark.weights import projection_of

NAMES = ("uchida", "hash-bound")


@pytest.fixture(scope="module")
def marks(base, digits):
    """Key and marked model of each scheme."""
    made = {}
    for name in NAMES:
        key = SCHEMES.build(name, {}).keygen(base, digits.train, owner="Example Ltd", rng=Rng(0))
        made[name] = key, embed(base, digits.train, key, rng=Rng(1))
    return made


@pytest.mark.parametrize("name", NAMES)
class TestBoth:
    def test_marks_every_bit_and_keeps_accuracy(self, name, marks, base, digits):
        key, marked = marks[name]
        result = verify(marked, key, max_false_positive=1e-9)
        spelled = "Example Ltd" if key.bits >= 88 else None  # a longer text than the bits is there as its digest
        assert (result.verdict, result.bits, result.bit_errors, result.message) == ("owned", key.bits, 0, spelled)
        assert result.published.accepts
        assert marked.accuracy(digits.test).value >= base.accuracy(digits.test).value - 0.01

    def test_independent_models_are_not_owned(self, name, marks, digits):
        key, _ = marks[name]
        results = [verify(trained(digits, 200 + index, epochs=3), key) for index in range(8)]
        assert [result.verdict for result in results] == ["not-owned"] * 8
        # Networks of one kind share what their weights have in common, so their wrong bits are not pooled.
        assert all(stats.binomtest(result.bit_errors, key.bits, 0.5).pvalue > 1e-4 for result in results)
        assert not any(result.published.accepts for result in results)

    def test_fresh_keys_are_at_chance_on_the_marked_model(self, name, marks):
        """Forging by search: nobody chooses message or projection, so every trial is fresh coins."""
        key, marked = marks[name]
        errors = strangers(marked, key, 1000)[:, 0]
        low, high = stats.chi2.interval(0.999, 999)
        assert abs(errors.mean() - key.bits / 2) < 4 * np.sqrt(key.bits / 4 / 1000)
        assert low / 999 < errors.var(ddof=1) / (key.bits / 4) < high / 999
        assert stats.binom.cdf(errors.min(), key.bits, 0.5) > 1e-7

    def test_a_forger_cannot_choose_the_rest_of_the_key_either(self, name, marks, base):
        """With a secret of their own, whoever has read the model can vary text, parameters and layer: all coins."""
        key, marked = marks[name]
        rates = []
        for index in range(100):
            changed = {"owner": f"Thief {index}", "params": {**key.params, "strength": 1.0 + index}}
            forged = dataclasses.replace(key, secret=bytes(32), **changed)
            read = extract(marked, forged)
            rates.append((read.bits != forged.message()).mean())
        assert abs(np.mean(rates) - 0.5) < 4 * 0.5 / np.sqrt(100 * key.bits)

    def test_survives_rounding_to_bfloat16(self, name, marks):
        key, marked = marks[name]
        half = marked.copy()
        half.module.to(torch.bfloat16)
        assert verify(half, key, max_false_positive=1e-9).verdict == "owned"

    def test_permuted_neurons_hide_it_and_alignment_finds_it(self, name, marks, base, digits):
        key, marked = marks[name]
        moved = REMOVAL.build("permute", {}).remove(marked, digits.train, rng=Rng(4)).model
        assert verify(moved, key).verdict == "not-owned"
        assert verify_aligned(moved, key, base, max_false_positive=1e-9).verification.verdict == "owned"
        innocent = verify_aligned(trained(digits, 250, epochs=3), key, base).verification
        assert innocent.verdict != "owned"

    def test_paper_recipe_embeds_too(self, name, base, digits):
        key = SCHEMES.build(name, {"recipe": "paper", "bits": 64}).keygen(base, digits.train, owner="me", rng=Rng(0))
        assert verify(embed(base, digits.train, key, rng=Rng(1)), key).verdict == "owned"

    def test_a_suspect_of_another_shape_is_refused(self, name, marks, digits):
        key, _ = marks[name]
        narrow = initialise("deepseal.adapter.zoo:mlp?hidden=(64,64)", digits.spec, Rng(0))
        with pytest.raises(InputError, match="weights of shape"):
            verify(narrow, key)
        foreign = initialise("deepseal.adapter.zoo:wrn", digits.spec, Rng(0))
        with pytest.raises(InputError, match="with the key's layer"):
            verify(foreign, key)
        with pytest.raises(InputError, match="with its weights"):
            verify(foreign.oracle(), key)

    def test_zero_and_nan_weights_are_erasures(self, name, marks):
        key, marked = marks[name]
        for value in (0.0, float("nan")):
            broken = marked.copy()
            with torch.no_grad():
                broken.module.get_submodule(key.public["layers"][0]).weight.fill_(value)
            assert verify(broken, key).verdict == "inconclusive"

    def test_a_convolution_holds_it(self, name, digits):
        model = initialise("deepseal.adapter.zoo:cnn", digits.spec, Rng(0))
        scheme = SCHEMES.build(name, {"layer": "conv3", "bits": 64, "steps": 100})
        key = scheme.keygen(model, digits.train, owner="me", rng=Rng(0))
        some = digits.train.take(torch.arange(200))
        assert verify(embed(model, some, key, rng=Rng(1)), key, max_false_positive=1e-9).verdict == "owned"

    @pytest.mark.parametrize(
        "change",
        [
            {"layers": []},
            {"layers": [3]},
            {"shape": [1, 2]},
            {"shape": "x"},
            {"features": 0},
            {"features": 10**9},
            {"bits": 90_000},
        ],
    )
    def test_a_damaged_key_is_one_clear_error(self, name, marks, change):
        key, marked = marks[name]
        damaged = Key.from_bytes(dataclasses.replace(key, public={**key.public, **change}).to_bytes())
        with pytest.raises(InputError):
            verify(marked, damaged)

    def test_refuses_more_bits_than_there_is_room(self, name, base, digits):
        with pytest.raises(InputError, match="bits in layer"):
            SCHEMES.build(name, {"bits": 50_000}).keygen(base, digits.train, owner="me")
        with pytest.raises(InputError, match="known layer"):
            SCHEMES.build(name, {"layer": "fc9"}).keygen(base, digits.train, owner="me")
        with pytest.raises(InputError, match="without weights"):
            SCHEMES.build(name, {"layer": "act1"}).keygen(base, digits.train, owner="me")


def test_uchida_reads_the_mean_over_outputs(base, digits):
    key = Uchida().keygen(base, digits.train, owner="me", rng=Rng(3))
    weight = base.module.get_submodule(key.public["layers"][0]).weight.detach().double().numpy()
    mean = weight.sum(axis=0) / weight.shape[0]
    bits = [int(np.dot(row, mean) > 0) for row in projection_of(key)]
    assert extract(base, key).bits.tolist() == bits
    assert Uchida().width((64, 32, 3, 3)) == 288


def test_filter_keeps_what_lies_beside_a_one_in_every_round(base, digits):
    key = HashBound(bits=8).keygen(base, digits.train, owner="me", rng=Rng(3))
    message = key.message().tolist()
    kept = list(range(100))
    for _ in range(3):
        kept = [position for place, position in enumerate(kept) if message[place % 8] == 1]
    assert filtered(key, 100, 3).tolist() == kept


def test_two_keys_share_few_weights(base, digits):
    """r rounds of filtering leave two keys 2^-r of each other's weights, up to chance."""
    keys = [HashBound().keygen(base, digits.train, owner="me", rng=Rng(seed)) for seed in range(6)]
    kept = [set(filtered(key, 512 * 512, 4).tolist()) for key in keys]
    shared = [len(a & b) / len(a) for index, a in enumerate(kept) for b in kept[:index]]
    assert 0.5 * 2**-4 < np.mean(shared) < 2 * 2**-4


def test_a_second_hash_bound_mark_leaves_the_first(marks, digits):
    key, marked = marks["hash-bound"]
    other = HashBound().keygen(marked, digits.train, owner="thief", rng=Rng(9))
    overwritten = embed(marked, digits.train, other, rng=Rng(10))
    assert verify(overwritten, other).verdict == "owned"
    assert verify(overwritten, key, max_false_positive=1e-9).verdict == "owned"


def test_an_empty_filter_reads_nothing():
    spec = InputSpec(shape=(4,), num_classes=2)
    module = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 2))
    public = {"access": "white-box", "bits": 1, "layers": ["0"], "shape": [8, 4], "features": 1}
    for index in range(20):
        key = Key(scheme="hash-bound", params={}, owner="", secret=bytes([index] * 32), spec=spec, public=public)
        if key.message()[0] == 0:
            break
    read = extract(Classifier(module, spec), key)
    assert not read.usable.any()
    assert scheme_of(key).name == "hash-bound"
