"""One HTTP request and its response, as the ASGI application sees them."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from starlette.types import ASGIApp, Message, Scope
from uvicorn.protocols.http.httptools_impl import STATUS_LINE

from octavo.serve.api.api_errors import ApiError
from octavo.serve.front.front import new_id

if TYPE_CHECKING:
    from octavo.serve.http.http_protocol import HttpProtocol

log = logging.getLogger(__name__)
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
CONTROL_CHARACTER = re.compile(rb"[\x00-\x08\x0a-\x1f\x7f]")
WITHOUT_BODY = (204, 304)


def error_response(error: ApiError, headers: dict[str, str] | None = None) -> bytes:
    """Return the bytes of an error response, which also announces the end of the connection."""
    body = error.encode()
    request_id = new_id()
    fields = {
        **error.headers,
        **(headers or {}),
        "content-type": "application/json",
        "content-length": str(len(body)),
        "connection": "close",
        "x-request-id": request_id,
        "x-octavo-request-id": request_id,
    }
    lines = "".join(f"{name}: {value}\r\n" for name, value in fields.items())
    return STATUS_LINE[error.status] + lines.encode() + b"\r\n" + body


class HttpRequest:
    """One request and its response. `receive` and `send` are the two callables of ASGI."""

    def __init__(self, protocol: HttpProtocol, method: str, http_1_0: bool, keep_alive: bool):
        self.protocol = protocol
        self.arrival = time.monotonic()
        self.keep_alive = keep_alive
        self.complete = False  # True means that the whole body has arrived.
        self.disconnected = False
        self.expects_continue = False
        self.response_started = False
        self.response_complete = False
        # These bytes may be written into the response at any time without changing its meaning,
        # such as a comment in an event stream.
        self.keep_alive_comment = b""
        self._head_only = method == "HEAD"
        self._http_1_0 = http_1_0
        self._body = bytearray()
        self._end_received = False  # The application has received the end of the body.
        self._waiter: asyncio.Future[None] | None = None
        self._on_disconnect: Callable[[], None] | None = None
        self._head = b""  # The response head, written together with the first part of the body.
        self._chunked = False
        self._remaining: int | None = None  # The bytes of the content-length not written yet.

    # ---- called by the application ---------------------------------------------------------------

    def take_complete_body(self) -> bytes | None:
        """Return the body if all of it has arrived, or None if it must be received in parts.

        Most bodies arrive together with the head. This call is then much cheaper than `receive`.
        """
        if not self.complete or self.disconnected:
            return None
        data = bytes(self._body)
        self._body.clear()
        self._end_received = True
        return data

    @property
    def write_paused(self) -> bool:
        """Return whether `send` would wait, because the client reads slowly."""
        return self.protocol.write_paused

    def abort(self) -> None:
        self.protocol.transport.abort()

    def on_disconnect(self, callback: Callable[[], None] | None) -> None:
        """Call `callback` when the client disconnects, or now if it has disconnected.

        A task that waits in `receive` would cost ten times as much.
        """
        self._on_disconnect = callback
        if self.disconnected and callback is not None:
            callback()

    async def receive(self) -> Message:
        if self.expects_continue and not self.response_started:
            self.expects_continue = False
            self.protocol.transport.write(CONTINUE)
        while not self._has_input():
            await self._wait_for_input()
        if self._finished():
            return {"type": "http.disconnect"}
        data = bytes(self._body)
        self._body.clear()
        self._end_received = self.complete
        self.protocol.body_received()
        return {"type": "http.request", "body": data, "more_body": not self.complete}

    async def send(self, message: Message) -> None:
        if self.protocol.write_paused and not self.disconnected:
            await self.protocol.drained()
        if self.disconnected:
            return
        if message["type"] == "http.response.start" and not self.response_started:
            self._start(message["status"], message["headers"])
        elif message["type"] == "http.response.body" and not self.response_complete:
            self._write(message.get("body", b""), is_last=not message.get("more_body", False))
        else:
            raise RuntimeError(f"the ASGI message {message['type']} is out of order")

    # ---- called by the connection ----------------------------------------------------------------

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        try:
            await app(scope, self.receive, self.send)
        except Exception:
            log.exception("the application raised an exception for a request")
        if not (self.response_complete or self.disconnected):
            self.protocol.transport.abort()

    @property
    def buffered(self) -> int:
        return len(self._body)

    def add_body(self, data: bytes) -> None:
        if not self.response_complete:
            self._body += data
            self._wake_receiver()

    def end_body(self) -> None:
        self.complete = True
        self._wake_receiver()

    def disconnect(self) -> None:
        if not self._finished():
            self.disconnected = True
            self._wake_receiver()
            if self._on_disconnect is not None:
                self._on_disconnect()

    def probe(self) -> None:
        """Write bytes that a client ignores.

        If the client has disconnected, its system replies by resetting the connection.
        """
        if not self.response_started:
            if not self._http_1_0:
                self.protocol.transport.write(CONTINUE)
        elif self.keep_alive_comment and not self.protocol.write_paused:
            self._write(self.keep_alive_comment, is_last=False)

    def _has_input(self) -> bool:
        """Return whether `receive` can return a message now."""
        has_end = self.complete and not self._end_received
        return bool(self._body) or has_end or self._finished()

    def _finished(self) -> bool:
        return self.disconnected or self.response_complete

    async def _wait_for_input(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake_receiver(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.response_started = True
        if not self.complete:
            self.keep_alive = False  # The rest of the request is not read.
        lines = [STATUS_LINE[status]]
        closes = False
        for name, value in (*self.protocol.context.state.default_headers, *headers):
            if CONTROL_CHARACTER.search(value):
                raise ValueError(f"the header {name!r} contains a control character")
            if name == b"content-length":
                self._remaining = int(value)
            elif name == b"connection" and value == b"close":
                closes = True
            lines += (name, b": ", value, b"\r\n")
        without_body = self._head_only or status in WITHOUT_BODY
        if without_body:
            self._remaining = 0
        elif self._remaining is None:
            # HTTP/1.0 has no chunks: the end of the connection ends the body.
            self._chunked = not self._http_1_0
            self.keep_alive = self.keep_alive and self._chunked
        if self._chunked:
            lines.append(b"transfer-encoding: chunked\r\n")
        self.keep_alive = self.keep_alive and not closes
        if not self.keep_alive and not closes:
            lines.append(b"connection: close\r\n")
        lines.append(b"\r\n")
        self._head = b"".join(lines)
        if self._remaining is None:  # The first part of a stream may take a while.
            self.protocol.transport.write(self._head)
            self._head = b""

    def _write(self, data: bytes, is_last: bool) -> None:
        if self._head_only:
            data = b""
        if self._chunked:
            data = b"%x\r\n%b\r\n" % (len(data), data) if data else b""
            if is_last:
                data += b"0\r\n\r\n"
        elif self._remaining is not None:
            self._remaining -= len(data)
            if self._remaining < 0 or (is_last and self._remaining > 0):
                raise RuntimeError("the length of the body differs from the header content-length")
        if self._head:
            data = self._head + data
            self._head = b""
        if data:
            self.protocol.transport.write(data)
        if is_last:
            self.response_complete = True
            self._wake_receiver()
            self.protocol.response_done(self)
