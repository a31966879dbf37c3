"""Laws for every registered removal attack."""

from __future__ import annotations

import inspect

import pytest
import torch

from deepseal.adapter import Classifier, InputSpec, Split, initialise, load, save
from deepseal.attacks import QUERY, REMOVAL
from deepseal.errors import InputError
from deepseal.rng import Rng
from deepseal.watermark import verify

QUICK = {"fine-tune": {"epochs": 1}, "distil": {"epochs": 1}, "other-task": {"epochs": 1, "epochs_back": 1}}
PRESERVING = ("permute", "rescale", "dummy")
STREAMING = ("rotate",)  # needs a residual stream, which none of these networks has
NETWORKS = (
    "deepseal.adapter.zoo:mlp",
    "deepseal.adapter.zoo:cnn",
    "deepseal.adapter.zoo:wrn",
    "deepseal.adapter.zoo:lenet",
    "deepseal.adapter.zoo:deepsecure_b3",
    "torchvision:resnet18",
    "torchvision:mobilenet_v2",
    "torchvision:densenet121",
)


@pytest.fixture
def subject(name, request, digits):
    """The marked model; for an attack that needs a residual stream, a transformer."""
    if name not in STREAMING:
        return request.getfixturevalue("marked")
    return initialise("streaming:rows", digits.spec, Rng(0))


@pytest.mark.parametrize("name", REMOVAL.names())
class TestEveryAttack:
    def test_never_sees_the_owner_s_key(self, name):
        signature = inspect.signature(REMOVAL.get(name).remove)
        assert set(signature.parameters) == {"self", "model", "data", "rng", "progress"}

    def test_same_seed_same_model(self, name, subject, digits):
        attack = REMOVAL.build(name, QUICK.get(name, {}))
        some = digits.train.take(torch.arange(400))
        first, second = (attack.remove(subject, some, rng=Rng(1)) for _ in range(2))
        assert first.model.fingerprint() == second.model.fingerprint()
        assert dict(first.evidence) == dict(second.evidence)

    def test_proves_that_it_changed_the_model(self, name, subject, digits):
        removed = REMOVAL.build(name, QUICK.get(name, {})).remove(subject, digits.train, rng=Rng(1))
        changed = removed.model.fingerprint() != subject.fingerprint()
        assert changed == (name != "none")
        assert (removed.evidence["relative_weight_change"] > 0.002) == (name != "none")  # INT8 changes 0.5 %

    def test_refuses_data_of_another_shape(self, name, subject, digits):
        if name in ("prune", "quantise"):  # they need no data, so they have none to refuse
            return
        foreign = type(digits.train)(torch.zeros(40, 3, 8, 8), torch.zeros(40, dtype=torch.int64))
        with pytest.raises(InputError, match="shape"):
            REMOVAL.build(name, {}).remove(subject, foreign, rng=Rng(0))


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
        ("quantise", {}),
        ("quantise", {"bits": 4}),
        ("quantise", {"format": "float16"}),
        ("quantise", {"format": "bfloat16"}),
        ("other-task", {}),
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


@pytest.fixture(params=NETWORKS)
def network(request):
    """A network of each structure, whose batch normalisations have statistics, and inputs for it."""
    shape = (3, 32, 32) if request.param.startswith("torchvision:") else (1, 16, 16)
    model = initialise(request.param, InputSpec(shape=shape, num_classes=10), Rng(0))
    generator = Rng(1).torch()
    with torch.no_grad():
        for layer in model.module.modules():
            if isinstance(layer, torch.nn.BatchNorm2d):
                layer.running_var.uniform_(0.1, 2.0, generator=generator)
                layer.running_mean.normal_(generator=generator)
                layer.weight.uniform_(-1.5, 1.5, generator=generator)
                layer.bias.normal_(generator=generator)
    return model, Split(torch.rand(16, *shape, generator=generator), torch.arange(16) % 10)


@pytest.mark.parametrize("name", PRESERVING)
def test_the_function_stays_and_the_weights_do_not(name, network, tmp_path):
    model, data = network
    removed = REMOVAL.build(name, {}).remove(model, data, rng=Rng(3))
    before, after = model.query(data.x), removed.model.query(data.x)
    assert (after - before).abs().max() <= 1e-4 * before.abs().max()
    assert removed.evidence["relative_weight_change"] > 0.1
    assert removed.evidence["largest_logit_difference"] == pytest.approx(float((after - before).abs().max()), abs=1e-9)
    save(removed.model, tmp_path / "attacked.safetensors")
    assert torch.equal(load(tmp_path / "attacked.safetensors").query(data.x), after)


@pytest.mark.parametrize("kind", ["dead", "duplicate", "split", "cancel"])
def test_dummy_neurons_are_where_the_evidence_says(kind, marked, digits):
    removed = REMOVAL.build("dummy", {"kind": kind, "share": 0.25}).remove(marked, digits.train, rng=Rng(0))
    assert removed.evidence["neurons_added"] == {
        other: 256 if other == kind else 0 for other in ("dead", "duplicate", "split", "cancel")
    }
    first, second = (removed.model.module.get_submodule(name).weight.detach() for name in ("fc1", "fc2"))
    assert first.shape == (640, 64) and second.shape == (640, 640)
    read = second[:512, 512:]
    if kind == "dead":
        assert not read.any()
    elif kind == "cancel":
        assert torch.equal(first[512:576], first[576:]) and torch.equal(read[:, :64], -read[:, 64:])
    else:
        copied = torch.cdist(first[512:], first[:512]).argmin(dim=1)
        original = marked.module.fc2.weight.detach()[:, copied]
        torch.testing.assert_close(read + second[:512, copied], original)


@pytest.mark.parametrize("norm", ["rms", "root", "layer"])
def test_a_rotated_stream_is_other_weights_and_the_same_function(norm, digits, tmp_path):
    model = initialise(f"streaming:rows?norm={norm}", digits.spec, Rng(0))
    with torch.no_grad():
        for name, tensor in model.module.named_parameters():
            if "norm" in name:
                tensor.add_(0.3 * torch.randn(tensor.shape, generator=Rng(1).torch()))
    removed = REMOVAL.build("rotate", {}).remove(model, digits.train, rng=Rng(3))
    before, after = model.query(digits.test.x), removed.model.query(digits.test.x)
    assert (after - before).abs().max() <= 1e-5 * before.abs().max()
    assert removed.evidence["relative_weight_change"] > 0.5
    assert removed.evidence["largest_logit_difference"] <= 1e-5 * removed.evidence["largest_logit"]
    (stream,) = removed.evidence["streams_rotated"]
    assert stream["writers"] == [
        "embed", "blocks.0.out", "blocks.0.down", "blocks.1.out", "blocks.1.down", "place"
    ]  # fmt: skip
    assert stream["readers"] == ["blocks.0.qkv", "blocks.0.up", "blocks.1.qkv", "blocks.1.up", "head"]
    assert removed.evidence["layers_left_alone"]["blocks.0.up"] == "relu reads it"
    ours, theirs = (m.module.get_submodule("blocks.1.down").weight.detach() for m in (model, removed.model))
    assert torch.nn.functional.cosine_similarity(ours, theirs, dim=0).abs().mean() < 0.3
    torch.testing.assert_close(theirs.T @ theirs, ours.T @ ours, rtol=1e-4, atol=1e-5)
    save(removed.model, tmp_path / "attacked.safetensors")
    assert torch.equal(
        load(tmp_path / "attacked.safetensors", architecture=model.architecture).query(digits.test.x), after
    )


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_without_a_stream_are_refused(name):
    shape = (3, 32, 32) if name.startswith("torchvision:") else (1, 16, 16)
    model = initialise(name, InputSpec(shape=shape, num_classes=10), Rng(0))
    data = Split(torch.rand(16, *shape), torch.arange(16) % 10)
    with pytest.raises(InputError, match="residual stream") as caught:
        REMOVAL.build("rotate", {}).remove(model, data, rng=Rng(0))
    assert "\n" not in str(caught.value)


def test_permutation_alone_breaks_the_plain_reading(marked, digits, key):
    removed = REMOVAL.build("permute", {}).remove(marked, digits.train, rng=Rng(0))
    assert verify(removed.model, key, max_false_positive=1e-9).verdict == "not-owned"


@pytest.mark.parametrize("name", [*PRESERVING, *STREAMING])
def test_a_network_that_cannot_be_traced_is_refused(name, digits):
    class Branching(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = torch.nn.Linear(64, 8), torch.nn.Linear(8, 10)

        def forward(self, x):
            hidden = torch.relu(self.fc1(x.flatten(1)))
            return self.fc2(hidden if hidden.sum() > 0 else -hidden)

    with pytest.raises(InputError, match="can be traced"):
        REMOVAL.build(name, {}).remove(Classifier(Branching(), digits.spec), digits.train, rng=Rng(0))


def test_neurons_that_something_unknown_reads_are_left_alone(digits):
    class Softmaxed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2, self.fc3 = torch.nn.Linear(64, 8), torch.nn.Linear(8, 9), torch.nn.Linear(9, 10)

        def forward(self, x):
            return self.fc3(torch.relu(self.fc2(torch.cumsum(self.fc1(x.flatten(1)), 1))))

    model = Classifier(Softmaxed(), digits.spec)
    removed = REMOVAL.build("permute", {}).remove(model, digits.train, rng=Rng(0))
    assert list(removed.evidence["layers_left_alone"]) == ["fc1"]
    assert torch.equal(removed.model.module.fc1.weight, model.module.fc1.weight)


def test_rescaling_needs_activations_that_pass_it_on(digits):
    model = initialise("deepseal.adapter.zoo:deepsecure_b2", digits.spec, Rng(0))  # sigmoid
    with pytest.raises(InputError, match="pass on a factor"):
        REMOVAL.build("rescale", {}).remove(model, digits.train, rng=Rng(0))


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_integers_have_as_many_levels_as_they_say(bits, marked, digits):
    removed = REMOVAL.build("quantise", {"bits": bits}).remove(marked, digits.train, rng=Rng(0))
    assert all(levels <= 2**bits - 1 for levels in removed.evidence["most_levels_of_a_channel"].values())
    before, after = (m.module.fc1.weight.detach() for m in (marked, removed.model))
    step = before.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert bool(((after - before).abs() <= 0.5001 * step).all())
    assert torch.equal(marked.module.fc1.bias, removed.model.module.fc1.bias)


def test_other_task_learns_the_other_task(marked, digits):
    evidence = REMOVAL.build("other-task", {}).remove(marked, digits.train, rng=Rng(0)).evidence
    assert evidence["accuracy_on_the_other_task"]["value"] > 0.7
    assert evidence["relative_weight_change_away"] > 0.1


def test_distilled_student_is_a_good_copy_without_the_mark(marked, digits, key):
    blind = Split(digits.train.x, torch.zeros(len(digits.train), dtype=torch.int64))
    removed = REMOVAL.build("distil", {"epochs": 30}).remove(marked, blind, rng=Rng(0))
    assert removed.evidence["agreement_with_the_teacher"] > 0.95
    assert removed.model.accuracy(digits.test).value > 0.9
    assert verify(removed.model, key, max_false_positive=1e-9).verdict == "not-owned"
    student = {"student": "deepseal.adapter.zoo:lenet", "epochs": 1}
    assert REMOVAL.build("distil", student).remove(marked, blind, rng=Rng(0)).model.module.conv1.out_channels == 6


class TestQueryNoise:
    def test_answers_about_perturbed_inputs_and_says_so(self, marked, digits):
        x = digits.test.x
        asked = QUERY.build("query-noise", {"deviation": 0.3}).wrap(marked.oracle(output="labels"), rng=Rng(0))
        first, second = asked.query(x), asked.query(x)
        plain = marked.predict(x)
        assert 0.02 < float((first != plain).double().mean()) < 0.7
        assert not torch.equal(first, second)
        assert asked.evidence["queries"] == 2 * len(x)
        assert 0.1 < asked.evidence["root_mean_square_change"] < 0.3  # the bounds take some away
        again = QUERY.build("query-noise", {"deviation": 0.3}).wrap(marked, rng=Rng(0))
        assert torch.equal(again.query(x).argmax(dim=1), first)

    def test_no_noise_changes_nothing(self, marked, digits):
        asked = QUERY.build("query-noise", {"deviation": 0.0}).wrap(marked, rng=Rng(0))
        assert torch.equal(asked.query(digits.test.x), marked.query(digits.test.x))

    def test_inputs_that_do_not_fit_are_refused(self, marked):
        asked = QUERY.build("query-noise", {}).wrap(marked, rng=Rng(0))
        with pytest.raises(InputError, match="shape"):
            asked.query(torch.zeros(2, 3, 8, 8))
