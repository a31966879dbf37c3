"""What marking a transformer of more than 100 million parameters costs: time an update, and peak memory.

Each variant runs in a process of its own: plain fine-tuning in place over the trigger batches, plain training by
``Training``, and DeepSigns by both recipes, in turn. Run it on a quiet machine: ``python benchmarks/scale.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from deepseal.adapter import Classifier, InputSpec, Recipe, Split
from deepseal.adapter.training import Training
from deepseal.rng import Rng
from deepseal.watermark import DeepSigns

VOCABULARY, LENGTH, CLASSES, INPUTS = 30_522, 16, 16, 256
VARIANTS = ("plain", "training", "gentle", "robust")
TRIGGERS = 64  # inputs a batch: 16 carriers, 4 each


class Transformer(nn.Module):
    """BERT-base's sizes: 12 layers, 768 wide, 12 heads; the class from the mean of the tokens."""

    def __init__(self, width: int = 768, depth: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places.weight
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


class Block(nn.Module):
    """Pre-norm attention and perceptron."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.wide, self.narrow = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.narrow(nn.functional.gelu(self.wide(self.norm2(x))))


def measure(variant: str, updates: int) -> dict[str, object]:
    """Seconds of each update after a first one, and the peak of the process."""
    torch.manual_seed(0)
    model = Classifier(Transformer(), InputSpec((LENGTH,), CLASSES, bounds=(0, VOCABULARY - 1), integer=True))
    tokens = torch.randint(VOCABULARY, (INPUTS, LENGTH), generator=torch.Generator().manual_seed(0))
    data = Split(tokens, torch.arange(INPUTS) % CLASSES)
    step = {"plain": plain, "training": training}.get(variant, marking)(variant, model, data)
    seconds = []
    for _ in range(updates + 1):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return {
        "variant": variant,
        "parameters": sum(p.numel() for p in model.module.parameters()),
        "seconds": seconds[1:],
        "median_s": statistics.median(seconds[1:]),
        "peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


def plain(_variant: str, model: Classifier, data: Split):
    """Forward and backward pass of the model itself over a trigger batch, in place, and Adam's update."""
    optimizer = torch.optim.Adam(model.module.parameters(), lr=1e-5, fused=True)

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model.module(data.tensor[:TRIGGERS]), data.y[:TRIGGERS]).backward()
        optimizer.step()

    return step


def training(_variant: str, model: Classifier, data: Split):
    """The same by the one training loop, which leaves the owner's model as it is."""
    return Training(model, data, recipe=Recipe(steps=100, batch_size=TRIGGERS, learning_rate=1e-5), rng=Rng(0)).step


def marking(variant: str, model: Classifier, data: Split):
    """An update of DeepSigns, 256 bits, with a task batch of half the trigger batch."""
    scheme = DeepSigns(
        recipe=variant, groups=CLASSES if variant == "gentle" else None, batch=4, batch_size=TRIGGERS // 2
    )
    key = scheme.keygen(model, data, owner="benchmark", rng=Rng(0))
    scheme = DeepSigns.from_mapping(key.params)
    return scheme.embedding(model, data, key, rng=Rng(1)).step


def main() -> None:
    """Measure every variant in turn, ``rounds`` times, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/scale.json"))
    parser.add_argument("--updates", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--one", choices=VARIANTS)
    options = parser.parse_args()
    if options.one:
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        print(json.dumps(measure(options.one, options.updates)))  # noqa: T201
        return
    rows: dict[str, list[dict[str, object]]] = {variant: [] for variant in VARIANTS}
    for _ in range(options.rounds):
        for variant, results in rows.items():
            command = [sys.executable, __file__, "--one", variant, "--updates", str(options.updates)]
            ran = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=True)
            results.append(json.loads(ran.stdout))
    summary = {}
    for variant, results in rows.items():
        seconds = [value for result in results for value in result["seconds"]]
        peaks = [result["peak_mb"] for result in results]
        summary[variant] = {
            "n": len(seconds),
            "median_s": statistics.median(seconds),
            "lowest_s": min(seconds),
            "highest_s": max(seconds),
            "peak_mb": max(peaks),
        }
    for variant in VARIANTS:
        summary[variant]["times_plain"] = summary[variant]["median_s"] / summary["plain"]["median_s"]
        summary[variant]["memory_times_plain"] = summary[variant]["peak_mb"] / summary["plain"]["peak_mb"]
    record = {
        "parameters": rows["plain"][0]["parameters"],
        "inputs_a_batch": TRIGGERS,
        "tokens": LENGTH,
        "threads": int(os.environ.get("OMP_NUM_THREADS", "1")),
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "variants": summary,
    }
    options.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))  # noqa: T201


if __name__ == "__main__":
    main()
