"""The mark inside the owner's own training: a plain loop, two processes, Lightning and Transformers."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from networks import encoder, sentences
from torch import nn
from torch.utils.checkpoint import checkpoint as recomputed

from deepseal.adapter import Classifier, InputSpec, Split, initialise, load
from deepseal.errors import InputError
from deepseal.rng import Rng
from deepseal.watermark import SCHEMES, DeepSigns, Key, embed, verify
from deepseal.watermark.training import MarkTerm

MARKS = (
    "deepsigns",
    "diction",
    "uchida",
    "hash-bound",
    "adi",
    "zhang",
    "le-merrer",
    "deepsigns-blackbox",
    "ewe",
    "blackmarks",
)
QUICK = {
    "deepsigns-blackbox": {"models": 0},
    "blackmarks": {"models": 1, "bits": 32, "votes": 3},
    "diction": {"training": 50},
}
SCRIPT = Path(__file__).with_name("loop_script.py")


def key_of(name: str, model: Classifier, data: Split, **params) -> Key:
    return SCHEMES.build(name, {**QUICK.get(name, {}), **params}).keygen(model, data, owner="me", rng=Rng(0))


def trained_here(model: Classifier, data: Split, term: MarkTerm | None, *, epochs: int, seed: int = 0) -> Classifier:
    """A loop as people write it, on the model itself."""
    module, generator = model.module, torch.Generator().manual_seed(seed)
    module.train()
    optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
    for _ in range(epochs):
        for rows in torch.randperm(len(data), generator=generator).split(64):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(module(model.prepare(data.x[rows])), data.y[rows])
            if term is not None:
                loss = loss + term()
            loss.backward()
            optimizer.step()
    module.zero_grad()
    return model


def distance(one: Classifier, other: Classifier) -> float:
    pairs = zip(one.module.parameters(), other.module.parameters(), strict=True)
    return math.sqrt(sum(float((p.detach() - q.detach()).pow(2).sum()) for p, q in pairs))


class TestTerm:
    @pytest.mark.parametrize("name", MARKS)
    def test_a_loop_with_it_does_what_embedding_does(self, name, base, digits):
        """The same batches, optimiser and draws written out here give the same weights."""
        # What settles is the task alone, with which the owner of a loop goes on anyway.
        unsettled = {"settle": 0} if SCHEMES.build(name, {}).as_dict().get("settle") else {}
        key = key_of(name, base, digits.train, steps=8, rounds=1, **unsettled)
        marked = embed(base, digits.train, key, rng=Rng(5))
        mine, order = base.copy(), Rng(5).child("order").torch()
        term = MarkTerm(key, mine, digits.train, rng=Rng(5))
        optimizer = torch.optim.Adam(mine.module.parameters(), lr=1e-3)
        batches = torch.randperm(len(digits.train), generator=order).split(128)
        for index in range(8):
            optimizer.param_groups[0]["lr"] = 1e-3 * 0.5 * (1 + math.cos(math.pi * index / 8))
            x, y = digits.train.x[batches[index]], digits.train.y[batches[index]]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(mine.module(mine.prepare(x)), y) + term()
            loss.backward()
            optimizer.step()
        assert distance(marked, base) > 0.1
        assert distance(marked, mine) < 0.01 * distance(marked, base)

    def test_leaves_no_trace_of_itself(self, base, digits, no_trace):
        for name in MARKS:
            key = key_of(name, base, digits.train)
            for training in (True, False):
                model = base.copy()
                model.module.train(training)
                with no_trace(model):
                    value = MarkTerm(key, model, digits.train, rng=Rng(0))()
                assert value.requires_grad and value.ndim == 0 and float(value.detach()) > 0, name

    def test_is_scaled_and_accumulated_as_any_loss(self, base, digits):
        key, model = key_of("deepsigns", base, digits.train), base.copy()

        def gradients(*factors: float) -> list[torch.Tensor]:
            term = MarkTerm(key, model, digits.train, rng=Rng(0))
            for factor in factors:
                (factor * term()).backward()
            found = [p.grad.clone() for p in model.module.parameters() if p.grad is not None]
            model.module.zero_grad()
            return found

        once, half, both, two = gradients(1.0), gradients(0.5), gradients(1.0, 1.0), gradients(0.0, 1.0)
        for a, b, c, d in zip(once, half, both, two, strict=True):
            assert torch.allclose(a / 2, b)
            assert torch.allclose(a + d, c, rtol=1e-4, atol=1e-6)
            assert not torch.equal(a, d), "every call draws anew"

    def test_gradients_can_be_added_to_those_of_a_loop_without_its_loss(self, base, digits):
        key, model = key_of("adi", base, digits.train), base.copy()
        first = MarkTerm(key, model, digits.train, rng=Rng(0))
        value = first()
        value.backward()
        expected = {name: p.grad.clone() for name, p in model.module.named_parameters()}
        model.module.zero_grad()
        again = MarkTerm(key, model, digits.train, rng=Rng(0))
        some = [model.module.fc2.weight]
        some[0].grad = torch.ones_like(some[0])
        assert again.add_gradients(some) == pytest.approx(float(value.detach()))
        assert torch.allclose(some[0].grad, expected["fc2.weight"] + 1)
        assert model.module.fc1.weight.grad is None
        assert again.add_gradients([torch.zeros(3, requires_grad=True)]) is None

    def test_meets_the_same_weights_under_gradient_checkpointing(self, digits):
        class Recomputing(nn.Sequential):
            def forward(self, x):
                return self[4](
                    recomputed(lambda flat: self[3](self[2](self[1](flat))), self[0](x), use_reentrant=False)
                )

        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64), nn.Linear(64, 10)]
        found = []
        for kind in (nn.Sequential, Recomputing):
            model = Classifier(kind(*layers), digits.spec)
            key = DeepSigns(bits=64, layers=("1", "3")).keygen(model, digits.train, owner="me", rng=Rng(0))
            MarkTerm(key, model, digits.train, rng=Rng(0))().backward()
            found.append([p.grad.clone() for p in model.module.parameters() if p.grad is not None])
            model.module.zero_grad()
        assert len(found[0]) == 4, "nothing comes after the last marked layer"
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(*found, strict=True))

    def test_works_in_mixed_precision_and_without_gradients(self, base, digits):
        key, model = key_of("deepsigns", base, digits.train), base.copy()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            MarkTerm(key, model, digits.train, rng=Rng(0))().backward()
        assert {p.grad.dtype for p in model.module.parameters() if p.grad is not None} == {torch.float32}
        with torch.no_grad():
            assert not MarkTerm(key, model, digits.train, rng=Rng(0))().requires_grad

    def test_frozen_layers_stay_out(self, base, digits):
        key, model = key_of("deepsigns", base, digits.train), base.copy()
        model.module.fc1.requires_grad_(False)
        MarkTerm(key, model, digits.train, rng=Rng(0))().backward()
        assert model.module.fc1.weight.grad is None
        assert model.module.fc2.weight.grad is not None

    def test_one_logit_takes_triggers(self, digits):
        class Score(nn.Sequential):
            def forward(self, x):
                return super().forward(x).squeeze(1)

        torch.manual_seed(0)
        layers = [nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)]
        model = Classifier(Score(*layers), InputSpec((1, 8, 8), 2))
        data = Split(digits.train.x, (digits.train.y > 4).long())
        key = key_of("adi", model, data, steps=300)
        assert verify(embed(model, data, key, rng=Rng(1)), key, max_false_positive=1e-9).verdict == "owned"


class TestRefusals:
    @pytest.mark.parametrize(
        ("name", "params", "told"),
        [("plain", {}, "found plain"), ("deepsigns", {"recipe": "paper"}, "found deepsigns, recipe=paper")],
    )
    def test_marks_that_are_no_term(self, name, params, told, base, digits):
        key = key_of(name, base, digits.train, **params)
        with pytest.raises(InputError, match=f"a scheme whose mark is a term of the loss; {told}; draw"):
            MarkTerm(key, base, digits.train, rng=Rng(0))

    def test_what_does_not_fit(self, base, digits):
        key = key_of("deepsigns", base, digits.train)
        other = initialise("deepseal.adapter.zoo:cnn", digits.spec, Rng(0))
        with pytest.raises(InputError, match="512 features in layer fc2; found 10"):
            MarkTerm(key, other, digits.train, rng=Rng(0))
        with pytest.raises(InputError, match="a non-empty split"):
            MarkTerm(key, base, digits.train.take(torch.arange(0)), rng=Rng(0))
        half, frozen = base.copy(), base.copy()
        half.module.half()
        with pytest.raises(InputError, match="float16"):
            MarkTerm(key, half, digits.train, rng=Rng(0))
        frozen.module.requires_grad_(False)
        with pytest.raises(InputError, match="all of them frozen"):
            MarkTerm(key, frozen, digits.train, rng=Rng(0))()
        moved = base.copy()
        term = MarkTerm(key, moved, digits.train, rng=Rng(0))
        moved.module.to("meta")
        with pytest.raises(InputError, match="the model on cpu, where the term is; found meta"):
            term()


@pytest.mark.parametrize("name", ["deepsigns", "uchida", "adi"])
@pytest.mark.parametrize("start", ["initialised", "warmed up", "trained"])
def test_owned_from_whatever_the_training_starts_with(name, start, base, digits):
    """The key of an initialised network and one of a trained network: both ways the same verdicts."""
    model = base.copy() if start == "trained" else initialise("deepseal.adapter.zoo:mlp", digits.spec, Rng(7))
    if start == "warmed up":
        trained_here(model, digits.train, None, epochs=1)
    quick = {"gap": 0.0} if name == "adi" else {}  # a gap of logits takes more than ten epochs
    key, before = key_of(name, model, digits.train, **quick), model.copy()
    assert verify(before, key).verdict == "not-owned"
    trained_here(model, digits.train, MarkTerm(key, model, digits.train, rng=Rng(1)), epochs=10, seed=1)
    result = verify(model, key, max_false_positive=1e-9)
    assert (result.verdict, result.bit_errors) == ("owned", 0)
    assert model.accuracy(digits.test).value > base.accuracy(digits.test).value - 0.02
    if start == "trained":
        return
    unmarked = trained_here(before, digits.train, None, epochs=10, seed=1)
    assert verify(unmarked, key, max_false_positive=1e-3).verdict == "not-owned", "the same training without the term"


def test_a_model_without_classes_in_a_loop_with_a_loss_of_its_own():
    model, data = encoder(width=96), Split.unlabelled(sentences(300))
    words, x = torch.randn(60, 96, generator=torch.Generator().manual_seed(0)), sentences(300)
    target = (words[x["tokens"]] * x["mask"][..., None]).sum(dim=1) / x["mask"].sum(dim=1, keepdim=True)
    key = DeepSigns(bits=64).keygen(model, data, owner="me", rng=Rng(0))
    term = MarkTerm(key, model, data, rng=Rng(1))
    optimizer = torch.optim.Adam(model.module.parameters(), lr=1e-3)
    losses = []
    for rows in torch.arange(300).repeat(7).split(32):
        x = model.prepare(data.x[rows])
        loss = (model.spec.read(model.module(**x.tensors), x) - target[rows]).pow(2).mean()
        optimizer.zero_grad()
        (loss + term()).backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.7 * losses[0]
    assert verify(model, key, max_false_positive=1e-9).verdict == "owned"


def test_two_processes_train_one_marked_model(files, key, base, digits, tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--max-restarts=0"]
    command += [str(SCRIPT), str(files / "base.safetensors"), str(files / "owner.key"), str(tmp_path)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    for way in ("loss", "gradients"):
        first, second = (load(tmp_path / f"{way}{rank}.safetensors") for rank in (0, 1))
        assert first.fingerprint() == second.fingerprint(), "the processes hold different models"
        alone = base.copy()
        alone.module.train()
        term = MarkTerm(key, alone, digits.train, rng=Rng(1))
        optimizer = torch.optim.SGD(alone.module.parameters(), lr=0.05)
        for rows in torch.arange(640).split(64):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(alone.module(alone.prepare(digits.train.x[rows])), digits.train.y[rows])
            (loss + term()).backward()
            optimizer.step()
        assert distance(first, alone) < 1e-3 * distance(first, base), way


class TestLightning:
    @pytest.fixture
    def pl(self):
        return pytest.importorskip("lightning.pytorch", reason="lightning is not installed: pip install lightning")

    def lit(self, pl, model: Classifier, term: MarkTerm | None = None, optimizer=torch.optim.Adam, **options):
        class Lit(pl.LightningModule):
            def __init__(self):
                super().__init__()
                self.net = model.module

            def training_step(self, batch, _index):
                x, y = batch
                loss = nn.functional.cross_entropy(self.net(model.prepare(x)), y)
                return loss if term is None else loss + term()

            def configure_optimizers(self):
                return optimizer(self.net.parameters(), **{"lr": 1e-3, **options})

        return Lit()

    def fit(self, pl, module, data: Split, folder, callbacks=(), rows=None, **options):
        torch.manual_seed(0)
        data = data if rows is None else data.take(torch.arange(rows))
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(data.x, data.y), batch_size=64, shuffle=rows is None
        )
        trainer = pl.Trainer(
            **{"max_epochs": 1, "accelerator": "cpu", "logger": False, "enable_checkpointing": False, **options},
            callbacks=list(callbacks),
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=folder,
        )
        trainer.fit(module, loader)

    def test_marks_from_the_first_epoch(self, pl, digits, tmp_path):
        from deepseal.watermark.lightning_loop import MarkCallback

        model = initialise("deepseal.adapter.zoo:mlp", digits.spec, Rng(7))
        key = key_of("deepsigns", model, digits.train)
        hooks = [dict(layer._forward_hooks) for layer in model.module.modules()]
        names = [sorted(vars(layer)) for layer in model.module.modules()]
        callback = MarkCallback(key, model, digits.train, rng=Rng(1))
        self.fit(pl, self.lit(pl, model), digits.train, tmp_path, [callback], max_epochs=12)
        result = verify(model, key, max_false_positive=1e-9)
        assert (result.verdict, result.bit_errors) == ("owned", 0)
        assert 0 <= callback.value < 0.5
        assert [dict(layer._forward_hooks) for layer in model.module.modules()] == hooks
        assert [sorted(vars(layer)) for layer in model.module.modules()] == names

    @pytest.mark.parametrize("options", [{}, {"accumulate_grad_batches": 2}, {"precision": "bf16-mixed"}])
    def test_callback_and_training_step_give_the_same_model(self, pl, base, digits, tmp_path, options):
        """Accumulated batches too: the term is divided as the loss is, or added once to what was accumulated."""
        from deepseal.watermark.lightning_loop import MarkCallback

        key = key_of("uchida", base, digits.train, prune=0.0, drift=0.0)  # the same term at every call
        ways = []
        for way in ("step", "callback"):
            model = base.copy()
            term = MarkTerm(key, model, digits.train, rng=Rng(1)) if way == "step" else None
            module = self.lit(pl, model, term, torch.optim.SGD, lr=0.05)
            callbacks = [] if term else [MarkCallback(key, model, digits.train, rng=Rng(1))]
            self.fit(pl, module, digits.train, tmp_path, callbacks, rows=256, **options)
            ways.append(model)
        assert distance(ways[0], base) > 1e-3
        assert distance(*ways) < (0.02 if options.get("precision") else 1e-3) * distance(ways[0], base)

    def test_another_model_is_refused(self, pl, base, digits, tmp_path):
        from deepseal.watermark.lightning_loop import MarkCallback

        callback = MarkCallback(key_of("uchida", base, digits.train), base.copy(), digits.train, rng=Rng(1))
        with pytest.raises(InputError, match="a model in training"):
            self.fit(pl, self.lit(pl, base.copy()), digits.train, tmp_path, [callback])


class TestTransformers:
    @pytest.fixture
    def hf(self):
        return pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")

    def fit(self, hf, module, rows, folder, callbacks=(), **options):
        values = {"per_device_train_batch_size": 32, "learning_rate": 1e-3, "report_to": [], "use_cpu": True}
        values |= {"save_strategy": "no", "logging_strategy": "no", "disable_tqdm": True, "seed": 0}
        arguments = hf.TrainingArguments(output_dir=str(folder), **{**values, **options})
        hf.Trainer(model=module, args=arguments, train_dataset=rows, callbacks=list(callbacks)).train()

    def bert(self, hf):
        """A small BERT, initialised, that has to say which half of the vocabulary a sentence's first word is from."""
        sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
        config = hf.BertConfig(vocab_size=60, max_position_embeddings=16, num_labels=2, **sizes)
        torch.manual_seed(0)
        module = hf.BertForSequenceClassification(config)
        spec = encoder(2).spec
        fields = {"input_ids": spec.fields["tokens"], "attention_mask": spec.fields["mask"]}
        model = Classifier(module, InputSpec((), 2, fields=fields, output="logits"))
        x = sentences(600).tensors
        from deepseal.adapter import Inputs

        data = Split(Inputs({"input_ids": x["tokens"], "attention_mask": x["mask"]}), (x["tokens"][:, 0] > 30).long())
        rows = [
            {"input_ids": a, "attention_mask": b, "labels": c}
            for a, b, c in zip(x["tokens"], x["mask"], data.y, strict=True)
        ]
        return model, data, rows

    def test_marks_a_text_model_from_the_first_epoch(self, hf, tmp_path):
        from deepseal.watermark.transformers_loop import MarkCallback

        model, data, rows = self.bert(hf)
        key = DeepSigns(bits=64).keygen(model, data, owner="me", rng=Rng(0))
        names = [sorted(vars(layer)) for layer in model.module.modules()]
        callback = MarkCallback(key, model, data, rng=Rng(1))
        self.fit(hf, model.module, rows, tmp_path, [callback], num_train_epochs=8)
        result = verify(model, key, max_false_positive=1e-9)
        assert (result.verdict, result.bit_errors) == ("owned", 0)
        assert model.accuracy(data).value > 0.8
        assert 0 <= callback.value < 1
        added = {
            name
            for layer, old in zip(model.module.modules(), names, strict=True)
            for name in set(vars(layer)) - set(old)
        }
        assert added <= {"_is_accelerate_prepared"}, "what Transformers itself adds"
        assert not any(layer._forward_hooks for layer in model.module.modules())
        assert all(p.grad is None for p in model.module.parameters())

    @pytest.mark.parametrize("options", [{}, {"gradient_accumulation_steps": 2}])
    def test_is_the_update_of_a_plain_loop(self, hf, base, digits, tmp_path, options):
        from deepseal.watermark.transformers_loop import MarkCallback

        class Wrapped(nn.Module):
            """What Trainer asks for: a loss where there are labels."""

            def __init__(self, model):
                super().__init__()
                self.net, self.model = model.module, [model]

            def forward(self, x, labels):
                logits = self.net(self.model[0].prepare(x))
                return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

        key, model, mine = key_of("adi", base, digits.train), base.copy(), base.copy()
        some = digits.train.take(torch.arange(64))
        rows = [{"x": x, "labels": y} for x, y in zip(some.x, some.y, strict=True)]
        size = 64 // options.get("gradient_accumulation_steps", 1)
        options = {"max_steps": 1, "optim": "sgd", "max_grad_norm": 0.0, "per_device_train_batch_size": size, **options}
        callback = MarkCallback(key, model, digits.train, rng=Rng(1))
        self.fit(hf, Wrapped(model), rows, tmp_path, [callback], lr_scheduler_type="constant", **options)
        mine.module.train()
        loss = nn.functional.cross_entropy(mine.module(mine.prepare(some.x)), some.y)
        (loss + MarkTerm(key, mine, digits.train, rng=Rng(1))()).backward()
        with torch.no_grad():
            for parameter in mine.module.parameters():
                parameter -= 1e-3 * parameter.grad
        assert distance(mine, base) > 1e-5
        assert distance(mine, model) < 1e-2 * distance(mine, base)

    def test_what_callbacks_cannot_do_is_refused(self, hf, base, digits):
        from types import SimpleNamespace

        from deepseal.watermark.transformers_loop import MarkCallback

        callback = MarkCallback(key_of("uchida", base, digits.train), base, digits.train, rng=Rng(1))
        plain = {"fsdp": "", "deepspeed": None, "fp16": False, "max_grad_norm": 1.0}
        for options, told in (
            ({"deepspeed": "zero3.json"}, "found deepspeed"),
            ({"fp16": True, "max_grad_norm": 0.0}, "found fp16 without clipping"),
            ({}, "a model in training"),
        ):
            arguments = SimpleNamespace(**{**plain, **options})
            with pytest.raises(InputError, match=told):
                callback.on_train_begin(arguments, None, None, model=base.copy().module)
