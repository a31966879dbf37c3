"""Run by ``torchrun``: every process trains its share with the mark's term in the loss, or its gradients added.

Arguments: weights file, key file, folder to write to.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from deepseal.adapter import checkpoint, load, load_data
from deepseal.rng import Rng
from deepseal.watermark import load_key
from deepseal.watermark.training import MarkTerm


def main(weights: str, key_file: str, out: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, key, data = torch.distributed.get_rank(), load_key(key_file), load_data("digits").train
    for way in ("loss", "gradients"):
        model = load(weights)
        model.module.train()
        parallel = DistributedDataParallel(model.module)
        term = MarkTerm(key, model, data, rng=Rng(1))
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.05)
        for rows in torch.arange(640).split(64):
            own = rows[rank::2]
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(parallel(model.prepare(data.x[own])), data.y[own])
            if way == "loss":
                (loss + term()).backward()
            else:
                loss.backward()
                term.add_gradients()
            optimizer.step()
        checkpoint.save(model, Path(out, f"{way}{rank}.safetensors"))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
