"""Sends requests to a server by one transport, as a program. It prints its result as JSON.

    echo '{"transport": "grpc", ...}' | python -m octavo.bench.transport_client

    http, http stream   POST /v1/completions (http_load.py)
    websocket           /ws/generate, with one connection for each client
    grpc, grpc stream   Generate and GenerateStream

A request counts if all of its tokens arrived. This module imports nothing of the server, so it
encodes and decodes the few fields of the gRPC messages itself.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from octavo.bench.http_load import Load
from octavo.bench.http_load import measure as measure_http

SERVICE = "/octavo.v1.InferenceService"


@dataclass
class TransportLoad:
    transport: str
    host: str
    port: int
    grpc_port: int
    clients: int
    requests: int
    tokens: int
    prompt: str
    model: str | None = None


@dataclass
class CallTimes:
    """Seconds since a request was sent."""

    first: float  # time until its first text
    total: float


Call = Callable[[], Awaitable[CallTimes]]


# ---- messages of gRPC ----------------------------------------------------------------------------


def varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def grpc_request(load: TransportLoad) -> bytes:
    """GenerateRequest: prompt = 1, max_new_tokens = 2, ignore_eos = 8."""
    text = load.prompt.encode()
    fields = b"\x0a" + varint(len(text)) + text
    fields += b"\x10" + varint(load.tokens)
    return fields + b"\x40\x01"


def tokens_generated(message: bytes) -> int:
    """Return field 2 of GenerateResponse or GenerateStreamResponse."""
    position = 0
    while position < len(message):
        key, position = read_varint(message, position)
        field, kind = key >> 3, key & 7
        if kind == 0:
            value, position = read_varint(message, position)
            if field == 2:
                return value
        elif kind == 2:
            length, position = read_varint(message, position)
            position += length
        else:
            position += 4 if kind == 5 else 8
    return 0


def read_varint(message: bytes, position: int) -> tuple[int, int]:
    value = 0
    shift = 0
    while True:
        byte = message[position]
        position += 1
        value |= (byte & 0x7F) << shift
        shift += 7
        if byte < 0x80:
            return value, position


# ---- transports ----------------------------------------------------------------------------------


def check_tokens(received: int, load: TransportLoad) -> None:
    if received != load.tokens:
        raise ValueError(f"{received} tokens instead of {load.tokens}")


async def grpc_calls(load: TransportLoad, stream: bool) -> AsyncIterator[Call]:
    import grpc

    request = grpc_request(load)
    async with grpc.aio.insecure_channel(f"{load.host}:{load.grpc_port}") as channel:
        unary = channel.unary_unary(f"{SERVICE}/Generate")
        streaming = channel.unary_stream(f"{SERVICE}/GenerateStream")

        async def call() -> CallTimes:
            start = time.perf_counter()
            reply = await unary(request)
            total = time.perf_counter() - start
            check_tokens(tokens_generated(reply), load)
            return CallTimes(total, total)

        async def call_stream() -> CallTimes:
            start = time.perf_counter()
            first = 0.0
            count = 0
            async for message in streaming(request):
                first = first or time.perf_counter() - start
                count = tokens_generated(message)
            total = time.perf_counter() - start
            check_tokens(count, load)
            return CallTimes(first, total)

        while True:
            yield call_stream if stream else call


async def websocket_calls(load: TransportLoad) -> AsyncIterator[Call]:
    from websockets.asyncio.client import connect

    fields = {"prompt": load.prompt, "max_new_tokens": load.tokens, "ignore_eos": True}
    request = json.dumps(fields)
    connections = [
        await connect(f"ws://{load.host}:{load.port}/ws/generate", compression=None)
        for _ in range(load.clients)
    ]

    def call_on(connection: Any) -> Call:
        async def call() -> CallTimes:
            start = time.perf_counter()
            await connection.send(request)
            first = 0.0
            while True:
                message = json.loads(await connection.recv())
                first = first or time.perf_counter() - start
                if "error" in message:
                    raise ValueError(str(message["error"])[:100])
                if message["type"] == "done":
                    break
            check_tokens(message["usage"]["completion_tokens"], load)
            return CallTimes(first, time.perf_counter() - start)

        return call

    for connection in connections:
        yield call_on(connection)


async def run_calls(load: TransportLoad) -> dict[str, Any]:
    """Let each client send its part of the requests, one after another."""
    calls = websocket_calls(load)
    if load.transport.startswith("grpc"):
        calls = grpc_calls(load, stream=load.transport.endswith("stream"))
    times: list[CallTimes] = []
    problems: dict[str, int] = {}

    async def client(call: Call, count: int) -> None:
        for _ in range(count):
            try:
                times.append(await call())
            except Exception as error:  # libraries raise anything
                name = f"{type(error).__name__}: {error}"[:200]
                problems[name] = problems.get(name, 0) + 1

    client_calls = [await anext(calls) for _ in range(load.clients)]
    share = -(-load.requests // load.clients)
    start = time.perf_counter()
    await asyncio.gather(*(client(call, share) for call in client_calls))
    seconds = time.perf_counter() - start
    await calls.aclose()  # type: ignore[attr-defined]
    return {
        "seconds": seconds,
        "good": len(times),
        "first": [call_times.first for call_times in times],
        "total": [call_times.total for call_times in times],
        "wrong": problems,
    }


def run_http(load: TransportLoad) -> dict[str, Any]:
    result = measure_http(
        Load(
            port=load.port,
            host=load.host,
            clients=load.clients,
            requests=load.requests,
            tokens=load.tokens,
            prompt=load.prompt,
            model=load.model,
            stream=load.transport == "http stream",
        )
    )
    return {
        "seconds": result["seconds"],
        "good": len(result["good"]),
        "first": [first - sent for _, sent, first, _ in result["good"]],
        "total": [end - sent for _, sent, _, end in result["good"]],
        "wrong": result["wrong"],
    }


def measure(load: TransportLoad) -> dict[str, Any]:
    start = time.process_time()
    if load.transport.startswith("http"):
        result = run_http(load)
    else:
        result = asyncio.run(run_calls(load))
    return result | {"client_cpu_seconds": time.process_time() - start}


if __name__ == "__main__":
    print(json.dumps(measure(TransportLoad(**json.load(sys.stdin)))))
