"""Faults that a hostile review found, each as a test of its kind."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Recipe, Split, checkpoint, initialise, load, save, train
from deepseal.adapter.layers import hidden_layers
from deepseal.adapter.training import Training
from deepseal.attacks import REMOVAL
from deepseal.errors import InputError
from deepseal.files import write_atomically
from deepseal.rng import Rng
from deepseal.watermark import DeepSigns, Key, embed, verify

QUICK = DeepSigns(steps=3, bits=40)


def net(**layers: nn.Module) -> nn.Module:
    default = {"flatten": nn.Flatten(), "fc1": nn.Linear(64, 48), "act": nn.ReLU(), "fc2": nn.Linear(48, 10)}
    return nn.Sequential(OrderedDict({**default, **layers}))


class TestForgery:
    def test_choosing_the_text_after_reading_the_model_does_not_help(self, base, digits):
        """Before the mask was bound to the text, this gave 21 of 256 wrong bits on any model."""
        key = DeepSigns().keygen(base, digits.train, owner="x" * 32)
        read = DeepSigns.from_mapping(key.params)
        bits = read.decode(read.observe(base, key), key).bits
        wanted = np.packbits(bits ^ key._mask())
        text = "".join(chr(min(126, max(32, byte))) for byte in wanted)
        forged = dataclasses.replace(key, owner=text)
        assert verify(base, forged, max_false_positive=1e-3).verdict == "not-owned"

    def test_one_seed_and_two_owners_give_unrelated_messages(self, base, digits):
        first, second = (DeepSigns().keygen(base, digits.train, owner=owner, rng=Rng(0)) for owner in ("A", "B"))
        assert 80 < (first.message() != second.message()).sum() < 176

    def test_a_secret_of_another_length_is_refused(self, key):
        for secret in (b"", bytes(31), bytes(33)):
            with pytest.raises(InputError):
                Key.from_bytes(dataclasses.replace(key, secret=secret).to_bytes())

    def test_nobody_can_prepare_a_suspect_for_the_strangers(self, marked, digits, key):
        """Embedding keys of secrets that anybody knows must not make the owner's verdict inconclusive."""
        public = dataclasses.replace(key, owner="", tensors=key.tensors, secret=Rng(0).child("null").bytes(32))
        for stranger in public.strangers(2):
            marked = embed(marked, digits.train, stranger, rng=Rng(3))
        assert verify(marked, key, max_false_positive=1e-9, null_keys=200).verdict == "owned"


class TestFiles:
    def test_every_length_of_header_loads(self, digits, tmp_path):
        """A safetensors file starts with a length, whose first byte can be that of a pickle."""
        firsts = set()
        model = Classifier(net(), digits.spec, architecture="x" * 3)
        for extra in range(33):
            data = checkpoint.to_bytes(Classifier(model.module, digits.spec, metadata={"note": "x" * 8 * extra}))
            firsts.add(data[0])
            (tmp_path / "m").write_bytes(data)
            assert checkpoint.read(tmp_path / "m").tensors
        assert 0x80 in firsts

    def test_a_suspect_cannot_make_us_allocate_or_download(self, tmp_path, digits, monkeypatch):
        def no_network(*_):
            raise AssertionError("a download")

        monkeypatch.setattr(torch.hub, "load_state_dict_from_url", no_network)
        model = Classifier(net(), digits.spec)
        for architecture in ("torchvision:fcn_resnet50", "deepseal.adapter.zoo:mlp?hidden=(10000000,10000000)"):
            foreign = Classifier(model.module, digits.spec, architecture=architecture)
            (tmp_path / "m.safetensors").write_bytes(checkpoint.to_bytes(foreign))
            with pytest.raises(InputError):
                load(tmp_path / "m.safetensors")

    def test_float64_and_mixed_types_come_back(self, digits, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("types_module.py").write_text(
            "from torch import nn\n"
            "def net(): return nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10))\n"
        )
        model = initialise("types_module:net", digits.spec, Rng(0))
        model.module.double()
        save(model, tmp_path / "d.safetensors")
        assert load(tmp_path / "d.safetensors", architecture="types_module:net").fingerprint() == model.fingerprint()
        model.module.float()
        model.module[1].to(torch.bfloat16)
        save(model, tmp_path / "x.safetensors")
        assert load(tmp_path / "x.safetensors", architecture="types_module:net").fingerprint() == model.fingerprint()

    def test_a_layer_called_module_is_no_prefix(self, digits, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        Path("named_module.py").write_text(
            "from torch import nn\n"
            "class Net(nn.Module):\n"
            "    def __init__(self):\n"
            "        super().__init__()\n"
            "        self.module, self.fc = nn.Linear(64, 8), nn.Linear(8, 10)\n"
            "    def forward(self, x): return self.fc(self.module(x.flatten(1)).relu())\n"
        )
        model = initialise("named_module:Net", digits.spec, Rng(0))
        save(model, tmp_path / "m.safetensors")
        assert load(tmp_path / "m.safetensors", architecture="named_module:Net").fingerprint() == model.fingerprint()

    def test_file_systems_without_hard_links(self, tmp_path, monkeypatch):
        def no_links(*_):
            raise PermissionError(1, "Operation not permitted")

        monkeypatch.setattr(os, "link", no_links)
        write_atomically(tmp_path / "file", b"whole")
        assert (tmp_path / "file").read_bytes() == b"whole"
        with pytest.raises(InputError, match="--force"):
            write_atomically(tmp_path / "file", b"other")
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_pipes_and_devices_are_not_replaced(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        with pytest.raises(InputError, match="regular file"):
            write_atomically(tmp_path / "pipe", b"x", force=True)


class TestModules:
    def test_shared_submodules_can_be_marked(self, digits, no_trace):
        class Shared(nn.Module):
            def __init__(self):
                super().__init__()
                self.one = nn.Linear(64, 64)
                self.two = self.one
                self.mid, self.out = nn.Linear(64, 48), nn.Linear(48, 10)

            def forward(self, x):
                return self.out(self.mid(self.two(x.flatten(1)).relu()).relu())

        model = Classifier(Shared(), digits.spec)
        scheme = dataclasses.replace(QUICK, layers=("mid",))
        with no_trace(model):
            embed(model, digits.train, scheme.keygen(model, digits.train, owner="me"), rng=Rng(0))

    def test_marking_inside_no_grad(self, base, digits):
        with torch.no_grad():
            key = QUICK.keygen(base, digits.train, owner="me", rng=Rng(0))
            inside = embed(base, digits.train, key, rng=Rng(0))
        assert inside.fingerprint() == embed(base, digits.train, key, rng=Rng(0)).fingerprint()

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (lambda module: module.requires_grad_(False), "frozen"),
            (lambda module: module.half(), "float16"),
        ],
    )
    def test_what_cannot_be_trained_is_said(self, change, message, base, digits):
        model = base.copy()
        change(model.module)
        with pytest.raises(InputError, match=message):
            Training(model, digits.train, recipe=Recipe(steps=1), rng=Rng(0))

    def test_lazy_and_wrapped_modules_are_refused(self, digits):
        lazy = nn.Sequential(nn.Flatten(), nn.LazyLinear(10))
        with pytest.raises(InputError, match="lazy"):
            Classifier(lazy, digits.spec)
        assert isinstance(lazy[1], nn.LazyLinear)
        with pytest.raises(InputError, match="DataParallel"):
            Classifier(nn.DataParallel(net()), digits.spec)

    @pytest.mark.parametrize(
        "y",
        [torch.zeros(8, dtype=torch.int32), torch.zeros(8), torch.zeros(8, 1, dtype=torch.int64), [0] * 8],
    )
    def test_labels_of_the_wrong_type(self, y, digits):
        with pytest.raises(InputError, match="labels"):
            Split(torch.zeros(8, 1, 8, 8), y).check(digits.spec)

    def test_data_with_gradients_are_refused(self, base, digits):
        x = digits.train.x.clone().requires_grad_(True)
        with pytest.raises(InputError, match="detach"):
            train(base, Split(x, digits.train.y), recipe=Recipe(steps=1), rng=Rng(0))
        assert x.grad is None

    def test_copies_do_not_share_metadata(self, base):
        copy = base.copy()
        copy.metadata["training"]["recipe"]["learning_rate"] = 777
        assert base.metadata["training"]["recipe"]["learning_rate"] != 777

    def test_frozen_normalisation_stays_frozen(self, digits):
        module = nn.Sequential(
            OrderedDict(conv=nn.Conv2d(1, 4, 3), norm=nn.BatchNorm2d(4), flat=nn.Flatten(), fc=nn.Linear(144, 10))
        )
        module.norm.eval().requires_grad_(False)
        trained = train(Classifier(module, digits.spec), digits.train, recipe=Recipe(steps=3), rng=Rng(0))
        assert torch.equal(trained.module.norm.running_mean, module.norm.running_mean)

    def test_pruning_says_what_it_cannot_prune(self, digits):
        module = net()
        nn.utils.parametrizations.weight_norm(module.fc1)
        model = Classifier(module, digits.spec)
        with pytest.raises(InputError, match="parametrizations"):
            REMOVAL.build("prune", {}).remove(model, digits.train, rng=Rng(0))
        assert [name for name, _, _ in hidden_layers(model)] == ["fc1"]

    def test_tied_weights_are_pruned_once(self, digits):
        module = net(fc1=nn.Linear(64, 64), mid=nn.Linear(64, 64), fc2=nn.Linear(64, 10))
        module.mid.weight = module.fc1.weight
        removed = REMOVAL.build("prune", {"sparsity": 0.5}).remove(
            Classifier(module, digits.spec), digits.train, rng=Rng(0)
        )
        assert removed.evidence["sparsity_reached"] == pytest.approx(0.5, abs=1e-3)

    def test_paper_recipe_never_marks_the_logits(self, digits):
        class Functional(nn.Module):
            def __init__(self):
                super().__init__()
                self.fc1, self.fc2, self.fc3 = nn.Linear(64, 64), nn.Linear(64, 48), nn.Linear(48, 10)

            def forward(self, x):
                return self.fc3(torch.relu(self.fc2(torch.relu(self.fc1(x.flatten(1))))))

        model = Classifier(Functional(), digits.spec)
        key = DeepSigns(recipe="paper", bits=40).keygen(model, digits.train, owner="me")
        assert key.public["layers"] == ["fc2"]

    def test_numbers_for_mean_and_std(self):
        spec = InputSpec(shape=(1, 2), num_classes=2, mean=0.5, std=2)
        assert (spec.mean, spec.std) == ((0.5,), (2.0,))

    def test_cancelled_means_are_erasures(self, marked, key):
        """A layer whose class means differ by less than rounding has no readable bits."""
        flat = marked.copy()
        with torch.no_grad():
            flat.module.fc1.weight.mul_(1e-9)
        seen = DeepSigns.from_mapping(key.params)
        assert seen.decode(seen.observe(flat, key), key).usable.sum() <= 128


def test_termination_leaves_no_file_and_a_record(tmp_path, files):
    """SIGTERM in the middle of an attack: as Ctrl-C, a record that says interrupted, and nothing half written."""
    line = f"attack run fine-tune -p epochs=10000 --model {files / 'base.safetensors'} --data digits"
    command = [sys.executable, "-m", "deepseal", *line.split(), "--out", "x.safetensors", "--record", "r.json"]
    child = subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(timeout=20)
        child.send_signal(signal.SIGTERM)
        out, err = child.communicate(timeout=60)
    finally:
        child.kill()
    assert child.returncode == 130, err
    assert out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert '"status": "interrupted"' in (tmp_path / "r.json").read_text()
