"""A model behind the Open Inference Protocol (KServe v2) as a black box: counted, logged queries over HTTP."""

from __future__ import annotations

import dataclasses
import datetime
import hashlib
import json
import math
import threading
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepseal.adapter.access import Output
from deepseal.adapter.http_client import Exchange, HttpClient
from deepseal.adapter.inference_protocol import FLOATS, TensorInfo, decode, encode, listed, parse, shown, tensor_info
from deepseal.adapter.spec import InputSpec
from deepseal.errors import InputError, ProtocolError, TransportError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

OUTPUTS: tuple[Output, ...] = ("labels", "probabilities", "logits")
BATCH = 64
_BODY = 1 << 24  # bytes of a request, about
_NUMBER = 24  # bytes of a number in JSON, about
_SUM = 1e-2  # how far from 1 probabilities may add up, for half precision and rounded replies


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


class RemoteOracle:
    """Answers queries through a server; satisfies ``BlackBox``, counts like ``Oracle``, and logs every request.

    Several threads may query at a time. Make one with ``connect``, and close it after use, or use it in a ``with``.

    Args:
        client: the way to the server.
        model: what to ask for there.
        spec: what the model takes.
        output: what the server answers with: (N, classes) logits or probabilities, or (N,) labels.
        max_queries: number of inputs that may be asked; None for no limit. An input counts once, however often its
            request was tried, and not at all if no connection was made.
    """

    __slots__ = ("_client", "_lock", "_log", "_model", "_queries", "max_queries", "output", "spec")

    def __init__(
        self,
        client: HttpClient,
        model: RemoteModel,
        spec: InputSpec,
        *,
        output: Output = "labels",
        max_queries: int | None = None,
    ) -> None:
        self._client, self._model, self.spec = client, model, spec
        self.output: Output = output
        self.max_queries = max_queries
        self._queries = 0
        self._log: list[dict[str, Any]] = []
        self._lock = threading.Lock()

    @classmethod
    def connect(
        cls,
        client: HttpClient,
        name: str,
        spec: InputSpec,
        *,
        output: Output | None = None,
        output_name: str | None = None,
        max_queries: int | None = None,
        batch: int = BATCH,
    ) -> Self:
        """The oracle of a model, once the server is ready and its description fits.

        Args:
            client: the way to the server.
            name: the model's name there.
            spec: what the model takes.
            output: what the server answers with; if None, the name of the output tensor says it.
            output_name: the output tensor, where there are several.
            max_queries: see the class.
            batch: most samples in a request; fewer where a request would become longer than about 16 MiB.

        Raises:
            TransportError: no server there, or it does not become ready.
            ProtocolError: it does not speak the protocol.
            InputError: there is no such model, or it does not take such inputs.
        """
        if not name or batch < 1:
            raise InputError(
                "the model's name and a batch of at least 1", found=f"{name!r}, {batch}", do="correct them"
            )
        try:
            model, meaning = _chosen(client, name, spec, output, output_name, batch)
        except BaseException:
            client.close()
            raise
        return cls(client, model, spec, output=meaning, max_queries=max_queries)

    @property
    def queries(self) -> int:
        """Inputs asked so far."""
        return self._queries

    @property
    def log(self) -> tuple[dict[str, Any], ...]:
        """One entry a request, in plain values for a record.

        ``time`` (UTC, when it began), ``inputs``, ``request_sha256``, ``reply_sha256`` and ``status`` (None without a
        reply), ``attempts``, ``milliseconds`` (all attempts and the waits between them), ``error`` (None if none).
        """
        with self._lock:
            return tuple(dict(entry) for entry in self._log)

    def as_dict(self) -> dict[str, Any]:
        """Where the answers are from, and the log: plain values for a record."""
        log = self.log
        return {
            "url": self._client.url,
            "name": self._model.name,
            "output": self.output,
            "queries": self.queries,
            "max_queries": self.max_queries,
            "retries": sum(entry["attempts"] - 1 for entry in log),
            "log": list(log),
        }

    @torch.no_grad()
    def query(self, x: Tensor) -> Tensor:
        """Answers on the CPU: (N, classes) float32 logits or probabilities, or (N,) int64 labels.

        Raises:
            InputError: inputs that do not fit the spec, or more queries than the budget has left (none is spent).
            TransportError: the server could not be reached, or refused.
            ProtocolError: a reply of another shape or number of rows, non-finite, or otherwise not what was declared.
        """
        self.spec.check(x)
        if len(x) == 0:
            labels = self.output == "labels"
            return torch.empty(0, dtype=torch.int64) if labels else torch.empty(0, self.spec.num_classes)
        with self._lock:
            if self.max_queries is not None and self._queries + len(x) > self.max_queries:
                raise InputError(
                    f"at most {self.max_queries - self._queries} more queries",
                    found=str(len(x)),
                    do="ask fewer inputs or raise the budget",
                )
            self._queries += len(x)
        spent, parts = 0, []
        try:
            for part in x.detach().split(self._model.batch):
                spent += len(part)
                exchange, request_id = self._ask(part)
                spent -= 0 if exchange.sent else len(part)
                parts.append(self._read(exchange, request_id, len(part)))
        finally:
            with self._lock:
                self._queries -= len(x) - spent
        return torch.cat(parts)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _ask(self, x: Tensor) -> tuple[Exchange, str]:
        model = self._model
        values = x.to("cpu", torch.float64).numpy().reshape(len(x), *model.row)
        digest = hashlib.sha256(values.tobytes()).hexdigest()
        request: dict[str, Any] = {"id": digest[:16], "inputs": [encode(model.input_name, values, model.datatype)]}
        if model.output_name is not None:
            request["outputs"] = [{"name": model.output_name}]
        body = json.dumps(request, separators=(",", ":"), allow_nan=False).encode()
        began = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        exchange = self._client.send("POST", f"{model.path}/infer", body)
        replied = exchange.status is not None
        entry = {
            "time": began,
            "inputs": len(x),
            "request_sha256": hashlib.sha256(body).hexdigest(),
            "reply_sha256": hashlib.sha256(exchange.body).hexdigest() if replied else None,
            "status": exchange.status,
            "attempts": exchange.attempts,
            "milliseconds": round(1000 * exchange.seconds, 3),
            "error": exchange.failure,
        }
        with self._lock:
            self._log.append(entry)
        return exchange, request["id"]

    def _read(self, exchange: Exchange, request_id: str, count: int) -> Tensor:
        body = _body(self._client, exchange, f"answers of {self._model.name!r}")
        try:
            reply = parse(body, "a reply")
            if reply.get("id") not in (None, "", request_id):
                raise InputError("the reply to our question", found="another id", do="check what answers there")
            decoded = [decode(tensor, "an output") for tensor in listed(reply, "outputs", "the reply")]
            wanted = self._model.output_name
            found = [values for name, _, values in decoded if wanted in (None, name)]
            if len(found) != 1:
                what = "one output tensor" if wanted is None else f"an output {wanted!r}"
                names = shown([name for name, *_ in decoded])
                raise InputError(what, found=names, do="say which output to use")
            return self._labels(found[0], count) if self.output == "labels" else self._scores(found[0], count)
        except InputError as error:
            raise _odd(self._client, error) from error

    def _labels(self, values: NDArray[Any], count: int) -> Tensor:
        if values.shape not in ((count,), (count, 1)):
            raise InputError(f"{count} labels", found=f"shape {values.shape}", do="check --output and the model")
        labels = values.reshape(count).astype(np.float64)  # exact below 2^53; NaN is no label
        if not np.isin(labels, np.arange(self.spec.num_classes)).all():
            expected = f"labels 0 … {self.spec.num_classes - 1}"
            raise InputError(expected, found="other values", do="check --output and the model")
        return torch.from_numpy(labels.astype(np.int64))

    def _scores(self, values: NDArray[Any], count: int) -> Tensor:
        wanted = (count, self.spec.num_classes)
        if values.shape != wanted:
            raise InputError(f"scores of shape {wanted}", found=f"shape {values.shape}", do="check --output, the data")
        with np.errstate(over="ignore"):
            scores = values.astype(np.float32)
        if not bool(np.isfinite(scores).all()):
            raise InputError("finite scores", found="NaN or infinite values", do="check the model")
        if self.output == "probabilities" and (
            float(scores.min()) < -_SUM or float(np.abs(scores.sum(axis=1) - 1.0).max()) > _SUM
        ):
            raise InputError("probabilities that add up to 1", found="other scores", do="declare logits")
        return torch.from_numpy(scores)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        asked = f"{self._queries} queries of {self.max_queries or 'unlimited'}"
        return f"RemoteOracle({self._model.name!r} at {self._client.url}, {self.output}, {asked})"


def _chosen(
    client: HttpClient, name: str, spec: InputSpec, output: Output | None, output_name: str | None, batch: int
) -> tuple[RemoteModel, Output]:
    inputs, outputs = _described(client, name)
    entry = _only(inputs) or TensorInfo("input", "FP32", (-1, *spec.shape))
    chosen, meaning = _output(outputs, output, output_name)
    row, most = _row(entry, spec)
    fits = max(1, _BODY // (_NUMBER * math.prod(row)))
    return RemoteModel(name, entry.name, entry.datatype, row, chosen, min(batch, most, fits)), meaning


def _described(client: HttpClient, name: str) -> tuple[list[TensorInfo], list[TensorInfo]]:
    """The inputs and outputs that a server which is ready names for a model."""
    _body(client, client.send("GET", "/v2/health/ready", also_retry={400, 500}), "a ready server")
    body = _body(client, client.send("GET", f"/v2/models/{quote(name, safe='')}"), f"a model {name!r}")
    try:
        description = parse(body, "the model's description")
        inputs, outputs = (listed(description, part, "the description") for part in ("inputs", "outputs"))
        return [tensor_info(item, "an input") for item in inputs], [tensor_info(item, "an output") for item in outputs]
    except InputError as error:
        raise _odd(client, error) from error


def _body(client: HttpClient, exchange: Exchange, expected: str) -> bytes:
    """The body of a successful reply."""
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


def _odd(client: HttpClient, error: InputError) -> ProtocolError:
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
