"""/ws/generate: text as it comes, over a WebSocket. One generation at a time; the connection may be used again.

-> {"prompt": "...", "max_new_tokens": 64, ...}      as for /generate
<- {"type": "text", "text": "..."}                   as it comes
<- {"type": "done", "id": "req_...", "finish_reason": "stop", "usage": {...}, "headers": {...}}
                                                     headers: what HTTP says in them, such as x-ignored-params
<- {"error": {...}}                                  instead of done
-> {"type": "cancel"}                                ends a generation half-way

What the client sends is JSON as text; bytes are taken for the text that they are.
"""

from __future__ import annotations

import asyncio

import msgspec
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from octavo.serve import body, replies, validate
from octavo.serve.client import Call
from octavo.serve.completions import open_call
from octavo.serve.errors import ApiError, api_error, bad, cancelled
from octavo.serve.exchange import client_gone
from octavo.serve.front import Caller, Front
from octavo.serve.protocol import GenerateRequest
from octavo.serve.routes import prepare_generate

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
        self.inbox: asyncio.Queue[str | None] = asyncio.Queue(maxsize=4)  # None: the client left
        self.call: Call | None = None

    async def run(self) -> None:
        reader = asyncio.create_task(self._read())
        try:
            while (text := await self.inbox.get()) is not None:
                try:
                    await self._generate(text)
                except Exception as e:
                    error = api_error(e)
                    if error.code == "client_gone":
                        return
                    self.front.metrics.rejections.labels(error.code or error.type).inc()
                    await self._send(error.encode())
        finally:
            reader.cancel()

    async def _read(self) -> None:
        """Listens while a generation runs, so that leaving and cancelling are noticed at once."""
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
        """Text; of bytes, the text that they are."""
        message = await self.socket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        text = message.get("text")
        return message["bytes"].decode("utf-8", "replace") if text is None else text

    async def _generate(self, text: str) -> None:
        if len(text) > self.front.config.limits.body_bytes:
            raise body.too_large(self.front.config.limits)
        value = body.parse(text.encode("utf-8", "replace"))
        if value.get("type") == "cancel":
            return  # nothing runs
        value.pop("type", None)
        if value.get("stream") is True:
            del value["stream"]  # which it is
        asked, unknown = body.convert(value, GenerateRequest)
        headers = validate.check_fields(self.front, unknown, asked, "max_new_tokens")
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
        return body.parse(text.encode()).get("type") == "cancel"
    except ApiError:
        return False
