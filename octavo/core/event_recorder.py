"""Writes an event stream to a file of bounded size, for `octavo replay`.

A full file is renamed to FILE.1, which replaces an earlier FILE.1, and a new file begins with a
snapshot. The two files hold the latest events. Lines are appended, so that an engine process that
replaces another continues its recording.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path

from octavo.errors import InvalidRequest

log = logging.getLogger(__name__)
MAX_BYTES = 256 * 2**20  # limit of each of the two files; a million events take about 60 MiB


class EventRecorder:
    """A sink of an event stream (octavo/core/event_stream.py)."""

    def __init__(self, path: str | Path, max_bytes: int = MAX_BYTES):
        self.path = Path(path)
        self.max_bytes = max_bytes
        self.failed = False
        try:
            self._open()
        except OSError as error:
            raise InvalidRequest(
                f"events cannot be written to {path} ({error.strerror}): name a file in a folder "
                "that exists and can be written to",
                "record_events",
            ) from None

    def _open(self) -> None:
        self.file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        self.size = self.file.tell()

    def __call__(self, data: bytes, is_start: bool) -> None:
        if self.failed:
            return
        try:
            if is_start and self.size >= self.max_bytes:
                self.file.close()
                os.replace(self.path, previous_part(self.path))
                self._open()
            self.size += self.file.write(data)
        except OSError as error:
            log.error(
                "recording stops: events cannot be written to %s (%s)", self.path, error.strerror
            )
            self.failed = True
            self.file.close()


def previous_part(path: Path) -> Path:
    """Return the path to which a full file is moved."""
    return path.with_name(f"{path.name}.1")


def read_recording(path: str | Path) -> bytes:
    """Return the lines of both files of a recording, without an incomplete last line."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        raise InvalidRequest(
            f"{path} cannot be read ({error.strerror}): name a file of --record-events", "recording"
        ) from None
    if not data.startswith(b'["snapshot",'):
        raise InvalidRequest(
            f"{path} is not a recording of events: name a file of --record-events", "recording"
        )
    previous = previous_part(Path(path))
    if previous.exists():
        data = previous.read_bytes() + data
    return data[: data.rfind(b"\n") + 1]
