"""Independent models that keys are made against, trained once and kept for the next key."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from deepseal.adapter import Classifier, Split, checkpoint, load
from deepseal.adapter.training import Progress
from deepseal.apps.cache import cache_folder
from deepseal.apps.reporter import Reporter
from deepseal.errors import DeepSealError
from deepseal.watermark.independent import independent_model, stated_recipe


def kept_models(model: Classifier, data: Split, count: int, report: Reporter) -> list[Classifier]:
    """``watermark.independent.independent_models``, from files where they are there.

    A model whose architecture has no name cannot be read back, and is trained each time; so is one whose file is
    damaged, or when the folder cannot be written to.

    Raises:
        InputError: an architecture whose weights cannot be drawn again.
        TrainingError: a training diverged.
    """
    found = []
    for index in range(count):
        path = _file(model, data, index)
        kept = _read(path, model) if path else None
        if kept is None:
            with report(f"training independent model {index + 1} of {count}") as progress:
                kept = _made(model, data, index, path, progress)
        found.append(kept)
    return found


def _made(model: Classifier, data: Split, index: int, path: Path | None, progress: Progress | None) -> Classifier:
    made = independent_model(model, data, index, progress)
    if path is not None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            named = Classifier(made.module, made.spec, architecture=model.architecture)
            checkpoint.save(named, path, force=True)
        except (OSError, DeepSealError):
            pass  # the key needs the model, not the file
    return made


def _file(model: Classifier, data: Split, index: int) -> Path | None:
    if model.architecture is None:
        return None
    parts = [model.architecture, model.spec.as_dict(), stated_recipe(model).as_dict(), data.fingerprint(), index]
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()
    return cache_folder() / "independent" / f"{digest}.safetensors"


def _read(path: Path, model: Classifier) -> Classifier | None:
    if not path.is_file():
        return None
    try:
        return load(path, architecture=model.architecture, spec=model.spec)
    except (OSError, DeepSealError):
        return None
