"""The routes of files and batches: /v1/files and /v1/batches."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

from octavo.serve.api import validate
from octavo.serve.api.api_errors import ApiError, invalid_field
from octavo.serve.api.batch_lines import BATCH_URLS
from octavo.serve.api.multipart import boundary_of, read_parts
from octavo.serve.api.openai_responses import check_metadata
from octavo.serve.api.protocol import BatchRequest
from octavo.serve.front.front import BatchStarter
from octavo.serve.http.exchange import Exchange

PURPOSES = ("batch", "user_data")
PAGE = 20  # The entries of a list, unless the client asks for more.
MOST = 100
WRITE_BYTES = 2**20  # A body is written to disk in parts of this size.
SEND_BYTES = 2**18  # A file is sent in parts of this size.

# ---- files -------------------------------------------------------------------------------------


async def upload(exchange: Exchange) -> None:
    """Store the file of a form, as OpenAI's clients send it."""
    front = exchange.front
    boundary = boundary_of(exchange.scope["octavo.headers"])
    path = front.files.new_path("upload")
    content = front.files.new_path("upload")
    try:
        await receive_to(exchange, path)
        parts = await asyncio.to_thread(read_parts, path, boundary)
        file = parts.get("file")
        purpose = await asyncio.to_thread(parts["purpose"].text, path) if "purpose" in parts else ""
        if file is None or file.filename is None:
            raise invalid_field("file", "the form must have the field file, with a file")
        if purpose not in PURPOSES:
            raise invalid_field("purpose", f"purpose must be one of {', '.join(PURPOSES)}")
        await asyncio.to_thread(file.copy, path, content)
        record = front.files.adopt(content, exchange.caller.owner, file.filename, purpose)
    finally:
        for leftover in (path, content):
            leftover.unlink(missing_ok=True)
    await exchange.reply(record.shown())


async def receive_to(exchange: Exchange, path: Path) -> None:
    """Write the body of a request to a file, within the limits."""
    limits = exchange.front.config.limits
    received = 0
    buffer = bytearray()
    with path.open("wb") as file:
        async for part in exchange.parts():
            received += len(part)
            if received > limits.upload_bytes:
                raise ApiError(
                    413,
                    f"an upload can have at most {limits.upload_bytes} bytes: split the file",
                    "body_too_large",
                )
            buffer += part
            if len(buffer) >= WRITE_BYTES:
                exchange.front.files.check_room(received)
                await asyncio.to_thread(file.write, bytes(buffer))
                buffer.clear()
        exchange.front.files.check_room(received)
        await asyncio.to_thread(file.write, bytes(buffer))


async def list_files(exchange: Exchange) -> None:
    query = query_of(exchange)
    found = exchange.front.files.owned(exchange.caller.owner, query.get("purpose"))
    await exchange.reply(page([record.shown() for record in found], query))


async def retrieve_file(exchange: Exchange) -> None:
    record = exchange.front.files.find(exchange.path["id"], exchange.caller.owner)
    await exchange.reply(record.shown())


async def file_content(exchange: Exchange) -> None:
    front = exchange.front
    record = front.files.find(exchange.path["id"], exchange.caller.owner)
    with front.files.content_path(record.id).open("rb") as file:
        await exchange.start_reply("application/octet-stream", record.bytes)
        left = record.bytes
        while left > 0:
            data = await asyncio.to_thread(file.read, min(SEND_BYTES, left))
            left -= len(data)
            if not data:  # Somebody else has shortened the file.
                raise ApiError(500, "the file is shorter than its record says", "file_damaged")
            await exchange.write(data, last=left == 0)
    if not record.bytes:
        await exchange.write(b"", last=True)


async def delete_file(exchange: Exchange) -> None:
    front = exchange.front
    id = exchange.path["id"]
    owner = exchange.caller.owner
    front.files.find(id, owner)
    users = [batch for batch in front.batches.owned(owner) if batch.input_file_id == id]
    if any(batch.is_open for batch in users):
        raise invalid_field("id", "a batch reads this file: cancel the batch first", "file_in_use")
    front.files.delete(id, owner)
    await exchange.reply({"id": id, "object": "file", "deleted": True})


# ---- batches -----------------------------------------------------------------------------------


async def create_batch(exchange: Exchange) -> None:
    front = exchange.front
    owner = exchange.caller.owner
    body, unknown = await exchange.body(BatchRequest)
    headers = validate.check_fields(front, unknown)
    if body.endpoint not in BATCH_URLS:
        raise invalid_field("endpoint", f"endpoint must be one of {', '.join(BATCH_URLS)}")
    if body.completion_window not in (None, "24h"):
        raise invalid_field("completion_window", "completion_window must be 24h")
    if body.input_file_id is None:
        raise invalid_field("input_file_id", "input_file_id is missing: upload a file first")
    record = front.files.find(body.input_file_id, owner, "input_file_id")
    check_metadata(body.metadata)
    limits = front.config.limits
    if sum(batch.is_open for batch in front.batches.batches.values()) >= limits.batches:
        raise ApiError(
            429,
            f"the server has {limits.batches} unfinished batches: try again later",
            "too_many_batches",
            retry_after=60.0,
        )
    front.batches.drop_old(limits.batches_kept)
    batch = front.batches.new(owner, body.endpoint, record.id, body.metadata)
    front.batches.save(batch)
    runner_of(exchange).wake()
    await exchange.reply(batch.shown(), headers)


async def list_batches(exchange: Exchange) -> None:
    found = exchange.front.batches.owned(exchange.caller.owner)
    await exchange.reply(page([batch.shown() for batch in found], query_of(exchange)))


async def retrieve_batch(exchange: Exchange) -> None:
    batch = exchange.front.batches.find(exchange.path["id"], exchange.caller.owner)
    await exchange.reply(batch.shown())


async def cancel_batch(exchange: Exchange) -> None:
    batch = exchange.front.batches.find(exchange.path["id"], exchange.caller.owner)
    runner_of(exchange).cancel(batch)
    await exchange.reply(batch.shown())


def runner_of(exchange: Exchange) -> BatchStarter:
    runner = exchange.front.batch_runner
    if runner is None:
        raise ApiError(
            501, "this server runs no batches: start it without Ray", "batches_not_supported"
        )
    return runner


# ---- lists -------------------------------------------------------------------------------------


def query_of(exchange: Exchange) -> dict[str, str]:
    given = parse_qs(exchange.scope.get("query_string", b"").decode("latin-1"), max_num_fields=16)
    return {name: values[0] for name, values in given.items()}


def page(entries: list[dict[str, Any]], query: dict[str, str]) -> dict[str, Any]:
    """Return a page of a list. The query may have limit, after and order."""
    if query.get("order") == "asc":
        entries = entries[::-1]
    limit = query.get("limit", str(PAGE))
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit) <= 10 * MOST:
        raise invalid_field("limit", f"limit must be a number in [1, {10 * MOST}]")
    first = 0
    if "after" in query:
        places = [i for i, entry in enumerate(entries) if entry["id"] == query["after"]]
        if not places:
            raise invalid_field("after", "the list has no entry with the id of after")
        first = places[0] + 1
    shown = entries[first : first + int(limit)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0]["id"] if shown else None,
        "last_id": shown[-1]["id"] if shown else None,
        "has_more": first + len(shown) < len(entries),
    }
