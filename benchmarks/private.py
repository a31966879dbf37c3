"""Private inference: accuracy, equality with the simulator, time and bytes, beside the peers; one record a cell.

    python benchmarks/private.py [--nets b1,…] [--only CELL,…] [--peers PYTHON] [--summary] [--list]

A cell whose record exists, is ok and was made by the same code with the same parameters is skipped. Trained models and
compiled programs are kept in ``build/``. LAN and WAN cells need root, for network namespaces. Peers run in an
environment of their own, whose Python ``--peers`` names; without it their cells are left out.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np  # noqa: E402
import private_links  # noqa: E402
import torch  # noqa: E402
from private_networks import HERE, NETWORKS, Made, digest, export, products  # noqa: E402
from private_parties import CORES, PEERS, Link, Mode, measure, run_peer  # noqa: E402
from private_summary import summary  # noqa: E402

from deepseal import _native  # noqa: E402
from deepseal.errors import InputError  # noqa: E402
from deepseal.record import Run, read_record  # noqa: E402
from deepseal.secure_inference.compile.accuracy import compare  # noqa: E402
from deepseal.secure_inference.compile.program import Linear, Program  # noqa: E402
from deepseal.secure_inference.compile.simulate import decode_output, encode_input, simulate  # noqa: E402
from deepseal.secure_inference.compile.weights import Weights  # noqa: E402
from deepseal.secure_inference.roles.estimate import estimate  # noqa: E402
from deepseal.secure_inference.roles.modes import client_ready  # noqa: E402
from deepseal.secure_inference.roles.rates import measure as measure_rates  # noqa: E402
from deepseal.secure_inference.transport.certificates import make_certificates  # noqa: E402

RECORDS = HERE / "private"
KIND = "benchmark.private"
EQUAL, FEWER = 50, 10  # samples of an equality cell; of the logits of heavy networks
_YAO = {"protocol": "yao"}
MODES: dict[str, Mode] = {
    "mixed": Mode(),
    "ahead": Mode(ahead=True),
    "six-bits": Mode(programs={"activation_bits": 6, "input_bits": 6}),
    "yao": Mode(server=_YAO, client=_YAO),
}
ONLY = {"six-bits": {"b1"}, "yao": {"b1", "b2", "b3", "b4"}}  # networks of a mode, if not all
LOOPBACK_ONLY = {"six-bits"}
MOST = 1024  # samples of a timed cell; then from the first again
BATCHES = {"b1": (1, 64)}  # of a mode on loopback; (1,) elsewhere
LOOPBACK = (40e9, 5e-5)  # bits a second and seconds of a round trip, for the estimate
HEAVY = {"b4", "resnet"}  # hundreds of megabytes a question

_SIMULATED = digest("adapter", "secure_inference/compile", "secure_inference/netlist")


def spoken() -> str:
    """SHA-256 over what decides the figures of two parties: our Python and the compiled core."""
    core = hashlib.sha256(Path(_native.__file__).read_bytes()).hexdigest()
    return hashlib.sha256((digest("adapter", "secure_inference") + core).encode()).hexdigest()[:12]


_SPOKEN = spoken()


def accuracy_cell(made: Made, run: Run, mode: Mode) -> None:
    """The program beside the float network on the test split, paired."""
    _, program, weights = made.program(**mode.programs)
    found = compare(program, weights, made.tests, made.model)
    run.results.update(
        accuracy=found.accuracy.as_dict(),
        float_accuracy=found.float_accuracy and found.float_accuracy.as_dict(),
        agreement=found.agreement and found.agreement.as_dict(),
        difference=found.difference and found.difference.as_dict(),
        clamped=found.clamped,
        products=products(program),
        rings=[program.wires[step.target].number.bits for step in program.steps if isinstance(step, Linear)],
    )
    run.fingerprints.update(model=made.model.fingerprint(), program=program.digest())


def equality_cell(made: Made, run: Run, mode: Mode) -> None:
    """Two processes against the simulator: labels, then all logits, bit for bit."""
    for permits in ("label", "logits"):
        folder, program, weights = made.program(permits=permits, **mode.programs)
        count = FEWER if permits == "logits" and made.network.name in HEAVY else EQUAL
        with samples(made, count) as inputs:
            found = measure(folder, inputs, mode=mode, questions=count, sessions=1, warm=0)
        equal, n = equality(program, weights, made, found["questions"])
        run.results[permits] = {"equal": equal, "n": n, "errors": found["server"]["errors"]}
        run.fingerprints[f"program.{permits}"] = program.digest()
        if equal != n or found["server"]["errors"]:
            raise InputError("the simulator's answers", found=f"{equal} of {n} {permits}", do="look for the fault")


def mode_cell(
    made: Made,
    run: Run,
    mode: Mode,
    *,
    batch: int = 1,
    tls: bool = False,
    few: bool = False,
    shape: private_links.Shape | None = None,
) -> None:
    """Time and bytes of a mode, and what ``estimate`` says of them beforehand."""
    heavy = made.network.name in HEAVY
    questions = 1 if few else 3 if heavy and shape else made.network.questions
    sessions, warm = (1, 0) if few else (2, 1) if heavy and shape else (5, 3)
    folder, program, weights = made.program(**mode.programs)
    settings = {"mode": mode, "batch": batch, "questions": questions, "sessions": sessions, "warm": warm}
    protocol = mode.client.get("protocol", "mixed")
    ready, rates = client_ready(program, protocol), measure_rates(yao=protocol == "yao")
    with samples(made, min(batch * questions, MOST)) as inputs:
        if shape is not None:
            with private_links.shaped(shape) as link:
                run.results["link"] = private_links.probe(link, shape)
                server, client = private_links.commands(link)
                found = measure(folder, inputs, **settings, link=Link(
                    server, client, private_links.SERVER, private_links.RELAY))  # fmt: skip
        else:
            pair = certificates(inputs.parent) if tls else None
            found = measure(folder, inputs, **settings, tls=pair)
    equal, n = equality(program, weights, made, found["questions"])
    run.results.update(figures(found, batch), equal_to_simulate={"equal": equal, "n": n})
    bandwidth, latency = (shape.bandwidth, shape.round_trip) if shape else LOOPBACK
    said = estimate(ready, bandwidth=bandwidth, latency=latency, samples=batch, ahead=mode.ahead, rates=rates)
    took, moved = run.results["online_ms"]["median"], said.bytes_sent + said.bytes_received
    run.results["estimate"] = {
        "ms": 1000 * said.seconds,
        "ms_ratio": 1000 * said.seconds / took,
        "bytes_ratio": moved / (run.results["bytes_sent"][-1] + run.results["bytes_received"][-1]),
    }
    run.fingerprints["program"] = program.digest()
    if found["server"]["errors"]:
        run.notes += found["server"]["errors"]


def peer_cell(made: Made, run: Run, system: str, python: str) -> None:
    """A peer on the same network and samples."""
    with tempfile.TemporaryDirectory() as folder:
        export(made, Path(folder), 8)
        run.results.update(run_peer(python, system, Path(folder), CORES))


def figures(found: dict[str, Any], batch: int) -> dict[str, Any]:
    """Medians of what the two parties said, with lowest and highest; milliseconds, bytes of frames with headers."""
    rows, setups = found["questions"], found["setups"]
    layers = {
        name: {
            "ms": spread([1000 * row["phases"][name]["seconds"] for row in rows if name in row["phases"]])["median"],
            "bytes": max(row["phases"][name]["bytes_sent"] + row["phases"][name]["bytes_received"] for row in rows),
        }
        for name in rows[0]["phases"]
    }
    return {
        "n": len(rows),
        "batch": batch,
        "online_ms": spread([1000 * row["seconds"] for row in rows]),
        "with_encoding_ms": spread([1000 * row["whole_seconds"] for row in rows]),
        "first_ms": spread([1000 * one["first"]["seconds"] for one in setups]),
        "bytes_sent": sorted({row["bytes_sent"] for row in rows}),
        "bytes_received": sorted({row["bytes_received"] for row in rows}),
        "setup": {
            "n": len(setups),
            "ms": spread([1000 * one["seconds"] for one in setups]),
            "with_preparation_ms": spread([1000 * one["whole_seconds"] for one in setups]),
            **{
                f"{name.replace('-', '_')}_ms": spread([1000 * one["phases"][name]["seconds"] for one in setups])
                for name in setups[0]["phases"]
            },
            "bytes": max(one["bytes_sent"] + one["bytes_received"] for one in setups),
        },
        "prepared": offline([row["prepared"] for row in rows if row["prepared"]]),
        "cot_extension": layers.pop("inputs", None),
        "parts": layers,
        "client": {key: found[key] for key in ("peak_kib", "loaded_kib", "cpu_seconds")},
        "server": {key: found["server"][key] for key in ("peak_kib", "loaded_kib", "cpu_seconds")},
    }


def offline(costs: list[dict[str, Any]]) -> dict[str, Any] | None:
    """What was done ahead of the questions, a question."""
    if not costs:
        return None
    return {
        "ms": spread([1000 * cost["seconds"] for cost in costs]),
        "bytes": max(cost["bytes_sent"] + cost["bytes_received"] for cost in costs),
    }


def spread(values: list[float]) -> dict[str, float] | None:
    if not values:
        return None
    return {"median": statistics.median(values), "lowest": min(values), "highest": max(values)}


def equality(program: Program, weights: Weights, made: Made, questions: list[dict[str, Any]]) -> tuple[int, int]:
    """How many answers are the simulator's, of how many."""
    got = np.array([row for question in questions for row in question["values"]])
    x = made.tests.x[: min(len(got), MOST)]
    wanted = decode_output(program, simulate(program, weights, encode_input(program, x).values))
    repeated = wanted[np.arange(len(got)) % len(wanted)]
    return int(np.all((got == repeated).reshape(len(got), -1), axis=1).sum()), len(got)


@contextlib.contextmanager
def samples(made: Made, count: int) -> Iterator[Path]:
    """The first test samples in a file, for a block."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "x.npy"
        np.save(path, made.tests.x[:count].numpy())
        yield path


def certificates(folder: Path) -> list[list[str]]:
    made = make_certificates(folder / "certs", ("server", "client"), days=2, force=True)
    return [[str(made.certificates[name]), str(made.keys[name]), str(made.ca)] for name in ("server", "client")]


def cells(made: Made, peers: str | None) -> Iterator[tuple[str, dict[str, Any], Callable[[Run], None]]]:
    """Name, what decides the figures, and what fills the record."""
    net = made.network
    for name, mode in MODES.items():
        if net.name not in ONLY.get(name, {net.name}):
            continue
        if name == "mixed" or mode.programs:
            accuracy = "accuracy" if name == "mixed" else f"{name}-accuracy"
            decides = {"code": _SIMULATED, "samples": net.samples, "programs": dict(mode.programs)}
            yield accuracy, decides, lambda run, mode=mode: accuracy_cell(made, run, mode)
        base = {"code": _SPOKEN, "mode": asdict(mode)}
        equal = "equality" if name == "mixed" else f"{name}-equality"
        slow = name == "yao" and net.name in HEAVY  # a question takes most of a minute
        if not slow:
            yield equal, {**base, "samples": EQUAL}, lambda run, mode=mode: equality_cell(made, run, mode)
        base["questions"] = net.questions
        for batch in BATCHES.get(net.name, (1,)):
            yield (f"{name}-{batch}", {**base, "batch": batch},
                   lambda run, mode=mode, batch=batch, few=slow:
                       mode_cell(made, run, mode, batch=batch, few=few))  # fmt: skip
        if slow or name in LOOPBACK_ONLY:
            continue
        yield (f"{name}-1-tls", {**base, "batch": 1, "tls": True},
               lambda run, mode=mode: mode_cell(made, run, mode, tls=True))  # fmt: skip
        for shape in private_links.SHAPES.values():
            yield (f"{name}-1-{shape.name}", {**base, "batch": 1, "link": asdict(shape)},
                   lambda run, mode=mode, shape=shape: mode_cell(made, run, mode, shape=shape))  # fmt: skip
    for system in PEERS if peers else ():
        sources = b"".join(path.read_bytes() for path in sorted(HERE.glob("private_peers*.py")))
        code = hashlib.sha256(sources).hexdigest()[:12]
        yield (system, {"code": code, "model": made.model.fingerprint()[:12]},
               lambda run, system=system: peer_cell(made, run, system, str(peers)))  # fmt: skip


def is_done(path: Path, params: dict[str, Any]) -> bool:
    """Whether the cell's record is there, ok, and made with these parameters."""
    try:
        record = read_record(path)
    except InputError:
        return False
    return record.status == "ok" and record.params == Run(KIND, params=params).record().params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", default=",".join(NETWORKS))
    parser.add_argument("--only", default="", help="names of cells, see --list")
    parser.add_argument("--peers", help="Python of the environment with the peers")
    parser.add_argument("--force", action="store_true", help="measure again what is there")
    parser.add_argument("--list", action="store_true", help="only name the cells, and whether they are done")
    parser.add_argument("--summary", action="store_true", help="only rewrite the summary from the records")
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that processes and namespaces go
    RECORDS.mkdir(parents=True, exist_ok=True)
    failed = 0
    for name in options.nets.split(",") if not options.summary else ():
        made = Made(NETWORKS[name])
        for cell, decides, fill in cells(made, options.peers):
            path = RECORDS / f"{name}-{cell}.json"
            data = "synthetic" if made.network.recipe is None else "real"
            params = {"net": name, "cell": cell, "data": data, **decides}
            if options.only and cell not in options.only.split(","):
                continue
            done = is_done(path, params) and not options.force
            if options.list:
                print(f"{name}-{cell}", "done" if done else "to do")
            if done or options.list:
                continue
            run = Run(KIND, seed=0, params=params)
            run.notes.append(f"data: {made.data.source}")
            load = os.getloadavg()
            try:
                fill(run)
                if decides["code"] == _SPOKEN != spoken():
                    raise RuntimeError("the code changed while it was measured; run this cell again")
            except (InputError, RuntimeError, OSError, subprocess.SubprocessError) as error:
                failed += 1
                run.record("failed", str(error)).write(path, force=True)
                print(name, cell, "failed:", error, flush=True)
                continue
            run.results["load"] = {"before": load, "after": os.getloadavg()}
            run.record().write(path, force=True)
            print(name, cell, short(run.results), flush=True)
    if not options.list:
        records = [read_record(path) for path in sorted(RECORDS.glob("*.json"))]
        (RECORDS / "README.md").write_text(summary([record for record in records if record.kind == KIND]))
    sys.exit(1 if failed else 0)


def short(results: dict[str, Any]) -> str:
    kept = ("accuracy", "label", "logits", "online_ms", "bytes_sent", "bytes_received", "first_ms", "later_ms", "error")
    return str({key: results[key] for key in kept if key in results})


if __name__ == "__main__":
    main()
