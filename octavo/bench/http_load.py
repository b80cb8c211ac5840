"""A strict HTTP load client, which runs as a program and prints its result as JSON.

    python -m octavo.bench.http_load '{"port": 8000, ...}'

A reply is good if its status is 200, it contains text, its finish_reason is "length" and its usage
has exactly the requested number of tokens. During the run the client only stores bytes and times.
It checks the replies after the clock has stopped, so one core can request thousands of replies per
second.

This module knows HTTP/1.1 and JSON. It imports nothing else of octavo, and no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

CONTENT_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
REQUEST_ID = re.compile(rb"\r\nx-request-id: *([\w-]+)", re.IGNORECASE)
LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass
class Load:
    """The requests to send, and how many clients send them at once."""

    port: int
    clients: int
    requests: int
    tokens: int
    prompt: str
    host: str = "127.0.0.1"
    distinct: bool = False  # each prompt begins with its own number, from `first_number` on
    first_number: int = 0
    stream: bool = False
    burst: bool = False  # all clients send each request at the same time
    # A client waits a random time up to this many seconds before each request, so that replies do
    # not run in lockstep.
    pause: float = 0.0
    exact: bool = False  # every token is one character, so the text shows the number of tokens
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of the request body
    headers: dict[str, str] = field(default_factory=dict)
    timeout: float = 120.0  # seconds for the whole run

    def body(self, index: int) -> bytes:
        text = f"{self.first_number + index:06d} {self.prompt}" if self.distinct else self.prompt
        fields = {"prompt": text, "max_tokens": self.tokens, "ignore_eos": True, **self.extra}
        if self.stream:
            fields |= {"stream": True, "stream_options": {"include_usage": True}}
        return json.dumps(fields).encode()

    def request(self, index: int) -> bytes:
        body = self.body(index)
        lines = [
            "POST /v1/completions HTTP/1.1",
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


class Client(asyncio.Protocol):
    """One connection, which sends one request after another."""

    def __init__(self, run: Run):
        self.run = run
        self.transport: asyncio.Transport | None = None
        self.reply: Reply | None = None
        self.chunks: list[bytes] = []
        self.body_start = -1  # -1 until the head is complete
        self.total_size = -1  # of head and body; -1 if unknown

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.file_descriptor = transport.get_extra_info("socket").fileno()
        self.run.client_ready(self)

    def send_request(self, request: bytes) -> None:
        assert self.transport is not None
        self.chunks = []
        self.body_start = -1
        self.total_size = -1
        self.received_bytes = 0
        self.reply = Reply(time.monotonic())
        # The request is written directly to the socket, so that it is sent at the recorded time.
        # The transport of uvloop writes at the end of the loop iteration, which with many requests
        # is some tenths of a millisecond later. If the socket is full or closed, the transport
        # handles it.
        with contextlib.suppress(OSError):
            request = request[os.write(self.file_descriptor, request) :]
        if request:
            self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        reply = self.reply
        if reply is None:
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
        if not reply.first_byte and self.received_bytes > self.body_start:
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

    def _finish_reply(self) -> None:
        reply = self.reply
        self.reply = None
        assert reply is not None
        reply.last_byte = time.monotonic()
        reply.received = b"".join(self.chunks)
        self.run.replies.append(reply)
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
        self.finished = asyncio.get_running_loop().create_future()
        self.generator = random.Random(0)

    async def run(self) -> None:
        """Open all connections, then send the load."""
        loop = asyncio.get_running_loop()
        load = self.load
        connections = min(load.clients, load.requests)
        self.open_connections = connections
        self.is_held = True
        await asyncio.gather(
            *(
                loop.create_connection(lambda: Client(self), load.host, load.port)
                for _ in range(connections)
            )
        )
        self.is_held = False
        self._release_waiting()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.finished, load.timeout)

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
        elif len(self.replies) >= len(self.requests) and not self.finished.done():
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
        self.open_connections -= 1
        if not self.open_connections and not self.finished.done():
            self.finished.set_result(None)


# ---- checks --------------------------------------------------------------------------------------


def check_reply(load: Load, data: bytes) -> tuple[int, str, int, str | None]:
    """Return the status (0 if there is none), the request id, the tokens, and what is wrong."""
    head, _, body = data.partition(b"\r\n\r\n")
    if not (status_match := re.match(rb"HTTP/1\.1 (\d\d\d) ", head)):
        return 0, "", 0, "no HTTP reply"
    status = int(status_match[1])
    id_match = REQUEST_ID.search(head)
    request_id = id_match[1].decode() if id_match else ""
    if status != 200:
        return status, request_id, 0, f"status {status}"
    try:
        text, finish_reason, token_count = read_stream(body) if load.stream else read_whole(body)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return status, request_id, 0, f"not a reply: {type(error).__name__} {error}"
    if token_count != load.tokens:
        return (
            status,
            request_id,
            token_count,
            f"usage says {token_count} tokens, not {load.tokens}",
        )
    if finish_reason != "length":
        return status, request_id, token_count, f"it ended with {finish_reason!r}, not 'length'"
    if len(text) != load.tokens if load.exact else not text:
        return status, request_id, token_count, f"a text of {len(text)} characters"
    return status, request_id, token_count, None


def read_whole(body: bytes) -> tuple[str, str, int]:
    """Return the text, the finish reason and the number of tokens in the usage."""
    reply = json.loads(body)
    (choice,) = reply["choices"]
    return choice["text"], choice["finish_reason"], reply["usage"]["completion_tokens"]


def read_stream(body: bytes) -> tuple[str, str, int]:
    """Return the text, the finish reason and the number of tokens in the usage of a stream."""
    *events_text, last_event, remainder = dechunk(body).split(b"\n\n")
    if (last_event, remainder) != (b"data: [DONE]", b""):
        raise ValueError("the stream does not end with [DONE]")
    events = [
        json.loads(event_text.removeprefix(b"data: "))
        for event_text in events_text
        if not event_text.startswith(b":")
    ]
    choices = [choice for event in events for choice in event["choices"]]
    if any(choice["finish_reason"] for choice in choices[:-1]):
        raise ValueError("the stream continues after its finish_reason")
    text = "".join(choice["text"] for choice in choices)
    return text, choices[-1]["finish_reason"], events[-1]["usage"]["completion_tokens"]


def dechunk(body: bytes) -> bytes:
    """Return the content of a chunked HTTP body."""
    chunks: list[bytes] = []
    position = 0
    while True:
        line_end = body.index(b"\r\n", position)
        chunk_size = int(body[position:line_end], 16)
        if chunk_size == 0:
            if body[line_end:] != b"\r\n\r\n":
                raise ValueError("bytes after the last chunk")
            return b"".join(chunks)
        position = line_end + 2 + chunk_size
        if body[position : position + 2] != b"\r\n":
            raise ValueError("a chunk is longer or shorter than its declared size")
        chunks.append(body[line_end + 2 : position])
        position += 2


def measure(load: Load) -> dict[str, Any]:
    """Run the load and return the times of each good reply and the problems of the others."""
    loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop

        loop_factory = uvloop.new_event_loop

    async def main() -> tuple[list[Reply], float]:
        run = Run(load)
        cpu_seconds = time.process_time()
        await run.run()
        return run.replies, time.process_time() - cpu_seconds

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        replies, cpu_seconds = runner.run(main())
    good: list[tuple[str, float, float, float]] = []
    problems: dict[str, int] = {}
    statuses: dict[str, int] = {}
    tokens = 0
    for reply in replies:
        status, request_id, token_count, problem = check_reply(load, reply.received)
        statuses[str(status)] = statuses.get(str(status), 0) + 1
        if problem is None:
            good.append((request_id, reply.sent, reply.first_byte, reply.last_byte))
            tokens += token_count
        else:
            problems[problem] = problems.get(problem, 0) + 1
    if missing := load.requests - len(replies):
        problems["no reply"] = missing
    started = min((reply.sent for reply in replies), default=0.0)
    seconds = max((reply.last_byte for reply in replies), default=0.0) - started
    return {
        "load": asdict(load),
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "tokens": tokens,
        "good": good,
        "wrong": problems,
        "statuses": statuses,
    }


if __name__ == "__main__":
    print(json.dumps(measure(Load(**json.loads(sys.argv[1])))))
