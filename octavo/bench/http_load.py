"""A strict HTTP load client, which runs as a program and prints its result as JSON.

    echo '{"port": 8000, ...}' | python -m octavo.bench.http_load

reply_checks.py has the rules by which a reply counts. During the run the client only stores bytes
and times. It checks the replies after the clock has stopped, so one core can request thousands of
replies per second.

A connection that the server closes is opened again while requests are left. A reply that takes
longer than `reply_timeout` has stalled: its connection is closed and it does not count.

This module handles HTTP/1.1 and JSON. It imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import ssl
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from octavo.bench.reply_checks import ExpectedReply, check_reply

CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
CLOSES = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)
LAST_CHUNK = b"\r\n0\r\n\r\n"
FIRST_TEXT = re.compile(rb'"content": ?"[^"]')
KEPT_TEXTS = 100  # good replies whose text is returned


@dataclass
class Load:
    """The requests to send, and how many clients send them at once."""

    port: int
    clients: int
    requests: int
    tokens: int
    prompt: str
    host: str = "127.0.0.1"
    tls: bool = False
    path: str = "/v1/completions"
    chat: bool = False  # the path is that of chat completions
    model: str | None = None
    distinct: bool = False  # each prompt begins with its own number, from `first_number` on
    first_number: int = 0
    stream: bool = False
    burst: bool = False  # all clients send each request at the same time
    # A client waits a random time up to this many seconds before each request, so that replies do
    # not run in lockstep.
    pause: float = 0.0
    exact: bool = False  # every token is one character, so the text shows the number of tokens
    may_stop: bool = False  # the server does not support ignore_eos, so replies may stop early
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of the request body
    headers: dict[str, str] = field(default_factory=dict)
    timeout: float = 120.0  # seconds for the whole run
    reply_timeout: float = 120.0  # seconds for one reply

    @property
    def expected(self) -> ExpectedReply:
        return ExpectedReply(self.tokens, self.stream, self.chat, self.exact, self.may_stop)

    def prompt_text(self, index: int) -> str:
        if not self.distinct:
            return self.prompt
        return f"{self.first_number + index:06d} {self.prompt}"

    def body(self, index: int) -> bytes:
        text = self.prompt_text(index)
        fields: dict[str, Any] = {"prompt": text}
        if self.chat:
            fields = {"messages": [{"role": "user", "content": text}]}
        if self.model is not None:
            fields["model"] = self.model
        fields |= {"max_tokens": self.tokens, **self.extra}
        if not self.may_stop:
            fields["ignore_eos"] = True
        if self.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(fields).encode()

    def request(self, index: int) -> bytes:
        body = self.body(index)
        lines = [
            f"POST {self.path} HTTP/1.1",
            f"Host: {self.host}:{self.port}",
            "Content-Type: application/json",
            f"Content-Length: {len(body)}",
            *(f"{name}: {value}" for name, value in self.headers.items()),
        ]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body


@dataclass(slots=True)
class Reply:
    """One request: the times when it was sent and when its body began and ended, and the bytes."""

    sent: float
    first_byte: float = 0.0
    last_byte: float = 0.0
    received: bytes = b""
    stalled: bool = False


class Client(asyncio.Protocol):
    """One connection, which sends one request after another."""

    def __init__(self, run: Run):
        self.run = run
        self.transport: asyncio.Transport | None = None
        self.reply: Reply | None = None
        self.chunks: list[bytes] = []
        self.body_start = -1  # -1 until the head is complete
        self.total_size = -1  # bytes of head and body; -1 if unknown
        self.closes = False  # the server announced that it closes the connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.file_descriptor = transport.get_extra_info("socket").fileno()
        self.writes_directly = not self.run.load.tls
        self.run.client_ready(self)

    def send_request(self, request: bytes) -> None:
        assert self.transport is not None
        self.chunks = []
        self.body_start = -1
        self.total_size = -1
        self.received_bytes = 0
        self.reply = Reply(time.monotonic())
        loop = asyncio.get_running_loop()
        self.timer = loop.call_later(self.run.load.reply_timeout, self._stall)
        # The request is written directly to the socket, so that it is sent at the recorded time.
        # The transport of uvloop writes at the end of the loop iteration, which with many requests
        # is some tenths of a millisecond later. If the socket is full or closed, the transport
        # handles it.
        if self.writes_directly:
            with contextlib.suppress(OSError):
                request = request[os.write(self.file_descriptor, request) :]
        if request:
            self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        reply = self.reply
        if reply is None:
            self.run.unrequested_bytes += len(data)
            return
        self.chunks.append(data)
        self.received_bytes += len(data)
        if self.body_start < 0:
            received = b"".join(self.chunks)
            head_end = received.find(b"\r\n\r\n")
            if head_end < 0:
                return
            self.body_start = head_end + 4
            if length_match := CONTENT_LENGTH.search(received, 0, head_end):
                self.total_size = self.body_start + int(length_match[1])
            self.closes = bool(CLOSES.search(received, 0, head_end))
        # A chat begins with a chunk that has no text.
        has_text = self.received_bytes > self.body_start and (
            not self.run.load.chat or FIRST_TEXT.search(data)
        )
        if has_text and not reply.first_byte:
            reply.first_byte = time.monotonic()
        if self.total_size >= 0:
            is_complete = self.received_bytes >= self.total_size
        else:
            tail = data
            if len(data) < len(LAST_CHUNK) and len(self.chunks) > 1:
                tail = self.chunks[-2][-len(LAST_CHUNK) :] + data
            is_complete = tail.endswith(LAST_CHUNK)
        if is_complete:
            self._finish_reply()

    def connection_lost(self, error: Exception | None) -> None:
        if self.reply is not None:
            self._finish_reply()  # The part that arrived is checked.
        self.run.client_closed(self)

    def _stall(self) -> None:
        if self.reply is not None and self.transport is not None:
            self.reply.stalled = True
            self.transport.abort()

    def _finish_reply(self) -> None:
        reply = self.reply
        self.reply = None
        self.timer.cancel()
        assert reply is not None
        reply.last_byte = time.monotonic()
        reply.received = b"".join(self.chunks)
        self.run.replies.append(reply)
        if self.closes and self.transport is not None:
            self.transport.close()
        self.run.client_ready(self)


class Run:
    """Hands out requests until all are sent."""

    def __init__(self, load: Load):
        self.load = load
        self.requests = [load.request(index) for index in range(load.requests)]
        self.replies: list[Reply] = []
        self.waiting_clients: list[Client] = []
        self.open_connections = 0
        self.sent_requests = 0
        self.unrequested_bytes = 0  # bytes that arrived while no request was open
        self.tls = ssl.create_default_context() if load.tls else None
        self.tasks: set[asyncio.Task[None]] = set()
        self.finished = asyncio.get_running_loop().create_future()
        self.generator = random.Random(0)

    async def run(self) -> None:
        """Open all connections, then send the load."""
        load = self.load
        connections = min(load.clients, load.requests)
        self.open_connections = connections
        self.is_held = True
        await asyncio.gather(*(self._connect() for _ in range(connections)))
        self.is_held = False
        self._release_waiting()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.finished, load.timeout)

    async def _connect(self) -> None:
        loop = asyncio.get_running_loop()
        load = self.load
        await loop.create_connection(lambda: Client(self), load.host, load.port, ssl=self.tls)

    async def _reconnect(self) -> None:
        try:
            await self._connect()
        except OSError:
            self._lose_connection()

    def _release_waiting(self) -> None:
        waiting = self.waiting_clients
        self.waiting_clients = []
        for client in waiting:
            self._send_after_pause(client)

    def _send_after_pause(self, client: Client) -> None:
        if self.load.pause:
            asyncio.get_running_loop().call_later(
                self.generator.uniform(0, self.load.pause), self._send_next, client
            )
        else:
            self._send_next(client)

    def _send_next(self, client: Client) -> None:
        if self.sent_requests < len(self.requests):
            self.sent_requests += 1
            client.send_request(self.requests[self.sent_requests - 1])
        else:
            self._finish_if_done()

    def _finish_if_done(self) -> None:
        """End the run if every request has a reply, or if no connection is left."""
        is_done = len(self.replies) >= len(self.requests) or not self.open_connections
        if is_done and not self.finished.done():
            self.finished.set_result(None)

    def client_ready(self, client: Client) -> None:
        if client.transport is None or client.transport.is_closing():
            return
        if not self.is_held and not self.load.burst:
            self._send_after_pause(client)
            return
        self.waiting_clients.append(client)
        if not self.is_held and len(self.waiting_clients) == self.open_connections:
            self._release_waiting()

    def client_closed(self, client: Client) -> None:
        if client in self.waiting_clients:
            self.waiting_clients.remove(client)
        if self.sent_requests < len(self.requests) and not self.finished.done():
            task = asyncio.get_running_loop().create_task(self._reconnect())
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        else:
            self._lose_connection()

    def _lose_connection(self) -> None:
        self.open_connections -= 1
        self._finish_if_done()


# ---- results -------------------------------------------------------------------------------------


def measure(load: Load) -> dict[str, Any]:
    """Run the load and return the times of each good reply and the problems of the others."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop

        loop_factory = uvloop.new_event_loop

    async def main() -> tuple[Run, float]:
        run = Run(load)
        cpu_seconds = time.process_time()
        await run.run()
        return run, time.process_time() - cpu_seconds

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        run, cpu_seconds = runner.run(main())
    return summarize(load, run, cpu_seconds)


def summarize(load: Load, run: Run, cpu_seconds: float) -> dict[str, Any]:
    """Check all replies, and return the times of the good ones and the problems of the others."""
    good: list[tuple[str, float, float, float]] = []
    texts: list[tuple[str, int]] = []
    problems: Counter[str] = Counter()
    statuses: Counter[str] = Counter()
    seen_ids: set[str] = set()
    tokens = 0
    prompt_tokens = 0
    for reply in run.replies:
        checked = check_reply(load.expected, reply.received)
        statuses[str(checked.status)] += 1
        problem = checked.problem
        if reply.stalled:
            problem = f"it was not complete after {load.reply_timeout:g} s"
        content = checked.content
        if problem is None and content is not None and content.id:
            if content.id in seen_ids:
                problem = "the reply to another request was sent again"
            seen_ids.add(content.id)
        if problem is not None or content is None:
            problems[problem or "not a reply"] += 1
            continue
        good.append((checked.request_id, reply.sent, reply.first_byte, reply.last_byte))
        tokens += content.tokens
        prompt_tokens += content.prompt_tokens
        if len(texts) < KEPT_TEXTS:
            texts.append((content.text, content.tokens))
    if missing := load.requests - len(run.replies):
        problems["no reply"] = missing
    if run.unrequested_bytes:
        problems["bytes that nobody requested"] += 1
    started = min((reply.sent for reply in run.replies), default=0.0)
    seconds = max((reply.last_byte for reply in run.replies), default=0.0) - started
    load_fields = asdict(load)
    load_fields["headers"] = sorted(load.headers)  # without their values: one may be a key
    return {
        "load": load_fields,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens": tokens,
        "prompt_tokens": prompt_tokens,
        "good": good,
        "texts": texts,
        "wrong": dict(problems),
        "statuses": dict(statuses),
    }


if __name__ == "__main__":
    # The load may contain a key, which a command line would show to other users.
    print(json.dumps(measure(Load(**json.load(sys.stdin)))))
