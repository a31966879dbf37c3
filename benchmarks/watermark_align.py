"""Alignment before extraction: MNIST (MLP), Fashion-MNIST (CNN, WRN), digits of scikit-learn (others). Resumable cells.

    python benchmarks/watermark_align.py [--nets mlp,cnn,fashion,wrn,rows] [--seeds 0,1,2] [--only NAME,...] [--summary]

The owner's model is marked with DeepSigns, 256 bits. A thief moves, scales and adds neurons, and goes on with other
attacks. Every suspect is read as it stands, aligned to the model before it was marked, and aligned to the marked model.
The same is done with innocent models: unrelated ones, siblings (the owner's recipe and initialisation, another order of
the data), and further relatives of the same initialisation (other step size, batch size, length). ``rows`` is a
transformer with RMSNorm, whose residual stream is rotated, that of innocents too. A cell whose record exists, is ok and
was made with the same parameters is skipped.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import torch  # noqa: E402
import watermark_deepsigns  # noqa: E402
from cells import is_done  # noqa: E402
from watermark_deepsigns import BITS, RATE, Bench  # noqa: E402

from deepseal.adapter import Classifier, Recipe, initialise, train  # noqa: E402
from deepseal.record import Record, Run, read_record  # noqa: E402
from deepseal.statistics import allowed_errors, rate  # noqa: E402
from deepseal.watermark import DeepSigns, aligned_view, verify, verify_aligned  # noqa: E402

RECORDS = Path(__file__).resolve().parent / "watermark"
sys.path.append(str(RECORDS.parents[1] / "tests"))  # the transformer
NETS: dict[str, tuple[str, str, int | None]] = {
    "mlp": ("deepseal.adapter.zoo:mlp", "mnist", None),
    "cnn": ("deepseal.adapter.zoo:cnn", "digits", None),
    "fashion": ("deepseal.adapter.zoo:cnn", "fashion-mnist", 10_000),
    "wrn": ("deepseal.adapter.zoo:wrn", "fashion-mnist", 10_000),
    "rows": ("streaming:rows", "digits", None),
}
OWNERS = {
    **watermark_deepsigns.OWNERS,
    "fashion": Recipe(epochs=10),
    **dict.fromkeys(("cnn", "rows"), Recipe(epochs=15, batch_size=64)),
}
LONGER = {"mlp": 1, "cnn": 5, "fashion": 1, "wrn": 1, "rows": 5}  # epochs of the innocents, where there are few samples
FEW = {"relative": 6, "unrelated": 3, "sibling": 3}
INNOCENTS = {
    "mlp": {"relative": 18, "unrelated": 30, "sibling": 6},
    "cnn": FEW,
    "fashion": FEW,
    "wrn": FEW,
    "rows": {"relative": 12, "unrelated": 12, "sibling": 12},
}
PART = 6
KINDS = ("sibling", "relative", "unrelated")
ROTATED = tuple(f"{kind}, rotated" for kind in KINDS)
HIGH_GATE = 0.8
HIGH = "marked, high gate"
READINGS = ("as it stands", "unmarked", "marked", HIGH)

SCRAMBLE = [("dummy", {"share": 0.2}), ("rescale", {"factor": 4.0}), ("permute", {})]
ATTACKS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "none": [],
    "permute": [("permute", {})],
    "scramble": SCRAMBLE,
    "scramble-10": [("dummy", {"share": 0.2}), ("rescale", {"factor": 10.0}), ("permute", {})],
    "scramble-int8": [*SCRAMBLE, ("quantise", {"bits": 8})],
    "scramble-ftal-20": [*SCRAMBLE, ("fine-tune", {"mode": "ftal", "epochs": 20})],
    "permute-prune-0.9-ftal-5": [
        ("permute", {}),
        ("prune", {"sparsity": 0.9}),
        ("fine-tune", {"mode": "ftal", "epochs": 5}),
    ],
    "scramble-overwrite-1": [*SCRAMBLE, ("overwrite", {"strength": 1.0})],
    "int8": [("quantise", {"bits": 8})],
    "other-task": [("other-task", {})],
    "distil": [("distil", {"epochs": 10})],
}
TURN = ("rotate", {})
ROTATIONS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "none": [],
    "scramble": SCRAMBLE,
    "rotate": [TURN],
    "rotate-scramble": [TURN, *SCRAMBLE],
    "scramble-rotate": [*SCRAMBLE, TURN],
    "rotate-int8": [TURN, ("quantise", {"bits": 8})],
    "rotate-ftal-20": [TURN, ("fine-tune", {"mode": "ftal", "epochs": 20})],
    "rotate-scramble-ftal-20": [TURN, *SCRAMBLE, ("fine-tune", {"mode": "ftal", "epochs": 20})],
    "rotate-prune-0.7-ftal-5": [
        TURN,
        ("prune", {"sparsity": 0.7}),
        ("fine-tune", {"mode": "ftal", "epochs": 5}),
    ],
    "rotate-overwrite-1": [TURN, ("overwrite", {"strength": 1.0})],
    "distil": [("distil", {"epochs": 10, "student": "streaming:rows"})],
}
OTHER_TASK = {"mlp": "fashion-mnist"}  # else the thief's own inputs, permuted
RELATIVES = (
    Recipe(epochs=1),
    Recipe(epochs=3, batch_size=256),
    Recipe(epochs=3, batch_size=256, learning_rate=3e-4),
    Recipe(epochs=3, batch_size=512, learning_rate=3e-3),
    Recipe(epochs=2, optimizer="sgd", learning_rate=0.1),
    Recipe(epochs=3, batch_size=256, optimizer="adamw", weight_decay=0.05),
)


class AlignBench(Bench):
    """A network and its files, as in the DeepSigns benchmark."""

    def innocent(self, kind: str, index: int) -> Classifier:
        """A model that has nothing to do with the key; all but unrelated ones have the owner's initialisation."""
        rng = self.rng.child("innocent", kind, index)
        weights = rng.child("weights") if kind == "unrelated" else self.rng.child("weights")
        given = RELATIVES[index % len(RELATIVES)]
        recipe = {
            "unrelated": Recipe(epochs=2 * LONGER[self.net], batch_size=256),
            "sibling": OWNERS[self.net],
            "relative": dataclasses.replace(given, epochs=given.epochs * LONGER[self.net]),
        }[kind]
        return train(initialise(self.arch, self.data.spec, weights), self.data.train, recipe=recipe, rng=rng)


def readings(bench: AlignBench, suspect: Classifier, scheme: DeepSigns, null_keys: int = 0) -> dict[str, Any]:
    """What the key reads from a suspect in three ways, as plain values."""
    key = bench.key(scheme)
    found: dict[str, Any] = {}
    if suspect.metadata.get("resized") is not True:
        plain = verify(suspect, key, max_false_positive=RATE, null_keys=null_keys)
        found["as it stands"] = plain.as_dict()
    for name, original in (("unmarked", bench.base()), ("marked", bench.marked(scheme))):
        both = verify_aligned(suspect, key, original, max_false_positive=RATE, null_keys=null_keys)
        found[name] = {**both.verification.as_dict(), "alignment": both.alignment}
    return found


def attack_cell(bench: AlignBench, run: Run, scheme: DeepSigns, steps: list[tuple[str, dict[str, Any]]]) -> None:
    """Mark, attack, read."""
    base, model = bench.base(), bench.marked(scheme)
    evidence = []
    for name, params in steps:
        task = {"task": OTHER_TASK.get(bench.net)} if name == "other-task" else {}
        model, proof = bench.attacked(model, name, **params, **task)
        evidence.append({"attack": name, "params": params, "evidence": proof})
    run.fingerprints.update(base=base.fingerprint(), model=model.fingerprint())
    run.results.update(
        readings=readings(bench, model, scheme, null_keys=200),
        accuracy_base=base.accuracy(bench.data.test).value,
        accuracy=model.accuracy(bench.data.test).as_dict(),
        evidence=evidence,
    )


def innocent_row(bench: AlignBench, scheme: DeepSigns, other: Classifier, kind: str, index: int) -> dict[str, Any]:
    """One innocent model in all readings, as plain values."""
    row: dict[str, Any] = {"kind": kind, "index": index, "accuracy": other.accuracy(bench.data.test).value}
    for name, read in readings(bench, other, scheme).items():
        row[name] = {part: read[part] for part in ("verdict", "bits", "bit_errors", "p_value")}
        if "alignment" in read:
            row[name]["matched"] = [group["matched_share"] for group in read["alignment"]["groups"]]
            row[name]["streams"] = read["alignment"]["streams"]
    view = aligned_view(bench.marked(scheme), other, gate=HIGH_GATE, minimum=0.2)
    high = verify(view, bench.key(scheme), max_false_positive=RATE)
    row[HIGH] = {"verdict": high.verdict, "bits": high.bits, "bit_errors": high.bit_errors}
    return row


def innocents_cell(bench: AlignBench, run: Run, scheme: DeepSigns, kind: str, part: int) -> None:
    """The owner's key read from models that are innocent, also with a gate so high that it makes evidence."""
    rows = []
    for index in range(part * PART, min(INNOCENTS[bench.net][kind], (part + 1) * PART)):
        other = bench.innocent(kind, index)
        rows.append(innocent_row(bench, scheme, other, kind, index))
        if bench.net == "rows":
            rows.append(innocent_row(bench, scheme, bench.attacked(other, "rotate")[0], f"{kind}, rotated", index))
    run.results.update(models=rows)


def attacks_on(net: str) -> dict[str, list[tuple[str, dict[str, Any]]]]:
    return ROTATIONS if net == "rows" else ATTACKS


def cells(bench: AlignBench) -> Iterator[tuple[str, DeepSigns, Callable[[Run], None]]]:
    scheme = DeepSigns(bits=BITS)
    for name, steps in attacks_on(bench.net).items():
        yield name, scheme, lambda run, steps=steps: attack_cell(bench, run, scheme, steps)
    for kind, count in INNOCENTS[bench.net].items() if bench.seed == 0 else ():
        for part in range(-(-count // PART)):

            def fill(run: Run, kind: str = kind, part: int = part) -> None:
                innocents_cell(bench, run, scheme, kind, part)

            yield f"{kind}-{part}", scheme, fill


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default="mlp,cnn,fashion,wrn,rows")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--only", default="", help="names of cells")
    parser.add_argument("--summary", action="store_true", help="only rewrite the summary from the records")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    watermark_deepsigns.MODELS = watermark_deepsigns.MODELS.parent / "watermark-align"
    watermark_deepsigns.NETS, watermark_deepsigns.OWNERS = NETS, OWNERS
    for folder in (RECORDS, watermark_deepsigns.MODELS):
        folder.mkdir(parents=True, exist_ok=True)
    for net in options.nets.split(",") if not options.summary else ():
        for seed in map(int, options.seeds.split(",")):
            bench = AlignBench(net, seed)
            for name, scheme, fill in cells(bench):
                params = {
                    "net": net,
                    "data": bench.source,
                    **({} if bench.limit is None else {"limit": bench.limit}),
                    "cell": name,
                    "scheme_params": scheme.as_dict(),
                    "steps": [[attack, settings] for attack, settings in attacks_on(net).get(name, [])],
                    "innocents": INNOCENTS[net] if name not in attacks_on(net) else None,
                    "owner": OWNERS[net].as_dict(),
                    "max_false_positive": RATE,
                    "code": watermark_deepsigns.CODE,
                }
                path = RECORDS / f"align-{bench.name}-{name}.json"
                if (options.only and name not in options.only.split(",")) or is_done(path, params):
                    continue
                run = Run("benchmark.watermark", seed=seed, params=params)
                fill(run)
                run.record().write(path, force=True)
                print(bench.name, name, _shown(run.results), flush=True)
    records = [read_record(path) for path in sorted(RECORDS.glob("align-*.json"))]
    (RECORDS / "align.md").write_text(summary(records))


def summary(records: list[Record]) -> str:
    """Markdown tables of all records."""
    most = allowed_errors([0.5] * BITS, RATE / 2)
    lines = [
        "# Alignment before extraction",
        "",
        "Made by `make benchmark-watermark-align` from the records `align-*.json` in this folder. DeepSigns,"
        f" {BITS} bits, `owned` at {RATE:g}: at most {most} wrong with the two readings paid. *scramble*: 20 % dummy"
        " neurons (dead, duplicated, split, cancelling), factors between 1/4 and 4 (*-10*: 1/10 and 10), permutation."
        " *rows*: a transformer with RMSNorm that reads an image by rows; *rotate*: its residual stream is rotated."
        " Each record names the share of a layer that had to be found for it to be read (`minimum_share`; by now half,"
        " 95 % with a marked original).",
        "",
    ]
    for net in [net for net in NETS if any(record.params["net"] == net for record in records)]:
        own = [record for record in records if record.params["net"] == net]
        lines += [f"## {NETS[net][0].partition(':')[2]} on {own[0].params['data']}", ""]
        lines += [
            "Wrong bits of the readable ones as the suspect stands, aligned to the unmarked model, aligned to the"
            " marked model (accuracy in %, change against the base in points)",
            "",
        ]
        seeds = sorted({record.seed for record in own if record.seed is not None})
        lines += ["| attack | " + " | ".join(f"seed {seed}" for seed in seeds) + " |", "|---" * (len(seeds) + 1) + "|"]
        by_cell = {(record.params["cell"], record.seed): record.results for record in own}
        for name in attacks_on(net):
            row = [_shown(by_cell.get((name, seed))) for seed in seeds]
            if any(row):
                lines.append(f"| {name} | " + " | ".join(row) + " |")
        lines.append("")
        models = [row for record in own for row in record.results.get("models", [])]
        if models:
            lines += _innocent_lines(models)
    return "\n".join(lines)


def _shown(results: dict[str, Any] | None) -> str:
    if not results or "readings" not in results:
        return ""
    parts = []
    for name in ("as it stands", "unmarked", "marked"):
        read = results["readings"].get(name)
        if read is None:
            parts.append("other widths")
        elif read["verdict"] == "inconclusive":
            parts.append("inconclusive")
        else:
            parts.append(f"{read['bit_errors']}/{read['bits']} {read['verdict']}")
    accuracy = 100 * results["accuracy"]["value"]
    return f"{', '.join(parts)} ({accuracy:.2f}, {accuracy - 100 * results['accuracy_base']:+.2f})"


def _innocent_lines(models: list[dict[str, Any]]) -> list[str]:
    lines = ["Innocent models: how many are owned; mean (lowest) share of wrong bits where bits were read", ""]
    kinds = [kind for kind in (*KINDS, *ROTATED) if any(row["kind"] == kind for row in models)]
    lines += ["| reading | " + " | ".join(kinds) + " | owned, 95 % interval |", "|---" * (len(kinds) + 2) + "|"]
    for name in READINGS:
        columns = []
        for kind in kinds:
            rows = [row[name] for row in models if row["kind"] == kind]
            shares = [row["bit_errors"] / row["bits"] for row in rows if row["bits"]]
            rest = f"{np.mean(shares):.3f} ({min(shares):.3f})" if shares else "nothing read"
            columns.append(f"{_owned(rows)} of {len(rows)}, {rest}")
        owned = {_model_of(row) for row in models if row[name]["verdict"] == "owned"}
        total = rate(len(owned), len({_model_of(row) for row in models}))
        shown = f"{total.count} of {total.n}, {100 * total.low:.1f} to {100 * total.high:.1f} %"
        what = {READINGS[0]: READINGS[0], HIGH: f"marked, gate {HIGH_GATE:g} (not used)"}
        lines.append(f"| {what.get(name, f'aligned to the {name} model')} | " + " | ".join(columns) + f" | {shown} |")
    return [*lines, ""]


def _model_of(row: dict[str, Any]) -> tuple[str, int]:
    """A model and its rotated copy are one, as far as chance is concerned."""
    return row["kind"].partition(",")[0], row["index"]


def _owned(rows: list[dict[str, Any]]) -> int:
    return sum(row["verdict"] == "owned" for row in rows)


if __name__ == "__main__":
    main()
