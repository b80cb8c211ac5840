"""Reads the requests of a batch and writes the replies, as lines of JSON in OpenAI's format."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

# The routes whose requests a batch may contain.
BATCH_URLS = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/embeddings",
    "/v1/responses",
    "/v1/messages",
    "/v1/score",
    "/score",
    "/v1/rerank",
    "/v2/rerank",
    "/rerank",
)


class BatchLine(NamedTuple):
    """One request of a batch."""

    number: int  # line number, from 1
    custom_id: str
    url: str
    body: bytes  # JSON


class LineError(Exception):
    """A line that is not a valid request. The message gives the reason."""

    def __init__(self, number: int, custom_id: str, message: str):
        super().__init__(message)
        self.number = number
        self.custom_id = custom_id


def read_line(number: int, text: bytes, url: str | None) -> BatchLine:
    """Return the request of a line. With `url`, only requests to this route are accepted."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LineError(number, "", f"the line is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise LineError(number, "", "the line must be a JSON object")
    custom_id = value.get("custom_id")
    if not isinstance(custom_id, str) or not custom_id:
        raise LineError(number, "", "the line must have custom_id, a text")
    if value.get("method", "POST") != "POST":
        raise LineError(number, custom_id, "method must be POST")
    line_url = value.get("url")
    if line_url not in BATCH_URLS or (url is not None and line_url != url):
        allowed = url or ", ".join(BATCH_URLS)
        raise LineError(number, custom_id, f"url must be {allowed}, got {line_url!r:.100}")
    body = value.get("body")
    if not isinstance(body, dict):
        raise LineError(number, custom_id, "body must be an object, the request")
    if body.get("stream"):
        raise LineError(number, custom_id, "a request of a batch cannot be streamed")
    return BatchLine(number, custom_id, line_url, json.dumps(body).encode())


def lines_of(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield the lines of a file that are not empty, numbered from 1."""
    with path.open("rb") as file:
        for number, text in enumerate(file, 1):
            if text.strip():
                yield number, text


def output_line(custom_id: str, status: int, request_id: str, body: bytes) -> bytes:
    """Return the line of a reply, which may be an error."""
    reply = json.loads(body)
    line = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": custom_id,
        "response": {"status_code": status, "request_id": request_id, "body": reply},
        "error": None if status < 400 else reply.get("error", reply),
    }
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def error_line(custom_id: str, code: str, message: str) -> bytes:
    """Return the line of a request that was never sent."""
    line: dict[str, Any] = {
        "id": f"batch_req_{secrets.token_hex(12)}",
        "custom_id": custom_id,
        "response": None,
        "error": {"code": code, "message": message},
    }
    return json.dumps(line, ensure_ascii=False).encode() + b"\n"


def completed_ids(*paths: Path) -> set[str]:
    """Return the custom_id of every complete line. Removes an incomplete last line."""
    ids: set[str] = set()
    for path in paths:
        if not path.exists():
            continue
        complete_bytes = 0
        for _, text in lines_of(path):
            if not text.endswith(b"\n"):
                break
            complete_bytes += len(text)
            ids.add(json.loads(text)["custom_id"])
        with path.open("r+b") as file:
            file.truncate(complete_bytes)
    return ids
