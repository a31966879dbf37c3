"""Alignment: what thieves do to neurons is undone, and what resembles nothing is not read."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Split, initialise
from deepseal.adapter.rewiring import Links, Move, rewired
from deepseal.adapter.wiring import wiring_of
from deepseal.attacks import REMOVAL
from deepseal.errors import InputError
from deepseal.rng import Rng
from deepseal.watermark import SCHEMES, DeepSigns, aligned_view, embed, verify, verify_aligned
from deepseal.watermark.align import align
from deepseal.watermark.aligned import in_terms_of
from deepseal.watermark.matching import Rows, chance_cosine, match, similarity

SCRAMBLE = [("dummy", {}), ("rescale", {}), ("permute", {})]
STACKS = {
    "permute": [("permute", {})],
    "rescale": [("rescale", {"factor": 20.0})],
    "dead": [("dummy", {"kind": "dead", "share": 0.5}), ("permute", {})],
    "duplicate": [("dummy", {"kind": "duplicate", "share": 0.5}), ("permute", {})],
    "split, each part scaled": [("dummy", {"kind": "split", "share": 0.5}), ("rescale", {}), ("permute", {})],
    "cancel": [("dummy", {"kind": "cancel", "share": 0.5}), ("permute", {})],
    "all": SCRAMBLE,
    "twice": [*SCRAMBLE, *SCRAMBLE],
    "INT8": [*SCRAMBLE, ("quantise", {"bits": 8})],
}
LASTING = {
    "fine-tuned": [*SCRAMBLE, ("fine-tune", {"epochs": 20})],
    "pruned and fine-tuned": [("permute", {}), ("prune", {"sparsity": 0.8}), ("fine-tune", {"epochs": 5})],
    "overwritten": [*SCRAMBLE, ("overwrite", {})],
    "scaled a hundredfold": [("rescale", {"factor": 100.0}), ("permute", {}), ("fine-tune", {"epochs": 5})],
}


def attacked(model: Classifier, data: Split, steps) -> Classifier:
    for index, (name, params) in enumerate(steps):
        model = REMOVAL.build(name, params).remove(model, data, rng=Rng(7 + index)).model
    return model


def cut(model: Classifier, share: float) -> Classifier:
    """The model without the hidden neurons that have the smallest outgoing weights."""
    wiring = wiring_of(model)
    moves = {}
    for index in wiring.free():
        group = wiring.groups[index]
        reader = model.module.get_submodule(group.readers[0].layer).weight.detach()
        kept = reader.norm(dim=0).argsort()[round(share * group.width) :]
        moves[index] = Move(kept, Links(kept, torch.arange(len(kept)), torch.ones(len(kept))))
    result = model.copy()
    rewired(model, wiring, moves, {}, result.module)
    return result


@pytest.fixture(scope="module")
def originals(base, marked):
    return {"unmarked": base, "marked": marked}


class TestUndoes:
    @pytest.mark.parametrize("original", ["unmarked", "marked"])
    @pytest.mark.parametrize("stack", STACKS)
    def test_every_bit_is_read_again(self, stack, original, originals, marked, digits, key):
        suspect = attacked(marked, digits.train, STACKS[stack])
        both = verify_aligned(suspect, key, originals[original], max_false_positive=1e-9, null_keys=50)
        result = both.verification
        assert (result.verdict, result.bits, result.bit_errors) == ("owned", 256, 0)
        assert result.tried == both.alignment["readings"] == 2
        assert result.null_keys.owned == 0
        assert both.alignment["original_is_marked"] == (original == "marked")
        assert any("not exact" in warning for warning in result.warnings) == (original == "marked")

    @pytest.mark.parametrize("original", ["unmarked", "marked"])
    @pytest.mark.parametrize("stack", LASTING)
    def test_and_after_further_attacks(self, stack, original, originals, marked, digits, key):
        suspect = attacked(marked, digits.train, LASTING[stack])
        both = verify_aligned(suspect, key, originals[original], max_false_positive=1e-9)
        shares = [group["matched_share"] for group in both.alignment["groups"]]
        readable = original == "unmarked" or max(shares) >= 0.95  # how many a marked original needs
        assert both.verification.verdict == ("owned" if readable else "inconclusive"), both
        assert readable or stack == "scaled a hundredfold"

    @pytest.mark.parametrize("original", ["unmarked", "marked"])
    def test_neurons_cut_away(self, original, originals, marked, digits, key):
        suspect = attacked(cut(marked, 0.15), digits.train, [("permute", {})])
        both = verify_aligned(suspect, key, originals[original], max_false_positive=1e-9)
        assert both.verification.verdict == ("owned" if original == "unmarked" else "inconclusive")
        assert all(0.75 < group["matched_share"] <= 0.86 for group in both.alignment["groups"])

    def test_signs_of_odd_functions(self, digits):
        model = initialise("deepseal.adapter.zoo:deepsecure_b3", digits.spec, Rng(0))
        key = DeepSigns(bits=64, steps=150).keygen(model, digits.train, owner="me", rng=Rng(1))
        marked = embed(model, digits.train, key, rng=Rng(2))
        suspect = attacked(marked, digits.train, [("dummy", {"share": 0.5}), ("rescale", {}), ("permute", {})])
        assert verify(marked, key).bit_errors == 0
        for original, wrong in ((model, 3), (marked, 0)):  # marking moved a few neurons too far to be found again
            both = verify_aligned(suspect, key, original)
            assert both.verification.verdict == "owned"
            assert both.verification.bit_errors <= wrong

    @pytest.mark.parametrize("arch", ["zoo:cnn", "zoo:wrn", "zoo:lenet"])
    def test_convolutions_normalisation_and_residual_streams(self, arch, digits):
        start = initialise(f"deepseal.adapter.{arch}", digits.spec, Rng(0))
        tuned = {"epochs": 1}
        model = REMOVAL.build("fine-tune", tuned).remove(start, digits.train, rng=Rng(1)).model  # gives it statistics
        suspect = attacked(model, digits.train, SCRAMBLE)
        view = aligned_view(model, suspect)
        assert all(group["matched_share"] == 1.0 for group in view.alignment.summary())
        layers = [n for n, layer in model.module.named_modules() if isinstance(layer, (nn.Conv2d, nn.BatchNorm2d))]
        before, after = (m.features(digits.test.x[:64], layers) for m in (model, view))
        for name in layers:
            ours, theirs = before[name].reshape(64, -1), after[name].reshape(64, -1)
            channels = getattr(model.module.get_submodule(name), "out_channels", None)
            channels = channels or model.module.get_submodule(name).num_features
            ours, theirs = (v.reshape(64, channels, -1).transpose(0, 1).flatten(1) for v in (ours, theirs))
            alike = nn.functional.cosine_similarity(ours, theirs)
            assert alike[ours.norm(dim=1) > 1e-4].min() > 0.999, name


@pytest.mark.parametrize("name", [n for n in SCHEMES.names() if SCHEMES.get(n).access == "white-box"])
def test_every_scheme_that_reads_weights_or_activations(name, base, digits):
    scheme = SCHEMES.build(name, {"bits": 64})
    key = scheme.keygen(base, digits.train, owner="me", rng=Rng(1))
    marked = embed(base, digits.train, key, rng=Rng(2))
    suspect = attacked(marked, digits.train, SCRAMBLE)
    for original in (base, marked):
        result = verify_aligned(suspect, key, original).verification
        assert (result.verdict, result.bits, result.bit_errors) == ("owned", 64, 0)


class TestView:
    def test_module_holds_the_suspect_s_weights_in_the_original_s_places(self, marked, digits):
        suspect = attacked(marked, digits.train, SCRAMBLE)
        view = aligned_view(marked, suspect)
        assert {n: v.shape for n, v in view.tensors().items()} == {n: v.shape for n, v in marked.tensors().items()}
        rebuilt = Classifier(view.module, view.spec)
        torch.testing.assert_close(rebuilt.query(digits.test.x), suspect.query(digits.test.x), rtol=1e-3, atol=1e-3)
        ours, theirs = marked.module.fc2.weight.detach(), view.module.fc2.weight.detach()
        assert nn.functional.cosine_similarity(ours, theirs).min() > 0.9

    def test_answers_are_the_suspect_s(self, base, marked, digits):
        tuned = attacked(marked, digits.train, [*SCRAMBLE, ("fine-tune", {"epochs": 2})])
        for view in (aligned_view(base, tuned), aligned_view(base, tuned).copy()):
            assert torch.equal(view.query(digits.test.x), tuned.query(digits.test.x))

    def test_unchanged_suspect_is_aligned_to_itself(self, marked):
        found = align(marked, marked)
        assert all(group["moved"] == 0 and group["copies"] == 0 for group in found.summary())

    def test_leaves_no_trace(self, marked, digits, key, no_trace):
        suspect = attacked(marked, digits.train, SCRAMBLE)
        with no_trace(marked), no_trace(suspect):
            verify_aligned(suspect, key, marked)


class TestRefuses:
    def test_what_resembles_nothing(self, base, marked, digits, key):
        stranger = initialise("deepseal.adapter.zoo:mlp", digits.spec, Rng(99))
        both = verify_aligned(stranger, key, marked)
        assert both.verification.verdict == "inconclusive"
        assert both.alignment["layers_not_read"] == ["fc1", "fc2"]
        assert any("not read" in warning for warning in both.verification.warnings)

    def test_a_crowd_of_random_neurons(self, base, marked, digits, key):
        """More neurons, more chances to resemble one: the gate knows."""
        crowd = initialise("deepseal.adapter.zoo:mlp?hidden=6000,64", digits.spec, Rng(5))
        for original in (base, marked):
            both = verify_aligned(crowd, key, original)
            assert both.verification.verdict == "inconclusive"
            assert both.alignment["groups"][0]["matched_share"] < 0.01

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e38, 0.0])
    def test_weights_that_are_no_weights(self, value, base, marked, key):
        broken = marked.copy()
        with torch.no_grad():
            broken.module.fc1.weight.fill_(value)
            broken.module.fc2.bias.fill_(value)
        assert verify_aligned(broken, key, base).verification.verdict == "inconclusive"

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_precision_is_no_hindrance(self, dtype, base, marked, digits, key):
        half = attacked(marked, digits.train, [("permute", {})])
        half.module.to(dtype)
        result = verify_aligned(half, key, base, max_false_positive=1e-9).verification
        assert (result.verdict, result.bit_errors) == ("owned", 0)

    def test_another_structure(self, marked, digits, key):
        for arch in ("mlp?hidden=512,", "mlp?hidden=512,512,512", "lenet"):
            other = initialise(f"deepseal.adapter.zoo:{arch}", digits.spec, Rng(0))
            with pytest.raises(InputError, match="original's layers"):
                verify_aligned(other, key, marked)

    def test_the_same_layers_with_another_function_between(self, marked, digits):
        class Other(nn.Module):
            def __init__(self):
                super().__init__()
                self.a, self.b, self.c = (nn.Linear(*sizes) for sizes in ((64, 512), (512, 512), (512, 10)))

            def forward(self, x):
                return self.c(torch.tanh(self.b(torch.tanh(self.a(x.flatten(1))))))

        with pytest.raises(InputError, match="computes the same"):
            in_terms_of(marked, Classifier(Other(), digits.spec))

    def test_a_null_model_that_only_answers(self, base, marked, key):
        with pytest.raises(InputError, match="with their weights"):
            verify_aligned(marked, key, base, null_models=[base.oracle()])


def test_a_thief_s_own_names_are_understood(base, marked, digits, key):
    class Renamed(nn.Module):
        def __init__(self, sizes):
            super().__init__()
            self.body = nn.ModuleList(nn.Linear(*pair) for pair in zip(sizes, sizes[1:], strict=False))

        def forward(self, x):
            x = x.flatten(1)
            for layer in self.body[:-1]:
                x = torch.relu(layer(x))
            return self.body[-1](x)

    scrambled = attacked(marked, digits.train, SCRAMBLE)
    layers = [scrambled.module.get_submodule(name) for name in ("fc1", "fc2", "fc3")]
    module = Renamed([layers[0].in_features, *(layer.out_features for layer in layers)])
    for own, layer in zip(module.body, layers, strict=True):
        own.load_state_dict(layer.state_dict())
    both = verify_aligned(Classifier(module, digits.spec), key, base, max_false_positive=1e-9)
    assert (both.verification.verdict, both.verification.bit_errors) == ("owned", 0)


class TestMatching:
    def test_chance_cosine_is_where_chance_puts_it(self):
        generator = np.random.default_rng(0)
        for dimension in (3, 9, 64):
            highest = []
            for _ in range(400):
                one, other = generator.normal(size=(2, 30, dimension))
                one, other = (v / np.linalg.norm(v, axis=1, keepdims=True) for v in (one, other))
                highest.append(float((one @ other.T).max()))
            gate = float(chance_cosine(np.array([float(dimension)]), 900, rate=0.1)[0])
            above = np.mean(np.array(highest) > gate)
            assert 0.04 < above <= 0.14, (
                dimension,
                above,
            )  # the bound is a union bound: 0.1 at most, and not far below

    def test_pruned_weights_say_nothing(self):
        generator = np.random.default_rng(1)
        ours = generator.normal(size=(40, 500))
        order = generator.permutation(40)
        theirs = 3.0 * ours[order] * (generator.random((40, 500)) < 0.2)
        part = similarity(Rows(ours, theirs))
        found = match([part], [False], 0.5)
        assert np.array_equal(found.partner, order) and found.sure.all()
        np.testing.assert_allclose(part.ratio[order, np.arange(40)], 3.0)
        assert (part.dimension < 120).all()

    def test_few_weights_are_never_sure(self):
        generator = np.random.default_rng(2)
        found = match([similarity(Rows(*generator.normal(size=(2, 50, 3))))], [False], 0.5)
        assert not found.sure.any()

    def test_opposite_signs_only_where_the_law_allows(self):
        ours = np.random.default_rng(3).normal(size=(20, 100))
        part = similarity(Rows(ours, -ours))
        assert (match([part], [True], 0.5).partner == np.arange(20)).all()
        assert (match([part], [False], 0.5).partner == -1).all()


def test_spec_of_another_input_is_refused(marked, key):
    other = initialise("deepseal.adapter.zoo:mlp", InputSpec(shape=(1, 9, 9), num_classes=10), Rng(0))
    with pytest.raises(InputError):
        verify_aligned(other, key, marked)
