"""Marks in answers to triggers: Adi, Zhang, Le Merrer, DeepSigns black box, EWE."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from models import trained
from scipy import stats
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Oracle, Recipe, Split, initialise, train
from deepseal.errors import InputError
from deepseal.rng import Rng
from deepseal.statistics import rate
from deepseal.watermark import SCHEMES, Key, embed, extract, images, verify
from deepseal.watermark.adi import Adi
from deepseal.watermark.deepsigns_blackbox import DeepSignsBlackBox
from deepseal.watermark.ewe import EWE, soft_nearest_neighbour
from deepseal.watermark.independent import fresh, independent_models
from deepseal.watermark.latent_density import LatentDensity
from deepseal.watermark.le_merrer import LeMerrer, signed_gradient_step
from deepseal.watermark.robust import weathered, weathered_features
from deepseal.watermark.scheme import scheme_of
from deepseal.watermark.triggers import TriggerLoss, labels_of
from deepseal.watermark.verify import strangers
from deepseal.watermark.zhang import Zhang

NAMES = ("adi", "zhang", "le-merrer", "deepsigns-blackbox", "ewe")
SECRET = bytes(range(32))
QUICK = {"steps": 400, "drift": 0.3}


@pytest.fixture(scope="module")
def marks(base, digits):
    """Key and marked model of each scheme, marked more briefly and through less noise than by default."""
    made = {}
    for name in NAMES:
        key = SCHEMES.build(name, QUICK).keygen(base, digits.train, owner="Example Ltd", rng=Rng(0))
        made[name] = key, embed(base, digits.train, key, rng=Rng(1))
    return made


@pytest.fixture(scope="module")
def others(digits):
    return [trained(digits, 300 + index, epochs=3) for index in range(6)]


def constant(label: int, spec: InputSpec) -> Oracle:
    """A model that answers everything with its favourite class."""
    return Oracle(lambda x: torch.eye(spec.num_classes)[torch.full((len(x),), label)], spec)


@pytest.mark.parametrize("name", NAMES)
class TestEveryOne:
    def test_marks_and_keeps_accuracy(self, name, marks, base, digits):
        key, marked = marks[name]
        result = verify(marked, key)
        assert (result.verdict, result.bit_errors, result.erasures) == ("owned", 0, 0)
        assert result.published.accepts
        assert result.message == ("Example Ltd" if name == "le-merrer" else None)
        # 1,200 training images beside 256 triggers; on 10,000 of MNIST none of the points is lost (benchmarks)
        assert marked.accuracy(digits.test).value >= base.accuracy(digits.test).value - 0.06

    @pytest.mark.parametrize("output", ["labels", "probabilities", "logits"])
    def test_answers_are_all_it_needs(self, name, marks, output):
        key, marked = marks[name]
        oracle = marked.oracle(output=output)
        result = verify(oracle, key)
        assert (result.verdict, result.bit_errors) == ("owned", 0)
        assert oracle.queries == len(key.tensors["trigger_x"])

    def test_independent_models_are_not_owned(self, name, marks, base, others):
        key, _ = marks[name]
        results = [verify(model, key, max_false_positive=1e-3) for model in (base, *others)]
        assert [result.verdict for result in results] == ["not-owned"] * 7

    def test_fresh_keys_are_rejected_as_often_as_promised(self, name, marks, base):
        key, marked = marks[name]
        for model in (marked, base):
            errors, bits = strangers(model, key, 1000).T
            chance = extract(model, key).chance[0]
            level = stats.binom.cdf(errors, bits, 1 - chance)
            assert level.min() > 1e-7
            assert (level <= 1e-2).sum() <= stats.binom.ppf(0.999, 1000, 1e-2)

    @pytest.mark.parametrize("label", [0, 3])
    def test_a_favourite_class_is_no_mark(self, name, marks, label, digits):
        """A model with one answer for all agrees with 1 / C of random labels, and a fixed label could be its own."""
        key, _ = marks[name]
        suspect = constant(label, digits.spec)
        assert verify(suspect, key, max_false_positive=1e-3).verdict != "owned"
        errors, bits = strangers(suspect, key, 300).T
        rates = 1 - extract(suspect, key).chance[0]
        assert errors.sum() / bits.sum() > rates - 4 * np.sqrt(rates * (1 - rates) / bits.sum())

    def test_ties_and_nan_are_erasures(self, name, marks, digits):
        key, _ = marks[name]
        for value in (0.0, float("nan")):
            silent = Oracle(lambda x, value=value: torch.full((len(x), 10), value), digits.spec, output="logits")
            result = verify(silent, key)
            assert (result.verdict, result.erasures) == ("inconclusive", key.bits)

    def test_another_task_is_refused(self, name, marks):
        key, _ = marks[name]
        for spec in (InputSpec(shape=(1, 9, 9), num_classes=10), InputSpec(shape=(1, 8, 8), num_classes=4)):
            with pytest.raises(InputError, match="a model with inputs of shape"):
                verify(initialise("deepseal.adapter.zoo:mlp", spec, Rng(0)), key)

    @pytest.mark.parametrize(
        "change",
        [
            {"votes": 0},
            {"votes": "x"},
            {"votes": 3},
            {"bits": 7},
            {"zero_bit": "flipped"},
        ],
    )
    def test_a_damaged_key_is_one_clear_error(self, name, marks, change):
        key, marked = marks[name]
        change = {"zero_bit": not key.zero_bit} if "zero_bit" in change else change
        damaged = Key.from_bytes(dataclasses.replace(key, public={**key.public, **change}).to_bytes())
        with pytest.raises(InputError, match="intact copy"):
            verify(marked, damaged)

    def test_labels_that_are_no_classes_are_refused(self, name, marks):
        key, marked = marks[name]
        for tensor in ("avoided", "sides", "trigger_y", "independent_y"):
            shape = {"sides": (key.bits, 2), "independent_y": (2, len(key.tensors["trigger_x"]))}.get(tensor, key.bits)
            for wrong in (torch.full(torch.Size(np.atleast_1d(shape)), 99), torch.zeros(3, dtype=torch.int64)):
                damaged = dataclasses.replace(key, tensors={**key.tensors, tensor: wrong})
                with pytest.raises(InputError, match="intact copy"):
                    verify(marked, damaged)

    def test_inputs_that_are_no_images(self, name):
        rng = np.random.default_rng(0)
        y = torch.from_numpy(np.arange(600) % 3)
        x = torch.from_numpy(rng.random((600, 20), dtype=np.float32))
        data = Split((x * 2 + y[:, None] * 0.6 - 1).clamp(-1, 2), y)
        start = initialise(
            "deepseal.adapter.zoo:mlp", InputSpec(shape=(20,), num_classes=3, bounds=(-1.0, 2.0)), Rng(0)
        )
        model = train(start, data, recipe=Recipe(epochs=5), rng=Rng(0))
        key = SCHEMES.build(name, {"steps": 400}).keygen(model, data, owner="me", rng=Rng(0))
        assert verify(model, key).verdict == "not-owned"
        assert verify(embed(model, data, key, rng=Rng(0)), key).verdict == "owned"


def test_labels_are_uniform_and_bound_to_the_images(marks):
    key, _ = marks["adi"]
    drawn = np.concatenate([labels_of(stranger)[0] for stranger in key.strangers(200)])
    assert stats.chisquare(np.bincount(drawn, minlength=10)).pvalue > 1e-4
    moved = dataclasses.replace(key, tensors={"trigger_x": key.tensors["trigger_x"].flip(0)})
    assert (labels_of(moved)[0] == labels_of(key)[0]).mean() < 0.3


def test_a_vote_s_margin_is_the_gap_of_the_image_that_turns_it(digits):
    """Three images a group, two classes: gaps of class 0 in one group 5, 1, -2 (it wins, and by one image of gap 1)."""
    gaps = torch.tensor([[5.0, 1.0, -2.0], [-4.0, -1.0, 3.0], [6.0, 2.0, 4.0]])
    spec = InputSpec(shape=(1,), num_classes=2)
    x = torch.arange(9.0).reshape(9, 1) / 9
    public = {"access": "black-box", "zero_bit": True, "bits": 3, "votes": 3, "independent_models": 0}
    tensors = {"trigger_x": x, "trigger_y": torch.zeros(3, dtype=torch.int64)}
    key = Key(scheme="adi", params={}, owner="", secret=SECRET, spec=spec, public=public, tensors=tensors)
    answers = torch.stack([gaps.flatten(), torch.zeros(9)], dim=1)
    suspect = Oracle(lambda x: answers, spec, output="logits")
    read = extract(suspect, key)
    assert read.bits.tolist() == [1, 0, 1]
    gap = np.array([1.0, -1.0, 4.0])  # two of three go over before the last group turns
    assert read.margin == pytest.approx(gap / np.std([*gap, *-gap]))
    labels = Oracle(lambda x: answers, spec)
    share = np.array([1.0, -1.0, 3.0]) / 3
    assert extract(labels, key).margin == pytest.approx(share / np.std([*share, *-share]))


def test_avoided_classes_are_avoided(marks):
    key, _ = marks["zhang"]
    for stranger in (key, *key.strangers(50)):
        labels, chance = labels_of(stranger)
        assert not (labels == key.tensors["avoided"].numpy()).any()
        assert chance == pytest.approx(1 / 9)


def test_independent_models_raise_the_chance(base, digits):
    """To the 99 % upper end of what the worst of them agrees with."""
    judges = [constant(label, digits.spec) for label in range(4)]
    key = Adi().keygen(base, digits.train, owner="me", rng=Rng(0), independent=judges)
    labels, chance = labels_of(key)
    agreed = max(int((labels == label).sum()) for label in range(4))
    assert chance == pytest.approx(rate(agreed, 100, 0.98).high)
    assert chance > 0.1
    assert key.public["independent_models"] == 4
    foreign = constant(0, InputSpec(shape=(3,), num_classes=10))
    with pytest.raises(InputError, match="a model with inputs of shape"):
        Adi().keygen(base, digits.train, owner="me", independent=[foreign])


def test_triggers_leave_the_statistics_of_normalisation_to_the_data(digits):
    model = initialise("deepseal.adapter.zoo:cnn", digits.spec, Rng(0))
    some = digits.train.take(torch.arange(200))
    key = Adi(steps=1, rounds=1).keygen(model, some, owner="me", rng=Rng(0))
    marked = embed(model, some, key, rng=Rng(1)).module
    recipe = Recipe(steps=1, learning_rate=1e-3, schedule="cosine")
    plain = train(model, some, recipe=recipe, rng=Rng(1)).module
    assert torch.equal(marked.norm1.running_mean, plain.norm1.running_mean)
    assert not torch.equal(marked.norm1.running_mean, model.module.norm1.running_mean)


def test_noise_is_on_the_weights_and_statistics_stay(digits, no_trace):
    """Without drift: the answers in evaluation mode, running statistics too; with it they spread and gradients flow."""
    model = initialise("deepseal.adapter.zoo:cnn", digits.spec, Rng(0))
    x = digits.test.x[:6]
    with no_trace(model):
        with weathered(model.module, prune=0.0, drift=0.0, generator=Rng(0).torch()):
            still = model.module(model.prepare(x))
        assert torch.allclose(still.detach(), model.query(x), atol=1e-5)
        name = ["fc1"]
        kept = {"prune": 0.0, "drift": 0.0, "generator": Rng(0).torch()}
        with weathered_features(model.module, model.prepare(x), name, running_statistics=True, **kept) as features:
            read = features["fc1"].detach()
        assert torch.allclose(read, model.features(x, name)["fc1"], atol=1e-5)
        with weathered_features(model.module, model.prepare(x), name, **kept) as features:
            assert not torch.allclose(features["fc1"].detach(), read, atol=1e-2)
        with weathered(model.module, prune=0.0, drift=0.5, generator=Rng(0).torch()):
            noisy = model.module(model.prepare(x))
        assert not torch.allclose(noisy.detach(), still.detach(), atol=1e-3)
        (gradient,) = torch.autograd.grad(noisy.sum(), model.module.conv1.weight)
    assert gradient.abs().sum() > 0


def test_the_loss_reads_the_key_s_labels(base, digits):
    """Without drift it is the plain cross-entropy of the triggers' labels."""
    scheme = Adi(drift=0.0, batch=1000)
    key = scheme.keygen(base, digits.train, owner="me", rng=Rng(0))
    step = _step(base, digits)
    expected = nn.functional.cross_entropy(
        base.query(key.tensors["trigger_x"]), torch.from_numpy(labels_of(key)[0])
    ) + nn.functional.cross_entropy(step.logits, step.y)
    assert sum(float(term.detach()) for term in TriggerLoss(base, key, scheme)(step)) == pytest.approx(
        float(expected.detach()), rel=1e-5
    )


@pytest.mark.parametrize(
    ("scheme", "settling"), [(Zhang, 150), (DeepSignsBlackBox, 500), (Adi, 0), (LeMerrer, 0), (EWE, 0)]
)
def test_label_marks_settle_and_older_keys_do_not(scheme, settling, base, digits):
    key = scheme().keygen(base, digits.train, owner="me", rng=Rng(3))
    older = dataclasses.replace(key, params={k: v for k, v in key.params.items() if k not in ("gap", "settle")})
    assert (scheme_of(key).settling, scheme_of(key).gap) == (settling, 10.0)
    assert (scheme_of(older).settling, scheme_of(older).gap) == (0, 0.0)
    assert scheme(recipe="paper", settle=150).settling == 0


def test_the_gap_is_asked_of_every_trigger(base, digits):
    """log C * mean relu(1 - g / gap) without drift; keys that state no gap, and the paper's recipe, mean CE."""
    scheme = Adi(drift=0.0, batch=1000, gap=4.0)
    key = scheme.keygen(base, digits.train, owner="me", rng=Rng(0))
    step, labels = _step(base, digits), labels_of(key)[0]

    def total(loss):
        return sum(float(term.detach()) for term in loss(step))

    logits = base.query(key.tensors["trigger_x"]).numpy()
    rows = np.arange(len(labels))
    own, others = logits[rows, labels], logits.copy()
    others[rows, labels] = -np.inf
    shortfall = np.maximum(0.0, 1.0 - (own - others.max(axis=1)) / 4.0).mean()
    expected = np.log(10) * shortfall + float(nn.functional.cross_entropy(step.logits, step.y).detach())
    assert total(scheme.loss(base, digits.train, key)) == pytest.approx(expected, rel=1e-5)
    plain = total(TriggerLoss(base, key, scheme))
    old = dataclasses.replace(key, params={k: v for k, v in key.params.items() if k not in ("gap", "recipe")})
    assert scheme_of(old) == dataclasses.replace(scheme, gap=0.0)
    for other in (scheme_of(old), dataclasses.replace(scheme, recipe="paper")):
        assert total(other.loss(base, digits.train, key)) == pytest.approx(plain, rel=1e-5)


def _step(model, digits):
    from deepseal.adapter import Step

    x, y = digits.train.x[:20], digits.train.y[:20]
    logits = model.logits(x)
    return Step(model.copy().module, x, y, torch.arange(20), lambda: logits, 0, 1, Rng(0).torch())


class TestZhang:
    @pytest.mark.parametrize("kind", ["noise", "unrelated"])
    def test_other_kinds_mark_too(self, kind, base, digits):
        key = Zhang(kind=kind, steps=400).keygen(base, digits.train, owner="me", rng=Rng(0))
        assert ("avoided" in key.tensors) == (kind == "noise")
        assert verify(embed(base, digits.train, key, rng=Rng(1)), key).verdict == "owned"

    def test_content_is_the_owner_s_images_under_a_stamp(self, base, digits):
        key = Zhang(groups=5, votes=3).keygen(base, digits.train, owner="me", rng=Rng(0))
        x, sources = key.tensors["trigger_x"], key.tensors["avoided"]
        for index, image in enumerate(x):
            own = digits.train.x[digits.train.y == sources[index // 3]]
            assert (own == image).flatten(1).sum(dim=1).max() >= 64 - 9
        assert x.min() >= 0.0
        assert x.max() <= 1.0

    def test_one_pattern_proves_little(self, base, digits):
        key = Zhang(recipe="paper", steps=400).keygen(base, digits.train, owner="me", rng=Rng(0))
        assert (key.bits, key.public["votes"]) == (1, 100)
        result = verify(embed(base, digits.train, key, rng=Rng(1)), key)
        assert (result.verdict, result.bit_errors) == ("inconclusive", 0)
        assert result.p_value == pytest.approx(1 / 9)
        assert result.published.accepts

    def test_unrelated_images_of_another_data_set(self):
        spec = InputSpec(shape=(3, 16, 12), num_classes=4, bounds=(-1.0, 1.0))
        model = initialise("deepseal.adapter.zoo:mlp", spec, Rng(0))
        data = Split(torch.zeros(8, 3, 16, 12), torch.arange(8) % 4)
        key = Zhang(kind="unrelated", source="digits", groups=10).keygen(model, data, owner="me", rng=Rng(0))
        x = key.tensors["trigger_x"]
        assert x.shape == (80, 3, 16, 12)
        assert torch.equal(x[:, 0], x[:, 2])
        assert -1.0 <= float(x.min()) < -0.9
        with pytest.raises(InputError, match="images of 32 classes"):
            Zhang(kind="unrelated", source="digits").keygen(model, data, owner="me")


class TestLeMerrer:
    def test_triggers_lie_between_two_classes(self, marks, base):
        key, _ = marks["le-merrer"]
        sides, answers = key.tensors["sides"], base.predict(key.tensors["trigger_x"])
        assert (sides[:, 0] != sides[:, 1]).all()
        assert (sides == answers[:, None]).any(dim=1).all()

    def test_half_of_them_fool_where_there_are_enough(self, base, digits):
        key = LeMerrer(epsilon=0.08, triggers=64).keygen(base, digits.train, owner="me", rng=Rng(0))
        fooled = key.tensors["sides"][:, 0] != base.predict(key.tensors["trigger_x"])
        assert int(fooled.sum()) == 32

    def test_the_step_is_bounded_and_raises_the_loss(self, base, digits):
        some = digits.test.take(torch.arange(100))
        moved = signed_gradient_step(base, some, 0.1)
        assert float((moved - some.x).abs().max()) <= 0.1 + 1e-6
        assert float(moved.min()) >= 0.0
        assert float(moved.max()) <= 1.0
        before, after = (nn.functional.cross_entropy(base.query(x), some.y) for x in (some.x, moved))
        assert after > 2 * before

    def test_a_third_class_is_no_vote(self, marks, digits):
        key, _ = marks["le-merrer"]
        read = extract(constant(7, digits.spec), key)
        assert np.array_equal(read.usable, (key.tensors["sides"] == 7).any(dim=1).numpy())

    def test_the_paper_s_labels_prove_nothing(self, base, digits):
        key = LeMerrer(recipe="paper", steps=400).keygen(base, digits.train, owner="me", rng=Rng(0))
        result = verify(embed(base, digits.train, key, rng=Rng(1)), key)
        assert result.verdict == "inconclusive"
        assert result.published.accepts
        assert any("fixes the labels" in warning for warning in result.warnings)

    def test_refuses_too_few_samples(self, base, digits):
        with pytest.raises(InputError, match="classifies right"):
            LeMerrer().keygen(base, digits.train.take(torch.arange(50)), owner="me")


class TestDeepSignsBlackBox:
    def test_key_inputs_are_rarer_than_the_data(self, marks, base, digits):
        key, _ = marks["deepsigns-blackbox"]
        density = LatentDensity(base, digits.train, SECRET)
        own = density.log_density(digits.train.tensor)
        assert (density.log_density(key.tensors["trigger_x"]) < own.quantile(0.05)).float().mean() > 0.95
        assert density.rare(digits.train.tensor, digits.train, 0.05).float().mean() == pytest.approx(0.05, abs=0.01)

    def test_density_is_a_mixture_of_gaussians(self):
        """Against scipy, on a network whose hidden layer passes its input on."""
        layer = nn.Linear(3, 3, bias=False)
        with torch.no_grad():
            layer.weight.copy_(torch.eye(3))
        model = Classifier(
            nn.Sequential(layer, nn.ReLU(), nn.Linear(3, 2)), InputSpec(shape=(3,), num_classes=2, bounds=(-9.0, 9.0))
        )
        y = torch.arange(400) % 2
        x = torch.randn(400, 3, generator=Rng(0).torch()) * torch.tensor([1.0, 0.5, 0.2]) + 2.0 * y[:, None]
        read = LatentDensity(model, Split(x, y), SECRET).log_density(x).numpy()
        means = [x[y == c].double().mean(dim=0).numpy() for c in (0, 1)]
        centred = np.concatenate([x[y == c].double().numpy() - means[c] for c in (0, 1)])
        covariance = centred.T @ centred / 400
        covariance += 1e-3 * np.trace(covariance) / 3 * np.eye(3)
        expected = np.log(sum(0.5 * stats.multivariate_normal(mean, covariance).pdf(x.numpy()) for mean in means))
        assert np.allclose(read - read.mean(), expected - expected.mean(), atol=1e-4)

    def test_unmarked_models_differ_on_them(self, base, digits):
        judges = independent_models(base, digits.train, 4)
        scheme = DeepSignsBlackBox(triggers=60)
        key = scheme.keygen(base, digits.train, owner="me", rng=Rng(0), independent=judges)
        assert key.public["independent_models"] == 2
        assert len(key.tensors["independent_y"]) == 2
        asked = torch.stack([model.predict(key.tensors["trigger_x"]) for model in (base, *judges[:2])])
        assert (asked[0] != asked[1:]).any(dim=0).float().mean() > 0.9

    def test_the_paper_s_choice_looks_at_the_labels(self, base, digits):
        key = DeepSignsBlackBox(recipe="paper", triggers=40).keygen(base, digits.train, owner="me", rng=Rng(0))
        result = verify(base, key)
        assert (result.verdict, result.bit_errors) == ("inconclusive", 40)
        assert not result.published.accepts
        assert any("fixes the labels" in warning for warning in result.warnings)

    def test_refuses_where_nothing_is_rare(self, base, digits):
        """Data that fill their bounds evenly leave no rare place for noise, and few for the rest."""
        even = Split(images.uniform(SECRET, "data", 5000, digits.spec), torch.arange(5000) % 10)
        with pytest.raises(InputError, match="rare places"):
            DeepSignsBlackBox(rarity=0.0, overdraw=2).keygen(
                base, even, owner="me", independent=[constant(0, digits.spec)]
            )


class TestIndependentModels:
    def test_are_trained_as_the_owner_s_and_differ(self, base, digits):
        first, second = independent_models(base, digits.train, 2)
        assert first.fingerprint() != second.fingerprint() != base.fingerprint()
        assert first.accuracy(digits.test).value > 0.9

    def test_an_unnamed_module_is_drawn_again(self, base, digits, no_trace):
        unnamed = Classifier(base.module, base.spec)
        with no_trace(unnamed):
            again = fresh(unnamed, Rng(3))
        assert fresh(unnamed, Rng(3)).fingerprint() == again.fingerprint()
        old, new = (model.module.fc2.weight.detach().reshape(-1) for model in (base, again))
        assert abs(float(torch.corrcoef(torch.stack([old, new]))[0, 1])) < 0.05

    def test_refuses_parameters_that_nobody_can_draw(self, digits):
        class Own(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.weight = nn.Parameter(torch.zeros(64, 10))

            def forward(self, x):
                return x.flatten(1) @ self.weight

        with pytest.raises(InputError, match="drawn again"):
            fresh(Classifier(Own(), digits.spec), Rng(0))


class TestSoftNearestNeighbour:
    def test_against_the_definition(self):
        generator = Rng(0).torch()
        features = torch.randn(14, 5, generator=generator).double()
        marked = torch.rand(14, generator=generator) < 0.5
        classes = torch.randint(0, 2, (14,), generator=generator)
        pairs = [(i, j) for i in range(14) for j in range(14) if i != j and classes[i] == classes[j]]
        squared = {(i, j): float((features[i] - features[j]).pow(2).sum()) for i, j in pairs}
        scale = 0.5 * sum(squared.values()) / len(squared)
        terms = []
        for i in range(14):
            near = {j: np.exp(-squared[i, j] / scale) for j in range(14) if (i, j) in squared}
            alike = sum(value for j, value in near.items() if marked[j] == marked[i])
            if alike and any(marked[j] != marked[i] for j in near):
                terms.append(-np.log(alike / sum(near.values())))
        assert float(soft_nearest_neighbour(features, marked, classes, 0.5)) == pytest.approx(np.mean(terms))

    def test_is_large_where_the_kinds_mix(self):
        generator = Rng(0).torch()
        features, marked = torch.randn(40, 5, generator=generator), torch.arange(40) < 20
        classes = torch.zeros(40, dtype=torch.int64)
        apart = features + 10.0 * marked[:, None]
        mixed, separate = (float(soft_nearest_neighbour(f, marked, classes, 0.5)) for f in (features, apart))
        assert mixed > 0.5 > separate

    def test_without_neighbours_it_is_zero(self):
        lone = soft_nearest_neighbour(torch.ones(3, 2), torch.tensor([True, True, False]), torch.arange(3), 0.5)
        assert float(lone) == 0.0


@pytest.mark.parametrize("shape", [(20,), (1, 8, 8), (3, 16, 12), (2, 1, 9, 9), (5, 3)])
def test_images_fit_any_input(shape):
    spec = InputSpec(shape=shape, num_classes=3, bounds=(-2.0, 5.0))
    for x in (
        images.abstract(SECRET, "a", 6, spec),
        images.uniform(SECRET, "b", 6, spec),
        images.noisy(SECRET, "c", 6, spec),
    ):
        assert x.shape == (6, *shape)
        assert x.dtype == torch.float32
        spec.check(x)
        assert x.unique(dim=0).shape[0] == 6
    values, places = images.stamps(SECRET, "d", 6, spec, 0.4)
    assert values.shape == places.shape == (6, *shape)
    assert set(values.unique().tolist()) == {-2.0, 5.0}
    sizes = places.flatten(1).sum(dim=1)
    assert (sizes == sizes[0]).all()
    assert 0 < sizes[0] < values[0].numel()
    assert not torch.equal(images.abstract(SECRET, "a", 6, spec), images.uniform(SECRET, "a", 6, spec))
