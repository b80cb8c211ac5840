"""Buffers the latest lines of the event stream for live pages. The size of the buffer is bounded.

The lines are stored in segments, and each segment begins with a snapshot. The oldest segment is
dropped when the buffer is full. A page reads all lines from the oldest segment on, so that a page
that was opened late shows the same as an earlier one. A page that is too slow, so that its next
lines were dropped, continues at the oldest segment.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import dataclass, field

MAX_BYTES = 16 * 2**20
MAX_READ_BYTES = 2**20  # A page gets about this many bytes at a time.


@dataclass
class Segment:
    number: int
    chunks: list[bytes] = field(default_factory=list)
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
            return  # A page cannot read these lines without the snapshot before them.
        segment = self.segments[-1]
        segment.chunks.append(lines)
        segment.size += len(lines)
        self.size += len(lines)
        while self.size > self.max_bytes and len(self.segments) > 1:
            self.size -= self.segments.popleft().size
        self._changed.set()
        self._changed = asyncio.Event()

    def lines(self) -> bytes:
        """Return all lines of the buffer. The first one is a snapshot."""
        return b"".join(chunk for segment in self.segments for chunk in segment.chunks)

    def clear(self) -> None:
        self.segments.clear()
        self.size = 0

    async def wait(self) -> None:
        """Wait until lines are added."""
        await self._changed.wait()


class EventReader:
    """The position of one live page in the buffer."""

    def __init__(self, buffer: EventBuffer):
        self.buffer = buffer
        self.segment_number = 0
        self.next_chunk = 0

    @property
    def has_all(self) -> bool:
        """Whether all lines of the buffer were read."""
        if not self.buffer.segments:
            return False
        last = self.buffer.segments[-1]
        return (self.segment_number, self.next_chunk) == (last.number, len(last.chunks))

    async def read(self) -> bytes:
        """Return the next lines. Waits until lines are added if the page has read all of them."""
        while not (lines := self._next_lines()):
            await self.buffer.wait()
        return lines

    def _next_lines(self) -> bytes:
        chunks: list[bytes] = []
        size = 0
        for segment in self.buffer.segments:
            if segment.number < self.segment_number:
                continue
            if segment.number > self.segment_number:
                self.segment_number = segment.number
                self.next_chunk = 0
            while self.next_chunk < len(segment.chunks):
                if size >= MAX_READ_BYTES:
                    return b"".join(chunks)  # The next call continues here.
                chunks.append(segment.chunks[self.next_chunk])
                size += len(chunks[-1])
                self.next_chunk += 1
        return b"".join(chunks)
