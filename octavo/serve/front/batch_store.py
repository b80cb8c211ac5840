"""Stores batches beside the files of the server, so that a restarted server continues them.

A batch has a record, and two files that grow while it runs: one has a line for each reply, and the
other a line for each error. A restarted server reads from them which requests are done.
"""

from __future__ import annotations

import re
import secrets
import time
from pathlib import Path
from typing import Any

import msgspec

from octavo.serve.api.api_errors import ApiError
from octavo.serve.front.file_store import FileStore, write_atomically

BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
OPEN_STATUSES = ("validating", "in_progress", "finalizing", "cancelling")
WINDOW_SECONDS = 24 * 3600


class StoredBatch(msgspec.Struct):
    """The record of a batch. The names are those of OpenAI's batch object, except the owner."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    completion_window: str = "24h"
    status: str = "validating"
    metadata: dict[str, str] | None = None
    errors: dict[str, Any] | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    total: int = 0
    completed: int = 0
    failed: int = 0

    @property
    def is_open(self) -> bool:
        return self.status in OPEN_STATUSES

    def describe(self) -> dict[str, object]:
        """Return the batch object that clients receive."""
        hidden = ("owner", "total", "completed", "failed")
        fields = {
            name: getattr(self, name) for name in self.__struct_fields__ if name not in hidden
        }
        counts = {"total": self.total, "completed": self.completed, "failed": self.failed}
        return {"object": "batch", **fields, "request_counts": counts}

    def move(self, status: str) -> None:
        """Change the status, and record the time of the change."""
        self.status = status
        name = f"{status}_at"
        if name in self.__struct_fields__:
            setattr(self, name, int(time.time()))

    def refuse(self, code: str, message: str, line: int | None = None) -> None:
        """End a batch that cannot run."""
        entry = {"code": code, "message": message, "param": None, "line": line}
        self.errors = {"object": "list", "data": [entry]}
        self.move("failed")


class BatchStore:
    def __init__(self, files: FileStore):
        self.files = files
        self.batches: dict[str, StoredBatch] = {}
        for path in sorted(files.directory.glob("batch_*.json")) if files.is_kept else ():
            batch = msgspec.json.decode(path.read_bytes(), type=StoredBatch)
            self.batches[batch.id] = batch

    def new(
        self, owner: str, endpoint: str, input_file_id: str, metadata: dict[str, str] | None
    ) -> StoredBatch:
        now = int(time.time())
        id = f"batch_{secrets.token_hex(12)}"
        expires = now + WINDOW_SECONDS
        batch = StoredBatch(id, owner, endpoint, input_file_id, now, expires, metadata=metadata)
        self.batches[id] = batch
        return batch

    def save(self, batch: StoredBatch) -> None:
        write_atomically(self.files.directory / f"{batch.id}.json", msgspec.json.encode(batch))

    def find(self, id: str, owner: str) -> StoredBatch:
        batch = self.batches.get(id) if BATCH_ID.fullmatch(id) else None
        if batch is None or batch.owner != owner:
            raise ApiError(404, "this server has no batch with this id", "batch_not_found", "id")
        return batch

    def owned(self, owner: str) -> list[StoredBatch]:
        """Return the batches of an owner, the newest first."""
        batches = [batch for batch in self.batches.values() if batch.owner == owner]
        return sorted(batches, key=lambda batch: (batch.created_at, batch.id), reverse=True)

    def lines_path(self, batch: StoredBatch, kind: str) -> Path:
        """Return the file that collects the "output" or the "error" lines."""
        return self.files.directory / f"{batch.id}.{kind}"

    def drop_old(self, limit: int) -> None:
        """Remove the oldest batches that have ended, until at most `limit` batches remain."""
        ended = [batch for batch in self.batches.values() if not batch.is_open]
        ended.sort(key=lambda batch: batch.created_at)
        for batch in ended[: max(len(self.batches) - limit, 0)]:
            del self.batches[batch.id]
            (self.files.directory / f"{batch.id}.json").unlink(missing_ok=True)
