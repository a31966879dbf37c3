"""Models of every kind through the adapter and DeepSigns: tokens, masks, recurrence, one logit, experts, states."""

from __future__ import annotations

import copy
import dataclasses

import numpy as np
import pytest
import torch
from networks import Decoder, Encoder, Experts, OneLogit, Recurrent, StateSpace, encoder, sentences
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

from deepseal.adapter import Classifier, Field, Inputs, InputSpec, Recipe, Split, load, save, train
from deepseal.adapter.capture import forward_to, running_between
from deepseal.adapter.inputs import concatenated, single
from deepseal.adapter.layers import hidden_layers, layer_readings
from deepseal.adapter.outputs import pool, reduce, select
from deepseal.attacks import REMOVAL
from deepseal.errors import InputError
from deepseal.rng import Rng
from deepseal.watermark import DeepSigns, Key, embed, extract, verify
from deepseal.watermark.scheme import scheme_of

FRAMES = InputSpec((8, 8), 10)
WIDE = {"width": 96}


def frames(split: Split) -> Split:
    return Split(split.tensor.reshape(-1, 8, 8), split.y)


def halves(split: Split) -> Split:
    return Split(split.x, (split.y > 4).long())


def pixels(split: Split) -> Split:
    return Split.unlabelled((split.tensor.reshape(len(split), 64)[:, 16:40] * 16).long())


def built(kind: str, data: Split) -> tuple[Classifier, Split]:
    """A network of a kind and its owner's data; those with classes are trained on digits."""
    torch.manual_seed(0)
    if kind == "encoder":
        return encoder(**WIDE), Split.unlabelled(sentences(300))
    if kind == "decoder":
        spec = InputSpec((24,), 0, bounds=(0, 16), integer=True, output="logits", reduce="last")
        return Classifier(Decoder(**WIDE), spec), pixels(data)
    if kind == "one-logit":
        return _trained(OneLogit(), InputSpec((1, 8, 8), 2), halves(data))
    network = {"recurrent": Recurrent, "experts": Experts, "states": StateSpace}[kind]
    return _trained(network(10, **WIDE), FRAMES, frames(data))


def _trained(module: nn.Module, spec: InputSpec, data: Split) -> tuple[Classifier, Split]:
    return train(Classifier(module, spec), data, recipe=Recipe(epochs=6, batch_size=64), rng=Rng(0)), data


KINDS = ("encoder", "decoder", "one-logit", "recurrent", "experts", "states")


@pytest.fixture(scope="module", params=KINDS)
def case(request, digits):
    """Kind, model, owner's data, key of 64 bits, marked model."""
    model, data = built(request.param, digits.train)
    scheme = DeepSigns(bits=64, steps=60 if request.param == "states" else 160)
    key = scheme.keygen(model, data, owner="Example Ltd", rng=Rng(0))
    return request.param, model, data, key, embed(model, data, key, rng=Rng(1))


class TestKinds:
    def test_is_marked_and_read_from_the_key_s_file_form(self, case):
        _, model, _, key, marked = case
        again = Key.from_bytes(key.to_bytes())
        assert again.to_bytes() == key.to_bytes()
        result = verify(marked, again, max_false_positive=1e-9)
        assert result.verdict == "owned", result
        assert verify(model, again, max_false_positive=1e-9).verdict == "not-owned"

    def test_keeps_the_model_s_answers(self, case):
        _, model, data, _, marked = case
        if model.spec.num_classes:
            assert marked.accuracy(data).value > model.accuracy(data).value - 0.01
        else:
            before, after = model.query(data.x), marked.query(data.x)
            assert float((after - before).norm() / before.norm()) < 0.1

    def test_leaves_no_trace(self, case, no_trace):
        _, model, data, key, _ = case
        quick = dataclasses.replace(DeepSigns.from_mapping(key.params), steps=1, rounds=1)
        some = data.take(torch.arange(150))
        for training in (True, False):
            model.module.train(training)
            with no_trace(model):
                again = quick.keygen(model, some, owner="me", rng=Rng(3))
                embed(model, some, again, rng=Rng(4))
                verify(model, again, null_keys=2)
                model.query(some.x)

    def test_a_training_flag_left_wrong_changes_nothing(self, case):
        _, _, _, key, marked = case
        left = marked.copy()
        left.module.train()
        assert np.array_equal(extract(left, key).margin, extract(marked, key).margin)

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_batches_of_any_size_differ_by_less_than_the_noise(self, case, dtype, monkeypatch):
        _, _, _, key, marked = case
        suspect = marked.copy()
        suspect.module.to(dtype)
        scheme, whole = scheme_of(key), extract(suspect, key)
        assert whole.usable.all(), "no noise hides a mark"
        seen = scheme.observe(suspect, key)
        for size in (1, 3, 256):
            monkeypatch.setattr("deepseal.adapter.classifier.BATCH", size)
            other = scheme.observe(suspect, key)
            for layer, values in seen.values.items():
                assert bool(((other.values[layer] - values).norm(dim=1) < 0.1 * seen.rounding[layer]).all())
            assert np.array_equal(scheme.decode(other, key).bits, whole.bits)

    def test_bfloat16_gives_the_same_verdict(self, case):
        _, model, _, key, marked = case
        for suspect, verdict in ((marked, "owned"), (model, "not-owned")):
            half = suspect.copy()
            half.module.to(torch.bfloat16)
            read, whole = verify(half, key, max_false_positive=1e-9), verify(suspect, key, max_false_positive=1e-9)
            assert (read.verdict, read.erasures) == (verdict, whole.erasures)
            assert abs(read.bit_errors - whole.bit_errors) <= 1

    def test_survives_pruning(self, case):
        _, _, data, key, marked = case
        pruned = REMOVAL.build("prune", {"sparsity": 0.3}).remove(marked, data, rng=Rng(5))
        assert verify(pruned.model, key, max_false_positive=1e-9).verdict == "owned"

    def test_attacks_that_train(self, case, no_trace):
        _, _, data, key, marked = case
        with no_trace(marked):
            tuned = REMOVAL.build("fine-tune", {"epochs": 1}).remove(marked, data, rng=Rng(6))
        assert tuned.evidence["targets"].startswith("labels" if marked.spec.num_classes else "its own answers")
        assert tuned.evidence["relative_weight_change"] > 0
        assert verify(tuned.model, key, max_false_positive=1e-6).verdict == "owned"


class TestInputs:
    def test_is_a_batch(self):
        x = sentences(10)
        assert (len(x), len(x[3:5]), len(x[torch.tensor([1, 1, 2])])) == (10, 2, 3)
        assert [len(part) for part in x.split(4)] == [4, 4, 2]
        joined = concatenated(x.split(4))
        assert isinstance(joined, Inputs)
        assert torch.equal(joined["tokens"], x["tokens"])
        with pytest.raises(TypeError):
            x.tensors["tokens"] = x["mask"]  # type: ignore[index]

    def test_refuses_what_is_none(self):
        for wrong in ({}, {"a": [1]}, {"a": torch.zeros(2), "b": torch.zeros(3)}):
            with pytest.raises(InputError):
                Inputs(wrong)
        with pytest.raises(InputError, match="one length"):
            concatenated([sentences(2), sentences(2).map(lambda t: t[:, :5])])
        with pytest.raises(InputError, match="one tensor"):
            single(sentences(2))
        with pytest.raises(InputError, match="one kind"):
            concatenated([sentences(2), torch.zeros(2, 3)])

    @pytest.mark.parametrize(
        ("change", "told"),
        [
            (lambda x: x["tokens"], "inputs called tokens, mask"),
            (lambda x: Inputs({"tokens": x["tokens"]}), "inputs called"),
            (lambda x: x.map(lambda t: t.float()), "integers"),
            (lambda x: x.map(lambda t: t + 60), r"in \[0, 59\]"),
            (lambda x: x.map(lambda t: t[..., None]), "shape"),
        ],
    )
    def test_other_inputs_are_refused(self, change, told):
        with pytest.raises(InputError, match=told):
            encoder().query(change(sentences(4)))

    def test_length_may_vary_and_padding_does_not_count(self):
        model, x = encoder(), sentences(6)
        wider = x.map(lambda t: nn.functional.pad(t, (0, 7)))
        assert torch.allclose(model.query(x), model.query(wider), atol=1e-5)
        assert torch.allclose(model.query(x[:1]), model.query(x)[:1], atol=1e-5)


class TestSpec:
    def test_survives_its_plain_form(self):
        for spec in (encoder(3).spec, InputSpec((-1,), 0, bounds=(0, 9), integer=True, output="a.0", reduce="last")):
            assert InputSpec.from_dict(spec.as_dict()) == spec
        assert set(InputSpec((3,), 2).as_dict()) == {"shape", "num_classes", "bounds", "mean", "std"}

    @pytest.mark.parametrize(
        "wrong",
        [
            {"shape": (0,)},
            {"shape": ()},
            {"shape": (2,), "fields": {"a": Field((2,))}},
            {"shape": (2,), "reduce": "median"},
            {"shape": (2,), "integer": True, "mean": 0.5},
            {"shape": (), "fields": {"a": Field((2,), mask=True), "b": Field((2,), mask=True)}},
        ],
    )
    def test_refuses_itself(self, wrong):
        with pytest.raises(InputError):
            InputSpec(**{"num_classes": 2, **wrong})

    def test_one_logit_is_two_classes(self):
        torch.manual_seed(0)
        model, x = Classifier(OneLogit(), InputSpec((1, 8, 8), 2)), torch.rand(5, 1, 8, 8)
        raw = model.module(x)
        assert torch.allclose(model.query(x).softmax(dim=1)[:, 1], raw.sigmoid())
        assert torch.equal(model.predict(x), (raw > 0).long())

    def test_no_classes_no_labels(self):
        model = encoder()
        for call in (
            lambda: model.predict(sentences(3)),
            lambda: model.accuracy(Split.unlabelled(sentences(3))),
            lambda: model.oracle(output="labels"),
        ):
            with pytest.raises(InputError, match="with classes"):
                call()
        assert model.oracle(output="logits").query(sentences(3)).shape == (3, 32)

    def test_file_keeps_the_spec(self, tmp_path):
        model = encoder()
        save(model, tmp_path / "a.safetensors")
        again = load(tmp_path / "a.safetensors", architecture="networks:Encoder?classes=4")
        assert again.spec == model.spec
        assert torch.equal(again.query(sentences(4)), model.query(sentences(4)))

    def test_answers_of_the_wrong_shape_are_explained(self):
        model = Classifier(Encoder(4), dataclasses.replace(encoder().spec, reduce="none"))
        with pytest.raises(InputError, match="output and reduce"):
            model.query(sentences(3))
        for path in ("nothing", "scores.5", "scores"):
            wrong = Classifier(Encoder(4), dataclasses.replace(encoder().spec, output=path))
            if path != "scores":
                with pytest.raises(InputError, match="output"):
                    wrong.query(sentences(3))
            else:
                with pytest.raises(InputError, match="tensor"):
                    wrong.query(sentences(3))


class TestOutputs:
    def test_selects(self):
        a, b = torch.zeros(2), torch.ones(2)
        assert select((a, (b, a)), "1.0") is b
        assert select({"x": [a, b]}, "x.-1") is b
        assert select(((b, a), 3), "") is b

    def test_reduces(self):
        values, mask = torch.arange(12.0).reshape(2, 3, 2), torch.tensor([[1, 1, 0], [1, 1, 1]])
        assert reduce(values, "mask", mask)[0].tolist() == [1.0, 2.0]
        assert reduce(values, "last", mask)[0].tolist() == [2.0, 3.0]
        assert reduce(values, "last", None)[0].tolist() == [4.0, 5.0]
        assert reduce(values, "mean", mask)[0].tolist() == [2.0, 3.0]
        assert reduce(values, "first", mask)[1].tolist() == [6.0, 7.0]
        with pytest.raises(InputError, match="attention mask"):
            reduce(values, "mask", None)

    def test_pools(self):
        maps = torch.arange(24.0).reshape(2, 3, 2, 2)
        assert pool(maps, "space").tolist() == maps.mean(dim=(2, 3)).tolist()
        assert pool(maps, "time").shape == (2, 2)
        assert pool(maps, "none").shape == (2, 12)
        assert torch.equal(pool(torch.ones(5, 2, 3), "time-first"), torch.ones(2, 3))
        with pytest.raises(InputError, match="mask"):
            pool(torch.ones(2, 5, 3), "mask", torch.ones(2, 4))


class TestLayers:
    def test_experts_and_routers_hold_no_bits(self):
        torch.manual_seed(0)
        model = Classifier(Experts(10), FRAMES)
        assert [name for name, _, _ in hidden_layers(model)] == ["entry", "router", "mix"]
        assert DeepSigns(bits=32).keygen(model, _some(), owner="me").public["layers"] == ["entry", "mix"]

    @pytest.mark.parametrize(("batch_first", "rule"), [(True, "time"), (False, "time-first")])
    def test_recurrent_layers(self, batch_first, rule):
        torch.manual_seed(0)
        model = Classifier(Recurrent(10, batch_first), FRAMES)
        readings = layer_readings(model, ["lstm", "lstm:1.0"])
        assert (readings["lstm"].pool, readings["lstm"].width) == (rule, 32)
        captured = forward_to(model.module, model.probe(3), ["lstm:1.1"])["lstm:1.1"]
        assert captured.shape == (2, 3, 32), "the second state of an LSTM, (layers, N, width)"

    def test_what_runs_between_layers(self):
        model = encoder()
        between = running_between(model.module, model.probe(), ["blocks.1.qkv", "blocks.1.wide"])
        assert between == ["blocks.1.norm2", "blocks.1.qkv", "blocks.1.out", "blocks.1.wide"]

    def test_gentle_marking_leaves_the_other_layers_alone(self, case):
        kind, model, _, key, marked = case
        if model.spec.num_classes:
            return  # robust, which trains everything
        within = {f"{name}." for name in running_between(model.module, model.probe(), key.public["layers"])}
        before, after = model.tensors(), marked.tensors()
        changed = {name for name in before if not torch.equal(before[name], after[name])}
        assert changed
        if kind != "decoder":  # its head is tied to its first layer
            assert all(any(name.startswith(prefix) for prefix in within) for name in changed)


def _some() -> Split:
    generator = torch.Generator().manual_seed(0)
    return Split(torch.rand(200, 8, 8, generator=generator), torch.arange(200) % 10)


class Recomputing(nn.Sequential):
    """Recomputes its middle in the backward pass, in evaluation mode too."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        middle = recomputed(lambda flat: self[2](self[1](flat)), self[0](x), use_reentrant=False)
        return self[3](middle)


def test_gradient_checkpointing_gives_the_same_mark(digits):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    plain = train(Classifier(layers, digits.spec), digits.train, recipe=Recipe(epochs=3), rng=Rng(0))
    saving = Classifier(Recomputing(*copy.deepcopy(list(plain.module))), digits.spec)
    scheme = DeepSigns(bits=32, layers=("1",), steps=20, rounds=1)
    key = scheme.keygen(plain, digits.train, owner="me", rng=Rng(0))
    first, second = (embed(model, digits.train, key, rng=Rng(1)) for model in (plain, saving))
    for name, tensor in first.tensors().items():
        assert torch.allclose(tensor, second.tensors()[name], atol=1e-5), name


def test_autocast_marks_too(digits, base):
    scheme = DeepSigns(bits=128, steps=160)
    key = scheme.keygen(base, digits.train, owner="me", rng=Rng(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        marked = embed(base, digits.train, key, rng=Rng(1))
    assert {p.dtype for p in marked.module.parameters()} == {torch.float32}
    assert verify(marked, key, max_false_positive=1e-9).verdict == "owned"
