"""The latest lines of the event stream, for live pages. Its size is bounded.

The lines are kept in segments, and each segment begins with a snapshot. When there is too much, the
oldest segment goes. A page reads from the oldest segment on, so that a page that was opened late
shows what an earlier one shows. A page that is too slow continues at a later segment.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

MAX_BYTES = 16 * 2**20
MAX_MESSAGE = 2**20  # bytes that are sent at once


@dataclass
class Segment:
    number: int
    parts: list[bytes] = field(default_factory=list)
    size: int = 0


class EventBuffer:
    def __init__(self, max_bytes: int = MAX_BYTES) -> None:
        self.max_bytes = max_bytes
        self.segments: deque[Segment] = deque()
        self.size = 0
        self._next_number = 0
        self._changed = asyncio.Event()

    def add(self, lines: bytes, is_start: bool) -> None:
        if is_start:
            self.segments.append(Segment(self._next_number))
            self._next_number += 1
        if not self.segments:
            return  # Only a snapshot can be read without what came before it.
        segment = self.segments[-1]
        segment.parts.append(lines)
        segment.size += len(lines)
        self.size += len(lines)
        while self.size > self.max_bytes and len(self.segments) > 1:
            self.size -= self.segments.popleft().size
        self._changed.set()
        self._changed = asyncio.Event()

    def lines(self) -> bytes:
        """Return all lines that are kept. The first one is a snapshot."""
        return b"".join(part for segment in self.segments for part in segment.parts)

    def clear(self) -> None:
        self.segments.clear()
        self.size = 0

    async def wait(self) -> None:
        """Wait until lines are added."""
        await self._changed.wait()


class EventReader:
    """The place of one page in the buffer."""

    def __init__(self, buffer: EventBuffer):
        self.buffer = buffer
        self.segment = 0
        self.part = 0

    async def read(self) -> bytes:
        """Return the next lines. Waits until there are some."""
        while not (lines := self._take()):
            await self.buffer.wait()
        return lines

    def _take(self) -> bytes:
        parts: list[bytes] = []
        size = 0
        for segment in self.buffer.segments:
            if segment.number < self.segment:
                continue
            if segment.number > self.segment:
                self.segment = segment.number
                self.part = 0
            while self.part < len(segment.parts) and size < MAX_MESSAGE:
                parts.append(segment.parts[self.part])
                size += len(parts[-1])
                self.part += 1
        return b"".join(parts)
