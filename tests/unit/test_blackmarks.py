"""BlackMarks: clusters, keys, coins, votes."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from models import trained
from scipy import stats

from deepseal.adapter import Classifier, InputSpec, Oracle, Recipe, Split, train
from deepseal.adapter.training import Step
from deepseal.attacks import EVASION, QUERY, REMOVAL
from deepseal.errors import InputError
from deepseal.rng import Rng
from deepseal.watermark import Key, embed, extract, verify
from deepseal.watermark.blackmarks import BlackMarks, KeyLoss, balanced, class_means, k_means, log_odds, taught
from deepseal.watermark.scheme import Observation
from deepseal.watermark.verify import strangers

SECRET = bytes(range(32))
QUICK = BlackMarks(bits=32, votes=7, strength=0.3, steps=500)


@pytest.fixture(scope="module")
def independent(digits):
    return [trained(digits, 500 + index) for index in range(3)]


@pytest.fixture(scope="module")
def made(base, digits, independent):
    key = QUICK.keygen(base, digits.train, owner="Own", rng=Rng(0), independent=independent)
    return key, embed(base, digits.train, key, rng=Rng(1))


@pytest.fixture(scope="module")
def hardened(digits):
    """Innocents that undo adversarial keys: trained on PGD images, on noise, as a student; and strangers."""
    models = [trained(digits, 700 + index) for index in range(4)]
    start = trained(digits, 710, epochs=3)
    bent = EVASION.build("pgd", {"epsilon": 0.15, "steps": 7}).perturb(start, digits.train, rng=Rng(0)).x
    noisy = (digits.train.x + 0.3 * torch.randn(digits.train.x.shape, generator=Rng(1).torch())).clamp(0, 1)
    for x in (bent, noisy):
        both = Split(torch.cat([digits.train.x, x]), digits.train.y.repeat(2))
        models.append(train(start, both, recipe=Recipe(epochs=8), rng=Rng(2)))
    taught_by = Split(digits.train.x, models[0].predict(digits.train.x))
    models.append(train(start, taught_by, recipe=Recipe(epochs=5), rng=Rng(3)))
    return models


def test_marks_and_reads_back(made, base, digits):
    key, marked = made
    result = verify(marked, key)
    assert (result.verdict, result.bit_errors, result.message) == ("owned", 0, "Own")
    assert result.published.accepts
    assert verify(base, key).verdict == "not-owned"
    assert marked.accuracy(digits.test).value >= base.accuracy(digits.test).value - 0.03


def test_settling_gives_the_task_back_what_marking_took(made, base, digits):
    """Updates on the task alone, after the marking: a lower loss on the task, the same bits; the paper has none."""
    key, marked = made
    assert QUICK.settling == 500 and BlackMarks(recipe="paper").settling == 0
    raw = dataclasses.replace(QUICK, settle=0)
    unsettled = embed(base, digits.train, dataclasses.replace(key, params=raw.as_dict()), rng=Rng(1))
    lost = [torch.nn.functional.cross_entropy(m.query(digits.train.x), digits.train.y) for m in (marked, unsettled)]
    assert lost[0] < lost[1]
    assert verify(marked, key).bit_errors == 0
    assert len(QUICK.embedding(base, digits.train, key, rng=Rng(1))) == 1000


def test_settling_is_no_marking(made, base, digits):
    key, _ = made
    loss = KeyLoss(base, key, QUICK)
    step = Step(
        base.module,
        digits.train.x[:4],
        digits.train.y[:4],
        torch.arange(4),
        lambda: base.query(digits.train.x[:4]),
        499,
        1000,
        Rng(0).torch(),
    )
    assert len(list(loss(step))) == 2
    assert len(list(loss(dataclasses.replace(step, index=500)))) == 1


def test_labels_are_all_it_needs(made):
    key, marked = made
    for output in ("labels", "probabilities", "logits"):
        oracle = marked.oracle(output=output)
        assert verify(oracle, key).bit_errors == 0
        assert oracle.queries == 32 * 7


def test_innocents_read_coins(made, hardened, base):
    """Also those on which the paper's keys read as marked; rates over strangers' keys, each a fresh draw."""
    key, _ = made
    assert [verify(model, key, max_false_positive=1e-4).verdict for model in hardened] == ["not-owned"] * len(hardened)
    for model in (base, *hardened[-3:]):
        errors, bits = strangers(model, key, 300).T
        assert (bits == 32).all()
        assert stats.binomtest(int(errors.sum()), 32 * 300, 0.5).pvalue > 1e-5
        assert (stats.binom.cdf(errors, 32, 0.5) <= 1e-2).sum() <= stats.binom.ppf(0.9999, 300, 1e-2)


def test_the_paper_s_keys_prove_nothing(base, digits, hardened):
    scheme = BlackMarks(recipe="paper", bits=24, steps=400, epsilon=0.15, models=1, overdraw=60)
    key = scheme.keygen(base, digits.train, owner="Own", rng=Rng(0))
    assert key.triggers == 24
    marked = embed(base, digits.train, key, rng=Rng(1))
    read = {name: verify(model, key) for name, model in (("marked", marked), ("base", base))}
    assert {name: result.published.accepts for name, result in read.items()} == {"marked": True, "base": False}
    assert read["marked"].verdict == "inconclusive"
    assert any("fixes the labels" in warning for warning in read["marked"].warnings)
    accused = [verify(model, key).published.accepts for model in hardened]
    assert any(accused), "hardened innocents should show why the paper's rule is not ours"


def test_survives_what_deployments_do(made, digits):
    key, marked = made
    for name, params in (("prune", {"sparsity": 0.6}), ("quantise", {}), ("quantise", {"format": "bfloat16"})):
        removed = REMOVAL.build(name, params).remove(marked, digits.train, rng=Rng(0))
        assert verify(removed.model, key).verdict == "owned", name
    noisy = QUERY.build("query-noise", {"deviation": 0.05}).wrap(marked, rng=Rng(0))
    assert verify(noisy, key).verdict == "owned"


def test_keys_lie_at_the_border_of_every_model(made, base, digits, independent):
    """Far nearer than their sources, on either side of it, within epsilon of them."""
    key, _ = made
    x, codes = key.tensors["trigger_x"], key.tensors["codes"]
    nearest, sources = torch.cdist(x.flatten(1), digits.train.tensor.flatten(1), p=float("inf")).min(dim=1)
    assert float(nearest.max()) <= QUICK.epsilon + 1e-5
    other = 1 - codes[digits.train.y[sources]]
    for model in (base, *independent):
        gaps = [log_odds(model.query(z), codes, other) for z in (digits.train.tensor[sources], x)]
        assert float(gaps[1].abs().mean()) < 0.5 * float(gaps[0].abs().mean())
        assert 0.2 < float((gaps[1] > 0).float().mean()) < 0.8


def test_coins_are_fair_independent_and_bound_to_the_key(made):
    key, _ = made
    drawn = np.stack([taught(stranger) for stranger in key.strangers(400)])
    assert stats.binomtest(int(drawn.sum()), drawn.size, 0.5).pvalue > 1e-4
    assert np.abs(np.corrcoef(drawn[:, :60].T) - np.eye(60)).max() < 0.25
    moved = dataclasses.replace(key, tensors={**key.tensors, "trigger_x": key.tensors["trigger_x"].flip(0)})
    assert 0.3 < (taught(moved) == taught(key)).mean() < 0.7


def test_votes_by_hand(made):
    """4 of 7 for the message is right, 3 is wrong; ties between classes do not vote; a tie of votes is an erasure."""
    key, _ = made
    bits = taught(key)
    one_of = [int(torch.nonzero(key.tensors["codes"] == bit)[0]) for bit in (0, 1)]
    labels = torch.tensor([one_of[bit] for bit in bits])
    clear = torch.ones(len(labels), dtype=torch.bool)
    flipped = torch.tensor([one_of[1 - bit] for bit in bits])
    for wrong, right_bit in ((0, True), (3, True), (4, False)):
        mixed = labels.clone()
        mixed[:wrong] = flipped[:wrong]
        read = QUICK.decode(Observation({"labels": mixed, "clear": clear}), key)
        assert (read.bits[0] == key.message()[0]) == right_bit
        assert read.margin[0] == pytest.approx((7 - 2 * wrong) / np.sqrt(7), rel=0.05)  # fair coins: 1 / sqrt(7)
        assert (read.bits[1:] == key.message()[1:]).all()
    clear[:1] = False
    mixed = labels.clone()
    mixed[:4] = flipped[:4]
    read = QUICK.decode(Observation({"labels": mixed, "clear": clear}), key)
    assert not read.usable[0]
    assert read.usable[1:].all()


def test_one_answer_for_all_is_no_mark(made, digits):
    key, _ = made
    for label in range(10):
        constant = Oracle(lambda x, label=label: torch.eye(10)[torch.full((len(x),), label)], digits.spec)
        assert verify(constant, key, max_false_positive=1e-4).verdict == "not-owned"
    silent = Oracle(lambda x: torch.zeros(len(x), 10), digits.spec, output="logits")
    result = verify(silent, key)
    assert (result.verdict, result.erasures) == ("inconclusive", 32)


class TestClusters:
    def test_balanced_halves_k_means(self, base, digits):
        means = class_means(base, digits.train)
        codes = balanced(means, SECRET)
        assert torch.bincount(codes).tolist() == [5, 5]
        assert means.shape == (10, 10)
        logits, y = base.query(digits.train.x), digits.train.y
        assert means[3] == pytest.approx(logits[y == 3].double().mean(dim=0).numpy(), abs=1e-9)

    def test_clusters_that_are_there_are_found(self):
        means = np.zeros((7, 7))
        means[[1, 2, 5]] += 10.0
        for codes in (k_means(means, SECRET), balanced(means, SECRET)):
            assert len({int(codes[c]) for c in (1, 2, 5)}) == 1
            assert abs(int(codes.sum()) - 3.5) == 0.5

    def test_a_class_without_samples_is_refused(self, base, digits):
        some = digits.train.take(torch.nonzero(digits.train.y != 4).reshape(-1))
        with pytest.raises(InputError, match=r"none of classes \[4\]"):
            QUICK.keygen(base, some, owner="me", independent=[base] * 3)


def test_log_odds_are_those_of_the_clusters():
    logits = torch.randn(50, 6, generator=Rng(0).torch())
    codes = torch.tensor([0, 1, 1, 0, 1, 0])
    bits = torch.arange(50) % 2
    p = logits.double().softmax(dim=1)
    own = torch.stack([p[i, codes == bits[i]].sum() for i in range(50)])
    expected = torch.log(own / (1 - own))
    assert torch.allclose(log_odds(logits, codes, bits).double(), expected, atol=1e-5)


def test_the_loss_is_a_hinge_on_the_bits(base, digits, made):
    key, _ = made
    scheme = dataclasses.replace(QUICK, drift=0.0, batch=4096)
    gap = log_odds(base.query(key.tensors["trigger_x"]), key.tensors["codes"], torch.from_numpy(taught(key)).long())
    loss = KeyLoss(base, key, scheme).taught(base.query(key.tensors["trigger_x"]), torch.arange(32 * 7))
    assert float(loss) == pytest.approx(float((5.0 - gap).clamp_min(0).mean()), rel=1e-5)


def test_too_few_independent_models_are_refused(base, digits, independent):
    with pytest.raises(InputError, match="3 independent models with weights"):
        QUICK.keygen(base, digits.train, owner="me", independent=independent[:2])
    with pytest.raises(InputError, match="3 independent models with weights"):
        QUICK.keygen(base, digits.train, owner="me", independent=[model.oracle() for model in independent])


@pytest.mark.parametrize("codes", [torch.zeros(10), torch.arange(10), torch.tensor([0, 1]), torch.ones(10).long()])
def test_damaged_clusters_are_one_clear_error(codes, made):
    key, marked = made
    damaged = Key.from_bytes(dataclasses.replace(key, tensors={**key.tensors, "codes": codes}).to_bytes())
    with pytest.raises(InputError, match="intact copy"):
        verify(marked, damaged)


def test_inputs_that_are_no_images_and_two_classes():
    generator = Rng(0).torch()
    y = torch.arange(400) % 2
    x = (torch.rand(400, 12, generator=generator) + 0.5 * y[:, None] - 0.5).clamp(-1, 1)
    spec = InputSpec(shape=(12,), num_classes=2, bounds=(-1.0, 1.0))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(12, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2))
    model = train(Classifier(net, spec), Split(x, y), recipe=Recipe(epochs=20), rng=Rng(0))
    key = BlackMarks(bits=24, votes=5, steps=600).keygen(model, Split(x, y), owner="me", rng=Rng(0))
    assert key.public["cluster_sizes"] == [1, 1]
    assert extract(model, key).chance.tolist() == [0.5] * 24
    assert verify(embed(model, Split(x, y), key, rng=Rng(0)), key, max_false_positive=1e-3).verdict == "owned"
