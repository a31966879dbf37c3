"""Key files: mode 0600, encrypted with Argon2id (RFC 9106) and AES-256-GCM when a passphrase is given.

Layout: magic, length of the header (4 bytes, big-endian), header (JSON), payload. The header is authenticated too.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

from deepseal.errors import InputError
from deepseal.files import read_bytes, write_atomically
from deepseal.watermark.key import Key

MAGIC = b"DEEPSEAL-KEY\x00\x01"
_KDF = {"iterations": 3, "lanes": 4, "memory_kib": 65536}
_MOST = {"iterations": 16, "lanes": 16, "memory_kib": 1048576}
_LIMIT = 2**31


def save_key(key: Key, path: Path | str, *, passphrase: str | None = None, force: bool = False) -> None:
    """Write a key file that only its owner can read (mode 0600).

    Raises:
        InputError: the file exists (without ``force``), cannot be written, or the passphrase is empty.
    """
    payload = key.to_bytes()
    if passphrase is None:
        header: dict[str, Any] = {"encryption": "none", "sha256": hashlib.sha256(payload).hexdigest()}
        framed = _frame(header)
    else:
        if not passphrase:
            raise InputError("a passphrase", found="an empty one", do="choose a longer one")
        salt, nonce = secrets.token_bytes(16), secrets.token_bytes(12)
        header = {"encryption": "argon2id+aes-256-gcm", "kdf": _KDF, "nonce": nonce.hex(), "salt": salt.hex()}
        framed = _frame(header)
        payload = AESGCM(_derive(passphrase, salt, _KDF)).encrypt(nonce, payload, framed)
    write_atomically(Path(path), framed + payload, force=force, mode=0o600)


def is_encrypted(path: Path | str) -> bool:
    """Whether a key file needs a passphrase.

    Raises:
        InputError: not a key file.
    """
    return bool(_split(Path(path))[0]["encryption"] != "none")


def load_key(path: Path | str, *, passphrase: str | None = None) -> Key:
    """Read a key file.

    Raises:
        InputError: not a key file, truncated, changed, of another version, or the wrong passphrase.
    """
    path = Path(path)
    header, framed, payload = _split(path)
    if header["encryption"] == "none":
        if hashlib.sha256(payload).hexdigest() != header.get("sha256"):
            raise InputError(f"an intact key file {path}", found="a truncated or changed one", do="use a backup copy")
        return Key.from_bytes(payload)
    if passphrase is None:
        raise InputError(
            f"the passphrase of {path}",
            found="none",
            do="set DEEPSEAL_PASSPHRASE, use --passphrase-file, or answer the prompt in a terminal",
        )
    try:
        salt, nonce, kdf = bytes.fromhex(header["salt"]), bytes.fromhex(header["nonce"]), header["kdf"]
        costs = {name: int(kdf[name]) for name in _KDF}
        if any(not 1 <= costs[name] <= _MOST[name] for name in costs) or costs["memory_kib"] < 8 * costs["lanes"]:
            raise ValueError
        plain = AESGCM(_derive(passphrase, salt, costs)).decrypt(nonce, payload, framed)
    except InvalidTag as error:
        raise InputError(
            f"the right passphrase for an intact {path}",
            found="a wrong passphrase, or a truncated or changed file",
            do="try the passphrase again, or use a backup copy",
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise _foreign(path) from error
    return Key.from_bytes(plain)


def _derive(passphrase: str, salt: bytes, costs: dict[str, int]) -> bytes:
    kdf = Argon2id(
        salt=salt, length=32, iterations=costs["iterations"], lanes=costs["lanes"], memory_cost=costs["memory_kib"]
    )
    return kdf.derive(passphrase.encode())


def _frame(header: dict[str, Any]) -> bytes:
    text = json.dumps(header, sort_keys=True, separators=(",", ":")).encode()
    return MAGIC + len(text).to_bytes(4, "big") + text


def _split(path: Path) -> tuple[dict[str, Any], bytes, bytes]:
    data = read_bytes(path, "a key file", limit=_LIMIT)
    if not data.startswith(MAGIC):
        raise _foreign(path)
    start = len(MAGIC) + 4
    end = start + int.from_bytes(data[len(MAGIC) : start], "big")
    try:
        header = json.loads(data[start:end])
        known = isinstance(header, dict) and header["encryption"] in ("none", "argon2id+aes-256-gcm")
    except (ValueError, KeyError) as error:
        raise _foreign(path) from error
    if not known or end > len(data):
        raise _foreign(path)
    return header, data[:end], data[end:]


def _foreign(path: Path) -> InputError:
    return InputError(
        f"a DeepSeal key file at {path}",
        found="a truncated file or something else",
        do="pass the file that keygen wrote",
    )
