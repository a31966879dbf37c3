"""The way through a program's layers where everything is garbled, the same for garbler and evaluator, owner and other.

Labels are arrays of 16-byte numbers here (complex128, of which only the bytes mean something): zero labels at the
garbler, active ones at the evaluator. Sums are added part by part, so that memory does not grow with the network, but
for the labels of the wires between layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import repeat
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from deepseal.secure_inference.protocol.extension import BLOCK, Array
from deepseal.secure_inference.protocol.parties import EvaluatorParty, GarblerParty
from deepseal.secure_inference.protocol.parties import Program as Replayed
from deepseal.secure_inference.roles.layers import Read, gather
from deepseal.secure_inference.roles.memory import ends
from deepseal.secure_inference.roles.owned import Secrets
from deepseal.secure_inference.roles.sums import Ints, Part, Sums, pair_circuit
from deepseal.secure_inference.roles.walk import Progress
from deepseal.secure_inference.roles.yao_layers import GadgetLayer, Garbled, PublicLayer, SecretLayer

Labels: TypeAlias = NDArray[np.complex128]
Party: TypeAlias = GarblerParty | EvaluatorParty
Bits: TypeAlias = tuple[Array, Array]
_HALVES = 1 << 15  # half gates of one digit that are worked out together
_PAIRS = 1 << 25  # bytes of pairs' words that are kept
_TRANSFERS = 1 << 20  # labels of weight bits that are transferred together


class Walk:
    """One party's way through the layers.

    Args:
        ready: the program.
        party: of the session.
    """

    def __init__(self, ready: Garbled, party: Party) -> None:
        self._ready, self._party = ready, party

    def run(self, source: Array, batch: int, progress: Progress | None = None) -> Array:
        """Labels of the output, (bits, batch x elements, 16), from those of the input, of the same kind."""
        program = self._ready.program
        wire = program.wires[program.input]
        labels: dict[int, Labels] = {program.input: _wide(source).reshape(wire.number.bits, batch, wire.size)}
        over = ends(program)
        for number, layer in enumerate(self._ready.layers):
            if number > 0:
                for done in over[number - 1]:
                    labels.pop(done, None)
            if progress is not None:
                progress(number, len(self._ready.layers))
            with self._party.channel.phase(f"{layer.step} {layer.name}"):
                target = program.wires[layer.target]
                shape = (target.number.bits, batch, target.size)
                if isinstance(layer, GadgetLayer):
                    operands = [self._operand(read, labels[read.wire]) for read in layer.reads]
                    labels[layer.target] = self._replay(layer.program, np.concatenate(operands)).reshape(shape)
                    continue
                out: Labels = np.empty(shape, dtype=np.complex128)
                if isinstance(layer, PublicLayer):
                    self._public(layer, labels[layer.source], out)
                else:
                    self._secret(layer, labels[layer.source], out)
                labels[layer.target] = out
        found = labels[program.output]
        return _narrow(found).reshape(len(found), -1, BLOCK)

    def _operand(self, read: Read, labels: Labels) -> Labels:
        blocks = _narrow(labels).reshape(*labels.shape, BLOCK)
        return _wide(gather(blocks, read, labels.shape[1], self._party.constants))

    def _replay(self, program: Replayed, inputs: Labels) -> Labels:
        labels = _narrow(inputs).reshape(*inputs.shape, BLOCK)
        party = self._party
        out = party.garble(program, labels) if isinstance(party, GarblerParty) else party.evaluate(program, labels)
        return _wide(out)

    def _public(self, layer: PublicLayer, labels: Labels, out: Labels) -> None:
        bits, batch, _ = labels.shape
        for program, sources, outputs in layer.runs:
            rows = labels[:, :, sources.T]  # (bits, batch, products, lanes)
            inputs = rows.transpose(2, 0, 1, 3).reshape(-1, batch * len(outputs))
            out[:, :, outputs] = self._replay(program, inputs).reshape(len(out), batch, len(outputs))

    def _secret(self, layer: SecretLayer, labels: Labels, out: Labels) -> None:
        known = self._ready.secrets.get(layer.step, (None,) * len(layer.sums))
        batch = labels.shape[1]
        for sums, secrets in zip(layer.sums, known, strict=True):
            group = sums.group
            if not group.pairs:
                bits = None if secrets is None else np.repeat(secrets.constants[None], batch, axis=0)
                out[:, :, group.outputs] = self._known(bits, len(out), (batch, len(group.outputs)))
                continue
            rows = max(1, _PAIRS // (2 * BLOCK * sums.numbers.word_bits * group.pairs))
            samples, sets = max(1, min(batch, rows // len(group.sources))), min(rows, len(group.sources))
            for sample in range(0, batch, samples):
                part = slice(sample, min(sample + samples, batch))
                for first in range(0, len(group.sources), sets):
                    _Block(self, sums, secrets, labels[:, part], first, first + sets).run(out[:, part])

    def _known(self, values: NDArray[np.uint64] | None, bits: int, shape: tuple[int, ...]) -> Labels:
        """Labels (bits, …) of numbers that the weight owner knows; it passes them, the other party None."""
        if values is None:
            labels = self._party.peer_labels(bits * int(np.prod(shape)))
            return _shaped(labels, bits, *shape)
        places = np.arange(bits, dtype=np.uint64).reshape(-1, *(1,) * values.ndim)
        found = ((values[None] >> places) & np.uint64(1)).astype(np.uint8)
        return _shaped(self._party.own_labels(found.reshape(-1)), bits, *shape)


class _Block:
    """Outputs of a group that read some rows of sources, for some samples."""

    def __init__(self, walk: Walk, sums: Sums, secrets: Secrets | None, labels: Labels, first: int, last: int) -> None:
        self._walk, self._party, self._sums, self._secrets = walk, walk._party, sums, secrets
        self._numbers = sums.numbers
        group = sums.group
        sources = group.sources[first:last]
        self._samples = labels.shape[1]
        rows = self._samples * len(sources)
        self._positions = np.flatnonzero((group.sets >= first) & (group.sets < last))
        own = group.sets[self._positions] - first
        self._rows = (np.arange(self._samples)[:, None] * len(sources) + own).reshape(-1)
        factors = [self._factor(labels, sources[:, :, side]) for side in (0, 1)]
        words = walk._replay(pair_circuit(self._numbers), np.concatenate(factors))
        words = words.reshape(2, self._numbers.word_bits, group.pairs, rows)
        self._sum, self._unlike = words[0], words[1]

    def _factor(self, labels: Labels, index: NDArray[np.int32]) -> Labels:
        """(bits, pairs x samples x rows) labels; the factor that is none is 0 after the shift of unsigned numbers."""
        found = labels[:, :, index.T]  # (bits, samples, pairs, rows)
        missing = index.T < 0
        if missing.any():
            top = (*(0,) * (len(labels) - 1), int(not self._numbers.signed))
            found[:, :, missing] = _wide(self._party.constants(top)).reshape(-1, 1, 1)
        factors: Labels = found.swapaxes(1, 2).reshape(len(labels), -1)
        return factors

    def run(self, out: Labels) -> None:
        """Fill the outputs of ``out``, (bits, samples, outputs of the layer)."""
        common = self._common()
        group, numbers = self._sums.group, self._numbers
        positions = np.tile(self._positions, self._samples)
        samples = np.repeat(np.arange(self._samples), len(self._positions))
        size = max(1, _HALVES // (numbers.word_bits * group.chunk))
        for start in range(0, len(positions), size):
            lanes = slice(start, start + size)
            rows, chosen = self._rows[lanes], positions[lanes]
            total = self._total(rows, chosen)
            constants = None if self._secrets is None else self._secrets.constants[chosen]
            known = self._walk._known(constants, numbers.ring_bits + 1, (len(rows),))
            result = self._walk._replay(self._sums.last, np.concatenate([total, common[:, rows], known]))
            out[:, samples[lanes], group.outputs[chosen]] = result

    def _common(self) -> Labels:
        total = np.empty((0, self._sum.shape[2]), dtype=np.complex128)
        for part in self._sums.common:
            words = self._sum[:, part.first : part.last].reshape(-1, self._sum.shape[2])
            total = self._walk._replay(part.program, np.concatenate([total, words]))
        return total

    def _total(self, rows: Ints, chosen: Ints) -> Labels:
        total = np.empty((0, len(rows)), dtype=np.complex128)
        digits, width = self._numbers.weight_bits, self._numbers.word_bits
        for part, weights in zip(self._sums.own, self._weights(chosen), strict=True):
            size = width * (part.last - part.first)
            inputs = np.empty((part.carried + digits * size, len(rows)), dtype=np.complex128)
            inputs[: part.carried] = total
            plain, unlike = (
                _narrow(np.take(words[:, part.first : part.last], rows, axis=2)) for words in (self._sum, self._unlike)
            )
            words = _narrow(inputs[part.carried :]).reshape(digits, size * len(rows), BLOCK)
            for word, (bits, labels) in zip(words, weights, strict=True):
                self._choose(plain, unlike, word, bits, labels)
            total = self._walk._replay(part.program, inputs)
        return total

    def _weights(self, chosen: Ints) -> Iterator[Iterable[tuple[Bits | None, Array | None]]]:
        """For each part and each digit: the weight owner's bits, and labels of them where the evaluator knows them.

        Bits: where the difference is taken, and where it is complemented, both (pairs, lanes). Labels: (2, pairs x
        lanes, 16), transferred for several parts at a time, since each transfer is a round.
        """
        party, secrets, digits = self._party, self._secrets, self._numbers.weight_bits
        if isinstance(party, GarblerParty) == (secrets is not None):
            for part in self._sums.own:
                bits = repeat(None, digits) if secrets is None else secrets.digits(chosen, part, digits)
                yield zip(bits, repeat(None))
            return
        for parts in self._batches(len(chosen)):
            if secrets is None:
                known: list[list[Bits | None]] = [[None] * digits for _ in parts]
                labels = party.peer_labels(sum(self._transfers(part, len(chosen)) for part in parts))
            else:
                known = [list(secrets.digits(chosen, part, digits)) for part in parts]
                flat = [bit.reshape(-1) for digits_of in known for pair in digits_of for bit in pair or ()]
                labels = party.own_labels(np.concatenate(flat))
            start = 0
            for part, digits_of in zip(parts, known, strict=True):
                size = self._transfers(part, len(chosen))
                yield zip(digits_of, labels[start : start + size].reshape(digits, 2, -1, BLOCK), strict=True)
                start += size

    def _transfers(self, part: Part, lanes: int) -> int:
        return 2 * self._numbers.weight_bits * (part.last - part.first) * lanes

    def _batches(self, lanes: int) -> Iterator[list[Part]]:
        batch: list[Part] = []
        for part in self._sums.own:
            if batch and sum(self._transfers(other, lanes) for other in (*batch, part)) > _TRANSFERS:
                yield batch
                batch = []
            batch.append(part)
        yield batch

    def _choose(self, plain: Array, unlike: Array, word: Array, bits: Bits | None, labels: Array | None) -> None:
        """One digit: word (bits x pairs x lanes, 16) becomes sums or differences, complemented or not."""
        party, width = self._party, self._numbers.word_bits
        taken, negative = (None, None) if bits is None else (np.tile(found.reshape(-1), width) for found in bits)
        if labels is None:
            if isinstance(party, EvaluatorParty):
                party.and_peer(unlike, word)
                _add(word, plain)
            elif taken is not None and negative is not None:
                party.and_own(unlike, taken, word)
                _add(word, party.offset(plain, negative))
            return
        for_taken, for_negative = (np.tile(found, (width, 1)) for found in labels)
        if isinstance(party, GarblerParty):
            party.and_peer(unlike, for_taken, word)
        elif taken is not None:
            party.and_own(unlike, for_taken, taken, word)
        _add(word, plain)
        _add(word, for_negative)


def _wide(labels: Array) -> Labels:
    """(…, 16) bytes as (…) numbers."""
    found: Labels = labels.view(np.complex128)[..., 0]
    return found


def _shaped(labels: Array, *shape: int) -> Labels:
    found: Labels = _wide(labels).reshape(shape)
    return found


def _narrow(labels: Labels) -> Array:
    """Numbers as (n, 16) bytes."""
    return np.ascontiguousarray(labels).reshape(-1, 1).view(np.uint8)


def _add(labels: Array, other: Array) -> None:
    """Exclusive or, in place."""
    mine = labels.view(np.uint64)
    np.bitwise_xor(mine, other.view(np.uint64), out=mine)
