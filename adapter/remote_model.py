"""What to ask of a model at a server: its description there, matched with what we know of it."""

from __future__ import annotations

import dataclasses
import math
import re
from urllib.parse import quote, unquote, urlsplit

from deepseal.adapter.access import Output
from deepseal.adapter.http_client import Exchange, HttpClient
from deepseal.adapter.inference_protocol import FLOATS, INTEGERS, TensorInfo, listed, parse, shown, tensor_info
from deepseal.adapter.spec import InputSpec
from deepseal.errors import InputError, ProtocolError, TransportError

OUTPUTS: tuple[Output, ...] = ("labels", "probabilities", "logits")
_BODY = 1 << 24  # bytes of a request, about
_NUMBER = 24  # bytes of a number in JSON, about


@dataclasses.dataclass(frozen=True)
class RemoteModel:
    """What is asked for at the server.

    Attributes:
        name: the model's name there.
        input_name: name of its input tensor.
        datatype: FP16, FP32 or FP64, of its input.
        row: shape in which one sample is sent.
        output_name: the output tensor to ask for; None for the only one.
        batch: most samples in a request.
    """

    name: str
    input_name: str
    datatype: str
    row: tuple[int, ...]
    output_name: str | None
    batch: int

    @property
    def path(self) -> str:
        """Where the server has it."""
        return f"/v2/models/{quote(self.name, safe='')}"


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
            raise InputError(expected, found=found, do=f"{do}, or give the model's name (--name)")
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
    inputs, outputs = _described(client, name)
    entry = _only(inputs) or TensorInfo("input", "FP32", (-1, *spec.shape))
    chosen, meaning = _output(outputs, output, output_name)
    row, most = _row(entry, spec)
    fits = max(1, _BODY // (_NUMBER * math.prod(row)))
    return RemoteModel(name, entry.name, entry.datatype, row, chosen, min(batch, most, fits)), meaning


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


def _only(tensors: list[TensorInfo]) -> TensorInfo | None:
    if len(tensors) > 1:
        names = shown([tensor.name for tensor in tensors])
        raise InputError("a model with one input", found=names, do="serve one that takes one tensor")
    return tensors[0] if tensors else None


def _output(tensors: list[TensorInfo], output: Output | None, name: str | None) -> tuple[str | None, Output]:
    """The name of the output tensor to ask for, and what it means."""
    names = [tensor.name for tensor in tensors]
    known = [option for option in OUTPUTS if option in names]
    chosen = [tensor for tensor in tensors if name in (None, tensor.name)]
    if output is None and not known and len(chosen) == 1 and _is_label(chosen[0]):
        output = "labels"
    if output is None:
        found = [option for option in OUTPUTS if option == name] if name else known
        if len(found) != 1:
            raise InputError("what the answers are", found=f"outputs {shown(names)}", do=f"declare one of {OUTPUTS}")
        output = found[0]
    if output not in OUTPUTS:
        raise InputError(f"one of {OUTPUTS} as the output", found=shown(output), do="correct it")
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


def _row(entry: TensorInfo, spec: InputSpec) -> tuple[tuple[int, ...], int]:
    """The shape in which to send one sample, and how many a request may hold."""
    if entry.datatype not in FLOATS:
        raise InputError("a model that takes floating-point numbers", found=shown(entry.datatype), do="serve it so")
    most, *row = entry.shape or (0,)
    matches = len(row) == len(spec.shape) and all(a in (-1, b) for a, b in zip(row, spec.shape, strict=True))
    flat = (math.prod(spec.shape),)
    if most not in (-1, 1) or not (matches or tuple(row) == flat):
        expected = f"a model that takes (N, {', '.join(map(str, spec.shape))})"
        raise InputError(expected, found=f"shape {list(entry.shape)}", do="pass data of the model's shape")
    return (spec.shape if matches else flat), (1 if most == 1 else 2**31)
