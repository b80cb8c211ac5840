"""Limits the number of open HTTP and WebSocket connections, and their time.

A connection belongs to three groups: all connections, the connections of its address, and the
connections of the API key that it last used. A full group closes one of its own connections to
admit a new one. It chooses the connection by state, in the order of ConnectionState, and then the
oldest. A connection that was accepted or began to send a request within the last GRACE_SECONDS is
closed only if there is no other, because its request may be on its way. When every connection of a
full group is busy, the server reads the request of the new connection and then refuses it.

A sweep runs once a second. It ends connections whose deadline has passed, and connections whose
client has read nothing for `send_seconds` although data waits for it.
"""

from __future__ import annotations

import asyncio
import math
import time
from enum import IntEnum
from itertools import islice
from typing import Protocol

from octavo.serve.api.api_errors import ApiError
from octavo.serve.front.keys import Key, network
from octavo.serve.limits import Limits

REFUSALS = 64  # The number of connections above the limit that stay open until they get an error.
SCANNED = 256  # The most connections that a new connection considers for closing.
GRACE_SECONDS = 0.25  # A new connection has this time to send its request.
SWEEP_SECONDS = 1.0


class ConnectionState(IntEnum):
    """The state of a connection. A full group closes connections in this order.

    A busy connection is never closed for another one.
    """

    SILENT = 0  # No complete request head has arrived yet.
    IDLE = 1  # Every request has its reply.
    RECEIVING = 2  # The body of a request is arriving.
    BUSY = 3  # A request is in progress.


class ConnectionOwner(Protocol):
    """The asyncio protocol that owns a connection."""

    transport: asyncio.Transport

    def evict(self) -> None:
        """Close the connection at once, to admit a new connection."""

    def deadline_passed(self) -> None: ...


class ConnectionGroup:
    def __init__(self, limit: int):
        self.limit = limit
        self.count = 0
        # The connections that may be closed, for each state, in the order of entering the state.
        self.evictable: tuple[dict[Connection, None], ...] = ({}, {}, {})

    def evict_one(self) -> bool:
        """Close the first connection that may be closed. Returns False if there is none."""
        now = time.monotonic()
        return self._evict_one(now - GRACE_SECONDS) or self._evict_one(now)

    def _evict_one(self, latest: float) -> bool:
        """Close an idle connection, or one that entered its state at `latest` or earlier."""
        for state, connections in enumerate(self.evictable):
            for connection in islice(connections, SCANNED):
                if connection.state_since > latest and state != ConnectionState.IDLE:
                    break  # All connections after this one are younger.
                if connection.unread() == 0:
                    connection.evict()
                    return True
        return False


class Connection:
    def __init__(self, table: ConnectionTable, address: str, refused: bool):
        self.table = table
        self.address = address
        self.refused = refused  # The limits left no room for this connection.
        self.state = ConnectionState.SILENT
        self.state_since = time.monotonic()  # The time at which the connection entered its state.
        self.owner: ConnectionOwner | None = None  # This is None until the transport exists.
        self.deadline = math.inf
        self.key: Key | None = None
        self.groups: list[ConnectionGroup] = []
        self._last_unread = 0
        self._unread_since = 0.0

    def unread(self) -> int:
        """Return the number of written bytes that the client has not read yet."""
        if self.owner is None:
            return 0
        return self.owner.transport.get_write_buffer_size()

    def enter(self, state: ConnectionState) -> None:
        for group in self.groups:
            if self.state is not ConnectionState.BUSY:
                group.evictable[self.state].pop(self, None)
            if state is not ConnectionState.BUSY:
                group.evictable[state][self] = None
        self.state = state
        self.state_since = time.monotonic()

    def join(self, group: ConnectionGroup) -> None:
        self.groups.append(group)
        group.count += 1
        if self.state is not ConnectionState.BUSY:
            group.evictable[self.state][self] = None

    def leave(self, group: ConnectionGroup) -> None:
        self.groups.remove(group)
        group.count -= 1
        if self.state is not ConnectionState.BUSY:
            group.evictable[self.state].pop(self, None)

    def evict(self) -> None:
        self.table.remove(self)
        if self.owner is not None:
            self.owner.evict()

    def sweep(self, now: float, send_seconds: float) -> None:
        """End the connection if its deadline has passed or its client does not read."""
        if self.owner is None:
            return
        unread = self.unread()
        if unread == 0 or unread != self._last_unread:
            self._last_unread = unread
            self._unread_since = now
        elif now - self._unread_since >= send_seconds:
            self.owner.transport.abort()
            return
        if now >= self.deadline:
            self.deadline = math.inf
            self.owner.deadline_passed()


class ConnectionTable:
    def __init__(self, limits: Limits):
        self.limits = limits
        self.connections: set[Connection] = set()
        self.all = ConnectionGroup(limits.connections)
        self.addresses: dict[str, ConnectionGroup] = {}
        self.keys: dict[str, ConnectionGroup] = {}
        self.refused = 0

    def __len__(self) -> int:
        return len(self.connections)

    def admit(self, address: str) -> Connection | None:
        """Return a new connection, or None if it must be closed at once without a reply."""
        address = network(address)
        room = self._make_room(address)
        if not room and self.refused >= REFUSALS:
            return None
        connection = Connection(self, address, refused=not room)
        self.connections.add(connection)
        if room:
            self._join(connection)
        else:
            self.refused += 1
        return connection

    def retry(self, connection: Connection) -> bool:
        """Admit a refused connection if there is room. Returns whether it was admitted."""
        if not self._make_room(connection.address):
            return False
        connection.refused = False
        self.refused -= 1
        self._join(connection)
        return True

    def claim(self, connection: Connection, key: Key) -> None:
        """Count the connection for this key. Raises if the key has too many connections."""
        if connection.key is key:
            return
        group = self.keys.setdefault(key.name, ConnectionGroup(self.limits.connections_per_key))
        if group.count >= group.limit and not group.evict_one():
            raise ApiError(
                429,
                f"this key allows {group.limit} connections at a time: close one of them",
                "too_many_connections",
                retry_after=1.0,
            )
        if connection.key is not None:
            connection.leave(self.keys[connection.key.name])
        connection.key = key
        connection.join(group)

    def remove(self, connection: Connection) -> None:
        """Remove a closed connection from its groups. A second call does nothing."""
        if connection not in self.connections:
            return
        self.connections.remove(connection)
        if connection.refused:
            self.refused -= 1
        for group in tuple(connection.groups):
            connection.leave(group)
        if connection.address in self.addresses and not self.addresses[connection.address].count:
            del self.addresses[connection.address]

    async def sweep_forever(self) -> None:
        limits = self.limits
        shortest = min(limits.header_seconds, limits.idle_seconds, limits.send_seconds)
        interval = min(SWEEP_SECONDS, shortest / 4)
        while True:
            await asyncio.sleep(interval)
            now = time.monotonic()
            for connection in tuple(self.connections):
                connection.sweep(now, limits.send_seconds)

    def _make_room(self, address: str) -> bool:
        group = self.addresses.get(address)
        if group is not None and group.count >= group.limit and not group.evict_one():
            return False
        return self.all.count < self.all.limit or self.all.evict_one()

    def _join(self, connection: Connection) -> None:
        address = connection.address
        group = self.addresses.setdefault(
            address, ConnectionGroup(self.limits.connections_per_address)
        )
        connection.join(self.all)
        connection.join(group)
