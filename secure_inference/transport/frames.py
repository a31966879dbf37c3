"""What goes over the wire: a fixed header of 16 bytes, then the payload.

Header, little-endian: magic (2 bytes), kind (1), zero (1), length of the payload (4), number of the frame in its
direction (8, from 0). The numbers find mistakes such as a lost, repeated or swapped frame. They stop no attacker who
can write into a plain connection: that is what TLS is for.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypedDict

MAGIC = b"\xd5\x5e"
HEADER = struct.Struct("<2sBBIQ")
LIMIT = 16 * 2**20
REASON_LIMIT = 512


class Kind(enum.IntEnum):
    """What a frame carries. REFUSED says why a party stops; PING says that it is alive, and is skipped."""

    HELLO = 1
    BASE_OT = 2
    OT = 3
    INPUT = 4
    TABLES = 5
    OUTPUT = 6
    DONE = 7
    REFUSED = 8
    PING = 9
    READY = 10
    LINEAR = 11


KINDS = {int(kind): kind for kind in Kind}


class Phase(TypedDict):
    """What one phase of a session cost; a phase inside another counts in both."""

    bytes_sent: int
    bytes_received: int
    seconds: float


@dataclass(frozen=True)
class Counters:
    """What a channel has carried: bytes of frames with their headers (without what TLS and TCP add), and frames."""

    bytes_sent: int
    bytes_received: int
    frames_sent: int
    frames_received: int
    phases: Mapping[str, Phase]


def name_of(kind: int) -> str:
    """The name of a kind, or its number."""
    return KINDS[kind].name if kind in KINDS else f"number {kind}"


def readable(value: object, limit: int = 80) -> str:
    """A value of the other party as text for an error: printable ASCII only, at most ``limit`` characters."""
    text = str(value)
    short = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(character if " " <= character <= "~" else "?" for character in short)


def stranger(start: bytes) -> str:
    """What bytes that are no frame of ours seem to be."""
    if start[:2] in (b"\x16\x03", b"\x15\x03"):
        return "TLS, which we were told not to use"
    word = start.split(b" ", 1)[0]
    if word.startswith(b"HTTP/") or word in (b"GET", b"POST", b"HEAD", b"PUT", b"OPTIONS", b"DELETE", b"CONNECT"):
        return "HTTP"
    if start[:4] == b"SSH-":
        return "SSH"
    return "bytes of another protocol"
