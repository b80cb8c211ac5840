"""Requests to speak something else, and heads that say two things."""

from __future__ import annotations

import json
import time

import pytest

from tests.serve.running import Running, http_request, raw

BODY = json.dumps({"prompt": "hello", "max_tokens": 2, "ignore_eos": True}).encode()


@pytest.mark.parametrize("offer", ["Upgrade: h2c", "upgrade:h2c ", "UPGRADE: h2c"])
def test_an_offer_of_http2_is_ignored(running: Running, offer: str) -> None:
    """Java's client makes one with each request, and curl --http2."""
    headers = ("Connection: Upgrade, HTTP2-Settings, close", offer, "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")
    reply = raw(running.port, http_request("/v1/completions", BODY, *headers))
    assert reply.startswith(b"HTTP/1.1 200 OK") and b'"completion_tokens":2' in reply


def test_a_websocket_begins_with_get(running: Running) -> None:
    begun = time.monotonic()
    reply = raw(running.port, http_request("/ws/generate", b"abc", "Connection: Upgrade", "Upgrade: websocket"), 3)
    assert reply.startswith(b"HTTP/1.1 400") and b"invalid_http" in reply and time.monotonic() - begun < 2


def test_two_hosts_are_none(running: Running) -> None:
    for second in ("Host: evil.com", "Host: localhost"):
        reply = raw(running.port, http_request("/livez", b"", second, "Connection: close", method="GET"))
        assert reply.startswith(b"HTTP/1.1 400") and b"invalid_http" in reply
