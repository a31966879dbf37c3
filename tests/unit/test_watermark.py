"""Keys on disk, DeepSigns, and the decision."""

from __future__ import annotations

import dataclasses
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deepseal.adapter import Classifier, InputSpec, Recipe, Split, initialise, train
from deepseal.adapter.layers import hidden_layers
from deepseal.errors import InputError
from deepseal.rng import Rng, expand_bits
from deepseal.watermark import SCHEMES, DeepSigns, Key, embed, embedding_rounds, extract, load_key, save_key, verify
from deepseal.watermark.cells import cells_of, deal
from deepseal.watermark.cost import embedding_cost
from deepseal.watermark.key import text_bits
from deepseal.watermark.keyfile import MAGIC, is_encrypted
from deepseal.watermark.robust import weathered_features
from deepseal.watermark.scheme import scheme_of


class TestKey:
    def test_message_is_text_xor_mask(self, key):
        unmasked = key.message() ^ expand_bits(key.secret, f"mask/{key.binding}", key.bits)
        assert np.packbits(unmasked).tobytes().rstrip(b"\0") == b"Example Ltd"
        assert key.read_text(key.message()) == "Example Ltd"

    @given(st.text(max_size=40), st.integers(1, 600))
    @settings(max_examples=60, deadline=None)
    def test_any_text_fits(self, text, bits):
        assert len(text_bits(text, bits)) == bits
        assert np.array_equal(text_bits(text, bits), text_bits(text, bits))

    def test_mask_is_bound_to_everything_in_the_key(self, key):
        """Whoever reads a model first cannot then choose a text, a place or triggers that make the bits right."""
        mask = key.message() ^ text_bits(key.owner, key.bits)
        for change in (
            {"owner": "Another Ltd"},
            {"public": {**key.public, "carriers": [1, 0, *range(2, 10)]}},
            {"tensors": {**key.tensors, "trigger_x": key.tensors["trigger_x"] + 1}},
            {"params": {**key.params, "margin": 9.0}},
            {"secret": bytes(32)},
        ):
            other = dataclasses.replace(key, **change)
            changed = (other.message() ^ text_bits(other.owner, other.bits)) != mask
            assert 80 < changed.sum() < 176, change

    def test_strangers_are_unknown_without_the_secret(self, key):
        secrets = {stranger.secret for stranger in key.strangers(20)}
        assert len(secrets) == 20
        assert key.secret not in secrets
        assert not secrets & {stranger.secret for stranger in key.with_secret(bytes(32)).strangers(20)}

    def test_garbled_text_is_none(self, key):
        assert key.read_text(1 - key.message()) is None

    def test_long_owner_becomes_a_digest(self, base, digits):
        long = DeepSigns().keygen(base, digits.train, owner="x" * 1000, rng=Rng(0))
        assert long.read_text(long.message()) is None
        assert 0.3 < text_bits("x" * 1000, 256).mean() < 0.7


class TestKeyFile:
    def test_is_private_and_reads_back(self, key, tmp_path):
        save_key(key, tmp_path / "k")
        assert (tmp_path / "k").stat().st_mode & 0o777 == 0o600
        assert load_key(tmp_path / "k").to_bytes() == key.to_bytes()
        save_key(key, tmp_path / "k2")
        assert (tmp_path / "k").read_bytes() == (tmp_path / "k2").read_bytes()

    def test_encrypted(self, key, tmp_path):
        save_key(key, tmp_path / "k", passphrase="correct horse")
        data = (tmp_path / "k").read_bytes()
        assert is_encrypted(tmp_path / "k")
        assert key.secret not in data
        assert b"Example Ltd" not in data
        trigger = key.tensors["trigger_x"].numpy().tobytes()
        assert trigger[:4096] not in data
        assert load_key(tmp_path / "k", passphrase="correct horse").to_bytes() == key.to_bytes()
        with pytest.raises(InputError, match="DEEPSEAL_PASSPHRASE"):
            load_key(tmp_path / "k")
        with pytest.raises(InputError, match="passphrase"):
            load_key(tmp_path / "k", passphrase="wrong")
        with pytest.raises(InputError, match="empty"):
            save_key(key, tmp_path / "k3", passphrase="")
        assert not (tmp_path / "k3").exists()

    @pytest.mark.parametrize("passphrase", [None, "secret"])
    def test_every_damage_is_one_clear_error(self, key, tmp_path, passphrase):
        save_key(key, tmp_path / "k", passphrase=passphrase)
        data = (tmp_path / "k").read_bytes()
        damaged = [data[:n] for n in (0, 5, 14, 18, 30, 200, len(data) - 1)]
        damaged += [data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in (0, 13, 20, 60, 300, len(data) - 1)]
        damaged += [data + b"x", b"PK\x03\x04hello", MAGIC + b"\xff\xff\xff\xff{}", MAGIC + b"\0\0\0\x02[]"]
        for content in damaged:
            (tmp_path / "bad").write_bytes(content)
            with pytest.raises(InputError) as caught:
                load_key(tmp_path / "bad", passphrase=passphrase)
            assert "\n" not in str(caught.value)

    def test_costs_in_a_foreign_header_are_bounded(self, key, tmp_path):
        save_key(key, tmp_path / "k", passphrase="secret")
        data = (tmp_path / "k").read_bytes().replace(b'"memory_kib":65536', b'"memory_kib":99999999')
        grown = data[: len(MAGIC)] + (int.from_bytes(data[len(MAGIC) : len(MAGIC) + 4], "big") + 3).to_bytes(4, "big")
        (tmp_path / "bad").write_bytes(grown + data[len(MAGIC) + 4 :])
        with pytest.raises(InputError, match="DeepSeal key file"):
            load_key(tmp_path / "bad", passphrase="secret")

    @pytest.mark.parametrize(
        "change",
        [
            {"public": {"bits": 10**12}},
            {"public": {"bits": 64}},
            {"public": {"bits": 64, "layers": "fc1", "carriers": [0], "features": {}, "centred": False}},
            {"params": {"bits": "x"}},
            {"params": {"no_such": 1}},
            {"scheme": "no-such-scheme"},
            {"tensors": {}},
        ],
    )
    def test_hostile_content_is_one_clear_error(self, key, base, change):
        with pytest.raises(InputError):
            verify(base, Key.from_bytes(dataclasses.replace(key, **change).to_bytes()))

    def test_newer_version_is_named(self, key):
        with pytest.raises(InputError, match="newer DeepSeal"):
            Key.from_bytes(dataclasses.replace(key, version=2).to_bytes())

    def test_not_a_file(self, tmp_path):
        for path in (tmp_path, tmp_path / "absent"):
            with pytest.raises(InputError, match="a key file at"):
                load_key(path)


class TestDeepSigns:
    @given(st.integers(1, 500), st.lists(st.integers(1, 16), min_size=1, max_size=4), st.integers(1, 12))
    def test_every_bit_has_one_place(self, bits, weights, carriers):
        dealt = deal(bits, {f"l{index}": weight for index, weight in enumerate(weights)})
        for index, weight in enumerate(weights):
            assert abs(dealt[f"l{index}"] - bits * weight / sum(weights)) < 1
        public = {"bits": bits, "layers": list(dealt), "layer_bits": dealt, "carriers": list(range(carriers))}
        spec = InputSpec(shape=(1,), num_classes=carriers)
        cells = cells_of(Key(scheme="deepsigns", params={}, owner="", secret=b"", spec=spec, public=public))
        assert [cell.start for cell in cells] == list(np.cumsum([0] + [cell.bits for cell in cells[:-1]]))
        assert sum(cell.bits for cell in cells) == bits
        for layer in dealt:
            sizes = [cell.bits for cell in cells if cell.layer == layer]
            assert not sizes or max(sizes) - min(sizes) <= 1

    def test_marks_every_bit_and_keeps_accuracy(self, base, marked, key, digits):
        result = verify(marked, key, max_false_positive=1e-9)
        assert (result.verdict, result.bits, result.bit_errors, result.message) == ("owned", 256, 0, "Example Ltd")
        assert result.p_value == pytest.approx(2.0**-256)
        assert result.threshold == 80
        assert marked.accuracy(digits.test).value >= base.accuracy(digits.test).value - 0.01

    def test_embedding_is_repeatable(self, base, key, digits):
        quick = dataclasses.replace(key, params={**key.params, "steps": 5, "rounds": 1})
        first, second = (embed(base, digits.train, quick, rng=Rng(4)).fingerprint() for _ in range(2))
        assert first == second

    def test_further_rounds_follow_while_a_bit_reads_wrong(self, base, key, digits):
        quick = dataclasses.replace(key, params={**key.params, "steps": 40, "rounds": 20})
        copies = list(embedding_rounds(base, digits.train, quick, rng=Rng(4)))
        errors = [verify(copy, quick).bit_errors for copy in copies]
        assert 1 < len(errors) < 20
        assert errors[-1] == 0
        assert min(errors[:-1]) > 0
        once = dataclasses.replace(quick, params={**quick.params, "rounds": 1})
        assert len(list(embedding_rounds(base, digits.train, once, rng=Rng(4)))) == 1

    def test_rounds_end_when_the_answers_have_settled(self, base, digits):
        """A step size that leaves the network far off: every bit reads right at once, the answers take longer."""
        rough = DeepSigns(bits=32, steps=15, learning_rate=0.02, rounds=40)
        key = rough.keygen(base, digits.train, owner="me", rng=Rng(5))
        copies = list(embedding_rounds(base, digits.train, key, rng=Rng(5)))
        first = extract(copies[0], key)
        lost = [base.accuracy(digits.train).value - copy.accuracy(digits.train).value for copy in copies]
        assert (first.bits == key.message()).all()
        assert 1 < len(copies) < 40
        assert min(lost[:-1]) > 0.03 >= lost[-1]

    def test_only_labels_can_be_found_back_to(self, base, digits):
        other = initialise("deepseal.adapter.zoo:mlp", base.spec, Rng(9))
        assert not DeepSigns().settled(base, other, digits.train)
        assert DeepSigns().settled(other, base, digits.train)
        for recipe in ("gentle", "paper"):
            assert DeepSigns(recipe=recipe).settled(base, other, digits.train)

    def test_projection_is_the_secret_not_the_triggers(self, marked, key, digits):
        """Other images of the same classes read the mark too; another secret on the same triggers reads coins."""
        x, y = digits.test.x, digits.test.y
        scheme = scheme_of(key)
        seen = scheme.observe(marked, dataclasses.replace(key, tensors={"trigger_x": x, "trigger_y": y}))
        assert (scheme.decode(seen, key).bits != key.message()).sum() <= 30
        assert verify(marked, key.with_secret(bytes(32))).verdict == "not-owned"

    def test_paper_recipe(self, base, digits):
        scheme = DeepSigns(recipe="paper", bits=64, carriers=(0, 3), epochs=10)
        key = scheme.keygen(base, digits.train, owner="me", rng=Rng(0))
        assert key.public["layers"] == ["act2"]
        before = verify(base, key)
        after = verify(embed(base, digits.train, key, rng=Rng(1)), key)
        assert after.bit_errors < before.bit_errors
        with pytest.raises(InputError, match="one layer"):
            two = DeepSigns(recipe="paper", layers=("act1", "act2"))
            embed(base, digits.train, two.keygen(base, digits.train, owner="me", rng=Rng(0)), rng=Rng(0))

    def test_layers_of_a_network_with_normalisation(self, digits):
        model = initialise("deepseal.adapter.zoo:cnn", digits.spec, Rng(0))
        assert [name for name, _, _ in hidden_layers(model)] == ["norm1", "norm2", "norm3", "norm4", "fc1"]

    def test_batch_size_does_not_change_bits(self, marked, key):
        whole = extract(marked, key)
        means = []
        for carrier in key.public["carriers"]:
            own = key.tensors["trigger_x"][key.tensors["trigger_y"] == carrier]
            single = [marked.features(x[None], ["fc1"])["fc1"] for x in own]
            means.append(torch.cat(single).double().mean(0))
        from deepseal.watermark.deepsigns import DeepSigns as Scheme

        seen = Scheme.from_mapping(key.params).observe(marked, key)
        assert torch.allclose(seen.values["fc1"], torch.stack(means), atol=1e-5)
        assert whole.usable.all()

    def test_bfloat16_gives_the_same_verdict(self, marked, key):
        half = marked.copy()
        half.module.to(torch.bfloat16)
        result = verify(half, key, max_false_positive=1e-9)
        assert result.verdict == "owned"

    def test_capacity(self, base):
        rows = DeepSigns().capacity(base)
        assert [(row.layer, row.features, row.limit, row.advised) for row in rows] == [
            ("fc1", 512, 5120, 160),
            ("fc2", 512, 5120, 160),
        ]
        assert [row.margin for row in rows] == [pytest.approx(math.sqrt(512 / 16))] * 2

    @pytest.mark.parametrize(
        ("params", "message"),
        [
            ({"layers": ("fc9",)}, "known layer"),
            ({"bits": 20_000}, "at most 5120 bits in layer fc1; found 10000 of 20000"),
            ({"layers": ("fc3",), "bits": 200}, "at most 100 bits in layer fc3; found 200 of 200"),
            ({"carriers": (0, 0)}, "distinct carrier"),
            ({"carriers": (12,)}, "carrier classes 0"),
        ],
    )
    def test_keygen_refuses(self, base, digits, params, message):
        with pytest.raises(InputError, match=message):
            DeepSigns(**params).keygen(base, digits.train, owner="me")

    def test_class_absent_from_the_data(self, base, digits):
        without = digits.train.take(torch.nonzero(digits.train.y != 4).reshape(-1))
        with pytest.raises(InputError, match=r"class \[4\]"):
            DeepSigns().keygen(base, without, owner="me")

    def test_suspects_that_the_key_cannot_read(self, key, digits):
        narrow = initialise("deepseal.adapter.zoo:mlp?hidden=(64,64)", digits.spec, Rng(0))
        with pytest.raises(InputError, match="512 features in layer"):
            verify(narrow, key)
        other = initialise("deepseal.adapter.zoo:lenet", digits.spec, Rng(0))
        assert "fc2" in dict(other.module.named_modules())
        with pytest.raises(InputError, match="features in layer"):
            verify(other, key)
        nameless = Classifier(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), digits.spec)
        with pytest.raises(InputError, match="with the key's layers"):
            verify(nameless, key)
        foreign = initialise("deepseal.adapter.zoo:mlp", InputSpec(shape=(1, 9, 9), num_classes=10), Rng(0))
        with pytest.raises(InputError, match="shape"):
            verify(foreign, key)

    def test_feature_vectors_work_too(self):
        rng = np.random.default_rng(0)
        y = torch.from_numpy(np.arange(600) % 3)
        x = torch.from_numpy(rng.random((600, 20), dtype=np.float32))
        data = Split((x + y[:, None] * 0.3).clamp(0, 1), y)
        start = initialise("deepseal.adapter.zoo:mlp", InputSpec(shape=(20,), num_classes=3), Rng(0))
        model = train(start, data, recipe=Recipe(epochs=5), rng=Rng(0))
        key = DeepSigns(bits=64).keygen(model, data, owner="me", rng=Rng(0))
        assert verify(embed(model, data, key, rng=Rng(0)), key, max_false_positive=1e-9).bit_errors == 0

    def test_cost_counts_updates(self, base, key, digits):
        cost = embedding_cost(base, digits.train, key, rng=Rng(0), pairs=3)
        assert cost.updates == key.params["steps"]
        assert cost.owner_updates == base.metadata["training"]["updates"]
        assert cost.share_of_training > 0
        assert cost.times(3).share_of_training == pytest.approx(3 * cost.share_of_training)
        unknown = embedding_cost(Classifier(base.module, base.spec), digits.train, key, rng=Rng(0), pairs=1)
        assert unknown.share_of_training is None


class TestWeathering:
    def test_without_weather_it_is_the_plain_reading(self, base, digits):
        x = base.prepare(digits.test.x[:5])
        plain = base.features(digits.test.x[:5], ["fc1", "fc2"])
        with weathered_features(base.module, x, list(plain), prune=0.0, drift=0.0, generator=Rng(0).torch()) as read:
            assert all(torch.allclose(read[name].detach(), plain[name], atol=1e-5) for name in plain)

    def test_pruning_matches_the_attack(self, base, digits):
        from deepseal.attacks import REMOVAL

        pruned = REMOVAL.build("prune", {"sparsity": 0.8}).remove(base, digits.train, rng=Rng(0)).model
        x = digits.test.x[:20]
        given, generator = base.prepare(x), Rng(0).torch()
        with weathered_features(base.module, given, ["fc2"], prune=0.8, drift=0.0, generator=generator) as read:
            a, b = read["fc2"].detach(), pruned.features(x, ["fc2"])["fc2"]
        assert float(torch.corrcoef(torch.stack([a.reshape(-1), b.reshape(-1)]))[0, 1]) > 0.98

    def test_noise_on_outputs_has_the_moments_of_noise_on_weights(self, base, digits):
        x = base.prepare(digits.test.x[:1])
        generator = Rng(0).torch()
        reads = []
        for _ in range(400):
            with weathered_features(base.module, x, ["fc1"], prune=0.0, drift=0.5, generator=generator) as read:
                reads.append(read["fc1"].detach())
        spread = torch.stack(reads).std(dim=0).mean()
        weight = base.module.fc1.weight.detach()
        expected = 0.5 * weight.std() * x.flatten().norm()
        assert float(spread / expected) == pytest.approx(1.0, rel=0.02)

    def test_gradients_reach_the_weights_and_the_module_stays(self, base, digits, no_trace):
        model = base.copy()
        with no_trace(model):
            x = model.prepare(digits.test.x[:5])
            weight = model.module.fc1.weight
            with weathered_features(model.module, x, ["fc2"], prune=0.5, drift=0.5, generator=Rng(0).torch()) as read:
                (gradient,) = torch.autograd.grad(read["fc2"].sum(), weight)
        assert gradient.abs().sum() > 0

    @pytest.mark.parametrize("threshold", [1, 1 << 60])
    def test_pruned_copies_that_are_not_kept_give_the_same_gradients(self, base, digits, monkeypatch, threshold):
        monkeypatch.setattr("deepseal.watermark.robust._LARGE", threshold)
        x, module, generator = base.prepare(digits.test.x[:5]), base.copy().module, Rng(0).torch()
        weights = [module.fc1.weight, module.fc2.weight]
        with weathered_features(module, x, ["fc2"], prune=0.5, drift=0.1, generator=generator) as read:
            gradients = torch.autograd.grad(read["fc2"].pow(2).sum(), weights)
        assert {"forward", "weight"}.isdisjoint(vars(module.fc1))
        assert [round(float(g.norm()), 3) for g in gradients] == pytest.approx(self.norms(base, digits), rel=1e-4)

    def norms(self, base, digits):
        from torch.nn.functional import hardshrink, linear

        from deepseal.watermark.robust import magnitude_quantile

        x, module, generator = base.prepare(digits.test.x[:5]).flatten(1), base.copy().module, Rng(0).torch()
        layers = {name: layer for name, layer in module.named_modules() if isinstance(layer, torch.nn.Linear)}
        level = magnitude_quantile([layer.weight for layer in layers.values()], 0.5, generator)
        seeds = dict(zip(layers, torch.randint(2**62, (len(layers),), generator=generator).tolist(), strict=True))
        for name in ("fc1", "fc2"):
            layer = layers[name]
            size = 0.1 * float(layer.weight.detach().std()) * x.detach().norm(dim=1, keepdim=True)
            x = linear(x, hardshrink(layer.weight, level), layer.bias)
            x = x + size * torch.randn(x.shape, generator=torch.Generator().manual_seed(seeds[name]))
            x = torch.relu(x) if name == "fc1" else x
        return [float(g.norm()) for g in torch.autograd.grad(x.pow(2).sum(), [module.fc1.weight, module.fc2.weight])]


class TestVerify:
    def test_inconclusive_when_the_bits_cannot_reach_the_rate(self, base, digits):
        key = DeepSigns(bits=16).keygen(base, digits.train, owner="me", rng=Rng(0))
        result = verify(base, key, max_false_positive=1e-9)
        assert (result.verdict, result.threshold) == ("inconclusive", None)
        assert any("too few" in warning for warning in result.warnings)

    def test_nan_weights_are_inconclusive(self, marked, key):
        broken = marked.copy()
        with torch.no_grad():
            broken.module.fc1.weight[0, 0] = float("nan")
        result = verify(broken, key)
        assert result.verdict == "inconclusive"
        assert result.erasures == 256

    def test_zero_weights_are_erasures(self, marked, key):
        broken = marked.copy()
        with torch.no_grad():
            for p in broken.module.parameters():
                p.zero_()
        assert verify(broken, key).erasures == 256

    def test_trying_many_keys_is_paid_for(self, marked, key):
        once, often = (verify(marked, key, max_false_positive=1e-9, tried=tried) for tried in (1, 10**6))
        assert once.threshold > often.threshold
        assert often.threshold == verify(marked, key, max_false_positive=1e-15).threshold

    @pytest.mark.parametrize(
        "wrong", [{"max_false_positive": 0.0}, {"max_false_positive": 1.0}, {"tried": 0}, {"null_keys": -1}]
    )
    def test_refuses(self, marked, key, wrong):
        with pytest.raises(InputError):
            verify(marked, key, **wrong)

    def test_seeded_keys_warn(self, marked, key, base, digits):
        assert any("seed" in warning for warning in verify(marked, key).warnings)
        assert not verify(base, DeepSigns().keygen(base, digits.train, owner="me")).warnings

    def test_empirical_null_is_reported(self, marked, key, base):
        result = verify(marked, key, null_keys=100, null_models=[base, base]).as_dict()
        assert result["null"]["n"] == 100
        assert 0.45 < result["null"]["mean_bit_error_rate"] < 0.55
        assert result["null"]["owned"] == 0
        assert result["null_models"]["n"] == 2

    def test_a_violated_null_is_inconclusive(self, marked, key, monkeypatch):
        """A scheme that reads the owner's message from every key proves nothing."""
        scheme = DeepSigns.decode

        def forging(self, observation, any_key):
            read = scheme(self, observation, any_key)
            return dataclasses.replace(read, bits=any_key.message())

        monkeypatch.setattr(DeepSigns, "decode", forging)
        result = verify(marked, key, null_keys=20)
        assert result.verdict == "inconclusive"
        assert any("violated" in warning for warning in result.warnings)


def test_no_secret_in_the_environment_of_tests():
    assert "DEEPSEAL_PASSPHRASE" not in os.environ
    assert Path(__file__).exists()


def test_a_scheme_that_does_not_train_costs_nothing(base, digits):
    key = SCHEMES.build("plain", {}).keygen(base, digits.train, owner="Example Ltd", rng=Rng(0))
    cost = embedding_cost(base, digits.train, key, rng=Rng(1), pairs=1)
    assert (cost.updates, cost.share_of_training) == (0, 0.0)
