"""One input before a monitor and after an attack, and the figures that the dashboard shows."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deepseal.adapter import Split
from deepseal.attacks.base import EVASION
from deepseal.defense.evaluation import (
    BARS,
    attack,
    clean_scores,
    edges_of,
    false_positives,
    false_positives_at,
    figures,
    histogram,
    parse_attack,
)
from deepseal.defense.monitor import calibrate, fit_monitor
from deepseal.defense.presets import choose
from deepseal.defense.trial import judged, trial
from deepseal.errors import InputError
from deepseal.rng import Rng


@pytest.fixture(scope="module")
def fitted(base, digits):
    return fit_monitor(base, digits.train, choose(base, ["max-softmax", "inrel"]).detectors, rng=Rng(0))


@pytest.fixture(scope="module")
def monitor(fitted, digits):
    return calibrate(fitted, digits.calibration, rng=Rng(0), false_positive=0.05)


@pytest.mark.parametrize(("name", "epsilon"), [("noise", 0.05), ("fgsm", 0.02), ("pgd", 0.05), ("apgd", 0.05)])
def test_what_was_tried_is_kept_also_where_it_does_not_fool(base, digits, name, epsilon):
    data = digits.test.take(torch.arange(30))
    found = EVASION.build(name, {"epsilon": epsilon}).perturb(base, data, rng=Rng(3))
    assert found.last is not None and found.last.shape == data.tensor.shape
    assert torch.equal(found.last[found.fooled], found.x[found.fooled])
    right = base.predict(data.tensor) == data.y
    failed = right & ~found.fooled
    assert bool(failed.any())
    assert torch.equal(found.x[failed], data.tensor[failed])
    change = (found.last - data.tensor).abs().flatten(1).amax(dim=1)
    assert bool((change[failed] > 0).all()) and float(change.max()) <= epsilon + 1e-6
    assert float(change[~right].max() if bool((~right).any()) else 0.0) == 0.0


def test_a_trial_says_what_model_and_monitor_say(monitor, digits):
    for index, epsilon in ((0, 0.01), (1, 0.3), (2, 0.3)):
        x = digits.test.tensor[index]
        found = trial(monitor, x, EVASION.build("pgd", {"epsilon": epsilon}), rng=Rng(0))
        for input_, one in ((x, found.before), (found.changed, found.after)):
            said = monitor.judge(input_[None])
            assert one.predicted == int(said.predicted[0]) == int(one.probabilities.argmax())
            assert one.score == float(said.score[0]) and one.alarm == bool(said.alarm[0])
            assert one.alarm == (one.score > one.limit) and one.p_value == float(said.p_value[0])
            assert float(one.probabilities.sum()) == pytest.approx(1.0)
        assert found.fooled == (found.before.predicted != found.after.predicted)
        assert 0 < found.largest <= epsilon + 1e-6
        assert found.moved == int((found.changed != x).sum())


def test_an_adaptive_attack_fools_only_without_an_alarm(monitor, digits):
    method = EVASION.build("adaptive-pgd", {"epsilon": 0.3, "restarts": 1})
    found = [trial(monitor, digits.test.tensor[i], method, rng=Rng(0)) for i in range(4)]
    assert any(one.fooled for one in found)
    assert all(one.after.predicted != one.before.predicted and not one.after.alarm for one in found if one.fooled)


def test_refusals(monitor, fitted, digits):
    with pytest.raises(InputError, match="calibrated"):
        judged(fitted, digits.test.tensor[0])
    with pytest.raises(InputError, match="shape"):
        judged(monitor, digits.test.tensor[0, 0])


def test_rates_between_the_usual_ones(monitor, digits):
    clean = clean_scores(monitor, digits.test)
    assert false_positives_at(monitor, clean, 0.05) == false_positives(monitor, clean)[1]
    rows = [false_positives_at(monitor, clean, nominal) for nominal in (0.05, 0.1, 0.2)]
    shares = [row["realised"]["value"] for row in rows]
    assert shares == sorted(shares) and shares[-1] > shares[0]
    assert false_positives_at(monitor, clean, 0.001) == {"nominal": 0.001, "guaranteed": False}


def test_a_histogram_counts_everything():
    edges = torch.tensor([0.0, 1.0, 2.0, 3.0], dtype=torch.float64)
    found = histogram(torch.tensor([-5.0, 0.0, 0.5, 1.0, 2.9, 3.0, 99.0]), edges)
    assert found == {"edges": [0.0, 1.0, 2.0, 3.0], "counts": [3, 1, 3]}
    assert histogram(torch.empty(0), edges)["counts"] == [0, 0, 0]
    values = torch.rand(500, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    edges = edges_of(values)
    assert len(edges) == BARS + 1 and float(edges[0]) == float(values.min())
    expected, _ = np.histogram(values.numpy(), edges.numpy())
    assert histogram(values, edges)["counts"] == expected.tolist()
    assert sum(histogram(torch.zeros(4), edges_of(torch.zeros(9)))["counts"]) == 4


def test_an_evaluation_says_where_fooling_inputs_score(monitor, digits):
    clean = clean_scores(monitor, digits.test)
    split = Split(digits.test.tensor[:40], digits.test.y[:40])
    title, method = parse_attack("fgsm:epsilon=0.3")
    row = figures(monitor, clean, attack(monitor, split, title, method, rng=Rng(0)))
    assert sum(row["scores"]["counts"]) == row["success"]["count"] > 0
    assert row["scores"]["edges"][0] == pytest.approx(float(clean.scores.min()), abs=1e-5)
