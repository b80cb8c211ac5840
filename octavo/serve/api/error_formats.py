"""Errors in the format of the API to which the request was sent: replies and ends of streams."""

from __future__ import annotations

import msgspec

from octavo.serve.api import anthropic_messages, ollama_api, openai_responses
from octavo.serve.api.api_errors import ApiError
from octavo.serve.api.replies import DONE, event


def encode_error(error: ApiError, path: str, request_id: str) -> bytes:
    """Return the body of the reply. The path may belong to no route."""
    if path.startswith("/v1/messages"):
        return msgspec.json.encode(anthropic_messages.error_body(error, request_id))
    if path.startswith("/api/"):
        return msgspec.json.encode(ollama_api.error_body(error))
    return error.encode()


def encode_stream_error(error: ApiError, path: str, request_id: str, events: int) -> bytes:
    """Return the end of a stream that has begun and has had this many events."""
    if path.startswith("/v1/messages"):
        body = anthropic_messages.error_body(error, request_id)
        return anthropic_messages.sse("error", body)
    if path.startswith("/v1/responses"):
        return openai_responses.error_event(error, events)
    if path.startswith("/api/"):
        return ollama_api.encode_line(ollama_api.error_body(error))
    return event(error.encode()) + DONE
