"""Stores uploaded files and the output of batches in a directory, within a limit.

A file has two parts: its content and a record with its name, purpose and owner. If no directory is
given, the store uses a temporary one and removes it at the end. Calls may block on the disk, so the
event loop calls them in threads.
"""

from __future__ import annotations

import re
import secrets
import shutil
import tempfile
import time
from pathlib import Path

import msgspec

from octavo.serve.api.api_errors import ApiError
from octavo.serve.limits import Limits

FILE_ID = re.compile(r"file-[0-9a-f]{24}")


class StoredFile(msgspec.Struct):
    """The record of a file. The names are those of OpenAI's file object, except the owner."""

    id: str
    owner: str
    filename: str
    purpose: str
    bytes: int
    created_at: int

    def describe(self) -> dict[str, object]:
        """Return the file object that clients receive."""
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name != "owner"}
        return {"object": "file", **fields, "status": "processed", "expires_at": None}


class FileStore:
    def __init__(self, directory: str | None, limits: Limits):
        self._limits = limits
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self.files: dict[str, StoredFile] = {}
        self.is_kept = directory is not None  # True means that the files outlive the server.
        if directory is None:
            return
        self._directory = Path(directory).expanduser()
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        for path in sorted(self.directory.glob("file-*.json")):
            record = msgspec.json.decode(path.read_bytes(), type=StoredFile)
            self.files[record.id] = record
        for path in self.directory.glob("upload-*"):  # A server that was killed has left them.
            path.unlink(missing_ok=True)

    @property
    def directory(self) -> Path:
        """The directory of the files. A temporary directory is made when it is first needed."""
        if not self.is_kept and self._temporary is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="octavo-files-")
            self._directory = Path(self._temporary.name)
        return self._directory

    def close(self) -> None:
        if self._temporary is not None:
            self._temporary.cleanup()

    @property
    def used_bytes(self) -> int:
        return sum(record.bytes for record in self.files.values())

    def check_room(self, num_bytes: int) -> None:
        """Raise ApiError if the store has no room for `num_bytes` more bytes."""
        limit = self._limits.file_bytes
        if self.used_bytes + num_bytes > limit:
            raise ApiError(
                413,
                f"the server stores at most {limit} bytes of files, and {self.used_bytes} are "
                "used: delete files that you no longer need",
                "file_storage_full",
            )

    def new_path(self, kind: str) -> Path:
        """Return a path for content that is being written."""
        return self.directory / f"{kind}-{secrets.token_hex(12)}"

    def content_path(self, id: str) -> Path:
        return self.directory / f"{id}.content"

    def adopt(self, path: Path, owner: str, filename: str, purpose: str) -> StoredFile:
        """Turn content that was written to a path of new_path() into a file."""
        num_bytes = path.stat().st_size
        self.check_room(num_bytes)
        id = f"file-{secrets.token_hex(12)}"
        record = StoredFile(id, owner, filename[:256], purpose, num_bytes, int(time.time()))
        shutil.move(path, self.content_path(id))
        write_atomically(self.directory / f"{id}.json", msgspec.json.encode(record))
        self.files[id] = record
        return record

    def find(self, id: str, owner: str, param: str = "id") -> StoredFile:
        record = self.files.get(id) if FILE_ID.fullmatch(id) else None
        if record is None or record.owner != owner:
            raise ApiError(404, "this server has no file with this id", "file_not_found", param)
        return record

    def owned(self, owner: str, purpose: str | None = None) -> list[StoredFile]:
        """Return the files of an owner, the newest first."""
        records = [record for record in self.files.values() if record.owner == owner]
        if purpose is not None:
            records = [record for record in records if record.purpose == purpose]
        return sorted(records, key=lambda record: (record.created_at, record.id), reverse=True)

    def delete(self, id: str, owner: str) -> None:
        self.find(id, owner)
        del self.files[id]
        (self.directory / f"{id}.json").unlink(missing_ok=True)
        self.content_path(id).unlink(missing_ok=True)


def write_atomically(path: Path, data: bytes) -> None:
    """Write a file so that a reader finds the old content or the new one, and never a part."""
    partial = path.with_suffix(".partial")
    partial.write_bytes(data)
    partial.replace(path)
