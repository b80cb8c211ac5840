"""HTTP connections with bounds: uvicorn's protocol, which has none on headers, none on how long they take, and none on how long
what was written stays unread.

Overrides what it documents as its parser's callbacks, and adds to each request's scope a Line: what an exchange wants to know
of its connection beyond ASGI.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import deque
from collections.abc import Callable, Collection
from typing import Any

from uvicorn.protocols.http.httptools_impl import (
    STATUS_LINE,
    HttpToolsProtocol,
    RequestResponseCycle,
)
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from octavo.serve.errors import ApiError
from octavo.serve.front import new_id
from octavo.serve.limits import Limits

OFFER = re.compile(rb"\r\nupgrade:[ \t]*h2c[ \t]*(?=\r\n)\r\n", re.IGNORECASE)
UNREAD = 2**20  # bytes that wait for the client of a WebSocket to read them, and it still says more
PIPELINED = 32  # requests that one connection may have sent before the first is answered


class Line:
    """One request's connection."""

    def __init__(self, cycle: RequestResponseCycle):
        self.cycle = cycle
        self.arrival = time.monotonic()
        self._left: Callable[[], None] | None = None

    def body(self) -> bytes | None:
        """The request's body, if all of it has come; None: receive it as it comes. Most are there, and receiving them costs more
        than reading them."""
        if self.cycle.more_body or self.cycle.disconnected:
            return None
        data = bytes(self.cycle.body)
        self.cycle.body = bytearray()
        return data

    @property
    def paused(self) -> bool:
        """Writing would wait."""
        return self.cycle.flow.write_paused

    def abort(self) -> None:
        self.cycle.transport.abort()

    def watch(self, left: Callable[[], None]) -> None:
        """`left` is called when the client leaves, now if it has left. A task that listens would cost ten times as much."""
        self._left = left
        if self.cycle.disconnected:
            left()
        else:
            # a large body may have stopped it, and who does not read sees nobody leave
            self.cycle.flow.resume_reading()

    def answered(self) -> None:
        """Nobody need hear of the client any more."""
        self._left = None

    def lost(self) -> None:
        if not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            if self._left is not None:
                self._left()


def without_offer(data: bytes) -> bytes:
    """What begins a request, without an offer of HTTP/2, as Java's client makes one each time: the parser would read no body
    behind it. Of the head alone, and only where its end is plain to see: a body that became shorter would take what is missing
    from the next request."""
    head, end, body = data.partition(b"\r\n\r\n")
    if not end or head.startswith(b"\r\n") or head.count(b"\n") != head.count(b"\r\n"):
        return data
    return OFFER.sub(b"\r\n", head + b"\r\n") + b"\r\n" + body


def bounded(limits: Limits) -> type[HttpToolsProtocol]:
    class Bounded(HttpToolsProtocol):
        _timer: asyncio.TimerHandle | None = None  # while headers are awaited
        _in_head = True
        _head = 0  # bytes of the request line and headers so far
        _between = True  # what comes next begins a request

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            # of requests that are not answered yet, as far as that was seen
            self._lines: deque[Line] = deque()
            self._trailing = 0  # bytes of headers after a body
            if len(self.connections) > limits.connections:
                self._refuse(
                    ApiError(503, "too many connections", "too_many_connections", retry_after=1.0)
                )
                return
            self._await_headers()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            # With pipelined requests uvicorn tells only the last of the client's leaving; the one that runs is an earlier.
            for line in self._lines:
                line.lost()
            self._lines.clear()
            super().connection_lost(exc)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            if self._between and b"h2c" in data:
                data = without_offer(data)
            if self._in_head:
                self._head += len(data)
            super().data_received(data)
            # it is a WebSocket's now
            if self.transport.is_closing() or self.transport.get_protocol() is not self:
                return
            if self._in_head and self._head > limits.header_bytes:
                self._refuse(_headers_too_large())
            elif self._timer is None and (
                self._in_head or (self._idle() and self.timeout_keep_alive_task is None)
            ):
                # most requests come whole and need none; an empty line begins none and ends the
                # wait
                self._await_headers()

        def _idle(self) -> bool:
            return self.cycle is None or self.cycle.response_complete

        def on_message_begin(self) -> None:
            super().on_message_begin()
            self._between = False
            if not self._in_head:
                self._in_head = True
                self._head = 0
                self._trailing = 0

        def on_header(self, name: bytes, value: bytes) -> None:
            if self._in_head:
                super().on_header(name, value)
                return
            self._trailing += len(name) + len(value)  # behind a body: nobody reads them
            if self._trailing > limits.header_bytes and not self.transport.is_closing():
                self._refuse(_headers_too_large())

        def on_headers_complete(self) -> None:
            self._stop_timer()
            self._in_head = False
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
            if size > limits.header_bytes or len(self.headers) > limits.headers:
                self._refuse(_headers_too_large())
                return
            # there would never be an answer
            if self.parser.should_upgrade() and self.parser.get_method() != b"GET":
                self.send_400_response("")
                return
            if len([name for name, _ in self.headers if name == b"host"]) > 1:
                self.send_400_response("")
                return
            while self._lines and self._lines[0].cycle.response_complete:
                self._lines.popleft()
            if len(self._lines) >= PIPELINED:
                if not self.transport.is_closing():
                    self._refuse(_too_many_at_once())
                return
            super().on_headers_complete()
            if self.cycle is not None:
                line = self.scope["octavo.line"] = Line(self.cycle)  # type: ignore[typeddict-unknown-key]
                self._lines.append(line)

        def on_body(self, body: bytes) -> None:
            if self.cycle is not None:
                super().on_body(body)

        def on_message_complete(self) -> None:
            self._between = True
            if self.cycle is not None:
                super().on_message_complete()

        def _await_headers(self) -> None:
            self._timer = self.loop.call_later(limits.header_seconds, self._too_slow)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _too_slow(self) -> None:
            if not self.transport.is_closing():
                self._refuse(
                    ApiError(408, "the request's headers did not arrive in time", "header_timeout")
                )

        def send_400_response(self, msg: str) -> None:
            if not self.transport.is_closing():
                self._refuse(ApiError(400, "this is not an HTTP/1.1 request", "invalid_http"))

        def _refuse(self, error: ApiError) -> None:
            self._stop_timer()
            body = error.encode()
            headers = {
                **error.headers,
                "content-type": "application/json",
                "content-length": str(len(body)),
                "connection": "close",
                "x-request-id": new_id(),
            }
            lines = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
            self.transport.write(STATUS_LINE[error.status] + lines.encode() + b"\r\n" + body)
            self.transport.close()

    return Bounded


class BoundedSocket(WebSocketsSansIOProtocol):
    """A WebSocket whose client does not read. What we say of ourselves waits for it to read (websocket.py, watch.py); but each
    of its pings is answered at once, and the answers would fill the memory."""

    def data_received(self, data: bytes) -> None:
        if self.transport.get_write_buffer_size() > UNREAD:
            self.transport.abort()
        else:
            super().data_received(data)

    async def send(self, message: Any) -> None:
        """Who was refused has had an answer too: uvicorn would log an error for each."""
        await super().send(message)
        if message["type"] == "websocket.http.response.body":
            self.handshake_complete = True


async def drop_unread(connections: Collection[Any], seconds: float) -> None:
    """Connections that we have closed, HTTP's and WebSockets', stay open until their clients have read what was written. Who
    reads nothing for so long is cut off; else a client that never reads would keep its connection, and what waits for it in
    memory, for ever."""
    seen: dict[Any, tuple[int, float]] = {}  # how much is unread, since when
    while True:
        await asyncio.sleep(seconds / 4)
        before = seen
        seen = {}
        now = time.monotonic()
        for connection in list(connections):
            transport = connection.transport
            if (
                transport is None
                or not transport.is_closing()
                or not (unread := transport.get_write_buffer_size())
            ):
                continue
            least, since = before.get(connection, (unread, now))
            if unread == least and now - since >= seconds:
                transport.abort()
            else:
                seen[connection] = unread, since if unread == least else now


def _headers_too_large() -> ApiError:
    return ApiError(431, "the request's headers are too large or too many", "headers_too_large")


def _too_many_at_once() -> ApiError:
    return ApiError(
        429,
        f"a connection may ask {PIPELINED} things at a time",
        "too_many_at_once",
        retry_after=1.0,
    )
