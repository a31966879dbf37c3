"""The steps of ``deepseal private compress``, written into a run's record."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepseal.adapter import Classifier, Dataset, checkpoint
from deepseal.apps.private_models import comparison
from deepseal.apps.reporter import Reporter
from deepseal.files import check_writable
from deepseal.record import Run
from deepseal.rng import Rng
from deepseal.secure_inference.compile.accuracy import compare, paired_difference
from deepseal.secure_inference.compile.compiler import compile_model
from deepseal.secure_inference.compress import Compressed, CompressSettings, compress, program_cost
from deepseal.statistics import rate


def compress_model(
    run: Run,
    *,
    model: Classifier,
    dataset: Dataset,
    settings: CompressSettings,
    seed: int,
    out: Path,
    force: bool,
    report: Reporter,
) -> Classifier:
    """Compress a model, compare it with the original on the test split, and save it."""
    check_writable(out, force=force)
    before, _ = compile_model(model, dataset.calibration)  # a model that cannot be compiled is refused at once
    with report("compressing") as progress:
        made = compress(
            model, dataset, settings=settings, rng=Rng(seed).child("private", "compress"), progress=progress
        )
    found = {"method": settings.method, "settings": settings.as_dict(), "data": dataset.name, "seed": seed}
    compressed = made.model.copy(metadata={"compression": found})
    program, weights = compile_model(compressed, dataset.calibration, **compile_settings(made))
    costs = {"before": program_cost(before), "after": program_cost(program)}
    run.params.update(data=dataset.name, settings=settings.as_dict())
    run.fingerprints.update(base=model.fingerprint(), model=compressed.fingerprint(), **dataset.fingerprints())
    run.results.update(
        fold=costs["before"].multiplications / costs["after"].multiplications,
        wanted_fold=settings.fold,
        reached=made.reached,
        cost={name: cost.as_dict() for name, cost in costs.items()},
        **accuracies(model, compressed, dataset),
        program=comparison(compare(program, weights, dataset.test, compressed)),
        columns=None if made.dictionary is None else len(made.dictionary.basis),
        calibration_accuracy_before=made.calibration_accuracy,
        curve=[point.as_dict() for point in made.curve],
        reveals=made.reveals,
        compile_with=[f"{name}={value}" for name, value in compile_settings(made).items()],
        file=str(out),
    )
    run.notes.extend(remarks(made, settings))
    checkpoint.save(compressed, out, force=force)
    return compressed


def compile_settings(made: Compressed) -> dict[str, Any]:
    """What ``compile`` needs to leave out the connections that are gone."""
    return {"sparsity": "public"} if made.pruned else {}


def accuracies(base: Classifier, compressed: Classifier, dataset: Dataset) -> dict[str, Any]:
    """Accuracy before and after on the test split, and the paired difference (after minus before)."""
    truth = dataset.test.y
    right = [(model.predict(dataset.test.x) == truth).numpy() for model in (base, compressed)]
    before, after = (rate(int(part.sum()), len(truth)) for part in right)
    difference = paired_difference(right[1], right[0])
    return {
        "n": len(truth),
        "accuracy_before": before.value,
        "accuracy_before_interval": [before.low, before.high],
        "accuracy_after": after.value,
        "accuracy_after_interval": [after.low, after.high],
        "difference": difference.value,
        "difference_interval": [difference.low, difference.high],
        "gained": difference.gained,
        "lost": difference.lost,
    }


def remarks(made: Compressed, settings: CompressSettings) -> list[str]:
    """What the reader must know beside the numbers."""
    notes = [made.remark] if made.remark else []
    if made.dictionary is not None and made.dictionary.full:
        limit = len(made.dictionary.basis)
        notes.append(f"the dictionary is full at {limit} columns: samples remain whose error is above the threshold")
    if not made.reached:
        wanted = f"a fold of {settings.fold:g}" if settings.fold is not None else "what was asked for"
        notes.append(
            f"{wanted} was not reached within {settings.max_loss:g} points on the calibration split; results.curve has "
            "the accuracy at each fold on the way"
        )
    return notes
