"""All schemes on one small network: fidelity, what survives, whether the stated rate holds. One record a cell.

    python benchmarks/watermark_baselines.py [--schemes adi,ewe] [--seeds 0,1,2] [--summary]
        [--only marks,integrity] [--data digits] [--recipes robust,before,paper] [--nets mlp,cnn,wrn]

`marks`: the mark itself, then pruned, rounded, shaken, fine-tuned, overwritten by the same scheme and recipe, and
extracted (a fresh network trained on the marked one's labels). `integrity`: strangers' keys, 1,500 (`diction`: 15,000)
on each of 20 keys' observations of as many models, models that know nothing of the key, and for `hash-bound` a forger
who searches; on the MLP of the digits, and on the CNN and WRN-16-1 of Fashion-MNIST. A cell whose record exists, made
with the same parameters and code, is skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import itertools
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
from cells import code, is_done  # noqa: E402
from scipy import stats  # noqa: E402

from deepseal.adapter import Classifier, Dataset, Recipe, Split, initialise, load_data, train  # noqa: E402
from deepseal.attacks import REMOVAL  # noqa: E402
from deepseal.record import Record, Run, read_record  # noqa: E402
from deepseal.rng import Rng, expand_choice  # noqa: E402
from deepseal.statistics import rate  # noqa: E402
from deepseal.watermark import SCHEMES, Key, embedding_rounds, verify  # noqa: E402
from deepseal.watermark.integrity import read_strangers, rejections  # noqa: E402
from deepseal.watermark.scheme import scheme_of  # noqa: E402

HERE = Path(__file__).resolve().parent
RECORDS = HERE / "watermark-baselines"
RATE = 1e-6
ARCH, DATA = "deepseal.adapter.zoo:mlp", "digits"
OWNER = Recipe(epochs=15, batch_size=64)
# Where integrity is measured: architecture, data, the owner's and the innocents' training.
NETS: dict[str, tuple[str, str, Recipe]] = {
    "mlp": (ARCH, DATA, OWNER),
    "cnn": ("deepseal.adapter.zoo:cnn", "fashion-mnist", Recipe(epochs=2, schedule="cosine")),
    "wrn": ("deepseal.adapter.zoo:wrn", "fashion-mnist", Recipe(epochs=3, schedule="cosine")),
}
TRIGGERS = ("adi", "zhang", "le-merrer", "deepsigns-blackbox", "ewe")
NAMES = ("deepsigns", "hash-bound", "uchida", "diction", "blackmarks", *TRIGGERS)
ATTACKS: dict[str, tuple[str, dict[str, Any]]] = {
    "pruned by 80 %": ("prune", {"sparsity": 0.8}),
    "pruned by 95 %": ("prune", {"sparsity": 0.95}),
    "INT8": ("quantise", {"bits": 8}),
    "float16": ("quantise", {"format": "float16"}),
    "fine-tuned, 20 epochs": ("fine-tune", {"epochs": 20}),
}
NOISE = 0.2  # of each weight tensor's standard deviation
IMAGES = 10_000
# What recipes are compared with: as each scheme was embedded before, and as its paper does.
BEFORE: dict[str, dict[str, Any]] = {
    "uchida": {"margin": 5.0},
    "diction": {"margin": 4.0, "prune": 0.5, "drift": 0.3},
    **{name: {"gap": 0.0, "drift": 0.3} for name in TRIGGERS},
}
PAPER = {name: {"recipe": "paper"} for name in ("hash-bound", "uchida")}
RECIPES: dict[str, dict[str, dict[str, Any]]] = {
    "robust": {name: {} for name in NAMES},
    "before": BEFORE,
    "paper": PAPER,
}
# Integrity: the same law, at less work.
SHORTER: dict[str, dict[str, Any]] = {"hash-bound": {"bits": 64}}
SHORTEST: dict[str, dict[str, Any]] = {**SHORTER, "blackmarks": {"bits": 32, "votes": 5}}  # on the larger networks
SETS, MODELS, TRIALS = 20, 20, 2000
KEYS = {name: 15_000 if name == "diction" else 1500 for name in NAMES}  # strangers a set
ASKED = {"deepsigns-blackbox": 4, "blackmarks": 3}  # independent models that keys are made with
LEVELS = (1e-2, 1e-3, RATE)


@functools.cache
def owner_data(source: str) -> Dataset:
    """The data set, of larger ones the first ``IMAGES`` training samples."""
    data = load_data(source)
    few = torch.arange(min(IMAGES, len(data.train)))
    return dataclasses.replace(data, train=data.train.take(few))


def trained(data: Dataset, rng: Rng, labels: torch.Tensor | None = None, net: str = "mlp") -> Classifier:
    """The owner's network from fresh weights, on its own labels or on somebody's answers."""
    arch, _, recipe = NETS[net]
    split = data.train if labels is None else Split(data.train.x, labels)
    model = train(initialise(arch, data.spec, rng.child("weights")), split, recipe=recipe, rng=rng.child("train"))
    updates = recipe.total_steps(len(data.train))
    return model.copy(metadata={"training": {"recipe": recipe.as_dict(), "updates": updates, "data": data.name}})


@functools.cache
def owner_model(source: str, seed: int, net: str) -> Classifier:
    """The owner's unmarked network."""
    return trained(owner_data(source), Rng(seed).child("baselines", "base"), net=net)


def marks_cell(run: Run, name: str, data: Dataset, base: Classifier, rng: Rng) -> None:
    """Embed, and read the mark after each attack."""
    scheme = SCHEMES.build(name, run.params["scheme_params"])
    key = scheme.keygen(base, data.train, owner="Example Ltd", rng=rng.child("key"))
    began = time.process_time()
    rounds = list(embedding_rounds(base, data.train, key, rng=rng.child("embed")))
    marked = rounds[-1]
    run.results.update(rounds=len(rounds), embedding_cpu_seconds=time.process_time() - began)
    models = {"unmarked": read(base, key, data), "marked": read(marked, key, data)}
    for title, (attack, params) in ATTACKS.items():
        removed = REMOVAL.build(attack, params).remove(marked, data.train, rng=rng.child("attack", title))
        models[title] = read(removed.model, key, data)
    models["weight noise"] = read(shaken(marked, rng.child("noise")), key, data)
    thief = scheme.keygen(marked, data.train, owner="thief", rng=rng.child("thief", "key"))
    *_, overwritten = embedding_rounds(marked, data.train, thief, rng=rng.child("thief"))
    models["overwritten"] = read(overwritten, key, data) | {"thief": verify(overwritten, thief).verdict}
    if run.params["data"] == "digits":
        student = trained(data, rng.child("student"), marked.predict(data.train.x))
        models["extracted by labels"] = read(student, key, data)
    run.results["models"] = models


def shaken(model: Classifier, rng: Rng) -> Classifier:
    """A copy with Gaussian noise of ``NOISE`` standard deviations on every tensor of weights."""
    result, generator = model.copy(), rng.torch()
    with torch.no_grad():
        for weight in result.module.parameters():
            weight.add_(NOISE * weight.std() * torch.randn(weight.shape, generator=generator))
    return result


def read(model: Classifier, key: Key, data: Dataset) -> dict[str, Any]:
    """What the key reads, and how good the model is."""
    result = verify(model, key, max_false_positive=RATE)
    return {
        "verdict": result.verdict,
        "bits": result.bits,
        "bit_errors": result.bit_errors,
        "threshold": result.threshold,
        "p_value": result.p_value,
        **{f"margin_{part}": getattr(result, f"margin_{part}") for part in ("lowest", "5_percent", "median")},
        "published_accepts": None if result.published is None else result.published.accepts,
        "accuracy": model.accuracy(data.test).as_dict(),
    }


@functools.cache
def innocent_models(net: str) -> list[Classifier]:
    """Models that know nothing of any key."""
    data = owner_data(NETS[net][1])
    return [trained(data, Rng(0).child("baselines", "independent", index), net=net) for index in range(MODELS)]


def forgery(model: Classifier, key: Key) -> dict[str, Any]:
    """A forger who holds the model climbs towards a secret that reads in it, some bits of the best flipped a trial."""
    best, secret, wrong = key.bits, key.secret, []
    scheme = scheme_of(key)
    seen = scheme.observe(model, key)
    for trial in range(TRIALS):
        places = expand_choice(key.secret, f"forge/{trial}", 8 * len(secret), 1 + trial // 256)
        flipped = np.unpackbits(np.frombuffer(secret, np.uint8))
        flipped[places] ^= 1
        forged = key.with_secret(np.packbits(flipped).tobytes())
        errors = int((scheme.decode(seen, forged).bits != forged.message()).sum())
        wrong.append(errors)
        if errors < best:
            best, secret = errors, forged.secret
    result = verify(model, key.with_secret(secret), max_false_positive=RATE, tried=TRIALS)
    total = rate(int(np.sum(wrong)), TRIALS * key.bits)
    return {
        "trials": TRIALS,
        "wrong_bits": total.as_dict(),
        "fewest_wrong": best,
        "fewest_wrong_by_chance_99": [
            float(stats.binom.ppf(1 - (1 - q) ** (1 / TRIALS), key.bits, 0.5)) for q in (0.005, 0.995)
        ],
        "verdict": result.verdict,
        "p_value": result.p_value,
    }


def integrity_cell(run: Run, name: str, data: Dataset, base: Classifier, rng: Rng) -> None:
    """Rejections of strangers' keys at stated levels, and innocent models."""
    others, asked = innocent_models(run.params["net"]), ASKED.get(name, 0)
    given: dict[str, Any] = {"independent": others[:asked]} if asked else {}
    innocents = others[asked:]
    # Calibration raises the chance of each key by itself; what it starts from is what must be exact.
    chance = 1 / data.spec.num_classes if name == "deepsigns-blackbox" else None
    read, owned = [], []
    for index in range(SETS):
        scheme = SCHEMES.build(name, run.params["scheme_params"])
        key = scheme.keygen(base, data.train, owner="Example Ltd", rng=rng.child("set", index), **given)
        suspect = innocents[index % len(innocents)]
        read.append(read_strangers(suspect, key, run.params["keys"], LEVELS, chance=chance))
        owned += [
            verify(model, key, max_false_positive=RATE).verdict for model in (innocents if index == 0 else [suspect])
        ]
    if name == "hash-bound":
        run.results["forged"] = forgery(innocents[-1], key)
    run.results.update(
        keys=sum(len(one.p_values) for one in read),
        trigger_sets=SETS,
        lowest_p_value=min(float(one.p_values.min()) for one in read),
        models=rate(sum(verdict == "owned" for verdict in owned), len(owned)).as_dict(),
        rejected={f"{level:g}": rejections(read, level).as_dict() for level in LEVELS},
    )


CELLS = {"marks": marks_cell, "integrity": integrity_cell}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--schemes", default=",".join(NAMES))
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--data", default=DATA, help="marks: digits, or mnist, of which 10,000 images are trained on")
    parser.add_argument("--recipes", default="robust", help="marks: robust, before, paper")
    parser.add_argument("--only", default="marks,integrity")
    parser.add_argument("--nets", default="mlp", help="integrity: mlp, cnn, wrn")
    parser.add_argument("--summary", action="store_true", help="only rewrite the summary from the records")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    RECORDS.mkdir(parents=True, exist_ok=True)
    for cell in options.only.split(",") if not options.summary else ():
        for own in cells(options) if cell == "marks" else integrity_cells(options):
            measure(cell, **own)
    (RECORDS / "README.md").write_text(summary([read_record(path) for path in sorted(RECORDS.glob("*.json"))]))


def cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """The marks that are asked for."""
    for seed in map(int, options.seeds.split(",")):
        for recipe, name in itertools.product(options.recipes.split(","), options.schemes.split(",")):
            if name in RECIPES[recipe]:
                yield {"name": name, "net": "mlp", "source": options.data, "recipe": recipe, "seed": seed}


def integrity_cells(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Each scheme on the networks that are asked for."""
    for net, name in itertools.product(options.nets.split(","), options.schemes.split(",")):
        yield {"name": name, "net": net, "source": NETS[net][1], "recipe": "robust", "seed": 0}


def measure(cell: str, *, name: str, net: str, source: str, recipe: str, seed: int) -> None:
    """One record, unless it is there."""
    arch, _, owner = NETS[net]
    shorter = SHORTER if net == "mlp" else SHORTEST
    stated = shorter.get(name, {}) if cell == "integrity" else RECIPES[recipe][name]
    scheme = SCHEMES.build(name, stated).as_dict()
    params: dict[str, Any] = {"cell": cell, "scheme": name, "scheme_params": scheme}
    params |= {"net": net, "arch": arch, "data": source}
    params |= {"recipe": recipe, "owner": owner.as_dict(), "max_false_positive": RATE, "code": code()}
    if cell == "integrity":
        params["keys"] = KEYS[name]
    path = RECORDS / f"{name}-{cell}{_suffix(source, recipe) if net == 'mlp' else f'-{net}'}-seed{seed}.json"
    if is_done(path, params):
        return
    run, data = Run("benchmark.watermark-baselines", seed=seed, params=params), owner_data(source)
    CELLS[cell](run, name, data, owner_model(source, seed, net), Rng(seed).child("baselines", cell, name))
    run.record().write(path, force=True)
    print(path.stem, flush=True)


def _suffix(source: str, recipe: str) -> str:
    return "".join(f"-{part}" for part, usual in ((source, DATA), (recipe, "robust")) if part != usual)


def recipe_of(record: Record) -> str:
    """How the mark was embedded; records that do not say are older than the robust recipe of most schemes."""
    usual = "before" if record.params["scheme"] in BEFORE else "robust"
    return str(record.params.get("recipe", usual))


def summary(records: list[Record]) -> str:
    """Markdown: wrong bits and margins of every seed after every attack, and the rejections."""
    own = [record for record in records if record.params["cell"] == "marks"]
    titles = ["unmarked", "marked", *ATTACKS, "weight noise", "overwritten", "extracted by labels"]
    lines = ["# All schemes on small networks", ""]
    lines += [f"Made by `python benchmarks/watermark_baselines.py` from these records: MLP, rate {RATE:g}."]
    lines += ["A cell lists every seed: wrong of readable bits, **bold** where `owned`, and the median and the lowest"]
    lines += ["5 % of the margins (docs/watermarking.md) where they were measured. `robust` is the default recipe,"]
    lines += ["`before` the default before it, `paper` the paper's. The thief overwrites with the same recipe."]
    for source in sorted({record.params["data"] for record in own}):
        size = "one test image is 0.28 points" if source == "digits" else f"{IMAGES:,} training images"
        lines += ["", f"## {source} ({size})", ""]
        lines += ["| scheme | recipe | " + " | ".join(titles) + " | accuracy, points | CPU s |"]
        lines += ["|---" * (len(titles) + 4) + "|"]
        for name, recipe in itertools.product(NAMES, RECIPES):
            mine = [r for r in own if (r.params["scheme"], r.params["data"], recipe_of(r)) == (name, source, recipe)]
            mine = sorted(mine, key=lambda record: record.seed or 0)
            if not mine:
                continue
            cells = [[_shown(record.results["models"].get(title)) for record in mine] for title in titles]
            row = ["; ".join(cell) if any(cell) else "" for cell in cells]
            change = [
                100 * (m["marked"]["accuracy"]["value"] - m["unmarked"]["accuracy"]["value"])
                for m in (record.results["models"] for record in mine)
            ]
            seconds = np.mean([record.results["embedding_cpu_seconds"] for record in mine])
            shown = "; ".join(f"{c:+.1f}" for c in change)
            lines.append(f"| {name} | {recipe} | " + " | ".join(row) + f" | {shown} | {seconds:.0f} |")
    lines += ["", "## Integrity"]
    title = "Strangers' keys on unmarked models, and pairs of a key and a model that knows nothing of it"
    lines += [
        "",
        title,
        "",
        "| scheme | network | keys (trigger sets) | at 1e-2 (99 % interval) | at 1e-3 | at 1e-6 | pairs owned |",
    ]
    lines += ["|---" * 7 + "|"]
    for record in (r for r in records if r.params["cell"] == "integrity"):
        found = record.results
        parts = []
        for row in found["rejected"].values():
            low, high = (row["low"], row["high"]) if "low" in row else row["interval_99"]
            parts.append(f"{row['count']} ({low:.0f} to {high:.0f})")
        models = f"{found['models']['count']} of {found['models']['n']}"
        keys = f"{found['keys']:,} ({found['trigger_sets']})"
        where = f"{record.params['arch'].partition(':')[2]}, {record.params['data']}"
        lines.append(f"| {record.params['scheme']} | {where} | {keys} | {' | '.join(parts)} | {models} |")
    lines += [
        "",
        "`zhang` and `ewe` reject less than their bound: innocents answer the source class, which no label is.",
    ]
    for record in (r for r in records if "forged" in r.results):
        found = record.results["forged"]
        share, (low, high) = found["wrong_bits"], found["fewest_wrong_by_chance_99"]
        lines += [
            "",
            f"A forger of a `{record.params['scheme']}` key who climbs towards a secret, {found['trials']:,} trials:"
            f" {100 * share['value']:.2f} % wrong bits ({100 * share['low']:.2f} to {100 * share['high']:.2f}),"
            f" {found['fewest_wrong']} in the best ({low:.0f} to {high:.0f} by chance), {found['verdict']}.",
        ]
    return "\n".join([*lines, ""])


def _shown(reading: dict[str, Any] | None) -> str:
    if reading is None:
        return ""
    text = f"{reading['bit_errors']}/{reading['bits']}"
    text = f"**{text}**" if reading["verdict"] == "owned" else text
    if "margin_median" not in reading:
        return text
    return f"{text} ({reading['margin_median']:.1f}, {reading['margin_5_percent']:.1f})"


if __name__ == "__main__":
    main()
