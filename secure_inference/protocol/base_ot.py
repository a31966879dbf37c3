"""Base oblivious transfer: 128 random OTs from public-key operations, to seed an extension.

T. Chou, C. Orlandi, "The simplest protocol for oblivious transfer", Latincrypt 2015, in the prime-order group of
ed25519 (PyNaCl). Every received point must pass the library's check: canonical, in that group, not of small order.
Secure against semi-honest parties under CDH in the random-oracle model; it is not proven against malicious ones.

The sender publishes A = aG. For its bit c the receiver publishes R = bG + cA and knows bA = a(R - cA). The keys are
k_j = SHA-256(label, session, index, A, R, a(R - jA)).
"""

from __future__ import annotations

import hashlib
import importlib
import os
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import InputError, ProtocolError
from deepseal.secure_inference.transport import Channel, Kind

COUNT = 128
_POINT = 32
_KEY = 16
_LABEL = b"deepseal base ot 1"
Select = Callable[[NDArray[np.uint8], NDArray[np.uint8]], NDArray[np.uint8]]


class BaseOt(Protocol):
    """128 random OTs; the only part of a session that needs public-key cryptography."""

    name: str

    def offer(self, channel: Channel, session: bytes) -> NDArray[np.uint8]:
        """As sender: (128, 2, 16), both keys of each OT."""
        ...

    def choose(self, channel: Channel, session: bytes, select: Select) -> NDArray[np.uint8]:
        """As receiver: (128, 16), the chosen keys. ``select(zeros, ones)`` picks rows by the secret bits."""
        ...


class ChouOrlandi:
    """The simplest OT, semi-honest (Chou, Orlandi, 2015)."""

    name = "chou-orlandi"

    def offer(self, channel: Channel, session: bytes) -> NDArray[np.uint8]:
        """As sender.

        Raises:
            ProtocolError: the receiver sent something that is not 128 points of the group.
        """
        sodium = _sodium()
        secret = _scalar()
        public = sodium.crypto_scalarmult_ed25519_base_noclamp(secret)
        square = sodium.crypto_scalarmult_ed25519_noclamp(secret, public)  # a A
        channel.send(Kind.BASE_OT, public)
        points = _points(channel, COUNT)
        pairs = np.empty((COUNT, 2, _KEY), dtype=np.uint8)
        for index, point in enumerate(points):
            shared = _multiple(channel, secret, point, COUNT)
            other = sodium.crypto_core_ed25519_sub(shared, square)
            pairs[index, 0] = _key(session, index, public, point, shared)
            pairs[index, 1] = _key(session, index, public, point, other)
        return pairs

    def choose(self, channel: Channel, session: bytes, select: Select) -> NDArray[np.uint8]:
        """As receiver: both candidates of each point are computed, then one is taken by masks.

        Raises:
            ProtocolError: the sender sent something that is not a point of the group.
        """
        sodium = _sodium()
        (public,) = _points(channel, 1)
        _multiple(channel, _scalar(), public, 1)  # for the check
        secrets = [_scalar() for _ in range(COUNT)]
        zeros = [sodium.crypto_scalarmult_ed25519_base_noclamp(secret) for secret in secrets]
        ones = [sodium.crypto_core_ed25519_add(zero, public) for zero in zeros]
        chosen = select(_rows(zeros), _rows(ones))
        channel.send(Kind.BASE_OT, chosen)
        channel.flush()  # the sender computes while we do
        keys = np.empty((COUNT, _KEY), dtype=np.uint8)
        for index, secret in enumerate(secrets):
            shared = sodium.crypto_scalarmult_ed25519_noclamp(secret, public)
            keys[index] = _key(session, index, public, chosen[index].tobytes(), shared)
        return keys


def load() -> None:
    """Load the library, which otherwise the first session waits for.

    Raises:
        InputError: it is not installed.
    """
    _sodium()


def _sodium() -> Any:
    try:
        return importlib.import_module("nacl.bindings")
    except ImportError as error:
        do = "install it: pip install 'deepseal[private]'"
        raise InputError("the package pynacl for oblivious transfer", found="it is not installed", do=do) from error


def _scalar() -> bytes:
    """A uniform scalar of the group, from 64 bytes of the operating system."""
    scalar: bytes = _sodium().crypto_core_ed25519_scalar_reduce(os.urandom(64))
    return scalar


def _points(channel: Channel, count: int) -> list[bytes]:
    data = channel.receive(Kind.BASE_OT, at_most=count * _POINT)
    if len(data) != count * _POINT:
        _refuse(channel, count)
    return [data[i : i + _POINT] for i in range(0, len(data), _POINT)]


def _multiple(channel: Channel, scalar: bytes, point: bytes, count: int) -> bytes:
    """The product with one of ``count`` points that the other party sent.

    libsodium checks all of what its test of a valid point does: canonical, on the curve, not of small order, in the
    prime-order group (a test holds this).
    """
    sodium = _sodium()
    try:
        product: bytes = sodium.crypto_scalarmult_ed25519_noclamp(scalar, point)
    except importlib.import_module("nacl.exceptions").RuntimeError:
        _refuse(channel, count)
    return product


def _refuse(channel: Channel, count: int) -> NoReturn:
    expected, found = f"{count} points of ed25519's prime-order group", "something else"
    channel.refuse(f"expected {expected}, found {found}")
    raise ProtocolError(expected, found=found, do="stop: this is a mistake or an attack")


def _rows(points: list[bytes]) -> NDArray[np.uint8]:
    return np.frombuffer(b"".join(points), dtype=np.uint8).reshape(len(points), _POINT)


def _key(session: bytes, index: int, public: bytes, point: bytes, shared: bytes) -> NDArray[np.uint8]:
    content = _LABEL + session + index.to_bytes(2, "little") + public + point + shared
    return np.frombuffer(hashlib.sha256(content).digest()[:_KEY], dtype=np.uint8)
