"""Rotated residual streams: the attack's arithmetic, and the alignment that turns them back."""

from __future__ import annotations

import numpy as np
import pytest
import streaming
import torch
from torch import nn

from deepseal.adapter import Classifier, Recipe, Split, initialise, train
from deepseal.adapter.rotation import complement, random_rotation, rotated
from deepseal.adapter.streams import streams_of
from deepseal.attacks import REMOVAL
from deepseal.errors import InputError
from deepseal.rng import Rng
from deepseal.watermark import DeepSigns, aligned_view, embed, verify, verify_aligned
from deepseal.watermark.unrotate import _mean_cosine, procrustes, unrotate

SCRAMBLE = [("dummy", {}), ("rescale", {}), ("permute", {})]
ROTATE = [("rotate", {})]
TRANSFORMERS = ("rows?norm=rms", "rows?norm=root", "rows?norm=layer", "rows?norm=none", "rows?gated=true")
PERCEPTRONS = ("perceptron?norm=none", "perceptron?norm=rms")


def attacked(model: Classifier, data: Split, steps) -> Classifier:
    for index, (name, params) in enumerate(steps):
        model = REMOVAL.build(name, params).remove(model, data, rng=Rng(7 + index)).model
    return model


def untrained(arch: str, digits, seed: int = 0) -> Classifier:
    """With gains and biases of normalisations that are not 1 and 0."""
    model = initialise(f"streaming:{arch}", digits.spec, Rng(seed))
    with torch.no_grad():
        for name, tensor in model.module.named_parameters():
            if "norm" in name:
                tensor.add_(0.3 * torch.randn(tensor.shape, generator=Rng(seed + 1).child(name).torch()))
    return model


class TestRotations:
    @pytest.mark.parametrize("centred", [False, True])
    def test_are_orthogonal_and_keep_the_mean_where_they_must(self, centred):
        q = random_rotation(12, Rng(0).torch(), centred=centred)
        torch.testing.assert_close(q @ q.T, torch.eye(12, dtype=torch.float64))
        ones = torch.ones(12, dtype=torch.float64)
        assert torch.allclose(q @ ones, ones) == centred

    def test_complement_is_a_basis(self):
        basis = complement(9)
        torch.testing.assert_close(basis.T @ basis, torch.eye(8, dtype=torch.float64))
        assert basis.sum(dim=0).abs().max() < 1e-12

    @pytest.mark.parametrize("arch", [*TRANSFORMERS, *PERCEPTRONS])
    def test_there_and_back_gives_the_same_weights(self, arch, digits, no_trace):
        model = untrained(arch, digits)
        with no_trace(model):
            (stream,) = streams_of(model).free
            q = random_rotation(stream.width, Rng(1).torch(), centred=stream.centred)
            there = Classifier(rotated(model, {stream: q}, model.copy().module), model.spec)
            gains = {name: model.module.get_submodule(name).weight for name in stream.norms if "none" not in arch}
            back = rotated(there, {stream: q.T}, model.copy().module, gains=gains)
        assert not torch.allclose(there.module.embed.weight, model.module.embed.weight, atol=0.01)
        for name, tensor in back.state_dict().items():
            torch.testing.assert_close(tensor, model.module.state_dict()[name], rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("centred", [False, True])
    def test_procrustes_finds_the_rotation(self, centred):
        generator = np.random.default_rng(0)
        q = random_rotation(16, Rng(0).torch(), centred=centred).numpy()
        columns = [
            (one, q @ one + 0.01 * generator.normal(size=one.shape)) for one in generator.normal(size=(2, 16, 40))
        ]
        np.testing.assert_allclose(procrustes(columns, centred=centred), q, atol=0.02)

    def test_a_fit_to_few_columns_counts_for_nothing(self, digits):
        """Sixteen columns can be turned exactly onto any other sixteen of the same lengths and angles."""
        (stream,) = streams_of(untrained("rows", digits)).free
        generator = np.random.default_rng(0)
        ours, theirs = (np.linalg.qr(generator.normal(size=(64, 16)))[0] for _ in range(2))
        fitted = procrustes([(ours, theirs)], centred=False)
        assert (fitted @ ours * theirs).sum() / 16 > 0.999
        assert abs(_mean_cosine([(ours, theirs)], stream, turned=True)) < 0.2


class TestStreams:
    @pytest.mark.parametrize(
        ("forward", "reason"),
        [
            (lambda m, h: m.head(torch.relu(h)), "relu reads it"),
            (lambda m, h: m.head(h * h), "mul reads it"),
            (lambda m, h: m.head(torch.cat([h[:, :24], h[:, 24:]], 1)), "getitem reads it"),
            (lambda m, h: m.head(h + m.norms[0](h)), "something else is added to it"),
            (lambda m, h: m.head(m.norms[0](m.norms[0](h))), "no single normalisation"),
            (lambda m, h: m.head(m.norms[0](m.norms[1](h))), "no single normalisation"),
            (lambda m, h: m.head(h) + h[:, :10], "getitem reads it"),
            (lambda m, h: m.head(h + m.embed.bias), "runs twice or shares weights"),
        ],
    )
    def test_what_is_read_otherwise_is_named_and_left_alone(self, forward, reason, digits):
        class Other(streaming.Perceptron):
            def forward(self, x):
                return forward(self, self.embed(x.flatten(1)))

        model = Classifier(Other(10, nn.RMSNorm), digits.spec)
        assert reason in streams_of(model).fixed["embed"]
        with pytest.raises(InputError, match="residual stream"):
            attacked(model, digits.train, ROTATE)

    def test_tied_and_computed_weights_are_left_alone(self, digits):
        tied = streaming.decoder()
        tied.module.head.weight = tied.module.embed.weight
        assert "shares weights" in streams_of(tied).fixed["embed"]
        computed = untrained("rows", digits)
        nn.utils.parametrizations.weight_norm(computed.module.head)
        assert "computed from other tensors" in streams_of(computed).fixed["embed"]

    def test_a_bias_behind_a_gain_of_zero_cannot_be_moved(self, digits):
        model = untrained("rows?norm=layer", digits)
        with torch.no_grad():
            model.module.norm.weight[3] = 0.0
        assert "gain is 0" in streams_of(model).fixed["embed"]
        with torch.no_grad():
            model.module.norm.bias[3] = 0.0
        assert attacked(model, digits.train, ROTATE) is not model


class TestTurnsBack:
    @pytest.mark.parametrize("steps", [ROTATE, [*ROTATE, *SCRAMBLE], [*SCRAMBLE, *ROTATE, *ROTATE]], ids=len)
    @pytest.mark.parametrize("arch", [*TRANSFORMERS, "perceptron?norm=rms"])
    def test_every_layer_is_read_as_in_the_original(self, arch, steps, digits):
        model = untrained(arch, digits)
        suspect = attacked(model, digits.train, [step for step in steps if "gated" not in arch or step[0] != "rescale"])
        view = aligned_view(model, suspect)
        (turn,) = view.turns
        assert turn.found and turn.rotation is not None and turn.cosine > 0.99 and abs(turn.plain) < 0.3
        assert view.unread() == []
        layers = [n for n, layer in model.module.named_modules() if isinstance(layer, nn.Linear) and n != "head"]
        pool = dict.fromkeys(layers, "time")
        for chosen in (pool, None):
            before, after = (m.features(digits.test.x[:32], layers, pool=chosen) for m in (model, view))
            for name in layers:
                alike = nn.functional.cosine_similarity(before[name].flatten(1), after[name].flatten(1))
                assert alike.min() > (0.997 if "up" in name else 0.9999), name  # sizes of neurons are the suspect's own
        assert torch.equal(view.query(digits.test.x), suspect.query(digits.test.x))
        assert torch.equal(view.copy().query(digits.test.x), suspect.query(digits.test.x))
        rebuilt = Classifier(view.module, view.spec)
        torch.testing.assert_close(rebuilt.query(digits.test.x), suspect.query(digits.test.x), rtol=1e-3, atol=1e-3)
        for name in ("embed", *(n for n in layers if n.endswith("up"))):
            ours, theirs = (m.module.get_submodule(name).weight.detach() for m in (model, view))
            assert nn.functional.cosine_similarity(ours, theirs).min() > 0.99

    def test_a_stream_without_normalisation_is_turned_or_matched_one_by_one(self, digits):
        model = untrained("perceptron?norm=none", digits)
        for steps, turned in ((ROTATE, True), (SCRAMBLE, False), ([("permute", {})], False)):
            view = aligned_view(model, attacked(model, digits.train, steps))
            assert [turn.rotation is not None for turn in view.turns] == [True] * turned
            assert all(group["matched_share"] == 1.0 for group in view.alignment.summary())

    def test_a_language_model(self):
        model = streaming.decoder()
        x = torch.randint(0, 17, (60, 20), generator=torch.Generator().manual_seed(0))
        data = Split(x, torch.zeros(60, dtype=torch.int64))
        suspect = attacked(model, data, [*ROTATE, ("permute", {}), ("dummy", {})])
        before, after = model.query(x), suspect.query(x)
        assert (after - before).abs().max() < 1e-4 * before.abs().max()
        view = aligned_view(model, suspect)
        assert view.turns[0].cosine > 0.99 and view.unread() == []
        layers = ["embed", "blocks.0.out", "blocks.1.down", "blocks.1.gate"]
        pool = dict.fromkeys(layers, "time")
        ours, theirs = (m.features(x, layers[1:], pool=pool) for m in (model, view))
        for name in layers[1:]:
            assert nn.functional.cosine_similarity(ours[name], theirs[name]).min() > 0.999
        assert [turn.rotation for turn in aligned_view(model, model).turns] == [None]

    def test_gains_that_were_only_folded(self, digits):
        model = untrained("rows", digits)
        (stream,) = streams_of(model).free
        eye = torch.eye(stream.width, dtype=torch.float64)
        folded = Classifier(rotated(model, {stream: eye}, model.copy().module), model.spec)
        straight, (turn,) = unrotate(model, folded)
        assert turn.found and (turn.rotation is None or np.allclose(turn.rotation, np.eye(64), atol=1e-4))
        for name, tensor in straight.tensors().items():
            torch.testing.assert_close(tensor, model.tensors()[name], rtol=1e-4, atol=1e-5)

    def test_what_is_not_turned_is_left_as_it_stands(self, digits, no_trace):
        model = untrained("rows", digits)
        with no_trace(model):
            straight, (turn,) = unrotate(model, model)
        assert straight is model and turn.rotation is None and turn.plain == pytest.approx(1.0)

    @pytest.mark.parametrize("arch", ["rows?norm=rms", "rows?norm=layer"])
    def test_a_stranger_s_stream_is_not_found(self, arch, digits):
        model, stranger = untrained(arch, digits), untrained(arch, digits, seed=9)
        for suspect in (stranger, attacked(stranger, digits.train, ROTATE)):
            view = aligned_view(model, suspect)
            assert [turn.found for turn in view.turns] == [False]
            assert {"embed", "blocks.0.qkv", "blocks.0.up", "blocks.1.down", "head"} <= set(view.unread())
            read = view.features(digits.test.x[:4], ["embed", "blocks.1.down"])
            assert not any(values.any() for values in read.values())
            assert not view.module.embed.weight.any()

    def test_a_thief_s_own_names_are_understood(self, digits):
        class Renamed(streaming.Perceptron):
            def __init__(self):
                super().__init__(10, streaming.Root)
                self.first, self.last, self.middle = self.embed, self.head, self.norms
                del self.embed, self.head, self.norms

            def forward(self, x):
                h = self.first(x.flatten(1))
                for norm, up, down in zip(self.middle, self.ups, self.downs, strict=True):
                    h = h + down(torch.relu(up(norm(h))))
                return self.last(h)

        model = untrained("perceptron?norm=rms", digits)
        names = {"first": "embed", "last": "head", "middle": "norms"}
        state = attacked(model, digits.train, ROTATE).tensors()
        module = Renamed()
        module.load_state_dict(
            {
                new: state[".".join([names.get(first := new.split(".")[0], first), *new.split(".")[1:]])]
                for new in module.state_dict()
            }
        )
        view = aligned_view(model, Classifier(module, digits.spec))
        assert view.turns[0].cosine > 0.99 and view.unread() == []

    def test_another_normalisation_and_another_vocabulary_are_refused(self, digits):
        """As after SliceGPT, which makes RMSNorm of LayerNorm."""
        with pytest.raises(InputError, match="original's layers"):
            aligned_view(untrained("rows?norm=layer", digits), untrained("rows?norm=rms", digits))
        with pytest.raises(InputError, match=r"embed\.weight"):
            aligned_view(streaming.decoder(), streaming.decoder(words=18))

    @pytest.mark.filterwarnings("error")
    @pytest.mark.parametrize("value", [float("nan"), 1e38, 0.0])
    def test_weights_that_are_no_weights(self, value, digits):
        model = untrained("rows", digits)
        broken = model.copy()
        with torch.no_grad():
            broken.module.embed.weight.fill_(value)
            broken.module.blocks[0].norm1.weight.fill_(value)
        assert len(aligned_view(model, broken).turns) == 1


@pytest.fixture(scope="module")
def owner(digits):
    start = initialise("streaming:rows", digits.spec, Rng(0))
    base = train(start, digits.train, recipe=Recipe(epochs=4, batch_size=64), rng=Rng(0))
    key = DeepSigns(bits=64, steps=150, layers=("blocks.0.out", "blocks.1.down")).keygen(
        base, digits.train, owner="me", rng=Rng(1)
    )
    return base, key, embed(base, digits.train, key, rng=Rng(2))


class TestMarks:
    @pytest.mark.parametrize("original", ["unmarked", "marked"])
    @pytest.mark.parametrize(
        "steps",
        [ROTATE, [*ROTATE, *SCRAMBLE], [*ROTATE, ("fine-tune", {"epochs": 3})]],
        ids=["rotate", "and scramble", "and fine-tune"],
    )
    def test_every_bit_is_read_again(self, steps, original, owner, digits):
        base, key, marked = owner
        suspect = attacked(marked, digits.train, steps)
        if "resized" not in suspect.metadata:
            assert verify(suspect, key, max_false_positive=1e-6).verdict == "not-owned"
        both = verify_aligned(suspect, key, base if original == "unmarked" else marked, max_false_positive=1e-9)
        result = both.verification
        assert (result.verdict, result.bits, result.bit_errors, result.tried) == ("owned", 64, 0, 2)
        (stream,) = both.alignment["streams"]
        assert stream["rotated"] and stream["needed"] == (0.5 if original == "unmarked" else 0.95)

    def test_a_stranger_s_model_is_inconclusive(self, owner, digits):
        base, key, _ = owner
        both = verify_aligned(untrained("rows", digits, seed=5), key, base)
        assert both.verification.verdict == "inconclusive"
        assert both.alignment["layers_not_read"] == list(key.public["layers"])
