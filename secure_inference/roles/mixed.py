"""Private inference, mixed mode: linear layers by correlated OT on activation bits, the rest in garbled circuits.

The server owns the weights and garbles; the client owns the input and evaluates. A linear layer turns labelled bits
into additive shares modulo 2^l (Gilboa 1999); the labels of a circuit's outputs are the keys of the next OTs, so hidden
layers need no new ones. Back in the circuit, the server's share costs nothing and the client's enters by correlated OT
with the circuit's own offset. DeepSecure (Rouhani, Riazi, Koushanfar, 2018) garbles everything; the integers are the
same.

Semi-honest. A malicious client can flip the bits with which it re-enters a circuit, shift pre-activations and so learn
weights (ePrint 2021/1040): serve this mode to clients that you trust to follow the protocol.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from deepseal import _native
from deepseal.errors import InputError
from deepseal.secure_inference.compile.program import Program
from deepseal.secure_inference.compile.weights import Weights, layer_weights
from deepseal.secure_inference.protocol.extension import BLOCK, Array, refuse
from deepseal.secure_inference.protocol.parties import (
    EvaluatorParty,
    Settings,
    start_evaluator,
    start_garbler,
)
from deepseal.secure_inference.roles.layers import CircuitLayer, LinearLayer, Read, Words, gather, prepare, word_bits
from deepseal.secure_inference.transport import Channel, Kind

PROTOCOL = "mixed-1"
_COUNT = 4  # bytes of the number of samples
MOST_SAMPLES = 4096


class ServerSession:
    """One client's session, on the server's side; it may ask any number of times.

    Args:
        channel: a fresh channel.
        program: what is served.
        weights: its secret half.
        settings: the engine's.

    Raises:
        InputError: weights of another program.
        ProtocolError: the client runs another program, or breaks the protocol.
        TransportError: it hangs up or stalls.
    """

    def __init__(self, channel: Channel, program: Program, weights: Weights | None, settings: Settings) -> None:
        if weights is not None:
            weights.check(program)
        self._program, self._channel = program, channel
        self._layers = prepare(program)
        self._party = start_garbler(
            channel, program=program.digest(), parameters={"protocol": PROTOCOL}, settings=settings
        )
        self._linear = {
            i: layer.start(self._party.keys) for i, layer in enumerate(self._layers) if isinstance(layer, LinearLayer)
        }
        self._weights = {i: layer_weights(program, weights, i) for i in self._linear}
        self._message = np.empty(_largest(self._layers, self._linear), dtype=np.uint8)

    def answer(self) -> bool:
        """Answer one question; False when the client is done."""
        asked = self._channel.receive(Kind.INPUT, at_most=_COUNT)
        batch = int.from_bytes(asked, "little")
        if batch == 0:
            return False
        if len(asked) != _COUNT or batch > MOST_SAMPLES:
            refuse(self._channel, f"1 to {MOST_SAMPLES} samples", f"{batch}")
        wire = self._program.wires[self._program.input]
        bits = wire.number.bits
        labels = {self._program.input: self._party.peer_labels(bits * batch * wire.size)}
        labels[self._program.input] = labels[self._program.input].reshape(bits, batch, wire.size, BLOCK)
        shares: dict[int, Words] = {}
        for number, layer in enumerate(self._layers):
            with self._channel.phase(f"{number} {layer.name}"):
                if isinstance(layer, LinearLayer):
                    shares[layer.target] = self._linear_layer(number, layer, labels[layer.source], batch)
                    continue
                operands = [self._operand(read, labels, shares, batch) for read in layer.reads]
                out = self._party.garble(layer.program, np.concatenate([part for o in operands for part in o]))
                labels[layer.target] = out.reshape(layer.target_bits, batch, -1, BLOCK)
        self._tell(labels, shares)
        return True

    def _linear_layer(self, number: int, layer: LinearLayer, zero: Array, batch: int) -> Words:
        ot, weights = self._linear[number], self._weights[number]
        shares = np.zeros((batch, layer.outputs), dtype=np.uint64)
        permute = zero[..., 0] & np.uint8(1)
        coloured = self._party.offset(zero, permute)  # labels of colour 0
        flat = np.ascontiguousarray(weights.weight.reshape(-1), dtype=np.int64)
        for sample in range(batch):
            rows = np.ascontiguousarray(coloured[:, sample].swapaxes(0, 1))
            signs = np.ascontiguousarray(permute[:, sample].swapaxes(0, 1))
            for first, last in layer.ranges:
                size = self._party.linear(
                    ot, flat, first, last, rows[first:last], signs[first:last], shares[sample], self._message
                )
                self._channel.send(Kind.LINEAR, self._message[:size])
        shares += weights.bias.astype(np.int64)[layer.channels].view(np.uint64)
        return shares & _mask(layer.bits)

    def _operand(self, read: Read, labels: dict[int, Array], shares: dict[int, Words], batch: int) -> tuple[Array, ...]:
        if not read.shared:
            return (gather(labels[read.wire], read, batch, self._party.constants),)
        parts = self._reentered(read.wire, labels, shares, batch)
        return tuple(gather(part, read, batch, self._party.constants) for part in parts)

    def _reentered(
        self, wire: int, labels: dict[int, Array], shares: dict[int, Words], batch: int
    ) -> tuple[Array, Array]:
        """Labels of both shares of an accumulator: made once, however many operands read it."""
        if wire not in labels:
            bits = self._program.wires[wire].number.bits
            own = self._party.own_labels(word_bits(shares[wire], bits).reshape(-1))
            peer = self._party.peer_labels(bits * shares[wire].size)
            labels[wire] = np.stack([own, peer]).reshape(2, bits, batch, -1, BLOCK)
        return labels[wire][0], labels[wire][1]

    def _tell(self, labels: dict[int, Array], shares: dict[int, Words]) -> None:
        """What the client may read, last: colours of the answer's wires, or our share of the logits."""
        output = self._program.output
        if output in shares:
            self._channel.send(Kind.OUTPUT, shares[output].astype("<u8"))
            self._channel.flush()
        else:
            self._party.reveal(labels[output])


class ClientSession:
    """A session with a server; see ``ServerSession``.

    Args:
        channel: a fresh channel.
        program: the public program, the same as the server's.
        settings: the engine's.
    """

    def __init__(self, channel: Channel, program: Program, settings: Settings) -> None:
        self._program, self._channel = program, channel
        self._layers = prepare(program)
        self._party: EvaluatorParty = start_evaluator(
            channel, program=program.digest(), parameters={"protocol": PROTOCOL}, settings=settings
        )
        self._linear = {
            i: layer.start(self._party.keys) for i, layer in enumerate(self._layers) if isinstance(layer, LinearLayer)
        }
        self._message = np.empty(_largest(self._layers, self._linear), dtype=np.uint8)

    def ask(self, x: NDArray[np.int64]) -> NDArray[np.int64]:
        """The output wire's integers, (N, …), for (N, …) integers of the input wire (``encode_input``).

        Raises:
            InputError: another shape or range.
        """
        wire = self._program.wires[self._program.input]
        batch = len(x)
        if x.shape[1:] != wire.shape or not 1 <= batch <= MOST_SAMPLES:
            expected = f"1 to {MOST_SAMPLES} samples of shape {wire.shape}"
            raise InputError(expected, found=str(x.shape), do="use encode_input, and fewer samples at once")
        if int(x.min()) < wire.number.low or int(x.max()) > wire.number.high:
            found = f"{x.min()} to {x.max()}"
            raise InputError(f"integers {wire.number.low} to {wire.number.high}", found=found, do="use encode_input")
        self._channel.send(Kind.INPUT, batch.to_bytes(_COUNT, "little"))
        bits = word_bits(x.reshape(batch, -1).astype(np.int64).view(np.uint64), wire.number.bits)
        own = self._party.own_labels(bits.reshape(-1))
        labels = {self._program.input: own.reshape(wire.number.bits, batch, wire.size, BLOCK)}
        shares: dict[int, Words] = {}
        for number, layer in enumerate(self._layers):
            with self._channel.phase(f"{number} {layer.name}"):
                if isinstance(layer, LinearLayer):
                    shares[layer.target] = self._linear_layer(number, layer, labels[layer.source], batch)
                    continue
                operands = [self._operand(read, labels, shares, batch) for read in layer.reads]
                out = self._party.evaluate(layer.program, np.concatenate([part for o in operands for part in o]))
                labels[layer.target] = out.reshape(layer.target_bits, batch, -1, BLOCK)
        return self._read(labels, shares, batch)

    def close(self) -> None:
        """Tell the server that no more questions come."""
        self._channel.send(Kind.INPUT, bytes(_COUNT))
        self._channel.flush()

    def _linear_layer(self, number: int, layer: LinearLayer, active: Array, batch: int) -> Words:
        ot = self._linear[number]
        shares = np.zeros((batch, layer.outputs), dtype=np.uint64)
        colours = active[..., 0] & np.uint8(1)
        for sample in range(batch):
            rows = np.ascontiguousarray(active[:, sample].swapaxes(0, 1))
            choices = np.ascontiguousarray(colours[:, sample].swapaxes(0, 1))
            for first, last in layer.ranges:
                message = self._message[: ot.message_bytes(first, last)]
                if self._channel.receive_into(Kind.LINEAR, message) != len(message):
                    refuse(self._channel, f"{len(message)} bytes of a linear layer", "fewer")
                ot.receive(first, last, rows[first:last], choices[first:last], message, shares[sample])
        return shares & _mask(layer.bits)

    def _operand(self, read: Read, labels: dict[int, Array], shares: dict[int, Words], batch: int) -> tuple[Array, ...]:
        if not read.shared:
            return (gather(labels[read.wire], read, batch, self._party.constants),)
        if read.wire not in labels:
            bits = self._program.wires[read.wire].number.bits
            theirs = self._party.peer_labels(bits * shares[read.wire].size)
            ours = self._party.own_labels(word_bits(shares[read.wire], bits).reshape(-1))
            labels[read.wire] = np.stack([theirs, ours]).reshape(2, bits, batch, -1, BLOCK)
        return tuple(gather(part, read, batch, self._party.constants) for part in labels[read.wire])

    def _read(self, labels: dict[int, Array], shares: dict[int, Words], batch: int) -> NDArray[np.int64]:
        wire = self._program.wires[self._program.output]
        shape = (batch, *wire.shape)
        if self._program.output in shares:
            own = shares[self._program.output]
            theirs = np.empty(own.shape, dtype="<u8")
            if self._channel.receive_into(Kind.OUTPUT, theirs) != theirs.nbytes:
                refuse(self._channel, "a share of each output", "fewer")
            values = (own + theirs) & _mask(wire.number.bits)
            signed = True
        else:
            bits = self._party.reveal(labels[self._program.output]).reshape(wire.number.bits, batch, -1)
            places = np.arange(wire.number.bits, dtype=np.uint64).reshape(-1, 1, 1)
            values = (bits.astype(np.uint64) << places).sum(axis=0, dtype=np.uint64)
            signed = wire.number.signed
        integers = values.astype(np.int64)
        if signed and wire.number.bits < 64:
            half = np.int64(1) << np.int64(wire.number.bits - 1)
            integers = (integers ^ half) - half
        return integers.reshape(shape)


def _largest(layers: Sequence[LinearLayer | CircuitLayer], running: Mapping[int, _native.LinearOt]) -> int:
    """Bytes of the largest frame of a linear layer."""
    sizes = [
        running[i].message_bytes(*span)
        for i, layer in enumerate(layers)
        if isinstance(layer, LinearLayer)
        for span in layer.ranges
    ]
    return max(sizes, default=0)


def _mask(bits: int) -> np.uint64:
    mask: np.uint64 = np.uint64((1 << bits) - 1)
    return mask
