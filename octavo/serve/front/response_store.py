"""Stores responses of the Responses API, so that a request can continue a response by its id.

The store is in the memory of the front process. It is bounded in bytes and in time: the oldest
responses are dropped first, and a restart of the server drops all. Only the key of the client that
created a response gives access to it.
"""

from __future__ import annotations

import asyncio
import time
from collections import OrderedDict
from typing import Any, NamedTuple

import msgspec

from octavo.serve.api.api_errors import ApiError, invalid_field
from octavo.serve.limits import Limits

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder().decode


class StoredResponse(NamedTuple):
    owner: str
    expires: float  # A time of time.monotonic().
    response: bytes
    # The messages up to and including the output, or None if there is no output.
    conversation: bytes


class ResponseStore:
    def __init__(self, limits: Limits):
        self._limits = limits
        self._stored: OrderedDict[str, StoredResponse] = OrderedDict()
        # Responses that are being generated, with their owners. They are not counted, because
        # their requests are limited.
        self._in_progress: dict[str, tuple[str, dict[str, Any]]] = {}
        # The tasks of responses in the background. asyncio itself does not keep them.
        self._tasks: set[asyncio.Task[None]] = set()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._stored)

    def begin(self, id: str, owner: str, response: dict[str, Any]) -> None:
        self._in_progress[id] = owner, response

    def end(self, id: str) -> None:
        """Record that a response is no longer being generated."""
        self._in_progress.pop(id, None)

    def keep_task(self, task: asyncio.Task[None]) -> None:
        """Hold a reference to the task of a background response until the task ends."""
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def add(
        self, owner: str, response: dict[str, Any], conversation: list[dict[str, Any]] | None
    ) -> None:
        """Store a response that has ended, and drop the oldest ones if there is no room.

        A response that failed has no conversation.
        """
        expires = time.monotonic() + self._limits.response_seconds
        entry = StoredResponse(owner, expires, _encode(response), _encode(conversation))
        self._stored[response["id"]] = entry
        self.bytes += size(entry)
        self._drop_old()

    def is_open(self, id: str, owner: str) -> bool:
        """Return whether the owner's response is being generated."""
        return id in self._in_progress and self._in_progress[id][0] == owner

    def response(self, id: str, owner: str) -> dict[str, Any]:
        """Return a response. Raises ApiError if there is none with this id."""
        if self.is_open(id, owner):
            return self._in_progress[id][1]
        response: dict[str, Any] = _decode(self._find(id, owner).response)
        return response

    def conversation(self, id: str, owner: str) -> list[dict[str, Any]]:
        """Return the conversation up to and including a response.

        Raises ApiError if there is no such response, or if it has no output.
        """
        if self.is_open(id, owner):
            raise invalid_field(
                "previous_response_id",
                "the previous response is not complete: wait until it ends",
                "response_in_progress",
            )
        messages: list[dict[str, Any]] | None = _decode(
            self._find(id, owner, "previous_response_id").conversation
        )
        if messages is None:
            raise invalid_field(
                "previous_response_id",
                "the previous response failed or was cancelled, so it has no output to continue",
                "response_failed",
            )
        return messages

    def delete(self, id: str, owner: str) -> None:
        if self.is_open(id, owner):
            raise invalid_field(
                "id",
                "the response is not complete: cancel it, or wait until it ends",
                "response_in_progress",
            )
        self._find(id, owner)
        self._remove(id)

    def _find(self, id: str, owner: str, param: str | None = None) -> StoredResponse:
        self._drop_old()
        entry = self._stored.get(id)
        if entry is None or entry.owner != owner:
            raise ApiError(
                404,
                f"Response with id {id!r:.80} not found. It was created with store false, was "
                f"deleted, is older than {self._limits.response_seconds:g} s, or was dropped to "
                "make room; send the whole conversation as input",
                "response_not_found",
                param,
            )
        return entry

    def _drop_old(self) -> None:
        now = time.monotonic()
        while self._stored:
            id, entry = next(iter(self._stored.items()))
            if self.bytes <= self._limits.response_bytes and entry.expires > now:
                return
            self._remove(id)

    def _remove(self, id: str) -> None:
        self.bytes -= size(self._stored.pop(id))


def size(entry: StoredResponse) -> int:
    """Return the bytes of an entry, with an estimate of the objects around them."""
    return len(entry.response) + len(entry.conversation) + 512
