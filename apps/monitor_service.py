"""A monitor behind the Open Inference Protocol (KServe v2): what ``deepseal defense serve`` runs.

One question, one pass: the model's class, the combined score, its p-value and the alarm. ``/metrics`` has the counts in
Prometheus' text format. No input is written anywhere.
"""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import deepseal
from deepseal.adapter.inference_protocol import INPUT, TensorInfo, encode, shown
from deepseal.adapter.remote_model import datatype_of
from deepseal.apps.batcher import Batcher
from deepseal.apps.http_server import listening, run_service
from deepseal.apps.http_service import (
    FastAPI,
    Gate,
    HTTPException,
    JSONResponse,
    Limits,
    Question,
    Request,
    Response,
    question,
    read_body,
    run_in_threadpool,
    service,
)
from deepseal.apps.monitor_metrics import CONTENT_TYPE, Metrics
from deepseal.defense.drift import AlarmDrift
from deepseal.defense.monitor import Detection, Monitor
from deepseal.errors import InputError

OUTPUTS = (
    TensorInfo("prediction", "INT64", (-1,)),
    TensorInfo("score", "FP64", (-1,)),
    TensorInfo("p_value", "FP64", (-1,)),
    TensorInfo("alarm", "BOOL", (-1,)),
)
_SMALL = 1 << 16  # bytes of a request that is read where it came
_LARGE_AT_ONCE = 2  # larger ones take many times their size while they are read
LIMITS = Limits(body=1 << 24, requests=64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Batching:
    """How requests are put together.

    Attributes:
        batch: most inputs that are judged at once.
        wait: seconds that the first waits for others.
        seconds: longest wait of a request for its answer; 504 beyond it.
    """

    batch: int = 64
    wait: float = 0.002
    seconds: float = 30.0


class MonitorService:
    """One monitor, its counts and its alarm drift, answering in an application of its own.

    Args:
        monitor: calibrated.
        name: what it is called in the paths.
        limits: what a client may ask.
        batching: how requests are put together.
        drift_error: probability with which drift is ever reported where there is none.
        local: refuse requests that were meant for another host.
        say: called with one line when the alarms have become more frequent than promised.

    Raises:
        InputError: a monitor that is not calibrated, or a name that cannot stand in a path.
    """

    def __init__(
        self,
        monitor: Monitor,
        name: str,
        *,
        limits: Limits = LIMITS,
        batching: Batching = Batching(),
        drift_error: float = 0.01,
        local: bool = True,
        say: Callable[[str], None] = lambda _line: None,
    ) -> None:
        known = monitor.calibrated_on()
        self.monitor, self.name, self._limits, self._batching, self._say = monitor, name, limits, batching, say
        self.drift = AlarmDrift(known.false_positive, drift_error)
        self.metrics = Metrics(monitor.threshold().value, known.false_positive)
        self._input = TensorInfo(INPUT, datatype_of(monitor.model.spec.named_fields(INPUT)[INPUT]), self._shape())
        self._gate = Gate(limits.requests)
        self._batcher: Batcher | None = None
        self._reading = asyncio.Semaphore(_LARGE_AT_ONCE)
        self.app = self._application(local)

    def _shape(self) -> tuple[int, ...]:
        return (-1, *self.monitor.model.spec.shape)

    def _application(self, local: bool) -> FastAPI:
        app = service(self.name, local=local, refused=self.metrics.answered)
        app.router.lifespan_context = self._living

        @app.get("/v2")
        async def server() -> dict[str, Any]:
            return {"name": "deepseal", "version": deepseal.__version__, "extensions": []}

        @app.get("/v2/health/live")
        async def live() -> dict[str, bool]:
            return {"live": True}

        @app.get("/v2/health/ready")
        async def ready() -> JSONResponse:
            return JSONResponse({"live": True, "ready": self._ready}, 200 if self._ready else 503)

        @app.get("/v2/models/{asked}/ready")
        async def model_ready(asked: str) -> JSONResponse:
            self._known(asked)
            return JSONResponse({"name": self.name, "ready": self._ready}, 200 if self._ready else 503)

        @app.get("/v2/models/{asked}")
        async def model(asked: str) -> dict[str, Any]:
            self._known(asked)
            return self._described()

        @app.get("/metrics")
        async def metrics() -> Response:
            self.metrics.depth(self._batcher.depth if self._batcher else 0)
            return Response(self.metrics.text(), media_type=CONTENT_TYPE)

        @app.post("/v2/models/{asked}/infer")
        async def infer(asked: str, request: Request) -> JSONResponse:
            self._known(asked)
            start = time.perf_counter()
            async with self._gate.held():
                body = await read_body(request, self._limits)
                wanted = await self._understood(body)
                found = await self._found(wanted)
                reply = JSONResponse(self._answer(wanted, found))
            self.metrics.answered(200, time.perf_counter() - start)
            return reply

        return app

    @asynccontextmanager
    async def _living(self, _app: FastAPI) -> AsyncIterator[None]:
        how = self._batching
        self._batcher = Batcher(self.monitor.judge, batch=how.batch, wait=how.wait, judged=self._count)
        try:
            yield
        finally:
            await self._batcher.close()
            self._batcher = None

    @property
    def _ready(self) -> bool:
        return self._batcher is not None and self._batcher.busy < self._batching.seconds

    def _known(self, asked: str) -> None:
        if asked != self.name:
            raise HTTPException(404, f"expected the model {self.name!r}; found {shown(asked)}; correct the path")

    def _described(self) -> dict[str, Any]:
        known = self.monitor.calibrated_on()
        return {
            "name": self.name,
            "platform": "pytorch",
            "inputs": [self._input.as_dict()],
            "outputs": [output.as_dict() for output in OUTPUTS],
            "parameters": {
                "threshold": self.monitor.threshold().value,
                "false_positive": known.false_positive,
                "confidence": known.confidence,
                "per_class": known.per_class,
                "members": [member.title for member in self.monitor.members],
                "drift_error": self.drift.error,
            },
        }

    def _read(self, body: bytes) -> Question:
        names = [output.name for output in OUTPUTS]
        asked = question(body, {INPUT: self._input}, names, self._limits)
        self.monitor.model.spec.check(asked.tensors[INPUT])
        return asked

    async def _understood(self, body: bytes) -> Question:
        if len(body) <= _SMALL:
            return self._read(body)
        async with self._reading:
            return await run_in_threadpool(self._read, body)

    async def _found(self, wanted: Question) -> Detection:
        if self._batcher is None:
            raise HTTPException(503, "expected a service that runs; found one that ends; ask another")
        seconds = self._batching.seconds
        try:
            return await self._batcher.submit(wanted.tensors[INPUT], seconds=seconds)
        except asyncio.TimeoutError:
            text = f"expected an answer within {seconds:g} s; found none; try again"
            raise HTTPException(504, text, headers={"Retry-After": "1"}) from None
        except InputError:
            raise
        except Exception as error:
            raise HTTPException(500, "the monitor failed on this request") from error

    def _answer(self, wanted: Question, found: Detection) -> dict[str, Any]:
        columns = {"prediction": found.predicted, "score": found.score, "p_value": found.p_value, "alarm": found.alarm}
        outputs = [
            encode(output.name, columns[output.name].numpy(), output.datatype)
            for output in OUTPUTS
            if output.name in wanted.outputs
        ]
        head = {"model_name": self.name}
        return {**head, **({} if wanted.request_id is None else {"id": wanted.request_id}), "outputs": outputs}

    def _count(self, found: Detection) -> None:
        inputs, alarms = len(found.alarm), int(found.alarm.sum())
        before = self.drift.drifted
        self.drift = self.drift.seen(inputs, alarms)
        self.metrics.judged(inputs, alarms, self.drift)
        if self.drift.drifted and not before:
            seen = self.drift
            self._say(
                f"the alarms have become more frequent than the promised {seen.rate:g}: {seen.alarms} of {seen.inputs} "
                f"inputs so far (error {seen.error:g}); look at the traffic, and calibrate again if it has changed"
            )


def serve_monitor(
    monitor: Monitor,
    name: str,
    listen: str,
    *,
    limits: Limits = LIMITS,
    batching: Batching = Batching(),
    drift_error: float = 0.01,
    allow_remote: bool = False,
    certificate: tuple[Path, Path] | None = None,
    ready: Callable[[str], None] = lambda _url: None,
    say: Callable[[str], None] = lambda _line: None,
) -> MonitorService:
    """Answer until Ctrl-C or SIGTERM, then finish what is under way; the service as it ended.

    Args:
        monitor: calibrated.
        name: what it is called in the paths.
        listen: HOST:PORT; port 0 is any free one.
        limits: what a client may ask.
        batching: how requests are put together.
        drift_error: probability with which drift is ever reported where there is none.
        allow_remote: listen beyond this machine, where everybody may ask.
        certificate: files (PEM) of a certificate and its key, for https.
        ready: called with the service's URL once it takes connections.
        say: called with one line when the alarms have become more frequent than promised.

    Raises:
        InputError: an address beyond this machine without ``allow_remote``, or one that cannot be listened on.
    """
    monitor.calibrated_on()
    sock, local = listening(listen, allow_remote=allow_remote)
    with sock:
        made = MonitorService(
            monitor, name, limits=limits, batching=batching, drift_error=drift_error, local=local, say=say
        )
        run_service(made.app, sock, certificate=certificate, ready=ready, lifespan=True)
    return made
