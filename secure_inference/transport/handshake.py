"""The start of a session: both parties say who they are and what they run, and go on only when that fits.

A party sends HELLO, 32 fresh random bytes and a canonical JSON object; then READY, a digest that it can only know from
both HELLOs. So a session either starts on both sides or on none. The identity of the session is

    SHA-256(label, garbler's nonce, evaluator's nonce, garbler's hello, evaluator's hello,
            SHA-256(garbler's certificate), SHA-256(evaluator's certificate))

where each item follows its length (8 bytes, little-endian), and the last two are empty without TLS. Where a constrained
client delegates, the server or the proxy stands in the garbler's place and the client in the evaluator's.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NoReturn

from deepseal.errors import InputError, ProtocolError
from deepseal.secure_inference.transport.channel import Channel
from deepseal.secure_inference.transport.frames import Kind, readable

VERSION = 1
PARTNERS = {
    "garbler": ("evaluator",),
    "evaluator": ("garbler",),
    "server": ("client",),
    "proxy": ("client",),
    "client": ("server", "proxy"),
}
HELLO_LIMIT = 64 * 2**10
_NONCE = 32
_DIGITS = 20  # of an integer; enough for 64 bits
_LABEL = b"deepseal session 1"
_SECOND = ("evaluator", "client")  # in the identity of a session
_SAME = "use the same program, engine, number format, parameters and DeepSeal on both sides"


@dataclass(frozen=True)
class Hello:
    """What a party says of itself; all of it is public.

    Args:
        role: "garbler" or "evaluator"; with delegation "server", "proxy" or "client", too.
        program: SHA-256 of the program in hexadecimal.
        engine: name of the engine.
        number: the number format, None where there is none.
        parameters: further names and values that must be the same on both sides.

    Raises:
        InputError: a value that the other party would not take.
    """

    role: str
    program: str
    engine: str
    number: str | None = None
    parameters: Mapping[str, int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "parameters", MappingProxyType(dict(sorted(self.parameters.items()))))
        wrong = _problem(self._content())
        if wrong is None and len(self.canonical()) > HELLO_LIMIT:
            wrong = f"more than {HELLO_LIMIT} bytes"
        if wrong is not None:
            raise InputError("a hello that the other party takes", found=wrong, do="correct it")

    def canonical(self) -> bytes:
        """The only form in which this hello goes over the wire: sorted keys, no spaces, ASCII."""
        return json.dumps(self._content(), sort_keys=True, separators=(",", ":"), ensure_ascii=True).encode("ascii")

    def _content(self) -> dict[str, Any]:
        return {
            "version": VERSION,
            "role": self.role,
            "program": self.program,
            "engine": self.engine,
            "number": self.number,
            "parameters": dict(self.parameters),
        }


@dataclass(frozen=True)
class Session:
    """A session that both parties agreed to. ``id``: 32 bytes, the same on both sides, never seen before."""

    id: bytes
    peer: Hello


def handshake(
    channel: Channel,
    hello: Hello,
    *,
    partner: str | None = None,
    random: Callable[[int], bytes] = secrets.token_bytes,
) -> Session:
    """Agree on a session with the other party; all of it within the channel's time-out.

    Args:
        channel: a fresh channel.
        hello: what we say.
        partner: the other party's role, where ours leaves a choice.
        random: gives that many random bytes; another one only in tests.

    Raises:
        ProtocolError: the other party's role, program, engine, number format, parameters or version do not fit;
            the text has both sides' values, and the other party is told.
        TransportError: it hung up or did not answer in time.
    """
    with channel.phase("handshake"), channel.within(channel.timeout):
        nonce = random(_NONCE)
        channel.send(Kind.HELLO, nonce + hello.canonical())
        answer = channel.receive(Kind.HELLO, at_most=_NONCE + HELLO_LIMIT)
        if hmac.compare_digest(answer[:_NONCE], nonce):
            _refuse(channel, "random bytes of its own from the other party", "ours sent back", "check the address")
        try:
            peer = parse_hello(answer[_NONCE:])
            _compare(hello, peer, PARTNERS[hello.role] if partner is None else (partner,))
        except ProtocolError as error:
            found = error.seen_by_peer if isinstance(error, _DifferenceError) else error.found
            channel.refuse(f"expected {error.expected}, found {found}")
            raise
        ours = (nonce, hello.canonical(), _digest(channel.own_certificate))
        theirs = (answer[:_NONCE], answer[_NONCE:], _digest(channel.peer_certificate))
        pairs = zip(*((ours, theirs) if hello.role not in _SECOND else (theirs, ours)), strict=True)
        session = _hash(_LABEL, *(item for pair in pairs for item in pair))
        channel.send(Kind.READY, _ready(session, hello.role))
        if not hmac.compare_digest(channel.receive(Kind.READY, at_most=32), _ready(session, peer.role)):
            _refuse(channel, "the digest of this session from the other party", "another one", "start both sides again")
        return Session(session, peer)


def parse_hello(text: bytes) -> Hello:
    """The hello in canonical JSON, and in no other form.

    Raises:
        ProtocolError: anything else, or another version.
    """
    content: Any = None
    try:
        bare = re.sub(rb'"(?:[^"\\]|\\.)*"', b"", text)
        if len(text) <= HELLO_LIMIT and b"[" not in bare and bare.count(b"{") <= 2:
            content = json.loads(
                text, object_pairs_hook=_distinct, parse_int=_integer, parse_float=_never, parse_constant=_never
            )
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        raise _bad("something that is not a hello")
    version = content.get("version")
    if type(version) is int and version != VERSION:
        raise _DifferenceError([("version", VERSION, version)])
    fields = {"version", "role", "program", "engine", "number", "parameters"}
    if content.keys() != fields:
        names = ", ".join(sorted(content.keys() ^ fields))
        raise _bad(f"unknown or missing fields: {readable(names)}")
    wrong = _problem(content)
    if wrong is not None:
        raise _bad(wrong)
    del content["version"]
    peer = Hello(**content)
    if peer.canonical() != text:
        raise _bad("a hello in another form than the canonical one")
    return peer


def _compare(ours: Hello, theirs: Hello, partners: tuple[str, ...]) -> None:
    if ours.role == theirs.role:
        do = f"start one side as {ours.role} and the other as {' or '.join(partners)}"
        raise ProtocolError("two different roles", found=f"both sides as {ours.role}", do=do)
    if theirs.role not in partners:
        expected = f"{' or '.join(partners)} as the role that meets {ours.role}"
        do = "check which address is whose, and what the other side was started as"
        raise ProtocolError(expected, found=theirs.role, do=do)
    rows: list[tuple[str, object, object]] = [
        (name, getattr(ours, name), getattr(theirs, name)) for name in ("program", "engine", "number")
    ]
    absent = "none"
    for name in sorted({*ours.parameters, *theirs.parameters}):
        rows.append((name, ours.parameters.get(name, absent), theirs.parameters.get(name, absent)))
    different = [row for row in rows if row[1] != row[2]]
    if different:
        raise _DifferenceError(different)


class _DifferenceError(ProtocolError):
    """Settings that differ; each row is a name, our value and theirs."""

    def __init__(self, rows: list[tuple[str, object, object]]) -> None:
        super().__init__("the same settings on both sides", found=_listed(rows), do=_SAME)
        self.seen_by_peer = _listed([(name, its, mine) for name, mine, its in rows])


def _listed(rows: list[tuple[str, object, object]]) -> str:
    lines = [f"{name}: ours {_shown(mine)}, theirs {_shown(its)}" for name, mine, its in rows[:4]]
    return "; ".join(lines + [f"{len(rows) - 4} more differences"] * (len(rows) > 4))


def _problem(content: Mapping[str, Any]) -> str | None:
    """What is wrong with the values of a hello, if anything is."""
    role, program, engine, number = (content[name] for name in ("role", "program", "engine", "number"))
    parameters = content["parameters"]
    if not isinstance(role, str) or role not in PARTNERS:
        return f"the role {_shown(role)}, which is none of {', '.join(PARTNERS)}"
    if not isinstance(program, str) or not re.fullmatch(r"[0-9a-f]{64}", program):
        return f"the program {_shown(program)}, which is no SHA-256 in hexadecimal"
    for name, value in (("engine", engine), ("number", "-" if number is None else number)):
        if not isinstance(value, str) or not 0 < len(value) <= 200 or not value.isprintable():
            return f"the {name} {_shown(value)}, which is no short text"
    if not isinstance(parameters, dict) or len(parameters) > 256:
        return "parameters that are no mapping of at most 256 names"
    for name, value in parameters.items():
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", name):
            return f"a parameter with the name {_shown(name)}"
        sound = -(2**63) <= value < 2**63 if type(value) is int else isinstance(value, str) and len(value) <= 4096
        if not sound or (isinstance(value, str) and not value.isprintable()):
            return f"the parameter {name} with a value that is neither a 64-bit integer nor a text"
    return None


def _shown(value: object) -> str:
    return readable(value, 68)


def _bad(found: str) -> ProtocolError:
    return ProtocolError("a hello from the other party", found=found, do="use the same DeepSeal on both sides")


def _refuse(channel: Channel, expected: str, found: str, do: str) -> NoReturn:
    channel.refuse(f"expected {expected}, found {found}")
    raise ProtocolError(expected, found=found, do=do)


def _digest(certificate: bytes | None) -> bytes:
    return b"" if certificate is None else hashlib.sha256(certificate).digest()


def _ready(session: bytes, role: str) -> bytes:
    return _hash(b"deepseal ready 1", session, role.encode("ascii"))


def _hash(*items: bytes) -> bytes:
    return hashlib.sha256(b"".join(len(item).to_bytes(8, "little") + item for item in items)).digest()


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name twice")
    return found


def _integer(digits: str) -> int:
    if len(digits) > _DIGITS:
        raise ValueError("a huge number")
    return int(digits)


def _never(_text: str) -> NoReturn:
    raise ValueError("no such number here")
