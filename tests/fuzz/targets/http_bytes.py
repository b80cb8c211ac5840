"""Bytes of an HTTP connection. The first byte says in how many parts they arrive."""

from __future__ import annotations

import json

from tests.fuzz.front import ACCEPTED
from tests.fuzz.json_routes import server

HOST = b"Host: localhost\r\n"
JSON = b"Content-Type: application/json\r\n"
BODY = b'{"prompt": "a"}'
POST = b"POST /v1/completions HTTP/1.1\r\n" + HOST + JSON
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
WEBSOCKET = (
    b"GET /ws/generate HTTP/1.1\r\n" + HOST + b"Upgrade: websocket\r\nConnection: Upgrade\r\n"
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
)
SEEDS = [
    b"\x01GET /livez HTTP/1.1\r\n" + HOST + b"\r\n",
    b"\x01" + POST + b"Content-Length: 15\r\n\r\n" + BODY,
    b"\x05" + CHUNKED + b"f;a=b\r\n" + BODY + b"\r\n0\r\nX: y\r\n\r\n",
    b"\x02" + 3 * (b"GET /livez HTTP/1.1\r\n" + HOST + b"\r\n"),
    b"\x01" + WEBSOCKET,
    b"\x01GET /v1/models HTTP/1.0\r\nConnection: keep-alive\r\n" + HOST + b"\r\n",
    b"\x01OPTIONS * HTTP/1.1\r\n" + HOST + b"Upgrade: h2c\r\nExpect: 100-continue\r\n\r\n",
    b"\x01GET /v1/models/%2e%2e HTTP/1.1\r\n" + HOST + b"X-Request-Id: a\r\nX-Request-Timeout: 1\r\n\r\n",
]  # fmt: skip
WORDS = [
    b"GET ", b"POST ", b"PUT ", b"CONNECT ", b" HTTP/1.1\r\n", b" HTTP/1.0\r\n", b" HTTP/2.0\r\n", b"Host: localhost\r\n",
    b"Content-Length: ", b"Content-Length: 15\r\n", b"Transfer-Encoding: ", b"chunked", b"identity", b"gzip", b"Expect: 100-continue\r\n",
    b"Connection: close\r\n", b"Connection: keep-alive\r\n", b"Upgrade: h2c\r\n", b"Upgrade: websocket\r\n", b"Trailer: x\r\n",
    b"Authorization: Bearer x\r\n", b"Origin: http://evil\r\n", b"X-Request-Timeout: ", b"\r\n\r\n", b"\r\n", b"\n", b"\r", b" ", b"\t",
    b"0\r\n\r\n", b"f\r\n", b"ffffffffffffffff\r\n", b"-1", b"+1", b"0x1", b":", b";", b"%00", b"//", b"?", b"#", b"*", b"\x00",
]  # fmt: skip


def one_input(data: bytes) -> object:
    """Whatever arrives, what goes out is whole replies of HTTP, and none blames the server."""
    if b"HEAD" in data:
        return None  # a reply to HEAD has no body, which only the parser of the request could know
    parts = data[0] % 8 + 1 if data else 1
    step = max(1, -(-len(data) // parts))
    replies = server().send([data[i : i + step] for i in range(1, len(data), step)])
    outcome = []
    for reply in replies:
        if reply.status not in (101, 200):
            error = json.loads(reply.body)["error"]
            assert set(error) == {"message", "type", "param", "code"}, error
            assert reply.status < 500 or error["code"] == ACCEPTED, (reply.status, error)
        outcome.append(reply.status)
    return tuple(outcome)
