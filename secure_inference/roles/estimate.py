"""What a question costs before anybody asks it: exact bytes from the public program, seconds from measured rates.

A question is a number of rounds, each of which begins with something that the client must say first: in ``mixed`` the
corrections of the oblivious transfers by which its bits enter, once for the input and once for each layer of circuits
that reads a shared wire; in ``yao`` there is one round. Within a round the server computes, the bytes travel and the
client computes, all three at once but for the first and the last frame. Bytes are those of our frames, without TLS
(0.2 % more) and TCP/IP.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from deepseal.errors import InputError
from deepseal.secure_inference.protocol.extension import FRAME_TRANSFERS, TransferSettings
from deepseal.secure_inference.protocol.parties import TABLE, TABLE_FRAME
from deepseal.secure_inference.roles.ahead import FRAME_BYTES, FRAME_LABELS
from deepseal.secure_inference.roles.layers import LinearLayer, Prepared
from deepseal.secure_inference.roles.mixed import REQUEST_BYTES
from deepseal.secure_inference.roles.rates import Rates, measure
from deepseal.secure_inference.roles.yao_layers import Garbled
from deepseal.secure_inference.transport.frames import HEADER

_SEED = 16
_LABEL = 16


@dataclass
class Part:
    """What one layer adds to a round; counts for all samples.

    Attributes:
        name: of the layer, as in the channel's phases.
        up: bytes from the client to the server, frames included.
        down: bytes from the server to the client, frames included.
        frames: that the server sends.
        and_gates: garbled and evaluated.
        half_gates: of one ciphertext.
        values: weights that met a bit: connections x bits of the source.
        rows: elements of a linear layer's source.
        transfers: correlated OTs.
    """

    name: str
    up: int = 0
    down: int = 0
    frames: int = 0
    and_gates: int = 0
    half_gates: int = 0
    values: int = 0
    rows: int = 0
    transfers: int = 0

    def send(self, payload: int, largest: int) -> None:
        """The server sends that many bytes, in frames of at most ``largest``."""
        count = -(-payload // largest)
        self.down += payload + HEADER.size * count
        self.frames += count


@dataclass(frozen=True)
class Estimate:
    """The cost of a question.

    Attributes:
        bytes_sent: by the client.
        bytes_received: by the client.
        seconds: predicted, online.
        rounds: how often the client must say something first.
        layers: parts, with their bytes and seconds.
        offline_bytes: sent ahead, in both directions.
        offline_seconds: likewise.
    """

    bytes_sent: int
    bytes_received: int
    seconds: float
    rounds: int
    layers: tuple[Part, ...] = field(repr=False)
    offline_bytes: int = 0
    offline_seconds: float = 0.0


def mixed_rounds(ready: Prepared, samples: int, transfer: TransferSettings) -> list[list[Part]]:
    """The rounds of a question in ``mixed``, live."""
    program = ready.program
    wire = program.wires[program.input]
    first = Part("input", up=HEADER.size + REQUEST_BYTES)
    _transfers(first, wire.number.bits * wire.size * samples, transfer)
    rounds, entered = [[first]], set[int]()
    for number, layer in enumerate(ready.layers):
        part = Part(f"{number} {layer.name}")
        if isinstance(layer, LinearLayer):
            for size in layer.frames * samples:
                part.send(size, size)
            part.values = samples * layer.multiplications * layer.source_bits
            part.rows = samples * program.wires[layer.source].size
            rounds[-1].append(part)
            continue
        new = {read.wire for read in layer.reads if read.shared} - entered
        for shared in new:
            part.send(_SEED, _SEED)
            _transfers(part, program.wires[shared].number.bits * program.wires[shared].size * samples, transfer)
        entered |= new
        lanes = samples * layer.lanes
        part.and_gates = layer.program.plan(lanes).and_gates * lanes
        part.send(TABLE * part.and_gates, TABLE_FRAME)
        if new:
            rounds.append([])
        rounds[-1].append(part)
    out = program.wires[program.output]
    answer = Part("answer")
    if out.kind == "accumulator":
        answer.send(8 * out.size * samples, 1 << 62)
    else:
        answer.send(-(-out.number.bits * out.size * samples // 8), 1 << 62)
    rounds[-1].append(answer)
    return rounds


def ahead_rounds(rounds: list[list[Part]]) -> tuple[list[Part], list[list[Part]]]:
    """The same question as what goes ahead, one round, and what is left for later."""
    offline, online = [], []
    request = HEADER.size + REQUEST_BYTES
    for parts in rounds:
        later = []
        for part in parts:
            rest = Part(part.name, and_gates=part.and_gates, values=part.values, rows=part.rows)
            if part.name == "input":
                rest.up = request
            if part.transfers:
                size = -(-part.transfers // 8)
                rest.up += size + HEADER.size * -(-size // FRAME_BYTES)
                rest.send(_LABEL * part.transfers, _LABEL * FRAME_LABELS)
            if part.name == "answer":
                rest.down, rest.frames = part.down, part.frames
            else:
                offline.append(part)
            later.append(rest)
        online.append(later)
    return offline, online


def yao_rounds(ready: Garbled, samples: int, transfer: TransferSettings) -> list[list[Part]]:
    """The one round of a question in ``yao``; headers of frames are counted roughly (within 1 %)."""
    program = ready.program
    wire = program.wires[program.input]
    first = Part("input", up=HEADER.size + 4)
    _transfers(first, wire.number.bits * wire.size * samples, transfer)
    parts = [first]
    for layer in ready.layers:
        whole, half = (samples * gates for gates in layer.gates)
        part = Part(f"{layer.step} {layer.name}", and_gates=whole, half_gates=half)
        part.send(TABLE * whole, TABLE_FRAME)
        part.send(TABLE * half // 2, TABLE_FRAME)
        parts.append(part)
    out = program.wires[program.output]
    answer = Part("answer")
    answer.send(-(-out.number.bits * out.size * samples // 8), 1 << 62)
    return [[*parts, answer]]


def estimate(
    ready: Prepared | Garbled,
    *,
    bandwidth: float,
    latency: float,
    samples: int = 1,
    transfer: TransferSettings | None = None,
    ahead: bool = False,
    rates: Rates | None = None,
) -> Estimate:
    """Bytes and seconds of one question.

    Args:
        ready: the public program, from ``prepare`` for ``mixed`` or from ``prepare_garbled`` for ``yao``.
        bandwidth: bits a second, in each direction.
        latency: seconds of a round trip.
        samples: of the question.
        transfer: settings of oblivious transfer.
        ahead: with an offline phase before it (``mixed``).
        rates: of this machine, which stands for both parties'; measured (about a second) if not given.

    Raises:
        InputError: no bandwidth, a negative latency, no samples, or ``yao`` ahead.
    """
    if not (bandwidth > 0 and latency >= 0 and samples >= 1):
        found = f"{bandwidth:g} bit/s, {latency:g} s, {samples} samples"
        do = "write for instance --bandwidth 1e9 --latency 0.001"
        raise InputError("a bandwidth above 0, a latency of at least 0 and at least one sample", found=found, do=do)
    if ahead and isinstance(ready, Garbled):
        raise InputError("the protocol mixed for an offline phase", found="yao", do="leave out --ahead, or use mixed")
    rates = rates or measure()
    settings = transfer or TransferSettings()
    if isinstance(ready, Garbled):
        rounds = yao_rounds(ready, samples, settings)
    else:
        rounds = mixed_rounds(ready, samples, settings)
    offline: list[Part] = []
    if ahead:
        offline, rounds = ahead_rounds(rounds)
    parts = tuple(part for parts in rounds for part in parts)
    seconds = sum(_seconds(parts, rates, bandwidth, latency, ahead=ahead) for parts in rounds)
    before = _seconds(offline, rates, bandwidth, latency, ahead=False) if ahead else 0.0
    return Estimate(
        sum(part.up for part in parts),
        sum(part.down for part in parts),
        seconds,
        len(rounds),
        parts,
        sum(part.up + part.down for part in offline),
        before,
    )


def _transfers(part: Part, n: int, settings: TransferSettings) -> None:
    part.transfers += n
    trees = -(-128 // settings.k)
    for start in range(0, n, FRAME_TRANSFERS):
        count = min(FRAME_TRANSFERS, n - start)
        if settings.checks:
            padded = -(-count // 128) * 128 + 128
            part.up += HEADER.size + trees * (padded // 128) * 16 + HEADER.size + 16 + 32
            part.send(16, 16)
        else:
            part.up += HEADER.size + trees * -(-count // 128) * 16


def _seconds(parts: list[Part], rates: Rates, bandwidth: float, latency: float, *, ahead: bool) -> float:
    """One round: what the client says first, then three stages at once."""
    if not parts:
        return 0.0
    total = Part("")
    for part in parts:
        for name in ("up", "down", "frames", "and_gates", "half_gates", "values", "rows", "transfers"):
            setattr(total, name, getattr(total, name) + getattr(part, name))
    garble, evaluate = (rates.yao_garble, rates.yao_evaluate) if total.half_gates else (rates.garble, rates.evaluate)
    gates = total.and_gates + total.half_gates / 2
    before = total.transfers / rates.receive + 8 * total.up / bandwidth + latency + 2 * rates.message
    before += total.transfers / rates.send
    travel = 8 * total.down / bandwidth
    # The rates of yao were measured between two processes and hold the copying already.
    copy = (0.0 if total.half_gates else total.down / rates.copy) + rates.layer * len(parts)
    server = copy if ahead else gates / garble + total.values / rates.mask + total.rows * rates.mask_row + copy
    client = gates / evaluate + total.values / rates.open + total.rows * rates.open_row + copy
    stages = (server, travel, client)
    longest = max(stages)
    return before + longest + (sum(stages) - longest) / max(1, total.frames)
