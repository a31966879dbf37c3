"""The program: a network in integers, public, as data. Weights are apart, in ``weights.py``.

A program is a list of wires (tensors of integers) and of steps that fill them in order. A ``Linear`` step is W x + b in
the ring of integers modulo 2^l; a ``Circuit`` step is one small netlist for every element of its target. All integers
are exact, so whoever runs a program gets the same answer bit for bit.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import InputError, understood
from deepseal.files import read_bytes, write_atomically
from deepseal.secure_inference.compile.arrays import (
    LinearWeights,
    PublicArray,
    pack_arrays,
    pack_public,
    unpack_arrays,
    unpack_public,
)
from deepseal.secure_inference.compile.windows import Gather, View, Window, view_from_dict, view_index

FORMAT = 1
_LARGEST = 1 << 28  # bytes of a program file
Ints: TypeAlias = NDArray[np.int64]
Option: TypeAlias = "int | bool | str"
NO_CONSTANTS: Mapping[int, LinearWeights] = MappingProxyType({})


@dataclasses.dataclass(frozen=True)
class Number:
    """How an integer stands for a real number: v means v 2^-fraction.

    Attributes:
        bits: width of the word, 1 … 64.
        signed: two's complement, else unsigned.
        fraction: position of the binary point; may be negative or larger than ``bits``.
    """

    bits: int
    signed: bool
    fraction: int

    def __post_init__(self) -> None:
        if not 1 <= self.bits <= 64 or abs(self.fraction) > 256:
            found = f"{self.bits} bits, {self.fraction} of them behind the point"
            raise InputError("a number of 1 to 64 bits, its point within 256 bits", found=found, do="change the format")

    @property
    def low(self) -> int:
        """Smallest integer."""
        return -(1 << (self.bits - 1)) if self.signed else 0

    @property
    def high(self) -> int:
        """Largest integer."""
        return (1 << (self.bits - int(self.signed))) - 1


@dataclasses.dataclass(frozen=True)
class Wire:
    """A tensor of integers.

    Attributes:
        shape: of one sample, without the batch.
        number: format of each element.
        kind: ``activation``: words inside circuits; ``accumulator``: values modulo 2^bits that the parties hold as
            additive shares, read as signed numbers.
    """

    shape: tuple[int, ...]
    number: Number
    kind: Literal["activation", "accumulator"]

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Connections:
    """Which source elements a linear step multiplies with which weights, sorted by source, then target, then weight.

    Attributes:
        starts: (source elements + 1,); entries starts[i] … starts[i+1] - 1 belong to source element i.
        outputs: (connections,) flat index of the target element.
        weights: (connections,) flat index of the weight.
    """

    starts: Ints
    outputs: Ints
    weights: Ints


def _chosen(met: Connections, kept: NDArray[np.bool_]) -> Connections:
    before = np.zeros(len(kept) + 1, dtype=np.int64)
    np.cumsum(kept, out=before[1:])
    return Connections(before[met.starts], met.outputs[kept], met.weights[kept])


@dataclasses.dataclass(frozen=True)
class Linear:
    """target = W source + b modulo 2^l, with l the bits of the target, an accumulator.

    ``op`` with its settings has the meaning of torch's: ``linear`` works on the last dimension; ``conv1d`` and
    ``conv2d`` take a source of shape (channels, …). fraction(target) = fraction(source) + weight.fraction; the bias has
    the target's fraction and one integer for each output channel (``linear``: for each output feature).

    Attributes:
        source: wire.
        target: wire.
        op: ``linear``, ``conv1d`` or ``conv2d``.
        weight_shape: as in torch.
        weight: format of the weights.
        stride: one number for each spatial dimension; likewise ``padding`` and ``dilation``.
        groups: as in torch.
        public: the weights are public constants (average pooling) and stored in the program.
        window: the tensor that the step works on, as a view of the source; None: the source as it is.
        name: of the layer in the model, for messages.
        mask: bool of ``weight_shape``: a public map of the weights that may be other than 0; None: all may.
    """

    source: int
    target: int
    op: Literal["linear", "conv1d", "conv2d"]
    weight_shape: tuple[int, ...]
    weight: Number
    stride: tuple[int, ...] = ()
    padding: tuple[int, ...] = ()
    dilation: tuple[int, ...] = ()
    groups: int = 1
    public: bool = False
    window: View | None = None
    name: str = ""
    mask: PublicArray | None = None

    @property
    def spatial(self) -> int:
        """Number of spatial dimensions."""
        return {"linear": 0, "conv1d": 1, "conv2d": 2}[self.op]

    def input_shape(self, program: Program) -> tuple[int, ...]:
        """Shape of the tensor that the step works on."""
        return program.wires[self.source].shape if self.window is None else self.window.shape

    def target_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Shape of the result for an input of that shape."""
        if self.op == "linear":
            return (*shape[:-1], self.weight_shape[0])
        kernel = self.weight_shape[2:]
        sizes = zip(shape[1:], kernel, self.stride, self.padding, self.dilation, strict=True)
        return (self.weight_shape[0], *((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in sizes))

    def channel_of(self, shape: tuple[int, ...]) -> Ints:
        """(target elements,): index of the bias of each target element; ``shape`` is the target's."""
        axis = len(shape) - 1 if self.op == "linear" else 0
        sizes = [-1 if i == axis else 1 for i in range(len(shape))]
        return np.broadcast_to(np.arange(shape[axis]).reshape(sizes), shape).reshape(-1).astype(np.int64)

    def connections(self, program: Program) -> Connections:
        """The multiplications; those with padding are left out.

        In a program with masks also those outside the mask, and those whose result nobody reads (``Program.live``).
        """
        live = program.live
        if live is None:
            return self._every_connection(program)
        met = self._masked_connections(program)
        return _chosen(met, live[self.target][met.outputs])

    def _masked_connections(self, program: Program) -> Connections:
        every = self._every_connection(program)
        return every if self.mask is None else _chosen(every, self.mask.array.reshape(-1)[every.weights])

    def _every_connection(self, program: Program) -> Connections:
        size = program.wires[self.source].size
        shape = self.input_shape(program)
        if self.op == "linear" and self.window is None and len(shape) == 1:
            out = self.weight_shape[0]
            weights = np.arange(out * size, dtype=np.int64).reshape(out, size).T.reshape(-1)
            return Connections(np.arange(size + 1, dtype=np.int64) * out, np.tile(np.arange(out), size), weights)
        index = view_index(self.window, size)
        sources, outputs, weights = (part.reshape(-1) for part in self._triples(index.reshape(shape)))
        real = sources >= 0
        if not real.all():
            sources, outputs, weights = sources[real], outputs[real], weights[real]
        order = np.argsort(sources, kind="stable")
        starts = np.zeros(size + 1, dtype=np.int64)
        np.cumsum(np.bincount(sources, minlength=size), out=starts[1:])
        return Connections(starts, outputs[order], weights[order])

    def _triples(self, index: Ints) -> tuple[Ints, Ints, Ints]:
        """Source element, target element and weight of each multiplication, by target and weight; padding is -1."""
        shape = self.target_shape(index.shape)
        outputs = np.arange(math.prod(shape), dtype=np.int64)
        if self.op == "linear":
            out, size = self.weight_shape
            rows = index.reshape(-1, 1, size)
            wide = (len(rows), out, size)
            weights = np.arange(out * size, dtype=np.int64).reshape(1, out, size)
            return (
                np.broadcast_to(rows, wide),
                np.broadcast_to(outputs.reshape(-1, out, 1), wide),
                np.broadcast_to(weights, wide),
            )
        channels, per_group = self.weight_shape[0], self.weight_shape[1]
        padded = np.pad(index, [(0, 0), *((p, p) for p in self.padding)], constant_values=-1)
        kernel = self.weight_shape[2:]
        own_group = np.arange(channels) // (channels // self.groups)
        reads = own_group[:, None] * per_group + np.arange(per_group)  # (channels, per_group) input channels
        sources = []
        for place in np.ndindex(*kernel):
            window = tuple(
                slice(k * d, k * d + (n - 1) * s + 1, s)
                for k, d, n, s in zip(place, self.dilation, shape[1:], self.stride, strict=True)
            )
            channels_too = (slice(None), *window)
            sources.append(padded[channels_too].reshape(len(padded), -1)[reads])
        area = math.prod(kernel)
        stacked = np.stack(sources, axis=-1).swapaxes(1, 2)  # (channels, pixels, per_group, kernel)
        kernels = np.arange(channels * per_group * area, dtype=np.int64).reshape(channels, 1, per_group, area)
        placed = outputs.reshape(channels, -1, 1, 1)
        return stacked, np.broadcast_to(placed, stacked.shape), np.broadcast_to(kernels, stacked.shape)


@dataclasses.dataclass(frozen=True)
class Operand:
    """One input word of a circuit: which element of a wire each lane reads.

    Attributes:
        source: wire.
        window: view of the source, flattened: lane j reads element index(program)[j]; None: lane j reads element j.
            -1 is padding: the lowest value for the gadget ``max``, 0 elsewhere.
    """

    source: int
    window: View | None = None

    def index(self, program: Program) -> Ints:
        """(lanes,) element of the source for each lane, -1 for padding."""
        return view_index(self.window, program.wires[self.source].size)


@dataclasses.dataclass(frozen=True)
class Circuit:
    """One netlist on as many lanes as the target has elements.

    Attributes:
        operands: the input words, in order.
        target: wire, an activation.
        gadget: name in ``gadgets.GADGETS``.
        options: of the gadget.
        name: of the layer in the model, for messages.
    """

    operands: tuple[Operand, ...]
    target: int
    gadget: str
    options: Mapping[str, Option] = dataclasses.field(default_factory=dict)
    name: str = ""

    def numbers(self, program: Program) -> tuple[Number, ...]:
        """Formats of the operands, then of the target; an accumulator is a signed word."""
        formats = [program.wires[wire].number for wire in (*(o.source for o in self.operands), self.target)]
        return tuple(formats)


Step: TypeAlias = "Linear | Circuit"


@dataclasses.dataclass(frozen=True)
class Encoding:
    """How the client turns a sample into the integers of the input wire.

    v = ((x - mean) / std) / unit, clamped to ``bounds`` in x first, then round(v 2^fraction), clamped to the format.
    The unit is a factor that the first layer's weights carry, so that for instance images of 255 grey levels are exact.
    With a projection P, the normalised sample z = (x - mean) / std is replaced by P z before the division by the unit.

    Attributes:
        bounds: smallest and largest value of x.
        mean: per channel, or None; likewise ``std``.
        unit: real value of the integer 2^fraction.
        low: smallest integer that this gives; the rings hold for integers from there to ``high``. None: the format's.
        high: largest integer.
        projection: float64 (columns, *shape of a sample), public; None: the input wire has the sample's shape.
    """

    bounds: tuple[float, float]
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    unit: float = 1.0
    low: int | None = None
    high: int | None = None
    projection: PublicArray | None = None


@dataclasses.dataclass(frozen=True)
class Program:
    """A network in integers; everything in it is public.

    Attributes:
        wires: the tensors.
        steps: in order; each reads wires that are there.
        input: the wire that the client owns, an activation.
        output: what the client reads: the label (gadget ``argmax``), or an accumulator or activation.
        permits: ``label`` or ``logits``.
        encoding: of the input.
        name: for people.
        versions: of DeepSeal and of this format.
        constants: weights of the public linear steps, by index of the step.
        labels: number of classes.

    Raises:
        InputError: parts that do not fit together.
    """

    wires: tuple[Wire, ...]
    steps: tuple[Step, ...]
    input: int
    output: int
    permits: Literal["label", "logits"] = "label"
    encoding: Encoding = Encoding((-math.inf, math.inf))
    name: str = ""
    versions: Mapping[str, str] = dataclasses.field(default_factory=dict)
    constants: Mapping[int, LinearWeights] = dataclasses.field(
        default_factory=lambda: NO_CONSTANTS, repr=False, compare=False
    )
    labels: int = 0

    def __post_init__(self) -> None:
        from deepseal.secure_inference.compile.checks import check_program

        check_program(self)

    @property
    def input_range(self) -> tuple[int, int]:
        """Smallest and largest integer of the input wire."""
        number, low, high = self.wires[self.input].number, self.encoding.low, self.encoding.high
        return number.low if low is None else low, number.high if high is None else high

    @property
    def sample_shape(self) -> tuple[int, ...]:
        """Shape of one sample in data space, as the client has it."""
        projection = self.encoding.projection
        return self.wires[self.input].shape if projection is None else projection.array.shape[1:]

    @property
    def secret_steps(self) -> tuple[int, ...]:
        """Indices of the linear steps whose weights are secret."""
        return tuple(i for i, step in enumerate(self.steps) if isinstance(step, Linear) and not step.public)

    @property
    def public_arrays(self) -> dict[str, PublicArray]:
        """The input's projection (``projection``) and the masks of linear steps (``0.mask`` for step 0), where any."""
        found = {f"{i}.mask": step.mask for i, step in enumerate(self.steps) if isinstance(step, Linear) and step.mask}
        return {**found, **({"projection": self.encoding.projection} if self.encoding.projection else {})}

    @cached_property
    def live(self) -> Mapping[int, NDArray[np.bool_]] | None:
        """For each wire which of its elements the output depends on, flat; None in a program without masks."""
        if not any(isinstance(step, Linear) and step.mask is not None for step in self.steps):
            return None
        live = {i: np.zeros(wire.size, dtype=np.bool_) for i, wire in enumerate(self.wires)}
        live[self.output][:] = True
        for step in reversed(self.steps):
            wanted = live[step.target]
            if isinstance(step, Linear):
                met = step._masked_connections(self)
                sources = np.repeat(np.arange(len(met.starts) - 1), np.diff(met.starts))
                live[step.source][sources[wanted[met.outputs]]] = True
                continue
            for operand in step.operands:
                read = operand.index(self)[wanted]
                live[operand.source][read[read >= 0]] = True
        return live

    @property
    def disclosed(self) -> tuple[str, ...]:
        """What the program shows of the model and its training data, for people to accept before it is handed out."""
        parts = [
            f"the architecture ({len(self.steps)} steps) with the layers' names",
            "all number formats, ring widths (which follow from the weights' size) and the encoding of inputs",
        ]
        masked = sum(isinstance(step, Linear) and step.mask is not None for step in self.steps)
        if masked:
            parts.append(f"which weights are zero in {masked} of its layers")
        if self.encoding.projection is not None:
            parts.append(f"the space that {len(self.encoding.projection.array)} of the training samples span")
        return (*parts, f"the {'logits' if self.permits == 'logits' else 'label'} of each question")

    def as_dict(self) -> dict[str, Any]:
        """Plain values, ready for JSON; constants and public arrays only by their digest."""
        return {
            "format": FORMAT,
            "name": self.name,
            "versions": dict(self.versions),
            "permits": self.permits,
            "labels": self.labels,
            "encoding": _plain(self.encoding),
            "input": self.input,
            "output": self.output,
            "wires": [_plain(wire) for wire in self.wires],
            "steps": [{"step": type(step).__name__.lower(), **_plain(step)} for step in self.steps],
            "constants": {str(i): weights.digest() for i, weights in sorted(self.constants.items())},
        }

    def digest(self) -> str:
        """SHA-256 in hexadecimal of the canonical form: JSON with sorted keys and no spaces."""
        text = json.dumps(self.as_dict(), sort_keys=True, separators=(",", ":"), allow_nan=True)
        return hashlib.sha256(b"deepseal program\0" + text.encode()).hexdigest()

    def save(self, folder: Path, *, force: bool = False) -> None:
        """Write ``public/program.json`` and, where there are any, ``constants.npz`` and ``arrays.npz`` beside it."""
        place = folder / "public"
        _make_folder(place, 0o755)
        if self.constants:
            write_atomically(place / "constants.npz", pack_arrays(self.constants), force=force)
        if self.public_arrays:
            write_atomically(place / "arrays.npz", pack_public(self.public_arrays), force=force)
        text = json.dumps(self.as_dict(), indent=1, sort_keys=True)
        write_atomically(place / "program.json", text.encode() + b"\n", force=force)

    @classmethod
    def load(cls, folder: Path) -> Program:
        """Read what ``save`` wrote; ``folder`` is the program's or its ``public``.

        Raises:
            InputError: nothing usable there.
        """
        place = folder / "public" if (folder / "public").is_dir() else folder
        data = read_bytes(place / "program.json", "a program", limit=_LARGEST)
        with understood(f"a program in {place}", "compile the model again"):
            plain = json.loads(data)
            if plain["format"] != FORMAT:
                found, do = f"format {plain['format']}", "use the DeepSeal that wrote it, or compile again"
                raise InputError(f"a program of format {FORMAT} in {place}", found=found, do=do)
            constants: Mapping[int, LinearWeights] = NO_CONSTANTS
            if plain["constants"]:
                constants = unpack_arrays(read_bytes(place / "constants.npz", "public constants", limit=_LARGEST))
                if plain["constants"] != {str(i): weights.digest() for i, weights in sorted(constants.items())}:
                    do = "copy the whole folder public"
                    raise InputError("the constants of this program", found="others", do=do)
            arrays: Mapping[str, PublicArray] = {}
            if plain["encoding"].get("projection") or any(step.get("mask") for step in plain["steps"]):
                arrays = unpack_public(read_bytes(place / "arrays.npz", "public arrays", limit=_LARGEST))
            return _from_dict(plain, constants, arrays)


def _plain(value: Any) -> Any:
    if isinstance(value, PublicArray):
        return value.digest()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
        for name in ("mask", "projection"):  # absent rather than null: digests of programs without them stay
            if name in fields and fields[name] is None:
                del fields[name]
        return {"view": type(value).__name__.lower(), **fields} if isinstance(value, Window | Gather) else fields
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _from_dict(
    plain: Mapping[str, Any], constants: Mapping[int, LinearWeights], arrays: Mapping[str, PublicArray]
) -> Program:
    steps: list[Step] = []
    for number, entry in enumerate(plain["steps"]):
        values = {name: _tuple(value) for name, value in entry.items() if name != "step"}
        if entry["step"] == "linear":
            window = None if entry["window"] is None else view_from_dict(entry["window"])
            mask = _public(arrays, f"{number}.mask", entry.get("mask"))
            steps.append(Linear(**{**values, "weight": Number(**entry["weight"]), "window": window, "mask": mask}))
        else:
            operands = tuple(
                Operand(o["source"], None if o["window"] is None else view_from_dict(o["window"]))
                for o in entry["operands"]
            )
            steps.append(Circuit(**{**values, "operands": operands, "options": dict(entry["options"])}))
    wires = tuple(Wire(tuple(w["shape"]), Number(**w["number"]), w["kind"]) for w in plain["wires"])
    values = {name: _tuple(value) for name, value in plain["encoding"].items()}
    encoding = Encoding(**{**values, "projection": _public(arrays, "projection", values.get("projection"))})
    names = ("input", "output", "permits", "name", "versions", "labels")
    rest = {name: plain[name] for name in names}
    return Program(wires, tuple(steps), encoding=encoding, constants=constants, **rest)


def _public(arrays: Mapping[str, PublicArray], name: str, digest: str | None) -> PublicArray | None:
    if digest is None:
        return None
    if name not in arrays or arrays[name].digest() != digest:
        found = "another" if name in arrays else "none"
        raise InputError(f"the public array {name} of this program", found=found, do="copy the whole folder public")
    return arrays[name]


def _tuple(value: Any) -> Any:
    return tuple(_tuple(item) for item in value) if isinstance(value, list) else value


def _make_folder(place: Path, mode: int) -> None:
    try:
        place.mkdir(mode=mode, parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(f"a folder at {place}", found=str(error), do="choose another place") from error
