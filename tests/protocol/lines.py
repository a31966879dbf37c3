"""A wire tap for tests: passes connections on, and keeps the frames of each direction."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator

from meddling import Frame

from deepseal.secure_inference.transport import Kind
from deepseal.secure_inference.transport.frames import HEADER


class Tap:
    """What went over a line: from those who came to it (``asked``) and back (``answered``), frame by frame."""

    def __init__(self, target: str, noticed: Callable[[Frame], None] = lambda frame: None) -> None:
        self.asked: list[Frame] = []
        self.answered: list[Frame] = []
        self.address = ""
        self._target, self._noticed = target.rsplit(":", 1), noticed
        self._threads: list[threading.Thread] = []
        self._sockets: list[socket.socket] = []

    def run(self, listener: socket.socket) -> None:
        while True:
            try:
                near, _ = listener.accept()
            except OSError:
                return
            far = socket.create_connection((self._target[0], int(self._target[1])))
            self._sockets += [near, far]
            for source, goal, frames in ((near, far, self.asked), (far, near, self.answered)):
                thread = threading.Thread(target=self._carry, args=(source, goal, frames), daemon=True)
                self._threads.append(thread)
                thread.start()

    def _carry(self, source: socket.socket, goal: socket.socket, frames: list[Frame]) -> None:
        data = b""
        with contextlib.suppress(OSError):
            while part := source.recv(1 << 16):
                data += part
                while len(data) >= HEADER.size:
                    _, kind, _, length, number = HEADER.unpack_from(data)
                    if len(data) < HEADER.size + length:
                        break
                    frames.append(Frame(kind, data[HEADER.size : HEADER.size + length], number))
                    data = data[HEADER.size + length :]
                    self._noticed(frames[-1])
                goal.sendall(part)  # kept before anybody can react to it
        with contextlib.suppress(OSError):
            goal.shutdown(socket.SHUT_WR)

    def finish(self) -> None:
        for thread in self._threads:
            thread.join(5)
            assert not thread.is_alive()
        for sock in self._sockets:
            sock.close()


@contextlib.contextmanager
def tapped(target: str, noticed: Callable[[Frame], None] = lambda frame: None) -> Iterator[Tap]:
    """A tap before ``target``; its connections must be over when the block ends."""
    tap = Tap(target, noticed)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        tap.address = f"127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=tap.run, args=(listener,), daemon=True)
        thread.start()
        yield tap
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(5)
    tap.finish()


def payloads(frames: list[Frame], kind: Kind) -> list[bytes]:
    return [frame.payload for frame in frames if frame.kind == kind]
