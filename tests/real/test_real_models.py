"""Models that nobody here wrote are marked, verified and attacked without a line of code for any of them."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path

import pytest
import torch
from marking import RATE, examine, owned
from pretrained import silero_vad
from sounds import utterance
from subject import Subject
from untrained import UNTRAINED
from zoo import ZOO

from deepseal.adapter import Classifier, InputSpec, Split
from deepseal.errors import InputError
from deepseal.rng import Rng
from deepseal.watermark import DeepSigns

pytest.importorskip("skimage", reason="for the environment of 'make real-env'; run 'make test-real'")
LARGEST_CHANGE = 0.005
SHORT = {"crepe-full": 25, "swin-t": 25, "vit-b-16": 25}  # updates, of the 150 in benchmarks/models


def _here(name: str) -> Subject:
    if missing := ZOO[name].missing():
        pytest.skip(f"{', '.join(missing)} not installed; run 'make test-real'")
    return ZOO[name]


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", ZOO)
def test_model(name: str, tmp_path: Path, no_trace):
    subject = _here(name)
    if name in SHORT:
        subject = dataclasses.replace(subject, params={**subject.params, "steps": SHORT[name]})
    found = examine(subject, tmp_path, watch=no_trace)
    assert found["bits"] >= 64
    assert found["unmarked"]["verdict"] == "not-owned", found["unmarked"]
    assert found["marked"]["verdict"] == "owned", found["marked"]
    assert found["marked"]["p_value"] <= RATE
    assert found["marked"]["null"]["owned"] == 0
    assert {other["verdict"] for other in found["same_model"].values()} == {"owned"}, found["same_model"]
    assert found["same_model"]["left in training mode"]["bit_errors"] == found["marked"]["bit_errors"]
    if name not in UNTRAINED:
        assert abs(found["relative_change"]) <= LARGEST_CHANGE, (found["task_before"], found["task_after"])
    judged = next(iter(found["task_before"]))
    for attack in found["attacks"].values():  # a thief who breaks the model has not stolen it
        useful = attack["task"][judged] > 0.5 * found["task_before"][judged]
        assert not useful or attack["verdict"] == "owned", found["attacks"]


@pytest.mark.parametrize("name", ZOO)
def test_batches_of_one_and_of_many_read_the_same(name: str):
    model, data = owned(_here(name))
    some = data.take(torch.arange(4))
    key = DeepSigns(bits=64, groups=2, layers=None).keygen(model, some, owner="me", rng=Rng(0))
    layers = list(key.public["layers"])
    together = model.features(some.x, layers, pool=key.public.get("pool"))
    alone = [model.features(some.x[i : i + 1], layers, pool=key.public.get("pool")) for i in range(4)]
    for layer, values in together.items():
        scale = values.abs().max()
        assert torch.allclose(torch.cat([part[layer] for part in alone]), values, atol=1e-4 * float(scale))


class TestTorchScript:
    @pytest.fixture
    def detector(self) -> Classifier:
        pytest.importorskip("silero_vad", reason="silero_vad not installed; run 'make test-real'")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript is deprecated
            return Classifier(silero_vad(), InputSpec(shape=(512,), num_classes=0, bounds=(-1.0, 1.0)))

    def test_answers_queries(self, detector):
        chunks = torch.stack([torch.zeros(512), *(torch.from_numpy(utterance(0, 0)).float()[4096:7168].split(512))])
        answers = detector.query(chunks)
        assert answers.shape == (7, 1)
        assert answers[0] < 0.1 < answers.max() <= 1
        assert torch.equal(detector.query(chunks), answers)
        assert torch.equal(detector.oracle(output="logits").query(chunks), answers)

    def test_says_that_it_cannot_be_marked(self, detector):
        data = Split.unlabelled(torch.zeros(64, 512))
        with pytest.raises(InputError, match="TorchScript, which only answers queries"):
            DeepSigns(bits=64, groups=4).keygen(detector, data, owner="me", rng=Rng(0))
