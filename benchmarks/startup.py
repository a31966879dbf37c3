"""Start of the command line: ``deepseal --help`` as whole processes; the peer is ``pip --help``."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from deepseal.record import Run

RUNS = 21


def seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, capture_output=True, check=True)
    return time.perf_counter() - start


def main() -> None:
    commands = {
        "deepseal": [str(Path(sys.executable).with_name("deepseal")), "--help"],
        "pip": [sys.executable, "-m", "pip", "--help"],
    }
    run = Run("benchmark.startup", params={"runs": RUNS, "limit_seconds": 0.5})
    times: dict[str, list[float]] = {name: [] for name in commands}
    for _ in range(RUNS):
        for name, command in commands.items():
            times[name].append(seconds(command))
    medians = {name: statistics.median(values) for name, values in times.items()}
    run.results.update(
        {
            f"{name}_seconds": {"median": medians[name], "lowest": min(values), "highest": max(values)}
            for name, values in times.items()
        },
        ratio_to_pip=medians["deepseal"] / medians["pip"],
    )
    record = run.record()
    record.write(Path(__file__).with_name("startup.json"), force=True)
    print(record.to_json())


if __name__ == "__main__":
    main()
