"""Pruned and normalised weights: into modules that have the parametrisation, and into plain ones, to the bit."""

from __future__ import annotations

import checkpoint_networks as networks
import pytest
import safetensors.torch
import torch
from checkpoint_networks import NET, SPEC, moved, write, x
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Recipe, load, save, train
from deepseal.adapter.names import MismatchError
from deepseal.errors import InputError
from deepseal.rng import Rng

FOLDED = [kind for kind in networks.PARAMETRISE if kind.startswith(("prune", "weight", "spectral"))]


class TestParametrised:
    @pytest.mark.parametrize("kind", FOLDED)
    def test_becomes_the_plain_weight_exactly(self, kind, tmp_path):
        source = moved(networks.net(kind))
        loaded = load(write(tmp_path / "m.safetensors", source), architecture=NET, spec=SPEC)
        assert sorted(loaded.tensors()) == sorted(networks.net().state_dict())
        with torch.no_grad():
            answers = source(x())
        for layer in ("features.0", "fc"):
            assert torch.equal(loaded.module.get_submodule(layer).weight, source.get_submodule(layer).weight)
        assert torch.equal(loaded.query(x()), answers)
        save(loaded, tmp_path / "again.safetensors")
        assert load(tmp_path / "again.safetensors", architecture=NET).fingerprint() == loaded.fingerprint()

    @pytest.mark.parametrize("kind", [*FOLDED, "orthogonal", "own"])
    def test_loads_into_a_module_that_has_it(self, kind, tmp_path, no_trace):
        source = moved(networks.net(kind))
        own = f"{NET}?kind={kind}"
        loaded = load(write(tmp_path / "m.safetensors", source), architecture=own, spec=SPEC)
        assert loaded.fingerprint() == Classifier(source, SPEC).fingerprint()
        weight = loaded.module.fc.weight.detach().clone()  # also before any forward pass
        with torch.no_grad():
            answers = source(x())
        assert torch.equal(weight, source.fc.weight)
        assert torch.equal(loaded.query(x()), answers)
        loaded.logits(x()).sum().backward()  # leaves tensors with a graph in old-style layers
        for parameter in loaded.module.parameters():
            parameter.grad = None
        with no_trace(loaded):
            copied = loaded.copy()
        assert torch.equal(copied.query(x()), answers)
        assert not {p.data_ptr() for p in copied.module.parameters()} & {
            p.data_ptr() for p in loaded.module.parameters()
        }
        save(copied, tmp_path / "again.safetensors")
        assert load(tmp_path / "again.safetensors", architecture=own).fingerprint() == loaded.fingerprint()

    @pytest.mark.parametrize("kind", [*FOLDED, "orthogonal", "own"])
    def test_trains(self, kind, digits, no_trace):
        model = Classifier(moved(networks.net(kind)), digits.spec)
        recipe = Recipe(steps=2, batch_size=32)
        with no_trace(model):
            trained = train(model, digits.train, recipe=recipe, rng=Rng(0))
        weight = trained.module.fc.weight.detach().clone()
        assert not torch.equal(weight, model.module.fc.weight)
        trained.query(digits.test.x[:2])
        assert torch.equal(weight, trained.module.fc.weight)

    @pytest.mark.parametrize("kind", ["orthogonal", "own"])
    def test_what_cannot_be_worked_out_is_refused(self, kind, tmp_path):
        path = write(tmp_path / "m.safetensors", networks.net(kind))
        with pytest.raises(MismatchError, match="or that has these parametrisations") as caught:
            load(path, architecture=NET, spec=SPEC)
        assert set(caught.value.missing) == {"fc.weight", "features.0.weight"}
        assert "fc.parametrizations.weight.original" in caught.value.unexpected

    @pytest.mark.parametrize(
        ("kind", "part", "shape"),
        [
            ("prune", "fc.weight_mask", (1, 144)),
            ("weight_norm_old", "fc.weight_g", (10, 2)),
            ("spectral_old", "fc.weight_u", (9,)),
            ("weight_norm", "fc.parametrizations.weight.original0", (1,)),
        ],
    )
    def test_parts_that_do_not_fit_are_refused(self, kind, part, shape, tmp_path):
        state = {name: value.detach().clone() for name, value in networks.net(kind).state_dict().items()}
        state[part] = torch.ones(shape)
        safetensors.torch.save_file(state, tmp_path / "m.safetensors")
        with pytest.raises(InputError, match=r"for fc\.weight"):
            load(tmp_path / "m.safetensors", architecture=NET, spec=SPEC)

    def test_a_plain_file_does_not_fit_a_pruned_module(self, tmp_path):
        path = write(tmp_path / "m.safetensors", networks.net())
        with pytest.raises(MismatchError) as caught:
            load(path, architecture=f"{NET}?kind=prune_channels", spec=SPEC)
        assert "fc.weight_mask" in caught.value.missing

    def test_transposed_convolutions_normalise_over_their_outputs(self, tmp_path, monkeypatch):
        layers = [nn.utils.parametrizations.spectral_norm(nn.ConvTranspose2d(6, 6, 3)), nn.Flatten(), nn.Linear(600, 2)]
        source = nn.Sequential(*layers)
        source(torch.rand(2, 6, 8, 8))
        source.eval()
        monkeypatch.setattr(
            networks,
            "net",
            lambda: nn.Sequential(nn.ConvTranspose2d(6, 6, 3), nn.Flatten(), nn.Linear(600, 2)),
        )
        spec = InputSpec(shape=(6, 8, 8), num_classes=2)
        loaded = load(write(tmp_path / "m.safetensors", source), architecture=NET, spec=spec)
        assert torch.equal(loaded.module[0].weight, source[0].weight)
