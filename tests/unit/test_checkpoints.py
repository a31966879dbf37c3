"""Checkpoints as they come: real files of every kind, made by torch, torchvision and safetensors themselves."""

from __future__ import annotations

import json

import checkpoint_networks as networks
import pytest
import safetensors.torch
import torch
from checkpoint_networks import NET, SPEC, moved, write, x
from torch import nn

from deepseal.adapter import Classifier, InputSpec, initialise, load, save
from deepseal.adapter.names import MismatchError, spellings
from deepseal.rng import Rng

WORDS = InputSpec(shape=(6,), num_classes=16, bounds=(0, 15))


WRAPPED = {
    "parallel": lambda: nn.DataParallel(networks.net()),
    "compiled": lambda: networks.net("compiled"),
    "compiled parallel": lambda: torch.compile(nn.DataParallel(networks.net()), backend="eager"),
    "parallel compiled": lambda: nn.DataParallel(networks.net("compiled")),
    "three": lambda: nn.DataParallel(torch.compile(nn.DataParallel(networks.net("inner")), backend="eager")),
    "inner": lambda: networks.net("inner"),
    "plain": networks.net,
}


class TestNames:
    @pytest.mark.parametrize("module", ["plain", "compiled", "inner"])
    @pytest.mark.parametrize("file", WRAPPED)
    def test_prefixes_on_the_file_the_module_and_both(self, file, module, tmp_path):
        source = WRAPPED[file]()
        loaded = load(write(tmp_path / "m.safetensors", source), architecture=f"{NET}?kind={module}", spec=SPEC)
        (one,) = (value for name, value in source.state_dict().items() if name.endswith("fc.weight"))
        assert torch.equal(loaded.module.fc.weight, one)
        layers = [name for name, layer in loaded.module.named_modules() if isinstance(layer, nn.Linear | nn.Flatten)]
        assert [value.shape[1] for value in loaded.features(x(), layers).values()] == [144, 10]
        assert torch.equal(loaded.query(x()), Classifier(networks.bare(source), SPEC).query(x()))
        save(loaded, tmp_path / "again.safetensors")
        again = load(tmp_path / "again.safetensors", architecture=NET)
        assert torch.equal(again.query(x()), loaded.query(x()))

    def test_prefixed_and_pruned(self, tmp_path):
        source = nn.DataParallel(networks.net("prune"))
        loaded = load(write(tmp_path / "m.safetensors", source), architecture=f"{NET}?kind=compiled", spec=SPEC)
        assert torch.equal(loaded.module.fc.weight, source.module.fc.weight)

    def test_a_name_that_occurs_with_and_without_prefix_is_refused(self, tmp_path):
        state = {name: value.clone() for name, value in networks.net().state_dict().items()}
        state["module.fc.weight"] = torch.zeros(10, 144)
        safetensors.torch.save_file(state, tmp_path / "m.safetensors")
        with pytest.raises(MismatchError) as caught:
            load(tmp_path / "m.safetensors", architecture=NET, spec=SPEC)
        assert (caught.value.missing, caught.value.unexpected) == ((), ("module.fc.weight",))

    def test_layers_called_module_stay_apart(self):
        names = ["weight", "module.weight"]
        assert all(sorted(spelling.values()) == sorted(names) for spelling in spellings(names))
        assert {"weight", "module.weight"} in [set(s) for s in spellings(["module.weight", "module.module.weight"])]

    def test_163_missing_keys_never_work(self, tmp_path):
        spec = InputSpec(shape=(3, 32, 32), num_classes=4)
        model = initialise("torchvision:shufflenet_v2_x0_5", spec, Rng(0))
        names = sorted(model.tensors())
        kept = {f"module.{name}": model.tensors()[name].clone() for name in names[163:]}
        safetensors.torch.save_file({**kept, "module.\x1b[2Jodd": torch.zeros(1)}, tmp_path / "m.safetensors")
        with pytest.raises(MismatchError, match="163 missing") as caught:
            load(tmp_path / "m.safetensors", architecture="torchvision:shufflenet_v2_x0_5", spec=spec)
        assert list(caught.value.missing) == names[:163]
        assert caught.value.unexpected == ("\x1b[2Jodd",)
        assert "\x1b" not in str(caught.value)


class TestTied:
    @pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
    def test_either_name_will_do(self, name, tmp_path):
        source = networks.language()
        state = {key: value.clone() for key, value in source.state_dict().items()}
        del state[name]
        safetensors.torch.save_file(state, tmp_path / "m.safetensors", metadata={"format": "pt"})
        self._same(load(tmp_path / "m.safetensors", architecture="checkpoint_networks:language", spec=WORDS), source)

    def test_as_safetensors_saves_models(self, tmp_path):
        source = networks.language()
        safetensors.torch.save_model(source, str(tmp_path / "m.safetensors"))
        assert len(safetensors.torch.load_file(tmp_path / "m.safetensors")) == len(source.state_dict()) - 1
        loaded = load(tmp_path / "m.safetensors", architecture="checkpoint_networks:language", spec=WORDS)
        self._same(loaded, source)
        assert loaded.module.head.weight is loaded.module.embed.weight
        save(loaded, tmp_path / "again.safetensors")
        self._same(load(tmp_path / "again.safetensors", architecture="checkpoint_networks:language"), source)
        untied = "checkpoint_networks:language?tied=False"
        self._same(load(tmp_path / "m.safetensors", architecture=untied, spec=WORDS), source)

    def test_tied_in_the_module_and_different_in_the_file_is_refused(self, tmp_path):
        path = write(tmp_path / "m.safetensors", networks.language(tied=False))
        with pytest.raises(MismatchError, match=r"head\.weight differs from embed\.weight"):
            load(path, architecture="checkpoint_networks:language", spec=WORDS)

    def test_tied_in_the_file_only_is_missing(self, tmp_path):
        state = {key: value.clone() for key, value in networks.language().state_dict().items() if key != "head.weight"}
        safetensors.torch.save_file(state, tmp_path / "m.safetensors")
        with pytest.raises(MismatchError, match=r"1 missing \(head\.weight\)"):
            load(tmp_path / "m.safetensors", architecture="checkpoint_networks:language?tied=False", spec=WORDS)

    @pytest.mark.parametrize(("factor", "fits"), [(1.0, True), (2.0, False)])
    def test_buffers_that_the_module_makes_itself(self, factor, fits, tmp_path):
        source = networks.language()
        state = {key: value.clone() for key, value in source.state_dict().items()}
        state["positions"] = source.positions * factor
        safetensors.torch.save_file(state, tmp_path / "m.safetensors")
        if fits:
            self._same(
                load(tmp_path / "m.safetensors", architecture="checkpoint_networks:language", spec=WORDS), source
            )
            return
        with pytest.raises(MismatchError, match="positions is not what the module makes itself"):
            load(tmp_path / "m.safetensors", architecture="checkpoint_networks:language", spec=WORDS)

    @staticmethod
    def _same(loaded: Classifier, source: nn.Module) -> None:
        tokens = torch.randint(0, 16, (4, 6), generator=torch.Generator().manual_seed(0)).float()
        with torch.no_grad():
            assert torch.equal(loaded.query(tokens), source.eval()(tokens))


class TestNumbers:
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
    def test_types(self, dtype, tmp_path):
        source = moved(networks.net("weight_norm")).to(dtype)
        own = load(write(tmp_path / "m.safetensors", source), architecture=f"{NET}?kind=weight_norm", spec=SPEC)
        plain = load(tmp_path / "m.safetensors", architecture=NET, spec=SPEC)
        assert own.dtype == plain.dtype == dtype
        assert torch.equal(plain.module.fc.weight, source.fc.weight)
        save(plain, tmp_path / "again.safetensors")
        assert load(tmp_path / "again.safetensors", architecture=NET).fingerprint() == plain.fingerprint()

    @pytest.mark.parametrize(
        ("name", "dtype"),
        [
            ("fc.weight", torch.int64),
            ("fc.weight", torch.float8_e4m3fn),
            ("features.1.num_batches_tracked", torch.float32),
            ("fc.bias", torch.complex64),
        ],
    )
    def test_wrong_types_are_refused(self, name, dtype, tmp_path):
        state = {key: value.clone() for key, value in networks.net().state_dict().items()}
        state[name] = state[name].to(dtype)
        safetensors.torch.save_file(state, tmp_path / "m.safetensors")
        with pytest.raises(MismatchError, match=f"{name} {dtype} instead of"):
            load(tmp_path / "m.safetensors", architecture=NET, spec=SPEC)

    @pytest.mark.parametrize("kind", ["safetensors", "pt"])
    def test_channels_last(self, kind, tmp_path):
        spec = InputSpec(shape=(3, 32, 32), num_classes=4)
        source = initialise("torchvision:resnet18", spec, Rng(0))
        last = Classifier(
            source.copy().module.to(memory_format=torch.channels_last), spec, architecture=source.architecture
        )
        assert not last.module.conv1.weight.is_contiguous()
        if kind == "pt":
            torch.save(last.module.state_dict(), tmp_path / "m.pt")
        else:
            save(last, tmp_path / "m.safetensors")
        loaded = load(
            tmp_path / f"m.{kind}", architecture=source.architecture, spec=spec, insecure_allow_pickle=kind == "pt"
        )
        assert loaded.fingerprint() == source.fingerprint()
        assert torch.allclose(loaded.query(torch.ones(1, 3, 32, 32)), last.query(torch.ones(1, 3, 32, 32)), atol=1e-5)

    def test_vit_in_half_precision_and_shards(self, tmp_path):
        spec = InputSpec(shape=(3, 224, 224), num_classes=3)
        source = initialise("torchvision:vit_b_16", spec, Rng(0))
        source.module.to(torch.bfloat16)
        state = nn.DataParallel(source.module).state_dict()
        names = sorted(state)
        shards = {f"model-0000{i}-of-00003.safetensors": names[i - 1 :: 3] for i in (1, 2, 3)}
        for file, part in shards.items():
            safetensors.torch.save_file({name: state[name] for name in part}, tmp_path / file)
        index = {"metadata": {"total_size": 1}, "weight_map": {n: file for file, part in shards.items() for n in part}}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        loaded = load(tmp_path, architecture="torchvision:vit_b_16", spec=spec)
        assert loaded.dtype == torch.bfloat16
        assert loaded.fingerprint() == source.fingerprint()
