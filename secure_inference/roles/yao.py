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

from collections.abc import Callable
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deepseal import _native
from deepseal.errors import InputError
from deepseal.secure_inference.protocol.extension import refuse
from deepseal.secure_inference.protocol.parties import (
    EvaluatorParty,
    GarblerParty,
    Settings,
    start_evaluator,
    start_garbler,
)
from deepseal.secure_inference.roles.answers import MOST_SAMPLES, check_question, from_bits
from deepseal.secure_inference.roles.memory import Memory
from deepseal.secure_inference.roles.walk import Progress
from deepseal.secure_inference.roles.yao_layers import Garbled
from deepseal.secure_inference.roles.yao_walk import Party, Walk
from deepseal.secure_inference.transport import Channel, Kind

Garbles: TypeAlias = Literal["server", "client"]
PROTOCOLS = {"server": "yao-1", "client": "yao-client-1"}
_COUNT = 4  # bytes of the number of samples


class YaoServerSession:
    """One client's session, on the server's side; it may ask any number of times.

    Args:
        channel: a fresh channel.
        ready: what is served, from ``prepare_garbled_server``.
        settings: the engine's.
        garbler: who garbles; both parties must agree.
        allows: whether this client may ask about that many samples more.
        memory: the bound that this party's sessions share.

    Raises:
        InputError: another garbler than server or client.
        ProtocolError: the client runs another program, or breaks the protocol.
        TransportError: it hangs up or stalls.
    """

    def __init__(
        self,
        channel: Channel,
        ready: Garbled,
        settings: Settings,
        *,
        garbler: Garbles = "server",
        allows: Callable[[int], bool] = lambda _samples: True,
        memory: Memory | None = None,
    ) -> None:
        self._ready, self._channel, self._allows = ready, channel, allows
        self._memory = memory or Memory()
        self._party = _start(channel, ready, settings, garbler, own=garbler == "server")
        self.questions = 0  # answered

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
        with self._memory.hold(self._channel, batch, self._ready.label_bytes):
            if not self._allows(batch):
                refuse(self._channel, "a client with questions left", f"one that used its share: {batch} samples more")
            wire = self._ready.program.wires[self._ready.program.input]
            source = self._party.peer_labels(wire.number.bits * batch * wire.size)
            out = Walk(self._ready, self._party).run(source, batch)
            if isinstance(self._party, GarblerParty):
                self._party.reveal(out)
            else:
                self._party.tell(out)
        self.questions += 1
        return True

    def erase(self) -> None:
        """Nothing is prepared ahead in this mode."""


class YaoClientSession:
    """A session with a server; see ``YaoServerSession``.

    Args:
        channel: a fresh channel.
        ready: the public program, the same as the server's, from ``prepare_garbled``.
        settings: the engine's.
        garbler: who garbles.
        progress: called with the number of layers that are done, and of all, during each question.
    """

    def __init__(
        self,
        channel: Channel,
        ready: Garbled,
        settings: Settings,
        *,
        garbler: Garbles = "server",
        progress: Progress | None = None,
    ) -> None:
        self._ready, self._channel, self._progress = ready, channel, progress
        self._party = _start(channel, ready, settings, garbler, own=garbler == "client")

    def ask(self, x: NDArray[np.int64]) -> NDArray[np.int64]:
        """The output wire's integers, (N, …), for (N, …) integers of the input wire (``encode_input``).

        Raises:
            InputError: another shape or range.
        """
        program = self._ready.program
        check_question(program, x)
        number, batch = program.wires[program.input].number, len(x)
        self._channel.send(Kind.INPUT, batch.to_bytes(_COUNT, "little"))
        words = np.ascontiguousarray(x.reshape(-1), dtype=np.int64).view(np.uint64)
        source = self._party.own_labels(_native.word_bits(words, number.bits).reshape(-1))
        if isinstance(self._party, GarblerParty):
            self._channel.flush()
        labels = Walk(self._ready, self._party).run(source, batch, self._progress)
        party = self._party
        bits = party.reveal(labels) if isinstance(party, EvaluatorParty) else party.learn(labels)
        return from_bits(program, bits, batch)

    def prepare(self, samples: int) -> None:
        """Not in this mode.

        Raises:
            InputError: always.
        """
        del samples
        raise InputError(
            "the protocol mixed to prepare a question", found="yao", do="ask without --ahead, or use mixed"
        )

    def erase(self) -> None:
        """Nothing is prepared ahead in this mode."""

    def close(self) -> None:
        """Tell the server that no more questions come."""
        self._channel.send(Kind.INPUT, bytes(_COUNT))
        self._channel.flush()


def _start(channel: Channel, ready: Garbled, settings: Settings, garbler: str, *, own: bool) -> Party:
    if garbler not in PROTOCOLS:
        raise InputError("server or client as garbler", found=repr(garbler), do="choose one of them")
    parameters = {"protocol": PROTOCOLS[garbler]}
    start = start_garbler if own else start_evaluator
    return start(channel, program=ready.digest, parameters=parameters, settings=settings)
