"""The EMP toolkit as a second engine: the same netlists, the same bits, by somebody else's half gates and OT.

``deepseal._emp`` binds an EMP that is installed on this machine, and exists only where DeepSeal was built with
``DEEPSEAL_EMP=ON``. EMP ends the whole process when something goes wrong, and its objects cannot be unwound in the
middle of a session. So each run happens in a child process of its own, which inherits the socket, gets netlist and
input bits through a pipe, plays one session and ends; several runs at once are several children. Security: two
parties, semi-honest, IKNP with Canetti-Sarkar-Wang base OT. Both parties must have agreed on netlist, roles and owners
before: EMP has no handshake, and neither encrypts nor authenticates what it sends.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import os
import signal
import socket
import ssl
import subprocess
import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepseal.errors import DeepSealError, InputError, ProtocolError, TransportError, UnknownNameError, one_line
from deepseal.secure_inference.protocol.emp_builds import BUILDS

CHILD = "deepseal.secure_inference.protocol.emp_child"
ROLES = ("garbler", "evaluator")
MEASUREMENTS = ("memory", "and", "cot", "base_ot")
# How the extension ends the child when a session cannot go on.
STATUSES: Mapping[int, str] = MappingProxyType({81: "hung_up", 82: "stalled", 83: "broken", 84: "wrong_answer"})


class Gates(Protocol):
    """What a netlist must have: see ``deepseal.secure_inference.netlist.Netlist``."""

    @property
    def inputs(self) -> tuple[int, ...]: ...
    @property
    def ops(self) -> NDArray[np.uint8]: ...
    @property
    def a(self) -> NDArray[np.uint32]: ...
    @property
    def b(self) -> NDArray[np.uint32]: ...
    @property
    def output_wires(self) -> NDArray[np.uint32]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class EmpResult:
    """What one party has after a run.

    Args:
        output: (output bits,) uint8, output values one after another, least significant bit first.
        bytes_sent: by this party.
        bytes_received: by this party.
        setup_seconds: until the base OTs and the first 16,384 extended ones were done; part of ``seconds``.
        seconds: the whole session, without the start of the child process.
    """

    output: NDArray[np.uint8] = dataclasses.field(repr=False)
    bytes_sent: int
    bytes_received: int
    setup_seconds: float
    seconds: float


@dataclasses.dataclass(frozen=True)
class EmpBuild:
    """The EMP that ``deepseal._emp`` was compiled with.

    Args:
        headers: SHA-256 of its headers, in hexadecimal.
        name: the tested build with these headers, or None.
        native: whether it was compiled for this kind of processor only.
        leaks: in how many of 256 trials two AND gates that share a wire revealed delta.
    """

    headers: str
    name: str | None
    native: bool
    leaks: int


def emp_build(*, timeout: float = 30.0) -> EmpBuild:
    """Which EMP is there.

    Raises:
        InputError: DeepSeal was built without EMP.
    """
    answer, _ = _ask({"job": "about"}, {}, None, timeout=timeout, limit=timeout)
    name = BUILDS.get(answer["headers"])
    return EmpBuild(answer["headers"], name, bool(answer["native"]), int(answer["leaks"]))


def require_build() -> None:
    """Refuse, before anything is sent, where there is no EMP that was tested.

    Raises:
        InputError: DeepSeal was built without EMP or with one that is not on the list.
    """
    build = emp_build()
    if build.name is None:
        do = "install a build that is listed in secure_inference/protocol/emp_builds.py, or use DeepSeal's own engine"
        raise InputError("an EMP build that was tested", found=f"headers with SHA-256 {build.headers}", do=do)


def run_emp(
    netlist: Gates,
    role: str,
    bits: ArrayLike,
    sock: socket.socket,
    *,
    timeout: float,
    limit: float = 3600.0,
    owners: Sequence[str] | None = None,
) -> EmpResult:
    """Play one party of a netlist with EMP. Both parties learn all output bits. Nothing is folded or dropped before.

    Args:
        netlist: the gates, the same on both sides.
        role: "garbler" or "evaluator".
        bits: (own input bits,) zeros and ones: the party's own input values one after another, least significant first.
        sock: a connected stream socket without TLS, at a point where both parties have read all that was sent. It stays
            the caller's. After success it can carry more; after an error it is shut down, so that the peer notices.
        timeout: longest wait in seconds for the other party to send or to take anything.
        limit: longest time in seconds for the whole run.
        owners: the role that owns each input value; by default the garbler has value 0 and the evaluator value 1.

    Raises:
        InputError: DeepSeal was built without EMP or with one that is not on the list, or arguments that do not fit.
        TransportError: the other party hung up or stalled.
        ProtocolError: EMP stopped, as it does when it receives what it does not expect.
    """
    owned = [_known("role", owner, ROLES) for owner in _owners(netlist, owners)]
    own = sum(width for width, owner in zip(netlist.inputs, owned, strict=True) if owner == _known("role", role, ROLES))
    given = np.asarray(bits)
    if given.shape != (own,) or not np.isin(given, (0, 1)).all():
        found = f"an array of shape {given.shape}" if given.shape != (own,) else "other values"
        raise InputError(f"{own} input bits of the {role}, each 0 or 1", found=found, do="pass the party's own bits")
    arrays: dict[str, NDArray[Any]] = {
        "ops": netlist.ops,
        "a": netlist.a,
        "b": netlist.b,
        "output_wires": netlist.output_wires,
        "bits": given.astype(np.uint8),
    }
    header = {
        "job": "run",
        "role": role,
        "widths": [int(width) for width in netlist.inputs],
        "garbler_owns": [owner == "garbler" for owner in owned],
    }
    answer, output = _ask(header, arrays, sock, timeout=timeout, limit=limit)
    return EmpResult(output, **{key: answer[key] for key in _NUMBERS})


def measure_emp(
    what: str,
    *,
    count: int = 128,
    role: str | None = None,
    sock: socket.socket | None = None,
    kind: str | None = None,
    own_channel: bool = False,
    timeout: float = 60.0,
    limit: float = 600.0,
) -> Mapping[str, float]:
    """EMP's own speed, for a comparison in the same run. Each answer was checked for being right.

    Args:
        what: "memory" (garble and evaluate ``count`` AND gates without a socket), "and" (the same between two parties),
            "cot" (``count`` random correlated OTs) or "base_ot" (128 of them).
        count: how many gates or OTs.
        role: this party's role; the evaluator receives the OTs.
        sock: a connected stream socket without TLS, new for each measurement: EMP's channel reads ahead.
        kind: for "cot" iknp, softspoken2, softspoken4, softspoken8 or ferret; for "base_ot" co or csw.
        own_channel: send through the channel that ``run_emp`` uses and not through EMP's own.
        timeout: longest wait in seconds for the other party; EMP's own channel knows none.
        limit: longest time in seconds for the whole measurement.

    Returns:
        ``garble_seconds`` and ``evaluate_seconds`` for "memory"; otherwise ``setup_seconds``, ``seconds`` (without the
        set-up), ``bytes_sent`` and ``bytes_received`` in these seconds.

    Raises:
        InputError, TransportError, ProtocolError: as ``run_emp``.
    """
    header: dict[str, Any] = {"job": _known("measurement", what, MEASUREMENTS), "count": int(count)}
    if what != "memory":
        if sock is None or role is None:
            raise InputError("a socket and a role", found="none", do=f"pass both to measure {what}")
        header |= {"role": _known("role", role, ROLES), "own_channel": bool(own_channel)}
    if what in ("cot", "base_ot"):
        kinds = ("co", "csw") if what == "base_ot" else ("iknp", "softspoken2", "softspoken4", "softspoken8", "ferret")
        header["kind"] = _known("kind of OT", str(kind), kinds)
    answer, _ = _ask(header, {}, None if what == "memory" else sock, timeout=timeout, limit=limit)
    return {key: float(value) for key, value in answer.items()}


_NUMBERS = ("bytes_sent", "bytes_received", "setup_seconds", "seconds")


def _known(kind: str, name: str, known: Sequence[str]) -> str:
    if name not in known:
        raise UnknownNameError(kind, name, known)
    return name


def _owners(netlist: Gates, owners: Sequence[str] | None) -> list[str]:
    values = len(netlist.inputs)
    if owners is None:
        if values > 2:
            raise InputError("an owner for each input value", found=f"{values} values and no owners", do="pass owners")
        return list(ROLES[:values])
    if len(owners) != values:
        raise InputError(
            f"{values} owners, one for each input value", found=str(len(owners)), do="name each owner once"
        )
    return list(owners)


def _ask(
    header: dict[str, Any],
    arrays: Mapping[str, NDArray[Any]],
    sock: socket.socket | None,
    *,
    timeout: float,
    limit: float,
) -> tuple[dict[str, Any], NDArray[np.uint8]]:
    """Start a child, hand it the request, and read its answer; the socket is shut down unless all went well."""
    for name, seconds in (("timeout", timeout), ("limit", limit)):
        if not (math.isfinite(seconds) and seconds > 0):
            raise InputError(f"a {name} above 0 seconds", found=str(seconds), do=f"give a finite {name}")
    if isinstance(sock, ssl.SSLSocket):
        raise InputError(
            "a socket without TLS, as EMP writes to the descriptor itself",
            found="a TLS socket",
            do="use DeepSeal's own engine, or a loopback connection or tunnel without TLS",
        )
    if sock is not None and (sock.fileno() < 0 or sock.type != socket.SOCK_STREAM):
        raise InputError("an open stream socket", found="a closed or another one", do="connect it first")
    packed = io.BytesIO()
    np.savez(packed, **arrays)  # type: ignore[arg-type]
    header = header | {"timeout": timeout, "allowed": sorted(BUILDS)}
    request = json.dumps(header).encode() + b"\n" + packed.getvalue()
    done = False
    try:
        answer = _read_answer(*_run_child(request, sock, limit), timeout=timeout)
        done = True
    finally:
        if sock is not None and not done:
            _shut(sock)
    output = np.frombuffer(bytes.fromhex(answer.pop("output", "")), dtype=np.uint8)
    return answer, output


def _run_child(request: bytes, sock: socket.socket | None, limit: float) -> tuple[int, bytes, bytes]:
    descriptor = -1 if sock is None else sock.fileno()
    command = [sys.executable, "-m", CHILD, str(descriptor), str(os.getpid())]
    # EMP takes its randomness from a counter when EMP_TEST_MODE is set.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("EMP_")}
    child = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=() if sock is None else (descriptor,),
        env=environment,
    )
    try:
        out, complaint = child.communicate(request, timeout=limit)
    except subprocess.TimeoutExpired as error:
        raise TransportError(
            f"the run to end within {limit:g} seconds",
            found="that it goes on",
            do="allow more time, or look at the peer",
        ) from error
    finally:
        if child.poll() is None:
            child.kill()
            child.wait()
        for pipe in (child.stdin, child.stdout, child.stderr):
            if pipe is not None:
                pipe.close()
    return child.returncode, out, complaint


def _read_answer(status: int, out: bytes, complaint: bytes, *, timeout: float) -> dict[str, Any]:
    if status == 0:
        answer: dict[str, Any] = json.loads(out)
        if "refused" in answer:
            raise InputError(**answer["refused"])
        return answer
    what, again = "the other party to take part until the end", "see what it reports, and run both again"
    reason = STATUSES.get(status)
    if reason == "hung_up":
        raise TransportError(what, found="that it hung up", do=again)
    if reason == "stalled":
        raise TransportError(what, found=f"nothing from it for {timeout:g} seconds", do=again)
    if reason == "broken":
        raise TransportError("a working connection", found="an error of the system on the socket", do="connect again")
    if reason == "wrong_answer":
        raise DeepSealError("expected a right answer of EMP; found a wrong one; do not use this build")
    last = one_line(complaint.decode("ascii", "replace").strip().rpartition("\n")[2])
    how = signal.Signals(-status).name if status < 0 else f"exit status {status}"
    shown = "".join(letter for letter in last if letter.isprintable())[:160]
    raise ProtocolError("EMP to finish its run", found=f"{how} ({shown})" if shown else how, do=again)


def _shut(sock: socket.socket) -> None:
    try:
        sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
