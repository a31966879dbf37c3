"""Evasion attacks: laws for all of them, and for each something that only the right algorithm does."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.optimize import linprog
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Oracle, Split
from deepseal.attacks import EVASION
from deepseal.attacks.evasion.apgd import APGD, _checkpoints, difference_of_logits_ratio, targeted_ratio
from deepseal.attacks.evasion.carlini_wagner import CarliniWagner
from deepseal.attacks.evasion.deepfool import DeepFool
from deepseal.attacks.evasion.ensemble import Auto
from deepseal.attacks.evasion.fab import FAB, nearest_on_border
from deepseal.attacks.evasion.hop_skip_jump import HopSkipJump
from deepseal.attacks.evasion.jsma import JSMA
from deepseal.attacks.evasion.search import attacked
from deepseal.attacks.evasion.square import Square
from deepseal.errors import InputError
from deepseal.rng import Rng

NAMES = [name for name in EVASION.names() if not name.startswith("adaptive-")]  # these need a detector
QUICK = {
    "pgd": {"epsilon": 0.2, "steps": 10},
    "bim": {"epsilon": 0.2, "steps": 10},
    "mi-fgsm": {"epsilon": 0.2},
    "fgsm": {"epsilon": 0.2},
    "noise": {"epsilon": 0.2},
    "apgd": {"epsilon": 0.2, "steps": 20},
    "square": {"epsilon": 0.2, "queries": 150},
    "fab": {"epsilon": 0.2, "steps": 20, "restarts": 2},
    "auto": {"epsilon": 0.2, "steps": 10, "queries": 100},
    "cw": {"steps": 40, "searches": 3},
    "hop-skip-jump": {"iterations": 4, "queries": 40},
    "jsma": {"gamma": 0.4},
}
# Least share of attacked digits that each fools with these settings.
FOOLED = {"noise": 0.0, "fgsm": 0.3, "hop-skip-jump": 0.9, "deepfool": 0.95, "cw": 0.95, "jsma": 0.6}


@pytest.fixture(scope="module")
def some(digits):
    return digits.test.take(torch.arange(40))


@pytest.fixture(scope="module")
def found(base, some):
    """Every attack once."""
    return {name: EVASION.build(name, QUICK.get(name, {})).perturb(base, some, rng=Rng(0)) for name in NAMES}


@pytest.fixture
def linear():
    """Three classes of four features between -2 and 3."""
    layer = nn.Linear(4, 3)
    with torch.no_grad():
        layer.weight.copy_(torch.tensor([[1.0, -1.0, 0.5, 0.2], [0.3, 0.8, -0.6, 0.0], [-1.0, 0.1, 0.1, 1.0]]))
        layer.bias.copy_(torch.tensor([0.3, 0.0, -0.1]))
    return Classifier(layer, InputSpec(shape=(4,), num_classes=3, bounds=(-2.0, 3.0)))


@pytest.fixture
def points(linear):
    x = torch.rand(30, 4, generator=Rng(3).torch()) - 0.3
    return Split(x, linear.predict(x))


@pytest.mark.parametrize("name", NAMES)
class TestEveryOne:
    def test_says_what_it_did(self, name, found, base, some):
        result, right = found[name], base.predict(some.x) == some.y
        wrong = base.predict(result.x) != some.y
        assert result.x.shape == some.x.shape
        assert float(result.x.min()) >= 0.0
        assert float(result.x.max()) <= 1.0
        assert torch.equal(result.fooled, right & wrong)
        assert torch.equal(result.x[~result.fooled], some.x[~result.fooled])
        assert result.evidence["attacked"] == int(right.sum())
        assert result.evidence["fooled"] == result.evidence["asked_alone"] == int(result.fooled.sum())
        assert result.evidence["fooled_alone"] == result.evidence["asked_alone"]
        assert result.evidence["fooled"] >= FOOLED.get(name, 0.8) * int(right.sum())

    def test_stays_in_its_ball(self, name, found, some):
        epsilon = QUICK.get(name, {}).get("epsilon")
        if epsilon is not None:
            assert float((found[name].x - some.x).abs().max()) <= epsilon + 1e-6

    def test_same_seed_same_inputs_and_no_trace(self, name, base, some, found, no_trace):
        with no_trace(base):
            again = EVASION.build(name, QUICK.get(name, {})).perturb(base, some, rng=Rng(0))
        assert torch.equal(again.x, found[name].x)
        assert again.evidence == found[name].evidence

    def test_inputs_that_are_no_images(self, name, linear, points):
        params = {"jsma": {"gamma": 1.0}, "hop-skip-jump": {"iterations": 3, "queries": 30}}
        params["auto"] = {"steps": 10, "queries": 50}
        result = EVASION.build(name, params.get(name, {})).perturb(linear, points, rng=Rng(0))
        assert result.evidence["attacked"] == 30
        assert name == "noise" or result.evidence["fooled"] >= 5

    def test_refuses_what_it_cannot_attack(self, name, base, some):
        foreign = Split(torch.zeros(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64))
        with pytest.raises(InputError, match="shape"):
            EVASION.build(name, {}).perturb(base, foreign, rng=Rng(0))
        embedding = Classifier(nn.Linear(5, 3), InputSpec(shape=(5,), num_classes=0))
        with pytest.raises(InputError, match="classes"):
            EVASION.build(name, {}).perturb(embedding, Split.unlabelled(torch.rand(2, 5)), rng=Rng(0))

    def test_nothing_to_attack(self, name, base, some):
        wrong = Split(some.x, (base.predict(some.x) + 1) % 10)
        result = EVASION.build(name, QUICK.get(name, {})).perturb(base, wrong, rng=Rng(0))
        assert (result.evidence["attacked"], result.evidence["fooled"]) == (0, 0)
        assert torch.equal(result.x, some.x)


class TestReCheck:
    def test_what_another_batch_undoes_does_not_count(self, base, some):
        """A model that answers wrongly only the first time it sees an input."""
        seen = set()

        def answer(x):
            scores = base.query(x)
            for row, image in enumerate(x):
                mark = image.numpy().tobytes()
                if mark not in seen and not bool((image == some.x).flatten(1).all(dim=1).any()):
                    scores[row] = scores[row].roll(1)
                seen.add(mark)
            return scores

        fickle = Oracle(answer, base.spec, output="logits")
        result = attacked(fickle, some, lambda x, y, g: (x + 1e-3).clamp(0, 1), rng=Rng(0))
        assert result.evidence["fooled"] == 0
        assert result.evidence["undone_in_another_batch"] == result.evidence["attacked"] > 0
        assert torch.equal(result.x, some.x)

    @pytest.mark.parametrize(
        "search",
        [
            lambda x, y, g: torch.zeros_like(x),  # blank
            lambda x, y, g: x + 5.0,  # out of bounds
            lambda x, y, g: torch.full_like(x, float("nan")),
            lambda x, y, g: x.clone(),  # the input itself
        ],
    )
    def test_unsound_candidates_do_not_count(self, search, base, some):
        result = attacked(base, some, search, rng=Rng(0))
        assert result.evidence["fooled"] == 0
        assert result.evidence["unsound_candidates"] == result.evidence["attacked"]
        assert torch.equal(result.x, some.x)


def test_gradient_attacks_beat_noise_and_steps_beat_one(found):
    fooled = {name: result.evidence["fooled"] for name, result in found.items()}
    assert fooled["noise"] < fooled["fgsm"] <= fooled["bim"]
    assert fooled["apgd"] >= fooled["pgd"] - 1


def test_distances_rank_as_the_methods_do(found, base, some):
    """C&W and DeepFool look for the smallest change, C&W the longer; walking by labels alone ends further away."""
    results = {**found, "cw": CarliniWagner(steps=200, searches=6).perturb(base, some, rng=Rng(0))}
    names = ("cw", "deepfool", "pgd", "hop-skip-jump")
    all_of_them = torch.stack([results[name].fooled for name in names]).all(dim=0)
    assert int(all_of_them.sum()) > 10
    sizes = {name: float((results[name].x - some.x).flatten(1).norm(dim=1)[all_of_them].mean()) for name in names}
    assert sizes["cw"] < 1.1 * sizes["deepfool"]
    assert sizes["deepfool"] < sizes["pgd"]
    assert sizes["cw"] <= sizes["hop-skip-jump"]


class TestExactOnALinearModel:
    """The nearest border of a linear model is known in closed form."""

    def distances(self, linear, points):
        weight = linear.module.weight.detach()
        z = linear.query(points.x)
        nearest = torch.full((len(points),), float("inf"))
        for other in range(3):
            gap = z.gather(1, points.y[:, None]).squeeze(1) - z[:, other]
            length = (weight[points.y] - weight[other]).norm(dim=1)
            nearest = torch.where(points.y == other, nearest, torch.minimum(nearest, gap / length))
        return nearest

    def test_deepfool(self, linear, points):
        result = DeepFool(overshoot=0.01).perturb(linear, points, rng=Rng(0))
        assert bool(result.fooled.all())
        ratio = (result.x - points.x).norm(dim=1) / self.distances(linear, points)
        assert float(ratio.median()) == pytest.approx(1.01, abs=0.01)
        assert float(ratio.min()) > 0.999

    def test_carlini_wagner(self, linear, points):
        result = CarliniWagner(steps=150, searches=7).perturb(linear, points, rng=Rng(0))
        assert bool(result.fooled.all())
        ratio = (result.x - points.x).norm(dim=1) / self.distances(linear, points)
        assert float(ratio.min()) > 0.999
        assert float(ratio.median()) < 1.05

    def test_hop_skip_jump_by_labels_alone(self, linear, points):
        oracle = linear.oracle(output="labels")
        result = HopSkipJump(iterations=12, queries=100).perturb(oracle, points, rng=Rng(0))
        assert bool(result.fooled.all())
        ratio = (result.x - points.x).norm(dim=1) / self.distances(linear, points)
        assert float(ratio.median()) < 1.2
        assert oracle.queries > 1000


class TestFAB:
    def test_projection_is_the_linear_programme_s(self):
        """min t such that |d| <= t, within the bounds, on the border; else as near the border as the bounds let."""
        generator = Rng(2).torch()
        x = torch.rand(40, 6, generator=generator)
        slope = torch.randn(40, 6, generator=generator)
        slope[:, 2] = 0.0
        gap = torch.randn(40, generator=generator) * 2.0
        found = nearest_on_border(x, slope, gap, (0.0, 1.0))
        assert 0.0 <= float(found.min()) <= float(found.max()) <= 1.0
        reached = 0
        for row in range(40):
            a, w, b = x[row].double().numpy(), slope[row].double().numpy(), float(gap[row])
            n = len(a)
            size = np.concatenate([np.zeros(n), [1.0]])
            upper = np.concatenate(
                [np.concatenate([np.eye(n), -np.ones((n, 1))], 1), np.concatenate([-np.eye(n), -np.ones((n, 1))], 1)]
            )
            box = [*zip(-a, 1.0 - a, strict=True), (0.0, None)]
            best = linprog(size, A_ub=upper, b_ub=np.zeros(2 * n), A_eq=[[*w, 0.0]], b_eq=[-b], bounds=box)
            value = float(slope[row] @ (found[row] - x[row])) + b
            if best.success:
                reached += 1
                assert value == pytest.approx(0.0, abs=1e-5)
                assert float((found[row] - x[row]).abs().max()) == pytest.approx(best.fun, abs=1e-5)
            else:
                most = np.where(np.sign(w) * np.sign(b) < 0, 1.0 - a, a)
                assert value == pytest.approx(b - np.sign(b) * np.abs(w) @ most, abs=1e-5)
        assert 10 < reached < 40

    def test_nearest_of_a_linear_model(self, linear, points):
        """The border's distance in the maximum norm is the gap over the slope's sum."""
        weight = linear.module.weight.detach()
        z = linear.query(points.x)
        nearest = torch.full((30,), float("inf"))
        for other in range(3):
            gap = z.gather(1, points.y[:, None])[:, 0] - z[:, other]
            distance = gap / (weight[points.y] - weight[other]).abs().sum(dim=1)
            nearest = torch.where(points.y == other, nearest, torch.minimum(nearest, distance))
        for radius in (0.05, 0.1):
            result = FAB(epsilon=radius / 5.0, steps=20, restarts=2).perturb(linear, points, rng=Rng(0))
            clear = (nearest - radius).abs() > 0.004
            assert torch.equal(result.fooled[clear], nearest[clear] < radius)
        assert 5 < int(result.fooled.sum()) < 30


def test_the_targeted_ratio_falls_back_on_nothing(linear, base, some, points):
    """It does not change with the scale of the logits, rises where the target gains, and needs four classes."""
    target = (some.y + 1) % 10
    loss = targeted_ratio(base, some.y, target)(some.x)
    scaled = Classifier(nn.Sequential(base.copy().module, _Scale(100.0)), base.spec)
    assert torch.allclose(loss, targeted_ratio(scaled, some.y, target)(some.x), atol=1e-4)
    z = base.query(some.x)
    gain = z.gather(1, target[:, None])[:, 0] > z.gather(1, some.y[:, None])[:, 0]
    assert torch.equal(loss > 0, gain)
    with pytest.raises(InputError, match="four classes"):
        APGD(loss="targeted").perturb(linear, points, rng=Rng(0))


class TestTogether:
    def test_each_member_attacks_what_is_left(self, base, some):
        result = Auto(epsilon=0.08, steps=10, queries=50).perturb(base, some, rng=Rng(0))
        members = result.evidence["members"]
        left = members[0]["attacked"]
        assert [one["attack"] for one in members] == ["apgd", "apgd", "fab", "square"]
        for one in members:
            assert one["attacked"] == left
            left -= one["fooled"]
        assert result.evidence["attacked"] - left == result.evidence["fooled"] == int(result.fooled.sum())
        alone = APGD(epsilon=0.08, steps=10).perturb(base, some, rng=Rng(0).child("member", 0))
        assert bool(result.fooled[alone.fooled].all())
        assert 0 < left < result.evidence["attacked"]

    def test_members_fit_the_number_of_classes(self):
        losses = {n: [getattr(one, "loss", "") for one in Auto().members(n)] for n in (2, 3, 4)}
        assert losses == {2: ["ce", "", ""], 3: ["ce", "dlr", "", ""], 4: ["ce", "targeted", "", ""]}


def test_confidence_is_what_the_wrong_logit_wins_by(base, some):
    for confidence in (0.0, 5.0):
        attack = CarliniWagner(confidence=confidence, steps=60, searches=3)
        result = attack.perturb(base, some, rng=Rng(0))
        z = base.query(result.x[result.fooled])
        y = some.y[result.fooled]
        gap = z.scatter(1, y[:, None], float("-inf")).amax(dim=1) - z.gather(1, y[:, None]).squeeze(1)
        assert float(gap.min()) >= confidence - 1e-4
        assert float(gap.median()) < confidence + 2.0


def test_jsma_changes_few_pixels_to_the_end(found, some):
    result = found["jsma"]
    changed = (result.x != some.x).flatten(1).sum(dim=1)[result.fooled]
    assert int(changed.max()) <= 0.4 * 64
    values = result.x[result.fooled][(result.x != some.x)[result.fooled]]
    assert bool((values == 1.0).all())


def test_jsma_takes_the_pair_of_the_greatest_saliency(linear):
    """Against all pairs, one by one."""
    x = torch.rand(6, 4, generator=Rng(5).torch())
    target = (linear.predict(x) + 1) % 3
    pair, there = JSMA()._pair(linear, x, target)
    for row in range(6):
        leaf = x[row : row + 1].clone().requires_grad_(True)
        p = linear.logits(leaf).softmax(1)[0]
        own = torch.autograd.grad(p[target[row]], leaf, retain_graph=True)[0][0]
        rest = torch.autograd.grad(p.sum() - p[target[row]], leaf)[0][0]
        scores = {
            (i, j): float(-(own[i] + own[j]) * (rest[i] + rest[j]))
            for i in range(4)
            for j in range(i + 1, 4)
            if own[i] + own[j] > 0 > rest[i] + rest[j]
        }
        assert bool(there[row]) == bool(scores)
        if scores:
            assert tuple(sorted(pair[row].tolist())) == max(scores, key=scores.get)


def test_apgd_checkpoints_are_the_paper_s():
    assert sorted(_checkpoints(100)) == [22, 41, 57, 70, 80, 87, 93, 99]


def test_dlr_does_not_change_with_the_scale_of_the_logits(base, some):
    loss = difference_of_logits_ratio(base, some.y)(some.x)
    module = nn.Sequential(base.copy().module, _Scale(1000.0))
    scaled = difference_of_logits_ratio(Classifier(module, base.spec), some.y)(some.x)
    assert torch.allclose(loss, scaled, atol=1e-4)
    result = APGD(epsilon=0.2, steps=20, loss="dlr").perturb(Classifier(module, base.spec), some, rng=Rng(0))
    assert result.evidence["fooled"] >= 0.8 * result.evidence["attacked"]
    two = Classifier(nn.Linear(4, 2), InputSpec(shape=(4,), num_classes=2))
    with pytest.raises(InputError, match="three classes"):
        APGD(loss="dlr").perturb(two, Split(torch.rand(3, 4), torch.zeros(3, dtype=torch.int64)), rng=Rng(0))


class _Scale(nn.Module):
    def __init__(self, factor):
        super().__init__()
        self.factor = factor

    def forward(self, z):
        return self.factor * z


def test_square_asks_for_scores_only(base, some):
    oracle = base.oracle(output="probabilities")
    result = Square(epsilon=0.2, queries=100).perturb(oracle, some, rng=Rng(0))
    assert result.evidence["fooled"] > 0
    with pytest.raises(InputError, match="answers with scores"):
        Square().perturb(base.oracle(), some, rng=Rng(0))


def test_training_mode_changes_nothing(digits, some):
    """The victim is asked in evaluation mode, whatever its flag says."""
    module = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(64, 10))
    with torch.no_grad():
        module[2].weight.normal_(generator=Rng(0).torch())
    model = Classifier(module, digits.spec)
    data = Split(some.x, model.predict(some.x))
    module.eval()
    first = EVASION.build("pgd", {"steps": 5}).perturb(model, data, rng=Rng(0))
    module.train()
    second = EVASION.build("pgd", {"steps": 5}).perturb(model, data, rng=Rng(0))
    assert torch.equal(first.x, second.x)
    assert module.training
