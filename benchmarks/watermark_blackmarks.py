"""BlackMarks: fidelity, what survives, innocents, cost. One record a network and seed, resumable.

    python benchmarks/watermark_blackmarks.py [--nets mlp,cnn,wrn] [--seeds 0,1,2] [--summary]

`marks`: key, embedding, attacks, a label-only server on a real socket. `innocents`: models that know nothing of the
key, trained plainly, adversarially, on noise, as students, as siblings; many on the MLP's first seed, a few elsewhere.
Models, the key and each reading are kept in ``build/``, by the code that made them, so that a run that was stopped goes
on where it was; a record made with the same parameters and code is skipped.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch  # noqa: E402
from cells import code, is_done  # noqa: E402
from scipy import stats  # noqa: E402

from deepseal.adapter import Classifier, Recipe, Split, checkpoint, initialise, load, load_data  # noqa: E402
from deepseal.adapter import train as trained  # noqa: E402
from deepseal.adapter.oracle import accuracy  # noqa: E402
from deepseal.attacks import EVASION, QUERY, REMOVAL  # noqa: E402
from deepseal.files import write_atomically  # noqa: E402
from deepseal.record import Record, Run, read_record  # noqa: E402
from deepseal.rng import Rng  # noqa: E402
from deepseal.statistics import rate  # noqa: E402
from deepseal.watermark import Key, embedding_rounds, load_key, save_key, verify  # noqa: E402
from deepseal.watermark.blackmarks import BlackMarks  # noqa: E402
from deepseal.watermark.verify import strangers  # noqa: E402

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "watermark-blackmarks"
MODELS = HERE.parent / "build" / "benchmarks" / "watermark-blackmarks"
RATE = 1e-6
# architecture, data, training images, epochs, epochs of an innocent, the owner's and innocents' schedule
NETS: dict[str, tuple[str, str, int, int, int, str]] = {
    "mlp": ("deepseal.adapter.zoo:mlp", "mnist", 60_000, 10, 4, "constant"),
    "cnn": ("deepseal.adapter.zoo:cnn", "fashion-mnist", 10_000, 8, 4, "constant"),
    # With a constant step WRN's last batches decide how good it is: 79 to 83 % right.
    "wrn": ("deepseal.adapter.zoo:wrn", "fashion-mnist", 10_000, 10, 5, "cosine"),
}
ATTACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "pruned by 80 %": ("prune", {"sparsity": 0.8}),
    "pruned by 90 %": ("prune", {"sparsity": 0.9}),
    "INT8": ("quantise", {}),
    "INT4": ("quantise", {"bits": 4}),
    "float16": ("quantise", {"format": "float16"}),
    "FTAL 5": ("fine-tune", {"epochs": 5}),
    "FTAL 20": ("fine-tune", {"epochs": 20}),
}
NOISES = (0.1, 0.2)
INNOCENTS = {"plain": 8, "adversarial": 8, "noise": 8, "student": 6, "sibling": 6}
FEWER = {"plain": 2, "adversarial": 2, "noise": 1, "student": 1, "sibling": 1}  # of the slower networks
STRANGERS = 2000
CODE = code()


class Bench:
    """One network and seed."""

    def __init__(self, net: str, seed: int) -> None:
        self.net, self.rng = net, Rng(seed).child("blackmarks", net)
        self.arch, self.source, count, epochs, self.fewer, self.schedule = NETS[net]
        self.counts = INNOCENTS if net == "mlp" and seed == 0 else FEWER
        whole = load_data(self.source)
        self.test, self.spec = whole.test, whole.spec
        self.train = whole.train.take(torch.arange(min(count, len(whole.train))))
        self.owner = self.recipe(epochs)
        self.name = f"{net}-seed{seed}-{CODE}"
        self.seconds: dict[str, float] = {}

    def recipe(self, epochs: int) -> Recipe:
        return Recipe(epochs=epochs, schedule=self.schedule)

    def kept(self, name: str, make: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """A reading, made once."""
        path = MODELS / f"{self.name}-{re.sub('[^a-z0-9.]+', '-', name.lower())}.json"
        if not path.exists():
            write_atomically(path, json.dumps(make()).encode())
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def key(self, base: Classifier, others: list[Classifier]) -> tuple[Key, float]:
        """The key, drawn once, and the seconds of CPU that it took."""
        path = MODELS / f"{self.name}.key"

        def draw() -> dict[str, Any]:
            began = time.process_time()
            rng = self.rng.child("key")
            key = BlackMarks().keygen(base, self.train, owner="Example Ltd", rng=rng, independent=others)
            seconds = time.process_time() - began
            save_key(key, path, force=True)
            return {"seconds": seconds}

        seconds = float(self.kept("keygen", draw)["seconds"])
        return load_key(path), seconds

    def model(self, name: str, make: Callable[[], Classifier]) -> Classifier:
        """Made once and kept; its seconds of CPU too."""
        path = MODELS / f"{self.name}-{name}.safetensors"
        if not path.exists():
            began = time.process_time()
            made = make()
            checkpoint.save(made.copy(metadata={"cpu_seconds": time.process_time() - began}), path, force=True)
        result = load(path)
        self.seconds[name] = float(result.metadata["cpu_seconds"])
        return result

    def fresh(self, name: str, split: Split | None = None, recipe: Recipe | None = None) -> Classifier:
        rng, recipe = self.rng.child(name), recipe or self.owner
        start = initialise(self.arch, self.spec, rng.child("weights"))
        model = trained(start, split or self.train, recipe=recipe, rng=rng.child("train"))
        updates = recipe.total_steps(len(self.train))
        return model.copy(metadata={"training": {"recipe": self.owner.as_dict(), "updates": updates}})

    def base(self) -> Classifier:
        return self.model("base", lambda: self.fresh("base"))

    def innocents(self, kind: str) -> list[Classifier]:
        makers = {"plain": self._plain, "adversarial": self._adversarial, "noise": self._noise}
        make = {**makers, "student": self._student, "sibling": self._sibling}[kind]
        return [
            self.model(f"{kind}{index}", lambda index=index: make(f"{kind}{index}"))  # type: ignore[misc]
            for index in range(self.counts[kind])
        ]

    def _plain(self, name: str) -> Classifier:
        return self.fresh(name, recipe=self.recipe(self.fewer))

    def _adversarial(self, name: str) -> Classifier:
        """Three rounds: PGD images of the model so far, then an epoch on them and on the data."""
        model = self.fresh(name, recipe=self.recipe(max(1, self.fewer - 3)))
        for index in range(3):
            rng = self.rng.child(name, "round", index)
            attack = EVASION.build("pgd", {"epsilon": 0.15, "steps": 5})
            order = torch.randperm(len(self.train), generator=rng.child("half").torch())
            half = self.train.take(order[: len(order) // 2])
            x = attack.perturb(model, half, rng=rng.child("pgd")).x
            mixed = Split(torch.cat([self.train.tensor, x]), torch.cat([self.train.y, half.y]))
            model = trained(model, mixed, recipe=self.recipe(1), rng=rng.child("train"))
        return model

    def _noise(self, name: str) -> Classifier:
        """Every image twice, with and without Gaussian noise of 0.3."""
        noise = torch.randn(self.train.tensor.shape, generator=self.rng.child(name, "noise").torch())
        noisy = (self.train.tensor + 0.3 * noise).clamp(*self.spec.bounds)
        both = Split(torch.cat([self.train.tensor, noisy]), self.train.y.repeat(2))
        return self.fresh(name, both, self.recipe(max(1, self.fewer // 2)))

    def _student(self, name: str) -> Classifier:
        """Fresh weights, trained on the unmarked model's labels."""
        taught = Split(self.train.tensor, self.base().predict(self.train.tensor))
        return self.fresh(name, taught, self.recipe(self.fewer))

    def _sibling(self, name: str) -> Classifier:
        """The unmarked model, fine-tuned by its owner."""
        return trained(self.base(), self.train, recipe=self.recipe(2), rng=self.rng.child(name))


def read(model: Any, key: Key, bench: Bench) -> dict[str, Any]:
    """What the key reads, and how good the model is."""
    result = verify(model, key, max_false_positive=RATE)
    found = {name: getattr(result, name) for name in ("verdict", "bits", "bit_errors", "threshold", "p_value")}
    found["mean_margin"] = result.margin_mean
    found["accuracy"] = accuracy(model, bench.test).as_dict()
    return found


def measure(run: Run, bench: Bench) -> None:
    """All cells of one network and seed."""
    base = bench.base()
    others = [bench.model(f"independent{i}", lambda i=i: bench.fresh(f"independent{i}")) for i in range(3)]  # type: ignore[misc]
    key, drawing = bench.key(base, others)

    def embedded() -> Classifier:
        rounds = list(embedding_rounds(base, bench.train, key, rng=bench.rng.child("embed")))
        return rounds[-1].copy(metadata={"rounds": len(rounds)})

    marked = bench.model("marked", embedded)
    rounds = int(marked.metadata["rounds"])
    seconds = {"keygen": drawing, "training": bench.seconds["base"], "embedding": bench.seconds["marked"]}
    seconds["independent"] = sum(bench.seconds[f"independent{index}"] for index in range(3))
    run.results.update(cpu_seconds=seconds, rounds=rounds, queries=key.triggers, key=dict(key.public))
    tuned = bench.model("tuned", lambda: longer(bench, base, rounds))
    models = {
        title: bench.kept(title, lambda model=model: read(model, key, bench))  # type: ignore[misc]
        for title, model in (("unmarked", base), ("marked", marked), ("unmarked, tuned as long", tuned))
    }
    run.results["models"] = models
    for title, (name, params) in ATTACKS.items():

        def attacked(title: str = title, name: str = name, params: dict[str, Any] = params) -> dict[str, Any]:
            rng = bench.rng.child("attack", title)
            return read(REMOVAL.build(name, params).remove(marked, bench.train, rng=rng).model, key, bench)

        models[title] = bench.kept(title, attacked)
    for deviation in NOISES:
        noisy = QUERY.build("query-noise", {"deviation": deviation}).wrap(marked, rng=bench.rng.child("noise"))
        title = f"query noise {deviation}"
        models[title] = bench.kept(title, lambda noisy=noisy: read(noisy, key, bench))  # type: ignore[misc]
    run.results["server"] = served(marked, key)
    run.results["innocents"] = {
        kind: bench.kept(kind, lambda kind=kind: innocents(bench, key, kind))  # type: ignore[misc]
        for kind in INNOCENTS
    }
    wrong, bits = strangers(base, key, STRANGERS).T
    p = stats.binom.cdf(wrong, bits, 0.5)
    run.results["strangers"] = {"n": STRANGERS, "lowest_p_value": float(p.min()), "at_1e-2": int((p <= 1e-2).sum())}


def longer(bench: Bench, base: Classifier, rounds: int) -> Classifier:
    """The unmarked model trained on by as many updates of the same schedule: what embedding costs without a mark."""
    scheme = BlackMarks()
    recipe = Recipe(steps=scheme.steps, learning_rate=scheme.learning_rate, schedule="cosine")
    for index in range(rounds):
        base = trained(base, bench.train, recipe=recipe, rng=bench.rng.child("tuned", index))
    return base


def served(marked: Classifier, key: Key) -> dict[str, Any]:
    """The command line's verdict on a server that answers with labels only."""
    command = [sys.executable, "-m", "deepseal"]
    with tempfile.TemporaryDirectory() as folder, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        model, file = Path(folder) / "suspect.safetensors", Path(folder) / "owner.key"
        checkpoint.save(marked, model)
        save_key(key, file)
        serve = ["model", "serve", "--model", str(model), "--name", "suspect", "--listen", f"127.0.0.1:{port}"]
        server = subprocess.Popen([*command, *serve], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            limit = time.monotonic() + 60
            while time.monotonic() < limit and server.poll() is None:
                with suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.2)
            ask = ["watermark", "verify", "--url", f"http://127.0.0.1:{port}/v2/models/suspect"]
            ask += ["--key", str(file), "--max-false-positive", str(RATE), "--json"]
            answer = subprocess.run([*command, *ask], capture_output=True, text=True, timeout=600, check=False)
        finally:
            server.terminate()
            server.wait(30)
    found = json.loads(answer.stdout)["results"]
    return {"output": "labels", "queries": key.triggers} | {name: found[name] for name in ("verdict", "bit_errors")}


def innocents(bench: Bench, key: Key, kind: str) -> dict[str, Any]:
    """Verdicts on models of one kind."""
    results = [verify(model, key, max_false_positive=RATE) for model in bench.innocents(kind)]
    wrong = [result.bit_errors for result in results]
    accuracies = [model.accuracy(bench.test).value for model in bench.innocents(kind)]
    owned = rate(sum(result.verdict == "owned" for result in results), len(results))
    return {"wrong": wrong, "owned": owned.as_dict(), "mean_accuracy": sum(accuracies) / len(accuracies)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default=",".join(NETS))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--summary", action="store_true", help="only rewrite the summary from the records")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    for folder in (RECORDS, MODELS):
        folder.mkdir(parents=True, exist_ok=True)
    for seed in map(int, options.seeds.split(",")) if not options.summary else ():
        for net in options.nets.split(","):
            params = {"net": net, "setting": list(NETS[net]), "scheme_params": BlackMarks().as_dict(), "code": CODE}
            path = RECORDS / f"{net}-seed{seed}.json"
            if is_done(path, params):
                continue
            run = Run("benchmark.watermark-blackmarks", seed=seed, params=params)
            measure(run, Bench(net, seed))
            run.record().write(path, force=True)
            print(path.stem, flush=True)
    (RECORDS / "README.md").write_text(summary([read_record(path) for path in sorted(RECORDS.glob("*.json"))]))


def summary(records: list[Record]) -> str:
    """Markdown: what is read after every attack, the innocents, the cost."""
    names = [f"{record.params['net']} {record.seed}" for record in records]
    lines = ["# BlackMarks", "", "Made by `python benchmarks/watermark_blackmarks.py` from these records."]
    lines += [
        f"Wrong of 64 bits, 41 keys a bit, **bold** where `owned` at {RATE:g}; after it test accuracy.",
        "",
    ]
    settings = {record.params["net"]: record.params["setting"] for record in records}
    for net, (arch, data, count, epochs, *rest) in settings.items():
        recipe = f"{epochs} epochs of Adam 1e-3, {rest[1] if len(rest) > 1 else 'constant'} step size"
        lines.append(f"- {net}: `{arch}`, {count:,} images of {data}, {recipe}")
    lines += ["", "| | " + " | ".join(names) + " |", "|---" * (len(names) + 1) + "|"]
    for title in records[0].results["models"] if records else ():
        row = [_shown(record.results["models"][title]) for record in records]
        lines.append(f"| {title} | " + " | ".join(row) + " |")
    row = [_shown(reading) for reading in _of(records, "server")]
    lines.append("| label-only server | " + " | ".join(row) + " |")
    for kind in INNOCENTS:
        row = [
            f"{part[kind]['owned']['count']} of {part[kind]['owned']['n']} owned; {min(part[kind]['wrong'])} to "
            f"{max(part[kind]['wrong'])} wrong, accuracy {part[kind]['mean_accuracy']:.3f}"
            for part in _of(records, "innocents")
        ]
        lines.append(f"| innocents: {kind} | " + " | ".join(row) + " |")
    row = [f"lowest p {part['lowest_p_value']:.1e} of {part['n']}" for part in _of(records, "strangers")]
    lines.append("| strangers' keys on the unmarked | " + " | ".join(row) + " |")
    for part, what in (("keygen", "key"), ("embedding", "embedding"), ("independent", "three independent models")):
        row = [f"{100 * cost[part] / cost['training']:.0f} %" for cost in _of(records, "cpu_seconds")]
        lines.append(f"| {what}, of training (CPU) | " + " | ".join(row) + " |")
    lines.append("| queries to verify | " + " | ".join(f"{n:,}" for n in _of(records, "queries")) + " |")
    return "\n".join([*lines, ""])


def _of(records: list[Record], name: str) -> list[Any]:
    return [record.results[name] for record in records]


def _shown(reading: dict[str, Any]) -> str:
    text = f"**{reading['bit_errors']}**" if reading["verdict"] == "owned" else str(reading["bit_errors"])
    return text + (f", {reading['accuracy']['value']:.4f}" if "accuracy" in reading else "")


if __name__ == "__main__":
    main()
