"""Randomness as a value: a seed tree for experiments and an extendable-output function for secrets.

Both are SHAKE-256 (NIST FIPS 202) over unambiguously framed labels, so any value can be recomputed by anybody
from its seed or secret and its label.
"""

from __future__ import annotations

import dataclasses
import hashlib
import secrets
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

if TYPE_CHECKING:
    import torch

XOF = "shake256/deepseal-v1"
SECRET_BYTES = 32


def expand(secret: bytes, label: str, length: int) -> bytes:
    """``length`` pseudo-random bytes from a secret for one purpose: the named XOF of every key."""
    domain, purpose = XOF.encode(), label.encode()
    framed = b"".join(len(part).to_bytes(8, "little") + part for part in (domain, purpose, secret))
    return hashlib.shake_256(framed).digest(length)


def expand_bits(secret: bytes, label: str, count: int) -> NDArray[np.uint8]:
    """``count`` fair bits (0 or 1)."""
    data = np.frombuffer(expand(secret, label, (count + 7) // 8), dtype=np.uint8)
    return np.unpackbits(data, count=count, bitorder="little")


def expand_normal(secret: bytes, label: str, shape: tuple[int, ...]) -> NDArray[np.float32]:
    """Independent N(0, 1) numbers by inversion of 32-bit uniforms (|value| < 6.4)."""
    count = int(np.prod(shape))
    words = np.frombuffer(expand(secret, label, 4 * count), dtype="<u4")
    return ndtri((words + 0.5) * 2.0**-32).astype(np.float32).reshape(shape)


def expand_choice(secret: bytes, label: str, population: int, count: int) -> NDArray[np.int64]:
    """``count`` distinct numbers below ``population``, each subset equally likely (ranking of 64-bit words)."""
    words = np.frombuffer(expand(secret, label, 8 * population), dtype="<u8")
    return np.argsort(words, kind="stable")[:count].astype(np.int64)


def expand_integers(secret: bytes, label: str, count: int, below: int) -> NDArray[np.int64]:
    """``count`` independent numbers 0 … ``below`` - 1, uniform up to ``below`` / 2^64 (64-bit words, reduced)."""
    words = np.frombuffer(expand(secret, label, 8 * count), dtype="<u8")
    numbers: NDArray[np.int64] = (words % np.uint64(below)).astype(np.int64)
    return numbers


def fresh_secret() -> bytes:
    """32 bytes from the operating system."""
    return secrets.token_bytes(SECRET_BYTES)


@dataclasses.dataclass(frozen=True)
class Rng:
    """A node of a seed tree. Passing one on never changes it; two children with different labels are independent."""

    seed: int
    path: tuple[str, ...] = ()

    def child(self, *labels: str | int) -> Rng:
        """The node for a named part of the work."""
        path = (*self.path, *(str(label) for label in labels))
        if any("\x1f" in label for label in path):
            raise ValueError("a label may not contain the separator U+001F")
        return Rng(self.seed, path)

    def bytes(self, length: int) -> bytes:
        """Pseudo-random bytes of this node."""
        return expand(str(self.seed).encode(), "rng\x1f" + "\x1f".join(self.path), length)

    def integer(self) -> int:
        """A 63-bit integer, for libraries that want a seed."""
        return int.from_bytes(self.bytes(8), "little") >> 1

    def numpy(self) -> np.random.Generator:
        """A fresh NumPy generator."""
        return np.random.default_rng(self.integer())

    def torch(self, device: torch.device | str = "cpu") -> torch.Generator:
        """A fresh torch generator."""
        import torch

        return torch.Generator(device).manual_seed(self.integer())
