"""The secret half of a compiled model: the integers of its linear layers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from deepseal.errors import InputError
from deepseal.files import read_bytes, write_atomically
from deepseal.secure_inference.compile.arrays import LinearWeights, pack_arrays, read_archive, unpack_arrays
from deepseal.secure_inference.compile.program import Linear, Program, _make_folder

_LARGEST = 1 << 32  # bytes of a weights file


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Weights:
    """Weights and biases of the secret linear steps of one program.

    Attributes:
        program: digest of the program that they belong to.
        layers: by index of the step.
    """

    program: str
    layers: Mapping[int, LinearWeights]

    def __repr__(self) -> str:
        return f"Weights({len(self.layers)} layers of program {self.program[:12]})"

    def check(self, program: Program) -> None:
        """Refuse weights that do not fit the program.

        Raises:
            InputError: of another program, or shapes or values that do not fit.
        """
        if self.program != program.digest():
            found = f"weights of program {self.program[:12]}"
            do = "compile the model again and hand out the new program/public"
            raise InputError(f"weights of program {program.digest()[:12]}", found=found, do=do)
        if tuple(sorted(self.layers)) != program.secret_steps:
            found = f"steps {sorted(self.layers)}"
            raise InputError(f"weights of steps {list(program.secret_steps)}", found=found, do="compile again")
        for index, weights in self.layers.items():
            check_layer(program, index, weights)

    def save(self, folder: Path, *, force: bool = False) -> None:
        """Write ``secret/weights.npz``, which only its owner can read."""
        place = folder / "secret"
        _make_folder(place, 0o700)
        bound = np.frombuffer(bytes.fromhex(self.program), dtype=np.uint8)
        write_atomically(place / "weights.npz", pack_arrays(self.layers, program=bound), force=force, mode=0o600)

    @classmethod
    def load(cls, folder: Path, program: Program) -> Weights:
        """Read what ``save`` wrote, and check that it belongs to the program.

        Raises:
            InputError: nothing usable there, or another program's weights.
        """
        place = folder / "secret" if (folder / "secret").is_dir() else folder
        data = read_bytes(place / "weights.npz", "weights", limit=_LARGEST)
        bound = read_archive(data).get("program")
        if bound is None or bound.dtype != np.uint8 or bound.shape != (32,):
            raise InputError("weights that name their program", found="none", do="compile the model again")
        weights = cls(bound.tobytes().hex(), unpack_arrays(data))
        weights.check(program)
        return weights


def check_layer(program: Program, index: int, weights: LinearWeights) -> None:
    """Refuse integers that do not fit the format of their step.

    Raises:
        InputError: another shape, or a weight outside its format.
    """
    step = program.steps[index]
    if not isinstance(step, Linear) or weights.weight.shape != step.weight_shape:
        found = f"shape {weights.weight.shape} for step {index}"
        raise InputError("weights of the program's shapes", found=found, do="compile the model again")
    if step.mask is not None and bool(weights.weight[~step.mask.array].any()):
        found = f"others in step {index} ({step.name})"
        raise InputError("weights that are 0 where the program's public map says so", found=found, do="compile again")
    low, high = int(weights.weight.min(initial=0)), int(weights.weight.max(initial=0))
    if low < step.weight.low or high > step.weight.high:
        found = f"weights outside it in step {index} ({step.name})"
        expected = f"weights of {step.weight.bits} bits"
        raise InputError(expected, found=found, do="compile the model again")


def layer_weights(program: Program, weights: Weights | None, index: int) -> LinearWeights:
    """The integers of a linear step, public or secret.

    Raises:
        InputError: a secret step without weights.
    """
    if index in program.constants:
        return program.constants[index]
    if weights is None:
        raise InputError("the secret weights", found="the public program only", do="run this on the server's side")
    return weights.layers[index]
