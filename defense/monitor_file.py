"""A monitor on disk: a folder with the model, the fitted tensors, and one JSON file that says what they are.

``model.safetensors`` is what ``adapter.save`` writes, ``detectors.safetensors`` holds the detectors' and the
calibration's tensors, ``monitor.json`` the rest: parameters, fingerprints, and the scores of a few fixed inputs, which
are computed again when the monitor is loaded. Nothing in the folder chooses what code runs.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from deepseal.adapter import Classifier, InputSpec, checkpoint
from deepseal.defense.base import DETECTORS
from deepseal.defense.monitor import Calibration, Member, Monitor
from deepseal.errors import InputError, understood
from deepseal.files import read_bytes, umask

FORMAT = "deepseal-monitor/1"
NAMES = ("model.safetensors", "detectors.safetensors", "monitor.json")
_GOLDEN = 8
_TOLERANCE = 1e-3
_LIMIT = 2**24


def save_monitor(monitor: Monitor, path: Path | str, *, force: bool = False) -> None:
    """Write a monitor's folder, all of it or nothing.

    Raises:
        InputError: something is there that is no monitor, or is one (without ``force``); it cannot be written; or a
            model that only answers.
    """
    folder = Path(path)
    check_folder(folder, force=force)
    if not isinstance(monitor.model, Classifier):
        raise InputError("a monitor of a model with weights", found="one that only answers", do="keep it in memory")
    tensors, described = _content(monitor)
    try:
        temporary = Path(tempfile.mkdtemp(dir=folder.absolute().parent, prefix=f".{folder.name[:40]}."))
        try:
            checkpoint.save(monitor.model, temporary / NAMES[0])
            (temporary / NAMES[1]).write_bytes(safetensors.torch.save(tensors))
            described["files"] = {name: _sha256(temporary / name) for name in NAMES[:2]}
            text = json.dumps(described, indent=1, sort_keys=True, ensure_ascii=False)
            (temporary / NAMES[2]).write_text(text + "\n", encoding="utf-8")
            temporary.chmod(0o755 & ~umask())
            if folder.exists():
                old = temporary.with_name(temporary.name + ".old")
                folder.rename(old)
                temporary.rename(folder)
                shutil.rmtree(old)
            else:
                temporary.rename(folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        found, do = error.strerror or str(error), "choose another place or make room"
        raise InputError(f"{folder} to be writable", found=found, do=do) from error


def check_folder(folder: Path, *, force: bool) -> None:
    """Find out before the work starts whether a monitor can be written there.

    Raises:
        InputError: a file, a folder of something else, a monitor (without ``force``), or no folder to put it in.
    """
    if folder.exists():
        monitor = folder.is_dir() and (folder / NAMES[2]).is_file()
        strange = folder.is_dir() and {entry.name for entry in folder.iterdir()} - set(NAMES)
        if not folder.is_dir() or strange or (any(folder.iterdir()) and not monitor):
            raise InputError(f"no other files at {folder}", found="something else", do="choose another name")
        if monitor and not force:
            raise InputError(
                f"no monitor at {folder}", found="one that exists", do="choose another name or add --force"
            )
    if not folder.absolute().parent.is_dir() or not os.access(folder.absolute().parent, os.W_OK):
        found, do = "no such folder, or no permission", "make it, or choose another place"
        raise InputError(f"a folder to write to at {folder.absolute().parent}", found=found, do=do)


def load_monitor(path: Path | str, *, architecture: str | None = None) -> Monitor:
    """Read a monitor and check that it still scores as it did.

    Args:
        path: the folder.
        architecture: ``package.module:factory`` of a model that is not of our zoo or torchvision.

    Raises:
        InputError: no monitor, a changed or truncated one, or one that scores otherwise here.
    """
    folder = Path(path)
    if not (folder / NAMES[2]).is_file():
        do = "make one with defense fit"
        raise InputError(f"a monitor (a folder with {NAMES[2]}) at {folder}", found="none", do=do)
    with understood(f"a usable monitor at {folder}", "use a backup copy, or fit it again"):
        described = json.loads(read_bytes(folder / NAMES[2], "a monitor's description", limit=_LIMIT))
        if described.get("format") != FORMAT:
            found, do = repr(described.get("format")), "use the version of deepseal that wrote it"
            raise InputError(f"a monitor of format {FORMAT}", found=found, do=do)
        for name in NAMES[:2]:
            if described["files"][name] != _sha256(folder / name):
                raise InputError(f"an intact {folder / name}", found="a changed one", do="use a backup copy")
        model = checkpoint.load(folder / NAMES[0], architecture=architecture)
        tensors = safetensors.torch.load(read_bytes(folder / NAMES[1], "a monitor's tensors"))
        monitor = _built(model, described, tensors)
        if monitor.calibration is not None:
            _check_golden(monitor, described["golden"], folder)
        return monitor


def describe(monitor: Monitor) -> dict[str, Any]:
    """What a monitor is, as plain values: for its file and for records."""
    known = monitor.calibration
    return {
        "members": [
            {
                "detector": member.detector.name,
                "title": member.title,
                "params": member.detector.as_dict(),
                "access": member.detector.needs.access,
                "passes": member.detector.needs.passes,
                "differentiable": member.detector.needs.differentiable,
            }
            for member in monitor.members
        ],
        "passes": monitor.passes,
        "notes": list(monitor.notes),
        "splits": dict(monitor.splits),
        "calibration": None
        if known is None
        else {
            "false_positive": known.false_positive,
            "confidence": known.confidence,
            "per_class": known.per_class,
            "threshold": monitor.threshold().as_dict(),
        },
    }


def _content(monitor: Monitor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    tensors = {f"seen/{use}": hashes for use, hashes in monitor.seen.items()}
    for index, member in enumerate(monitor.members):
        tensors.update({f"member/{index}/{name}": value for name, value in member.state.items()})
        if member.tail is not None:
            tensors[f"tail/{index}"] = member.tail
    described = {"format": FORMAT, "spec": monitor.model.spec.as_dict(), **describe(monitor)}
    if monitor.calibration is not None:
        for name in ("scores", "surprises", "predicted"):
            tensors[f"calibration/{name}"] = getattr(monitor.calibration, name)
        described["golden"] = [float(value) for value in monitor.scores(_golden(monitor.model.spec)).total]
    return {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}, described


def _built(model: Classifier, described: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Monitor:
    members = []
    for index, entry in enumerate(described["members"]):
        prefix = f"member/{index}/"
        state = {name.removeprefix(prefix): value for name, value in tensors.items() if name.startswith(prefix)}
        detector = DETECTORS.build(entry["detector"], entry["params"])
        members.append(Member(detector, state, tensors.get(f"tail/{index}")))
    known, calibration = described["calibration"], None
    if known is not None:
        calibration = Calibration(
            scores=tensors["calibration/scores"],
            surprises=tensors["calibration/surprises"],
            predicted=tensors["calibration/predicted"],
            false_positive=float(known["false_positive"]),
            confidence=float(known["confidence"]),
            per_class=bool(known["per_class"]),
        )
    seen = {name.removeprefix("seen/"): value for name, value in tensors.items() if name.startswith("seen/")}
    notes, splits = tuple(map(str, described["notes"])), dict(described["splits"])
    return Monitor(model, tuple(members), notes, seen, splits, calibration)


def _golden(spec: InputSpec) -> Tensor:
    probe = spec.probe(_GOLDEN)
    assert isinstance(probe, Tensor)  # noqa: S101 - monitors take one tensor
    return probe


def _check_golden(monitor: Monitor, expected: list[float], folder: Path) -> None:
    found = monitor.scores(_golden(monitor.model.spec)).total
    wanted = torch.tensor(expected, dtype=torch.float64)
    if not torch.allclose(found, wanted, rtol=_TOLERANCE, atol=_TOLERANCE):
        off = float((found - wanted).abs().max())
        do = "use the versions that it was made with, or calibrate it again"
        raise InputError(f"the scores that {folder} was saved with", found=f"a difference of {off:.3g}", do=do)


def _sha256(path: Path) -> str:
    return hashlib.sha256(read_bytes(path, "a file of the monitor")).hexdigest()
