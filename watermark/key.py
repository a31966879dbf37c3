"""The owner's key as a value: self-describing, never printed, on disk encrypted when a passphrase is given."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepseal.adapter import InputSpec
from deepseal.adapter.inputs import stored
from deepseal.errors import InputError
from deepseal.rng import SECRET_BYTES, XOF, expand, expand_bits

VERSION = 1
MOST_BITS = 100_000


@dataclasses.dataclass(frozen=True, kw_only=True)
class Key:
    """Everything that a verifier needs beside the suspect model.

    Attributes:
        scheme: name in the registry of schemes.
        params: parameters of the scheme, so that verification needs no options.
        owner: text of the message, such as the owner's name.
        secret: 32 bytes from which the scheme expands mask, projections and trigger choice with the XOF.
        spec: input of the model.
        public: what may be shown: layers, carriers, bits.
        tensors: trigger inputs and labels; they can hold training data, so they are as private as the secret.
        reproducible: the secret came from a seed that somebody else could try.
    """

    scheme: str
    params: Mapping[str, Any]
    owner: str
    secret: bytes = dataclasses.field(repr=False)
    spec: InputSpec
    public: Mapping[str, Any]
    tensors: Mapping[str, Tensor] = dataclasses.field(default_factory=lambda: MappingProxyType({}), repr=False)
    reproducible: bool = False
    version: int = VERSION

    @property
    def bits(self) -> int:
        """Length of the message."""
        return int(self.public["bits"])

    @property
    def triggers(self) -> int:
        """Number of trigger inputs in the key."""
        x = stored(self.tensors, "trigger_x")
        return 0 if x is None else len(x)

    @property
    def zero_bit(self) -> bool:
        """Whether the key holds no message, only triggers whose answers should all agree with it."""
        return self.public.get("zero_bit") is True

    def message(self) -> NDArray[np.uint8]:
        """The bits to embed: the text's bits XOR a mask that is uniform given everything but the secret.

        An unmarked model does not depend on the mask, so each of its bits is an independent fair coin and the
        binomial p-value is exact, whatever the projections and triggers. The mask depends on everything in the key, so
        that a forger cannot read a model first and then choose a text, layers or triggers that fit.

        All ones for a zero-bit key: its bits say whether the suspect agrees, and its secret chooses the answers.
        """
        if self.zero_bit:
            return np.ones(self.bits, dtype=np.uint8)
        return text_bits(self.owner, self.bits) ^ self._mask()

    @functools.cached_property
    def binding(self) -> str:
        """SHA-256 of everything in the key but the secret."""
        return hashlib.sha256(self._serialised(b"")).hexdigest()

    def read_text(self, bits: NDArray[np.uint8]) -> str | None:
        """The text that extracted bits spell, or None when it does not fit the message or is not text."""
        if self.zero_bit or len(self.owner.encode()) * 8 > self.bits:
            return None
        plain = np.packbits(bits ^ self._mask()).tobytes().rstrip(b"\0")
        text = plain.decode(errors="replace")
        return text if text.isprintable() and "\ufffd" not in text else None

    def with_secret(self, secret: bytes) -> Key:
        """The key that a stranger would hold who drew another secret for the same carriers and triggers."""
        key = dataclasses.replace(self, secret=secret)
        key.__dict__["binding"] = self.binding
        return key

    def strangers(self, count: int) -> Iterator[Key]:
        """Keys with other secrets, expanded from this one's: repeatable, and unknown to all but the holder."""
        return (self.with_secret(expand(self.secret, f"stranger/{index}", SECRET_BYTES)) for index in range(count))

    def fingerprint(self) -> str:
        """SHA-256 of the key's canonical bytes."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    def to_bytes(self) -> bytes:
        """Canonical unencrypted bytes: safetensors with one JSON entry. Equal keys give equal bytes."""
        return self._serialised(self.secret)

    def _mask(self) -> NDArray[np.uint8]:
        return expand_bits(self.secret, f"mask/{self.binding}", self.bits)

    def _serialised(self, secret: bytes) -> bytes:
        described = {
            "version": self.version,
            "xof": XOF,
            "scheme": self.scheme,
            "params": dict(self.params),
            "owner": self.owner,
            "spec": self.spec.as_dict(),
            "public": dict(self.public),
            "reproducible": self.reproducible,
        }
        text = json.dumps(described, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
        stored = torch.from_numpy(np.frombuffer(secret, np.uint8).copy())
        return safetensors.torch.save({**self.tensors, "secret": stored}, metadata={"deepseal-key": text})

    @classmethod
    def from_bytes(cls, data: bytes) -> Key:
        """The inverse of ``to_bytes``.

        Raises:
            InputError: not a key, damaged, or of another version.
        """
        try:
            tensors = dict(safetensors.torch.load(data))
            header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
            described = json.loads(header["__metadata__"]["deepseal-key"])
            secret = tensors.pop("secret").numpy().tobytes()
            version, xof = int(described["version"]), str(described["xof"])
            if version != VERSION or xof != XOF:
                raise InputError(
                    f"a key of version {VERSION} with {XOF}",
                    found=f"version {version} with {xof}",
                    do="use a newer DeepSeal",
                )
            bits = described["public"]["bits"]
            if type(bits) is not int or not 1 <= bits <= MOST_BITS or len(secret) != SECRET_BYTES:
                raise ValueError
            return cls(
                scheme=str(described["scheme"]),
                params=dict(described["params"]),
                owner=str(described["owner"]),
                secret=secret,
                spec=InputSpec.from_dict(described["spec"]),
                public=dict(described["public"]),
                tensors=tensors,
                reproducible=bool(described["reproducible"]),
            )
        except InputError:
            raise
        except (
            safetensors.SafetensorError,
            ValueError,
            LookupError,
            TypeError,
            AttributeError,
            OverflowError,
        ) as error:
            raise InputError(
                "an owner's key", found="damaged or foreign content", do="use an intact copy of it"
            ) from error


def text_bits(text: str, count: int) -> NDArray[np.uint8]:
    """``count`` bits that stand for a text: its UTF-8 bytes, zero-padded, or an XOF digest of it when it is longer."""
    data = text.encode()
    if len(data) * 8 > count:
        data = expand(data, "message-digest", (count + 7) // 8)
    return np.unpackbits(np.frombuffer(data.ljust((count + 7) // 8, b"\0"), np.uint8), count=count)
