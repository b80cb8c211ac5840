"""Open connections, HTTP and WebSocket: how many there may be, which one is closed when there is no
room, and time limits.

A connection belongs to groups: all connections, those of its address, and those of the API key that
it last used. A group that is full closes one of its own connections to admit a new one.
ConnectionState says in which order, oldest first. A connection that was accepted, or that began to
send a request, less than GRACE_SECONDS ago is closed only if there is no other: its request may be
on its way. When every connection of a full group is busy, the new one is refused after its request
was read.

One sweep a second looks at every connection. It ends the ones whose deadline has passed and the
ones whose client has read nothing for `send_seconds` although something waits for it.
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

REFUSALS = 64  # connections beyond the limit that are kept open to tell them why they are refused
SCANNED = 256  # connections that are considered for closing, at most, for each new connection
GRACE_SECONDS = 0.25  # for a new connection to send its request while there are others to close
SWEEP_SECONDS = 1.0


class ConnectionState(IntEnum):
    """What a connection is doing. A full group closes connections in this order, and never a busy
    one."""

    SILENT = 0  # it has not sent the whole head of a request yet
    IDLE = 1  # every request was answered
    RECEIVING = 2  # a request's body is on its way
    BUSY = 3  # a request is being answered


class ConnectionOwner(Protocol):
    """The asyncio protocol that owns a connection."""

    transport: asyncio.Transport

    def evict(self) -> None:
        """Close the connection at once: another one needs its place."""

    def deadline_passed(self) -> None: ...


class ConnectionGroup:
    def __init__(self, limit: int):
        self.limit = limit
        self.count = 0
        # connections that may be closed, by state, each in the order in which they entered it
        self.waiting: tuple[dict[Connection, None], ...] = ({}, {}, {})

    def evict_one(self) -> bool:
        """Close the connection that is least missed. Returns False if there is none."""
        now = time.monotonic()
        return self._evict_one(now - GRACE_SECONDS) or self._evict_one(now)

    def _evict_one(self, latest: float) -> bool:
        """Close an idle connection, or another one that has been in its state since `latest` or
        longer."""
        for state, waiting in enumerate(self.waiting):
            for connection in islice(waiting, SCANNED):
                if connection.since > latest and state != ConnectionState.IDLE:
                    break  # the ones behind it are younger still
                if connection.unread() == 0:
                    connection.evict()
                    return True
        return False


class Connection:
    def __init__(self, table: ConnectionTable, address: str, refused: bool):
        self.table = table
        self.address = address
        self.refused = refused  # there was no room for it
        self.state = ConnectionState.SILENT
        self.since = time.monotonic()  # when it entered its state
        self.owner: ConnectionOwner | None = None  # None until the transport exists
        self.deadline = math.inf
        self.key: Key | None = None
        self.groups: list[ConnectionGroup] = []
        self._least_unread = 0
        self._unread_since = 0.0

    def unread(self) -> int:
        """Bytes that were written and that the client has not read yet."""
        if self.owner is None:
            return 0
        return self.owner.transport.get_write_buffer_size()

    def enter(self, state: ConnectionState) -> None:
        for group in self.groups:
            if self.state is not ConnectionState.BUSY:
                group.waiting[self.state].pop(self, None)
            if state is not ConnectionState.BUSY:
                group.waiting[state][self] = None
        self.state = state
        self.since = time.monotonic()

    def join(self, group: ConnectionGroup) -> None:
        self.groups.append(group)
        group.count += 1
        if self.state is not ConnectionState.BUSY:
            group.waiting[self.state][self] = None

    def leave(self, group: ConnectionGroup) -> None:
        self.groups.remove(group)
        group.count -= 1
        if self.state is not ConnectionState.BUSY:
            group.waiting[self.state].pop(self, None)

    def evict(self) -> None:
        self.table.remove(self)
        if self.owner is not None:
            self.owner.evict()

    def sweep(self, now: float, send_seconds: float) -> None:
        """End the connection if its time is over."""
        if self.owner is None:
            return
        unread = self.unread()
        if unread == 0 or unread != self._least_unread:
            self._least_unread = unread
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
        """A place for a new connection. None: it is to be closed at once, without a reply."""
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
        """Admit a connection that was refused, if there is room by now."""
        if not self._make_room(connection.address):
            return False
        connection.refused = False
        self.refused -= 1
        self._join(connection)
        return True

    def claim(self, connection: Connection, key: Key) -> None:
        """Count the connection among those that use the key. Raises if the key has too many."""
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
        """Forget a connection that is closed. Does nothing if it is forgotten already."""
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
