"""The WebSocket /ws/watch sends the state that the live page shows, up to five times per second.

A frame is a JSON object:

{"gap": 0, "time": 12.3, "server": {...}, "model": {...}, "numbers": {...}, "heartbeat": {...},
"view": {...} or null}

Every frame holds the whole state, so frames can be skipped: a slow client gets the latest frame
when it is ready, and `gap` counts the frames that it missed. `server` equals the reply of /readyz.
`model` is null until the model is loaded. `numbers` are counters of the API server. `heartbeat` and
`view` come from the engine (messages.py describes their fields). `view` is null until the engine
has replied.

The API server sends a ViewRequest to the engine, and sends the next one after the engine has
replied. When no client watches, it requests and stores nothing. A frame contains ids, lengths and
states, but no text and no tokens.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from octavo import __version__
from octavo.serve.api.api_errors import ApiError
from octavo.serve.channel.messages import ViewRequest
from octavo.serve.front.front import Front
from octavo.serve.front.keys import Bucket

# The server accepts this subprotocol. A browser may offer its key as another one.
PROTOCOL = "octavo-watch"
INTERVAL = 0.2  # seconds
FORBIDDEN = 4403  # WebSocket has no standard close code for status 403.
POLICY_VIOLATION = 1008
SHARE = 0.02  # The engine spends at most this part of its time on views.
MODEL = (
    "architecture",
    "dtype",
    "device",
    "max_model_len",
    "max_num_seqs",
    "max_batched_tokens",
    "block_size",
    "num_blocks",
    "speculative",
)
_encode = msgspec.json.Encoder().encode


class Watcher:
    """The unsent frame of one connection, and the number of frames that it missed."""

    def __init__(self) -> None:
        self.frame: bytes | None = None
        self.gap = 0
        self.offered = asyncio.Event()

    def offer(self, frame: bytes) -> None:
        self.gap += self.frame is not None
        self.frame = frame
        self.offered.set()

    async def take(self) -> str:
        await self.offered.wait()
        self.offered.clear()
        assert self.frame is not None
        text = f'{{"gap":{self.gap},{self.frame[1:].decode()}'
        self.frame = None
        self.gap = 0
        return text


class WatchEndpoint:
    def __init__(self, front: Front):
        self.front = front
        self.watchers: set[Watcher] = set()
        self.asked = 0  # The number of the engine process that owes a view, or 0.
        self._task: asyncio.Task[None] | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = scope["octavo.caller"].key
        if len(self.watchers) >= (most := self.front.config.limits.watchers):
            raise ApiError(
                429,
                f"{most} clients already watch: close one of their live pages and try again",
                "too_many_watchers",
                retry_after=5,
            )
        socket = WebSocket(scope, receive, send)
        watcher = Watcher()
        # The frames show the requests of all keys, so only administrators may see them. Browsers
        # show a close code to the page, but not the status of a refused handshake.
        if key is not None and not key.admin:
            await socket.accept(PROTOCOL if PROTOCOL in scope["subprotocols"] else None)
            await socket.close(FORBIDDEN, "the live page needs an administrator's key")
            return
        self.watchers.add(watcher)
        try:
            await socket.accept(PROTOCOL if PROTOCOL in scope["subprotocols"] else None)
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._run())
            sending = asyncio.create_task(self._send(socket, watcher))
            listening = asyncio.create_task(self._listen(socket))
            done, rest = await asyncio.wait(
                {sending, listening}, return_when=asyncio.FIRST_COMPLETED
            )
            for task in rest:
                task.cancel()
            for task in done:
                task.result()
        except (WebSocketDisconnect, RuntimeError, TimeoutError):
            pass  # The client has disconnected, or has read nothing for too long.
        finally:
            self.watchers.discard(watcher)

    async def _send(self, socket: WebSocket, watcher: Watcher) -> None:
        while True:
            text = await watcher.take()
            async with asyncio.timeout(self.front.config.limits.send_seconds):
                await socket.send_text(text)

    async def _listen(self, socket: WebSocket) -> None:
        """Wait until the client disconnects.

        Messages are ignored, but a client that sends many of them is disconnected.
        """
        messages = Bucket(self.front.config.limits.websocket_errors)
        while (await socket.receive())["type"] != "websocket.disconnect":
            messages.take()
            if messages.wait() > 0:
                await socket.close(POLICY_VIOLATION, "/ws/watch accepts no messages")
                return

    async def _run(self) -> None:
        """Send a frame, request the next view and wait, and repeat while clients watch."""
        client = self.front.client
        supervisor = self.front.client.supervisor
        client.view = None
        self.asked = 0
        while self.watchers:
            seconds = 0.0 if client.view is None else client.view.seconds
            if client.view is not None:
                self.asked = 0
            frame = _encode(self.frame())
            for watcher in self.watchers:
                watcher.offer(frame)
            if supervisor.phase == "ready" and self.asked != supervisor.starts:
                self.asked = supervisor.starts
                supervisor.send(ViewRequest())
            await asyncio.sleep(max(INTERVAL, seconds / SHARE))

    def frame(self) -> dict[str, Any]:
        client = self.front.client
        metrics = self.front.metrics
        config = self.front.config
        loaded = client.model_info()
        heartbeat = client.supervisor.heartbeat
        (view, client.view) = (client.view, None)
        return {
            "time": time.monotonic(),
            "server": {
                **client.state(),
                "name": config.name,
                "version": __version__,
                "starts": client.supervisor.starts,
            },
            "model": None if loaded is None else {name: getattr(loaded, name) for name in MODEL},
            "numbers": {
                "open": len(client.open_requests),
                "queue": len(client.queue_bound.waiting),
                # The number of samples, and their sum in seconds.
                "ttft": [sum(metrics.ttft.counts), metrics.ttft.sum],
                "itl": [sum(metrics.itl.counts), metrics.itl.sum],
                "watchers": len(self.watchers),
            },
            "heartbeat": msgspec.structs.asdict(heartbeat),
            "view": None
            if view is None
            else {name: getattr(view, name) for name in view.__struct_fields__},
        }
