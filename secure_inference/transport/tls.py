"""TLS 1.3 with certificates on both sides, and its errors in plain words."""

from __future__ import annotations

import contextlib
import re
import socket
import ssl
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

from deepseal.errors import InputError, TransportError
from deepseal.files import read_bytes
from deepseal.secure_inference.transport.frames import readable

_READ_AHEAD = 2**17
PATIENCE = 10  # time-outs that a party may spend on signs of life, or on one TLS record
_ONE_CA = "use certificates of one CA on both sides (deepseal private certs makes them)"
_RENEW = "make new certificates (deepseal private certs) and check both clocks"
_BOTH = "use TLS on both sides or on neither, and check the address"
_UPDATE = "use DeepSeal on both sides"

# Part of what OpenSSL says, what it means, what to do.
_MEANINGS = (
    ("CERTIFICATE_VERIFY_FAILED", "one that does not pass", _ONE_CA),
    ("TLSV1_ALERT_UNKNOWN_CA", "that it does not trust the CA of our certificate", _ONE_CA),
    ("ALERT_CERTIFICATE_EXPIRED", "that it calls our certificate expired", _RENEW),
    ("ALERT_CERTIFICATE_REQUIRED", "that it wants a certificate from us", _ONE_CA),
    ("ALERT_BAD_CERTIFICATE", "that it does not accept our certificate", _ONE_CA),
    ("ALERT_CERTIFICATE_UNKNOWN", "that it does not accept our certificate", _ONE_CA),
    ("ALERT_UNSUPPORTED_CERTIFICATE", "that it does not accept this kind of certificate", _ONE_CA),
    ("PEER_DID_NOT_RETURN_A_CERTIFICATE", "no certificate", _ONE_CA),
    ("HTTP_REQUEST", "plain HTTP", _BOTH),
    ("PACKET_LENGTH_TOO_LONG", "bytes that are not TLS", _BOTH),
    ("WRONG_VERSION_NUMBER", "bytes that are not TLS", _BOTH),
    ("UNSUPPORTED_PROTOCOL", "an older TLS", _UPDATE),
    ("PROTOCOL_VERSION", "an older TLS", _UPDATE),
)


@dataclass(frozen=True)
class Tls:
    """Files (PEM) with which a party shows who it is and checks the other.

    Args:
        certificate: our certificate, then its intermediate ones if there are any.
        key: its private key, not encrypted.
        ca: the certificate authorities that the other party's certificate may come from, and no others.
        peer_name: DNS name that must be in the other party's certificate; None: any certificate of the CA will do.
    """

    certificate: Path | str
    key: Path | str
    ca: Path | str
    peer_name: str | None = None

    def expecting(self, name: str | None) -> Tls:
        """The same for a party whose certificate carries this DNS name."""
        return replace(self, peer_name=name)


def context(settings: Tls, *, server: bool) -> ssl.SSLContext:
    """What a party needs for TLS 1.3 and nothing older, with both certificates checked against the CA.

    Raises:
        InputError: a file that is missing or not what it should be.
    """
    made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if server else ssl.PROTOCOL_TLS_CLIENT)
    made.minimum_version = made.maximum_version = ssl.TLSVersion.TLSv1_3
    made.check_hostname = False  # names are compared in `check_name`, on both sides
    made.verify_mode = ssl.CERT_REQUIRED
    made.options |= ssl.OP_NO_TICKET
    if server:
        made.num_tickets = 0
    for path, what in ((settings.certificate, "certificate"), (settings.key, "private key"), (settings.ca, "CA")):
        read_bytes(Path(path), f"a {what} file (PEM)", limit=2**20)
    try:
        made.load_verify_locations(cafile=settings.ca)
    except (ssl.SSLError, ValueError) as error:
        do = "pass the ca.pem that both sides share"
        raise InputError(f"CA certificates (PEM) in {settings.ca}", found="something else", do=do) from error
    try:
        made.load_cert_chain(settings.certificate, settings.key, password=_no_password)
    except (ssl.SSLError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        other = getattr(error, "reason", "") == "KEY_VALUES_MISMATCH"
        raise InputError(
            f"a certificate in {settings.certificate} and its private key in {settings.key} (PEM)",
            found="a key of another certificate" if other else "something else",
            do="pass the two files of one party",
        ) from error
    return made


def own_certificate(settings: Tls) -> bytes:
    """Our certificate (DER), which is the first in its file."""
    text = read_bytes(Path(settings.certificate), "a certificate file (PEM)", limit=2**20).decode("latin-1")
    block = re.search(r"-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", text, re.DOTALL)
    if block is None:
        raise InputError(f"a certificate (PEM) in {settings.certificate}", found="none", do="check the file")
    return ssl.PEM_cert_to_DER_cert(block.group())


class TlsSocket:
    """TLS over a stream socket, with the methods of a socket that a channel needs.

    The records pass through memory, many at a time: a call of the operating system for each record, as the standard
    library's TLS sockets do it, costs up to a third of the receiver's speed.
    """

    def __init__(self, sock: socket.socket, made: ssl.SSLContext, *, server: bool) -> None:
        self.sock = sock
        self._incoming, self._outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
        self._tls = made.wrap_bio(self._incoming, self._outgoing, server_side=server)
        self._scrap = memoryview(bytearray(_READ_AHEAD))
        self._timeout: float = 0.0
        self._until: float | None = None

    def greet(self, timeout: float) -> None:
        """Do the TLS handshake, all of it within ``timeout`` seconds."""
        self.settimeout(timeout, time.monotonic() + timeout)
        while True:
            try:
                self._tls.do_handshake()
                return self._push()
            except ssl.SSLWantReadError:
                self._push()
                self._pull()
            except ssl.SSLError:
                self._push()  # the alert that says why
                raise

    def settimeout(self, seconds: float, until: float | None = None) -> None:
        """Wait so long in each step, and in none beyond ``until`` (seconds of the monotonic clock)."""
        self._timeout, self._until = seconds, until
        self.sock.settimeout(seconds)

    def send(self, data: memoryview) -> int:
        """Send all of ``data``; its length."""
        self._tls.write(data)
        self._push()
        return len(data)

    def recv_into(self, target: memoryview) -> int:
        """Between 1 byte and all of ``target``; 0 when the other party has closed."""
        end = time.monotonic() + PATIENCE * self._timeout  # else updates of the keys could come for ever
        while True:
            try:
                return self._tls.read(len(target), target)  # type: ignore[return-value]
            except ssl.SSLWantReadError:
                if time.monotonic() > end:
                    raise TimeoutError from None
                self._push()
                self._pull()
            except (ssl.SSLZeroReturnError, ssl.SSLEOFError):
                return 0
            except ssl.SSLError:
                self._push()
                raise

    def farewell(self) -> None:
        """Say that no more will come, if that can be done without waiting."""
        self.settimeout(0)
        with contextlib.suppress(OSError, ValueError):
            self._tls.unwrap()
        with contextlib.suppress(OSError):
            self._push()

    def close(self) -> None:
        self.sock.close()

    def certificate(self) -> bytes | None:
        """The other party's certificate (DER)."""
        return self._tls.getpeercert(binary_form=True)

    def names(self) -> list[str]:
        """The DNS names in the other party's certificate."""
        shown: dict[str, Any] = dict(self._tls.getpeercert() or {})
        return [str(value) for kind, value in shown.get("subjectAltName", ()) if kind == "DNS"]

    def _push(self) -> None:
        if self._outgoing.pending:
            data, done = memoryview(self._outgoing.read()), 0
            while done < len(data):
                self._arm()
                done += self.sock.send(data[done:])

    def _pull(self) -> None:
        self._arm()
        count = self.sock.recv_into(self._scrap)
        if count:
            self._incoming.write(self._scrap[:count])
        else:
            self._incoming.write_eof()

    def _arm(self) -> None:
        if self._until is not None:
            self.sock.settimeout(remaining(self._timeout, self._until))


def secure(sock: socket.socket, made: ssl.SSLContext, *, server: bool, timeout: float) -> TlsSocket:
    """Greet the other party over ``sock``, which is closed when that fails.

    Raises:
        TransportError: it does not answer in time, speaks no TLS 1.3, or has no certificate that passes.
    """
    try:
        done = TlsSocket(sock, made, server=server)
        done.greet(timeout)
        return done
    except BaseException as error:
        wind_down(sock, seconds=min(0.5, timeout) if isinstance(error, ssl.SSLError) else 0)
        if isinstance(error, TimeoutError):
            expected = f"the other party's TLS greeting within {timeout:g} s"
            raise TransportError(expected, found="none", do=_BOTH) from error
        if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            raise explained(error) from error
        if isinstance(error, OSError):
            expected = "the other party's TLS greeting"
            raise TransportError(expected, found="a connection that it closed", do=_BOTH) from error
        raise


def remaining(timeout: float, until: float) -> float:
    """Seconds that the next step may take: ``timeout``, or less where ``until`` (monotonic clock) comes first.

    Raises:
        TimeoutError: none are left.
    """
    left = until - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return min(timeout, left)


def wind_down(sock: socket.socket, *, seconds: float) -> None:
    """Close after dropping what arrives for so long: unread bytes at the close could wipe what we sent last."""
    end = time.monotonic() + seconds
    try:
        sock.shutdown(socket.SHUT_WR)
        scrap = bytearray(2**16)
        for _ in range(1024):
            sock.settimeout(max(0.0, end - time.monotonic()))
            if not sock.recv_into(scrap):
                break
    except (OSError, ValueError):
        pass
    finally:
        sock.close()


def explained(error: ssl.SSLError) -> TransportError:
    """An error of OpenSSL in plain words."""
    said = f"{error.reason or ''} {error}"
    expected = "a TLS 1.3 connection to a party with a certificate of the CA"
    if isinstance(error, ssl.SSLCertVerificationError):
        reason = readable(error.verify_message)
        do = _RENEW if "expired" in reason or "not yet valid" in reason else _ONE_CA
        return TransportError(expected, found=f"a certificate that does not pass: {reason}", do=do)
    for part, found, do in _MEANINGS:
        if part in said:
            return TransportError(expected, found=found, do=do)
    if not error.reason:  # what OpenSSL says of an end in the middle, at times
        return TransportError(expected, found="a connection that it closed, or a fault without a name", do=_BOTH)
    found = readable(error.reason).replace("_", " ").lower()
    return TransportError(expected, found=f"a TLS fault ({found})", do=_BOTH)


def check_name(sock: TlsSocket, name: str) -> None:
    """The other party's certificate must carry this DNS name.

    Raises:
        TransportError: it does not.
    """
    names = sock.names()
    if name.lower() not in (known.lower() for known in names):
        found = f"one for {readable(', '.join(names) or 'nobody')}"
        do = "check the address, or the name that you expect"
        raise TransportError(f"a certificate for {name} from the other party", found=found, do=do)


def _no_password() -> NoReturn:
    do = "decrypt it (openssl pkey) into a file that only you can read"
    raise InputError("a private key that is not encrypted", found="an encrypted one", do=do)
