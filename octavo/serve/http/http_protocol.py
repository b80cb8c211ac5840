"""Turns the bytes of one HTTP/1.1 connection into ASGI requests, and the responses into bytes.

A connection handles one request at a time, in order. Up to `MAX_BUFFERED` bytes of input that
follow the request in progress are buffered unparsed, and further input is not read. So nothing that
a client sends can disturb a response in progress: invalid HTTP, oversized headers and incomplete
requests get their response after the earlier ones. httptools parses the input, at most `SLICE`
bytes at a time (see turn_queue.py).

A client may close its sending direction and still wait for the reply (see peer_probe.py).
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from dataclasses import dataclass
from typing import Any, cast
from urllib.parse import unquote

import httptools
import uvicorn
from starlette.types import ASGIApp, Scope
from uvicorn.server import ServerState

from octavo.serve.api.api_errors import ApiError
from octavo.serve.front.body_memory import BodyMemory
from octavo.serve.http.connections import Connection, ConnectionState, ConnectionTable
from octavo.serve.http.http_request import HttpRequest, error_response
from octavo.serve.http.peer_probe import PeerProbe
from octavo.serve.http.turn_queue import TurnQueue
from octavo.serve.http.websocket_protocol import WebSocketProtocol
from octavo.serve.limits import Limits

SLICE = 4096  # The number of bytes that are parsed at a time.
MAX_BUFFERED = 64 * 2**10  # Reading stops when this many bytes are buffered, unparsed or as a body.
LINGER_SECONDS = 1.0  # The client has this time to read the last response.


@dataclass
class ServerContext:
    """The objects that all connections share."""

    app: ASGIApp
    limits: Limits
    table: ConnectionTable
    bodies: BodyMemory
    turns: TurnQueue
    uvicorn: uvicorn.Config  # The WebSocket protocol needs it.
    state: ServerState


class HttpProtocol(asyncio.Protocol):
    transport: asyncio.Transport
    queued = False  # TurnQueue sets this.
    write_paused = False

    def __init__(self, context: ServerContext, connection: Connection):
        self.context = context
        self.connection = connection
        self._loop = asyncio.get_running_loop()
        self._parser = httptools.HttpRequestParser(self)
        self._input = b""  # The part from `_position` on is not parsed yet.
        self._position = 0
        self._active: HttpRequest | None = None  # The request in progress.
        # Requests that were parsed in the same slice, and that follow the current one.
        self._pipeline: deque[tuple[HttpRequest, Scope]] = deque()
        self._refusal: ApiError | None = None  # The last response of this connection.
        self._has_ended = False  # True means that nothing more is written or parsed.
        self._is_last = False  # The current request is the last one.
        self._eof = False
        self._reading = True
        self._awaits_head = True  # The deadline applies to the head of a request.
        self._writable: asyncio.Event | None = None  # This is set while `write_paused` is true.
        self._peer_probe: PeerProbe | None = None
        self._discardable = 0  # The bytes that may still be read and discarded.
        self._client: tuple[str, int] | None = None
        self._server: tuple[str, int] | None = None
        # The request that is being parsed, and the bytes of its Content-Length not parsed yet.
        self._parsed: HttpRequest | None = None
        self._unparsed_body = 0
        self._in_head = False
        self._head_bytes = 0
        self._trailer_bytes = 0
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []

    # ---- asyncio's callbacks ---------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        self._client = address(transport.get_extra_info("peername"))
        self._server = address(transport.get_extra_info("sockname"))
        self.connection.owner = self
        self.context.state.connections.add(self)  # type: ignore[arg-type]
        self.connection.deadline = time.monotonic() + self.context.limits.header_seconds
        if self.connection not in self.context.table.connections:
            self.transport.abort()  # The connection was evicted to admit another one.

    def connection_lost(self, exc: Exception | None) -> None:
        self.context.state.connections.discard(self)
        self.context.table.remove(self.connection)
        self._has_ended = True
        self.resume_writing()
        if self._peer_probe is not None:
            self._peer_probe.stop()
        if self._active is not None:
            self._active.disconnect()
        self._pipeline.clear()
        # This breaks reference cycles, so that the memory is freed at once.
        self.connection.owner = None
        self._active = None
        self._parsed = None
        del self._parser

    def data_received(self, data: bytes) -> None:
        if self._has_ended:
            self._discard(data)
            return
        if self._input:
            self._input = self._input[self._position :] + data
            self._position = 0
        else:
            self._input = data
        if self.queued:
            # Otherwise libuv reads from a socket up to 32 times in one iteration.
            self._update_reading()
        elif self.parse_slice():
            self.context.turns.add(self)

    def eof_received(self) -> bool:
        """Return True to keep the connection open until the reply is written."""
        self._eof = True
        if self._has_ended or not (self._input or self._active):
            return False
        if self._active is not None and not self._input and not self._active.complete:
            return False  # The body is incomplete, and nothing more can arrive.
        self._watch_peer()
        return True

    def pause_writing(self) -> None:
        self.write_paused = True
        self._writable = asyncio.Event()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._writable is not None:
            self._writable.set()

    async def drained(self) -> None:
        assert self._writable is not None
        await self._writable.wait()

    # ---- called by the server --------------------------------------------------------------------

    def shutdown(self) -> None:
        """Finish the request in progress, then close, because the server shuts down."""
        self._is_last = True
        self._pipeline.clear()
        if self._active is None:
            self.transport.close()
        else:
            self._active.keep_alive = False

    def evict(self) -> None:
        self.transport.abort()

    def deadline_passed(self) -> None:
        if self._has_ended:
            if self.connection.unread() > 0:
                self.connection.deadline = time.monotonic() + LINGER_SECONDS
            else:
                self.transport.abort()
        elif self._awaits_head and (self._in_head or self._head_bytes):
            self._refuse(
                ApiError(408, "the headers of the request did not arrive in time", "header_timeout")
            )
        else:
            self.transport.close()

    # ---- input -----------------------------------------------------------------------------------

    def parse_slice(self) -> bool:
        """Parse one slice of the input, if allowed. Returns whether another can be parsed now."""
        if not self._must_wait():
            data = self._take_slice()
            try:
                self._parser.feed_data(data)
            except httptools.HttpParserUpgrade as upgrade:
                self._upgrade(data[upgrade.args[0] :])
            except httptools.HttpParserError:
                if not self._is_last:
                    self._refuse(invalid_http())
            if self.transport.get_protocol() is not self:
                return False  # The WebSocket protocol owns the connection now.
            if self._in_head:
                self._head_bytes += len(data)
                if self._head_bytes > self.context.limits.header_bytes:
                    self._refuse(headers_too_large())
            self._update_state()
        self._update_reading()
        return not self._must_wait()

    def _take_slice(self) -> bytes:
        size = max(SLICE, min(self._unparsed_body, MAX_BUFFERED))
        if len(self._input) - self._position <= size:
            data = self._input[self._position :] if self._position else self._input
            self._input = b""
            self._position = 0
        else:
            data = self._input[self._position : self._position + size]
            self._position += size
        return data

    def _must_wait(self) -> bool:
        """Return whether parsing has to wait."""
        if self._has_ended or self._refusal is not None or not self._input:
            return True
        active = self._active
        if active is None:
            return self._is_last
        return active.complete or active.buffered > MAX_BUFFERED or bool(self._pipeline)

    def _update_state(self) -> None:
        if self._has_ended:
            return
        if self._active is None:
            if not self._awaits_head:
                self._awaits_head = True
                self.connection.deadline = time.monotonic() + self.context.limits.header_seconds
            if self._eof and not self._input:
                self.transport.close()
            return
        self._awaits_head = False
        self.connection.deadline = float("inf")
        state = ConnectionState.BUSY if self._active.complete else ConnectionState.RECEIVING
        if self.connection.state is not state:
            self.connection.enter(state)
        if state is ConnectionState.RECEIVING and self._eof and not self._input:
            self.transport.close()

    def _update_reading(self) -> None:
        """Read while little input is buffered, because only reading detects a disconnect."""
        buffered = len(self._input) - self._position
        reading = buffered <= MAX_BUFFERED and not self._eof
        if reading == self._reading:
            return
        self._reading = reading
        if reading:
            self.transport.resume_reading()
        else:
            self.transport.pause_reading()
            self._watch_peer()

    def _watch_peer(self) -> None:
        if self._peer_probe is None:
            self._peer_probe = PeerProbe(self)
        self._peer_probe.start()

    def needs_probe(self) -> bool:
        return self._active is not None and (self._eof or not self._reading)

    def probe(self) -> None:
        if self._active is not None:
            self._active.probe()

    def body_received(self) -> None:
        """Parse more input, because the application has received a part of the body."""
        if self._input:
            self.context.turns.add(self)

    # ---- httptools' callbacks --------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        self._trailer_bytes = 0
        self._url = b""
        self._headers = []
        self._parsed = None
        self._unparsed_body = 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:
            self._headers.append((name.lower(), value))
            return
        self._trailer_bytes += len(name) + len(value)  # Trailer fields are ignored.
        if self._trailer_bytes > self.context.limits.header_bytes:
            self._refuse(headers_too_large())

    def on_headers_complete(self) -> None:
        self._in_head = False
        self._head_bytes = 0
        if self._refusal is not None or self._is_last:
            return
        error = self._head_error()
        if error is not None:
            self._refuse(error)
            return
        if self._parser.should_upgrade():
            return  # The parser raises HttpParserUpgrade next.
        try:
            scope = self._scope()
        except (httptools.HttpParserError, UnicodeDecodeError):
            self._refuse(invalid_http())
            return
        http_1_0 = scope["http_version"] == "1.0"
        keep_alive = not http_1_0 and self._parser.should_keep_alive()
        request = HttpRequest(self, scope["method"], http_1_0, keep_alive)
        request.expects_continue = self._has_header(b"expect", b"100-continue")
        scope["octavo.request"] = request
        self._parsed = request
        self._unparsed_body = int(dict(self._headers).get(b"content-length", 0))
        if self._active is None:
            self._start(request, scope)
        else:
            self._pipeline.append((request, scope))

    def on_body(self, body: bytes) -> None:
        if self._parsed is not None:
            self._unparsed_body -= len(body)
            self._parsed.add_body(body)

    def on_message_complete(self) -> None:
        if self._parsed is not None:
            self._parsed.end_body()
            self._is_last = self._is_last or not self._parsed.keep_alive

    # ---- requests --------------------------------------------------------------------------------

    def _head_error(self) -> ApiError | None:
        """Return an error if the head of a request is not acceptable for any route."""
        limits = self.context.limits
        size = len(self._url) + sum(len(name) + len(value) for name, value in self._headers)
        if size > limits.header_bytes or len(self._headers) > limits.headers:
            return headers_too_large()
        version = self._parser.get_http_version()
        names = [name for name, _ in self._headers]
        if version not in ("1.0", "1.1") or names.count(b"host") > 1:
            return invalid_http()
        method = self._parser.get_method()
        if method == b"CONNECT" or (
            method != b"GET" and self._has_header(b"upgrade", b"websocket")
        ):
            return invalid_http()
        if b"transfer-encoding" in names:
            encodings = [value for name, value in self._headers if name == b"transfer-encoding"]
            if version == "1.0" or [value.strip().lower() for value in encodings] != [b"chunked"]:
                return ApiError(
                    400,
                    "the Transfer-Encoding is not supported: use chunked, or send a Content-Length",
                    "unsupported_transfer_encoding",
                )
        if self.connection.refused and not self.context.table.retry(self.connection):
            return ApiError(
                503,
                "the server has too many open connections: try again later",
                "too_many_connections",
                retry_after=1.0,
            )
        return None

    def _scope(self) -> Scope:
        url = httptools.parse_url(self._url)
        path = url.path.decode("ascii")
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self._parser.get_http_version(),
            "server": self._server,
            "client": self._client,
            "scheme": "http",
            "method": self._parser.get_method().decode("ascii"),
            "root_path": "",
            "path": unquote(path) if "%" in path else path,
            "raw_path": url.path,
            "query_string": url.query or b"",
            "headers": self._headers,
            "state": {},
            "octavo.connection": self.connection,
        }

    def _start(self, request: HttpRequest, scope: Scope) -> None:
        self._active = request
        task = self._loop.create_task(request.run(self.context.app, scope))
        self.context.state.tasks.add(task)
        task.add_done_callback(self.context.state.tasks.discard)

    def response_done(self, request: HttpRequest) -> None:
        self._active = None
        if self._has_ended:
            return
        if not request.keep_alive:
            self._end(linger=not request.complete or bool(self._input))
        elif self._pipeline:
            self._start(*self._pipeline.popleft())
            self._update_state()
        elif self._refusal is not None:
            self._write_refusal(self._refusal)
        elif self._eof and not self._input:
            self.transport.close()
        else:
            self._await_request()

    def _await_request(self) -> None:
        limits = self.context.limits
        self._awaits_head = self._in_head
        seconds = limits.header_seconds if self._in_head else limits.idle_seconds
        self.connection.deadline = time.monotonic() + seconds
        self.connection.enter(ConnectionState.IDLE)
        if self._input:
            self.context.turns.add(self)

    # ---- the end ---------------------------------------------------------------------------------

    def _refuse(self, error: ApiError) -> None:
        """Make `error` the last response of the connection, after the pending responses."""
        if self._refusal is not None or self._has_ended:
            return
        self._refusal = error
        self._input = b""
        self._position = 0
        active = self._active
        if self._pipeline and not self._pipeline[-1][0].complete:
            self._pipeline.pop()  # The error belongs to this request.
        elif active is not None and not (active.complete or active.response_started):
            active.disconnect()
            self._active = None
        if self._active is None:
            self._write_refusal(error)

    def _write_refusal(self, error: ApiError) -> None:
        self.transport.write(error_response(error))
        self._end(linger=True)

    def _end(self, linger: bool) -> None:
        """Close the connection when everything is written.

        With `linger`, read on for a while, because the client may still be sending. Closing a
        socket with unread input resets the connection, and the client may lose the response.
        """
        self._has_ended = True
        self._input = b""
        self._position = 0
        if not linger or self._eof:
            self.transport.close()
            return
        self._discardable = self.context.limits.body_bytes
        self.transport.write_eof()
        self.connection.enter(ConnectionState.SILENT)
        self.connection.deadline = time.monotonic() + LINGER_SECONDS
        self._update_reading()

    def _discard(self, data: bytes) -> None:
        self._discardable -= len(data)
        if self._discardable < 0:
            self.transport.pause_reading()  # The deadline then closes the connection.

    # ---- other protocols -------------------------------------------------------------------------

    def _has_header(self, name: bytes, value: bytes) -> bool:
        return any(
            header == name and content.strip().lower() == value for header, content in self._headers
        )

    def _upgrade(self, following: bytes) -> None:
        """Handle a request for another protocol. `following` is the input after its head.

        WebSocket is supported. An offer of another protocol, such as HTTP/2 from Java's client, is
        ignored: the request is parsed again without the offer.
        """
        if self._refusal is not None:
            return
        is_websocket = self._has_header(b"upgrade", b"websocket")
        if is_websocket and self._active is not None:
            self._refuse(invalid_http())
            return
        method = self._parser.get_method()
        version = self._parser.get_http_version().encode()
        dropped_headers = () if is_websocket else (b"upgrade", b"http2-settings")
        lines = [
            b"%b: %b\r\n" % header for header in self._headers if header[0] not in dropped_headers
        ]
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, version, b"".join(lines))
        following += self._input[self._position :]
        self._position = 0
        if not is_websocket:
            self._parser = httptools.HttpRequestParser(self)
            self._input = head + following
            return
        self._input = b""
        self.context.state.connections.discard(self)
        protocol = WebSocketProtocol(self.context, self.connection)
        protocol.connection_made(self.transport)
        self.transport.set_protocol(protocol)
        protocol.open(head, following)


def address(socket_address: Any) -> tuple[str, int] | None:
    """Return the host and port of a socket address, or None if it has none."""
    if not isinstance(socket_address, tuple):
        return None
    return str(socket_address[0]), int(socket_address[1])


def invalid_http() -> ApiError:
    return ApiError(400, "this is not a valid HTTP/1.1 request", "invalid_http")


def headers_too_large() -> ApiError:
    return ApiError(
        431, "the request has too many headers, or they are too large", "headers_too_large"
    )
