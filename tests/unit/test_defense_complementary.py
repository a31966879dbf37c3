"""Defenders fitted one after the other, and how differently they judge."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.stats import spearmanr

from deepseal.adapter import Classifier, Dataset, Split
from deepseal.defense import complementary
from deepseal.defense.base import DETECTORS, Detector
from deepseal.defense.complementary import Redundancy, complementarity, fit_complementary
from deepseal.defense.context import contexts
from deepseal.defense.monitor import Monitor, calibrate, fit_monitor
from deepseal.errors import InputError
from deepseal.rng import Rng

HOW = Redundancy(epsilon=0.1, steps=4)


def _detectors(model: Classifier, *words: tuple[str, dict[str, object]]) -> list[Detector]:
    return [DETECTORS.build(name, values).placed(model) for name, values in words]


@pytest.fixture(scope="module")
def pair(base: Classifier, digits: Dataset) -> Monitor:
    found = _detectors(base, ("input-pca", {}), ("density", {"layer": "last"}))
    return fit_complementary(base, digits.train, found, rng=Rng(0), redundancy=HOW)


def test_the_first_is_fitted_on_clean_data_and_the_next_on_inputs_moved_against_it(
    pair: Monitor, base: Classifier, digits: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Split] = []
    real = complementary._moved

    def watched(*arguments: object) -> Split:
        seen.append(real(*arguments))  # type: ignore[arg-type]
        return seen[-1]

    monkeypatch.setattr(complementary, "_moved", watched)
    detectors = [member.detector for member in pair.members]
    again = fit_complementary(base, digits.train, detectors, rng=Rng(0), redundancy=HOW)
    for one, other in zip(pair.members, again.members, strict=True):
        assert all(torch.equal(one.state[name], other.state[name]) for name in one.state)
    (moved,) = seen
    change = (moved.tensor - digits.train.tensor).abs().flatten(1).amax(dim=1)
    touched = change > 0
    assert 0.4 < float(touched.double().mean()) <= 0.5
    low, high = base.spec.bounds
    assert float(change.max()) <= 0.1 * (high - low) + 1e-5
    assert float(moved.tensor.min()) >= low
    assert float(moved.tensor.max()) <= high
    assert torch.equal(moved.y, digits.train.y)
    assert torch.equal(base.predict(moved.tensor), base.predict(digits.train.tensor))
    first = Monitor(base, pair.members[:1])
    raised = first.raw(moved.tensor[touched])[0] > first.raw(digits.train.tensor[touched])[0]
    assert float(raised.double().mean()) > 0.9

    alone = fit_monitor(base, digits.train, detectors, rng=Rng(0))
    plain = [member.state for member in alone.members]
    assert torch.equal(pair.members[0].state["directions"], plain[0]["directions"])
    assert not torch.equal(pair.members[1].state["means"], plain[1]["means"])


def test_the_next_finds_less_strange_what_the_first_finds_strange(
    pair: Monitor, base: Classifier, digits: Dataset
) -> None:
    detectors = [member.detector for member in pair.members]
    alone = fit_monitor(base, digits.train, detectors, rng=Rng(0))
    moved = complementary._moved(base, digits.test, pair.members[:1], Redundancy(epsilon=0.1, share=1.0), Rng(5))
    shares = []
    for monitor in (pair, alone):
        clean, found = monitor.raw(digits.test.tensor)[0][:, 1], monitor.raw(moved.tensor)[0][:, 1]
        shares.append(float((found > clean.quantile(0.95)).double().mean()))
    assert shares[0] < shares[1]


def test_the_same_defender_twice_agrees_with_itself(base: Classifier, digits: Dataset) -> None:
    once = _detectors(base, ("density", {}))
    monitor = fit_monitor(base, digits.train, once * 2, rng=Rng(0))
    found = complementarity(monitor, digits.test.tensor, rng=Rng(0), redundancy=HOW)
    assert np.allclose(found["correlation"], 1.0)
    assert found["disagreement"] == [[0.0, 0.0], [0.0, 0.0]]
    assert found["survivors"] == [[1.0, 1.0], [1.0, 1.0]]


def test_the_report_counts_what_it_says(pair: Monitor, base: Classifier, digits: Dataset) -> None:
    x = digits.test.tensor
    found = complementarity(pair, x, rng=Rng(0), redundancy=HOW)
    raw = pair.raw(x)[0]
    assert found["members"] == [member.title for member in pair.members]
    expected = spearmanr(raw[:, 0].numpy(), raw[:, 1].numpy()).statistic
    assert found["correlation"][0][1] == pytest.approx(expected, abs=1e-6)
    assert found["correlation"][1][0] == found["correlation"][0][1]
    low, high = base.spec.bounds
    signs = torch.randint(2, x.shape, generator=Rng(0).child("signs").torch()).float() * 2 - 1
    strange = pair.raw((x + 0.1 * (high - low) * signs).clamp(low, high))[0]
    flags = strange.double() > torch.quantile(raw.double(), 0.95, dim=0)
    assert found["flagged"] == pytest.approx(flags.double().mean(dim=0).tolist())
    either, one = (flags.any(dim=1)).sum(), (flags.sum(dim=1) == 1).sum()
    assert found["disagreement"][0][1] == pytest.approx(int(one) / int(either))
    assert found["survivors"][0][0] == 1.0
    assert 0.0 <= found["survivors"][0][1] < 1.0


def test_such_a_monitor_is_calibrated_as_any_other(pair: Monitor, digits: Dataset) -> None:
    clean = Split(
        torch.cat([digits.calibration.tensor, digits.test.tensor]), torch.cat([digits.calibration.y, digits.test.y])
    )
    ready = calibrate(pair, clean, rng=Rng(0), false_positive=0.1)
    assert ready.threshold().false_positive == 0.1
    (context,) = contexts(pair.model, clean.tensor[:5], ready.taps)
    assert len(context) == 5


def test_what_cannot_be_compared_is_refused(pair: Monitor, digits: Dataset) -> None:
    with pytest.raises(InputError, match="enough clean inputs"):
        complementarity(pair, digits.test.tensor[:10], rng=Rng(0))
