"""WebSockets whose clients send what costs the server much and themselves little."""

from __future__ import annotations

import contextlib
import json
import socket
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import ConnectionClosed

from tests.serve.running import Running, alive, http_request, raw, server
from tests.serve.test_streams import read_all, ws
from tests.serve.test_unread import UPGRADE

MIB = 2**20
TEXT, PING, PONG, CONTINUATION, CLOSE = 1, 9, 10, 0, 8


def frame(opcode: int, data: bytes = b"", fin: bool = True) -> bytes:
    """Masked with zeros."""
    head = bytes([(0x80 if fin else 0) | opcode])
    if len(data) < 126:
        head += bytes([0x80 | len(data)])
    else:
        head += bytes([0x80 | 127]) + struct.pack(">Q", len(data))
    return head + b"\0\0\0\0" + data


@contextlib.contextmanager
def opened(port: int, path: str = "/ws/generate") -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        connection.sendall(http_request(path, b"", *UPGRADE, method="GET"))
        head = b""
        while not head.endswith(b"\r\n\r\n"):
            head += connection.recv(1)
        assert head.startswith(b"HTTP/1.1 101"), head
        yield connection


def read_frames(connection: socket.socket) -> list[tuple[int, bytes]]:
    """All frames up to the end of the connection."""
    data = b""
    with contextlib.suppress(OSError):
        while part := connection.recv(65536):
            data += part
    found = []
    while data:
        size = data[1] & 0x7F
        start = 2
        if size == 126:
            size = int.from_bytes(data[2:4], "big")
            start = 4
        found.append((data[0] & 0x0F, data[start : start + size]))
        data = data[start + size :]
    return found


def read_frame(connection: socket.socket) -> dict[str, Any]:
    """Read one frame, and return the JSON in it."""
    head = connection.recv(2, socket.MSG_WAITALL)
    size = head[1] & 0x7F
    if size == 126:
        size = int.from_bytes(connection.recv(2, socket.MSG_WAITALL), "big")
    found: dict[str, Any] = json.loads(connection.recv(size, socket.MSG_WAITALL))
    return found


FLOODS = {
    "pings": (b"", frame(PING)),
    "pongs": (b"", frame(PONG)),
    "empty fragments": (frame(TEXT, fin=False), frame(CONTINUATION, fin=False)),
    "small fragments": (frame(TEXT, fin=False), frame(CONTINUATION, b"x" * 100, fin=False)),
    "empty messages": (b"", frame(TEXT)),
    "cancelling nothing": (b"", frame(TEXT, b'{"type": "cancel"}')),
}


@pytest.mark.parametrize(("first", "repeated"), FLOODS.values(), ids=FLOODS.keys())
@pytest.mark.parametrize("path", ["/ws/generate", "/ws/watch"])
def test_a_flood_of_small_frames_ends_its_connection_and_delays_no_other(
    running: Running, first: bytes, repeated: bytes, path: str
) -> None:
    with opened(running.port, path) as connection:
        connection.sendall(first)
        connection.settimeout(0.5)
        begun = time.monotonic()
        with alive(running), contextlib.suppress(OSError):
            while time.monotonic() - begun < 10:
                with contextlib.suppress(TimeoutError):
                    connection.send(repeated * 5000)
        assert time.monotonic() - begun < 8, "it is still open"
    assert running.complete()["usage"]["completion_tokens"] == 4


def test_the_client_gets_the_reason_why_its_connection_is_closed(running: Running) -> None:
    with opened(running.port) as connection:
        connection.sendall(frame(PONG) * 1000)
        opcode, data = read_frames(connection)[-1]
    assert opcode == CLOSE and int.from_bytes(data[:2], "big") == 1008
    assert b"too many pings" in data


def test_pings_at_a_usual_rate_are_answered(running: Running) -> None:
    with opened(running.port) as connection:
        for _ in range(100):
            connection.sendall(frame(PING, b"hello"))
        found = b""
        while len(found) < 100 * 7:
            found += connection.recv(65536)
    assert found == (bytes([0x80 | PONG, 5]) + b"hello") * 100


def test_a_message_in_large_fragments_is_taken(running: Running) -> None:
    text = json.dumps({"prompt": "x", "max_new_tokens": 2, "user": "u" * 500_000}).encode()
    parts = [text[k : k + 2000] for k in range(0, len(text), 2000)]
    with opened(running.port) as connection:
        connection.sendall(frame(TEXT, parts[0], fin=False))
        for part in parts[1:-1]:
            connection.sendall(frame(CONTINUATION, part, fin=False))
        connection.sendall(frame(CONTINUATION, parts[-1]))
        connection.settimeout(10)
        found = b""
        while b'"type":"done"' not in found:
            part = connection.recv(65536)
            assert part, found
            found += part


LARGE = {
    "objects": b'{"prompt":"a","max_new_tokens":1,"x":[' + b"{}," * (2 * MIB) + b"{}]}",
    "names": b'{"prompt":"a",' + b",".join(b'"f%d":1' % i for i in range(500_000)) + b"}",
    "token ids": b'{"prompt":"a","stop_token_ids":[' + b"1," * (4 * MIB - 200) + b"1]}",
    "text": b'{"prompt":"' + b"a" * (8 * MIB - 200) + b'"}',
}


@pytest.mark.parametrize("name", LARGE)
def test_a_large_message_is_parsed_in_a_worker_process(running: Running, name: str) -> None:
    message = LARGE[name].decode()
    with alive(running), ws(running) as connection:
        connection.send(message)
        _, last = read_all(connection)
    assert last.get("type", "error") == ("done" if name == "objects" else "error")


def test_unfinished_messages_take_bounded_memory(tmp_path: Path) -> None:
    limits = {"body_memory_per_address": 16 * MIB}
    unfinished = frame(TEXT, b" " * (6 * MIB))[:-1]
    with server(tmp_path, limits=limits) as running, contextlib.ExitStack() as stack:
        connections = [stack.enter_context(opened(running.port)) for _ in range(3)]
        for connection in connections[:2]:
            connection.sendall(unfinished)
        time.sleep(0.5)
        with contextlib.suppress(OSError):
            connections[2].sendall(unfinished)
        connections[2].settimeout(2)  # The server closes the connection later.
        (opcode, payload) = read_frames(connections[2])[-1]
        assert (opcode, int.from_bytes(payload[:2], "big")) == (CLOSE, 1013)
        head = http_request("/v1/completions", b" " * (6 * MIB))
        assert b"body_memory_exceeded" in raw(running.port, head), "bodies count as well"
        with ws(running) as small:
            small.send(json.dumps({"prompt": "a", "max_new_tokens": 1}))
            assert read_all(small)[1]["type"] == "done"
        connections[0].close()
        time.sleep(0.5)
        assert b"body_memory_exceeded" not in raw(running.port, head), "the memory is free again"


def test_messages_that_arrive_together_are_answered_one_after_another(running: Running) -> None:
    with ws(running) as socket:
        for k in range(20):
            socket.send(json.dumps({"prompt": "x", "max_new_tokens": k + 1, "ignore_eos": True}))
        counts = [read_all(socket)[1]["usage"]["completion_tokens"] for _ in range(20)]
    assert counts == list(range(1, 21))


def test_invalid_messages_are_answered_up_to_a_bound(tmp_path: Path) -> None:
    with (
        server(tmp_path, ready=False, limits={"websocket_errors": 5}) as strict,
        ws(strict) as socket,
    ):
        for k in range(5):
            socket.send(b"\xff\xfe" if k % 2 else "no JSON")
            assert json.loads(socket.recv(timeout=5))["error"]["code"] == "invalid_json"
        with pytest.raises(ConnectionClosed) as caught:
            socket.recv(timeout=5)
        assert caught.value.rcvd is not None and caught.value.rcvd.code == 1008


def test_a_message_that_is_never_completed_ends_its_connection(tmp_path: Path) -> None:
    with (
        server(tmp_path, ready=False, limits={"body_seconds": 0.5, "send_seconds": 1.0}) as quick,
        opened(quick.port) as connection,
    ):
        connection.sendall(frame(TEXT, b"x" * 2000, fin=False))
        begun = time.monotonic()
        ((opcode, data),) = read_frames(connection)
        assert opcode == CLOSE and b"did not arrive in time" in data
        assert time.monotonic() - begun < 4


def test_text_that_is_not_utf_8_closes_the_connection_without_a_traceback(running: Running) -> None:
    before = len(running.log.read_text())
    with opened(running.port) as connection:
        connection.sendall(frame(TEXT, b"\xff\xff"))
        ((opcode, data),) = read_frames(connection)
    assert opcode == CLOSE and int.from_bytes(data[:2], "big") == 1007
    assert "Traceback" not in running.log.read_text()[before:]


def test_a_large_text_that_is_not_utf_8_gets_an_error_and_the_connection_goes_on(
    running: Running,
) -> None:
    """Large texts are not decoded in the event loop: the JSON parser finds the invalid bytes."""
    prompt = b"x" * 100 * 2**10
    invalid = b'{"prompt": "' + prompt + b'\xff\xfe"}'
    valid = b'{"prompt": "hi", "max_new_tokens": 2}'
    before = len(running.log.read_text())
    with opened(running.port) as connection:
        connection.sendall(frame(TEXT, invalid))
        error = read_frame(connection)["error"]
        assert error["type"] == "invalid_request_error" and error["code"] == "invalid_json"
        connection.sendall(frame(TEXT, valid))
        while (reply := read_frame(connection)).get("type") == "text":
            pass
        assert reply["type"] == "done" and reply["usage"]["completion_tokens"] <= 2
    assert "Traceback" not in running.log.read_text()[before:]
    assert running.post("/generate", {"prompt": "hi", "max_new_tokens": 1}).status_code == 200


@pytest.mark.parametrize("header", ["Sec-WebSocket-Key: short", "Sec-WebSocket-Version: 8"])
def test_a_handshake_that_is_wrong_gets_an_error_as_all_others(
    running: Running, header: str
) -> None:
    name = header.partition(":")[0]
    headers = [line for line in UPGRADE if not line.startswith(name)]
    request = http_request("/ws/generate", b"", *headers, header, method="GET")
    head, _, body = raw(running.port, request).partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400") and b"sec-websocket-version: 13" in head
    assert json.loads(body)["error"]["code"] == "invalid_http"
