"""DeepSigns against removal, on MNIST (MLP) and Fashion-MNIST (CNN, WRN): one record a cell, resumable.

    python benchmarks/watermark_deepsigns.py [--nets mlp,cnn,wrn] [--seeds 0,1,2] [--only NAME,...] [--summary]

A cell whose record exists, is ok and was made with the same parameters is skipped. Models are kept in ``build/``.
Each network is also marked by the paper's recipe (the peer), which gets lighter attacks that it does not survive.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from cells import code, is_done  # noqa: E402
from scipy import stats  # noqa: E402

from deepseal.adapter import Classifier, Dataset, Recipe, checkpoint, initialise, load, load_data, train  # noqa: E402
from deepseal.attacks import REMOVAL  # noqa: E402
from deepseal.record import Record, Run, read_record  # noqa: E402
from deepseal.rng import Rng  # noqa: E402
from deepseal.statistics import allowed_errors, rate  # noqa: E402
from deepseal.watermark import DeepSigns, Key, embedding_rounds, load_key, save_key, verify  # noqa: E402
from deepseal.watermark.cost import embedding_cost  # noqa: E402
from deepseal.watermark.verify import strangers  # noqa: E402

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "watermark-deepsigns"
MODELS = HERE.parent / "build" / "benchmarks" / "watermark-deepsigns"
RATE = 1e-9
BITS = 256
# architecture, data, training samples (None: all)
NETS: dict[str, tuple[str, str, int | None]] = {
    "mlp": ("deepseal.adapter.zoo:mlp", "mnist", None),
    "cnn": ("deepseal.adapter.zoo:cnn", "fashion-mnist", None),
    "wrn": ("deepseal.adapter.zoo:wrn", "fashion-mnist", 10_000),
}
# With a constant step WRN's last batches decide how good it is: 79 % right, and 89 % after the 320 updates of a mark.
OWNERS = {**dict.fromkeys(("mlp", "cnn"), Recipe(epochs=10)), "wrn": Recipe(epochs=10, schedule="cosine")}
INDEPENDENT = 10
STRANGERS = 1000


class Bench:
    """One network and seed: its files, made on demand, and its cells."""

    def __init__(self, net: str, seed: int) -> None:
        self.net, self.seed = net, seed
        self.arch, self.source, self.limit = NETS[net]
        self.owner = OWNERS[net]
        self.name = f"{net}-seed{seed}"
        self.rng = Rng(seed).child("benchmark", net)
        self._data: Dataset | None = None

    @property
    def data(self) -> Dataset:
        if self._data is None:
            whole = load_data(self.source)
            fewer = len(whole.train) if self.limit is None else min(self.limit, len(whole.train))
            self._data = dataclasses.replace(whole, train=whole.train.take(torch.arange(fewer)))
        return self._data

    def base(self) -> Classifier:
        return self._cached(f"{self.name}-base", self._train)

    def key(self, scheme: DeepSigns) -> Key:
        drawn = hashlib.sha256(json.dumps(scheme.as_dict(), sort_keys=True).encode()).hexdigest()[:12]
        path = MODELS / f"{self.name}-{scheme.recipe}-{drawn}-{CODE}.key"
        if path.exists():
            return load_key(path)
        key = scheme.keygen(self.base(), self.data.train, owner="Example Ltd", rng=self.rng.child("key"))
        save_key(key, path, force=True)
        return key

    def marked(self, scheme: DeepSigns) -> Classifier:
        key = self.key(scheme)
        name = f"{self.name}-{scheme.recipe}-{key.fingerprint()[:12]}"
        return self._cached(name, lambda: self._mark(key))

    def attacked(self, model: Classifier, name: str, **params: Any) -> tuple[Classifier, dict[str, Any]]:
        attack = REMOVAL.build(name, params)
        removed = attack.remove(model, self.data.train, rng=self.rng.child("attack", name, str(sorted(params.items()))))
        return removed.model, dict(removed.evidence)

    def _mark(self, key: Key) -> Classifier:
        rounds = list(embedding_rounds(self.base(), self.data.train, key, rng=self.rng.child("embed")))
        return rounds[-1].copy(metadata={"rounds": len(rounds)})

    def _train(self) -> Classifier:
        start = initialise(self.arch, self.data.spec, self.rng.child("weights"))
        model = train(start, self.data.train, recipe=self.owner, rng=self.rng.child("train"))
        updates = self.owner.total_steps(len(self.data.train))
        return model.copy(
            metadata={"training": {"recipe": self.owner.as_dict(), "updates": updates, "data": self.source}}
        )

    def _cached(self, name: str, make: Callable[[], Classifier]) -> Classifier:
        path = MODELS / f"{name}-{CODE}.safetensors"
        if not path.exists():
            checkpoint.save(make(), path, force=True)
        return load(path, architecture=self.arch)


ATTACKS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "none": [],
    "prune-0.9": [("prune", {"sparsity": 0.9})],
    "prune-0.95": [("prune", {"sparsity": 0.95})],
    "overwrite-1": [("overwrite", {"strength": 1.0})],
    "overwrite-10": [("overwrite", {"strength": 10.0})],
    "overwrite-100": [("overwrite", {"strength": 100.0})],
    "ftal-20": [("fine-tune", {"mode": "ftal", "epochs": 20})],
    "other-task": [("other-task", {"task": "fashion-mnist"})],
    "int8": [("quantise", {})],
    "overwrite-hard": [("overwrite", {"strength": 100.0, "options": ["margin=20;relative_margin=8"]})],
    "stack": [
        ("prune", {"sparsity": 0.9}),
        ("fine-tune", {"mode": "ftal", "epochs": 5}),
        ("overwrite", {"strength": 1.0}),
    ],
}
PAPER = {
    "none": [],
    "prune-0.8": [("prune", {"sparsity": 0.8})],
    "ftal-3": [("fine-tune", {"mode": "ftal", "epochs": 3})],
}


PAPER_CELLS = {f"paper-{name}": steps for name, steps in PAPER.items()}

CODE = code()


def attack_cell(bench: Bench, run: Run, scheme: DeepSigns, steps: list[tuple[str, dict[str, Any]]]) -> None:
    """Mark, attack, verify."""
    base, model, key = bench.base(), bench.marked(scheme), bench.key(scheme)
    marked, evidence = model, []
    for name, params in steps:
        model, proof = bench.attacked(model, name, **params)
        evidence.append({"attack": name, "params": params, "evidence": proof})
    result = verify(model, key, max_false_positive=RATE, null_keys=200)
    run.fingerprints.update(base=base.fingerprint(), marked=marked.fingerprint(), model=model.fingerprint())
    run.results.update(
        result.as_dict(),
        accuracy_base=base.accuracy(bench.data.test).value,
        rounds=int(marked.metadata["rounds"]),
        accuracy_marked=marked.accuracy(bench.data.test).value,
        accuracy=model.accuracy(bench.data.test).as_dict(),
        evidence=evidence,
    )


def cost_cell(bench: Bench, run: Run, scheme: DeepSigns) -> None:
    """Updates of both kinds, timed in turn."""
    cost = embedding_cost(bench.base(), bench.data.train, bench.key(scheme), rng=bench.rng.child("cost"), pairs=60)
    rounds = int(bench.marked(scheme).metadata["rounds"])
    run.results.update(cost.times(rounds).as_dict(), rounds=rounds)


def keys_cell(bench: Bench, run: Run, scheme: DeepSigns) -> None:
    """Strangers' keys read from the marked and from the base model: p-values must be uniform."""
    for what, model in (("marked", bench.marked(scheme)), ("base", bench.base())):
        errors = strangers(model, bench.key(scheme), STRANGERS)[:, 0]
        values = stats.binom.cdf(errors, BITS, 0.5)
        jitter = bench.rng.child("jitter", what).numpy().random(STRANGERS) * stats.binom.pmf(errors, BITS, 0.5)
        run.results[what] = {
            "n": STRANGERS,
            "owned_at_1e-9": int((values <= RATE).sum()),
            "rejected_at_1e-2": _rejected(values, 1e-2),
            "rejected_at_1e-3": _rejected(values, 1e-3),
            "lowest_p_value": float(values.min()),
            # Each discrete p-value spread over its own step is exactly uniform if the null holds.
            "uniformity_p_value": float(stats.kstest(values - jitter, "uniform").pvalue),
        }


def _rejected(values: Any, level: float) -> dict[str, Any]:
    """Rejections at a level, and the 99 % interval of their number at the level that is attained exactly."""
    attained = float(stats.binom.cdf(stats.binom.ppf(level, BITS, 0.5) - 1, BITS, 0.5))
    low, high = stats.binom.interval(0.99, len(values), attained)
    count = int((values <= level).sum())
    return {
        "count": count,
        "attained_level": attained,
        "interval_99": [low, high],
        "inside": bool(low <= count <= high),
    }


def models_cell(bench: Bench, run: Run, scheme: DeepSigns) -> None:
    """The owner's key read from models trained independently, by the owner's recipe with other seeds."""
    rows = []
    for index in range(INDEPENDENT):
        rng = bench.rng.child("independent", index)
        start = initialise(bench.arch, bench.data.spec, rng.child("weights"))
        other = train(start, bench.data.train, recipe=bench.owner, rng=rng)
        result = verify(other, bench.key(scheme), max_false_positive=RATE)
        rows.append({"bit_errors": result.bit_errors, "p_value": result.p_value, "verdict": result.verdict})
    owned = sum(row["verdict"] == "owned" for row in rows)
    run.results.update(owned=rate(owned, len(rows)).as_dict(), models=rows)


def cells(bench: Bench) -> Iterator[tuple[str, DeepSigns, Callable[[Run], None]]]:
    robust = DeepSigns(bits=BITS)
    paper = DeepSigns(bits=BITS, recipe="paper", rounds=1)
    yield "cost", robust, lambda run: cost_cell(bench, run, robust)
    for name, steps in ATTACKS.items():
        yield name, robust, lambda run, steps=steps: attack_cell(bench, run, robust, steps)
    for name, steps in PAPER.items():
        yield f"paper-{name}", paper, lambda run, steps=steps: attack_cell(bench, run, paper, steps)
    yield "strangers", robust, lambda run: keys_cell(bench, run, robust)
    if bench.seed == 0 and bench.net == "mlp":
        yield "independent", robust, lambda run: models_cell(bench, run, robust)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="mlp,cnn,wrn")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default="", help="names of cells")
    parser.add_argument("--summary", action="store_true", help="only rewrite the summary from the records")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    RECORDS.mkdir(parents=True, exist_ok=True)
    MODELS.mkdir(parents=True, exist_ok=True)
    for net in options.nets.split(",") if not options.summary else ():
        for seed in map(int, options.seeds.split(",")):
            bench = Bench(net, seed)
            for name, scheme, fill in cells(bench):
                params = {
                    "net": net,
                    "data": bench.source,
                    **({} if bench.limit is None else {"limit": bench.limit}),
                    "cell": name,
                    "scheme_params": scheme.as_dict(),
                    "steps": [[attack, settings] for attack, settings in {**ATTACKS, **PAPER_CELLS}.get(name, [])],
                    "owner": bench.owner.as_dict(),
                    "max_false_positive": RATE,
                    "code": CODE,
                }
                path = RECORDS / f"{bench.name}-{name}.json"
                if (options.only and name not in options.only.split(",")) or is_done(path, params):
                    continue
                run = Run("benchmark.watermark", seed=seed, params=params)
                fill(run)
                run.record().write(path, force=True)
                shown = {k: run.results[k] for k in ("bit_errors", "verdict", "share_of_training") if k in run.results}
                print(bench.name, name, shown, flush=True)
    (RECORDS / "README.md").write_text(summary([read_record(path) for path in sorted(RECORDS.glob("*.json"))]))


def summary(records: list[Record]) -> str:
    """Markdown tables of all records: a row a cell, a column a seed."""
    lines = ["# DeepSigns against removal", ""]
    most = allowed_errors([0.5] * BITS, RATE)
    made = "Made by `make benchmark-watermark` from the records in this folder"
    lines += [f"{made}; {BITS} bits, at most {most} wrong at {RATE:g}.", ""]
    for net, (arch, data, limit) in NETS.items():
        own = [record for record in records if record.params["net"] == net]
        if not own:
            continue
        seeds = sorted({record.seed for record in own if record.seed is not None})
        lines += [
            f"## {arch.partition(':')[2]} on {data}" + (f", {limit:,} training images" if limit else ""),
            "",
            "Wrong bits (accuracy in %, change against the base in points)",
            "",
        ]
        lines += ["| attack | " + " | ".join(f"seed {seed}" for seed in seeds) + " |", "|---" * (len(seeds) + 1) + "|"]
        names = [*ATTACKS, *(f"paper-{name}" for name in PAPER)]
        by_cell = {(record.params["cell"], record.seed): record.results for record in own}
        for name in names:
            row = [_shown(by_cell.get((name, seed))) for seed in seeds]
            if any(row):
                lines.append(f"| {name} | " + " | ".join(row) + " |")
        lines.append("")
        for seed in seeds:
            lines += _remarks(seed, by_cell)
        lines.append("")
    return "\n".join(lines)


def _shown(results: dict[str, Any] | None) -> str:
    if not results:
        return ""
    accuracy = 100 * results["accuracy"]["value"]
    change = accuracy - 100 * results["accuracy_base"]
    return f"{results['bit_errors']} {results['verdict']} ({accuracy:.2f}, {change:+.2f})"


def _remarks(seed: int, by_cell: dict[tuple[str, int | None], dict[str, Any]]) -> list[str]:
    lines = []
    if cost := by_cell.get(("cost", seed)):
        lines.append(
            f"- seed {seed}: embedding takes {100 * cost['share_of_training']:.1f} % of the owner's training"
            f" ({cost['updates']} updates, each {cost['seconds_per_update'] / cost['seconds_per_training_update']:.2f}"
            " plain ones)"
        )
    for what, found in (by_cell.get(("strangers", seed)) or {}).items():
        lines.append(
            f"- seed {seed}: {found['n']} random keys on the {what} model: {found['owned_at_1e-9']} owned at 1e-9,"
            f" {found['rejected_at_1e-2']['count']} at 1e-2, {found['rejected_at_1e-3']['count']} at 1e-3,"
            f" uniformity p {found['uniformity_p_value']:.3f}"
        )
    if models := by_cell.get(("independent", seed)):
        errors = [row["bit_errors"] for row in models["models"]]
        lines.append(
            f"- seed {seed}: {models['owned']['count']} of {models['owned']['n']} independent models owned;"
            f" wrong bits {min(errors)} to {max(errors)}"
        )
    return lines


if __name__ == "__main__":
    main()
