"""Compression of DeepSecure's networks on real data: one record a network, seed and fold; resumable.

    python benchmarks/private_compress.py [--nets b1,b2,b3] [--seeds 0,1,2] [--only NAME,...] [--summary]

A record that exists, is ok and was made with the same parameters and code (adapter, compression) is skipped. Models are
kept in ``build/``. Settings were chosen on the calibration split of seed 0; the test split is looked at once a record.
"""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402

from deepseal.adapter import Classifier, Dataset, Recipe, checkpoint, initialise, load, load_data, train  # noqa: E402
from deepseal.apps.private_compress import accuracies, compress_model  # noqa: E402
from deepseal.apps.reporter import silent  # noqa: E402
from deepseal.errors import InputError  # noqa: E402
from deepseal.record import Record, Run, read_record  # noqa: E402
from deepseal.rng import Rng  # noqa: E402
from deepseal.secure_inference.compress import CompressSettings  # noqa: E402

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "private"
MODELS = HERE.parent / "build" / "benchmarks" / "private-compress"
MNIST = Recipe(epochs=15, learning_rate=3e-3, schedule="cosine")
ISOLET = Recipe(epochs=100, schedule="cosine")
NETS: dict[str, tuple[str, Recipe, float, dict[str, Any]]] = {
    "b1": ("mnist", MNIST, 9.0, {"method": "both", "epochs": 20}),
    "b2": ("mnist", MNIST, 12.0, {"method": "both", "error": 0.4}),
    "b3": ("isolet", ISOLET, 6.0, {"method": "both", "error": 0.3, "epochs": 30, "step_epochs": 3}),
}
MAX_LOSS = 0.5  # points, on the test split


def code() -> str:
    """SHA-256 over our sources that decide a figure."""
    digest = hashlib.sha256()
    for folder in ("adapter", "secure_inference/compress"):
        for path in sorted((HERE.parent / folder).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


CODE = code()


class Bench:
    """One network and seed."""

    def __init__(self, net: str, seed: int) -> None:
        self.net, self.seed = net, seed
        self.source, self.recipe, self.fold, self.settings = NETS[net]
        self.rng = Rng(seed).child("benchmark", "compress", net)
        self._data: Dataset | None = None

    @property
    def data(self) -> Dataset:
        self._data = self._data or load_data(self.source)
        return self._data

    def base(self) -> Classifier:
        mark = hashlib.sha256(f"{CODE_ADAPTER} {self.recipe.as_dict()}".encode()).hexdigest()[:12]
        path = MODELS / f"{self.net}-seed{self.seed}-base-{mark}.safetensors"
        if not path.exists():
            architecture = f"deepseal.adapter.zoo:deepsecure_{self.net}"
            start = initialise(architecture, self.data.spec, self.rng.child("weights"))
            made = train(start, self.data.train, recipe=self.recipe, rng=self.rng.child("train"))
            checkpoint.save(made, path, force=True)
        return load(path)

    def cells(self) -> Iterator[tuple[str, CompressSettings]]:
        """The paper's fold, and twice and four times that."""
        for factor in (1, 2, 4):
            yield f"fold{self.fold * factor:g}", CompressSettings(fold=self.fold * factor, **self.settings)

    def compressed(self, name: str, settings: CompressSettings, run: Run) -> None:
        out = MODELS / f"{self.net}-seed{self.seed}-{name}.safetensors"
        compress_model(run, model=self.base(), dataset=self.data, settings=settings, seed=self.seed, out=out,
                       force=True, report=silent)  # fmt: skip

    def control(self, run: Run) -> None:
        """The uncompressed network, retrained as long as the paper's fold takes: what retraining alone gives."""
        settings = next(self.cells())[1]
        passes = settings.epochs * (2 if settings.method == "both" and self.net != "b1" else 1)
        passes += settings.step_epochs * (settings.steps - 1)
        recipe = Recipe(epochs=passes, learning_rate=settings.learning_rate, schedule="cosine")
        retrained = train(self.base(), self.data.train, recipe=recipe, rng=self.rng.child("control"))
        run.results.update(accuracies(self.base(), retrained, self.data), epochs=passes)


def code_adapter() -> str:
    digest = hashlib.sha256()
    for path in sorted((HERE.parent / "adapter").rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


CODE_ADAPTER = code_adapter()


def is_done(path: Path, params: dict[str, Any]) -> bool:
    """Whether the record is there, ok, and made with these parameters."""
    try:
        record = read_record(path)
    except InputError:
        return False
    return record.status == "ok" and all(record.params.get(name) == value for name, value in params.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="b1,b2,b3")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default="", help="names of cells, such as fold9 or control")
    parser.add_argument("--summary", action="store_true", help="only rewrite the table from the records")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    RECORDS.mkdir(parents=True, exist_ok=True)
    MODELS.mkdir(parents=True, exist_ok=True)
    for net in options.nets.split(",") if not options.summary else ():
        for seed in map(int, options.seeds.split(",")):
            bench = Bench(net, seed)
            for name, settings in [*bench.cells(), ("control", None)]:
                params = {"net": net, "cell": name, "owner": bench.recipe.as_dict(), "code": CODE,
                          "settings": settings.as_dict() if settings else bench.settings}  # fmt: skip
                path = RECORDS / f"compress-{net}-seed{seed}-{name}.json"
                if (options.only and name not in options.only.split(",")) or is_done(path, params):
                    continue
                run = Run("benchmark.compress", seed=seed, params=params)
                if settings is None:
                    bench.control(run)
                else:
                    bench.compressed(name, settings, run)
                run.params.update(params)
                run.record().write(path, force=True)
                shown = {k: run.results.get(k) for k in ("fold", "accuracy_before", "accuracy_after", "reached")}
                print(net, seed, name, shown, flush=True)
    records = [read_record(path) for path in sorted(RECORDS.glob("compress-*.json"))]
    (RECORDS / "compress.md").write_text(summary(records))


def summary(records: list[Record]) -> str:
    """Markdown: a row a network and wanted fold, a column a seed; then the curves on the calibration split."""
    lines = [
        "# Compression of DeepSecure's networks",
        "",
        "Made by `python benchmarks/private_compress.py` from the records in this folder. Fold: multiplications of one",
        "sample with weights, before / after. In brackets: accuracy on the test split, after minus before, in points,",
        "with its 95 % interval (paired). *control*: the uncompressed network, retrained as long.",
        "",
    ]
    for net, (data, _, fold, _) in NETS.items():
        own = [record for record in records if record.params["net"] == net]
        if not own:
            continue
        seeds = sorted({record.seed for record in own if record.seed is not None})
        found = {(record.params["cell"], record.seed): record.results for record in own}
        n = next(iter(found.values()))["n"]
        lines += [f"## {net.upper()} on {data} (n = {n}; the paper's fold: {fold:g})", ""]
        lines += ["| wanted | " + " | ".join(f"seed {seed}" for seed in seeds) + " |", "|---" * (len(seeds) + 1) + "|"]
        for name in dict.fromkeys(
            cell for cell, _ in sorted(found, key=lambda key: (key[0] == "control", _size(key[0])))
        ):
            lines.append(f"| {name} | " + " | ".join(_shown(found.get((name, seed))) for seed in seeds) + " |")
        lines.append("")
        for seed in seeds:
            lines += _cost(seed, found.get((f"fold{fold:g}", seed)))
        for seed in seeds[:1]:
            lines += _curve(seed, found.get((f"fold{4 * fold:g}", seed)))
        lines.append("")
    return "\n".join(lines)


def _size(cell: str) -> float:
    return float(cell.removeprefix("fold")) if cell.startswith("fold") else 0.0


def _shown(results: dict[str, Any] | None) -> str:
    if not results:
        return ""
    low, high = (100 * edge for edge in results["difference_interval"])
    change = f"{100 * results['accuracy_before']:.2f} → {100 * results['accuracy_after']:.2f} %"
    change += f" ({100 * results['difference']:+.2f}: {low:+.2f} … {high:+.2f})"
    if "fold" not in results:
        return change
    within = 100 * results["difference"] >= -MAX_LOSS and results["fold"] >= results["wanted_fold"]
    return f"fold {results['fold']:.1f}, {change}" + ("" if within else ", not reached")


def _cost(seed: int, results: dict[str, Any] | None) -> list[str]:
    if not results:
        return []
    before, after = results["cost"]["before"], results["cost"]["after"]
    parts = [f"{name.replace('_', ' ')} {before[name]:,} → {after[name]:,}" for name in before]
    columns = "" if results["columns"] is None else f"; {results['columns']} columns"
    program = f"; the program (8 bits) gives {100 * results['program']['accuracy']:.2f} %"
    return [f"- seed {seed}, the paper's fold: {'; '.join(parts)}{columns}{program}"]


def _curve(seed: int, results: dict[str, Any] | None) -> list[str]:
    if not results:
        return []
    points = ", ".join(f"{point['fold']:.1f}: {100 * point['accuracy']:.2f}" for point in results["curve"])
    base = 100 * results["calibration_accuracy_before"]
    return [f"- seed {seed}, calibration accuracy at each fold on the way (before: {base:.2f} %): {points}"]


if __name__ == "__main__":
    main()
