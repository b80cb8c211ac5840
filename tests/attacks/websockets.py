"""A WebSocket that sends tiny frames without end."""

from __future__ import annotations

import contextlib
import socket
import threading
import time

from tests.attacks.clients import CONTINUATION, PING, PONG, TEXT, frame, open_websocket
from tests.attacks.target import ALICE, Target, bearer

MANY = 20_000
# What is sent first, and what is sent again and again.
FLOODS: dict[str, tuple[bytes, bytes]] = {
    "pongs": (b"", frame(PONG)),
    "pings": (b"", frame(PING)),
    "empty fragments": (frame(TEXT, last=False), frame(CONTINUATION, last=False)),
    "empty messages": (b"", frame(TEXT)),
}


def flood(target: Target, kind: str, seconds: float) -> None:
    """Send frames for so long, in new connections when the server closes one."""
    first, repeated = FLOODS[kind]
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        connection, reply = open_websocket(target.port, "/ws/generate", bearer(ALICE))
        with connection:
            assert reply.startswith(b"HTTP/1.1 101"), reply[:200]
            reader = threading.Thread(target=_read, args=(connection,), daemon=True)
            reader.start()
            with contextlib.suppress(OSError):  # the server has had enough
                connection.sendall(first)
                while time.monotonic() < end:
                    connection.sendall(repeated * MANY)
            _shut_down(connection)
            reader.join(10)


def _read(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(2**20):
            pass


def _shut_down(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
