"""Oblivious transfer of any number of messages over a channel, from 128 base OTs (SoftSpoken; k = 1 is IKNP).

Correlated OT gives the sender q and the receiver t = q xor x delta for its bits x; a hash makes random OT of it, and
one message more into OT of chosen messages or into correlated OT over the integers modulo 2^l.

Security: semi-honest. With ``checks`` the trees and the corrections are checked as in Roy (CRYPTO 2022), so that a
receiver that deviates in the extension is caught, but for guesses of single bits of delta, each of which it survives
with probability 1/2. The base OTs and everything above the extension stay semi-honest.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray

from deepseal import _native
from deepseal.errors import InputError, ProtocolError
from deepseal.secure_inference.protocol.base_ot import BaseOt, ChouOrlandi
from deepseal.secure_inference.transport import Channel, Kind

Array = NDArray[np.uint8]
BLOCK = 16
FRAME_TRANSFERS = 1 << 16  # transfers in a frame: what belongs to them stays in the cache
_BATCH = 128  # transfers come in multiples of this
_DIGEST = 32
_LIMIT = 1 << 16


@dataclass(frozen=True)
class TransferSettings:
    """What both parties must agree on.

    Args:
        k: bits of the offset that each tree takes, 1 to 8: 128 / k bits are sent a transfer, for 2^k / k times the
            computation.
        checks: catch a receiver that deviates in the extension.
        base: where the first 128 transfers come from.
    """

    k: int = 2
    checks: bool = False
    base: BaseOt = field(default_factory=ChouOrlandi)

    def __post_init__(self) -> None:
        if not 1 <= self.k <= 8:
            raise InputError("k from 1 to 8", found=str(self.k), do="use 2, or more on slow links")

    def parameters(self) -> dict[str, int | str]:
        """What goes into the handshake."""
        return {"ot": f"softspoken-{self.k}" + ("-checked" if self.checks else ""), "base_ot": self.base.name}

    @property
    def security(self) -> str:
        """What is and is not held against whom."""
        if not self.checks:
            return "semi-honest"
        return "semi-honest, except that a receiver's deviation in the OT extension is caught; base OT is semi-honest"


class TransferSender:
    """The side with the offset."""

    def __init__(
        self, channel: Channel, session: bytes, keys: _native.Session, delta: _native.Delta, settings: TransferSettings
    ) -> None:
        self._channel, self._keys, self._delta, self._settings = channel, keys, delta, settings
        self._hash = _native.OtKeys(keys)
        with channel.phase("base-ot"), checked(channel):
            chosen = settings.base.choose(channel, session, delta.choose)
            opening = array(channel.receive(Kind.BASE_OT, at_most=_LIMIT))
            self._core = _native.CotSender(keys, settings.k, delta, chosen, opening)
            if settings.checks:
                self._check_trees()
        self._frame = np.empty(self._core.correction_bytes(_padded(FRAME_TRANSFERS)), dtype=np.uint8)

    def correlated(self, n: int, *, out: Array | None = None) -> Array:
        """The zero labels q, (n, 16); into ``out``, if it is given."""
        labels = np.empty((n, BLOCK), dtype=np.uint8) if out is None else out
        for _ in self._extend(labels):
            pass
        return labels

    def random(self, n: int, *, use: int = 1) -> Array:
        """Both keys of n random transfers, (n, 2, 16)."""
        labels = np.empty((n, BLOCK), dtype=np.uint8)
        parts = [self._hash.pairs(self._delta, q, first, use) for q, first in self._extend(labels)]
        return np.concatenate([np.empty((0, 2, BLOCK), dtype=np.uint8), *parts])

    def send(self, messages: Array) -> None:
        """Offer pairs of 16-byte messages, (n, 2, 16); the receiver gets one of each pair."""
        pads = self.random(len(messages))
        for start in range(0, len(messages), FRAME_TRANSFERS):
            part = slice(start, start + FRAME_TRANSFERS)
            self._channel.send(Kind.OT, messages[part] ^ pads[part])
        self._channel.flush()

    def ring(self, values: NDArray[np.uint64], bits: int) -> NDArray[np.uint64]:
        """Shares s of values, both (n, width), modulo 2^bits; the receiver gets s + x v for its bits x."""
        n, width = values.shape
        ring = _native.RingOt(self._keys, bits, width)
        shares, message = ring.send(self.random(n), np.ascontiguousarray(values, dtype=np.uint64))
        for start, stop in rows(n, ring.row_bytes):
            self._channel.send(Kind.OT, message[start:stop])
        self._channel.flush()
        return shares

    def _extend(self, labels: Array) -> Iterator[tuple[Array, int]]:
        """Fill the labels, frame by frame; each part of them with the number of its first transfer."""
        for start in range(0, len(labels), FRAME_TRANSFERS):
            part, first = labels[start : start + FRAME_TRANSFERS], self._core.used
            padded = _padded(len(part)) if self._settings.checks else len(part)
            corrections = self._frame[: self._core.correction_bytes(padded)]
            if self._channel.receive_into(Kind.OT, corrections) != len(corrections):
                refuse(self._channel, f"{len(corrections)} bytes of corrections", "fewer")
            if self._settings.checks:
                q = self._core.extend(corrections, padded)
                self._check_corrections(q)
                part[:] = q[: len(part)]
            else:
                self._core.extend(corrections, len(part), part)
            yield part, first

    def _check_trees(self) -> None:
        trees = -(-_BATCH // self._settings.k)
        got = self._channel.receive(Kind.BASE_OT, at_most=2 * BLOCK * trees + _DIGEST)
        leaves = self._core.leaf_checks(array(got[:-_DIGEST]))
        if not hmac.compare_digest(hashlib.sha256(leaves.tobytes()).digest(), got[-_DIGEST:]):
            refuse(self._channel, "trees that fit together", "others: the other party deviates from the protocol")

    def _check_corrections(self, q: Array) -> None:
        seed = os.urandom(BLOCK)
        self._channel.send(Kind.OT, seed)
        answer = self._channel.receive(Kind.OT, at_most=BLOCK + _DIGEST)
        if len(answer) != BLOCK + _DIGEST:
            refuse(self._channel, f"{BLOCK + _DIGEST} bytes of a check", f"{len(answer)}")
        wanted = _native.expected_rows(self._keys, seed, q, self._delta, answer[:BLOCK])
        if not hmac.compare_digest(hashlib.sha256(wanted.tobytes()).digest(), answer[BLOCK:]):
            refuse(self._channel, "corrections for one choice", "others: the other party deviates from the protocol")


class TransferReceiver:
    """The side with the choice bits; these are (n,) uint8 arrays of 0 and 1."""

    def __init__(self, channel: Channel, session: bytes, keys: _native.Session, settings: TransferSettings) -> None:
        self._channel, self._keys, self._settings = channel, keys, settings
        self._hash = _native.OtKeys(keys)
        with channel.phase("base-ot"):
            pairs = settings.base.offer(channel, session)
            self._core = _native.CotReceiver(keys, settings.k, pairs)
            channel.send(Kind.BASE_OT, self._core.opening)
            if settings.checks:
                leaves = self._core.leaf_checks
                channel.send(Kind.BASE_OT, self._sums(leaves).tobytes() + hashlib.sha256(leaves.tobytes()).digest())
            channel.flush()
        self._frame = np.empty(self._bytes_of(FRAME_TRANSFERS), dtype=np.uint8)

    def correlated(self, bits: Array, *, out: Array | None = None) -> Array:
        """The labels t = q xor x delta, (n, 16); into ``out``, if it is given."""
        labels = np.empty((len(bits), BLOCK), dtype=np.uint8) if out is None else out
        for _ in self._extend(bits, labels):
            pass
        return labels

    def random(self, bits: Array, *, use: int = 1) -> Array:
        """The chosen keys of n random transfers, (n, 16)."""
        labels = np.empty((len(bits), BLOCK), dtype=np.uint8)
        parts = [self._hash.chosen(t, first, use) for t, first in self._extend(bits, labels)]
        return np.concatenate([np.empty((0, BLOCK), dtype=np.uint8), *parts])

    def receive(self, bits: Array) -> Array:
        """The chosen messages, (n, 16)."""
        pads = self.random(bits)
        for start in range(0, len(bits), FRAME_TRANSFERS):
            part = bits[start : start + FRAME_TRANSFERS]
            pairs = np.empty((len(part), 2, BLOCK), dtype=np.uint8)
            if self._channel.receive_into(Kind.OT, pairs) != pairs.nbytes:
                refuse(self._channel, "a pair of messages for each transfer", "fewer")
            # Both are read; a mask takes one.
            chosen = pairs[:, 0] ^ ((pairs[:, 0] ^ pairs[:, 1]) & -part[:, None])
            pads[start : start + len(part)] ^= chosen
        return pads

    def ring(self, choices: Array, width: int, bits: int) -> NDArray[np.uint64]:
        """Shares s + x v modulo 2^bits, (n, width)."""
        ring = _native.RingOt(self._keys, bits, width)
        own = self.random(choices)
        message = np.empty((len(choices), ring.row_bytes), dtype=np.uint8)
        for start, stop in rows(len(choices), ring.row_bytes):
            if self._channel.receive_into(Kind.OT, message[start:stop]) != message[start:stop].nbytes:
                refuse(self._channel, "a message for each transfer", "fewer")
        return ring.receive(own, choices, message)

    def _extend(self, bits: Array, labels: Array) -> Iterator[tuple[Array, int]]:
        """Fill the labels, frame by frame; each part of them with the number of its first transfer."""
        for start in range(0, len(bits), FRAME_TRANSFERS):
            part = np.ascontiguousarray(bits[start : start + FRAME_TRANSFERS], dtype=np.uint8)
            own, first = labels[start : start + len(part)], self._core.used
            if self._settings.checks:
                noise = np.frombuffer(os.urandom(_padded(len(part)) - len(part)), dtype=np.uint8) & np.uint8(1)
                padded = np.concatenate([part, noise])
                t, corrections = self._core.extend(padded)
                self._channel.send(Kind.OT, corrections)
                self._answer(t, padded)
                own[:] = t[: len(part)]
            else:
                corrections = self._frame[: self._bytes_of(len(part))]
                self._core.extend(part, own, corrections)
                self._channel.send(Kind.OT, corrections)
            self._channel.flush()
            yield own, first

    def _bytes_of(self, n: int) -> int:
        trees = -(-_BATCH // self._settings.k)
        return trees * -(-n // _BATCH) * BLOCK

    def _answer(self, t: Array, bits: Array) -> None:
        seed = self._channel.receive(Kind.OT, at_most=BLOCK)
        if len(seed) != BLOCK:
            refuse(self._channel, f"a seed of {BLOCK} bytes", f"{len(seed)}")
        hashes, choices = _native.hash_rows(self._keys, seed, t, bits)
        self._channel.send(Kind.OT, choices.tobytes() + hashlib.sha256(hashes.tobytes()).digest())

    def _sums(self, leaves: Array) -> Array:
        sums, start = [], 0
        for tree in range(0, _BATCH, self._settings.k):
            count = 1 << min(self._settings.k, _BATCH - tree)
            sums.append(np.bitwise_xor.reduce(leaves[2 * start : 2 * (start + count)].reshape(count, 2, BLOCK)))
            start += count
        return np.stack(sums)


def _padded(n: int) -> int:
    """Whole batches, and one more that hides what the check says."""
    return -(-n // _BATCH) * _BATCH + _BATCH


def rows(n: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """Which rows go into a frame, as (start, stop)."""
    size = max(1, (1 << 22) // row_bytes)
    for start in range(0, n, size):
        yield start, min(start + size, n)


def array(data: bytes) -> Array:
    """Bytes as an array, without a copy."""
    return np.frombuffer(data, dtype=np.uint8)


@contextlib.contextmanager
def checked(channel: Channel) -> Iterator[None]:
    """The engine refuses what has the wrong length: then the other party is told, and the user."""
    try:
        yield
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        refuse(channel, "a message of the right length", str(error))


def refuse(channel: Channel, expected: str, found: str) -> NoReturn:
    """End the session: the other party is told why, and so is our user."""
    channel.refuse(f"expected {expected}, found {found}")
    do = "use the same DeepSeal on both sides and start again"
    raise ProtocolError(f"{expected} from the other party", found=found, do=do)
