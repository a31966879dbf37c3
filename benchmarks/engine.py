"""The garbling engine beside EMP: gates in memory and over loopback, oblivious transfer, set-up, memory.

    python benchmarks/engine.py [--only NAME,...] [--rounds N] [--gates N] [--summary]

Both engines run in turn in every round, on the same cores; a figure is the median over the rounds, and a ratio the
median of the rounds' ratios. Without EMP (``deepseal._emp``) our figures stand alone.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from deepseal import _native  # noqa: E402
from deepseal.errors import InputError  # noqa: E402
from deepseal.record import Record, Run, read_record  # noqa: E402
from deepseal.secure_inference.protocol import bench, emp  # noqa: E402
from deepseal.secure_inference.protocol.extension import TransferSettings  # noqa: E402
from deepseal.secure_inference.protocol.parties import Settings  # noqa: E402
from deepseal.secure_inference.transport import Tls  # noqa: E402
from deepseal.secure_inference.transport.certificates import make_certificates  # noqa: E402

RECORDS = Path(__file__).resolve().parent / "engine"
CORES = tuple(sorted(os.sched_getaffinity(0))[:2]) if len(os.sched_getaffinity(0)) > 1 else None
_PEAK = """
import json, resource
from deepseal.secure_inference.protocol.bench import bench_pair
bench_pair(gates={gates}, transfers=1024)
peak = [resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
print(json.dumps(peak))
"""


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def rounds(count: int, parts: dict[str, Callable[[], dict[str, float]]]) -> dict[str, Any]:
    """Every part once a round; medians of each figure, and of each ratio ours / EMP within a round."""
    seen: dict[str, dict[str, list[float]]] = {name: {} for name in parts}
    for _ in range(count):
        for name, part in parts.items():
            for key, value in part().items():
                seen[name].setdefault(key, []).append(value)
    result: dict[str, Any] = {
        name: {key: spread(values) for key, values in figures.items()} for name, figures in seen.items()
    }
    if "emp" in seen:
        result["ratio"] = {
            key: spread([own / its for own, its in zip(seen["ours"][key], values, strict=True)])
            for key, values in seen["emp"].items()
            if key in seen["ours"]
        }
    return result


def emp_pair(what: str, **options: Any) -> dict[str, float]:
    """Both parties of an EMP measurement, each in its own child process, pinned as ours are."""
    left, right = tcp_pair()
    answers: dict[str, Any] = {}

    def play(role: str, sock: socket.socket, core: int | None) -> None:
        if core is not None:
            os.sched_setaffinity(threading.get_native_id(), {core})
        with sock:
            answers[role] = emp.measure_emp(what, role=role, sock=sock, **options)

    threads = [
        threading.Thread(target=play, args=(role, sock, CORES[index] if CORES else None))
        for index, (role, sock) in enumerate((("garbler", left), ("evaluator", right)))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers["garbler"]


def tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        left = socket.create_connection(server.getsockname())
        right = server.accept()[0]
    for sock in (left, right):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return left, right


def has_emp() -> bool:
    try:
        emp.require_build()
    except InputError as error:
        print(f"without EMP: {error}", flush=True)
        return False
    return True


def memory(options: argparse.Namespace) -> dict[str, Any]:
    parts: dict[str, Callable[[], dict[str, float]]] = {"ours": lambda: bench.bench_memory(seconds=0.3, repeats=3)}
    for name in _native.kernels()[1:]:
        parts[name] = lambda name=name: bench.bench_memory(name, seconds=0.3, repeats=3)
    if options.emp:

        def its() -> dict[str, float]:
            count = 4_000_000
            answer = emp.measure_emp("memory", count=count)
            return {"garble": count / answer["garble_seconds"], "evaluate": count / answer["evaluate_seconds"]}

        parts["emp"] = its
    return {"unit": "AND gates a second, one core", **rounds(options.rounds, parts)}


def loopback(options: argparse.Namespace) -> dict[str, Any]:
    def ours(**more: Any) -> dict[str, float]:
        found = bench.bench_pair(gates=options.gates, transfers=options.transfers, cores=CORES, **more)
        return {key: found[key] for key in ("and_per_second", "bytes_per_and", "ot_per_second", "bytes_per_ot")}

    parts: dict[str, Callable[[], dict[str, float]]] = {"ours": ours}
    for name in _native.kernels()[1:-1]:
        parts[name] = lambda name=name: ours(settings=Settings(kernels=name))
    with tempfile.TemporaryDirectory() as folder:
        parts["tls"] = lambda: ours(tls=certificates(Path(folder)))
        if options.emp:

            def its() -> dict[str, float]:
                gates, transfers = options.gates // 4, options.transfers
                found = emp_pair("and", count=gates)
                transfer = emp_pair("cot", count=transfers, kind="softspoken2")
                return {
                    "and_per_second": gates / found["seconds"],
                    "ot_per_second": transfers / transfer["seconds"],
                    "bytes_per_ot": (transfer["bytes_sent"] + transfer["bytes_received"]) / transfers,
                }

            parts["emp"] = its
        return {"unit": "a second, one core a party", "cores": CORES, **rounds(options.rounds, parts)}


def transfer(options: argparse.Namespace) -> dict[str, Any]:
    parts = {f"k={k}": lambda k=k: bench.bench_transfer(k=k, seconds=0.3, repeats=3) for k in (1, 2, 4, 8)}
    for name in _native.kernels()[1:]:
        parts[f"k=2, {name}"] = lambda name=name: bench.bench_transfer(name, seconds=0.3, repeats=3)
    return {"unit": "correlated OT a second, one core, no channel", **rounds(options.rounds, parts)}


def setup(options: argparse.Namespace) -> dict[str, Any]:
    def once(**more: Any) -> dict[str, float]:
        found = bench.bench_pair(gates=1, transfers=128, cores=CORES, **more)
        return {"milliseconds": 1000 * found["setup_seconds"]}

    with tempfile.TemporaryDirectory() as folder:
        parts: dict[str, Callable[[], dict[str, float]]] = {
            "ours": once,
            "tls": lambda: once(tls=certificates(Path(folder))),
            "checked, tls": lambda: once(
                tls=certificates(Path(folder)), settings=Settings(TransferSettings(checks=True))
            ),
        }
        if options.emp:
            parts["emp"] = lambda: {"milliseconds": 1000 * emp_pair("base_ot", count=128, kind="co")["seconds"]}
        return {
            "unit": "connection, handshake, base OT and trees (EMP: base OT alone)",
            **rounds(3 * options.rounds, parts),
        }


def peak(options: argparse.Namespace) -> dict[str, Any]:
    found = {}
    for gates in (1_000_000, options.many):
        command = [sys.executable, "-c", _PEAK.format(gates=gates)]
        output = subprocess.run(command, capture_output=True, check=True, text=True).stdout
        own, child = json.loads(output)
        found[str(gates)] = {"garbler_kib": own, "evaluator_kib": child}
    few, many = found.values()
    growth = {side: many[f"{side}_kib"] / few[f"{side}_kib"] - 1 for side in ("garbler", "evaluator")}
    return {"unit": "peak resident memory, KiB", **found, "growth": growth}


def certificates(folder: Path) -> tuple[Tls, Tls]:
    made = make_certificates(folder / "certs", ("garbler", "evaluator"), days=2, force=True)
    garbler, evaluator = (Tls(made.certificates[name], made.keys[name], made.ca) for name in ("garbler", "evaluator"))
    return garbler, evaluator


CELLS = {"memory": memory, "loopback": loopback, "transfer": transfer, "setup": setup, "peak": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help=f"some of {','.join(CELLS)}")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--gates", type=int, default=100_000_000, help="AND gates of a run over loopback")
    parser.add_argument("--transfers", type=int, default=8_000_000, help="oblivious transfers of a run over loopback")
    parser.add_argument("--many", type=int, default=1_000_000_000, help="AND gates of the long run of `peak`")
    parser.add_argument("--summary", action="store_true", help="only rewrite the summary from the records")
    options = parser.parse_args()
    RECORDS.mkdir(parents=True, exist_ok=True)
    options.emp = not options.summary and has_emp()
    for name, cell in CELLS.items() if not options.summary else ():
        if options.only and name not in options.only.split(","):
            continue
        params = {key: getattr(options, key) for key in ("rounds", "gates", "transfers", "many")}
        run = Run("benchmark.engine", params={"cell": name, **params, "kernels": _native.kernels()})
        run.results.update(cell(options))
        run.results["load"] = os.getloadavg()
        if options.emp:
            run.results["emp_build"] = emp.emp_build().name
        run.record().write(RECORDS / f"{name}.json", force=True)
        print(name, json.dumps(run.results, indent=1), flush=True)
    (RECORDS / "README.md").write_text(summary({path.stem: read_record(path) for path in RECORDS.glob("*.json")}))


def summary(records: dict[str, Record]) -> str:
    lines = [
        "# The garbling engine",
        "",
        "Made by `make benchmark-engine` from the records in this folder. Medians over",
    ]
    lines += ["the rounds, with the lowest and highest in brackets; both engines in the same run.", ""]
    for name in CELLS:
        record = records.get(name)
        if record is None:
            continue
        results = dict(record.results)
        lines += [
            f"## {name}",
            "",
            f"{results.pop('unit')}; {record.environment.get('cpus')} CPUs, {record.started[:10]}",
        ]
        lines += ["", "| | figure | value |", "|---|---|---|"]
        for part, figures in results.items():
            if isinstance(figures, dict):
                lines += [f"| {part} | {key} | {shown(value)} |" for key, value in figures.items()]
        lines.append("")
    if soak := records.get("soak"):
        lines += ["## soak", "", "```", json.dumps(soak.results, indent=1), "```", ""]
    return "\n".join(lines)


def shown(value: Any) -> str:
    def short(number: float) -> str:
        return (
            f"{number / 1e6:.1f} M"
            if abs(number) >= 1e6
            else f"{number:,.3g}"
            if abs(number) < 1e4
            else f"{number:,.0f}"
        )

    if isinstance(value, dict):
        return f"{short(value['median'])} ({short(value['lowest'])} to {short(value['highest'])})"
    return short(value)


if __name__ == "__main__":
    main()
