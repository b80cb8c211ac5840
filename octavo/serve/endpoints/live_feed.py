"""The WebSocket /ws/watch sends the data of the live page in two kinds of messages:

    {"server": {...}, "model": {...},                   the state of the server, when it changes
     "watchers": 1, "has_kept_lines": true}
    ["arrived", 12, 3, 45678, ...]                      lines of the event stream

octavo/core/event_stream.py describes the lines. The first one is a snapshot. `server` equals the
reply of /readyz. `model` is null until the model is loaded. `has_kept_lines` becomes true when the
client has got all lines that the server had kept. A client never gets lines before the state in
which the engine sent them.

The engine sends lines only while a page is open, and for a short time afterwards, so that a page
that is reloaded shows the same again. The API server keeps the latest lines for pages that are
opened later (event_buffer.py). Lines contain ids, lengths and states. They contain text only with
--show-text.
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
from octavo.serve.channel.messages import EventLines, WatchEvents
from octavo.serve.front.event_buffer import EventReader
from octavo.serve.front.front import Front
from octavo.serve.front.keys import Bucket

# The server accepts this subprotocol. A browser may offer its key as another one.
PROTOCOL = "octavo-watch"
INTERVAL = 0.2  # Seconds between two checks whether the state of the server has changed.
GRACE_SECONDS = 10.0  # The engine sends lines for this time after the last page was closed.
FORBIDDEN = 4403  # WebSocket has no standard close code for status 403.
POLICY_VIOLATION = 1008
MODEL = (
    "architecture",
    "dtype",
    "weights",
    "device",
    "max_model_len",
    "max_num_seqs",
    "max_batched_tokens",
    "block_size",
    "num_blocks",
    "speculative",
)
_encode = msgspec.json.Encoder().encode


class WatchEndpoint:
    def __init__(self, front: Front):
        self.front = front
        self.watchers: set[WebSocket] = set()
        self.buffer = front.events
        self.watched_start = 0  # The engine process that sends lines, as counted by the supervisor.
        self._task: asyncio.Task[None] | None = None
        front.engine_client.on_event_lines = self._receive

    def _receive(self, message: EventLines) -> None:
        self.buffer.add(message.lines, message.is_start)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        key = scope["octavo.caller"].key
        if len(self.watchers) >= (limit := self.front.config.limits.watchers):
            raise ApiError(
                429,
                f"{limit} clients already watch: close one of their live pages and try again",
                "too_many_watchers",
                retry_after=5,
            )
        socket = WebSocket(scope, receive, send)
        protocol = PROTOCOL if PROTOCOL in scope["subprotocols"] else None
        # The lines show the requests of all keys, so only administrators may see them. Browsers
        # show a close code to the page, but not the status of a refused handshake.
        if key is not None and not key.admin:
            await socket.accept(protocol)
            await socket.close(FORBIDDEN, "the live page needs an administrator's key")
            return
        self.watchers.add(socket)
        try:
            await socket.accept(protocol)
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._watch_engine())
            await self._serve(socket)
        except (WebSocketDisconnect, RuntimeError, TimeoutError):
            pass  # The client has disconnected, or has read nothing for too long.
        finally:
            self.watchers.discard(socket)

    async def _serve(self, socket: WebSocket) -> None:
        """Send both kinds of messages until the client disconnects."""
        sender = Sender(self, socket)
        tasks = {
            asyncio.create_task(sender.send_states()),
            asyncio.create_task(sender.send_lines()),
            asyncio.create_task(self._listen(socket)),
        }
        done, unfinished = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in unfinished:
            task.cancel()
        for task in done:
            task.result()

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

    async def _watch_engine(self) -> None:
        """Make each engine process send its lines while pages are open, and GRACE_SECONDS after."""
        client = self.front.engine_client
        supervisor = client.supervisor
        client.reports_refusals = True
        seen_at = time.monotonic()
        # Nothing may be awaited between the check that no page is open and the end of the task: a
        # page that is opened in between would not start another task.
        while self.watchers or time.monotonic() - seen_at < GRACE_SECONDS:
            if self.watchers:
                seen_at = time.monotonic()
            if supervisor.phase == "ready" and self.watched_start != supervisor.starts:
                self.watched_start = supervisor.starts
                supervisor.send(WatchEvents(True))
            await asyncio.sleep(INTERVAL)
        client.reports_refusals = False
        supervisor.send(WatchEvents(False))
        self.watched_start = 0
        self.buffer.clear()

    def state(self) -> dict[str, Any]:
        client = self.front.engine_client
        loaded = client.model_info()
        state = client.state()
        del state["elapsed_s"]  # The elapsed time changes all the time.
        return {
            "server": {
                **state,
                "name": self.front.config.name,
                "version": __version__,
                "starts": client.supervisor.starts,
                "controls": self.front.config.live_controls,
            },
            "model": None if loaded is None else {name: getattr(loaded, name) for name in MODEL},
            "watchers": len(self.watchers),
        }


class Sender:
    """Sends both kinds of messages to one client."""

    def __init__(self, endpoint: WatchEndpoint, socket: WebSocket):
        self.endpoint = endpoint
        self.socket = socket
        self.seconds = endpoint.front.config.limits.send_seconds
        self.sent_state = b""
        self.has_kept_lines = False  # All lines that were kept when the client connected are sent.
        self.lock = asyncio.Lock()  # Two tasks send. The lock keeps their messages in order.

    async def send_states(self) -> None:
        while True:
            async with self.lock:
                await self._send_state_if_changed()
            await asyncio.sleep(INTERVAL)

    async def send_lines(self) -> None:
        reader = EventReader(self.endpoint.buffer)
        while True:
            lines = await reader.read()
            has_all = reader.has_all
            async with self.lock:
                await self._send_state_if_changed()
                await self._send(lines)
                if has_all and not self.has_kept_lines:
                    self.has_kept_lines = True
                    await self._send_state_if_changed()

    async def _send_state_if_changed(self) -> None:
        state = _encode(self.endpoint.state() | {"has_kept_lines": self.has_kept_lines})
        if state != self.sent_state:
            self.sent_state = state
            await self._send(state)

    async def _send(self, text: bytes) -> None:
        async with asyncio.timeout(self.seconds):
            await self.socket.send_text(text.decode())
