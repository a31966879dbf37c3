"""Private inference, everything garbled: one garbled circuit for the whole network.

The mode of DeepSecure (Rouhani, Riazi, Koushanfar, 2018), with the answers of the mixed mode bit for bit. Nobody learns
more than the answer, which the client alone reads; the client's bits enter by correlated OT. By default the server
garbles: its weights then cost no transfer, a half gate of one ciphertext takes each of their bits (see ``sums``), and
the number of rounds is constant: the client says its question, then only reads. With the client as garbler, as in the
paper, the weights enter by correlated OT as the layers come up, in a round for each million bits.

Semi-honest. With the server as garbler, a client that deviates can only spoil its own answer, as far as the transfers
hold: it sends nothing behind its input. A malicious garbler can send other circuits.
"""

from __future__ import annotations

from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import InputError
from deepseal.secure_inference.protocol.extension import Array, refuse
from deepseal.secure_inference.protocol.parties import (
    EvaluatorParty,
    GarblerParty,
    Settings,
    start_evaluator,
    start_garbler,
)
from deepseal.secure_inference.roles.yao_layers import Garbled
from deepseal.secure_inference.roles.yao_walk import Party, Walk
from deepseal.secure_inference.transport import Channel, Kind

Garbles: TypeAlias = Literal["server", "client"]
PROTOCOLS = {"server": "yao-1", "client": "yao-client-1"}
_COUNT = 4  # bytes of the number of samples
MOST_SAMPLES = 4096


class YaoServerSession:
    """One client's session, on the server's side; it may ask any number of times.

    Args:
        channel: a fresh channel.
        ready: what is served, from ``prepare_garbled_server``.
        settings: the engine's.
        garbler: who garbles; both parties must agree.

    Raises:
        InputError: another garbler than server or client.
        ProtocolError: the client runs another program, or breaks the protocol.
        TransportError: it hangs up or stalls.
    """

    def __init__(self, channel: Channel, ready: Garbled, settings: Settings, *, garbler: Garbles = "server") -> None:
        self._ready, self._channel = ready, channel
        self._party = _start(channel, ready, settings, garbler, own=garbler == "server")

    def answer(self) -> bool:
        """Answer one question; False when the client is done.

        Raises:
            ProtocolError: a question that is not allowed.
        """
        asked = self._channel.receive(Kind.INPUT, at_most=_COUNT)
        batch = int.from_bytes(asked, "little")
        if len(asked) != _COUNT or batch > MOST_SAMPLES:
            refuse(self._channel, f"a question of 1 to {MOST_SAMPLES} samples", f"{batch}")
        if batch == 0:
            return False
        wire = self._ready.program.wires[self._ready.program.input]
        source = self._party.peer_labels(wire.number.bits * batch * wire.size)
        out = Walk(self._ready, self._party).run(source, batch)
        if isinstance(self._party, GarblerParty):
            self._party.reveal(out)
        else:
            self._party.tell(out)
        return True


class YaoClientSession:
    """A session with a server; see ``YaoServerSession``.

    Args:
        channel: a fresh channel.
        ready: the public program, the same as the server's, from ``prepare_garbled``.
        settings: the engine's.
        garbler: who garbles.
    """

    def __init__(self, channel: Channel, ready: Garbled, settings: Settings, *, garbler: Garbles = "server") -> None:
        self._ready, self._channel = ready, channel
        self._party = _start(channel, ready, settings, garbler, own=garbler == "client")

    def ask(self, x: NDArray[np.int64]) -> NDArray[np.int64]:
        """The output wire's integers, (N, …), for (N, …) integers of the input wire (``encode_input``).

        Raises:
            InputError: another shape or range.
        """
        program = self._ready.program
        wire, output = program.wires[program.input], program.wires[program.output]
        batch = len(x)
        if x.shape[1:] != wire.shape or not 1 <= batch <= MOST_SAMPLES:
            expected = f"1 to {MOST_SAMPLES} samples of shape {wire.shape}"
            raise InputError(expected, found=str(x.shape), do="use encode_input, and fewer samples at once")
        if int(x.min()) < wire.number.low or int(x.max()) > wire.number.high:
            expected = f"integers {wire.number.low} to {wire.number.high}"
            raise InputError(expected, found=f"{x.min()} to {x.max()}", do="use encode_input")
        self._channel.send(Kind.INPUT, batch.to_bytes(_COUNT, "little"))
        places = np.arange(wire.number.bits).reshape(-1, 1)
        bits = (x.reshape(1, -1).astype(np.int64) >> places & 1).astype(np.uint8)
        source = self._party.own_labels(bits.reshape(-1))
        if isinstance(self._party, GarblerParty):
            self._channel.flush()
        found = self._read(Walk(self._ready, self._party).run(source, batch)).reshape(output.number.bits, -1)
        weights = np.int64(1) << np.arange(output.number.bits, dtype=np.int64)
        values: NDArray[np.int64] = weights @ found.astype(np.int64)
        if output.kind == "accumulator" or output.number.signed:
            half = np.int64(1) << np.int64(output.number.bits - 1)
            values = (values ^ half) - half
        return values.reshape(batch, *output.shape)

    def close(self) -> None:
        """Tell the server that no more questions come."""
        self._channel.send(Kind.INPUT, bytes(_COUNT))
        self._channel.flush()

    def _read(self, labels: Array) -> Array:
        return self._party.reveal(labels) if isinstance(self._party, EvaluatorParty) else self._party.learn(labels)


def _start(channel: Channel, ready: Garbled, settings: Settings, garbler: str, *, own: bool) -> Party:
    if garbler not in PROTOCOLS:
        raise InputError("server or client as garbler", found=repr(garbler), do="choose one of them")
    parameters = {"protocol": PROTOCOLS[garbler]}
    start = start_garbler if own else start_evaluator
    return start(channel, program=ready.digest, parameters=parameters, settings=settings)
