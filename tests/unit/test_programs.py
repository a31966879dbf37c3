"""Files that hold programs or pickles: exported programs, TorchScript, torch.save; nothing from them runs unasked."""

from __future__ import annotations

import io
import pickle
import warnings
import zipfile
from pathlib import Path

import checkpoint_networks as networks
import numpy as np
import pytest
import torch
from checkpoint_networks import NET, SPEC, moved, write, x

from deepseal.adapter import Classifier, Recipe, Split, load, save, train
from deepseal.adapter.capture import execution_order
from deepseal.adapter.statefiles import read
from deepseal.errors import InputError
from deepseal.rng import Rng


def exported(path: Path) -> torch.nn.Module:
    module = moved(networks.net("weight_norm"))
    torch.export.save(torch.export.export(module, (x(),)), path)
    return module


def scripted(path: Path, how: str) -> torch.nn.Module:
    module = moved(networks.net())
    with warnings.catch_warnings():
        for kind in (DeprecationWarning, FutureWarning):
            warnings.simplefilter("ignore", kind)
        program = torch.jit.trace(module, x()) if how == "trace" else torch.jit.script(module)
        (torch.jit.freeze(program) if how == "freeze" else program).save(str(path))
    return module


def rewritten(path: Path, change, *, twice: str = "", method: int = zipfile.ZIP_STORED) -> Path:
    """The archive with members passed through ``change(name, content)``; those that end with ``twice`` are repeated."""
    with zipfile.ZipFile(path) as archive:
        members = [(name, archive.read(name)) for name in archive.namelist()]
    target = path.with_name(f"changed{path.suffix}")
    with warnings.catch_warnings(), zipfile.ZipFile(target, "w", method) as archive:
        warnings.simplefilter("ignore", UserWarning)
        for name, content in members:
            archive.writestr(name, change(name, content))
            if twice and name.endswith(twice):
                archive.writestr(name, content)
    return target


class TestExported:
    def test_weights_without_running_anything(self, tmp_path, evil):
        source = exported(tmp_path / "m.pt2")
        buffer = io.BytesIO()
        torch.save(evil, buffer)  # what torch.export.load would run
        code = buffer.getvalue()
        for path in (
            tmp_path / "m.pt2",
            rewritten(tmp_path / "m.pt2", lambda name, content: code if "sample_inputs" in name else content),
        ):
            own = load(path, architecture=f"{NET}?kind=weight_norm", spec=SPEC)
            assert own.fingerprint() == Classifier(source, SPEC).fingerprint()
            plain = load(path, architecture=NET, spec=SPEC)
            assert torch.equal(plain.query(x()), own.query(x()))
        save(own, tmp_path / "again.safetensors")
        again = load(tmp_path / "again.safetensors", architecture=f"{NET}?kind=weight_norm")
        assert again.fingerprint() == own.fingerprint()

    def test_types_ties_and_strides(self, tmp_path):
        source = networks.language().to(torch.bfloat16)
        source.mix.weight.data = source.mix.weight.data.t().contiguous().t()
        torch.export.save(torch.export.export(source, (torch.ones(2, 6),)), tmp_path / "m.pt2")
        tensors = read(tmp_path / "m.pt2").tensors
        assert tensors.keys() == source.state_dict().keys()
        assert all(torch.equal(tensors[name], value) for name, value in source.state_dict().items())
        assert tensors["embed.weight"].data_ptr() == tensors["head.weight"].data_ptr()

    def test_needs_an_architecture(self, tmp_path):
        exported(tmp_path / "m.pt2")
        with pytest.raises(InputError, match="--arch"):
            load(tmp_path / "m.pt2", spec=SPEC, insecure_allow_pickle=True)

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ('"use_pickle": false', '"use_pickle": true'),
            ('"storage_offset": {"as_int": 0}', '"storage_offset": {"as_int": 1000000}'),
            ('"storage_offset": {"as_int": 0}', '"storage_offset": {"as_int": -1}'),
            ('"sizes": [{"as_int": 10}', '"sizes": [{"as_int": 1000000000}'),
            ('"path_name": "weight_0"', '"path_name": "../../../../weight_0"'),
            ('"dtype": 7', '"dtype": 99'),
            ('"layout": 7', '"layout": 1'),
            ('"as_int"', '"as_expr"'),
            ('"config"', '"other"'),
            ("{", "["),
        ],
    )
    def test_hostile_table(self, old, new, tmp_path, evil):
        exported(tmp_path / "m.pt2")
        code = pickle.dumps(evil)

        def change(name: str, content: bytes) -> bytes:
            if name.endswith("_weights_config.json"):
                assert old.encode() in content
                return content.replace(old.encode(), new.encode())
            return code if "data/weights/weight_" in name and "true" in new else content

        path = rewritten(tmp_path / "m.pt2", change)
        for allowed in (False, True):
            with pytest.raises(InputError, match="exported program|plain weights"):
                load(path, architecture=NET, spec=SPEC, insecure_allow_pickle=allowed)

    @pytest.mark.parametrize("how", ["twice", "deflated", "big", "empty"])
    def test_hostile_archive(self, how, tmp_path):
        exported(tmp_path / "m.pt2")
        changes = {
            "big": lambda name, content: b"big" if name.endswith("byteorder") else content,
            "empty": lambda name, content: b"" if "weights/weight_" in name else content,
        }
        path = rewritten(
            tmp_path / "m.pt2",
            changes.get(how, lambda _, content: content + bytes(10**6) * (how == "deflated")),
            twice="weight_0" if how == "twice" else "",
            method=zipfile.ZIP_DEFLATED if how == "deflated" else zipfile.ZIP_STORED,
        )
        with pytest.raises(InputError, match="exported program"):
            read(path)

    @pytest.mark.parametrize("share", [0.001, 0.3, 0.7, 0.99])
    def test_truncated(self, share, tmp_path):
        exported(tmp_path / "m.pt2")
        data = (tmp_path / "m.pt2").read_bytes()
        (tmp_path / "m.pt2").write_bytes(data[: int(len(data) * share)])
        with pytest.raises(InputError):
            read(tmp_path / "m.pt2")

    def test_an_older_archive_is_a_pickle(self, tmp_path, evil):
        """torch up to 2.7 pickled the state dict into the archive."""
        source = networks.net()
        for name, content in (("evil", {"a": evil}), ("good", source.state_dict())):
            buffer = io.BytesIO()
            torch.save(content, buffer)
            with zipfile.ZipFile(tmp_path / f"{name}.pt2", "w") as archive:
                archive.writestr("version", "8.7")
                archive.writestr("serialized_exported_program.json", "{}")
                archive.writestr("serialized_state_dict.pt", buffer.getvalue())
            with pytest.raises(InputError, match="a pickle, which can run any code"):
                load(tmp_path / f"{name}.pt2", architecture=NET, spec=SPEC)
        loaded = load(tmp_path / "good.pt2", architecture=NET, spec=SPEC, insecure_allow_pickle=True)
        assert loaded.fingerprint() == Classifier(source, SPEC).fingerprint()


class TestTorchScript:
    @pytest.mark.parametrize("how", ["script", "trace", "freeze"])
    def test_answers_queries_only(self, how, tmp_path, no_trace, digits):
        source = scripted(tmp_path / "m.pt", how)
        with pytest.raises(InputError, match="TorchScript, a program that can run"):
            load(tmp_path / "m.pt", spec=SPEC)
        loaded = load(tmp_path / "m.pt", spec=SPEC, insecure_allow_pickle=True)
        for model in (loaded, loaded.copy()):
            with torch.no_grad():
                assert torch.allclose(model.query(x()), source(x()), atol=1e-6)
        assert loaded.oracle().query(x()).shape == (5,)
        split = Split(digits.train.x[:64], digits.train.y[:64])
        with no_trace(loaded):
            for needs_layers in (
                lambda: loaded.features(x(), ["fc"]),
                lambda: execution_order(loaded.module, loaded.probe()),
                lambda: train(loaded, split, recipe=Recipe(steps=1), rng=Rng(0)),
            ):
                with pytest.raises(InputError, match="TorchScript, which only answers queries"):
                    needs_layers()

    def test_weights_into_an_architecture(self, tmp_path):
        source = scripted(tmp_path / "code.pt", "script")  # a name that is that of a folder inside
        loaded = load(tmp_path / "code.pt", architecture=NET, spec=SPEC, insecure_allow_pickle=True)
        assert loaded.fingerprint() == Classifier(source, SPEC).fingerprint()
        assert loaded.features(x(), ["fc"])["fc"].shape == (5, 10)
        program = load(tmp_path / "code.pt", spec=SPEC, insecure_allow_pickle=True)
        save(program, tmp_path / "weights.safetensors")
        assert load(tmp_path / "weights.safetensors", architecture=NET).fingerprint() == loaded.fingerprint()


class TestPickles:
    @pytest.mark.parametrize("zipped", [True, False])
    @pytest.mark.parametrize("wrapped", [None, "state_dict", "model"])
    def test_state_dicts(self, zipped, wrapped, tmp_path):
        source = torch.nn.DataParallel(networks.net("prune"))
        content = source.state_dict() if wrapped is None else {wrapped: source.state_dict(), "epoch": 3}
        path = tmp_path / "code.pt"
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(InputError, match="a pickle, which can run any code"):
            load(path, architecture=NET, spec=SPEC)
        loaded = load(path, architecture=NET, spec=SPEC, insecure_allow_pickle=True)
        assert torch.equal(loaded.module.fc.weight, source.module.fc.weight)

    def test_a_flag_runs_what_is_in_a_pickle(self, evil, tmp_path):
        """Otherwise the other tests would show nothing."""
        torch.save({"a": evil}, tmp_path / "m.pt")
        with pytest.raises(InputError, match="state dict"):
            load(tmp_path / "m.pt", architecture=NET, spec=SPEC, insecure_allow_pickle=True)
        evil.proof.unlink()

    @pytest.mark.parametrize("members", [{}, {"data.pkl": b""}, {"m/data.pkl": b"", "m/archive_format": b"pt2"}])
    def test_odd_archives(self, members, tmp_path, evil):
        members = {name: content or pickle.dumps(evil) for name, content in members.items()}
        with zipfile.ZipFile(tmp_path / "m.pt", "w") as archive:
            archive.writestr("odd", b"")
            for name, content in members.items():
                archive.writestr(name, content)
        with pytest.raises(InputError):
            load(tmp_path / "m.pt", architecture=NET, spec=SPEC)

    @pytest.mark.parametrize("kind", ["legacy pickle", "pickle", "pt2", "script", "text", "empty"])
    def test_claims_to_be_safetensors(self, kind, tmp_path, evil):
        path = tmp_path / "m.bin"
        if kind == "pt2":
            exported(tmp_path / "m.pt2")
            path = tmp_path / "m.pt2"
        elif kind == "script":
            scripted(path, "script")
        elif kind == "pickle":
            torch.save({"a": evil}, path)
        else:
            path.write_bytes({"legacy pickle": pickle.dumps(evil), "text": b"weights\n" * 99, "empty": b""}[kind])
        path = path.rename(tmp_path / "m.safetensors")
        for allowed in (False, True):
            with pytest.raises(InputError, match="safetensors"):
                load(path, architecture=NET, spec=SPEC, insecure_allow_pickle=allowed)


@pytest.mark.parametrize("kind", ["safetensors", "pt2", "index"])
def test_damaged_bytes_are_read_or_refused(kind, tmp_path):
    """Whatever a file holds, ``read`` answers with tensors or with an ``InputError``."""
    if kind == "pt2":
        exported(tmp_path / "m.pt2")
    sound = {
        "safetensors": lambda: write(tmp_path / "m.safetensors", networks.net()).read_bytes(),
        "pt2": lambda: (tmp_path / "m.pt2").read_bytes(),
        "index": lambda: b'{"weight_map": {"a": "m.safetensors", "b": "n.safetensors"}}',
    }[kind]()
    path = tmp_path / ("m.json" if kind == "index" else f"m.{kind}")
    draw = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        data = bytearray(sound)
        places = draw.integers(0, len(data) if draw.random() < 0.5 else min(600, len(data)), size=draw.integers(1, 4))
        for place in places:
            data[place] = draw.integers(256)
        path.write_bytes(data[: len(data) if draw.random() < 0.8 else draw.integers(len(data))])
        try:
            assert read(path).tensors
        except InputError:
            refused += 1
    assert refused > 100
