"""Laws for every registered removal attack."""

from __future__ import annotations

import inspect

import pytest
import torch

from deepseal.attacks import REMOVAL
from deepseal.errors import InputError
from deepseal.rng import Rng
from deepseal.watermark import verify

QUICK = {"fine-tune": {"epochs": 1}}


@pytest.mark.parametrize("name", REMOVAL.names())
class TestEveryAttack:
    def test_never_sees_the_owner_s_key(self, name):
        signature = inspect.signature(REMOVAL.get(name).remove)
        assert set(signature.parameters) == {"self", "model", "data", "rng", "progress"}

    def test_same_seed_same_model(self, name, marked, digits):
        attack = REMOVAL.build(name, QUICK.get(name, {}))
        some = digits.train.take(torch.arange(400))
        first, second = (attack.remove(marked, some, rng=Rng(1)) for _ in range(2))
        assert first.model.fingerprint() == second.model.fingerprint()
        assert dict(first.evidence) == dict(second.evidence)

    def test_proves_that_it_changed_the_model(self, name, marked, digits):
        removed = REMOVAL.build(name, QUICK.get(name, {})).remove(marked, digits.train, rng=Rng(1))
        changed = removed.model.fingerprint() != marked.fingerprint()
        assert changed == (name != "none")
        assert (removed.evidence["relative_weight_change"] > 0.01) == (name != "none")

    def test_refuses_data_of_another_shape(self, name, marked, digits):
        if name == "prune":  # needs no data, so it has none to refuse
            return
        foreign = type(digits.train)(torch.zeros(40, 3, 8, 8), torch.zeros(40, dtype=torch.int64))
        with pytest.raises(InputError, match="shape"):
            REMOVAL.build(name, {}).remove(marked, foreign, rng=Rng(0))


def test_prune_reaches_exactly_what_was_asked(marked, digits):
    for sparsity in (0.0, 0.5, 0.9, 1.0):
        removed = REMOVAL.build("prune", {"sparsity": sparsity}).remove(marked, digits.train, rng=Rng(0))
        assert removed.evidence["sparsity_reached"] == pytest.approx(sparsity, abs=1e-5)
    by_layer = REMOVAL.build("prune", {"sparsity": 0.7, "scope": "layer"}).remove(marked, digits.train, rng=Rng(0))
    assert all(share == pytest.approx(0.7, abs=1e-3) for share in by_layer.evidence["sparsity_by_layer"].values())


def test_magnitude_pruning_keeps_the_largest(marked, digits):
    removed = REMOVAL.build("prune", {"sparsity": 0.5}).remove(marked, digits.train, rng=Rng(0)).model.module
    before = torch.cat([marked.module.get_submodule(f"fc{i}").weight.detach().reshape(-1) for i in (1, 2, 3)]).abs()
    after = torch.cat([removed.get_submodule(f"fc{i}").weight.detach().reshape(-1) for i in (1, 2, 3)]).abs()
    assert before[after == 0].max() <= before[after != 0].min()


@pytest.mark.parametrize("mode", ["ftll", "rtll"])
def test_last_layer_modes_leave_the_rest_alone(mode, marked, digits):
    removed = REMOVAL.build("fine-tune", {"mode": mode, "epochs": 1}).remove(marked, digits.train, rng=Rng(0))
    assert removed.evidence["last_layer"] == "fc3"
    for name, tensor in marked.module.state_dict().items():
        same = torch.equal(tensor, removed.model.module.state_dict()[name])
        assert same == (not name.startswith("fc3"))


@pytest.mark.parametrize("mode", ["rtal", "rtll"])
def test_reset_modes_really_reset(mode, marked, digits):
    few = digits.train.take(torch.arange(2))
    removed = REMOVAL.build("fine-tune", {"mode": mode, "epochs": 1, "learning_rate": 1e-9}).remove(
        marked, few, rng=Rng(0)
    )
    before, after = (m.module.fc3.weight.detach() for m in (marked, removed.model))
    assert abs(float(torch.corrcoef(torch.stack([before.reshape(-1), after.reshape(-1)]))[0, 1])) < 0.1


def test_fine_tune_takes_the_owner_s_recipe(marked, digits):
    evidence = REMOVAL.build("fine-tune", {"epochs": 1}).remove(marked, digits.train, rng=Rng(0)).evidence
    owner = marked.metadata["training"]["recipe"]
    for name in ("optimizer", "learning_rate", "batch_size"):
        assert evidence["recipe"][name] == owner[name]
    assert "owner" in evidence["recipe_source"]
    stated = REMOVAL.build("fine-tune", {"epochs": 1, "learning_rate": "0.01", "optimizer": "sgd"})
    changed = stated.remove(marked, digits.train, rng=Rng(0)).evidence["recipe"]
    assert (changed["optimizer"], changed["learning_rate"]) == ("sgd", 0.01)


def test_overwriting_thief_holds_a_working_key_of_his_own(marked, digits, key):
    removed = REMOVAL.build("overwrite", {"strength": 10}).remove(marked, digits.train, rng=Rng(0))
    assert removed.evidence["thief_bit_errors"] == 0
    assert removed.evidence["thief_verdict"] == "owned"
    assert removed.evidence["thief_layers"] == list(key.public["layers"])
    assert removed.evidence["thief_carriers"] == list(key.public["carriers"])
    assert removed.evidence["thief_key"] != key.fingerprint()


@pytest.mark.parametrize(
    ("name", "params"),
    [
        ("none", {}),
        ("prune", {"sparsity": 0.9}),
        ("prune", {"sparsity": 0.9, "scope": "layer"}),
        ("fine-tune", {"mode": "ftal", "epochs": 20}),
        ("fine-tune", {"mode": "ftll", "epochs": 5}),
        ("fine-tune", {"mode": "rtal", "epochs": 5}),
        ("fine-tune", {"mode": "rtll", "epochs": 5}),
        ("overwrite", {"strength": 1}),
        ("overwrite", {"strength": 100}),
    ],
)
def test_the_mark_survives(name, params, marked, digits, key):
    removed = REMOVAL.build(name, params).remove(marked, digits.train, rng=Rng(5))
    result = verify(removed.model, key, max_false_positive=1e-9)
    assert result.verdict == "owned", result
