"""Clients that do what no good client does: raw connections, frames of WebSockets, requests that
never end."""

from __future__ import annotations

import base64
import contextlib
import os
import resource
import socket
import struct
import time
from collections.abc import Iterable

from tests.http_replies import Reply, read_replies

HOST = "127.0.0.1"
JSON = "Content-Type: application/json"
CONTINUATION = 0  # kinds of frames
TEXT = 1
BINARY = 2
CLOSE = 8
PING = 9
PONG = 10


def allow_descriptors(count: int) -> None:
    """Let this process open so many files; raises if the system forbids it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < count:
        resource.setrlimit(resource.RLIMIT_NOFILE, (count, max(hard, count)))


def connect(port: int, seconds: float = 30) -> socket.socket:
    return socket.create_connection((HOST, port), timeout=seconds)


def head(method: str, path: str, *headers: str) -> bytes:
    """The head of a request, without the empty line that ends it."""
    return "\r\n".join([f"{method} {path} HTTP/1.1", "Host: localhost", *headers, ""]).encode()


def post(path: str, body: bytes, *headers: str) -> bytes:
    return head("POST", path, JSON, f"Content-Length: {len(body)}", *headers) + b"\r\n" + body


def read_all(connection: socket.socket, seconds: float, until: bytes = b"") -> bytes:
    """What arrives before the connection ends, before the time is over, or up to the bytes
    `until`."""
    found = bytearray()
    end = time.monotonic() + seconds
    with contextlib.suppress(OSError):
        while (left := end - time.monotonic()) > 0:
            connection.settimeout(left)
            part = connection.recv(65536)
            if not part:
                break
            found += part
            if until and until in found[-len(part) - len(until) :]:
                break
    return bytes(found)


def send_parts(
    port: int, parts: Iterable[bytes], seconds: float = 5, half_close: bool = False
) -> list[Reply]:
    """The replies to bytes that arrive in parts. Raises if what comes back is not whole replies."""
    with connect(port) as connection:
        with contextlib.suppress(OSError):
            for part in parts:
                connection.sendall(part)
            if half_close:
                connection.shutdown(socket.SHUT_WR)
        return read_replies(read_all(connection, seconds))


def frame(kind: int, data: bytes = b"", last: bool = True) -> bytes:
    """A WebSocket frame as clients send it, masked with zeros."""
    length = len(data)
    start = bytes([(0x80 if last else 0) | kind])
    if length < 126:
        start += bytes([0x80 | length])
    elif length < 2**16:
        start += bytes([0x80 | 126]) + struct.pack(">H", length)
    else:
        start += bytes([0x80 | 127]) + struct.pack(">Q", length)
    return start + b"\0\0\0\0" + data


def open_websocket(port: int, path: str, *headers: str) -> tuple[socket.socket, bytes]:
    """A connection, and the server's reply to the handshake."""
    key = base64.b64encode(os.urandom(16)).decode()
    lines = ["Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Key: {key}"]
    connection = connect(port)
    connection.sendall(head("GET", path, *lines, "Sec-WebSocket-Version: 13", *headers) + b"\r\n")
    return connection, read_all(connection, 30, until=b"\r\n\r\n")
