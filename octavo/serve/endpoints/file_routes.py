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
DEFAULT_PAGE = 20  # A list has this many entries, unless the client asks for another number.
MAX_PAGE = 1000
WRITE_BYTES = 2**20  # A body is written to disk in parts of this size.
SEND_BYTES = 2**18  # A file is sent in parts of this size.

# ---- files -------------------------------------------------------------------------------------


async def upload(exchange: Exchange) -> None:
    """Store the file of a form, as OpenAI's clients send it."""
    front = exchange.front
    boundary = boundary_of(exchange.scope["octavo.headers"])
    form_path = front.files.new_path("upload")
    content_path = front.files.new_path("upload")
    try:
        await save_body(exchange, form_path)
        fields = await asyncio.to_thread(read_parts, form_path, boundary)
        file = fields.get("file")
        purpose = ""
        if "purpose" in fields:
            purpose = await asyncio.to_thread(fields["purpose"].text, form_path)
        if file is None or file.filename is None:
            raise invalid_field("file", "the form must have the field file, with a file")
        if purpose not in PURPOSES:
            raise invalid_field("purpose", f"purpose must be one of {', '.join(PURPOSES)}")
        await asyncio.to_thread(file.copy, form_path, content_path)
        record = front.files.adopt(content_path, exchange.caller.owner, file.filename, purpose)
    finally:
        for path in (form_path, content_path):
            path.unlink(missing_ok=True)
    await exchange.reply(record.describe())


async def save_body(exchange: Exchange, path: Path) -> None:
    """Write the body of a request to a file, within the limits."""
    limits = exchange.front.config.limits
    received = 0
    buffer = bytearray()
    with path.open("wb") as file:
        async for chunk in exchange.parts():
            received += len(chunk)
            if received > limits.upload_bytes:
                raise ApiError(
                    413,
                    f"an upload can have at most {limits.upload_bytes} bytes: split the file",
                    "body_too_large",
                )
            buffer += chunk
            if len(buffer) >= WRITE_BYTES:
                exchange.front.files.check_room(received)
                await asyncio.to_thread(file.write, bytes(buffer))
                buffer.clear()
        exchange.front.files.check_room(received)
        await asyncio.to_thread(file.write, bytes(buffer))


async def list_files(exchange: Exchange) -> None:
    query = query_of(exchange)
    records = exchange.front.files.owned(exchange.caller.owner, query.get("purpose"))
    await exchange.reply(page([record.describe() for record in records], query))


async def retrieve_file(exchange: Exchange) -> None:
    record = exchange.front.files.find(exchange.path["id"], exchange.caller.owner)
    await exchange.reply(record.describe())


async def file_content(exchange: Exchange) -> None:
    front = exchange.front
    record = front.files.find(exchange.path["id"], exchange.caller.owner)
    with front.files.content_path(record.id).open("rb") as file:
        await exchange.start_reply("application/octet-stream", record.bytes)
        remaining = record.bytes
        while remaining > 0:
            chunk = await asyncio.to_thread(file.read, min(SEND_BYTES, remaining))
            remaining -= len(chunk)
            if not chunk:  # Another program has shortened the file.
                raise ApiError(500, "the file is shorter than its record says", "file_damaged")
            await exchange.write(chunk, last=remaining == 0)
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
    await exchange.reply(batch.describe(), headers)


async def list_batches(exchange: Exchange) -> None:
    batches = exchange.front.batches.owned(exchange.caller.owner)
    await exchange.reply(page([batch.describe() for batch in batches], query_of(exchange)))


async def retrieve_batch(exchange: Exchange) -> None:
    batch = exchange.front.batches.find(exchange.path["id"], exchange.caller.owner)
    await exchange.reply(batch.describe())


async def cancel_batch(exchange: Exchange) -> None:
    batch = exchange.front.batches.find(exchange.path["id"], exchange.caller.owner)
    runner_of(exchange).cancel(batch)
    await exchange.reply(batch.describe())


def runner_of(exchange: Exchange) -> BatchStarter:
    runner = exchange.front.batch_runner
    if runner is None:
        raise ApiError(
            501, "this server runs no batches: start it without Ray", "batches_not_supported"
        )
    return runner


# ---- lists -------------------------------------------------------------------------------------


def query_of(exchange: Exchange) -> dict[str, str]:
    parameters = parse_qs(
        exchange.scope.get("query_string", b"").decode("latin-1"), max_num_fields=16
    )
    return {name: values[0] for name, values in parameters.items()}


def page(entries: list[dict[str, Any]], query: dict[str, str]) -> dict[str, Any]:
    """Return a page of a list. The query may have limit, after and order."""
    if query.get("order") == "asc":
        entries = entries[::-1]
    limit = query.get("limit", str(DEFAULT_PAGE))
    if not limit.isascii() or not limit.isdigit() or not 1 <= int(limit) <= MAX_PAGE:
        raise invalid_field("limit", f"limit must be a number in [1, {MAX_PAGE}]")
    start = 0
    if "after" in query:
        indices = [index for index, entry in enumerate(entries) if entry["id"] == query["after"]]
        if not indices:
            raise invalid_field("after", "the list has no entry with the id of after")
        start = indices[0] + 1
    shown_entries = entries[start : start + int(limit)]
    return {
        "object": "list",
        "data": shown_entries,
        "first_id": shown_entries[0]["id"] if shown_entries else None,
        "last_id": shown_entries[-1]["id"] if shown_entries else None,
        "has_more": start + len(shown_entries) < len(entries),
    }
