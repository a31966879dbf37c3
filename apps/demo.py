"""The demonstration: a model is trained, marked and stolen; the thief attacks; the owner proves ownership."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepseal.adapter import Classifier, Dataset, Recipe, load_data
from deepseal.apps import workflow
from deepseal.apps.report.html import render
from deepseal.apps.reporter import Reporter
from deepseal.errors import InputError
from deepseal.files import write_atomically
from deepseal.record import Record, Run, read_record
from deepseal.watermark import Key

ARCHITECTURE = "deepseal.adapter.zoo:mlp"
RECIPE = Recipe(epochs=20, batch_size=64)
RATE = 1e-9
NULL_KEYS = 200
ATTACKS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("prune", {"sparsity": sparsity}) for sparsity in (0.5, 0.8, 0.9, 0.95)),
    *(("fine-tune", {"mode": "ftal", "epochs": epochs}) for epochs in (1, 5, 20)),
    *(("overwrite", {"strength": strength}) for strength in (1.0, 10.0)),
)


@dataclasses.dataclass
class _Story:
    """Where the demonstration writes, and the records it has written."""

    out: Path
    seed: int
    force: bool
    say: Callable[[str], None]
    records: list[Record] = dataclasses.field(default_factory=list)

    def finish(self, run: Run, name: str) -> None:
        """Freeze a run's record and write it."""
        record = run.record()
        record.write(self.out / "records" / f"{len(self.records):02d}-{name}.json", force=True)
        self.records.append(record)


def run_demo(run: Run, *, out: Path, seed: int, force: bool, report: Reporter, say: Callable[[str], None]) -> None:
    """Train, mark, verify, attack, verify again, and report on scikit-learn's handwritten digits.

    Args:
        run: its results become one row a verified model, and the files.
        out: folder for models, key, records and report.html; made if absent.
        seed: seed of everything but the key's secret, which comes from the operating system.
        force: replace what an earlier demonstration left in ``out``.
        report: shows the progress of a step.
        say: takes one line a step.

    Raises:
        InputError: ``out`` holds files (without ``force``) or cannot be written.
    """
    _prepare(out, force=force)
    story = _Story(out, seed, force, say)
    dataset = load_data("digits")
    say(f"training {ARCHITECTURE} on {len(dataset.train)} real handwritten digits")
    base = _train(story, dataset, "base", seed, report)
    key = _keygen(story, base, dataset)
    say(f"embedding {key.bits} bits and reading them back from the saved file in a fresh process")
    marked = _embed(story, base, dataset, key, report)
    _verify(story, marked, key, "marked")
    for name, params in ATTACKS:
        say(f"the thief runs {name} with {', '.join(f'{k} {v}' for k, v in params.items())}")
        attacked, label = _attack(story, marked, dataset, name, params, report)
        _verify(story, attacked, key, label)
    say("training a model that has nothing to do with the owner")
    _verify(story, _train(story, dataset, "independent", seed + 1, report), key, "independent")
    page = out / "report.html"
    write_atomically(page, render(story.records, title="Who owns this model?").encode(), force=True)
    run.params.update(out=str(out), data=dataset.name, arch=ARCHITECTURE, max_false_positive=RATE)
    run.fingerprints.update(dataset.fingerprints(), key=key.fingerprint())
    run.results.update(rows=_rows(story.records), report=str(page), records=str(out / "records"))


def _prepare(out: Path, *, force: bool) -> None:
    if out.exists() and not out.is_dir():
        raise InputError("a folder", found=f"a file at {out}", do="choose another --out")
    if out.is_dir() and any(out.iterdir()) and not force:
        raise InputError(f"an empty folder {out}", found="files in it", do="choose another --out, or add --force")
    try:
        (out / "records").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"{out} to be writable", found=error.strerror or str(error), do="choose another --out"
        ) from error
    for stale in (out / "records").glob("[0-9][0-9]-*.json"):
        with contextlib.suppress(InputError):
            read_record(stale)
            stale.unlink()


def _train(story: _Story, dataset: Dataset, name: str, seed: int, report: Reporter) -> Classifier:
    run = Run("model.train", seed=seed)
    file = story.out / f"{name}.safetensors"
    model = workflow.train_model(
        run, arch=ARCHITECTURE, dataset=dataset, recipe=RECIPE, seed=seed, out=file, force=story.force, report=report
    )
    story.finish(run, f"train-{name}")
    return model


def _keygen(story: _Story, model: Classifier, dataset: Dataset) -> Key:
    run = Run("watermark.keygen")
    key = workflow.make_key(
        run,
        model=model,
        dataset=dataset,
        scheme="deepsigns",
        params={"bits": 256},
        owner="Example Ltd",
        seed=None,
        out=story.out / "owner.key",
        passphrase=None,
        force=story.force,
    )
    story.finish(run, "keygen")
    return key


def _embed(story: _Story, model: Classifier, dataset: Dataset, key: Key, report: Reporter) -> Classifier:
    run = Run("watermark.embed", seed=story.seed)
    marked = workflow.embed_mark(
        run,
        model=model,
        dataset=dataset,
        key=key,
        key_file=story.out / "owner.key",
        passphrase=None,
        seed=story.seed,
        out=story.out / "marked.safetensors",
        force=story.force,
        max_false_positive=RATE,
        trust=[],
        report=report,
    )
    story.finish(run, "embed")
    return marked


def _attack(
    story: _Story, model: Classifier, dataset: Dataset, name: str, params: dict[str, Any], report: Reporter
) -> tuple[Classifier, str]:
    run = Run("attack.run", seed=story.seed)
    label = "-".join([name, *(str(value) for value in params.values())])
    attacked = workflow.run_attack(
        run,
        name=name,
        params=params,
        model=model,
        dataset=dataset,
        seed=story.seed,
        out=story.out / f"{label}.safetensors",
        force=story.force,
        report=report,
    )
    story.finish(run, label)
    return attacked, label


def _verify(story: _Story, model: Classifier, key: Key, name: str) -> None:
    run = Run("watermark.verify")
    workflow.verify_mark(run, model=model, key=key, max_false_positive=RATE, null_keys=NULL_KEYS, tried=1)
    run.params.update(model=f"{name}.safetensors", key="owner.key")
    story.finish(run, f"verify-{name}")


def _rows(records: list[Record]) -> list[dict[str, Any]]:
    """One row a verification, with the accuracy that the record of the same model holds."""
    accuracy: dict[str, Any] = {}
    for record in records:
        for produced in ("model", "marked", "attacked"):
            value = record.results.get("accuracy" if produced == "model" else "accuracy_after")
            if value is not None and produced in record.fingerprints:
                accuracy.setdefault(record.fingerprints[produced], value)
    rows = []
    for record in records:
        if record.kind == "watermark.verify":
            shown = {name: record.results[name] for name in ("bits", "bit_errors", "p_value", "threshold", "verdict")}
            fingerprint = record.fingerprints["model"]
            name = str(record.params["model"]).removesuffix(".safetensors")
            rows.append({"model": name, "accuracy": accuracy.get(fingerprint), **shown})
    return rows
