"""The protocols by name: what a server and a client make ready, and the sessions that they start.

``mixed``: linear layers by oblivious transfer, the rest garbled by the server; questions may be prepared ahead.
``yao``: everything garbled by the server; with checked transfers and a quota for clients that are not trusted.
``yao-client``: everything garbled by the client, as in DeepSecure's paper. All of them are semi-honest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deepseal.errors import InputError
from deepseal.secure_inference.compile.program import Program
from deepseal.secure_inference.compile.weights import Weights
from deepseal.secure_inference.protocol.parties import Settings
from deepseal.secure_inference.roles.layers import Prepared, prepare, prepare_server
from deepseal.secure_inference.roles.memory import Memory
from deepseal.secure_inference.roles.mixed import ClientSession, ServerSession
from deepseal.secure_inference.roles.walk import Progress
from deepseal.secure_inference.roles.yao import Garbles, YaoClientSession, YaoServerSession
from deepseal.secure_inference.roles.yao_layers import Garbled, prepare_garbled, prepare_garbled_server
from deepseal.secure_inference.transport import Channel

if TYPE_CHECKING:
    from deepseal.secure_inference.roles.desk import Desk

PROTOCOLS = ("mixed", "yao", "yao-client")
Ready: TypeAlias = Prepared | Garbled


class Serving(Protocol):
    """A session at the server."""

    questions: int

    def answer(self) -> bool:
        """Serve one request; False when the client is done."""
        ...

    def erase(self) -> None:
        """Overwrite what was prepared and not asked."""
        ...


class Asking(Protocol):
    """A session at the client."""

    def prepare(self, samples: int) -> None:
        """Take ahead what does not depend on the input."""
        ...

    def ask(self, x: NDArray[np.int64]) -> NDArray[np.int64]:
        """The output wire's integers for the input wire's."""
        ...

    def close(self) -> None:
        """Tell the server that no more questions come."""
        ...

    def erase(self) -> None:
        """Overwrite what was prepared and not asked."""
        ...


def check_protocol(protocol: str) -> None:
    """Refuse what there is not.

    Raises:
        InputError: an unknown protocol.
    """
    if protocol not in PROTOCOLS:
        raise InputError(f"a protocol of {', '.join(PROTOCOLS)}", found=repr(protocol), do="choose one of them")


def client_ready(program: Program | Ready, protocol: str) -> Ready:
    """The public program, made ready once for all sessions with one protocol.

    Raises:
        InputError: an unknown protocol, or a program made ready for another one.
    """
    check_protocol(protocol)
    kind = Prepared if protocol == "mixed" else Garbled
    if isinstance(program, Program):
        return prepare(program) if protocol == "mixed" else prepare_garbled(program)
    if not isinstance(program, kind):
        do = "prepare the program for this protocol"
        raise InputError(f"a program made ready for {protocol}", found="one for another", do=do)
    return program


def server_ready(program: Program, weights: Weights | None, protocol: str) -> Ready:
    """The same with the weights.

    Raises:
        InputError: an unknown protocol, weights of another program, or none where there are secret ones.
    """
    check_protocol(protocol)
    make = prepare_server if protocol == "mixed" else prepare_garbled_server
    return make(program, weights)


def start_server(
    channel: Channel,
    ready: Ready,
    settings: Settings,
    protocol: str,
    allows: Callable[[int], bool],
    halves: Desk | None = None,
    memory: Memory | None = None,
) -> Serving:
    """A client's session; see ``mixed`` and ``yao`` for what it raises."""
    if isinstance(ready, Prepared):
        return ServerSession(channel, ready, settings, allows, halves, memory)
    return YaoServerSession(channel, ready, settings, garbler=_garbler(protocol), allows=allows, memory=memory)


def start_client(
    channel: Channel, ready: Ready, settings: Settings, protocol: str, progress: Progress | None = None
) -> Asking:
    """A session with a server."""
    if isinstance(ready, Prepared):
        return ClientSession(channel, ready, settings, progress)
    return YaoClientSession(channel, ready, settings, garbler=_garbler(protocol), progress=progress)


def security(protocol: str, transfer: str) -> str:
    """What is and is not held against whom, in one sentence; ``transfer`` is what the transfers say of themselves."""
    if protocol == "mixed":
        return f"{transfer}; a malicious client could shift pre-activations and so learn weights (ePrint 2021/1040)"
    if protocol == "yao":
        return f"{transfer}; behind its input the client only reads, a malicious server could send another circuit"
    return f"{transfer}; a malicious client could send another circuit and so learn weights"


def _garbler(protocol: str) -> Garbles:
    return "client" if protocol == "yao-client" else "server"
