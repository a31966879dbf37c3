"""``deepseal defense serve | export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepseal.apps.cli.common import Arch, Force, Json, RecordFile, remark, running
from deepseal.errors import InputError


def serve(
    monitor: Annotated[Path, typer.Argument(help="The monitor's folder (see defense fit).")],
    listen: Annotated[str, typer.Option("--listen", help="HOST:PORT to listen on.")] = "127.0.0.1:8001",
    name: Annotated[str, typer.Option("--name", help="What the monitor is called in the paths.")] = "monitor",
    max_batch: Annotated[int, typer.Option("--max-batch", help="Most inputs in a request.", min=1)] = 256,
    max_body: Annotated[int, typer.Option("--max-body", help="Longest request, in MiB.", min=1, max=1024)] = 16,
    max_requests: Annotated[int, typer.Option("--max-requests", help="Requests at a time; 503 beyond it.", min=1)] = 64,
    batch: Annotated[int, typer.Option("--batch", help="Most inputs that are judged at once.", min=1)] = 64,
    wait: Annotated[float, typer.Option("--wait-ms", help="Milliseconds that a batch waits to fill.", min=0)] = 2.0,
    timeout: Annotated[
        float, typer.Option("--timeout", help="Seconds for a request's body, and for its answer.", min=0.1)
    ] = 30.0,
    drift_error: Annotated[
        float, typer.Option("--drift-error", help="Probability of ever reporting drift where there is none.")
    ] = 0.01,
    allow_remote: Annotated[
        bool, typer.Option("--allow-remote", help="Allow an address that other machines reach: everybody may ask.")
    ] = False,
    tls_cert: Annotated[Path | None, typer.Option("--tls-cert", help="Our certificate (PEM): https.")] = None,
    tls_key: Annotated[Path | None, typer.Option("--tls-key", help="Its private key (PEM).")] = None,
    arch: Arch = None,
    json: Json = False,
    record: RecordFile = None,
) -> None:
    """Answer with class, score, p-value and alarm over HTTP (Open Inference Protocol) until Ctrl-C.

    Paths: /v2/health/live, /v2/health/ready, /v2/models/NAME, /v2/models/NAME/infer, /metrics (Prometheus).
    """
    with running("defense.serve", json=json, record=record, inputs=(tls_cert, tls_key)) as (run, _):
        from deepseal.apps.http_service import Limits
        from deepseal.apps.monitor_service import Batching, serve_monitor
        from deepseal.defense.monitor_file import load_monitor

        if (tls_cert is None) != (tls_key is None):
            raise InputError("--tls-cert and --tls-key together", found="one of them", do="give both, or none")
        loaded = load_monitor(monitor, architecture=arch)
        run.params.update(monitor=str(monitor), name=name, listen=listen, max_batch=max_batch, batch=batch)
        service = serve_monitor(
            loaded,
            name,
            listen,
            limits=Limits(batch=max_batch, body=max_body << 20, requests=max_requests, seconds=timeout),
            batching=Batching(batch=batch, wait=wait / 1000.0, seconds=timeout),
            drift_error=drift_error,
            allow_remote=allow_remote,
            certificate=(tls_cert, tls_key) if tls_cert and tls_key else None,
            ready=lambda url: remark(f"serving {name!r} on {url}; Ctrl-C ends it"),
            say=remark,
        )
        drift = service.drift
        run.results.update(
            inputs=drift.inputs,
            alarms=drift.alarms,
            drift={"drifted": drift.drifted, "error": drift.error, "log_evidence": drift.peak},
        )


def export(
    monitor: Annotated[Path, typer.Argument(help="The monitor's folder (see defense fit).")],
    out: Annotated[Path, typer.Option("--out", help="ONNX file to write.", show_default=False)],
    arch: Arch = None,
    force: Force = False,
    json: Json = False,
    record: RecordFile = None,
) -> None:
    """Write victim and one-pass detectors as one ONNX graph: input to logits, score and alarm."""
    with running("defense.export", json=json, record=record, force=force, out=out) as (run, _):
        from deepseal.defense.graph import OUTPUTS, write_onnx
        from deepseal.defense.monitor_file import load_monitor

        run.params.update(monitor=str(monitor), out=str(out))
        written = write_onnx(load_monitor(monitor, architecture=arch), out, force=force)
        run.results.update(
            size=written.size,
            outputs=list(OUTPUTS),
            largest_score_difference=written.difference,
            compared_inputs=written.inputs,
        )
