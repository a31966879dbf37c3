"""Any boolean circuit between two parties: each brings its inputs, and those who may read the outputs do."""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import InputError
from deepseal.secure_inference.netlist import Netlist
from deepseal.secure_inference.protocol import emp
from deepseal.secure_inference.protocol.extension import Array
from deepseal.secure_inference.protocol.parties import Program, Settings, start_evaluator, start_garbler
from deepseal.secure_inference.transport import Channel, Counters, Hello, Kind, handshake

ROLES = ("garbler", "evaluator")
READERS = ("both", *ROLES)
_LONG = 1000


@dataclass(frozen=True)
class CircuitResult:
    """What one party has in the end.

    Args:
        output: the output values as integers; None for a party that may not read them.
        and_gates: tables that were sent, after constants were folded and dead gates dropped.
        counters: bytes and seconds, by phase.
        seconds: from the handshake to the end.
        security: what holds against whom.
    """

    output: tuple[int, ...] | None
    and_gates: int
    counters: Counters
    seconds: float
    security: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values for a record."""
        counters = asdict(self.counters)
        phases = {name: dict(phase) for name, phase in self.counters.phases.items()}
        own = {"and_gates": self.and_gates, "seconds": self.seconds, "security": self.security}
        return {**counters, "phases": phases, **own}


def owners_of(netlist: Netlist, owners: Sequence[str] | None) -> tuple[str, ...]:
    """Who owns each input value: by default value 0 the garbler and value 1 the evaluator.

    Raises:
        InputError: another number of owners than of values, an unknown one, or more than two values and no owners.
    """
    count = len(netlist.inputs)
    if owners is None:
        if count > len(ROLES):
            do = "say who owns each value, for instance --owner garbler --owner evaluator --owner garbler"
            raise InputError("an owner for each input value", found=f"{count} values and no owners", do=do)
        return ROLES[:count]
    if len(owners) != count or not set(owners) <= set(ROLES):
        found = ", ".join(owners) or "none"
        raise InputError(f"{count} owners, each garbler or evaluator", found=found, do="name one for each input value")
    return tuple(owners)


def own_bits(netlist: Netlist, owners: Sequence[str], role: str, values: Sequence[int]) -> list[Array]:
    """Bits of each input value that ``role`` owns, least significant first.

    Raises:
        InputError: another number of values than it owns, or one that does not fit its width.
    """
    widths = [width for width, owner in zip(netlist.inputs, owners, strict=True) if owner == role]
    if len(values) != len(widths):
        found, do = f"{len(values)}", f"pass one for each input value that the {role} owns"
        raise InputError(f"{len(widths)} input values of the {role}", found=found, do=do)
    for value, width in zip(values, widths, strict=True):
        if not 0 <= value < 1 << width:
            found = f"a value of {value.bit_length()} bits" if value >= 0 else "a negative value"
            raise InputError(f"an input value of {width} bits", found=found, do="pass a value that fits")
    return [_bits(value, width) for value, width in zip(values, widths, strict=True)]


def check_readers(readers: str) -> None:
    """Refuse unknown readers.

    Raises:
        InputError: neither both nor a role.
    """
    if readers not in READERS:
        raise InputError(f"readers {', '.join(READERS)}", found=repr(readers), do="choose one of them")


def check_emp(readers: str) -> None:
    """Refuse, before anybody is met, what EMP cannot do or where it is not.

    Raises:
        InputError: other readers than both, or no EMP that was tested.
    """
    if readers != "both":
        do = "use our own engine (--engine native), which can keep the output from one party"
        raise InputError("outputs that both parties read, with EMP", found=readers, do=do)
    emp.require_build()


def run_circuit(
    channel: Channel,
    role: str,
    netlist: Netlist,
    values: Sequence[int],
    *,
    owners: Sequence[str] | None = None,
    readers: str = "both",
    settings: Settings | None = None,
) -> CircuitResult:
    """Run a circuit with the other party on our engine (Yao's protocol, semi-honest).

    Args:
        channel: a fresh channel to the other party.
        role: ``garbler`` or ``evaluator``.
        netlist: the circuit; the other party must have the same.
        values: our input values, in the order of the circuit's.
        owners: who owns each input value; by default the garbler value 0 and the evaluator value 1.
        readers: who reads the outputs: ``both``, ``garbler`` or ``evaluator``.
        settings: the engine's.

    Raises:
        InputError: a role, owners, readers or values that do not fit the circuit.
        ProtocolError: the other party runs something else, or breaks the protocol.
        TransportError: it hangs up or stalls.
    """
    if role not in ROLES:
        raise InputError("the role garbler or evaluator", found=repr(role), do="choose one of them")
    check_readers(readers)
    owned_by = owners_of(netlist, owners)
    own = own_bits(netlist, owned_by, role, values)
    settings = settings or Settings()
    started = time.perf_counter()
    parameters: dict[str, int | str] = {"owners": _stated(owned_by), "readers": readers}
    start = start_garbler if role == "garbler" else start_evaluator
    party = start(channel, program=netlist.digest(), parameters=parameters, settings=settings)
    ours = np.concatenate([np.zeros(0, dtype=np.uint8), *own])
    theirs = netlist.input_bits - len(ours)
    # The garbler's labels first, on both sides.
    if role == "garbler":
        own_labels, peer_labels = party.own_labels(ours), party.peer_labels(theirs)
    else:
        peer_labels, own_labels = party.peer_labels(theirs), party.own_labels(ours)
    mine = np.repeat(np.array([owner == role for owner in owned_by], dtype=np.bool_), netlist.inputs)
    labels = np.empty((netlist.input_bits, 1, 16), dtype=np.uint8)
    labels[mine, 0], labels[~mine, 0] = own_labels, peer_labels
    program = Program(netlist)
    bits = _garble(party, program, labels, readers) if role == "garbler" else _evaluate(party, program, labels, readers)
    channel.send(Kind.DONE)
    channel.receive(Kind.DONE, at_most=0)
    output = None if bits is None else tuple(_values(bits, netlist.outputs))
    seconds = time.perf_counter() - started
    return CircuitResult(output, party.and_gates, channel.counters, seconds, settings.transfer.security)


def run_circuit_on_emp(
    channel: Channel,
    role: str,
    netlist: Netlist,
    values: Sequence[int],
    *,
    owners: Sequence[str] | None = None,
    readers: str = "both",
    limit: float = 3600.0,
) -> CircuitResult:
    """The same with the EMP toolkit as engine, in a child process that inherits the connection; see ``run_circuit``.

    Args:
        channel: a fresh channel without TLS.
        role: ``garbler`` or ``evaluator``.
        netlist: the circuit.
        values: our input values.
        owners: who owns each input value.
        readers: only ``both``: EMP's session lets both parties read.
        limit: longest time of the whole run in seconds.

    Raises:
        InputError: as there, TLS, other readers, or no EMP that was tested.
    """
    check_emp(readers)
    owned_by = owners_of(netlist, owners)
    own = np.concatenate([np.zeros(0, dtype=np.uint8), *own_bits(netlist, owned_by, role, values)])
    started = time.perf_counter()
    hello = Hello(role, netlist.digest(), "emp", None, {"owners": _stated(owned_by), "readers": readers})
    handshake(channel, hello)
    sock = channel.detach()
    with sock:
        result = emp.run_emp(netlist, role, own, sock, timeout=channel.timeout, limit=limit, owners=owned_by)
    counters = dataclasses.replace(
        channel.counters,
        bytes_sent=channel.counters.bytes_sent + result.bytes_sent,
        bytes_received=channel.counters.bytes_received + result.bytes_received,
    )
    output = tuple(_values(result.output, netlist.outputs))
    return CircuitResult(output, netlist.and_gates, counters, time.perf_counter() - started, "semi-honest")


def _garble(party: Any, program: Program, labels: Array, readers: str) -> Array | None:
    zero = party.garble(program, labels)
    if readers != "garbler":
        party.reveal(zero)
    return party.learn(zero) if readers != "evaluator" else None


def _evaluate(party: Any, program: Program, labels: Array, readers: str) -> Array | None:
    active = party.evaluate(program, labels)
    bits = party.reveal(active) if readers != "garbler" else None
    if readers != "evaluator":
        party.tell(active)
    return bits


def _stated(owners: Sequence[str]) -> str:
    """The owners as a value of the handshake, which takes no long ones."""
    text = ",".join(owners)
    return text if len(text) <= _LONG else f"sha256 {hashlib.sha256(text.encode('ascii')).hexdigest()}"


def _bits(value: int, width: int) -> Array:
    size = -(-width // 8)
    return np.unpackbits(np.frombuffer(value.to_bytes(size, "little"), dtype=np.uint8), bitorder="little", count=width)


def _values(bits: NDArray[np.uint8], widths: Sequence[int]) -> list[int]:
    parts = np.split(bits, np.cumsum(widths)[:-1])
    return [int.from_bytes(np.packbits(part, bitorder="little").tobytes(), "little") for part in parts]
