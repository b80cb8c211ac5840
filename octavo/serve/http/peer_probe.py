"""Finds out whether a client is still there when reading from its connection no longer tells.

A client that closes only its own direction (`shutdown(SHUT_WR)`) and waits for the reply sends the
same FIN as one that has left. So the connection is probed: something that the client ignores is
written to it. The system of a client that has left answers with a reset, which the state of the
connection shows.
"""

from __future__ import annotations

import asyncio
import socket
from typing import Any, Protocol

FIRST_SECONDS = 0.1  # between the client's FIN and the first probe; later ones are further apart
MAX_SECONDS = 10.0
RESET_SECONDS = 0.02  # a reset on the same machine arrives well within this time
TCP_CLOSE = 7  # states that TCP_INFO tells on Linux
TCP_CLOSE_WAIT = 8


class Probed(Protocol):
    transport: asyncio.Transport

    def needs_probe(self) -> bool:
        """A request is in progress, and reading does not tell whether its client is there."""

    def probe(self) -> None: ...


class PeerProbe:
    def __init__(self, connection: Probed):
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
    """The state of the connection, or None on systems that do not tell it."""
    option = getattr(socket, "TCP_INFO", None)
    connection: Any = transport.get_extra_info("socket")
    if option is None or connection is None:
        return None
    try:
        return int(connection.getsockopt(socket.IPPROTO_TCP, option, 1)[0])
    except OSError:
        return None
