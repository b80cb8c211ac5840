"""Clients that do not read are disconnected, and what waits for them in memory does not grow."""

from __future__ import annotations

import json
import socket
import time
from pathlib import Path

from tests.serve.running import Running, http_request, raw, server

UPGRADE = (
    "Connection: Upgrade",
    "Upgrade: websocket",
    "Sec-WebSocket-Version: 13",
    "Sec-WebSocket-Key: " + "A" * 22 + "==",
)
PING = b"\x89\xfd\0\0\0\0" + b"x" * 125


def memory(running: Running) -> int:
    """KiB of the front."""
    with open(f"/proc/{running.process.pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmRSS"))


def test_unread_answers_to_pings_end_the_connection(running: Running) -> None:
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


def test_a_complete_reply_that_is_not_read_is_dropped_in_time(tmp_path: Path) -> None:
    """The connection could be used again, and stays open for that; the reply in memory does not."""
    fields = {"prompt": [[5] * 500] * 40, "max_tokens": 1, "echo": True, "logprobs": 20}
    request = http_request("/v1/completions", json.dumps(fields).encode())
    with server(tmp_path, limits={"send_seconds": 0.5}) as quick, socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", quick.port))
        connection.sendall(request)
        assert connection.recv(12) == b"HTTP/1.1 200"
        begun = time.monotonic()
        files = quick.open_files()
        while quick.open_files() >= files:
            assert time.monotonic() - begun < 5, "the reply is still kept"
            time.sleep(0.05)
