"""Accepts connections. asyncio's own server stops listening for ever at some errors, and is silent
at others.

When the process runs out of file descriptors, idle connections are closed, a warning is logged once
a minute, and new connections wait in the kernel's backlog until there are descriptors again. A few
descriptors are never given to clients: the engine needs some to start again.
"""

from __future__ import annotations

import asyncio
import logging
import math
import resource
import socket
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from octavo.serve.http.connections import Connection, ConnectionTable

log = logging.getLogger(__name__)
ACCEPTED = 64  # connections that are accepted in one turn of the event loop
RESERVED = 32  # file descriptors that are kept for other uses than connections
PAUSE = 0.1  # seconds without accepting after an error
WARNING_INTERVAL = 60.0  # seconds


def raise_descriptor_limit(wanted: int) -> None:
    """Allow the process as many open files as it needs, as far as the system lets it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


class Acceptor:
    def __init__(
        self,
        listener: socket.socket,
        table: ConnectionTable,
        make_protocol: Callable[[Connection], asyncio.Protocol],
    ):
        self.listener = listener
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
        """For uvicorn, which waits for its servers: the listener is closed at once."""

    def _accept(self) -> None:
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = math.inf if soft == resource.RLIM_INFINITY else soft - min(RESERVED, soft // 8)
        for _ in range(ACCEPTED):
            try:
                client, address = self.listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                self._warn(str(error.strerror))
                self._pause()
                return
            if client.fileno() >= most:
                self._warn(f"{client.fileno() + 1} of {soft} are in use")
                if not self.table.all.evict_one():
                    client.close()
                    self._pause()
                    return
            self._connect(client, address[0])

    def _connect(self, client: socket.socket, address: str) -> None:
        connection = self.table.admit(address)
        if connection is None:
            client.close()
            return
        make_protocol = partial(self.make_protocol, connection)
        task = self._loop.create_task(self._loop.connect_accepted_socket(make_protocol, client))
        self._opening[task] = connection
        task.add_done_callback(self._opened)

    def _opened(self, task: asyncio.Task[Any]) -> None:
        connection = self._opening.pop(task)
        if task.cancelled() or task.exception() is not None:  # the client has left already
            self.table.remove(connection)

    def _pause(self) -> None:
        """Make room and try again later. At once, the loop would do nothing but fail."""
        for _ in range(ACCEPTED):
            if not self.table.all.evict_one():
                break
        self._loop.remove_reader(self.listener)
        self._resuming = self._loop.call_later(PAUSE, self.start)

    def _warn(self, why: str) -> None:
        now = time.monotonic()
        if now - self._warned >= WARNING_INTERVAL:
            self._warned = now
            log.warning(
                "file descriptors are running out (%s) while %d connections are open: idle "
                "connections are closed to make room for new ones. Raise the limit with ulimit -n.",
                why,
                len(self.table),
            )
