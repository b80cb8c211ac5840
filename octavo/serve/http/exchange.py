"""Defines Exchange: one HTTP request and its reply, over ASGI.

A handler is a coroutine that takes an Exchange.

`Exchange.watch` ends a call when the client disconnects, whether the reply is streamed or not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive, Scope, Send

from octavo.serve.api.api_errors import ApiError
from octavo.serve.api.parse import Bytes, name_unknown_fields
from octavo.serve.front.body_memory import SMALL, BodyReservation
from octavo.serve.front.engine_client import Call
from octavo.serve.front.front import Caller, Front
from octavo.serve.http import body
from octavo.serve.http.http_request import HttpRequest

T = TypeVar("T", bound=msgspec.Struct)
Headers = dict[str, str]
_encode = msgspec.json.Encoder().encode


def client_gone() -> ApiError:
    return ApiError(499, "the client has disconnected", "client_gone")


class Exchange:
    def __init__(self, front: Front, scope: Scope, receive: Receive, send: Send):
        self.front = front
        self.scope = scope
        self.caller: Caller = scope["octavo.caller"]
        self.path: dict[str, str] = scope.get("path_params", {})
        self._receive = receive
        self._send = send
        self._request: HttpRequest = scope["octavo.request"]
        self._repeated_body: bytes | None = None  # A body that another handler reads again.
        # The request in the body, and its unknown fields.
        self._decoded_body: tuple[msgspec.Struct, dict[str, Any]] | None = None

    async def body(self, kind: type[T], generates: bool = False) -> tuple[T, dict[str, Any]]:
        """Return the body of the request as a `kind`, and its unknown fields.

        With `generates`, the request is refused early if the server cannot generate now. A small
        body is received before the refusal, so that the connection can stay open.
        """
        if generates and self._is_large():
            self.front.check_may_send(self.caller)
        with self.reserve() as reservation:
            data = await self.read(reservation)
            if generates:
                self.front.check_may_send(self.caller)
            request, unknown = await body.decode(
                self.front.pool, data, kind, self.front.config.limits
            )
        self._decoded_body = request, unknown
        return request, unknown

    def explain(self, error: ApiError) -> ApiError:
        """Return an error with the unknown fields of the request, if the request lacks a field."""
        if self._decoded_body is None:
            return error
        request, unknown = self._decoded_body
        return name_unknown_fields(error, request, unknown)

    def _is_large(self) -> bool:
        length = self.scope["octavo.headers"].get(b"content-length", b"")
        return not length.isdigit() or int(length) > SMALL

    def reserve(self) -> BodyReservation:
        """Count the bytes of the body for the client until the `with` block ends."""
        _ = self.front.engine_client.model  # This raises an error while no engine is ready.
        client = self.scope.get("client")
        return self.front.bodies.reserve(client[0] if client else "")

    async def read(self, reservation: BodyReservation) -> Bytes:
        """Return the bytes of the body."""
        received = self._repeated_body
        if received is None:
            received = self._request.take_complete_body()
        return await body.read(
            self.scope["octavo.headers"],
            self._receive,
            received,
            self.front.config.limits,
            reservation,
            # Ollama accepts a body of any type, and its clients often send no type.
            any_type=self.scope["path"].startswith("/api/"),
        )

    def put_back(self, data: bytes) -> None:
        """Let another handler read the body again."""
        self._repeated_body = data

    async def parts(self) -> AsyncIterator[bytes]:
        """Yield the bytes of a body as they arrive, without limits on their number."""
        received = self._request.take_complete_body()
        if received is not None:
            yield received
            return
        seconds = self.front.config.limits.body_seconds
        has_more = True
        while has_more:
            try:
                message = await asyncio.wait_for(self._receive(), seconds)
            except TimeoutError:
                raise ApiError(
                    408, f"no part of the body arrived for {seconds:g} s", "body_timeout"
                ) from None
            if message["type"] == "http.disconnect":
                raise client_gone()
            has_more = message["more_body"]
            yield message["body"]

    async def reply(self, value: Any, headers: Headers | None = None, status: int = 200) -> None:
        await self.send(_encode(value), "application/json", headers, status)

    async def send(
        self, data: bytes, content_type: str, headers: Headers | None = None, status: int = 200
    ) -> None:
        await self._start(
            status,
            {"content-type": content_type, "content-length": str(len(data)), **(headers or {})},
        )
        await self.write(data, last=True)

    async def start_reply(self, content_type: str, length: int) -> None:
        """Start a reply of a known length, which is then written in parts."""
        await self._start(200, {"content-type": content_type, "content-length": str(length)})

    async def start_stream(self, headers: Headers, content_type: str, keep_alive: bytes) -> None:
        """Start a streamed reply. A client ignores the bytes of `keep_alive`."""
        fixed = {
            "content-type": content_type,
            "cache-control": "no-cache",
            "x-accel-buffering": "no",
        }
        self._request.keep_alive_comment = keep_alive
        await self._start(200, {**fixed, **headers})

    async def _start(self, status: int, headers: Headers) -> None:
        encoded = [
            (name.encode(), value.encode("latin-1", "replace")) for name, value in headers.items()
        ]
        await self._send({"type": "http.response.start", "status": status, "headers": encoded})

    async def write(self, data: bytes, last: bool = False) -> None:
        """Write a part of the reply. A client that reads nothing for too long is disconnected."""
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

    @property
    def started(self) -> bool:
        """Return whether the client can have received a part of the reply."""
        return self._request.response_started

    def watch(self, call: Call) -> None:
        """End the call when the client disconnects."""
        self._request.on_disconnect(lambda: call.fail(client_gone()))


Handler = Callable[[Exchange], Awaitable[None]]


class Endpoint:
    """Turns a handler into an ASGI application."""

    def __init__(self, front: Front, handler: Handler):
        self.front = front
        self.handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange = Exchange(self.front, scope, receive, send)
        try:
            await self.handler(exchange)
        except ApiError as error:
            raise exchange.explain(error.forget()) from None
