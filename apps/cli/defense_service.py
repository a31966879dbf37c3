"""``deepseal defense customise | serve | export``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepseal.apps.cli.common import (
    Arch,
    Data,
    Force,
    Json,
    ModelFile,
    Pickle,
    RecordFile,
    Seed,
    progress,
    remark,
    running,
)
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


def customise(
    model: ModelFile,
    data: Data,
    latency: Annotated[float, typer.Option("--latency-ms", help="Milliseconds a batch that it may add.")],
    memory: Annotated[float, typer.Option("--memory-mb", help="MiB that it may take: what it learned, and to work.")],
    out: Annotated[Path, typer.Option("--out", help="Folder to write the monitor to.", show_default=False)],
    batch: Annotated[int, typer.Option("--batch", help="Inputs a batch.", min=1)] = 1,
    detector: Annotated[
        list[str] | None,
        typer.Option("--detector", help="A candidate, as name?param=value, or a preset; repeatable. [default: all]"),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=500, help="Only the first so many training samples.")
    ] = None,
    arch: Arch = None,
    seed: Seed = 0,
    force: Force = False,
    json: Json = False,
    record: RecordFile = None,
    insecure_allow_pickle: Pickle = False,
) -> None:
    """Measure victim and detectors here, and choose number, kind and layers for a budget.

    The monitor is to be calibrated next.
    """
    with running("defense.customise", json=json, record=record, force=force, seed=seed, inputs=(model,)) as (run, _):
        import dataclasses

        import torch

        from deepseal.adapter import load_data
        from deepseal.apps.workflow import load_model
        from deepseal.defense.customise import CANDIDATES, Budget
        from deepseal.defense.customise import customise as customised
        from deepseal.defense.monitor_file import check_folder, describe, save_monitor
        from deepseal.rng import Rng

        budget = Budget(latency, memory, batch)
        check_folder(out, force=force)
        dataset = load_data(data)
        loaded = load_model(model, arch=arch, insecure_allow_pickle=insecure_allow_pickle, dataset=dataset)
        split = dataset.train if limit is None else dataset.train.take(torch.arange(min(limit, len(dataset.train))))
        run.params.update(model=str(model), data=dataset.name, budget=dataclasses.asdict(budget), samples=len(split))
        run.fingerprints.update(model=loaded.fingerprint(), fit=split.fingerprint())
        with progress("customise") as told:
            found = customised(loaded, split, budget, rng=Rng(seed), words=tuple(detector or CANDIDATES), progress=told)
        save_monitor(found.monitor, out, force=force)
        run.results.update(
            victim_ms=found.victim,
            candidates=[
                {
                    "detector": row.title,
                    "added_ms": row.cost.milliseconds,
                    "memory_mib": row.cost.memory,
                    "passes": row.passes,
                    "worth_by_proxy": dict(row.worth),
                    "decision": row.decision,
                }
                for row in found.candidates
            ],
            chosen=[member["title"] for member in describe(found.monitor)["members"]],
            added_ms=found.total.milliseconds,
            memory_mib=found.total.memory,
            worth_by_proxy=dict(found.worth),
        )
        run.notes.extend(found.monitor.notes)
