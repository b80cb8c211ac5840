"""Clients that do not read: their connections are cut, and what waits for them does not grow."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from types import SimpleNamespace
from typing import Any

from octavo.serve.wire import drop_unread
from tests.serve.running import Running, http_request, raw

UPGRADE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: " + "A" * 22 + "==",
)
PING = b"\x89\xfd\0\0\0\0" + b"x" * 125


class Transport:
    """`unread` bytes, of which the client takes `reads` each time that somebody looks."""

    def __init__(self, closing: bool, unread: int, reads: int = 0):
        self.closing, self.unread, self.reads, self.aborted = closing, unread, reads, False

    def is_closing(self) -> bool:
        return self.closing

    def get_write_buffer_size(self) -> int:
        self.unread -= self.reads
        return max(self.unread, 0)

    def abort(self) -> None:
        self.aborted = True


def test_what_is_closed_and_never_read_is_cut() -> None:
    """uvicorn closes a connection, and the socket then waits until all is read: for ever, if nobody does."""
    unread, slow, at_work, done = (
        Transport(True, 5),
        Transport(True, 5000, 1),
        Transport(False, 5),
        Transport(True, 0),
    )

    async def run() -> None:
        connections: set[Any] = {_Connection(t) for t in (unread, slow, at_work, done)}
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(drop_unread(connections, 0.1), 0.5)

    asyncio.run(run())
    assert [t.aborted for t in (unread, slow, at_work, done)] == [True, False, False, False]


class _Connection(SimpleNamespace):
    def __init__(self, transport: Transport):
        super().__init__(transport=transport)

    __hash__ = object.__hash__  # type: ignore[assignment]


def memory(running: Running) -> int:
    """KiB of the front."""
    with open(f"/proc/{running.process.pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


def test_pings_whose_answers_nobody_reads_end_the_connection(running: Running) -> None:
    for path in ("/ws/watch", "/ws/generate"):
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
            connection.connect(("127.0.0.1", running.port))
            connection.sendall(http_request(path, b"", *UPGRADE, method="GET"))
            before, begun, sent, cut = memory(running), time.monotonic(), 0, False
            while not cut and sent < 2**26 and time.monotonic() - begun < 10:
                try:
                    sent += connection.send(PING * 500, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    time.sleep(0.005)
                except OSError:
                    cut = True
            assert cut and memory(running) - before < 16 * 1024
    assert b"200 OK" in raw(
        running.port, http_request("/livez", b"", "Connection: close", method="GET")
    )
