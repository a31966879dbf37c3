"""Addresses, listeners, certificates, and strangers at a port."""

from __future__ import annotations

import datetime
import random
import socket
import ssl
import time

import pytest
from channels import SECRET, frame, raw_client, strange_pair
from parties import party, together

from deepseal.errors import InputError, TransportError
from deepseal.secure_inference.transport import Kind, Tls, connect, listen
from deepseal.secure_inference.transport.sockets import parse_address


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("9000", ("127.0.0.1", 9000)),
        (":9000", ("127.0.0.1", 9000)),
        ("[::1]:9000", ("::1", 9000)),
        ("0.0.0.0:0", ("0.0.0.0", 0)),
        ("[fe80::1%eth0]:1", ("fe80::1%eth0", 1)),
        ("example.org:443", ("example.org", 443)),
    ],
)
def test_addresses(text, parsed):
    assert parse_address(text) == parsed


@pytest.mark.parametrize(
    "text", ["", "x", "::1:9000", "[::1]", "1.2.3.4:", "a:b", "a:70000", "-1", "http://a:1", "a b:1"]
)
def test_bad_addresses(text):
    with pytest.raises(InputError, match="HOST:PORT"):
        parse_address(text)


def test_loopback_is_the_default_and_plain_stays_there(certified):
    with listen("0", tls=None, timeout=1) as listener:
        assert listener.address.startswith("127.0.0.1:") and not listener.address.endswith(":0")
    for opener in (listen, connect):
        with pytest.raises(InputError, match=r"TLS for an address beyond this machine.*--tls-cert"):
            opener("0.0.0.0:9000", tls=None, timeout=1)
    with listen("0.0.0.0:0", tls=None, timeout=1, allow_plain=True) as listener:
        assert listener.address.startswith("0.0.0.0:")
    with listen("0.0.0.0:0", tls=certified.garbler, timeout=1):
        pass


def test_ipv6():
    try:
        listener = listen("[::1]:0", tls=None, timeout=3)
    except TransportError:
        pytest.skip("no IPv6 here")
    with listener:
        assert listener.address.startswith("[::1]:")
        with connect(listener.address, tls=None, timeout=3) as left, listener.accept() as right:
            left.send(Kind.OT, b"6")
            left.flush()
            assert right.receive(Kind.OT, at_most=1) == b"6"


def test_a_port_in_use_and_a_port_where_nobody_is():
    with listen("0", tls=None, timeout=1) as listener:
        with pytest.raises(TransportError, match="choose another port"):
            listen(listener.address, tls=None, timeout=1)
        with pytest.raises(TransportError, match="expected a party to connect to .* within 1 s; found none"):
            listener.accept()
        address = listener.address
    start = time.monotonic()
    with pytest.raises(TransportError, match="connection refused; start the other side"):
        connect(address, tls=None, timeout=1, retry_for=0.3)
    assert 0.3 <= time.monotonic() - start < 3
    with pytest.raises(InputError, match="name or address"):
        connect("no-such-host.invalid:9", tls=None, timeout=1, allow_plain=True)
    with pytest.raises(InputError, match="port 0"):
        connect("0", tls=None, timeout=1)


def test_connect_waits_for_a_late_listener():
    with listen("0", tls=None, timeout=1) as listener:
        address = listener.address

    def late():
        time.sleep(0.4)
        with listen(address, tls=None, timeout=5) as again, again.accept() as channel:
            return channel.receive(Kind.OT, at_most=1)

    def early():
        with connect(address, tls=None, timeout=5) as channel:
            channel.send(Kind.OT, b"x")

    assert together(late, early) == [b"x", None]


def test_wrong_ca(certified, tmp_path):
    other = party(tmp_path / "other")
    for server, client in ((certified.garbler, other.evaluator), (other.garbler, certified.evaluator)):
        for error in strange_pair(server, client):
            assert isinstance(error, TransportError), error
            assert "use certificates of one CA" in str(error), error
    mixed = Tls(other.files.certificates["evaluator"], other.files.keys["evaluator"], certified.files.ca)
    server, client = strange_pair(certified.garbler, mixed)
    assert "does not pass: unable to get local issuer" in str(server)
    assert "that it does not trust the CA of our certificate" in str(client)


def test_expired_certificate(certified, tmp_path):
    past = datetime.datetime.now(datetime.timezone.utc) - datetime.timedelta(days=9)
    old = party(tmp_path / "old", now=past, days=1)
    server, client = strange_pair(old.garbler, old.evaluator)
    assert "certificate has expired" in str(client) and "make new certificates" in str(client)
    assert "calls our certificate expired" in str(server)


def test_peer_name_is_compared_when_given(certified):
    def named(tls, name):
        return Tls(tls.certificate, tls.key, tls.ca, peer_name=name)

    good = strange_pair(named(certified.garbler, "evaluator"), named(certified.evaluator, "Garbler"))
    assert good == ["done", "done"]
    server, client = strange_pair(named(certified.garbler, "somebody"), certified.evaluator)
    assert "expected a certificate for somebody from the other party; found one for evaluator" in str(server)
    assert "another name in your certificate" in str(client)
    server, client = strange_pair(certified.garbler, named(certified.evaluator, "somebody"))
    assert "found one for garbler" in str(client) and isinstance(server, TransportError)


def test_plain_and_tls_do_not_meet(certified):
    server, client = strange_pair(certified.garbler, None)
    assert "bytes that are not TLS" in str(server) and "found TLS" in str(client)
    server, client = strange_pair(None, certified.evaluator)
    assert "found TLS" in str(server) and "bytes that are not TLS" in str(client)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "found plain HTTP"),
        (frame(Kind.OT, SECRET), "found bytes that are not TLS"),
        (bytes(100), "found"),
        (b"\x16\x03\x01\x00\x05\x01", "found"),
        (b"", "found a connection that it closed"),
    ],
)
def test_strangers_at_a_tls_port(data, text, certified):
    with listen("0", tls=certified.garbler, timeout=3) as listener:
        with raw_client(listener.address) as sock:
            sock.sendall(data)
            sock.shutdown(socket.SHUT_WR)
            with pytest.raises(TransportError) as caught:
                listener.accept()
        assert text in str(caught.value) and str(caught.value).isprintable()
        outer, inner = together(
            lambda: connect(listener.address, tls=certified.evaluator, timeout=3), lambda: listener.accept()
        )
        outer.close()
        inner.close()


def test_random_bytes_at_a_tls_port(certified):
    rng = random.Random(5)
    with listen("0", tls=certified.garbler, timeout=3) as listener:
        for index in range(200):
            data = rng.randbytes(rng.randrange(400))
            with raw_client(listener.address) as sock:
                sock.sendall(b"\x16\x03\x01" + data if index % 2 else data)
                sock.shutdown(socket.SHUT_WR)
                with pytest.raises(TransportError) as caught:
                    listener.accept()
            assert str(caught.value).isprintable()


def test_silent_client_does_not_hold_a_tls_port_for_ever(certified):
    with listen("0", tls=certified.garbler, timeout=0.4) as listener, raw_client(listener.address):
        start = time.monotonic()
        with pytest.raises(TransportError, match=r"TLS greeting within 0\.4 s; found none"):
            listener.accept()
        assert time.monotonic() - start < 3


def test_old_tls_and_no_certificate_are_refused(certified):
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    bare = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)

    def knock(context):
        with raw_client(listener.address, context) as sock:
            return sock.recv(10)

    with listen("0", tls=certified.garbler, timeout=3) as listener:
        server, client = together(lambda: listener.accept(), lambda: knock(old))
        assert isinstance(server, TransportError) and "found an older TLS" in str(server)
        assert isinstance(client, ssl.SSLError)
        server, client = together(lambda: listener.accept(), lambda: knock(bare))
        assert isinstance(server, TransportError) and "found no certificate" in str(server)
        assert "CERTIFICATE_REQUIRED" in str(client)


def test_bad_files_are_named(certified, tmp_path):
    files = certified.files
    cert, key, ca = files.certificates["garbler"], files.keys["garbler"], files.ca
    junk = tmp_path / "junk.pem"
    junk.write_text("junk")
    locked = tmp_path / "locked.key"
    from cryptography.hazmat.primitives import serialization as s

    loaded = s.load_pem_private_key(key.read_bytes(), None)
    hidden = s.BestAvailableEncryption(b"x")
    locked.write_bytes(loaded.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, hidden))
    cases = [
        (Tls(tmp_path / "none.pem", key, ca), "a certificate file .PEM. at .*; found no such file"),
        (Tls(cert, tmp_path, ca), "private key"),
        (Tls(cert, key, junk), "expected CA certificates"),
        (Tls(junk, key, ca), "its private key in"),
        (Tls(cert, junk, ca), "its private key in"),
        (Tls(cert, files.keys["evaluator"], ca), "a key of another certificate"),
        (Tls(cert, locked, ca), "found an encrypted one"),
    ]
    for tls, text in cases:
        with pytest.raises(InputError, match=text):
            listen("0", tls=tls, timeout=1)
        with pytest.raises(InputError, match=text):
            connect("9", tls=tls, timeout=1, retry_for=0)
