"""Bytes that arrive on a connection whose stream is running, and requests that are two or none."""

from __future__ import annotations

import json
import time

from tests.attacks import replies
from tests.attacks.clients import JSON, connect, head, post, read_all, send_parts
from tests.attacks.target import ALICE, COMPLETIONS, Target, bearer
from tests.http_replies import read_replies
from tests.serve.running import events

KEY = bearer(ALICE)
LIVEZ = head("GET", "/livez")
LAST_CHUNK = b"\r\n0\r\n\r\n"
BODY = b'{"prompt":"Hello","max_tokens":3,"temperature":0}'
POST = head("POST", COMPLETIONS, JSON, KEY)

# What follows on the connection of a running stream.
LATE: dict[str, bytes] = {
    "nothing": b"",
    "half a request line": b"GET /livez HT",
    "an empty line": b"\r\n",
    "half the headers": LIVEZ + b"X: ",
    "70 KB of headers": LIVEZ + b"X: " + b"a" * 70_000,
    "garbage": b"\x00\x01garbage\r\n\r\n",
    "40 requests": (LIVEZ + b"\r\n") * 40,
}


def interrupt(target: Target, late: bytes, seconds: float, tokens: int = 900) -> None:
    """A stream that takes at least so long arrives whole, whatever else arrives on its
    connection."""
    body = {
        "prompt": "Hello",
        "max_tokens": tokens,
        "temperature": 0,
        "stream": True,
        "ignore_eos": True,
    }
    begun = time.monotonic()
    with connect(target.port) as connection:
        connection.sendall(post(COMPLETIONS, json.dumps(body).encode(), KEY))
        found = read_all(connection, 30, until=b"data: ")
        connection.sendall(late)
        found += read_all(connection, 120, until=b"data: [DONE]\n\n" + LAST_CHUNK)
    stream, end, _ = found.partition(LAST_CHUNK)
    assert end, ("the stream was cut", found[-300:])
    (reply,) = read_replies(stream + end)
    assert reply.status == 200
    received = events(reply.body.decode())
    assert not any("error" in event for event in received), received[-1]
    assert received[-1]["choices"][0]["finish_reason"] == "length"
    assert time.monotonic() - begun >= seconds, "the stream was too short to show anything"


def pipelined(target: Target, count: int) -> None:
    """Requests that arrive together are answered in order; those beyond a bound are refused after
    the others."""
    data = (LIVEZ + b"\r\n") * count
    found = send_parts(target.port, [data], seconds=10, half_close=True)
    statuses = [reply.status for reply in found]
    assert statuses.count(200) >= min(count, 16), statuses
    assert set(statuses[:-1]) == {200}, statuses
    for reply in found:
        replies.check(reply)


def with_length(length: str) -> bytes:
    return POST + f"Content-Length: {length}\r\nConnection: close\r\n\r\n".encode() + BODY


def with_encoding(encoding: bytes) -> bytes:
    return (
        POST + b"Transfer-Encoding: " + encoding + b"\r\nConnection: close\r\n\r\n"
        b"31\r\n" + BODY + b"\r\n0\r\n\r\n"
    )


def chunked(body: bytes) -> bytes:
    return POST + b"Transfer-Encoding: chunked\r\nConnection: close\r\n\r\n" + body


SMUGGLED = LIVEZ + b"\r\n"
# Bytes, and the statuses of the replies that they may have.
AMBIGUOUS: dict[str, tuple[bytes, set[tuple[int, ...]]]] = {
    "length and chunks": (POST + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG", {(400,)}),
    "chunks and length": (POST + b"Transfer-Encoding: chunked\r\nContent-Length: 6\r\n\r\n0\r\n\r\nG", {(400,)}),
    "two lengths": (POST + b"Content-Length: 5\r\nContent-Length: 49\r\n\r\n" + BODY, {(400,)}),
    "the same length twice": (POST + b"Content-Length: 49\r\nContent-Length: 49\r\n\r\n" + BODY, {(400,)}),
    "a list of lengths": (with_length("49, 49"), {(400,)}),
    "a plus sign": (with_length("+49"), {(400,)}),
    "a negative length": (with_length("-1"), {(400,)}),
    "a vertical tab": (with_encoding(b"chunked\x0b"), {(400,)}),
    "two spaces": (with_encoding(b" chunked"), {(200,)}),
    "carriage returns alone": (b"GET /livez HTTP/1.1\rHost: localhost\r\r", {(400,)}),
    # The rest of the body is waited for until the time for bodies is over, and never stored.
    "a chunk of 16 EiB": (chunked(b"FFFFFFFFFFFFFFFE\r\n" + BODY), {(), (400,), (413,)}),
    "an extension of a MiB": (chunked(b"31;" + b"a" * 2**20), {(), (400,), (413,), (431,)}),
    "a hexadecimal length": (with_length("0x31"), {(400,)}),
    "a length beyond 64 bits": (with_length("18446744073709551665"), {(400,)}),
    "a space before the colon": (POST + b"Content-Length : 49\r\n\r\n" + BODY, {(400,)}),
    "chunked, identity": (with_encoding(b"chunked, identity"), {(400,)}),
    "identity": (with_encoding(b"identity"), {(400,)}),
    "xchunked": (with_encoding(b"xchunked"), {(400,)}),
    "gzip, chunked": (with_encoding(b"gzip, chunked"), {(400,), (415,), (501,)}),
    "chunked, chunked": (with_encoding(b"chunked, chunked"), {(400,)}),
    "chunked in capitals": (with_encoding(b"CHUNKED"), {(200,)}),
    "two encodings": (with_encoding(b"chunked\r\nTransfer-Encoding: identity"), {(400,)}),
    "chunks": (chunked(b"31\r\n" + BODY + b"\r\n0\r\n\r\n"), {(200,)}),
    "an extension": (chunked(b"31;a=b\r\n" + BODY + b"\r\n0\r\n\r\n"), {(200,)}),
    "line feeds": (chunked(b"31\n" + BODY + b"\n0\n\n"), {(400,)}),
    "a negative chunk": (chunked(b"-1\r\n" + BODY), {(400,)}),
    "a chunk in 0x": (chunked(b"0x31\r\n" + BODY + b"\r\n0\r\n\r\n"), {(400,)}),
    "a chunk beyond 64 bits": (chunked(b"FFFFFFFFFFFFFFFFF\r\n" + BODY), {(400,)}),
    "a chunk of the wrong size": (chunked(b"05\r\n" + BODY + b"\r\n0\r\n\r\n"), {(400,)}),
    "chunks of a byte": (chunked(b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\n\r\n"), {(200,)}),
    "trailers": (chunked(b"31\r\n" + BODY + b"\r\n0\r\nX: y\r\nAuthorization: Bearer z\r\n\r\n"), {(200,)}),
    "many trailers": (chunked(b"31\r\n" + BODY + b"\r\n0\r\n" + b"X: y\r\n" * 200_000), {(431,), (200,)}),
    "a folded header": (LIVEZ + b"X: a\r\n b\r\n\r\n", {(400,)}),
    "line feeds in the head": (b"GET /livez HTTP/1.1\nHost: localhost\n\n", {(400,)}),
    "a body of GET": (LIVEZ + b"Content-Length: 40\r\n\r\n" + SMUGGLED.ljust(40) + LIVEZ + b"Connection: close\r\n\r\n", {(200, 200)}),
    "260 headers": (LIVEZ + b"".join(b"X%d: y\r\n" % i for i in range(260)) + b"\r\n", {(431,)}),
    "a header of 66 KB": (LIVEZ + b"X: " + b"a" * 66_000 + b"\r\n\r\n", {(431,)}),
    "a path of 70 KB": (b"GET /" + b"a" * 70_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n", {(431,)}),
    "CONNECT": (b"CONNECT localhost:80 HTTP/1.1\r\nHost: localhost\r\n\r\n", {(400,), (401,), (405,)}),
    "a method of 8 KB": (b"A" * 8000 + b" / HTTP/1.1\r\nHost: localhost\r\n\r\n", {(400,)}),
}  # fmt: skip


def send_ambiguous(target: Target) -> None:
    """A request that two readers could read in two ways is refused; one that is merely odd is
    answered once."""
    for name, (data, allowed) in AMBIGUOUS.items():
        found = send_parts(target.port, [data], seconds=2)
        statuses = tuple(reply.status for reply in found)
        assert statuses in allowed, (name, statuses, found)
        for reply in found:
            replies.check(reply, {*range(400, 500), 501})


def half_close(target: Target) -> None:
    """A client that closes its side after a whole request gets the reply; after half of one,
    nothing is left open."""
    whole = post(COMPLETIONS, BODY, KEY)
    (reply,) = send_parts(target.port, [whole], seconds=30, half_close=True)
    assert reply.status == 200
    for part in (whole[:-10], whole[:40], b""):
        for reply in send_parts(target.port, [part], seconds=5, half_close=True):
            replies.check(reply)
