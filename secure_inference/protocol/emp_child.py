"""The child process of ``emp``: one request on stdin, one session with EMP, one answer on stdout.

``python -m deepseal.secure_inference.protocol.emp_child DESCRIPTOR PARENT``. Nothing that is secret is on the command
line or in the environment.
"""

from __future__ import annotations

import ctypes
import io
import json
import os
import signal
import sys
from typing import Any

import numpy as np

from deepseal.errors import InputError
from deepseal.secure_inference.protocol.emp_builds import check_build, check_leaks

TRIALS = 256


def main(arguments: list[str]) -> int:
    """Serve the request on stdin. Returns the exit status."""
    descriptor, parent = int(arguments[0]), int(arguments[1])
    if not _die_with(parent):
        return 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    answer_to = os.dup(1)
    os.dup2(2, 1)  # so that nothing EMP prints gets into the answer
    line, _, packed = sys.stdin.buffer.read().partition(b"\n")
    header = json.loads(line)
    with np.load(io.BytesIO(packed), allow_pickle=False) as archive:
        arrays: dict[str, Any] = {name: archive[name] for name in archive.files}
    try:
        answer = _serve(header, arrays, descriptor)
    except InputError as error:
        answer = {"refused": {"expected": error.expected, "found": error.found, "do": error.do}}
    with os.fdopen(answer_to, "w") as out:
        json.dump(answer, out)
    return 0


def _serve(header: dict[str, Any], arrays: dict[str, Any], descriptor: int) -> dict[str, Any]:
    try:
        from deepseal import _emp
    except ImportError as error:
        raise InputError(
            "DeepSeal built with the EMP toolkit",
            found=f"no working deepseal._emp ({error})"[:200],
            do="install EMP and build with -C cmake.define.DEEPSEAL_EMP=ON, or use DeepSeal's own engine",
        ) from error
    leaks = _emp.delta_leaks(TRIALS)
    if header["job"] == "about":
        return {"headers": _emp.HEADERS, "native": _emp.NATIVE, "leaks": leaks, "statuses": _emp.STATUSES}
    check_build(_emp.HEADERS, header["allowed"])
    check_leaks(leaks, TRIALS)
    if header["job"] == "memory":
        garble, evaluate = _emp.bench_memory(header["count"])
        return {"garble_seconds": garble, "evaluate_seconds": evaluate}
    common: dict[str, Any] = {"fd": descriptor, "role": header["role"], "timeout": header["timeout"]}
    if header["job"] == "run":
        owned: dict[str, Any] = {"widths": header["widths"], "garbler_owns": header["garbler_owns"]}
        result = _emp.run(**common, **owned, **arrays)
        return result | {"output": result["output"].tobytes().hex()}
    common["own_channel"] = header["own_channel"]
    if header["job"] == "and":
        return _emp.bench_and(gates=header["count"], **common)
    if header["job"] == "cot":
        return _emp.bench_cot(count=header["count"], kind=header["kind"], **common)
    return _emp.bench_base_ot(kind=header["kind"], **common)


def _die_with(parent: int) -> bool:
    """Ask Linux to end this process with its parent; False if that has ended already."""
    if sys.platform == "linux":
        PR_SET_PDEATHSIG = 1
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    return os.getppid() == parent


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
