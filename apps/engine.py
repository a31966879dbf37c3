"""The garbling engine's measurement, written into a run's record."""

from __future__ import annotations

from deepseal import _native
from deepseal.errors import InputError
from deepseal.record import Run
from deepseal.secure_inference.protocol import bench
from deepseal.secure_inference.protocol.parties import Settings


def bench_engine(run: Run, *, kernels: str, gates: int, seconds: float) -> None:
    """Speed of the garbling engine: medians of 5 runs in memory, one run between two processes."""
    names = _native.kernels()
    if kernels and kernels not in names:
        raise InputError(f"kernels {', '.join(names)}", found=repr(kernels), do="choose one of them")
    memory = bench.bench_memory(kernels, seconds=seconds)
    transfer = bench.bench_transfer(kernels, seconds=seconds)
    pair = bench.bench_pair(gates=gates, settings=Settings(kernels=kernels))
    run.params.update(kernels=kernels or names[0], gates=gates, seconds=seconds)
    run.results.update(
        and_per_second={
            "garble": memory["garble"],
            "evaluate": memory["evaluate"],
            "loopback": pair["and_per_second"],
        },
        ot_per_second={
            "send": transfer["send"],
            "receive": transfer["receive"],
            "loopback": pair["ot_per_second"],
        },
        bytes_per_and=pair["bytes_per_and"],
        bytes_per_ot=pair["bytes_per_ot"],
        setup_seconds=pair["setup_seconds"],
        and_gates=pair["and_gates"],
        transfers=pair["ot"],
    )
