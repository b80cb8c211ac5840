"""One HTTP request and its reply, over ASGI. Handlers get an Exchange and do everything within one
function.

A disconnect is noticed from the first byte on, whether the reply streams or not: `watch` ties a
call to the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from octavo.serve.api.api_errors import ApiError
from octavo.serve.api.parse import Bytes
from octavo.serve.api.replies import KEEP_ALIVE
from octavo.serve.front.body_memory import SMALL
from octavo.serve.front.client import Call
from octavo.serve.front.front import Caller, Front
from octavo.serve.http import body
from octavo.serve.http.http_request import HttpRequest

T = TypeVar("T", bound=msgspec.Struct)
Headers = dict[str, str]
_encode = msgspec.json.Encoder().encode


def client_gone() -> ApiError:
    return ApiError(499, "the client left", "client_gone")


class Exchange:
    def __init__(self, front: Front, scope: Scope, receive: Receive, send: Send):
        self.front = front
        self.scope = scope
        self.caller: Caller = scope["octavo.caller"]
        self.path: dict[str, str] = scope.get("path_params", {})
        self._receive = receive
        self._send = send
        self._request: HttpRequest = scope["octavo.request"]

    async def body(self, kind: type[T], generates: bool = False) -> tuple[T, dict[str, Any]]:
        """The request's body as a `kind`, and its unknown fields. `generates`: refuse it early if
        nothing can be generated now. A small body is received even so, because the connection then
        stays open for the next request."""
        if generates and self._is_large():
            self.front.check_admission(self.caller)
        async with self.held_body() as data:
            if generates:
                self.front.check_admission(self.caller)
            return await body.decode(self.front.pool, data, kind, self.front.config.limits)

    def _is_large(self) -> bool:
        length = self.scope["octavo.headers"].get(b"content-length", b"")
        return not length.isdigit() or int(length) > SMALL

    @asynccontextmanager
    async def held_body(self) -> AsyncIterator[Bytes]:
        """The bytes of the body, which count as the client's until the block is left."""
        front = self.front
        _ = front.client.model  # raises while there is no engine to send the request to
        client = self.scope.get("client")
        with front.bodies.hold(client[0] if client else "") as held:
            yield await body.read(
                self.scope["octavo.headers"],
                self._receive,
                self._request.whole_body(),
                front.config.limits,
                held,
            )

    async def reply(self, value: Any, headers: Headers | None = None, status: int = 200) -> None:
        await self.send(_encode(value), "application/json", headers, status)

    async def send(
        self, data: bytes, content: str, headers: Headers | None = None, status: int = 200
    ) -> None:
        await self._start(
            status, {"content-type": content, "content-length": str(len(data)), **(headers or {})}
        )
        await self.write(data, last=True)

    async def start_events(self, headers: Headers) -> None:
        fixed = {
            "content-type": "text/event-stream; charset=utf-8",
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        self._request.heartbeat = KEEP_ALIVE
        await self._start(200, {**fixed, **headers})

    async def _start(self, status: int, headers: Headers) -> None:
        encoded = [
            (name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def write(self, data: bytes, last: bool = False) -> None:
        """Waits while the client is slow to read, but not for ever: then the connection is cut."""
        if not self._request.write_paused:
            return await self._send(
                {"type": "http.response.body", "body": data, "more_body": not last}
            )
        timer = asyncio.get_running_loop().call_later(
            self.front.config.limits.send_seconds, self._request.abort
        )
        try:
            await self._send({"type": "http.response.body", "body": data, "more_body": not last})
        finally:
            timer.cancel()

    def watch(self, call: Call) -> None:
        """From now on a disconnect ends the call."""
        self._request.on_disconnect(lambda: call.fail(client_gone()))


Handler = Callable[[Exchange], Awaitable[None]]


class Endpoint:
    """A handler as an ASGI application."""

    def __init__(self, front: Front, handler: Handler):
        self.front = front
        self.handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.handler(Exchange(self.front, scope, receive, send))
        except ApiError as error:
            raise error.forget() from None
