"""Two parties that talk: framed channels over memory, TCP and TLS 1.3, the handshake of a session, and certificates."""

from deepseal.errors import ProtocolError, TransportError
from deepseal.secure_inference.transport.channel import Channel, memory_pair
from deepseal.secure_inference.transport.frames import Counters, Kind, Phase
from deepseal.secure_inference.transport.handshake import Hello, Session, handshake
from deepseal.secure_inference.transport.sockets import Listener, connect, listen
from deepseal.secure_inference.transport.tls import Tls

__all__ = [
    "Channel",
    "Counters",
    "Hello",
    "Kind",
    "Listener",
    "Phase",
    "ProtocolError",
    "Session",
    "Tls",
    "TransportError",
    "connect",
    "handshake",
    "listen",
    "memory_pair",
]
