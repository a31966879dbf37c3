"""Safetensors in one file and in shards, as they should be and as a stranger may make them."""

from __future__ import annotations

import json
import pickle
import struct
from pathlib import Path

import checkpoint_networks as networks
import pytest
import safetensors.torch
import torch
from checkpoint_networks import NET, SPEC, write

from deepseal.adapter import Classifier, load, save
from deepseal.adapter.statefiles import read
from deepseal.errors import InputError


def sharded(folder: Path, count: int = 3) -> dict[str, str]:
    """A model in shards beside its index; the index's map."""
    state = networks.net().state_dict()
    names = {name: f"model-{i % count + 1:05}-of-{count:05}.safetensors" for i, name in enumerate(sorted(state))}
    for file in set(names.values()):
        part = {name: state[name].detach().clone() for name in names if names[name] == file}
        safetensors.torch.save_file(part, folder / file)
    index(folder, names)
    return names


def index(folder: Path, names: dict[str, str], text: str | None = None) -> Path:
    path = folder / "model.safetensors.index.json"
    path.write_text(text or json.dumps({"metadata": {"total_size": 0}, "weight_map": names}))
    return path


class TestShards:
    def test_folder_or_index(self, tmp_path):
        sharded(tmp_path)
        by_folder = load(tmp_path, architecture=NET, spec=SPEC)
        by_index = load(tmp_path / "model.safetensors.index.json", architecture=NET, spec=SPEC)
        assert by_folder.fingerprint() == by_index.fingerprint()
        stored = {k: v for file in tmp_path.glob("*.safetensors") for k, v in safetensors.torch.load_file(file).items()}
        assert by_folder.tensors().keys() == stored.keys()
        assert all(torch.equal(tensor, stored[name]) for name, tensor in by_folder.tensors().items())
        save(by_folder, tmp_path / "one.safetensors")
        again = load(tmp_path / "one.safetensors", architecture=NET)
        assert again.fingerprint() == by_folder.fingerprint()

    def test_a_folder_with_one_file(self, tmp_path):
        source = networks.net()
        write(tmp_path / "model.safetensors", source)
        assert load(tmp_path, architecture=NET, spec=SPEC).fingerprint() == Classifier(source, SPEC).fingerprint()
        write(tmp_path / "other.safetensors", source)
        with pytest.raises(InputError, match=r"found model\.safetensors, other\.safetensors"):
            load(tmp_path, architecture=NET, spec=SPEC)
        (tmp_path / "empty").mkdir()
        with pytest.raises(InputError, match="found none"):
            load(tmp_path / "empty", architecture=NET, spec=SPEC)

    def test_missing_shards_are_named(self, tmp_path):
        sharded(tmp_path)
        for number in (1, 3):
            (tmp_path / f"model-0000{number}-of-00003.safetensors").unlink()
        with pytest.raises(InputError, match=r"2 missing: model-00001-of-00003\S+, model-00003-of-00003"):
            load(tmp_path, architecture=NET, spec=SPEC)

    @pytest.mark.parametrize(
        "name",
        [
            "../{0}",
            "{1}/{0}",
            "sub/{0}",
            "./../{0}",
            "..\\{0}",
            "..",
            "",
            "pytorch_model.bin",
            "/dev/zero",
            "a\0.safetensors",
        ],
    )
    def test_paths_stay_inside_the_folder(self, name, tmp_path, evil):
        outside, folder = tmp_path, tmp_path / "model"
        (folder / "sub").mkdir(parents=True)
        names = sharded(folder, count=1)
        file = next(iter(names.values()))
        for place in (outside, folder / "sub"):
            (place / file).write_bytes((folder / file).read_bytes())
        (folder / "pytorch_model.bin").write_bytes(pickle.dumps(evil))
        index(folder, dict.fromkeys(names, name.format(file, outside)))
        with pytest.raises(InputError, match="plain names of safetensors files|missing"):
            load(folder, architecture=NET, spec=SPEC, insecure_allow_pickle=True)

    def test_shards_hold_what_the_index_says(self, tmp_path):
        names = sharded(tmp_path)
        moved_name = dict(names, **{"fc.weight": names["fc.bias"]})
        for wrong in (
            moved_name,
            {k: v for k, v in names.items() if k != "fc.weight"},
            {**names, "odd": names["fc.bias"]},
        ):
            index(tmp_path, wrong)
            with pytest.raises(InputError, match=r"the tensors that model\.safetensors\.index\.json says"):
                load(tmp_path, architecture=NET, spec=SPEC)

    def test_a_pickled_shard_is_never_run(self, tmp_path, evil):
        names = sharded(tmp_path)
        (tmp_path / names["fc.weight"]).write_bytes(pickle.dumps({"fc.weight": evil}))
        with pytest.raises(InputError, match="safetensors file"):
            load(tmp_path, architecture=NET, spec=SPEC, insecure_allow_pickle=True)

    @pytest.mark.parametrize(
        "text", ["{", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": 3}}', "[" * 100_000]
    )
    def test_foreign_index(self, text, tmp_path):
        with pytest.raises(InputError, match="index|plain names"):
            read(index(tmp_path, {}, text))

    def test_names_that_occur_twice(self, tmp_path):
        names = sharded(tmp_path)
        pairs = ", ".join(f'"{name}": "{file}"' for name, file in [*names.items(), ("fc.bias", names["fc.weight"])])
        with pytest.raises(InputError, match=r"twice: \['fc.bias'\]"):
            read(index(tmp_path, {}, f'{{"weight_map": {{{pairs}}}}}'))


def header(content: dict | str, data: bytes = bytes(16), length: int | None = None) -> bytes:
    text = content if isinstance(content, str) else json.dumps(content)
    return struct.pack("<Q", len(text) if length is None else length) + text.encode() + data


def entry(start: int, end: int, shape=(2,), dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}


class TestSafetensors:
    @pytest.mark.parametrize(
        "data",
        {
            "overlap": header({"a": entry(0, 8), "b": entry(4, 12)}),
            "beyond": header({"a": entry(0, 8), "b": entry(8, 400)}),
            "hole": header({"a": entry(0, 4, (1,)), "b": entry(8, 16)}),
            "backwards": header({"a": entry(8, 0)}),
            "shape": header({"a": entry(0, 16, (2**62, 4))}),
            "negative": header({"a": entry(0, 16, (-2, -2))}),
            "type": header({"a": entry(0, 16, (4,), "F99")}),
            "length": header({"a": entry(0, 16, (4,))}, length=2**63),
            "short length": header({"a": entry(0, 16, (4,))}, length=5),
            "huge length": header({"a": entry(0, 16, (4,))}, length=200_000_000),
            "twice": header(f'{{"a": {json.dumps(entry(0, 16, (4,)))}, "a": {json.dumps(entry(0, 16, (4,)))}}}'),
            "nested": header('{"a":' * 20_000),
            "metadata": header({"__metadata__": {"x": 1}, "a": entry(0, 16, (4,))}),
            "tied": header({"__metadata__": {"deepseal": '{"tied": {"a": "b"}}'}, "a": entry(0, 8), "b": entry(8, 16)}),
        }.items(),
        ids=lambda item: item[0],
    )
    def test_hostile(self, data, tmp_path):
        (tmp_path / "m.safetensors").write_bytes(data[1])
        with pytest.raises(InputError, match="safetensors"):
            read(tmp_path / "m.safetensors")
