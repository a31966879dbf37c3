"""A model behind the Open Inference Protocol (KServe v2) as a black box: counted, logged queries over HTTP."""

from __future__ import annotations

import datetime
import hashlib
import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepseal.adapter.access import Output
from deepseal.adapter.http_client import Exchange, HttpClient
from deepseal.adapter.inference_protocol import decode, listed, parse, shown
from deepseal.adapter.inputs import Batch
from deepseal.adapter.outputs import reduce
from deepseal.adapter.remote_model import RemoteModel, body_of, choose, odd
from deepseal.adapter.spec import InputSpec
from deepseal.errors import InputError, ProtocolError

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

BATCH = 64
_SUM = 1e-2  # how far from 1 probabilities may add up, for half precision and rounded replies


class RemoteOracle:
    """Answers queries through a server; satisfies ``BlackBox``, counts like ``Oracle``, and logs every request.

    Several threads may query at a time. Make one with ``connect``, and close it after use, or use it in a ``with``.

    Args:
        client: the way to the server.
        model: what to ask for there.
        spec: what the model takes.
        output: what the server answers with: (N, classes) logits or probabilities, or (N,) labels; (N, D) embeddings of
            a model without classes count as logits.
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
            output: what the server answers with; if None, the name of the output tensor says it, or its datatype.
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
            model, meaning = choose(client, name, spec, output, output_name, batch)
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
    def query(self, x: Batch) -> Tensor:
        """Answers on the CPU: (N, classes) float32 logits or probabilities, (N, D) embeddings, or (N,) int64 labels.

        The one score z of a server with two classes becomes the logits (0, z) or the probabilities (1 - z, z), and
        answers a frame or token, (N, T, C), are reduced as the spec says.

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
            for part in x.split(self._model.fitting(x)):
                request = self._model.request(part)
                spent += len(part)
                exchange = self._ask(request, len(part))
                spent -= 0 if exchange.sent else len(part)
                parts.append(self._read(exchange, request["id"], part))
        finally:
            with self._lock:
                self._queries -= len(x) - spent
        if len({part.shape[1:] for part in parts}) > 1:
            found = " and ".join(str(tuple(part.shape)) for part in parts[:4])
            raise ProtocolError(f"answers of one width from {self._client.url}", found=found, do="check the model")
        return torch.cat(parts)

    def close(self) -> None:
        """Close the connections."""
        self._client.close()

    def _ask(self, request: dict[str, Any], count: int) -> Exchange:
        body = json.dumps(request, separators=(",", ":"), allow_nan=False).encode()
        began = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="milliseconds")
        exchange = self._client.send("POST", f"{self._model.path}/infer", body)
        replied = exchange.status is not None
        entry = {
            "time": began,
            "inputs": count,
            "request_sha256": hashlib.sha256(body).hexdigest(),
            "reply_sha256": hashlib.sha256(exchange.body).hexdigest() if replied else None,
            "status": exchange.status,
            "attempts": exchange.attempts,
            "milliseconds": round(1000 * exchange.seconds, 3),
            "error": exchange.failure,
        }
        with self._lock:
            self._log.append(entry)
        return exchange

    def _read(self, exchange: Exchange, request_id: str, x: Batch) -> Tensor:
        body = body_of(self._client, exchange, f"answers of {self._model.name!r}")
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
            return self._labels(found[0], len(x)) if self.output == "labels" else self._scores(found[0], x)
        except InputError as error:
            raise odd(self._client, error) from error

    def _labels(self, values: NDArray[Any], count: int) -> Tensor:
        if values.shape not in ((count,), (count, 1)):
            raise InputError(f"{count} labels", found=f"shape {values.shape}", do="check --output and the model")
        labels = values.reshape(count).astype(np.float64)  # exact below 2^53; NaN is no label
        if not np.isin(labels, np.arange(self.spec.num_classes)).all():
            expected = f"labels 0 … {self.spec.num_classes - 1}"
            raise InputError(expected, found="other values", do="check --output and the model")
        return torch.from_numpy(labels.astype(np.int64))

    def _scores(self, values: NDArray[Any], x: Batch) -> Tensor:
        with np.errstate(over="ignore"):
            scores = torch.from_numpy(values.astype(np.float32))
        if scores.ndim > 2 and len(scores) == len(x):
            scores = reduce(scores, self.spec.reduce, self.spec.mask_of(x))
        if self.spec.num_classes == 2 and scores.shape in ((len(x),), (len(x), 1)):
            second = scores.reshape(-1, 1)
            first = 1.0 - second if self.output == "probabilities" else torch.zeros_like(second)
            scores = torch.cat([first, second], dim=1)
        width = self.spec.num_classes or (scores.shape[1] if scores.ndim == 2 else 0)
        if scores.shape != (len(x), width) or width == 0:
            wanted = f"scores of shape ({len(x)}, {self.spec.num_classes or 'any'})"
            raise InputError(wanted, found=f"shape {values.shape}", do="check --output, the data")
        if not bool(torch.isfinite(scores).all()):
            raise InputError("finite scores", found="NaN or infinite values", do="check the model")
        if self.output == "probabilities" and (
            float(scores.min()) < -_SUM or float((scores.sum(dim=1) - 1.0).abs().max()) > _SUM
        ):
            raise InputError("probabilities that add up to 1", found="other scores", do="declare logits")
        return scores

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        asked = f"{self._queries} queries of {self.max_queries or 'unlimited'}"
        return f"RemoteOracle({self._model.name!r} at {self._client.url}, {self.output}, {asked})"
