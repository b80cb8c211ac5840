"""The WebSocket /ws/generate sends text as it is generated.

A connection runs one generation at a time, and any number of them in a row. These are the messages
of the client (->) and of the server (<-):

-> {"prompt": "...", "max_new_tokens": 64, ...}      starts a generation, with /generate's fields
<- {"type": "text", "text": "..."}                   is the next part of the text
<- {"type": "done", "id": "req_...", "finish_reason": "stop", "usage": {...}, "headers": {...}}
                                                     ends a reply, with the headers of HTTP
<- {"error": {...}}                                  ends a reply that failed
-> {"type": "cancel"}                                ends the generation in progress

A client sends JSON in text or binary messages. The server replies to an invalid message with an
error, and the connection stays open. A client that sends more than `websocket_errors` invalid
messages per minute is disconnected with the code 1008.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from octavo.serve.api import replies, validate
from octavo.serve.api.api_errors import ApiError, api_error, cancelled, invalid_field
from octavo.serve.api.parse import Bytes, is_quick, name_unknown_fields, parse
from octavo.serve.api.protocol import GenerateRequest
from octavo.serve.api.request_fields import PLAIN_TABLE
from octavo.serve.endpoints.completions import open_call
from octavo.serve.endpoints.routes import prepare_generate
from octavo.serve.front.body_memory import BodyReservation
from octavo.serve.front.engine_client import Call
from octavo.serve.front.front import Caller, Front
from octavo.serve.front.keys import Bucket
from octavo.serve.http import body
from octavo.serve.http.connections import Connection, ConnectionState
from octavo.serve.http.exchange import client_gone

POLICY_VIOLATION = 1008
CANCEL_BYTES = 200  # A longer message does not cancel the generation in progress.
_encode = msgspec.json.Encoder().encode


@dataclass
class IncomingMessage:
    data: Bytes
    memory: BodyReservation | None  # This object counts the bytes.

    def free(self) -> None:
        """Drop the bytes, and stop counting them."""
        self.data = b""
        self.memory = None

    def is_cancel(self) -> bool:
        if len(self.data) > CANCEL_BYTES:
            return False
        try:
            return parse(self.data).get("type") == "cancel"
        except ApiError:
            return False


class WebSocketEndpoint:
    def __init__(self, front: Front):
        self.front = front

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        socket = WebSocket(scope, receive, send)
        await socket.accept()
        await Session(self.front, socket, scope["octavo.caller"]).run()


class Session:
    def __init__(self, front: Front, socket: WebSocket, caller: Caller):
        self.front = front
        self.socket = socket
        self.caller = caller
        self.connection: Connection = socket.scope["octavo.connection"]
        # None means that the client has disconnected.
        self.inbox: asyncio.Queue[IncomingMessage | None] = asyncio.Queue(maxsize=4)
        self.call: Call | None = None
        self.errors = Bucket(front.config.limits.websocket_errors)

    async def run(self) -> None:
        reader = asyncio.create_task(self._read_messages())
        try:
            while (message := await self._next_message()) is not None:
                try:
                    await self._generate(message)
                except Exception as e:
                    error = api_error(e).forget()
                    if error.code == "client_gone":
                        return
                    self.front.metrics.rejections.labels(error.code or error.type).inc()
                    await self._send(error.encode())
                    if error.status == 400 and not self._allows_error():
                        await self.socket.close(POLICY_VIOLATION, "too many invalid messages")
                        return
        finally:
            reader.cancel()

    async def _next_message(self) -> IncomingMessage | None:
        """Return the next message. A full server may close the connection while it is idle here."""
        if self.inbox.empty():
            self.connection.enter(ConnectionState.IDLE)
        message = await self.inbox.get()
        self.connection.enter(ConnectionState.BUSY)
        return message

    def _allows_error(self) -> bool:
        self.errors.take()
        return self.errors.wait() == 0

    async def _read_messages(self) -> None:
        """Read messages during a generation too, so that a cancel has effect at once."""
        try:
            while True:
                message = await self._receive_message()
                if self.call is not None and message.is_cancel():
                    self.call.fail(cancelled())
                else:
                    await self.inbox.put(message)
        except WebSocketDisconnect:
            if self.call is not None:
                self.call.fail(client_gone())
            await self.inbox.put(None)

    async def _receive_message(self) -> IncomingMessage:
        message = await self.socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        text = message.get("text")
        data = message["bytes"] if text is None else text.encode()
        return IncomingMessage(data, message["octavo.memory"])

    async def _generate(self, message: IncomingMessage) -> None:
        request, unknown = await self._parse(message)
        if unknown.pop("type", None) == "cancel":
            # A cancel may arrive just after the end of a generation, so a few of them are ignored.
            self.errors.take()
            if self.errors.wait():
                raise invalid_field("type", "no generation is in progress that could be cancelled")
            return
        if unknown.get("stream") is True:
            del unknown["stream"]  # A WebSocket always streams.
        headers = validate.check_fields(self.front, unknown, chat=False, table=PLAIN_TABLE)
        if request.prompt is None:
            error = invalid_field("prompt", "prompt is missing: it must be a string")
            raise name_unknown_fields(error, request, unknown)
        caller = Caller(key=self.caller.key, timeout=self.caller.timeout, span=self.caller.span)
        prepared = await prepare_generate(
            self.front, caller, request, [request.prompt], headers, stream=True
        )
        with open_call(self.front, caller, prepared, stream=True) as self.call:
            try:
                reason = None
                async for pieces in self.call:
                    for _, piece in pieces:
                        reason = piece.finish_reason or reason
                        if piece.text:
                            await self._send(b'{"type":"text","text":' + _encode(piece.text) + b"}")
                usage = replies.usage_of(self.call.collectors)
            finally:
                self.call = None
        done = {
            "type": "done",
            "id": caller.id,
            "finish_reason": reason,
            "usage": usage,
            "headers": prepared.headers,
        }
        await self._send(_encode(done))

    async def _parse(self, message: IncomingMessage) -> tuple[GenerateRequest, dict[str, Any]]:
        """Return the request and its unknown fields, and free the bytes of the message."""
        limits = self.front.config.limits
        try:
            if not is_quick(message.data):
                self.front.check_may_send(self.caller)
            return await body.decode(self.front.pool, message.data, GenerateRequest, limits)
        finally:
            message.free()

    async def _send(self, message: bytes) -> None:
        try:
            async with asyncio.timeout(self.front.config.limits.send_seconds):
                await self.socket.send_text(message.decode())
        except (TimeoutError, WebSocketDisconnect, RuntimeError):
            raise client_gone() from None
