"""Accepts connections.

This module replaces asyncio's server, which stops listening after some errors and hides others.

When the process runs out of file descriptors, the server closes idle connections, logs a warning
once a minute, and leaves new connections in the kernel's backlog until descriptors are free. A few
descriptors are reserved: the server needs them to restart the engine.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import ssl
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from octavo.serve.http.connections import Connection, ConnectionTable

log = logging.getLogger(__name__)
ACCEPTED = 64  # The most connections that one iteration of the event loop accepts.
RESERVED = 32  # The number of file descriptors that connections may not use.
PAUSE = 0.1  # The acceptor pauses for this many seconds after an error.
WARNING_INTERVAL = 60.0  # seconds
HANDSHAKE_SECONDS = 10.0  # A client must have finished the TLS handshake in this time.
LOCAL_CLIENT = "unix"


def raise_descriptor_limit(limit: int) -> None:
    """Raise the limit on open files to `limit`, or as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
    if soft != resource.RLIM_INFINITY and soft < limit:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))


class Acceptor:
    def __init__(
        self,
        listener: socket.socket,
        table: ConnectionTable,
        make_protocol: Callable[[Connection], asyncio.Protocol],
        tls: ssl.SSLContext | None = None,
    ):
        self.listener = listener
        self.tls = tls
        self.table = table
        self.make_protocol = make_protocol
        self._loop = asyncio.get_running_loop()
        self._opening: dict[asyncio.Task[Any], Connection] = {}
        self._warned = -WARNING_INTERVAL
        self._resuming: asyncio.TimerHandle | None = None

    def start(self) -> None:
        self._resuming = None
        self._loop.add_reader(self.listener, self._accept)

    def close(self) -> None:
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self.listener)
        self.listener.close()

    async def wait_closed(self) -> None:
        """Return at once, because `close` is immediate. uvicorn calls this method."""

    def _accept(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        limit = math.inf if soft == resource.RLIM_INFINITY else soft - min(RESERVED, soft // 8)
        for _ in range(ACCEPTED):
            try:
                client, address = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._warn(str(error.strerror))
                self._pause()
                return
            if client.fileno() >= limit:
                self._warn(f"{client.fileno() + 1} of {soft} descriptors are in use")
                if not self.table.all.evict_one():
                    client.close()
                    self._pause()
                    return
            # A client of a Unix domain socket has no address.
            self._connect(client, address[0] if address else LOCAL_CLIENT)

    def _connect(self, client: socket.socket, address: str) -> None:
        connection = self.table.admit(address)
        if connection is None:
            client.close()
            return
        make_protocol = partial(self.make_protocol, connection)
        handshake_seconds = None if self.tls is None else HANDSHAKE_SECONDS
        task = self._loop.create_task(
            self._loop.connect_accepted_socket(
                make_protocol, client, ssl=self.tls, ssl_handshake_timeout=handshake_seconds
            )
        )
        self._opening[task] = connection
        task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[Any]) -> None:
        connection = self._opening.pop(task)
        if task.cancelled() or task.exception() is not None:  # The client has disconnected.
            self.table.remove(connection)

    def _pause(self) -> None:
        """Close an idle connection, and accept again after a pause.

        Without the pause, the event loop would only repeat the error.
        """
        for _ in range(ACCEPTED):
            if not self.table.all.evict_one():
                break
        self._loop.remove_reader(self.listener)
        self._resuming = self._loop.call_later(PAUSE, self.start)

    def _warn(self, problem: str) -> None:
        now = time.monotonic()
        if now - self._warned >= WARNING_INTERVAL:
            self._warned = now
            log.warning(
                "the process is running out of file descriptors (%s) with %d open connections: "
                "idle connections are closed. Raise the limit with ulimit -n.",
                problem,
                len(self.table),
            )
