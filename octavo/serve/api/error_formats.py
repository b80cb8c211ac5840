"""The JSON of an error in the format of the API to which the request was sent."""

from __future__ import annotations

import msgspec

from octavo.serve.api import anthropic_messages, ollama_api
from octavo.serve.api.api_errors import ApiError


def encode_error(error: ApiError, path: str, request_id: str) -> bytes:
    """Return the body of the reply. The path may belong to no route."""
    if path.startswith("/v1/messages"):
        return msgspec.json.encode(anthropic_messages.error_body(error, request_id))
    if path.startswith("/api/"):
        return msgspec.json.encode(ollama_api.error_body(error))
    return error.encode()
