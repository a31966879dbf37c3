"""The model adapter: spec, capture, classifier, oracle, training, data, checkpoints, zoo."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from PIL import Image
from torch import nn

from deepseal.adapter import (
    Classifier,
    InputSpec,
    Oracle,
    Recipe,
    Split,
    checkpoint,
    initialise,
    load,
    load_data,
    save,
    train,
)
from deepseal.adapter.capture import execution_order, forward_to
from deepseal.adapter.training import Training, output_layer
from deepseal.errors import InputError, TrainingError, UnknownNameError
from deepseal.rng import Rng

ZOO = "deepseal.adapter.zoo:"


def save_npz(path: Path, **arrays) -> str:
    np.savez(path, **arrays)
    return str(path)


def sound_arrays(n=60):
    rng = np.random.default_rng(0)
    return {"x": rng.random((n, 4), dtype=np.float32), "y": np.arange(n) % 3}


class TestSpec:
    def test_round_trip_and_normalise(self):
        spec = InputSpec(shape=(3, 2, 2), num_classes=5, bounds=(-1, 1), mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 4.0))
        assert InputSpec.from_dict(json.loads(json.dumps(spec.as_dict()))) == spec
        x = torch.rand(7, 3, 2, 2, requires_grad=True)
        y = spec.normalise(x)
        assert torch.allclose(y[:, 2], (x[:, 2] - 0.3) / 4.0)
        (gradient,) = torch.autograd.grad(y[:, 1].sum(), x)
        assert torch.allclose(gradient[:, 1], torch.full((7, 2, 2), 0.5))

    @pytest.mark.parametrize(
        ("x", "message"),
        [
            (torch.zeros(2, 5), "shape"),
            (torch.full((2, 4), float("nan")), "NaN"),
            (torch.full((2, 4), 3.0), r"\[0, 1\]"),
        ],
    )
    def test_refuses(self, x, message):
        with pytest.raises(InputError, match=message):
            InputSpec(shape=(4,), num_classes=2).check(x)

    @pytest.mark.parametrize("wrong", [{"shape": ()}, {"bounds": (1, 0)}, {"num_classes": -1}, {"std": (0.0,)}])
    def test_refuses_itself(self, wrong):
        with pytest.raises(InputError):
            InputSpec(**{"shape": (4,), "num_classes": 2, **wrong})

    @pytest.mark.parametrize(
        "wrong", [{}, {"shape": "x", "num_classes": 1, "bounds": [0, 1]}, {"shape": [1], "num_classes": 2, "bounds": 5}]
    )
    def test_foreign_metadata(self, wrong):
        with pytest.raises(InputError):
            InputSpec.from_dict(wrong)


class TestClassifier:
    def test_logits_normalise_inside_and_reach_the_input(self):
        spec = InputSpec(shape=(4,), num_classes=2, mean=(0.5,), std=(0.25,))
        model = Classifier(nn.Linear(4, 2), InputSpec(shape=(4,), num_classes=2))
        normalised = Classifier(model.module, InputSpec(shape=(4,), num_classes=2, mean=None, std=(0.25,)))
        x = torch.rand(3, 4)
        assert torch.allclose(normalised.logits(x), model.module(x / 0.25), atol=1e-6)
        assert spec.mean == (0.5,)

    def test_batching_does_not_change_answers(self, base, digits):
        x = digits.test.x
        one_by_one = torch.cat([base.query(x[i : i + 1]) for i in range(40)])
        assert torch.allclose(one_by_one, base.query(x[:40]), atol=1e-5)
        assert base.query(x[:0]).shape == (0, 10)

    def test_fingerprint_follows_the_weights(self, base):
        copy = base.copy()
        assert copy.fingerprint() == base.fingerprint()
        with torch.no_grad():
            copy.module.fc1.bias[0] += 1e-6
        assert copy.fingerprint() != base.fingerprint()

    def test_wrong_number_of_outputs(self, digits):
        with pytest.raises(InputError, match="logits of shape"):
            Classifier(nn.Sequential(nn.Flatten(), nn.Linear(64, 7)), digits.spec).accuracy(digits.test)

    def test_unknown_layer_names_the_near_ones(self, base, digits):
        with pytest.raises(UnknownNameError, match="'fc1'"):
            base.features(digits.test.x, ["fc9"])

    def test_layer_that_runs_twice_or_never(self, digits):
        class Odd(nn.Module):
            def __init__(self):
                super().__init__()
                self.twice, self.never, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)

            def forward(self, x):
                return self.last(self.twice(self.twice(x)))

        module = Odd()
        with pytest.raises(InputError, match="runs twice"):
            forward_to(module, torch.rand(2, 4), ["twice", "last"])
        with pytest.raises(InputError, match="never ran"):
            forward_to(module, torch.rand(2, 4), ["never"])


class TestOracle:
    def test_counts_and_stops(self, base, digits):
        oracle = base.oracle(output="labels", max_queries=10)
        assert torch.equal(oracle.query(digits.test.x[:8]), base.predict(digits.test.x[:8]))
        with pytest.raises(InputError, match="at most 2 more"):
            oracle.query(digits.test.x[:3])
        assert oracle.queries == 8
        oracle.query(digits.test.x[:2])
        assert oracle.queries == 10

    def test_outputs_are_detached(self, base, digits):
        x = digits.test.x[:3].clone().requires_grad_(True)
        for output, shape in (("labels", (3,)), ("probabilities", (3, 10)), ("logits", (3, 10))):
            answer = base.oracle(output=output).query(x)
            assert tuple(answer.shape) == shape
            assert not answer.requires_grad
        assert torch.allclose(base.oracle(output="probabilities").query(x).sum(1), torch.ones(3), atol=1e-5)

    def test_has_no_attribute_that_holds_the_model(self, base):
        oracle = base.oracle()
        held = [getattr(oracle, name) for name in dir(oracle) if not name.startswith("__")]
        assert isinstance(oracle, Oracle)
        assert not any(isinstance(value, nn.Module | Classifier | torch.Tensor) for value in held)
        assert not hasattr(oracle, "module")


class TestTraining:
    def test_learns_and_is_repeatable(self, digits):
        start = initialise(f"{ZOO}mlp?hidden=(32,)", digits.spec, Rng(0))
        recipe = Recipe(epochs=3, batch_size=64)
        first, second = (train(start, digits.train, recipe=recipe, rng=Rng(1)) for _ in range(2))
        assert first.fingerprint() == second.fingerprint()
        assert first.accuracy(digits.test).value > start.accuracy(digits.test).value + 0.3
        assert train(start, digits.train, recipe=recipe, rng=Rng(2)).fingerprint() != first.fingerprint()

    def test_dropout_is_seeded_and_private(self, digits):
        module = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.Dropout(0.5), nn.Linear(32, 10))
        model = Classifier(module, digits.spec)
        runs = []
        for global_seed in (1, 2):
            torch.manual_seed(global_seed)
            runs.append(train(model, digits.train, recipe=Recipe(steps=5), rng=Rng(0)).fingerprint())
        assert runs[0] == runs[1]

    def test_divergence_is_said(self, digits):
        start = initialise(f"{ZOO}mlp?hidden=(32,)", digits.spec, Rng(0))
        with pytest.raises(TrainingError, match="smaller learning rate"):
            train(start, digits.train, recipe=Recipe(), rng=Rng(0), loss=lambda step: step.logits.sum() * float("inf"))

    def test_trained_layers_only(self, base, digits):
        tuned = train(base, digits.train, recipe=Recipe(steps=2), rng=Rng(0), trained=["fc2"])
        changed = {n for n, t in tuned.module.state_dict().items() if not torch.equal(t, base.module.state_dict()[n])}
        assert changed == {"fc2.weight", "fc2.bias"}
        assert all(p.requires_grad for p in tuned.module.parameters())

    def test_last_batch_of_one_is_left_out(self, digits):
        some = digits.train.take(torch.arange(129))
        start = initialise(f"{ZOO}cnn", digits.spec, Rng(0))
        training = Training(start, some, recipe=Recipe(epochs=1, batch_size=128), rng=Rng(0))
        training.run()

    @pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
    def test_schedules_start_at_one_and_fall(self, schedule):
        factors = [Recipe(schedule=schedule).factor(p / 10) for p in range(11)]
        assert factors[0] == 1.0
        assert all(a >= b - 1e-12 for a, b in zip(factors, factors[1:], strict=False))

    def test_a_schedule_can_start_anew(self):
        recipe = Recipe(steps=10, schedule="cosine", restart=6)
        factors = [recipe.factor(recipe.progress(index, 10)) for index in range(10)]
        plain = Recipe(schedule="cosine")
        assert factors[:6] == [plain.factor(i / 6) for i in range(6)]
        assert factors[6:] == [plain.factor(i / 4) for i in range(4)]
        assert Recipe(restart=6).progress(3, 6) == 0.5

    def test_what_starts_anew_is_a_second_training(self, digits):
        """The optimiser's moments too: without randomness in the model it is two trainings, one after the other."""
        start = initialise(f"{ZOO}mlp", digits.spec, Rng(0))
        few = digits.train.take(torch.arange(64))
        whole = Recipe(batch_size=64, schedule="cosine")
        once = Training(start, few, recipe=dataclasses.replace(whole, steps=7, restart=4), rng=Rng(0)).run()
        first = Training(start, few, recipe=dataclasses.replace(whole, steps=4), rng=Rng(0)).run()
        second = Training(first, few, recipe=dataclasses.replace(whole, steps=3), rng=Rng(0)).run()
        for one, two in zip(once.module.parameters(), second.module.parameters(), strict=True):
            assert torch.allclose(one, two, atol=1e-5)

    def test_output_layer_is_the_last_that_runs(self, digits):
        module = nn.ModuleDict({"head": nn.Linear(8, 10), "body": nn.Linear(64, 8)})

        class Swapped(nn.Module):
            def __init__(self):
                super().__init__()
                self.parts = module

            def forward(self, x):
                return self.parts["head"](self.parts["body"](x.flatten(1)))

        assert output_layer(Classifier(Swapped(), digits.spec)) == "parts.head"


class TestData:
    def test_digits(self, digits):
        assert (len(digits.train), len(digits.calibration), len(digits.test)) == (1199, 239, 359)
        assert digits.spec == InputSpec(shape=(1, 8, 8), num_classes=10)
        rows = torch.cat([digits.train.x, digits.calibration.x, digits.test.x]).flatten(1)
        assert len(rows) == 1797
        assert len(set(digits.fingerprints().values())) == 3
        assert load_data("digits").fingerprints() == digits.fingerprints()

    @pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "isolet"])
    def test_sets_on_disk(self, name):
        try:
            loaded = load_data(name)
        except InputError as error:
            pytest.skip(str(error))
        held = {"mnist": 10_000, "fashion-mnist": 10_000, "isolet": 260}[name]
        assert len(loaded.calibration) == held
        assert len(loaded.test) == (1559 if name == "isolet" else 10_000)
        assert loaded.spec.num_classes == (26 if name == "isolet" else 10)

    def test_absent_set_says_where_it_looked(self, monkeypatch, tmp_path):
        monkeypatch.setenv("DEEPSEAL_DATA", str(tmp_path))
        with pytest.raises(InputError, match="DEEPSEAL_DATA"):
            load_data("isolet")

    def test_npz(self, tmp_path):
        loaded = load_data(save_npz(tmp_path / "a.npz", **sound_arrays()))
        assert (len(loaded.train), len(loaded.calibration), len(loaded.test)) == (40, 8, 12)
        arrays = sound_arrays()
        whole = {"x_train": arrays["x"], "y_train": arrays["y"], "x_test": arrays["x"], "y_test": arrays["y"]}
        assert len(load_data(save_npz(tmp_path / "b.npz", **whole)).test) == 60
        wide = {**arrays, "x": arrays["x"] * 7 - 2}
        assert load_data(save_npz(tmp_path / "c.npz", **wide)).spec.bounds[0] < -1
        stated = load_data(save_npz(tmp_path / "d.npz", **wide) + "?bounds=-5,5&classes=4").spec
        assert (stated.bounds, stated.num_classes) == ((-5.0, 5.0), 4)

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"y": None}, "arrays x and y"),
            ({"x": np.zeros((0, 4)), "y": np.zeros(0, int)}, "at least three"),
            ({"y": np.arange(59)}, "one integer label each"),
            ({"y": np.full(60, -1)}, "label -1"),
            ({"y": np.full(60, 0.5)}, "fractions"),
            ({"x": np.full((60, 4), np.nan)}, "finite inputs"),
            ({"x": np.array([["a"] * 4] * 60)}, "numeric"),
            ({"x": np.array([{}] * 60, dtype=object)}, "plain numeric arrays"),
        ],
    )
    def test_bad_npz(self, tmp_path, change, message):
        arrays = {name: value for name, value in {**sound_arrays(), **change}.items() if value is not None}
        with pytest.raises(InputError, match=message):
            load_data(save_npz(tmp_path / "bad.npz", **arrays))

    def test_a_misspelt_option_is_not_ignored(self, tmp_path):
        source = save_npz(tmp_path / "a.npz", **sound_arrays())
        assert load_data(f"{source}?mean=0.5&std=0.25").spec.std == (0.25,)
        for wrong in (f"{source}?meen=0.5", "digits?maen=0.5"):
            with pytest.raises(UnknownNameError, match="'mean'"):
                load_data(wrong)

    def test_labels_out_of_range(self, tmp_path):
        with pytest.raises(InputError, match="labels 0 … 1"):
            load_data(save_npz(tmp_path / "a.npz", **sound_arrays()) + "?classes=2")

    def test_not_an_npz(self, tmp_path):
        (tmp_path / "x.npz").write_bytes(b"hello")
        for name in ("x.npz", "absent.npz"):
            with pytest.raises(InputError):
                load_data(str(tmp_path / name))

    def test_image_folder(self, tmp_path):
        rng = np.random.default_rng(0)
        for label in ("cat", "dog"):
            (tmp_path / "pets" / label).mkdir(parents=True)
            for index in range(8):
                pixels = rng.integers(0, 255, (6, 5, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(tmp_path / "pets" / label / f"{index}.png")
        loaded = load_data(str(tmp_path / "pets"))
        assert loaded.spec == InputSpec(shape=(3, 6, 5), num_classes=2)
        assert load_data(f"{tmp_path / 'pets'}?size=4&mode=L").spec.shape == (1, 4, 4)
        Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / "pets" / "cat" / "other.png")
        with pytest.raises(InputError, match=r"\?size"):
            load_data(str(tmp_path / "pets"))
        (tmp_path / "pets" / "cat" / "other.png").write_bytes(b"no image")
        with pytest.raises(InputError, match="an image at"):
            load_data(str(tmp_path / "pets"))
        (tmp_path / "empty").mkdir()
        with pytest.raises(InputError, match="folder a class"):
            load_data(str(tmp_path / "empty"))

    def test_factory(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        source = (
            "import numpy as np\ndef make(n=30): return np.random.default_rng(0).random((n, 4)), np.arange(n) % 2\n"
        )
        Path("my_data_module.py").write_text(source + "def wrong(): return 5\n")
        assert len(load_data("my_data_module:make?n=60").test) == 12
        for name in (
            "my_data_module:wrong",
            "my_data_module:mak",
            "no_such_module:make",
            "digit",
            "my_data_module:make?m=1",
        ):
            with pytest.raises(InputError):
                load_data(name)


class TestCheckpoint:
    def test_round_trip_and_equal_bytes(self, base, tmp_path):
        save(base, tmp_path / "m.safetensors")
        loaded = load(tmp_path / "m.safetensors")
        assert loaded.fingerprint() == base.fingerprint()
        assert loaded.spec == base.spec
        assert loaded.metadata["training"] == base.metadata["training"]
        assert checkpoint.to_bytes(loaded) == checkpoint.to_bytes(base)

    @pytest.mark.parametrize("prefix", ["module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."])
    def test_prefixes(self, base, tmp_path, prefix):
        state = {prefix + name: value.clone() for name, value in base.module.state_dict().items()}
        safetensors.torch.save_file(state, tmp_path / "p.safetensors")
        loaded = load(tmp_path / "p.safetensors", architecture=base.architecture, spec=base.spec)
        assert loaded.fingerprint() == base.fingerprint()

    def test_tied_weights(self, tmp_path, digits, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("tied_module.py").write_text(
            "from torch import nn\n"
            "class Tied(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.a = nn.Linear(64, 64); self.b = nn.Linear(64, 64); self.b.weight = self.a.weight\n"
            "        self.c = nn.Linear(64, 10)\n"
            "    def forward(self, x): return self.c(self.b(self.a(x.flatten(1))))\n"
        )
        model = initialise("tied_module:Tied", digits.spec, Rng(0))
        save(model, tmp_path / "t.safetensors")
        assert "b.weight" not in safetensors.torch.load_file(tmp_path / "t.safetensors")
        loaded = load(tmp_path / "t.safetensors", architecture="tied_module:Tied")
        assert loaded.module.a.weight is loaded.module.b.weight
        assert loaded.fingerprint() == model.fingerprint()
        with pytest.raises(InputError, match="--arch"):
            load(tmp_path / "t.safetensors")

    def test_pruning_names_and_half_precision(self, base, tmp_path):
        state = {name: value.clone() for name, value in base.module.state_dict().items()}
        weight = state.pop("fc1.weight")
        mask = (torch.rand(weight.shape) > 0.5).float()
        state |= {"fc1.weight_orig": weight, "fc1.weight_mask": mask}
        safetensors.torch.save_file(state, tmp_path / "m.safetensors")
        loaded = load(tmp_path / "m.safetensors", architecture=base.architecture, spec=base.spec)
        assert torch.equal(loaded.module.fc1.weight, weight * mask)
        half = {name: value.to(torch.bfloat16) for name, value in base.module.state_dict().items()}
        safetensors.torch.save_file(half, tmp_path / "h.safetensors")
        assert load(tmp_path / "h.safetensors", architecture=base.architecture, spec=base.spec).dtype == torch.bfloat16

    def test_strict(self, base, tmp_path, digits):
        state = {name: value.clone() for name, value in base.module.state_dict().items()}
        del state["fc1.weight"]
        state["extra"] = torch.zeros(1)
        state["fc2.bias"] = torch.zeros(7)
        safetensors.torch.save_file(state, tmp_path / "s.safetensors")
        with pytest.raises(InputError) as caught:
            load(tmp_path / "s.safetensors", architecture=base.architecture, spec=base.spec)
        assert "1 missing (fc1.weight)" in str(caught.value)
        assert "1 unexpected (extra)" in str(caught.value)
        assert "fc2.bias (7,) instead of (512,)" in str(caught.value)
        save(base, tmp_path / "b.safetensors")
        with pytest.raises(InputError, match="fit"):
            load(tmp_path / "b.safetensors", architecture=f"{ZOO}lenet")

    def test_a_file_cannot_choose_code(self, base, tmp_path):
        content = {"architecture": "os:system?command=true", "spec": base.spec.as_dict()}
        state = {name: value.clone() for name, value in base.module.state_dict().items()}
        safetensors.torch.save_file(state, tmp_path / "e.safetensors", metadata={"deepseal": json.dumps(content)})
        with pytest.raises(InputError, match="--arch os:system if you trust"):
            load(tmp_path / "e.safetensors")

    def test_pickles_are_refused_unless_told(self, base, tmp_path):
        proof = tmp_path / "proof"

        class Evil:
            def __reduce__(self):
                return (Path.touch, (proof,))

        torch.save(base.module.state_dict(), tmp_path / "ok.pt")
        (tmp_path / "evil.pt").write_bytes(pickle.dumps({"state_dict": Evil()}))
        (tmp_path / "evil.safetensors").write_bytes(pickle.dumps({"state_dict": Evil()}))
        for name in ("ok.pt", "evil.pt", "evil.safetensors"):
            with pytest.raises(InputError, match="pickle"):
                load(tmp_path / name, architecture=base.architecture, spec=base.spec)
        assert not proof.exists()
        loaded = load(tmp_path / "ok.pt", architecture=base.architecture, spec=base.spec, insecure_allow_pickle=True)
        assert loaded.fingerprint() == base.fingerprint()

    @pytest.mark.parametrize("keep", [0, 4, 8, 100, 5000])
    def test_truncated(self, base, tmp_path, keep):
        (tmp_path / "t.safetensors").write_bytes(checkpoint.to_bytes(base)[:keep])
        with pytest.raises(InputError, match="safetensors"):
            load(tmp_path / "t.safetensors")

    @pytest.mark.parametrize("metadata", ["[]", "{}", "not json", '{"architecture": 5}', '{"tied": []}', '{"spec": 3}'])
    def test_foreign_metadata(self, base, tmp_path, metadata):
        state = {name: value.clone() for name, value in base.module.state_dict().items()}
        safetensors.torch.save_file(state, tmp_path / "f.safetensors", metadata={"deepseal": metadata})
        with pytest.raises(InputError):
            load(tmp_path / "f.safetensors")

    def test_torchvision(self, tmp_path):
        spec = InputSpec(shape=(3, 32, 32), num_classes=4)
        model = initialise("torchvision:resnet18", spec, Rng(0))
        save(model, tmp_path / "r.safetensors")
        assert load(tmp_path / "r.safetensors").fingerprint() == model.fingerprint()
        with pytest.raises(UnknownNameError, match="resnet18"):
            initialise("torchvision:resnet1", spec, Rng(0))


@pytest.mark.parametrize("name", ["mlp", "cnn", "wrn", "lenet", *(f"deepsecure_b{i}" for i in (1, 2, 3, 4))])
def test_zoo_fits_any_spec(name):
    shapes = [(1, 8, 8), (1, 28, 28), (3, 32, 32)] + (
        [] if name in ("cnn", "wrn", "lenet", "deepsecure_b1") else [(617,)]
    )
    for shape in shapes:
        model = initialise(ZOO + name, InputSpec(shape=shape, num_classes=7), Rng(0))
        assert model.query(torch.rand(3, *shape)).shape == (3, 7)


@pytest.mark.parametrize(
    ("name", "shape", "classes", "multiplications"),
    [
        ("deepsecure_b1", (1, 28, 28), 10, 0.107e6),
        ("deepsecure_b2", (1, 28, 28), 10, 0.266e6),
        ("deepsecure_b3", (617,), 26, 0.032e6),
        ("deepsecure_b4", (5625,), 19, 12.26e6),
    ],
)
def test_zoo_has_the_papers_sizes(name, shape, classes, multiplications):
    model = initialise(ZOO + name, InputSpec(shape=shape, num_classes=classes), Rng(0))
    total = 0
    for _, layer, out in execution_order(model.module, model.probe()):
        if isinstance(layer, nn.Linear | nn.Conv2d):
            total += layer.weight.numel() * (out[1] * out[2] if len(out) == 3 else 1)
    assert total == pytest.approx(multiplications, rel=0.01)


def test_empty_split_is_refused(base):
    with pytest.raises(InputError, match="no samples"):
        base.accuracy(Split(torch.empty(0, 1, 8, 8), torch.empty(0, dtype=torch.int64)))
