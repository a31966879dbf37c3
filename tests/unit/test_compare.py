"""Parts of a comparison: plans, statistics, property inference, digests of code."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from deepseal.adapter import Recipe
from deepseal.apps.compare import sources
from deepseal.apps.compare.plan import (
    SETS,
    Attack,
    Plan,
    asks_for,
    parse_attacks,
    parse_owner,
    parse_schemes,
    size_parameter,
)
from deepseal.apps.compare.properties import describe, inferred
from deepseal.attacks import REMOVAL
from deepseal.errors import DeepSealError, InputError
from deepseal.rng import Rng
from deepseal.statistics import paired_change, student
from deepseal.watermark import SCHEMES
from deepseal.watermark.integrity import read_strangers, rejections
from deepseal.watermark.verify import strangers


class TestPlan:
    def test_all_is_every_registered_scheme(self):
        assert [name for name, _ in parse_schemes("all", [])] == SCHEMES.names()

    def test_parameters_go_to_their_scheme(self):
        assert parse_schemes("adi,uchida", ["adi.steps=5"]) == (("adi", {"steps": 5}), ("uchida", {}))

    @pytest.mark.parametrize("text", ["adi.no=1", "zhang.steps=1", "steps=1", "adi.steps"])
    def test_wrong_parameters_are_refused(self, text):
        with pytest.raises(DeepSealError):
            parse_schemes("adi,uchida", [text])

    def test_the_owner_s_training_has_parameters(self):
        params = ["owner.schedule=cosine", "adi.steps=5", "owner.learning_rate=0.01"]
        assert parse_schemes("adi", params) == (("adi", {"steps": 5}),)
        owner = parse_owner(params, ["adi"])
        assert owner == {"schedule": "cosine", "learning_rate": 0.01}
        recipe = Plan(data=("digits",), archs=("m:f",), schemes=(), epochs=3, owner=owner).recipe
        assert (recipe.epochs, recipe.schedule, recipe.learning_rate) == (3, "cosine", 0.01)
        assert Plan(data=("digits",), archs=("m:f",), schemes=()).recipe == Recipe(epochs=10)

    @pytest.mark.parametrize("text", ["owner.no=1", "owner.schedule=square", "owner.epochs=3", "owner.steps=9"])
    def test_wrong_parameters_of_training_are_refused(self, text):
        with pytest.raises(DeepSealError):
            parse_owner([text], ["adi"])

    @pytest.mark.parametrize("name", SETS)
    def test_every_attack_of_a_set_can_be_built(self, name):
        attacks = parse_attacks(name)
        assert len({attack.title for attack in attacks}) == len(attacks)
        for attack in attacks:
            attack.build(attack.against("deepsigns-blackbox", {"triggers": 50}))

    def test_attacks_have_parameters(self):
        found = parse_attacks("prune?sparsity=0.8&scope=layer,query-noise?deviation=0.2")
        assert found == (
            Attack("prune", {"sparsity": 0.8, "scope": "layer"}),
            Attack("query-noise", {"deviation": 0.2}),
        )
        assert [attack.on_queries for attack in found] == [False, True]

    @pytest.mark.parametrize("text", ["prun", "prune?no=1", "prune?sparsity=2", ""])
    def test_wrong_attacks_are_refused(self, text):
        with pytest.raises(DeepSealError):
            parse_attacks(text)

    def test_the_thief_overwrites_with_the_owner_s_scheme_and_options(self):
        params = Attack("overwrite", {"strength": 10.0}).against("adi", {"triggers": 40})
        built = REMOVAL.build("overwrite", params)
        assert (built.scheme, built.options, built.strength) == ("adi", ("triggers=40",), 10.0)

    @pytest.mark.parametrize("name", SCHEMES.names())
    def test_every_scheme_has_a_size_for_its_capacity(self, name):
        assert size_parameter(SCHEMES.build(name, {})) is not None

    def test_who_asks_for_independent_models(self):
        assert asks_for(SCHEMES.build("deepsigns-blackbox", {})) == 4
        assert asks_for(SCHEMES.build("adi", {})) == asks_for(SCHEMES.build("deepsigns", {})) == 0

    def test_nonsense_is_refused(self):
        good = {"data": ("digits",), "archs": ("a:b",), "schemes": ()}
        for bad in ({"false_positive": 0.0}, {"data": ()}, {"archs": ("a:b", "a:b")}, {"sizes": (0.0,)}):
            with pytest.raises(InputError):
                Plan(**{**good, **bad})


class TestStatistics:
    def test_student_s_interval_is_scipy_s(self):
        values = [0.1, 0.5, -0.2, 0.3]
        found = student(values)
        low, high = stats.t.interval(0.95, 3, np.mean(values), stats.sem(values))
        assert (found.mean, found.low, found.high) == pytest.approx((np.mean(values), low, high))

    def test_no_interval_without_a_spread(self):
        assert student([2.0]).low is student([2.0, 2.0]).low is None

    def test_paired_interval_covers_what_it_says(self):
        """2,000 pairs of models that differ on a tenth of the questions, one three times as often for the better."""
        rng, inside = Rng(0).numpy(), 0
        for _ in range(2000):
            kind = rng.choice(4, size=300, p=[0.85, 0.05, 0.075, 0.025])
            found = paired_change(np.isin(kind, (0, 3)), np.isin(kind, (0, 2)))
            inside += found.low <= 0.05 <= found.high
        assert stats.binom.cdf(inside, 2000, 0.95) > 1e-4
        assert stats.binom.sf(inside, 2000, 0.98) > 1e-4

    def test_paired_change_has_the_right_sign(self):
        better = paired_change([False, True, False], [True, True, False])
        assert better.mean == pytest.approx(1 / 3)
        assert paired_change([True] * 50, [True] * 50).low < 0 < paired_change([True] * 50, [True] * 50).high


class TestIntegrity:
    def test_p_values_are_the_binomial_s(self, base, key):
        found = read_strangers(base, key, 50, (1e-2,))
        wrong, bits = strangers(base, key, 50).T
        assert found.p_values == pytest.approx(stats.binom.cdf(wrong, bits, 0.5))
        assert read_strangers(base, key, 20, (), first=30).p_values == pytest.approx(found.p_values[30:])
        attained = stats.binom.cdf(stats.binom.ppf(1e-2, bits, 0.5) - 1, bits, 0.5)  # a bit near 0 is an erasure
        assert found.attained[1e-2] == pytest.approx(attained)
        total = rejections([found, found], 1e-2)
        assert (total.n, total.count) == (100, 2 * int((found.p_values <= 1e-2).sum()))
        assert total.place in ("inside", "below", "above")

    def test_a_rule_that_is_too_lenient_is_seen(self, base, key):
        found = read_strangers(base, key, 300, (0.05,), chance=0.4)  # p-values as if coins were heavier than they are
        assert rejections([found], 0.05).place == "above"


class TestPropertyInference:
    def nets(self, gap, count=6, seed=0):
        rng = Rng(seed).numpy()
        return [
            ({"a": rng.normal(), "b": rng.normal()}, [{"a": rng.normal() + gap, "b": rng.normal()}])
            for _ in range(count)
        ]

    def test_what_differs_is_told_apart(self):
        found = inferred(self.nets(gap=20.0), Rng(0))
        assert found["told_apart"]["value"] == 1.0
        assert found["p_value"] == found["lowest_p_value"] == 2 / 64

    def test_three_nets_can_never_prove_it(self):
        assert inferred(self.nets(gap=20.0, count=3), Rng(0))["lowest_p_value"] == 0.25
        assert "reason" in inferred(self.nets(gap=20.0, count=1), Rng(0))

    def test_p_values_are_honest_where_nothing_differs(self):
        values = [inferred(self.nets(0.0, count=5, seed=seed), Rng(0))["p_value"] for seed in range(200)]
        for level in (0.0625, 0.25, 0.5):
            assert stats.binom.sf(sum(p <= level for p in values) - 1, 200, level) > 1e-4

    def test_several_marked_models_of_a_net(self):
        nets = [(unmarked, [marked, {"a": marked["a"] + 0.1, "b": 0.0}]) for unmarked, (marked,) in self.nets(20.0)]
        found = inferred(nets, Rng(0))
        assert found["models"] == 18
        assert found["p_value"] == found["lowest_p_value"] == pytest.approx(1 / 3**6)

    def test_a_description_ignores_the_order_of_neurons(self, base, digits):
        moved = REMOVAL.build("permute", {}).remove(base, digits.train, rng=Rng(0)).model
        before, after = (describe(model, digits.calibration) for model in (base, moved))
        assert before == pytest.approx(after, rel=1e-3, abs=1e-5)
        assert "fc1.weight.kurtosis" in before


class TestSources:
    def test_a_scheme_rests_on_its_own_file_and_not_on_another_s(self):
        reached = sources._reached("deepseal.watermark.adi")
        assert {"deepseal.watermark.triggers", "deepseal.rng", "deepseal.adapter.training"} <= reached
        assert "deepseal.watermark.ewe" not in reached
        measured = sources._reached("deepseal.apps.compare.measure")
        assert "deepseal.watermark.verify" in measured and "deepseal.apps.compare.plan" not in measured

    def test_an_entry_of_a_registry_is_no_code(self):
        entry = '        "new": "deepseal.watermark.new:New",\n'
        assert not sources._ENTRY.sub("", entry).strip()
        assert sources._ENTRY.sub("", '    rate: "x" = 3\n').strip()

    def test_digests_differ_by_code(self):
        assert sources.digest("deepseal.watermark.adi") != sources.digest("deepseal.watermark.uchida")
        assert sources.digest("deepseal.watermark.adi") == sources.digest("deepseal.watermark.adi")
