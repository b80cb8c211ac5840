"""/ws/generate: text as it is generated, over a WebSocket. One generation at a time, any number in
a row.

-> {"prompt": "...", "max_new_tokens": 64, ...}      as for /generate
<- {"type": "text", "text": "..."}                   as it is generated
<- {"type": "done", "id": "req_...", "finish_reason": "stop", "usage": {...}, "headers": {...}}
                                                     headers: those that an HTTP reply has
<- {"error": {...}}                                  instead of done
-> {"type": "cancel"}                                ends the generation in progress

A client sends JSON, in text or binary messages. A message that is wrong is answered with an error,
and the connection stays open. A client that keeps sending such messages is disconnected with the
code 1008: `websocket_errors` a minute are allowed.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from octavo.serve import body, replies, validate
from octavo.serve.client import Call
from octavo.serve.completions import open_call
from octavo.serve.connections import Connection, ConnectionState
from octavo.serve.errors import ApiError, api_error, bad, cancelled
from octavo.serve.exchange import client_gone
from octavo.serve.front import Caller, Front
from octavo.serve.keys import Bucket
from octavo.serve.parse import parse
from octavo.serve.protocol import GenerateRequest
from octavo.serve.routes import prepare_generate

POLICY_VIOLATION = 1008
_encode = msgspec.json.Encoder().encode


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
        self.inbox: asyncio.Queue[str | None] = asyncio.Queue(maxsize=4)  # None: the client left
        self.call: Call | None = None
        self.errors = Bucket(front.config.limits.websocket_errors)

    async def run(self) -> None:
        reader = asyncio.create_task(self._read())
        try:
            while (text := await self._next()) is not None:
                try:
                    await self._generate(text)
                except Exception as e:
                    error = api_error(e).forget()
                    if error.code == "client_gone":
                        return
                    self.front.metrics.rejections.labels(error.code or error.type).inc()
                    await self._send(error.encode())
                    if error.status == 400 and not self._may_err():
                        await self.socket.close(POLICY_VIOLATION, "too many invalid messages")
                        return
        finally:
            reader.cancel()

    async def _next(self) -> str | None:
        """The next message. While none is there, a full server may close the connection."""
        if self.inbox.empty():
            self.connection.enter(ConnectionState.IDLE)
        text = await self.inbox.get()
        self.connection.enter(ConnectionState.BUSY)
        return text

    def _may_err(self) -> bool:
        self.errors.take()
        return self.errors.wait() == 0

    async def _read(self) -> None:
        """Listen while a generation runs, so that leaving and cancelling are noticed at once."""
        try:
            while True:
                text = await self._message()
                if self.call is not None and _is_cancel(text):
                    self.call.fail(cancelled())
                else:
                    await self.inbox.put(text)
        except WebSocketDisconnect:
            if self.call is not None:
                self.call.fail(client_gone())
            await self.inbox.put(None)

    async def _message(self) -> str:
        """The next message as text. A binary one is decoded."""
        message = await self.socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        text = message.get("text")
        return message["bytes"].decode("utf-8", "replace") if text is None else text

    async def _generate(self, text: str) -> None:
        if len(text) > self.front.config.limits.body_bytes:
            raise body.too_large(self.front.config.limits)
        data = text.encode("utf-8", "replace")
        limits = self.front.config.limits
        asked, unknown = await body.decode(self.front.pool, data, GenerateRequest, limits)
        if unknown.pop("type", None) == "cancel":
            self.errors.take()  # nothing runs: no error, but it may not go on for ever
            if self.errors.wait():
                raise bad("type", "there is nothing to cancel")
            return
        if unknown.get("stream") is True:
            del unknown["stream"]  # a WebSocket always streams
        headers = validate.check_fields(self.front, unknown, chat=False)
        if asked.prompt is None:
            raise bad("prompt", "prompt must be a text")
        caller = Caller(key=self.caller.key, timeout=self.caller.timeout)
        prepared = await prepare_generate(
            self.front, caller, asked, [asked.prompt], headers, stream=True
        )
        with open_call(self.front, caller, prepared, follow=True) as self.call:
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

    async def _send(self, data: bytes) -> None:
        try:
            async with asyncio.timeout(self.front.config.limits.send_seconds):
                await self.socket.send_text(data.decode())
        except (TimeoutError, WebSocketDisconnect, RuntimeError):
            raise client_gone() from None


def _is_cancel(text: str) -> bool:
    if len(text) > 200:
        return False
    try:
        return parse(text.encode()).get("type") == "cancel"
    except ApiError:
        return False
