"""Run by ``torchrun``: every process trains or embeds together, and the first writes what came of it.

Arguments: join with "torch" or "accelerate", weights file, key file, folder to write to.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from deepseal.adapter import Recipe, checkpoint, load, load_data
from deepseal.adapter.parallel import data_parallel
from deepseal.adapter.training import train
from deepseal.rng import Rng
from deepseal.watermark import embed, load_key


def main(join: str, weights: str, key_file: str, out: str) -> None:
    torch.set_num_threads(1)
    if join == "accelerate":
        from accelerate import Accelerator

        Accelerator(cpu=True)
    else:
        torch.distributed.init_process_group("gloo")
    model, key, data = load(weights), load_key(key_file), load_data("digits").train
    with data_parallel() as workers:
        marked = embed(model, data, key, rng=Rng(1))
        plain = train(model, data, recipe=Recipe(steps=20, batch_size=64, optimizer="sgd"), rng=Rng(2))
    Path(out, f"{workers.rank}.txt").write_text(f"{marked.fingerprint()} {plain.fingerprint()} {workers.count}")
    if workers.rank == 0:
        checkpoint.save(marked, Path(out, "marked.safetensors"))
        checkpoint.save(plain, Path(out, "plain.safetensors"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
