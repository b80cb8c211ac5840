"""Requests to speak something else, and heads that say two things."""

from __future__ import annotations

import json
import socket
import time

import pytest

from tests.serve.running import Running, http_request, raw

BODY = json.dumps({"prompt": "hello", "max_tokens": 2, "ignore_eos": True}).encode()


@pytest.mark.parametrize("offer", ["Upgrade: h2c", "upgrade:h2c ", "UPGRADE: h2c"])
def test_an_offer_of_http2_is_ignored(running: Running, offer: str) -> None:
    """Java's client makes one with each request, and curl --http2."""
    headers = (
        "Connection: Upgrade, HTTP2-Settings, close",
        offer,
        "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA",
    )
    reply = raw(running.port, http_request("/v1/completions", BODY, *headers))
    assert reply.startswith(b"HTTP/1.1 200 OK") and b'"completion_tokens":2' in reply


def test_it_is_ignored_in_every_request_of_a_connection(running: Running) -> None:
    offer = (
        "Connection: Upgrade, HTTP2-Settings",
        "Upgrade: h2c",
        "HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA",
    )
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as client:
        for _ in range(3):
            client.sendall(http_request("/v1/completions", BODY, *offer))
            reply = b""
            while b'"completion_tokens":2' not in reply:
                data = client.recv(65536)
                assert data, reply
                reply += data
            assert reply.startswith(b"HTTP/1.1 200 OK")


def test_no_offer_is_cut_out_of_a_body(running: Running) -> None:
    """It would become shorter than was said, and what is missing be taken from the request behind
    it."""
    body = b"\r\nUpgrade: h2c\r\n\r\n" * 3
    behind = http_request("/livez", b"", "Connection: close", method="GET")
    reply = raw(running.port, http_request("/nowhere", body) + behind)
    assert reply.startswith(b"HTTP/1.1 404") and b"HTTP/1.1 200" in reply
    half = b"POST /nowhere HTTP/1.1\nHost: localhost\nContent-Length: %d\n\n" % len(body)
    assert raw(running.port, half + body + behind).startswith(b"HTTP/1.1 400")


def test_an_offer_is_ignored_wherever_the_head_is_cut(running: Running) -> None:
    request = http_request(
        "/v1/completions", BODY, "Connection: Upgrade, close", "Upgrade: h2c", "X: " + "a" * 5000
    )
    with socket.create_connection(("127.0.0.1", running.port), timeout=20) as client:
        for part in (request[:60], request[60:4096], request[4096:]):
            client.sendall(part)
            time.sleep(0.05)
        reply = b""
        while data := client.recv(65536):
            reply += data
    assert reply.startswith(b"HTTP/1.1 200 OK") and b'"completion_tokens":2' in reply


def test_a_websocket_begins_with_get(running: Running) -> None:
    begun = time.monotonic()
    reply = raw(
        running.port,
        http_request("/ws/generate", b"abc", "Connection: Upgrade", "Upgrade: websocket"),
        3,
    )
    assert (
        reply.startswith(b"HTTP/1.1 400")
        and b"invalid_http" in reply
        and time.monotonic() - begun < 2
    )


def test_two_host_headers_are_refused(running: Running) -> None:
    for second in ("Host: evil.com", "Host: localhost"):
        reply = raw(
            running.port, http_request("/livez", b"", second, "Connection: close", method="GET")
        )
        assert reply.startswith(b"HTTP/1.1 400") and b"invalid_http" in reply
