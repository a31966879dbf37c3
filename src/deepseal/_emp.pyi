from typing import Any

import numpy as np
from numpy.typing import NDArray

HEADERS: str
NATIVE: bool
STATUSES: dict[str, int]

def run(
    *,
    ops: NDArray[np.uint8],
    a: NDArray[np.uint32],
    b: NDArray[np.uint32],
    output_wires: NDArray[np.uint32],
    widths: list[int],
    garbler_owns: list[bool],
    bits: NDArray[np.uint8],
    fd: int,
    role: str,
    timeout: float,
) -> dict[str, Any]: ...
def delta_leaks(trials: int) -> int: ...
def bench_memory(gates: int) -> tuple[float, float]: ...
def bench_and(*, fd: int, role: str, gates: int, timeout: float, own_channel: bool) -> dict[str, Any]: ...
def bench_cot(*, fd: int, role: str, count: int, kind: str, timeout: float, own_channel: bool) -> dict[str, Any]: ...
def bench_base_ot(*, fd: int, role: str, kind: str, timeout: float, own_channel: bool) -> dict[str, Any]: ...
