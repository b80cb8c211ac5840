"""Reads and parses the body of a request, within a time limit and a memory limit.

with memory.reserve(address) as reservation:   # The bytes are counted until the block ends.
    data = await read(headers, receive, received, limits, reservation)
    request, unknown = await decode(pool, data, kind, limits)

A body that breaks a rule is refused as early as possible.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.types import Receive

from octavo.serve.api.api_errors import ApiError
from octavo.serve.api.parse import Bytes, is_quick, read_request
from octavo.serve.channel.jobs import Parse, ParseMessage
from octavo.serve.front.body_memory import BodyReservation
from octavo.serve.front.worker_pool import WorkerPool
from octavo.serve.limits import Limits

T = TypeVar("T", bound=msgspec.Struct)
# The rest of a refused body is read and discarded for this many seconds. Many clients read the
# reply only after they have sent the whole body.
DISCARD_SECONDS = 0.5
HEAVY = 256 * 2**10  # A body with more bytes is a heavy job for a worker process.


# ---- bytes ---------------------------------------------------------------------------------------


async def read(
    headers: Mapping[bytes, bytes],
    receive: Receive,
    received: bytes | None,
    limits: Limits,
    reservation: BodyReservation,
    any_type: bool = False,
) -> Bytes:
    """Return the body. `received` is the whole body if it has already arrived, and otherwise None.
    With `any_type` its Content-Type does not matter."""
    check_headers(headers, any_type)
    if received is None:
        return await _receive_all(headers, receive, limits, reservation)
    if len(received) > limits.body_bytes:
        raise too_large(limits)
    refusal = reservation.resize(len(received))
    if refusal is not None:
        raise refusal
    return received


def check_headers(headers: Mapping[bytes, bytes], any_type: bool = False) -> None:
    content_type = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    if not any_type and content_type != b"application/json":
        raise ApiError(
            415,
            "the body must be JSON: send the header Content-Type: application/json",
            "unsupported_media_type",
        )
    if headers.get(b"content-encoding", b"identity").strip().lower() != b"identity":
        raise ApiError(
            415,
            "compressed bodies are not supported: send the JSON without Content-Encoding",
            "unsupported_media_type",
        )


def too_large(limits: Limits) -> ApiError:
    return ApiError(413, f"the body is larger than {limits.body_bytes} bytes", "body_too_large")


async def _receive_all(
    headers: Mapping[bytes, bytes], receive: Receive, limits: Limits, reservation: BodyReservation
) -> bytearray:
    length = headers.get(b"content-length", b"0")
    stream = _stream(receive)
    if not length.isdigit() or int(length) > limits.body_bytes:
        if b"expect" not in headers:
            await _discard(stream, 8 * limits.body_bytes)
        raise too_large(limits)
    # The buffer grows in place. Many small buffers would fragment the heap.
    data = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for part in stream:
                size = len(data) + len(part)
                refusal = (
                    too_large(limits) if size > limits.body_bytes else reservation.resize(size)
                )
                if refusal is not None:
                    data.clear()
                    reservation.release()
                    await _discard(stream, 8 * limits.body_bytes)
                    raise refusal
                data += part
    except TimeoutError:
        raise ApiError(
            408, f"the body did not arrive within {limits.body_seconds:g} s", "body_timeout"
        ) from None
    return data


async def _stream(receive: Receive) -> AsyncIterator[bytes]:
    has_more = True
    while has_more:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise ApiError(499, "the client has disconnected", "client_gone")
        has_more = message["more_body"]
        yield message["body"]


async def _discard(stream: AsyncIterator[bytes], limit: int) -> None:
    try:
        async with asyncio.timeout(DISCARD_SECONDS):
            async for part in stream:
                limit -= len(part)
                if limit < 0:
                    return
    except (TimeoutError, ApiError):
        return


# ---- parsing -------------------------------------------------------------------------------------


async def decode(
    pool: WorkerPool, data: Bytes, kind: type[T], limits: Limits
) -> tuple[T, dict[str, Any]]:
    """Parse a body as `parse.read_request` does, in a worker process if it is large."""
    if is_quick(data):
        return read_request(data, kind, limits)
    return await parse_in_worker(pool, Parse(kind.__name__), data, kind)


async def parse_in_worker(
    pool: WorkerPool, job: Parse | ParseMessage, data: Bytes, kind: type[T]
) -> tuple[T, dict[str, Any]]:
    """Parse the data in a worker process, and return a `kind` and its unknown fields."""
    result_type: Any = tuple[kind, dict[str, Any]]  # type: ignore[valid-type]
    result: tuple[T, dict[str, Any]] = await pool.run(
        job, result_type, payload=data, heavy=len(data) > HEAVY
    )
    return result
