"""Data parallel: two real processes, started by torchrun, embed one mark."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deepseal.adapter import Classifier, Recipe, load, train
from deepseal.adapter.parallel import Workers, data_parallel, workers
from deepseal.errors import InputError
from deepseal.rng import Rng
from deepseal.watermark import verify

SCRIPT = Path(__file__).with_name("parallel_script.py")


def launch(join: str, files: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone", "--max-restarts=0"]
    command += [str(SCRIPT), join, str(files / "base.safetensors"), str(files / "owner.key"), str(out)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=400, env=environment, check=False)


def distance(one: Classifier, other: Classifier) -> float:
    pairs = zip(one.module.parameters(), other.module.parameters(), strict=True)
    return max(float((p.detach() - q.detach()).abs().max()) for p, q in pairs)


@pytest.mark.parametrize("join", ["torch", "accelerate"])
def test_two_processes_embed_one_mark(join, files, key, base, digits, tmp_path):
    if join == "accelerate":
        pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    ran = launch(join, files, tmp_path)
    assert ran.returncode == 0, ran.stderr[-2000:]
    first, second = (Path(tmp_path, f"{rank}.txt").read_text().split() for rank in (0, 1))
    assert first == second, "the processes hold different models"
    assert first[2] == "2"
    result = verify(load(tmp_path / "marked.safetensors"), key, max_false_positive=1e-9)
    assert (result.verdict, result.bit_errors) == ("owned", 0)
    alone = train(base, digits.train, recipe=Recipe(steps=20, batch_size=64, optimizer="sgd"), rng=Rng(2))
    together = load(tmp_path / "plain.safetensors")
    assert distance(alone, together) < 1e-3 * distance(alone, base), (
        "the mean of the shares' gradients is the batch's gradient"
    )


def test_one_process_without_torchrun_is_refused():
    with pytest.raises(InputError, match="torchrun"), data_parallel():
        pass
    assert workers() == Workers(0, 1)


def test_shares_cover_a_batch():
    rows = torch.arange(11)
    assert sorted(torch.cat([Workers(rank, 3).share(rows) for rank in range(3)]).tolist()) == rows.tolist()
    assert Workers(1, 4).share(rows[:3]).tolist() == [0, 1, 2], "too few for all: everybody takes them all"
