"""The steps that the command line and the demonstration share: one library call each, written into a run's record."""

from __future__ import annotations

import functools
import inspect
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from deepseal import adapter
from deepseal.adapter import BlackBox, Classifier, Dataset, Differentiable, Recipe, Split, checkpoint
from deepseal.adapter.names import MismatchError
from deepseal.adapter.oracle import accuracy
from deepseal.apps.embedding_watch import watch_embedding
from deepseal.apps.kept import kept_models
from deepseal.apps.reporter import Reporter, observer, silent
from deepseal.attacks import EVASION, REMOVAL, Perturbed
from deepseal.errors import InputError, VerificationError, one_line
from deepseal.files import check_writable, pending
from deepseal.record import Run
from deepseal.rng import Rng
from deepseal.statistics import Rate, rate
from deepseal.watermark import SCHEMES, Key, embedding_rounds, save_key, verify, verify_aligned
from deepseal.watermark.cost import embedding_cost

_CHILD_SECONDS = 900
_OWNER = 1000  # characters of a name
_LITTLE = 0.1  # weight noise, in standard deviations
# Without the working folder on the path, where a file named like one of our imports would be run.
_CHILD = "import sys; sys.path = [p for p in sys.path if p]; from deepseal.apps.cli import main; main()"


def train_model(
    run: Run, *, arch: str, dataset: Dataset, recipe: Recipe, seed: int, out: Path, force: bool, report: Reporter
) -> Classifier:
    """Train a new model on the training split and save it with the recipe and the splits' fingerprints."""
    check_writable(out, force=force)
    rng = Rng(seed).child("train")
    start = adapter.initialise(arch, dataset.spec, rng.child("weights"))
    clock = time.perf_counter()
    with report("training") as progress:
        trained = adapter.train(start, dataset.train, recipe=recipe, rng=rng, progress=progress)
    seconds = time.perf_counter() - clock
    training = {
        "data": dataset.name,
        "recipe": recipe.as_dict(),
        "updates": recipe.total_steps(len(dataset.train)),
        "samples": len(dataset.train),
        "held_out": len(dataset.calibration),
        "splits": dataset.fingerprints(),
        "seed": seed,
    }
    model = trained.copy(metadata={"training": training})
    run.params.update(arch=arch, data=dataset.name, recipe=recipe.as_dict())
    run.fingerprints.update(model=model.fingerprint(), **dataset.fingerprints())
    run.results.update(
        _accuracy(model.accuracy(dataset.test)),
        training_samples=len(dataset.train),
        held_out_samples=len(dataset.calibration),
        training_seconds=seconds,
        parameters=sum(p.numel() for p in model.module.parameters()),
        file=str(out),
    )
    checkpoint.save(model, out, force=force)
    return model


def evaluate_model(run: Run, *, model: BlackBox, dataset: Dataset) -> None:
    """Accuracy on the test split."""
    run.params.update(data=dataset.name)
    run.fingerprints.update(dataset.fingerprints())
    run.results.update(_accuracy(accuracy(model, dataset.test)))


def make_key(
    run: Run,
    *,
    model: Classifier,
    dataset: Dataset,
    scheme: str,
    params: dict[str, Any],
    owner: str,
    seed: int | None,
    out: Path,
    passphrase: str | None,
    force: bool,
    independent: Sequence[BlackBox] = (),
    report: Reporter = silent,
) -> Key:
    """Draw a key and write its file; the independent models that the scheme asks for are trained once and kept.

    Raises:
        InputError: independent models for a scheme that asks none.
    """
    check_writable(out, force=force)
    if not 0 < len(owner.strip()) <= _OWNER or not owner.isprintable():
        found = (
            "none" if not owner.strip() else f"{len(owner)} characters" if owner.isprintable() else "control characters"
        )
        raise InputError(f"the owner's name, 1 to {_OWNER} printable characters", found=found, do="give --owner NAME")
    built = SCHEMES.build(scheme, params)
    rng = None if seed is None else Rng(seed).child("keygen")
    if independent and "independent" not in inspect.signature(built.keygen).parameters:
        raise InputError("a scheme that asks independent models", found=scheme, do="leave out --independent")
    needed = getattr(built, "models_needed", 0)
    if needed and not independent:
        model.spec.require_plain(f"the triggers of {scheme}")
        model.spec.require_classes()
        independent = kept_models(model, dataset.train, needed, report)
    given: dict[str, Any] = {"independent": independent} if independent else {}
    key = built.keygen(model, dataset.train, owner=owner, rng=rng, **given)
    save_key(key, out, passphrase=passphrase, force=force)
    run.params.update(scheme=scheme, owner=owner, data=dataset.name, scheme_params=dict(key.params))
    run.fingerprints.update(key=key.fingerprint(), model=model.fingerprint(), **dataset.fingerprints())
    run.results.update(
        dict(key.public),
        triggers=key.triggers,
        encrypted=passphrase is not None,
        reproducible=key.reproducible,
        file=str(out),
    )
    return key


def embed_mark(
    run: Run,
    *,
    model: Classifier,
    dataset: Dataset,
    key: Key,
    key_file: Path,
    passphrase: str | None,
    seed: int,
    out: Path,
    force: bool,
    max_false_positive: float,
    trust: list[str],
    report: Reporter,
) -> Classifier:
    """Embed, save, and read the mark back from the saved file in a fresh process before anything is called done.

    Raises:
        VerificationError: the file does not read as owned; it is removed.
    """
    check_writable(out, force=force)
    rng = Rng(seed).child("embed")
    one_round = embedding_cost(model, dataset.train, key, rng=rng.child("cost"))
    clock = time.perf_counter()
    looking = observer()
    watch = watch_embedding(key, looking) if looking else None
    with report("embedding") as progress:
        rounds = list(embedding_rounds(model, dataset.train, key, rng=rng, progress=progress, watch=watch))
    marked = rounds[-1]
    seconds = time.perf_counter() - clock
    change = _change(model, marked, dataset.test)
    run.params.update(data=dataset.name, scheme=key.scheme, max_false_positive=max_false_positive)
    run.fingerprints.update(model=model.fingerprint(), key=key.fingerprint(), marked=marked.fingerprint())
    gained = change.get("accuracy_change_points", 0.0)
    warnings = []
    if gained > 2.0:
        warnings.append(
            f"embedding made the model better by {gained:.1f} points: did it fit these data before? If it expects "
            "normalised inputs, state them, for instance --data 'data.npz?mean=0.5&std=0.25'"
        )
    if change.get("accuracy_after", 0.0) < change.get("accuracy_before_interval", [0.0])[0]:
        warnings.append(f"embedding cost {-gained:.1f} points of accuracy, more than chance explains{_gentler(key)}")
    with pending(out, force=force) as temporary:
        temporary.write_bytes(checkpoint.to_bytes(marked))
        read = _verify_in_fresh_process(temporary, key, key_file, passphrase, max_false_positive, trust)
    run.results.update(
        {name: read[name] for name in ("verdict", "bits", "bit_errors", "bit_error_rate", "p_value", "threshold")},
        **change,
        warnings=warnings,
        cost={"embedding_seconds": seconds, "rounds": len(rounds), **one_round.times(len(rounds)).as_dict()},
        verified_from_file=True,
        file=str(out),
    )
    return marked


def verify_mark(
    run: Run,
    *,
    model: BlackBox,
    key: Key,
    max_false_positive: float,
    null_keys: int,
    tried: int,
    original: Classifier | None = None,
) -> str:
    """The verdict, on a suspect aligned to ``original`` if there is one; the record holds what it rests on."""
    if original is None:
        result = verify(model, key, max_false_positive=max_false_positive, null_keys=null_keys, tried=tried)
    elif isinstance(model, Classifier):
        both = verify_aligned(
            model, key, original, max_false_positive=max_false_positive, null_keys=null_keys, tried=tried
        )
        result = both.verification
        run.fingerprints.update(original=original.fingerprint())
        run.results.update(alignment=both.alignment)
    else:
        raise InputError("weights to align", found="a model that only answers", do="leave out --align")
    run.params.update(max_false_positive=max_false_positive, null_keys=null_keys, tried=tried, scheme=key.scheme)
    run.fingerprints.update(key=key.fingerprint())
    if isinstance(model, Classifier):
        run.fingerprints.update(model=model.fingerprint())
    run.results.update(result.as_dict())
    if result.verdict != "owned" and key.public.get("access") == "white-box" and original is None:
        run.notes.append("neurons that were moved hide this mark: verify again with --align and the unmarked original")
    return result.verdict


def run_attack(
    run: Run,
    *,
    name: str,
    params: dict[str, Any],
    model: Classifier,
    dataset: Dataset,
    seed: int,
    out: Path,
    force: bool,
    report: Reporter,
) -> Classifier:
    """Attack a copy with the data set's training split and save it."""
    check_writable(out, force=force)
    attack = REMOVAL.build(name, params)
    with report(name) as progress:
        removed = attack.remove(model, dataset.train, rng=Rng(seed).child("attack", name), progress=progress)
    change = _change(model, removed.model, dataset.test)
    checkpoint.save(removed.model, out, force=force)
    run.params.update(attack=name, attack_params=attack.as_dict(), data=dataset.name)
    run.fingerprints.update(model=model.fingerprint(), attacked=removed.model.fingerprint(), **dataset.fingerprints())
    run.results.update(
        change,
        evidence=dict(removed.evidence),
        file=str(out),
    )
    return removed.model


def run_evasion(
    run: Run,
    *,
    name: str,
    params: dict[str, Any],
    model: Differentiable,
    dataset: Dataset,
    seed: int,
    out: Path,
    force: bool,
    report: Reporter,
    limit: int | None = None,
) -> Perturbed:
    """Attack the test split's inputs, the first ``limit`` of them, and save them: x, y, fooled in a .npz file."""
    check_writable(out, force=force)
    if out.suffix != ".npz":
        raise InputError("an output file that ends in .npz", found=str(out), do="rename it: it holds inputs")
    attack = EVASION.build(name, params)
    count = len(dataset.test) if limit is None else min(limit, len(dataset.test))
    chosen = dataset.test.take(torch.arange(count))
    clock = time.process_time()
    with report(name):
        found = attack.perturb(model, chosen, rng=Rng(seed).child("attack", name))
    seconds = time.process_time() - clock
    attacked, fooled = int(found.evidence["attacked"]), int(found.evidence["fooled"])
    with pending(out, force=force) as temporary, temporary.open("wb") as stream:
        np.savez(stream, x=found.x.numpy(), y=chosen.y.numpy(), fooled=found.fooled.numpy())
    run.params.update(attack=name, attack_params=attack.as_dict(), data=dataset.name, limit=limit)
    run.fingerprints.update(dataset.fingerprints())
    run.results.update(
        inputs=count,
        accuracy=rate(attacked, count).as_dict(),
        accuracy_under_attack=rate(attacked - fooled, count).as_dict(),
        success=rate(fooled, attacked).as_dict() if attacked else None,
        cpu_seconds=seconds,
        evidence=dict(found.evidence),
        file=str(out),
    )
    return found


def _easier(key: Key) -> str:
    """How a new key would be embedded more surely."""
    if "gap" in key.params and key.params.get("drift", 0.0) > _LITTLE:
        return f"with -p drift={_LITTLE} -p settle=500 (some networks bear less noise than the usual 0.5)"
    return "with more steps or fewer bits"


def _gentler(key: Key) -> str:
    """How a new key would cost less: more updates after the marking, or with it."""
    settle, steps = key.params.get("settle"), key.params.get("steps")
    if isinstance(settle, int) and key.params.get("recipe") != "paper":
        longer = max(500, 2 * settle)
        return f"; a new key with -p settle={longer} (updates on the task at the end) gives back a part of it"
    if isinstance(steps, int):
        return f"; a new key with -p steps={2 * steps} (twice the updates) usually costs less"
    return ""


def _change(before: Classifier, after: Classifier, test: Split) -> dict[str, Any]:
    """What became of the task: accuracy, or, without classes, how far the answers moved relative to their size."""
    if before.spec.num_classes == 0:
        test.check(before.spec)
        old, new = before.query(test.x), after.query(test.x)
        return {"output_change": float((new - old).norm() / old.norm()), "test_samples": len(test)}
    was, is_now = before.accuracy(test), after.accuracy(test)
    return {
        "accuracy_before": was.value,
        "accuracy_before_interval": [was.low, was.high],
        "accuracy_after": is_now.value,
        "accuracy_change_points": 100.0 * (is_now.value - was.value),
        "test_samples": is_now.n,
    }


def _accuracy(measured: Rate) -> dict[str, Any]:
    return {
        "accuracy": measured.value,
        "accuracy_interval": [measured.low, measured.high],
        "confidence": measured.confidence,
        "test_samples": measured.n,
    }


def _verify_in_fresh_process(
    model: Path, key: Key, key_file: Path, passphrase: str | None, max_false_positive: float, trust: list[str]
) -> dict[str, Any]:
    command = [sys.executable, "-c", _CHILD, "watermark", "verify", "--json", "--null-keys", "0", *trust]
    command += ["--model", str(model), "--key", str(key_file), "--max-false-positive", repr(max_false_positive)]
    if passphrase is not None:
        command += ["--passphrase-file", "/dev/stdin"]
    try:
        child = subprocess.run(  # noqa: S603
            command, input=passphrase or "", capture_output=True, encoding="utf-8", timeout=_CHILD_SECONDS, check=False
        )
        results: dict[str, Any] = json.loads(child.stdout)["results"]
    except subprocess.TimeoutExpired as error:
        raise VerificationError(
            f"reading the mark back from the file took over {_CHILD_SECONDS} s; no file kept"
        ) from error
    except (ValueError, KeyError) as error:
        raise VerificationError(f"the saved file could not be read back: {one_line(child.stderr)[-300:]}") from error
    if results["verdict"] != "owned":
        wrong = f"{results['bit_errors']} of {results['bits']} bits wrong ({results['threshold']} allowed)"
        raise VerificationError(
            f"expected the mark to read back from the saved file; found {wrong}; draw a new key {_easier(key)}"
        )
    return results


def load_pair(
    model: Path, original: Path, *, arch: str | None, original_arch: str | None, insecure_allow_pickle: bool, key: Key
) -> tuple[Classifier, Classifier]:
    """A suspect with any widths, and the owner's original to which it is to be aligned.

    Without ``arch`` the suspect is read as a copy of the original, then as what its own file says. Without
    ``original_arch`` the original is what its file says, else what ``arch`` says.

    Raises:
        InputError: a file that cannot be used; of the suspect, the error of reading it as a copy of the original.
    """
    read = functools.partial(load_model, insecure_allow_pickle=insecure_allow_pickle, key=key)
    try:
        owner = read(original, arch=original_arch)
    except InputError:
        if original_arch is not None or arch is None:
            raise
        owner = read(original, arch=arch)
    try:
        return read(model, arch=arch or owner.architecture, widths=True), owner
    except MismatchError:
        if arch is not None:
            raise
        try:
            return read(model, arch=None, widths=True), owner
        except InputError:
            pass
        raise


def load_model(
    path: Path,
    *,
    arch: str | None,
    insecure_allow_pickle: bool,
    dataset: Dataset | None = None,
    key: Key | None = None,
    widths: bool = False,
) -> Classifier:
    """The classifier of a weights file; its spec comes from the file, else from the data, else from the key.

    With a key, its bounds and normalisation are used: what the triggers mean is not for a suspect's file to say.
    With ``widths`` its layers may have other widths than the architecture gives them.
    """
    spec = dataset.spec if dataset else key.spec if key else None
    model = checkpoint.load(
        path, architecture=arch, spec=spec, insecure_allow_pickle=insecure_allow_pickle, widths=widths
    )
    if key is not None and model.spec.same_inputs(key.spec):
        stated = model.spec.with_values_of(key.spec)
        model = Classifier(model.module, stated, architecture=model.architecture, metadata=model.metadata)
    if dataset is not None and not model.spec.same_inputs(dataset.spec):
        raise InputError(
            f"data of shape {model.spec.shape or list(model.spec.fields)}, as {path} takes",
            found=str(dataset.spec.shape or list(dataset.spec.fields)),
            do="pass the right --data",
        )
    return model
