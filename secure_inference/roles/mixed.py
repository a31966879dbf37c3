"""Private inference, mixed mode: linear layers by correlated OT on activation bits, the rest in garbled circuits.

The server owns the weights and garbles; the client owns the input and evaluates. A linear layer turns labelled bits
into additive shares modulo 2^l (Gilboa 1999); the labels of a circuit's outputs are the keys of the next OTs, so hidden
layers need no new ones. Back in the circuit, the server's share costs nothing and the client's enters by correlated OT
with the circuit's own offset. DeepSecure (Rouhani, Riazi, Koushanfar, 2018) garbles everything; the integers are the
same. A question may be prepared before its input is known: see ``ahead``.

Semi-honest. A malicious client can flip the bits with which it re-enters a circuit, shift pre-activations and so learn
weights (ePrint 2021/1040): serve this mode to clients that you trust to follow the protocol.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from deepseal import _native
from deepseal.errors import InputError
from deepseal.secure_inference.protocol.extension import BLOCK, Array, refuse
from deepseal.secure_inference.protocol.parties import GarblerParty, Settings, start_evaluator, start_garbler
from deepseal.secure_inference.roles.ahead import ClientBundle, Live, ServerBundle, bundle_bytes
from deepseal.secure_inference.roles.answers import MOST_SAMPLES, check_question, from_bits, from_shares
from deepseal.secure_inference.roles.halves import TICKET
from deepseal.secure_inference.roles.layers import CircuitLayer, LinearLayer, Prepared, Words
from deepseal.secure_inference.roles.memory import Memory
from deepseal.secure_inference.roles.walk import Progress, walk
from deepseal.secure_inference.transport import Channel, Kind

if TYPE_CHECKING:
    from deepseal.secure_inference.roles.desk import Desk

PROTOCOL = "mixed-2"
MOST_AHEAD = 4096  # samples that are prepared at a time
_REQUEST = struct.Struct("<BI")  # what is asked, and for how many samples
REQUEST_BYTES = _REQUEST.size
_END, _ASK, _PREPARE, _USE, _DELEGATED = range(5)


class ServerSession:
    """One client's session, on the server's side; it may ask any number of times.

    Args:
        channel: a fresh channel.
        ready: what is served, from ``prepare_server``.
        settings: the engine's.
        allows: whether this client may ask about that many samples more.
        halves: where the questions of constrained clients wait, for which a proxy asks.
        memory: the bound that this party's sessions share.

    Raises:
        ProtocolError: the client runs another program, or breaks the protocol.
        TransportError: it hangs up or stalls.
    """

    def __init__(
        self,
        channel: Channel,
        ready: Prepared,
        settings: Settings,
        allows: Callable[[int], bool] = lambda _samples: True,
        halves: Desk | None = None,
        memory: Memory | None = None,
    ) -> None:
        self._ready, self._channel, self._allows, self._halves = ready, channel, allows, halves
        self._memory = memory or Memory()
        self._party = start_garbler(channel, program=ready.digest, parameters={"protocol": PROTOCOL}, settings=settings)
        self._linear = _linear_layers(ready, self._party.keys)
        self._message = np.empty(_largest(ready), dtype=np.uint8)
        self._bundles: deque[ServerBundle] = deque()
        self.questions = 0  # answered

    def answer(self) -> bool:
        """Serve one request, a question or its preparation; False when the client is done.

        Raises:
            ProtocolError: a request that is not allowed.
        """
        asked = self._channel.receive(Kind.INPUT, at_most=_REQUEST.size)
        if len(asked) != _REQUEST.size:
            refuse(self._channel, f"a request of {_REQUEST.size} bytes", f"{len(asked)}")
        what, samples = _REQUEST.unpack(asked)
        if what == _END:
            return False
        if what not in (_ASK, _PREPARE, _USE, _DELEGATED) or not 1 <= samples <= MOST_SAMPLES:
            refuse(self._channel, f"a question of 1 to {MOST_SAMPLES} samples", f"{samples}")
        waiting = sum(bundle.samples for bundle in self._bundles)
        if what == _USE:
            if not self._bundles or self._bundles[0].samples != samples:
                refuse(self._channel, "a question that was prepared", f"one of {samples} samples that was not")
            self._use(self._bundles.popleft())
            return True
        if what == _PREPARE:
            if waiting + samples > MOST_AHEAD:
                refuse(self._channel, f"at most {MOST_AHEAD} samples ahead", f"{waiting + samples}")
        elif waiting:
            refuse(self._channel, "first the questions that were prepared", "another")
        with self._memory.hold(self._channel, samples, self._ready.label_bytes):
            if what == _DELEGATED:
                self._delegated(samples)
                return True
            self._charge(samples)
            if what == _PREPARE:
                self._prepare(samples)
            else:
                self._tell(*self._walk(samples, self._party))
        return True

    def _charge(self, samples: int) -> None:
        if not self._allows(samples):
            refuse(self._channel, "a client with questions left", f"one that used its share: {samples} samples more")

    def erase(self) -> None:
        """Overwrite what was prepared and not asked."""
        while self._bundles:
            self._forget(self._bundles.popleft())

    def _forget(self, bundle: ServerBundle) -> None:
        bundle.erase()
        self._memory.give(bundle.held)

    def _prepare(self, samples: int) -> None:
        bundle = ServerBundle(samples)
        each = bundle_bytes(self._ready.program)
        self._memory.claim(self._channel, samples, each)
        bundle.held = samples * each
        self._bundles.append(bundle)
        with self._channel.phase("ahead"):
            bundle.zero, bundle.share = self._walk(samples, _Ahead(self._party, bundle))
            self._channel.flush()

    def _use(self, bundle: ServerBundle) -> None:
        try:
            with self._channel.phase("online"):
                bundle.answer(self._party)
                self._tell(bundle.zero, bundle.share)
        finally:
            self._forget(bundle)

    def _delegated(self, samples: int) -> None:
        """The proxy knows y = b xor s of each input bit b, we know s: the zero label of b is that of y plus s delta."""
        ticket = self._channel.receive(Kind.INPUT, at_most=TICKET)
        found = self._halves.take(ticket, samples) if self._halves is not None else None
        if found is None:
            self._channel.send(Kind.READY, b"\0")
            return
        with found:
            if not self._allows(samples):
                found.fail("this proxy's clients have used their share of samples")
                self._charge(samples)
            self._channel.send(Kind.READY, b"\1")
            zero, share = self._walk(samples, self._party, found.bits)
            self._channel.flush()
            found.tell(half_of(zero, share))
        self.questions += 1

    def _walk(self, samples: int, clients: _ClientLabels, flips: Array | None = None) -> tuple[Array, Words | None]:
        wire = self._ready.program.wires[self._ready.program.input]
        source = clients.peer_labels(wire.number.bits * samples * wire.size)
        if flips is not None:
            source = self._party.offset(source, flips)
        return walk(self._ready, source, samples, _ServerSide(self, clients))

    def _tell(self, zero: Array, share: Words | None) -> None:
        """What the client may read, last: colours of the answer's wires, or our share of the logits."""
        if share is None:
            self._party.reveal(zero)
        else:
            self._channel.send(Kind.OUTPUT, share.astype("<u8"))
            self._channel.flush()
        self.questions += 1


class _ClientLabels(Protocol):
    def peer_labels(self, n: int, *, out: Array | None = None) -> Array:
        """Zero labels (n, 16) of the client's bits."""
        ...


class _Ahead:
    def __init__(self, party: GarblerParty, bundle: ServerBundle) -> None:
        self._party, self._bundle = party, bundle

    def peer_labels(self, n: int, *, out: Array | None = None) -> Array:
        return self._bundle.labels(self._party, n, out)


class _ServerSide:
    def __init__(self, session: ServerSession, clients: _ClientLabels) -> None:
        self._clients, self._party = clients, session._party
        self._ready, self._linear, self._message = session._ready, session._linear, session._message
        self.constants = self._party.constants

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._party.channel.phase(name)

    def linear(self, layer: LinearLayer, labels: Array, batch: int) -> Words:
        ot, weights = self._linear[layer.step], self._ready.weights[layer.step]
        shares = np.zeros((batch, layer.outputs), dtype=np.uint64)
        for sample in range(batch):
            for first, last in layer.ranges:
                size = self._party.linear(ot, weights, first, last, labels, sample, shares[sample], self._message)
                self._party.channel.send(Kind.LINEAR, self._message[:size])
        shares += self._ready.biases[layer.step].view(np.uint64)
        return shares & _mask(layer.bits)

    def reenter(self, share: Words, bits: int) -> Array:
        n = bits * share.size
        labels = np.empty((2 * n, BLOCK), dtype=np.uint8)
        labels[:n] = self._party.own_labels(_native.word_bits(share, bits).reshape(-1))
        self._clients.peer_labels(n, out=labels[n:])
        return labels.reshape(2 * bits, share.size, BLOCK)

    def circuit(self, layer: CircuitLayer, inputs: Array) -> Array:
        return self._party.garble(layer.program, inputs)


class ClientSession:
    """A session with a server; see ``ServerSession``.

    Args:
        channel: a fresh channel.
        ready: the public program, the same as the server's, from ``prepare``.
        settings: the engine's.
        progress: called with the number of layers that are done, and of all, during each question.
    """

    def __init__(self, channel: Channel, ready: Prepared, settings: Settings, progress: Progress | None = None) -> None:
        self._ready, self._channel, self._progress = ready, channel, progress
        self._party = start_evaluator(
            channel, program=ready.digest, parameters={"protocol": PROTOCOL}, settings=settings
        )
        self._linear = _linear_layers(ready, self._party.keys)
        self._live = Live(channel, self._party, np.empty(_largest(ready), dtype=np.uint8))
        self._bundles: deque[ClientBundle] = deque()

    @property
    def ahead(self) -> tuple[int, ...]:
        """Samples of each question that is prepared, in order."""
        return tuple(bundle.samples for bundle in self._bundles)

    def prepare(self, samples: int) -> None:
        """Take ahead whatever does not depend on the input of the next question but those that are prepared already.

        Raises:
            InputError: too many samples.
        """
        if samples < 1 or sum(self.ahead) + samples > MOST_AHEAD:
            expected = f"1 to {MOST_AHEAD} samples ahead"
            raise InputError(expected, found=str(sum(self.ahead) + samples), do="ask some questions first")
        with self._channel.phase("ahead"):
            self._channel.send(Kind.INPUT, _REQUEST.pack(_PREPARE, samples))
            self._bundles.append(ClientBundle.collect(self._ready, self._party, self._live, samples))

    def ask(self, x: NDArray[np.int64]) -> NDArray[np.int64]:
        """The output wire's integers, (N, …), for (N, …) integers of the input wire (``encode_input``).

        Raises:
            InputError: another shape or range, or a number of samples other than that of the next prepared question.
        """
        wire = self._ready.program.wires[self._ready.program.input]
        batch = len(x)
        check_question(self._ready.program, x)
        if self._bundles and self._bundles[0].samples != batch:
            found = f"{batch} samples"
            expected = f"the question that was prepared, of {self._bundles[0].samples} samples"
            raise InputError(expected, found=found, do="ask as many samples at once as you prepared")
        words = np.ascontiguousarray(x.reshape(batch, -1), dtype=np.int64).view(np.uint64)
        bits = _native.word_bits(words, wire.number.bits).reshape(-1)
        if not self._bundles:
            self._channel.send(Kind.INPUT, _REQUEST.pack(_ASK, batch))
            return self._answer(bits, batch, self._live)
        bundle = self._bundles.popleft()
        try:
            with self._channel.phase("online"):
                self._channel.send(Kind.INPUT, _REQUEST.pack(_USE, batch))
                return self._answer(bits, batch, bundle)
        finally:
            bundle.erase()

    def delegated(self, ticket: bytes, bits: Array, batch: int) -> bytes | None:
        """As a constrained client's proxy: our half of the answer, with which we learn nothing.

        Args:
            ticket: the client's, 16 bytes; the server has the other half of its question.
            bits: (n,) y = b xor s for each input bit b, in the order of the labels.
            batch: samples of the question.

        Returns:
            Colours of the output's labels or our share of the output; None where the server does not know the ticket.
        """
        self._channel.send(Kind.INPUT, _REQUEST.pack(_DELEGATED, batch))
        self._channel.send(Kind.INPUT, ticket)
        found = self._channel.receive(Kind.READY, at_most=1)
        if found not in (b"\0", b"\1"):
            refuse(self._channel, "whether the server knows a ticket", "something else")
        return half_of(*self._walk(bits, batch, self._live)) if found == b"\1" else None

    def close(self) -> None:
        """Tell the server that no more questions come."""
        self.erase()
        self._channel.send(Kind.INPUT, _REQUEST.pack(_END, 0))
        self._channel.flush()

    def erase(self) -> None:
        """Overwrite what was prepared and not asked."""
        for bundle in self._bundles:
            bundle.erase()
        self._bundles.clear()

    def _walk(self, bits: Array, batch: int, incoming: Live | ClientBundle) -> tuple[Array, Words | None]:
        source = np.empty((len(bits), BLOCK), dtype=np.uint8)
        incoming.ours(bits, source)
        return walk(self._ready, source, batch, _ClientSide(self, incoming), self._progress)

    def _answer(self, bits: Array, batch: int, incoming: Live | ClientBundle) -> NDArray[np.int64]:
        labels, share = self._walk(bits, batch, incoming)
        if share is not None:
            theirs = np.empty(share.shape, dtype="<u8")
            if self._channel.receive_into(Kind.OUTPUT, theirs) != theirs.nbytes:
                refuse(self._channel, "a share of each output", "fewer")
            return from_shares(self._ready.program, share, theirs, batch)
        return from_bits(self._ready.program, self._party.reveal(labels), batch)


class _ClientSide:
    def __init__(self, session: ClientSession, incoming: Live | ClientBundle) -> None:
        self._incoming, self._party, self._linear = incoming, session._party, session._linear
        self.constants = self._party.constants

    def phase(self, name: str) -> AbstractContextManager[None]:
        return self._party.channel.phase(name)

    def linear(self, layer: LinearLayer, labels: Array, batch: int) -> Words:
        ot = self._linear[layer.step]
        shares = np.zeros((batch, layer.outputs), dtype=np.uint64)
        messages = self._incoming.messages(layer, batch)
        for sample in range(batch):
            for first, last in layer.ranges:
                ot.receive(first, last, labels, sample, next(messages), shares[sample])
        return shares & _mask(layer.bits)

    def reenter(self, share: Words, bits: int) -> Array:
        n = bits * share.size
        labels = np.empty((2 * n, BLOCK), dtype=np.uint8)
        labels[:n] = self._incoming.theirs(n)
        self._incoming.ours(_native.word_bits(share, bits).reshape(-1), labels[n:])
        return labels.reshape(2 * bits, share.size, BLOCK)

    def circuit(self, layer: CircuitLayer, inputs: Array) -> Array:
        return self._party.evaluate(layer.program, inputs, tables=self._incoming.tables(layer, inputs.shape[1]))


def half_of(labels: Array, share: Words | None) -> bytes:
    """One party's half of an answer: the colours of its labels, packed from the lowest bit, or its share (64 bits)."""
    if share is None:
        return np.packbits(labels.reshape(-1, BLOCK)[:, 0] & 1, bitorder="little").tobytes()
    return share.astype("<u8").tobytes()


def _linear_layers(ready: Prepared, keys: _native.Session) -> dict[int, _native.LinearOt]:
    return {layer.step: layer.start(keys) for layer in ready.layers if isinstance(layer, LinearLayer)}


def _largest(ready: Prepared) -> int:
    """Bytes of the largest frame of a linear layer."""
    return max((max(layer.frames) for layer in ready.layers if isinstance(layer, LinearLayer)), default=0)


def _mask(bits: int) -> np.uint64:
    mask: np.uint64 = np.uint64((1 << bits) - 1)
    return mask
