"""The steps of ``deepseal private compile`` and ``simulate``: library calls, written into a run's record."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from deepseal.adapter import Classifier, Dataset, checkpoint, load_data
from deepseal.errors import InputError
from deepseal.record import Run
from deepseal.secure_inference.compile import Program, Weights
from deepseal.secure_inference.compile.accuracy import Comparison, compare
from deepseal.secure_inference.compile.calibrate import CompileSettings
from deepseal.secure_inference.compile.compiler import compile_report
from deepseal.secure_inference.compile.simulate import decode_output, encode_input, simulate
from deepseal.statistics import Rate


def compile_program(
    run: Run, *, model: Classifier, dataset: Dataset, settings: CompileSettings, out: Path, force: bool
) -> Program:
    """Compile a model on the calibration split and write ``out/public`` and ``out/secret``."""
    check_free(out, force=force)
    compiled = compile_report(model, dataset.calibration, settings)
    program, weights = compiled.program, compiled.weights
    weights.save(out, force=force)
    checkpoint.save(model, out / "secret" / "model.safetensors", force=force)
    (out / "secret" / "model.safetensors").chmod(0o600)
    program.save(out, force=force)
    found = compare(program, weights, dataset.calibration, model)
    run.params.update(data=dataset.name, settings=settings.as_dict(), out=str(out))
    run.fingerprints.update(program=program.digest(), model=model.fingerprint(), **dataset.fingerprints())
    run.results.update(
        public=str(out / "public"),
        secret=str(out / "secret"),
        **{f"calibration_{name}": value for name, value in comparison(found).items()},
        and_gates=sum(layer.and_gates for layer in compiled.layers),
        products=sum(layer.products for layer in compiled.layers),
        ring_bits=max(layer.bits for layer in compiled.layers),
        layers=[layer.as_dict() for layer in compiled.layers],
    )
    if settings.accept_overflow:
        run.notes.append("rings are from the calibration set: rarer inputs may wrap around and give wrong answers")
    return program


def simulate_program(run: Run, *, folder: Path, data: str, limit: int | None, arch: str | None) -> None:
    """Accuracy of a compiled program on the first ``limit`` test samples, beside the real-valued model."""
    program = Program.load(folder)
    weights = Weights.load(folder, program)
    model, missing = _original(folder / "secret" / "model.safetensors", arch)
    dataset = load_data(data)
    if program.sample_shape != dataset.spec.shape:
        found = str(dataset.spec.shape)
        expected = f"data of shape {program.sample_shape}"
        raise InputError(expected, found=found, do="pass the data that the program was compiled for")
    test = dataset.test
    if limit is not None and limit < len(test):
        test = type(test)(test.x[:limit], test.y[:limit])
    found_on = compare(program, weights, test, model)
    run.params.update(program=str(folder), data=dataset.name, limit=limit)
    run.fingerprints.update(program=program.digest(), **dataset.fingerprints())
    run.results.update(comparison(found_on))
    if model is None:
        run.notes.append(f"agreement_with_float is missing: {missing}")


def _original(path: Path, arch: str | None) -> tuple[Classifier | None, str]:
    """The model that was compiled, if its code may be run here; else why not."""
    if not path.is_file():
        return None, f"there is no {path}"
    try:
        return checkpoint.load(path, architecture=arch), ""
    except InputError as error:
        if arch is not None:
            raise
        return None, str(error)


def comparison(found: Comparison) -> dict[str, Any]:
    """Plain values of a comparison."""
    result: dict[str, Any] = {"n": found.accuracy.n, "clamped_values": found.clamped}
    parts = (("accuracy", found.accuracy), ("float_accuracy", found.float_accuracy),
             ("agreement_with_float", found.agreement))  # fmt: skip
    for name, value in parts:
        result.update(_rate(name, value))
    if found.difference is not None:
        result.update(
            difference=found.difference.value,
            difference_interval=[found.difference.low, found.difference.high],
            gained=found.difference.gained,
            lost=found.difference.lost,
        )
    return result


def _rate(name: str, value: Rate | None) -> dict[str, Any]:
    if value is None:
        return {name: None}
    return {name: value.value, f"{name}_interval": [value.low, value.high]}


def check_free(out: Path, *, force: bool) -> None:
    """Refuse a folder that holds a program already, before the work starts."""
    if out.exists() and not out.is_dir():
        raise InputError(f"a folder at {out}", found="a file", do="choose another name")
    if not force and any((out / part).exists() for part in ("public/program.json", "secret/weights.npz")):
        raise InputError(f"no program in {out}", found="one", do="choose another folder or add --force")


@dataclasses.dataclass(frozen=True)
class Clear:
    """What one input gives without any protocol.

    Attributes:
        program: the label, or the logits, of the compiled program; bit for bit what the protocol computes.
        label: the label of that answer.
        model: the label of the model that was compiled; None where it is not there.
    """

    program: int | list[float]
    label: int
    model: int | None


def in_the_clear(folder: Path, x: NDArray[np.float32], *, arch: str | None = None) -> Clear:
    """A program's own answer to one input of its shape, and that of the model behind it.

    Raises:
        InputError: no program there, or another shape.
    """
    program = Program.load(folder)
    weights = Weights.load(folder, program)
    answer = decode_output(program, simulate(program, weights, encode_input(program, x[None]).values))[0]
    model, _ = _original(folder / "secret" / "model.safetensors", arch)
    real = None if model is None else int(model.predict(torch.from_numpy(x[None]))[0])
    if program.permits == "label":
        return Clear(int(answer), int(answer), real)
    return Clear([float(value) for value in answer], int(answer.argmax()), real)
