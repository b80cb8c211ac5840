"""A strict load client, a program of its own: `python -m octavo.bench.http_load '{"port": 8000, ...}'` prints what came back.

Counts what replies say of themselves, never what was asked for: a reply is good if its status is 200, its text is there, it
ended by its length, and its own usage has exactly the tokens asked for. While it runs it only keeps bytes and times; they
are judged when the clock has stopped. Light, so that one core can ask for thousands of replies a second.

Knows HTTP/1.1, JSON and the clock; imports nothing of octavo and no torch.
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

LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
REQUEST_ID = re.compile(rb"\r\nx-request-id: *([\w-]+)", re.IGNORECASE)
LAST_CHUNK = b"\r\n0\r\n\r\n"


@dataclass
class Load:
    """What to ask for, by how many at once."""

    port: int
    host: str = "127.0.0.1"
    clients: int = 50
    requests: int = 500
    tokens: int = 30
    prompt: str = "The secret to building a high performance system is"
    distinct: bool = False  # each prompt begins with a number of its own, from `number` on
    number: int = 0
    stream: bool = False
    burst: bool = False  # clients wait for each other before each request
    # seconds that a client waits at most before each request, by dice: replies do not keep in
    # step then
    pause: float = 0.0
    exact: bool = False  # every token is one character: the text tells how many there are
    extra: dict[str, Any] = field(default_factory=dict)  # further fields of each request
    headers: dict[str, str] = field(default_factory=dict)
    timeout: float = 120.0  # seconds in all

    def body(self, index: int) -> bytes:
        prompt = f"{self.number + index:06d} {self.prompt}" if self.distinct else self.prompt
        fields = {"prompt": prompt, "max_tokens": self.tokens, "ignore_eos": True, **self.extra}
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
    """One request: when it was sent, when the first byte of the body came and the last, and what came."""

    sent: float
    first: float = 0.0
    end: float = 0.0
    data: bytes = b""


class Client(asyncio.Protocol):
    """One connection, one request after another."""

    def __init__(self, run: Run):
        self.run = run
        self.transport: asyncio.Transport | None = None
        self.reply: Reply | None = None
        self.parts: list[bytes] = []
        # where the body begins, how long head and body are together; -1: not known
        self.body = self.size = -1

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self.number = transport.get_extra_info("socket").fileno()
        self.run.ready(self)

    def ask(self, request: bytes) -> None:
        assert self.transport is not None
        self.parts = []
        self.body = -1
        self.size = -1
        self.have = 0
        self.reply = Reply(time.monotonic())
        # Straight to the socket, where it is sent when it is said to be: uvloop's transport keeps what it is given until
        # everything else of the loop's turn is done, which of many requests at once is some tenths of a millisecond.
        with contextlib.suppress(OSError):  # full, or gone: the transport waits, or tells
            request = request[os.write(self.number, request) :]
        if request:
            self.transport.write(request)

    def data_received(self, data: bytes) -> None:
        reply = self.reply
        if reply is None:
            return
        self.parts.append(data)
        self.have += len(data)
        if self.body < 0:
            whole = b"".join(self.parts)
            end = whole.find(b"\r\n\r\n")
            if end < 0:
                return
            self.body = end + 4
            if found := LENGTH.search(whole, 0, end):
                self.size = self.body + int(found[1])
        if not reply.first and self.have > self.body:
            reply.first = time.monotonic()
        if self.size >= 0:
            over = self.have >= self.size
        else:
            over = (
                self.parts[-2][-7:] + data if len(data) < 7 and len(self.parts) > 1 else data
            ).endswith(LAST_CHUNK)
        if over:
            self._over()

    def connection_lost(self, error: Exception | None) -> None:
        if self.reply is not None:
            self._over()  # what came is judged as it is
        self.run.gone(self)

    def _over(self) -> None:
        reply = self.reply
        self.reply = None
        assert reply is not None
        reply.end = time.monotonic()
        reply.data = b"".join(self.parts)
        self.run.replies.append(reply)
        self.run.ready(self)


class Run:
    """Hands out requests until all are asked."""

    def __init__(self, load: Load):
        self.load = load
        self.requests = [load.request(i) for i in range(load.requests)]
        self.replies: list[Reply] = []
        self.waiting: list[Client] = []
        self.open = 0
        self.asked = 0
        self.over = asyncio.get_running_loop().create_future()
        self.dice = random.Random(0)

    async def run(self) -> None:
        """All connections first, then the load."""
        loop = asyncio.get_running_loop()
        load = self.load
        count = min(load.clients, load.requests)
        self.open = count
        self.held = True
        await asyncio.gather(
            *(
                loop.create_connection(lambda: Client(self), load.host, load.port)
                for _ in range(count)
            )
        )
        self.held = False
        self._begin()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self.over, load.timeout)

    def _begin(self) -> None:
        waiting = self.waiting
        self.waiting = []
        for client in waiting:
            self._soon(client)

    def _soon(self, client: Client) -> None:
        if self.load.pause:
            asyncio.get_running_loop().call_later(
                self.dice.uniform(0, self.load.pause), self._ask, client
            )
        else:
            self._ask(client)

    def _ask(self, client: Client) -> None:
        if self.asked < len(self.requests):
            self.asked += 1
            client.ask(self.requests[self.asked - 1])
        elif len(self.replies) >= len(self.requests) and not self.over.done():
            self.over.set_result(None)

    def ready(self, client: Client) -> None:
        if client.transport is None or client.transport.is_closing():
            return
        if not self.held and not self.load.burst:
            self._soon(client)
            return
        self.waiting.append(client)
        if not self.held and len(self.waiting) == self.open:
            self._begin()

    def gone(self, client: Client) -> None:
        self.open -= 1
        if not self.open and not self.over.done():
            self.over.set_result(None)


# ---- judging --------------------------------------------------------------------------------------------


def judge(load: Load, data: bytes) -> tuple[int, str, int, str | None]:
    """Status (0: none), request id, the tokens that a good reply has, what is wrong with it."""
    head, _, body = data.partition(b"\r\n\r\n")
    if not (found := re.match(rb"HTTP/1\.1 (\d\d\d) ", head)):
        return 0, "", 0, "no HTTP reply"
    status = int(found[1])
    id = REQUEST_ID.search(head)
    name = id[1].decode() if id else ""
    if status != 200:
        return status, name, 0, f"status {status}"
    try:
        text, reason, counted = read_stream(body) if load.stream else read_whole(body)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        return status, name, 0, f"not a reply: {type(error).__name__} {error}"
    if counted != load.tokens:
        return status, name, counted, f"usage says {counted} tokens, not {load.tokens}"
    if reason != "length":
        return status, name, counted, f"it ended with {reason!r}, not 'length'"
    if len(text) != load.tokens if load.exact else not text:
        return status, name, counted, f"a text of {len(text)} characters"
    return status, name, counted, None


def read_whole(body: bytes) -> tuple[str, str, int]:
    """Text, finish reason, tokens by its own usage."""
    reply = json.loads(body)
    (choice,) = reply["choices"]
    return choice["text"], choice["finish_reason"], reply["usage"]["completion_tokens"]


def read_stream(body: bytes) -> tuple[str, str, int]:
    *lines, done, end = dechunk(body).split(b"\n\n")
    if (done, end) != (b"data: [DONE]", b""):
        raise ValueError("the stream has no end")
    events = [
        json.loads(line.removeprefix(b"data: ")) for line in lines if not line.startswith(b":")
    ]
    choices = [choice for event in events for choice in event["choices"]]
    if any(choice["finish_reason"] for choice in choices[:-1]):
        raise ValueError("it went on after its end")
    return (
        "".join(c["text"] for c in choices),
        choices[-1]["finish_reason"],
        events[-1]["usage"]["completion_tokens"],
    )


def dechunk(body: bytes) -> bytes:
    parts: list[bytes] = []
    at = 0
    while True:
        end = body.index(b"\r\n", at)
        size = int(body[at:end], 16)
        if size == 0:
            if body[end:] != b"\r\n\r\n":
                raise ValueError("bytes after the last chunk")
            return b"".join(parts)
        at = end + 2 + size
        if body[at : at + 2] != b"\r\n":
            raise ValueError("a chunk is not as long as it says")
        parts.append(body[end + 2 : at])
        at += 2


def measure(load: Load) -> dict[str, Any]:
    """One record: seconds, the client's own CPU time, each good reply's id and times, and what was wrong with the others."""
    factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop
    with contextlib.suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop

    async def main() -> tuple[list[Reply], float]:
        run = Run(load)
        cpu = time.process_time()
        await run.run()
        return run.replies, time.process_time() - cpu

    with asyncio.Runner(loop_factory=factory) as runner:
        replies, cpu = runner.run(main())
    good: list[tuple[str, float, float, float]] = []
    wrong: dict[str, int] = {}
    statuses: dict[str, int] = {}
    tokens = 0
    for reply in replies:
        status, id, counted, why = judge(load, reply.data)
        statuses[str(status)] = statuses.get(str(status), 0) + 1
        if why is None:
            good.append((id, reply.sent, reply.first, reply.end))
            tokens += counted
        else:
            wrong[why] = wrong.get(why, 0) + 1
    if missing := load.requests - len(replies):
        wrong["no reply"] = missing
    begin = min((r.sent for r in replies), default=0.0)
    seconds = max((r.end for r in replies), default=0.0) - begin
    return {"load": asdict(load), "seconds": seconds, "cpu_seconds": cpu, "tokens": tokens, "good": good, "wrong": wrong,
            "statuses": statuses}  # fmt: skip


if __name__ == "__main__":
    print(json.dumps(measure(Load(**json.loads(sys.argv[1])))))
