"""What to ask of a model at a server: its description there, matched with what we know of it."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote, urlsplit

import torch
from torch import Tensor

from deepseal.adapter.access import Output
from deepseal.adapter.http_client import Exchange, HttpClient
from deepseal.adapter.inference_protocol import (
    FLOATS,
    INPUT,
    INTEGERS,
    TensorInfo,
    encode,
    listed,
    parse,
    shown,
    tensor_info,
)
from deepseal.adapter.inputs import Batch, Inputs, each
from deepseal.adapter.spec import Field, InputSpec
from deepseal.errors import InputError, ProtocolError, TransportError

OUTPUTS: tuple[Output, ...] = ("labels", "probabilities", "logits")
_BODY = 1 << 24  # bytes of a request, about
_NUMBER = 24  # bytes of a number in JSON, about


@dataclasses.dataclass(frozen=True)
class RemoteInput:
    """One tensor that the server takes: its name and datatype there; samples are sent as they are, or ``flat``."""

    name: str
    datatype: str
    flat: bool = False

    def encoded(self, values: Tensor) -> dict[str, Any]:
        """A batch of samples as the protocol has it.

        Raises:
            InputError: values that the datatype cannot hold.
        """
        wide = torch.float64 if values.is_floating_point() else torch.int64
        array = values.detach().to("cpu", wide).numpy()
        return encode(self.name, array.reshape(len(array), -1) if self.flat else array, self.datatype)


@dataclasses.dataclass(frozen=True)
class RemoteModel:
    """What is asked for at the server.

    Attributes:
        name: the model's name there.
        inputs: its input tensors by the names of the spec's fields.
        output_name: the output tensor to ask for; None for the only one.
        batch: most samples in a request.
    """

    name: str
    inputs: Mapping[str, RemoteInput]
    output_name: str | None
    batch: int

    @property
    def path(self) -> str:
        """Where the server has it."""
        return f"/v2/models/{quote(self.name, safe='')}"

    def request(self, x: Batch) -> dict[str, Any]:
        """The question for the answers to ``x``; its id is a digest of the values.

        Raises:
            InputError: values that the server's datatypes cannot hold.
        """
        tensors = x.tensors if isinstance(x, Inputs) else {INPUT: x}
        inputs = [entry.encoded(tensors[field]) for field, entry in self.inputs.items()]
        digest = hashlib.sha256()
        for tensor in each(x):
            digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
        wanted = {} if self.output_name is None else {"outputs": [{"name": self.output_name}]}
        return {"id": digest.hexdigest()[:16], "inputs": inputs, **wanted}

    def fitting(self, x: Batch) -> int:
        """How many of these samples go into one request."""
        numbers = sum(max(1, tensor[0].numel()) for tensor in each(x))
        return max(1, min(self.batch, _BODY // (_NUMBER * numbers)))


def model_address(url: str, name: str | None = None) -> tuple[str, str]:
    """The server and the model's name in an address such as ``http://127.0.0.1:8000/v2/models/NAME``.

    Args:
        url: the model's address, or the server's.
        name: the model's name, where the address does not say it.

    Raises:
        InputError: an address that names no model, or another one than ``name``.
    """
    expected, do = "the URL of a model", "write http://127.0.0.1:8000/v2/models/NAME"
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InputError(expected, found="no URL", do=do) from error
    path = parts.path
    stated = re.fullmatch(r"(.*)/v2/models/([^/?#]+)(/infer)?/?", url)
    if "/v2/models" in path and stated is None:
        found = "a query or fragment" if parts.query or parts.fragment else f"the path {shown(path)}"
        raise InputError(expected, found=found, do=do)
    if stated is None:
        if not name:
            found = f"the path {shown(path)}" if path.strip("/") else "the server's alone"
            if parts.scheme not in ("http", "https"):
                raise InputError(expected, found=f"{parts.scheme!r} instead of http or https", do=do)
            own = f"write {parts.scheme}://{parts.netloc}/v2/models/NAME"
            raise InputError(expected, found=found, do=f"{own}, or give the model's name (--name)")
        return url, name
    if name not in (None, unquote(stated[2])):
        do = "leave out the name (--name), or correct one of them"
        raise InputError(f"the model {name!r} in the URL", found=shown(unquote(stated[2])), do=do)
    return stated[1], unquote(stated[2])


def choose(
    client: HttpClient, name: str, spec: InputSpec, output: Output | None, output_name: str | None, batch: int
) -> tuple[RemoteModel, Output]:
    """What to ask for, and what the answers are; see ``RemoteOracle.connect``.

    Raises:
        TransportError: no server there, or it does not become ready.
        ProtocolError: it does not speak the protocol.
        InputError: there is no such model, or it does not take such inputs.
    """
    described, outputs = _described(client, name)
    inputs = _inputs(described, spec)
    chosen, meaning = _output(outputs, output, output_name, spec)
    one_by_one = any(entry.shape[0] == 1 for entry in described)
    return RemoteModel(name, inputs, chosen, 1 if one_by_one else batch), meaning


def _described(client: HttpClient, name: str) -> tuple[list[TensorInfo], list[TensorInfo]]:
    """The inputs and outputs that a server which is ready names for a model."""
    body_of(client, client.send("GET", "/v2/health/ready", also_retry={400, 500}), "a ready server")
    body = body_of(client, client.send("GET", f"/v2/models/{quote(name, safe='')}"), f"a model {name!r}")
    try:
        description = parse(body, "the model's description")
        inputs, outputs = (listed(description, part, "the description") for part in ("inputs", "outputs"))
        return [tensor_info(item, "an input") for item in inputs], [tensor_info(item, "an output") for item in outputs]
    except InputError as error:
        raise odd(client, error) from error


def body_of(client: HttpClient, exchange: Exchange, expected: str) -> bytes:
    """The body of a successful reply.

    Raises:
        TransportError: none came, or it is no success.
    """
    if exchange.status == 200:
        return exchange.body
    tried = f" ({exchange.attempts} attempts)" if exchange.attempts > 1 else ""
    if exchange.status is None:
        found, do = str(exchange.failure), "check the address, and that the server runs"
    elif 300 <= exchange.status < 400:
        found, do = f"HTTP {exchange.status}, a redirect, which is not followed", "pass the final address"
    else:
        found, do = f"HTTP {exchange.status}{_reason(exchange.body)}", "check the server, the model's name and --batch"
    raise TransportError(f"{expected} at {client.url}", found=found + tried, do=do)


def _reason(body: bytes) -> str:
    try:
        error = parse(body, "an error").get("error")
    except InputError:
        return ""
    return f" {shown(error)}" if isinstance(error, str) else ""


def odd(client: HttpClient, error: InputError) -> ProtocolError:
    """What is wrong with a reply, and where it came from."""
    return ProtocolError(f"{error.expected} from {client.url}", found=error.found, do=error.do)


def _inputs(described: list[TensorInfo], spec: InputSpec) -> dict[str, RemoteInput]:
    """Which of the server's tensors each of the spec's fields goes to: by name, where there are several."""
    fields, entries = spec.named_fields(INPUT), {entry.name: entry for entry in described}
    if not entries:
        entries = {name: TensorInfo(name, datatype_of(field), (-1, *field.shape)) for name, field in fields.items()}
    if len(fields) == len(entries) == 1:
        entries = dict(zip(fields, entries.values(), strict=True))
    if entries.keys() != fields.keys() or len(described) > len(entries):
        wanted = f"inputs called {', '.join(fields)}" if spec.fields else "one input"
        names = shown([entry.name for entry in described])
        raise InputError(f"a model with {wanted}", found=names, do="state what it takes, or serve one that takes this")
    return {name: _fitted(entries[name], field) for name, field in fields.items()}


def datatype_of(field: Field) -> str:
    """The protocol's datatype for a field."""
    return "INT64" if field.integer else "FP32"


def _output(
    tensors: list[TensorInfo], output: Output | None, name: str | None, spec: InputSpec
) -> tuple[str | None, Output]:
    """The name of the output tensor to ask for, and what it means."""
    names = [tensor.name for tensor in tensors]
    known = [option for option in OUTPUTS if option in names]
    chosen = [tensor for tensor in tensors if name in (None, tensor.name)]
    if output is None and not known and len(chosen) == 1:
        output = "logits" if spec.num_classes == 0 else "labels" if _is_label(chosen[0]) else None
    if output is None:
        found = [option for option in OUTPUTS if option == name] if name else known
        if len(found) != 1:
            raise InputError("what the answers are", found=f"outputs {shown(names)}", do=f"declare one of {OUTPUTS}")
        output = found[0]
    if output not in OUTPUTS:
        raise InputError(f"one of {OUTPUTS} as the output", found=shown(output), do="correct it")
    if output != "logits":
        spec.require_classes()
    if name is not None:
        if names and name not in names:
            raise InputError(f"an output {name!r}", found=f"outputs {shown(names)}", do="use one of these")
        return name, output
    if len(names) <= 1:
        return (names[0] if names else None), output
    if output in names:
        return output, output
    raise InputError("the name of the output to use", found=f"outputs {shown(names)}", do="pass one of these")


def _is_label(tensor: TensorInfo) -> bool:
    """Whether it holds one whole number a sample."""
    return tensor.datatype in INTEGERS and math.prod(tensor.shape[1:]) == 1


def _fitted(entry: TensorInfo, field: Field) -> RemoteInput:
    """How to send a field to the server's tensor."""
    fitting = INTEGERS if field.integer else FLOATS
    if field.mask or (field.integer and field.bounds == (0.0, 1.0)):
        fitting = (*FLOATS, *INTEGERS, "BOOL")
    if entry.datatype not in fitting:
        expected = f"a model that takes {'whole' if field.integer else 'floating-point'} numbers in {entry.name!r}"
        raise InputError(expected, found=shown(entry.datatype), do="serve it so, or state what it takes")
    most, *row = entry.shape or (0,)
    alike = len(row) == len(field.shape) and all(-1 in (a, b) or a == b for a, b in zip(row, field.shape, strict=True))
    flat = -1 not in field.shape and tuple(row) == (math.prod(field.shape),)
    if most not in (-1, 1) or not (alike or flat):
        expected = f"a model that takes (N, {', '.join(map(str, field.shape))}) in {entry.name!r}"
        raise InputError(expected, found=f"shape {list(entry.shape)}", do="pass data of the model's shape")
    return RemoteInput(entry.name, entry.datatype, flat=not alike)
