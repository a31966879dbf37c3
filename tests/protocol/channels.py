"""Pairs of connected channels, frames made by hand, and sessions, for tests of the transport."""

from __future__ import annotations

import os
import socket
import ssl
import struct
import subprocess
import sys

from parties import together

from deepseal.secure_inference.transport import Hello, Kind, connect, handshake, listen, memory_pair

SECRET = b"the labels of a wire"
PROGRAM = "ab" * 32


def frame(kind, payload=b"", number=0, *, length=None, magic=b"\xd5\x5e", zero=0):
    size = len(payload) if length is None else length
    return struct.pack("<2sBBIQ", magic, kind, zero, size, number) + payload


def pair(mode, certified, timeout=5.0, **options):
    """Two connected channels."""
    if mode == "memory":
        return memory_pair(timeout=timeout, **options)
    tls = (certified.garbler, certified.evaluator) if mode == "tls" else (None, None)
    with listen("0", tls=tls[0], timeout=timeout, **options) as listener:
        ends = together(
            lambda: connect(listener.address, tls=tls[1], timeout=timeout, **options), lambda: listener.accept()
        )
    for end in ends:
        if isinstance(end, Exception):
            raise end
    return ends


MODES = ("memory", "plain", "tls")


def session(channel, role, *, rounds=3):
    """A small session: handshake, frames both ways, DONE."""
    handshake(channel, Hello(role, PROGRAM, "native", None, {"lanes": 4}))
    for index in range(rounds):
        if role == "garbler":
            channel.send(Kind.TABLES, bytes([index]) * 9000)
            channel.send(Kind.INPUT, SECRET)
        else:
            buffer = bytearray(9000)
            assert channel.receive_into(Kind.TABLES, buffer) == 9000 and buffer[8999] == index
            assert channel.receive(Kind.INPUT, at_most=64) == SECRET
    if role == "evaluator":
        channel.send(Kind.OUTPUT, b"bits")
        channel.receive(Kind.DONE, at_most=0)
    else:
        assert channel.receive(Kind.OUTPUT, at_most=4) == b"bits"
        channel.send(Kind.DONE)
    return "done"


def strange_pair(server, client, timeout=3.0):
    """What both sides get when the server listens with these settings and the client comes with those."""

    def serve(listener):
        with listener.accept() as channel:
            return session(channel, "garbler")

    def come(address):
        with connect(address, tls=client, timeout=timeout) as channel:
            return session(channel, "evaluator")

    with listen("0", tls=server, timeout=timeout) as listener:
        return together(lambda: serve(listener), lambda: come(listener.address))


def raw_client(address, context=None):
    host, port = address.split(":")
    sock = socket.create_connection((host, int(port)), timeout=3)
    if context is None:
        return sock
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        return context.wrap_socket(sock)
    except BaseException:
        sock.close()
        raise


def child(code, *arguments):
    command = [sys.executable, "-c", code, *map(str, arguments)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
