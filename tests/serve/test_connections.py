"""How many connections there may be, and which one is closed when there is no room for another."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.serve.api.api_errors import ApiError
from octavo.serve.front.keys import Key, KeyEntry
from octavo.serve.http.connections import REFUSALS, Connection, ConnectionState, ConnectionTable
from octavo.serve.limits import Limits
from octavo.serve.serve_config import ServeConfig
from tests.serve.running import Running, http_request, server
from tests.serve.test_streams import ws

LIVEZ = http_request("/livez", b"", method="GET")


class Handler:
    """`unread` bytes wait for the client, which reads `reads` of them each time that somebody
    looks."""

    def __init__(self, unread: int = 0, reads: int = 0):
        self.unread = unread
        self.reads = reads
        self.closed = False
        self.late = False
        self.transport: Any = self

    def get_write_buffer_size(self) -> int:
        self.unread = max(self.unread - self.reads, 0)
        return self.unread

    def abort(self) -> None:
        self.closed = True

    evict = abort

    def deadline_passed(self) -> None:
        self.late = True


def admit(
    table: ConnectionTable,
    address: str,
    state: ConnectionState = ConnectionState.SILENT,
    unread: int = 0,
    age: float = 1.0,
) -> Connection:
    connection = table.admit(address)
    assert connection is not None
    connection.owner = Handler(unread)
    connection.enter(state)
    connection.state_since -= age
    return connection


def closed(connection: Connection) -> bool:
    assert isinstance(connection.owner, Handler)
    return connection.owner.closed


def test_a_full_table_closes_silent_connections_first_then_the_oldest_idle_one() -> None:
    table = ConnectionTable(Limits(connections=4))
    busy = admit(table, "10.0.0.1", ConnectionState.BUSY)
    older = admit(table, "10.0.0.2", ConnectionState.IDLE)
    younger = admit(table, "10.0.0.3", ConnectionState.IDLE)
    silent = admit(table, "10.0.0.4")
    order = (silent, older, younger)
    for k in range(3):
        admit(table, "10.0.0.5", ConnectionState.BUSY)
        assert [closed(one) for one in order] == [True] * (k + 1) + [False] * (2 - k)
    assert not closed(busy) and len(table) == 4


@pytest.mark.parametrize("state", [ConnectionState.SILENT, ConnectionState.RECEIVING])
def test_a_connection_whose_request_may_be_on_its_way_is_closed_last(
    state: ConnectionState,
) -> None:
    table = ConnectionTable(Limits(connections=4))
    receiving = admit(table, "10.0.0.1", ConnectionState.RECEIVING)
    new = admit(table, "10.0.0.2", state, age=0.0)
    idle = admit(table, "10.0.0.3", ConnectionState.IDLE, age=0.0)
    newer = admit(table, "10.0.0.4", state, age=0.0)
    order = (idle, receiving, new, newer)
    for k in range(4):
        admit(table, "10.0.0.5", ConnectionState.BUSY)
        assert [closed(one) for one in order] == [True] * (k + 1) + [False] * (3 - k)


def test_a_connection_that_was_used_again_is_no_longer_the_oldest() -> None:
    table = ConnectionTable(Limits(connections=2))
    first, second = (admit(table, "10.0.0.1", ConnectionState.IDLE) for _ in range(2))
    first.enter(ConnectionState.BUSY)
    first.enter(ConnectionState.IDLE)
    admit(table, "10.0.0.2")
    assert closed(second) and not closed(first)


def test_a_reply_that_is_not_read_yet_is_not_thrown_away() -> None:
    table = ConnectionTable(Limits(connections=2))
    reading = admit(table, "10.0.0.1", ConnectionState.IDLE, unread=1000)
    idle = admit(table, "10.0.0.1", ConnectionState.IDLE)
    admit(table, "10.0.0.2")
    assert closed(idle) and not closed(reading)


def test_an_address_at_its_limit_closes_its_own_connections() -> None:
    table = ConnectionTable(Limits(connections=100, connections_per_address=2))
    other = admit(table, "10.0.0.9", ConnectionState.IDLE)
    mine = [admit(table, "10.0.0.1", ConnectionState.IDLE) for _ in range(3)]
    assert [closed(one) for one in mine] == [True, False, False] and not closed(other)
    network = [admit(table, f"2001:db8::{k}", ConnectionState.IDLE) for k in range(3)]
    assert [closed(one) for one in network] == [True, False, False], "one IPv6 network"


def test_when_all_are_busy_a_few_more_get_503_and_the_rest_is_closed() -> None:
    table = ConnectionTable(Limits(connections=1))
    busy = admit(table, "10.0.0.1", ConnectionState.BUSY)
    more = [table.admit("10.0.0.2") for _ in range(REFUSALS + 1)]
    assert all(one is not None and one.refused for one in more[:-1]) and more[-1] is None
    assert more[0] is not None and not table.retry(more[0])
    table.remove(busy)
    assert table.retry(more[0]) and not more[0].refused, "there is room by now"
    assert table.all.count == 1 and table.refused == REFUSALS - 1


def test_connections_of_a_key_are_bounded() -> None:
    table = ConnectionTable(Limits(connections_per_key=2))
    alice, bob = (Key(KeyEntry(name), name.encode()) for name in ("alice", "bob"))
    busy, idle, third, fourth = (admit(table, "10.0.0.1", ConnectionState.BUSY) for _ in range(4))
    for one in (busy, idle, idle):
        table.claim(one, alice)
    idle.enter(ConnectionState.IDLE)
    table.claim(third, alice)
    assert closed(idle) and not closed(busy)
    with pytest.raises(ApiError, match="2 connections") as caught:
        table.claim(fourth, alice)
    assert caught.value.status == 429 and caught.value.retry_after
    table.claim(fourth, bob)
    table.claim(third, bob)
    table.claim(admit(table, "10.0.0.2", ConnectionState.BUSY), alice)


def test_nothing_is_left_of_connections_that_are_closed() -> None:
    table = ConnectionTable(Limits())
    key = Key(KeyEntry("alice"), b"alice")
    for state in ConnectionState:
        connection = admit(table, "10.0.0.1", state)
        table.claim(connection, key)
        table.remove(connection)
        table.remove(connection)
    assert not table.connections and not table.addresses and table.all.count == 0
    assert table.keys["alice"].count == 0 and not any(table.all.evictable)


def test_a_client_that_reads_nothing_is_disconnected_and_a_slow_one_is_not() -> None:
    """Whether the connection is closing already or its reply is complete makes no difference."""
    table = ConnectionTable(Limits(send_seconds=0.1))
    connections = []
    for unread, reads in ((5, 0), (100_000, 1), (0, 0)):
        connection = admit(table, "10.0.0.1", ConnectionState.BUSY)
        connection.owner = Handler(unread, reads)
        connections.append(connection)

    async def run() -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(table.sweep_forever(), 0.5)

    asyncio.run(run())
    assert [closed(one) for one in connections] == [True, False, False]


# ---- a server of eight connections ---------------------------------------------------------------


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    limits = {"connections": 8, "connections_per_address": 8}
    with server(tmp_path_factory.mktemp("connections"), limits=limits) as found:
        yield found


def connect(port: int, data: bytes = b"") -> socket.socket:
    connection = socket.create_connection(("127.0.0.1", port), timeout=10)
    connection.sendall(data)
    return connection


def read_reply(connection: socket.socket) -> bytes:
    found = b""
    with contextlib.suppress(ConnectionError):
        while not found.endswith(b"}"):
            part = connection.recv(65536)
            if not part:
                break
            found += part
    return found


@pytest.mark.parametrize("kind", ["silent", "half a request", "keep-alive", "half a body"])
def test_idle_connections_do_not_keep_others_out(small: Running, kind: str) -> None:
    data = {
        "silent": b"",
        "half a request": LIVEZ[:20],
        "keep-alive": LIVEZ,
        "half a body": http_request("/generate", b"{}")[:-1],
    }[kind]
    with contextlib.ExitStack() as stack:
        for _ in range(20):
            idle = stack.enter_context(connect(small.port, data))
            if kind == "keep-alive":
                assert read_reply(idle).startswith(b"HTTP/1.1 200")
        for _ in range(5):
            with connect(small.port, LIVEZ) as good:
                assert read_reply(good).startswith(b"HTTP/1.1 200")


def test_connections_that_are_opened_at_once_are_all_served(small: Running) -> None:
    """Silent connections fill the table. New clients connect, and send their request a little
    later: the silent connections make room, and none of the new ones is closed."""
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(connect(small.port))
        time.sleep(0.5)
        fresh = [stack.enter_context(connect(small.port)) for _ in range(4)]
        for connection in fresh:
            connection.sendall(LIVEZ)
            assert read_reply(connection).startswith(b"HTTP/1.1 200")


def test_idle_websockets_do_not_keep_others_out(small: Running) -> None:
    with contextlib.ExitStack() as stack:
        for _ in range(12):
            stack.enter_context(ws(small, close_timeout=0.1))
        with connect(small.port, LIVEZ) as good:
            assert read_reply(good).startswith(b"HTTP/1.1 200")


def test_when_all_connections_are_busy_the_next_request_is_answered_with_503(
    small: Running,
) -> None:
    small.http.close()
    body = json.dumps(
        {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True}
    ).encode()
    with contextlib.ExitStack() as stack:
        busy = [
            stack.enter_context(connect(small.port, http_request("/v1/completions", body)))
            for _ in range(8)
        ]
        for connection in busy:
            assert connection.recv(12) == b"HTTP/1.1 200"
        with connect(small.port) as refused:
            refused.settimeout(0.2)
            with pytest.raises(TimeoutError):
                refused.recv(1)  # no reply before the request
            refused.settimeout(5)
            refused.sendall(LIVEZ)
            reply = read_reply(refused)
            if reply.startswith(b"HTTP/1.1 200"):
                pytest.skip("a stream ended before the request came")
            assert reply.startswith(b"HTTP/1.1 503") and b"too_many_connections" in reply
            assert b"retry-after-ms" in reply


def test_running_out_of_file_descriptors_is_logged_and_requests_are_still_served(
    tmp_path: Path,
) -> None:
    with server(tmp_path, descriptors=100) as front, contextlib.ExitStack() as stack:
        for _ in range(150):
            stack.enter_context(connect(front.port))
        for _ in range(5):
            with connect(front.port, LIVEZ) as good:
                assert read_reply(good).startswith(b"HTTP/1.1 200")
        assert front.log.read_text().count("running out of file descriptors") == 1
        stack.close()
        time.sleep(0.3)
        assert front.complete()["usage"]["completion_tokens"] == 4


def test_limits_and_proxies_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.testing import CliRunner

    from octavo.cli import app

    configs: list[ServeConfig] = []
    monkeypatch.setattr("octavo.serve.server.run", lambda config, *_: configs.append(config))
    options = ["--max-connections", "100", "--max-connections-per-address", "50"]
    for arguments in ([], [*options, "--trusted-proxy", "10.0.0.1"]):
        assert CliRunner().invoke(app, ["serve", *arguments]).exit_code == 0
    limits = [config.limits for config in configs]
    assert [(found.connections, found.connections_per_address) for found in limits] == [
        (8192, 4096),
        (100, 50),
    ]
    assert configs[0].trusted_proxies == ()
    assert configs[1].trusted_proxies == ("10.0.0.1",)
