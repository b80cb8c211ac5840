"""Facts about the replicas' routes that the endpoint needs.

This module must not import Ray.
"""

from __future__ import annotations

import re

import msgspec

from octavo.serve.api.api_errors import ApiError

# Requests of these paths run the model, so the limits of an API key apply to them, and the router
# looks for their prompts. tests/ray_serve/test_endpoint.py compares the list with the handlers.
GENERATES = frozenset(
    {
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/completions",
        "/v1/messages",
        "/v1/responses",
        "/v1/embeddings",
        "/v1/rerank",
        "/v1/score",
        "/v2/rerank",
        "/api/chat",
        "/api/generate",
        "/api/embed",
        "/api/embeddings",
        "/inference/v1/generate",
        "/invocations",
        "/pooling",
        "/rerank",
        "/score",
        "/generate",
        "/batch_generate",
    }
)
PROBES = frozenset({"/readyz", "/startupz", "/health", "/ping"})
CANCEL = re.compile(r"/v1/requests/([^/]+)/cancel")
# These routes read or change the state of one server. A client would reach any replica.
NOT_SERVED = re.compile(
    r"/v1/(files|batches)(/.*)?|/live/.*"
    r"|/sleep|/wake_up|/is_sleeping|/flush_cache|/reset_prefix_cache"
)
STORED_RESPONSE = re.compile(r"/v1/responses/resp_([^/]+)(/cancel)?")
RESPONSE_ID = re.compile(r"resp_(\w+)")


class ContinuedResponse(msgspec.Struct):
    """The field of a request that continues a stored response."""

    previous_response_id: str | None = None


_decode_continued = msgspec.json.Decoder(ContinuedResponse).decode


def not_served() -> ApiError:
    return ApiError(
        404,
        "this route belongs to one server and is not served with --ray: use a server without --ray",
        "not_found",
    )


def earlier_request(path: str, body: bytes) -> str | None:
    """Return the id of the earlier request whose replica must get this one, or None.

    Only the replica of a request can cancel it, and has its response.
    """
    cancel = CANCEL.fullmatch(path)
    if cancel is not None:
        return cancel[1]
    stored = STORED_RESPONSE.fullmatch(path)
    if stored is not None:
        return f"req_{stored[1]}"
    if path != "/v1/responses" or b"previous_response_id" not in body:
        return None
    try:
        continued = RESPONSE_ID.fullmatch(_decode_continued(body).previous_response_id or "")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None  # The replica that gets the request replies with the error.
    return None if continued is None else f"req_{continued[1]}"
