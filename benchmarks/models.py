"""Models that nobody here wrote, marked, verified and attacked: one record a model, resumable.

    .venv-real/bin/python benchmarks/models.py [--only NAME,...] [--summary]

Every model runs in a process of its own, so that its peak memory is its own. A model whose record exists, is ok and was
made by the same code with the same parameters is skipped. What the models are is in ``tests/real``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
HERE = Path(__file__).resolve().parent
REAL = HERE.parent / "tests" / "real"
RECORDS = HERE / "models"
sys.path.insert(0, str(REAL))

import torch  # noqa: E402
from marking import RATE, examine  # noqa: E402
from zoo import ZOO  # noqa: E402

from deepseal.errors import InputError  # noqa: E402
from deepseal.record import Record, Run, read_record  # noqa: E402

SEED = 0


def code() -> str:
    """SHA-256 over the sources that decide a figure."""
    digest = hashlib.sha256()
    for folder in (*(HERE.parent / name for name in ("adapter", "watermark", "attacks")), REAL):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def parameters(name: str) -> dict[str, Any]:
    """What a record must have been made with to be used again."""
    subject = ZOO[name]
    return {"model": name, "bits": subject.bits, "scheme": dict(subject.params), "max_false_positive": RATE}


def measure(name: str) -> None:
    """Write the record of one model."""
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    run = Run("benchmark.models", seed=SEED, params={**parameters(name), "code": code()})
    with tempfile.TemporaryDirectory() as folder:
        run.results.update(examine(ZOO[name], Path(folder), seed=SEED))
    run.results["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    run.record().write(RECORDS / f"{name}.json", force=True)
    print(name, row(run.record()), flush=True)


def is_done(name: str) -> bool:
    """Whether the model's record is there, ok, and made by this code with these parameters."""
    try:
        record = read_record(RECORDS / f"{name}.json")
    except InputError:
        return False
    return record.status == "ok" and record.params == {**parameters(name), "code": code()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="names of models")
    parser.add_argument("--summary", action="store_true", help="only rewrite the summary from the records")
    parser.add_argument("--one", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    RECORDS.mkdir(exist_ok=True)
    if options.one:
        measure(options.one)
        return
    failed = []
    for name in [] if options.summary else options.only.split(",") if options.only else ZOO:
        if missing := ZOO[name].missing():
            print(f"{name}: skipped, {', '.join(missing)} not installed: run 'make real-env'", flush=True)
        elif not is_done(name) and subprocess.run([sys.executable, __file__, "--one", name]).returncode:
            failed.append(name)
    records = [read_record(path) for path in sorted(RECORDS.glob("*.json"))]
    (RECORDS / "README.md").write_text(summary(records))
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


HEAD = (
    "model",
    "parameters",
    "bits",
    "unmarked",
    "marked",
    "task",
    "before",
    "after",
    "change",
    "pruned 30 %",
    "pruned 50 %",
    "fine-tuned",
    "seconds",
    "peak MB",
)


def row(record: Record) -> str:
    """One line of the table."""
    found = record.results
    judged = next(iter(found["task_before"]))
    before, after = found["task_before"][judged], found["task_after"][judged]
    removed = [_removed(found["attacks"].get(name), judged) for name in ("prune-0.3", "prune-0.5", "fine-tune")]
    cells = [
        record.params["model"],
        f"{found['parameters'] / 1e6:.2f} M",
        str(found["bits"]),
        f"{found['unmarked']['bit_errors']} {found['unmarked']['verdict']}",
        f"{found['marked']['bit_errors']} {found['marked']['verdict']}",
        judged,
        f"{before:.4f}",
        f"{after:.4f}",
        f"{100 * found['relative_change']:+.2f} %",
        *removed,
        f"{found['embedding_seconds']:.0f}",
        f"{found['peak_mb']:.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _removed(found: dict[str, Any] | None, judged: str) -> str:
    return f"{found['bit_errors']} {found['verdict']} ({found['task'][judged]:.4f})" if found else ""


ABOUT = """Made by `make benchmark-models` from the records in this folder.

A mark of so many bits is embedded with the owner's inputs alone, saved, loaded, and verified; columns give wrong bits
and verdict. The task is the model's own (`tests/real`), on inputs that the owner's are not among. EfficientNet: whether
the five likeliest classes of other photographs hold its own unmarked first answer. CREPE: pitch of made tones, right to
half a semitone. Resemblyzer: telling made voices apart. MiniLM: ranking of graded pairs. O-Net: overlap of its box with
a face. Experts and Mamba: accuracy on held-out digits; decoder: of their next pixel. torchvision's networks have random
weights and no task: the share of the variance of their answers that is as before. In brackets: the task after the
attack.

torchvision's networks get inputs 64 pixels wide, EfficientNet 128. One seed each; seconds on one core of a machine that
others use too, so they are upper bounds. Peak memory is the whole process's.
"""


def summary(records: list[Record]) -> str:
    """The table of all records."""
    lines = [f"# Models that nobody here wrote, marked at a false-positive rate of {RATE:g}", "", ABOUT]
    return "\n".join([*lines, f"| {' | '.join(HEAD)} |", "|---" * len(HEAD) + "|", *map(row, records), ""])


if __name__ == "__main__":
    main()
