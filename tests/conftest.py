"""What the tests share: real digits, models trained on them once a session, and the leave-no-trace check."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from models import trained

from deepseal.adapter import Classifier, Dataset, checkpoint, load_data
from deepseal.rng import Rng
from deepseal.watermark import DeepSigns, Key, embed, save_key

torch.set_num_threads(1)
# A runner in the background ignores Ctrl-C, and so would the processes that the tests start and interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


class Evil:
    """Touches a file when it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self) -> tuple[Callable[[Path], None], tuple[Path]]:
        return (Path.touch, (self.proof,))


@pytest.fixture
def evil(tmp_path: Path) -> Iterator[Evil]:
    """An object whose pickle runs code; the test fails if that code has run."""
    proof = tmp_path / "proof"
    yield Evil(proof)
    assert not proof.exists(), "code from a file has run"


@pytest.fixture(scope="session", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Kept models go to a folder of the tests'."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DEEPSEAL_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="session")
def digits() -> Dataset:
    return load_data("digits")


@pytest.fixture(scope="session")
def base(digits: Dataset) -> Classifier:
    return trained(digits, 0)


@pytest.fixture(scope="session")
def key(base: Classifier, digits: Dataset) -> Key:
    return DeepSigns().keygen(base, digits.train, owner="Example Ltd", rng=Rng(0))


@pytest.fixture(scope="session")
def marked(base: Classifier, digits: Dataset, key: Key) -> Classifier:
    return embed(base, digits.train, key, rng=Rng(1))


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory, base: Classifier, marked: Classifier, key: Key) -> Path:
    """A folder with base.safetensors, marked.safetensors and owner.key: read only."""
    folder = tmp_path_factory.mktemp("files")
    checkpoint.save(base, folder / "base.safetensors")
    checkpoint.save(marked, folder / "marked.safetensors")
    save_key(key, folder / "owner.key")
    return folder


def _state(model: Classifier) -> dict[str, object]:
    module = model.module
    return {
        "tensors": {name: value.detach().clone() for name, value in module.state_dict().items()},
        "buffers": {name: value.detach().clone() for name, value in module.named_buffers()},
        "places": {name: value.data_ptr() for name, value in module.state_dict().items()},
        "training": {name: getattr(layer, "training", None) for name, layer in module.named_modules()},
        "hooks": {
            name: (len(layer._forward_hooks), len(layer._forward_pre_hooks), len(layer._backward_hooks))
            for name, layer in module.named_modules()
        },
        "grad": {name: (p.requires_grad, p.grad is None) for name, p in module.named_parameters()},
        "where": {name: (p.device, p.dtype) for name, p in module.named_parameters()},
        "attributes": {name: sorted(vars(layer)) for name, layer in module.named_modules()},
        "rng": torch.get_rng_state(),
        "other rng": (random.getstate(), np.random.get_state()[1].tobytes(), np.random.get_state()[2]),
        "modes": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch.get_default_dtype()),
    }


def _same(before: object, after: object) -> bool:
    if isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor):
        return torch.equal(before, after)
    if isinstance(before, dict) and isinstance(after, dict):
        return before.keys() == after.keys() and all(_same(before[name], after[name]) for name in before)
    return before == after


@contextmanager
def _no_trace(model: Classifier) -> Iterator[None]:
    before = _state(model)
    try:
        yield
    finally:
        after = _state(model)
        changed = [name for name in before if not _same(before[name], after[name])]
        assert not changed, f"left a trace in {changed}"


@pytest.fixture
def no_trace() -> Callable[[Classifier], AbstractContextManager[None]]:
    """``with no_trace(model):`` fails if anything about the module or the global random state has changed."""
    return _no_trace
