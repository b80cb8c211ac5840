"""Bytes that follow the handshake of a WebSocket. The first byte says in how many parts they
arrive."""

from __future__ import annotations

import json
import struct

from tests.attacks.clients import BINARY, CLOSE, CONTINUATION, PING, PONG, TEXT, frame
from tests.fuzz.front import ACCEPTED
from tests.fuzz.json_routes import server
from tests.fuzz.targets.http_bytes import WEBSOCKET

ASKED = b'{"prompt": "hi", "max_new_tokens": 3}'
SEEDS = [
    b"\x01" + frame(TEXT, ASKED),
    b"\x03" + frame(TEXT, ASKED[:10], last=False) + frame(CONTINUATION, ASKED[10:]),
    b"\x01" + frame(BINARY, ASKED) + frame(PING, b"x") + frame(TEXT, b'{"type": "cancel"}'),
    b"\x02" + frame(PONG) + frame(TEXT, b"{") + frame(CLOSE, struct.pack(">H", 1000) + b"bye"),
    b"\x01" + frame(TEXT, b'{"prompt": "' + b"a" * 300 + b'"}'),
    b"\x04" + frame(TEXT, b"", last=False) + 50 * frame(CONTINUATION, b"", last=False),
]
WORDS = [
    b"\x81", b"\x01", b"\x80", b"\x00", b"\x82", b"\x88", b"\x89", b"\x8a", b"\xc1", b"\xf1", b"\x7e", b"\x7f", b"\xfe", b"\xff", b"\x7d", b"\x8b",
    b"\x00\x00\x00\x00", b"\xff\xff\xff\xff\xff\xff\xff\xff", b"\x00\x7e", b'{"prompt": ', b'"type": "cancel"', b'"stream": true', b"\xed\xa0\x80",
    frame(PING), frame(PONG), frame(TEXT), frame(CLOSE), frame(CONTINUATION, last=False), frame(TEXT, ASKED),
]  # fmt: skip
CLOSE_CODES = {1000, 1001, 1002, 1003, 1007, 1008, 1009, 1010, 1011, 1012, 1013, 1014}


def frames(data: bytes) -> list[tuple[int, bytes]]:
    """What the server sent: kind and payload of each frame. None is masked, cut or in fragments."""
    found = []
    at = 0
    while at < len(data):
        assert data[at] & 0xF0 == 0x80, ("not a whole frame", data[at : at + 20])
        length = data[at + 1]
        start = at + 2
        if length == 126:
            (length,) = struct.unpack_from(">H", data, start)
            start += 2
        elif length == 127:
            (length,) = struct.unpack_from(">Q", data, start)
            start += 8
        assert start + length <= len(data), "a frame is cut"
        found.append((data[at] & 15, data[start : start + length]))
        at = start + length
    return found


def one_input(data: bytes) -> object:
    """Whatever arrives, what goes out is whole frames: messages in JSON, pongs, and one close at
    the end."""
    parts = data[0] % 8 + 1 if data else 1
    step = max(1, -(-len(data) // parts))
    written = server().write([WEBSOCKET, *(data[i : i + step] for i in range(1, len(data), step))])
    head, _, rest = written.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 101 "), head
    outcome: list[object] = []
    for kind, payload in frames(rest):
        assert outcome[-1:] != ["closed"], "a frame after the close"
        if kind == TEXT:
            error = json.loads(payload)["error"]
            assert set(error) == {"message", "type", "param", "code"}, error
            assert error["type"] != "server_error", error
            assert error["type"] != "overloaded_error" or error["code"] == ACCEPTED, error
            outcome.append(error["code"])
        elif kind == CLOSE:
            assert len(payload) >= 2 or not payload, payload
            if payload:
                code = struct.unpack_from(">H", payload)[0]
                # a client's own code comes back
                assert code in CLOSE_CODES or 3000 <= code < 5000, payload
            outcome.append("closed")
        else:
            assert kind == PONG, kind
    return tuple(outcome[:4])
