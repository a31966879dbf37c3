"""Customisation: budgets are kept, costs are measured, and the worth without attacks agrees with real attacks."""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from deepseal.defense.customise import Budget, customise
from deepseal.defense.evaluation import auroc, parse_attack
from deepseal.defense.monitor import fit_monitor
from deepseal.defense.platform import Cost, added_cost, peak_memory, timed
from deepseal.defense.presets import choose
from deepseal.defense.proxies import proxies
from deepseal.errors import InputError
from deepseal.rng import Rng

WORDS = ("max-softmax", "inrel", "input-pca", "density?layer=early", "ratio?layer=first", "odds")
ROOMY = Budget(10_000.0, 10_000.0, batch=4, rounds=3)


@pytest.fixture(scope="module")
def found(base, digits):
    return customise(base, digits.train, ROOMY, rng=Rng(0), words=WORDS)


def test_a_roomy_budget_takes_what_helps(found, digits):
    assert [row.title for row in found.candidates][0] == "max-softmax" and len(found.candidates) == len(WORDS)
    chosen = [member.title for member in found.monitor.members]
    assert chosen == [
        row.title for row in sorted(found.candidates, key=lambda row: row.decision) if row.decision.startswith("chosen")
    ]
    assert found.victim > 0 and all(row.cost.milliseconds >= 0 for row in found.candidates)
    best = max(sum(row.worth.values()) / 2 for row in found.candidates)
    assert sum(found.worth.values()) / 2 >= best - 0.01 and set(found.worth) == {"mixed", "rough"}
    assert found.monitor.calibration is None and len(found.monitor.seen["fit"]) == len(digits.train)


def test_memory_is_counted(found):
    rows = {row.title: row.cost for row in found.candidates}
    assert rows["max-softmax"].state == 0.0
    ratio = next(title for title in rows if title.startswith("ratio"))
    assert rows[ratio].state > rows["inrel"].state > 0.0
    assert rows["odds"].working > rows["max-softmax"].working
    one = 2**18  # floats in a MiB
    assert peak_memory(lambda: torch.zeros(one).add_(1).view(2, -1).sum()) == pytest.approx(1.0, abs=0.01)

    def three() -> torch.Tensor:
        first = torch.zeros(one)
        second = first + 1
        third = first * second
        del first, second
        return third + 1

    assert peak_memory(three) == pytest.approx(3.0, abs=0.01)
    assert peak_memory(lambda: [torch.zeros(one).sum() for _ in range(5)]) == pytest.approx(1.0, abs=0.01)


def test_a_small_budget_of_memory_is_kept(base, digits, found):
    sizes = sorted(row.cost.memory for row in found.candidates)
    budget = Budget(10_000.0, (sizes[1] + sizes[2]) / 2, batch=4, rounds=3)
    tight = customise(base, digits.train, budget, rng=Rng(0), words=WORDS)
    assert tight.total.memory <= budget.mebibytes
    refused = [row for row in tight.candidates if row.decision.startswith(("too much", "no room"))]
    assert refused and all("MiB" in row.decision for row in refused)
    assert len(tight.monitor.members) < len(WORDS)


def test_what_cannot_be_done_is_refused(base, digits):
    with pytest.raises(InputError, match="a detector within 1e-09 ms"):
        customise(base, digits.train, Budget(1e-9, 100.0, rounds=1), rng=Rng(0), words=("inrel",))
    with pytest.raises(InputError, match="a budget above 0"):
        Budget(0.0, 1.0)
    with pytest.raises(InputError, match="more than 200 clean samples"):
        customise(base, digits.train.take(torch.arange(150)), ROOMY, rng=Rng(0), words=("inrel",))
    oracle = customise(base.oracle(output="logits"), digits.train, ROOMY, rng=Rng(0), words=("inrel", "ratio"))
    assert [member.title for member in oracle.monitor.members] == ["inrel"]
    assert any(note.startswith("ratio is off") for note in oracle.monitor.notes)


def test_time_is_that_of_the_whole_batch(base, digits):
    member = fit_monitor(base, digits.train, choose(base, ["odds"]).detectors, rng=Rng(0)).members
    one, many = (added_cost(base, member, digits.train.tensor[:count], 5) for count in (1, 256))
    assert many.milliseconds > one.milliseconds and many.working > one.working and many.state == one.state
    assert isinstance(one, Cost) and timed([lambda: None], 3)[0] >= 0.0


def test_proxies_change_the_answer_within_the_bounds(base, digits):
    x = digits.test.tensor
    made = proxies(base, x, rng=Rng(3))
    again = proxies(base, x, rng=Rng(3))
    for kind, inputs in made.items():
        assert torch.equal(inputs, again[kind]) and float(inputs.min()) >= 0.0 and float(inputs.max()) <= 1.0
    margins = base.query(made["mixed"]).topk(2, dim=1).values
    assert float((margins[:, 0] - margins[:, 1]).median()) < 1.0  # just over the border
    with pytest.raises(InputError, match="clean pairs with different answers"):
        proxies(base, x[:10], rng=Rng(0))


@pytest.mark.slow
def test_worth_by_proxy_ranks_detectors_as_attacks_do(base, digits):
    """Validated once, on what it was not made from: rank correlation with areas under real attacks."""
    words = (*WORDS, "energy", "density?layer=last", "ratio?layer=last", "magnet", "squeeze")
    rows = {row.title: row.worth for row in customise(base, digits.train, ROOMY, rng=Rng(0), words=words).candidates}
    monitor = fit_monitor(base, digits.train, choose(base, list(words)).detectors, rng=Rng(0))
    clean = digits.test.take(torch.arange(200))
    right = clean.take(torch.nonzero(base.predict(clean.tensor) == clean.y).reshape(-1))
    areas = {member.title: 0.0 for member in monitor.members}
    for text in ("pgd:epsilon=0.2,steps=10", "fgsm:epsilon=0.2", "deepfool"):
        _, method = parse_attack(text)
        attacked = method.perturb(base, right, rng=Rng(1)).x
        fooled = attacked[base.predict(attacked) != right.y]
        scores = [monitor.raw(x)[0] for x in (right.tensor, fooled)]
        for index, title in enumerate(areas):
            areas[title] += (auroc(scores[0][:, index], scores[1][:, index]) or 0.0) / 3
    worth = [sum(rows[title].values()) for title in areas]
    assert stats.spearmanr(worth, list(areas.values())).statistic > 0.4
