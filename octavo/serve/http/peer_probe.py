"""Detects whether a client that has sent a FIN is still connected.

A client that closes only its sending direction (`shutdown(SHUT_WR)`) and waits for the reply sends
the same FIN as a client that closes the connection. The server tells them apart with a probe: it
writes bytes that a client ignores. If the client has closed the connection, its system replies
with a reset, which changes the state of the connection.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Protocol

FIRST_SECONDS = 0.1  # The first probe follows the FIN after this time. The intervals then grow.
MAX_SECONDS = 10.0
RESET_SECONDS = 0.02  # A reset on the same machine arrives well within this time.
TCP_CLOSE = 7  # TCP_INFO reports these states on Linux.
TCP_CLOSE_WAIT = 8


class ProbedConnection(Protocol):
    transport: asyncio.Transport

    def needs_probe(self) -> bool:
        """Return whether a request is in progress whose client has sent a FIN."""

    def probe(self) -> None: ...


class PeerProbe:
    def __init__(self, connection: ProbedConnection):
        self._connection = connection
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        if self._timer is None:
            self._check_later(FIRST_SECONDS)

    def stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    def _check_later(self, delay: float) -> None:
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(delay, self._check, delay)

    def _check(self, delay: float) -> None:
        self._timer = None
        self._abort_if_reset()
        connection = self._connection
        if connection.transport.is_closing() or not connection.needs_probe():
            return
        if tcp_state(connection.transport) == TCP_CLOSE_WAIT:
            connection.probe()
            asyncio.get_running_loop().call_later(RESET_SECONDS, self._abort_if_reset)
        self._check_later(min(4 * delay, MAX_SECONDS))

    def _abort_if_reset(self) -> None:
        transport = self._connection.transport
        if not transport.is_closing() and tcp_state(transport) == TCP_CLOSE:
            transport.abort()


def tcp_state(transport: asyncio.Transport) -> int | None:
    """Return the TCP state of the connection, or None on systems that do not report it."""
    option = getattr(socket, "TCP_INFO", None)
    connection: Any = transport.get_extra_info("socket")
    if option is None or connection is None:
        return None
    try:
        return int(connection.getsockopt(socket.IPPROTO_TCP, option, 1)[0])
    except OSError:
        return None
