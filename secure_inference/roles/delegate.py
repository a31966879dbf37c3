"""Delegation: a constrained client lets a proxy evaluate, and only XORs and receives.

Source: Rouhani, Riazi, Koushanfar, "DeepSecure: Scalable Provably-Secure Deep Learning", DAC 2018, on secure
outsourcing; here for the mixed mode. For its input bits b the client draws s and gives b xor s to the proxy and s to
the server. The proxy takes the evaluator's part; the server counts s into the labels of the input, which costs nothing
with free XOR. In the end the proxy sends its colour bits and the server its permute bits (where logits are permitted:
shares of them) to the client alone, which puts them together.

Semi-honest, and the proxy and the server must not work together: neither learns anything of the input or the answer,
but both of them together have the input. So they should belong to different organisations.
"""

from __future__ import annotations

import secrets
import time
from types import TracebackType
from typing import TYPE_CHECKING

from numpy.typing import ArrayLike

from deepseal.errors import ProtocolError
from deepseal.secure_inference.compile.program import Program
from deepseal.secure_inference.compile.simulate import decode_output, encode_input
from deepseal.secure_inference.roles.answers import Answer, check_question
from deepseal.secure_inference.roles.halves import (
    TICKET,
    Question,
    greet,
    join,
    pack_input,
    receive_half,
    send_end,
    send_question,
)
from deepseal.secure_inference.transport import Channel, Kind, Tls, connect

if TYPE_CHECKING:
    from typing_extensions import Self

_EARLY = "the client stopped early"


class DelegatedClient:
    """A constrained client's session with a server and a proxy; use it in a ``with`` block.

    Args:
        program: the public program, the same as theirs.
        server: a fresh channel to where the server takes constrained clients.
        proxy: a fresh channel to the proxy.

    Raises:
        ProtocolError: one of them runs another program, breaks the protocol, or both show the same certificate.
        TransportError: one of them hangs up or stalls.
    """

    def __init__(self, program: Program, server: Channel, proxy: Channel) -> None:
        clock = time.perf_counter()
        self._program, self._server, self._proxy, self._over = program, server, proxy, False
        try:
            if server.peer_certificate is not None and server.peer_certificate == proxy.peer_certificate:
                do = "use a proxy of another organisation"
                raise ProtocolError("a proxy that is not the server", found="one certificate for both", do=do)
            digest = program.digest()
            greet(server, digest, "client", "server")
            greet(proxy, digest, "client", "proxy")
        except BaseException:
            self._drop()
            raise
        self.setup_seconds = time.perf_counter() - clock

    @classmethod
    def connect(
        cls,
        program: Program,
        *,
        server: str,
        proxy: str,
        tls: Tls | None = None,
        server_name: str | None = None,
        proxy_name: str | None = None,
        timeout: float = 60.0,
        retry_for: float = 10.0,
    ) -> DelegatedClient:
        """Connect to both; ``setup_seconds`` then holds the connections, too.

        Beyond this machine only with TLS: whoever reads both plain connections has the input.

        Args:
            program: the public program.
            server: HOST:PORT where the server takes constrained clients.
            proxy: the proxy's HOST:PORT.
            tls: our certificate, key and CA.
            server_name: DNS name that must be in the server's certificate; None: any certificate of the CA will do.
            proxy_name: likewise in the proxy's.
            timeout: seconds of the longest wait, also for an answer.
            retry_for: seconds during which a refused connection is tried again.
        """
        clock = time.perf_counter()
        ends = []
        try:
            for address, name in ((server, server_name), (proxy, proxy_name)):
                expected = None if tls is None else tls.expecting(name)
                ends.append(connect(address, tls=expected, timeout=timeout, retry_for=retry_for))
        except BaseException:
            for end in ends:
                end.refuse(_EARLY)
            raise
        client = cls(program, *ends)
        client.setup_seconds = time.perf_counter() - clock
        return client

    @property
    def bytes_sent(self) -> int:
        """To both, up to now."""
        return self._server.counters.bytes_sent + self._proxy.counters.bytes_sent

    @property
    def bytes_received(self) -> int:
        """From both, up to now."""
        return self._server.counters.bytes_received + self._proxy.counters.bytes_received

    def ask(self, x: ArrayLike, *, clamp: bool = True) -> Answer:
        """The model's answer on samples in data space, (N, …) or one without N.

        Raises:
            InputError: another shape, NaN, or values out of range with ``clamp=False``.
            TransportError: the server or the proxy hangs up, stalls or refuses; the session is over then.
        """
        encoded = encode_input(self._program, x, clamp=clamp)
        check_question(self._program, encoded.values)
        clock, sent, received = time.perf_counter(), self.bytes_sent, self.bytes_received
        samples, bits = len(encoded.values), pack_input(self._program, encoded.values)
        ticket, pad = secrets.token_bytes(TICKET), secrets.token_bytes(len(bits))
        masked = (int.from_bytes(bits, "little") ^ int.from_bytes(pad, "little")).to_bytes(len(bits), "little")
        try:
            send_question(self._server, Question(ticket, samples, pad))
            self._server.receive(Kind.READY, at_most=0)  # before the proxy asks the server about the ticket
            send_question(self._proxy, Question(ticket, samples, masked))
            with self._proxy.within(self._proxy.timeout):
                colours = receive_half(self._proxy, self._program, samples)
            with self._server.within(self._server.timeout):
                permutes = receive_half(self._server, self._program, samples)
        except BaseException:
            self._drop()
            raise
        values = decode_output(self._program, join(self._program, colours, permutes, samples))
        seconds = time.perf_counter() - clock
        return Answer(values, encoded.clamped, seconds, self.bytes_sent - sent, self.bytes_received - received)

    def close(self) -> None:
        """End the session; nothing is left to do after an error."""
        if self._over:
            return
        self._over = True
        try:
            for end in (self._server, self._proxy):
                send_end(end)
                end.close()
        except BaseException:
            self._drop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._drop()

    def _drop(self) -> None:
        self._over = True
        for end in (self._server, self._proxy):
            end.refuse(_EARLY)
