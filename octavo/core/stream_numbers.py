"""The numbers that an event stream gives to sequences and contents, and its times."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Any

from octavo.types import Sequence


class Labels:
    """Gives each sequence that has started the smallest unused number, for its colour on the
    page."""

    def __init__(self) -> None:
        self.by_sequence: dict[int, int] = {}  # Sequence.id -> label
        self._free: list[int] = []
        self._next = 0

    def assign(self, seq_id: int) -> int:
        """Return the number of a sequence, which keeps it until it ends."""
        if seq_id in self.by_sequence:
            return self.by_sequence[seq_id]
        if self._free:
            label = heappop(self._free)
        else:
            label = self._next
            self._next += 1
        self.by_sequence[seq_id] = label
        return label

    def release(self, seq_id: int) -> None:
        label = self.by_sequence.pop(seq_id, None)
        if label is not None:
            heappush(self._free, label)


class Contents:
    """Numbers the contents of blocks in the order in which they appear. No content is number 0."""

    def __init__(self) -> None:
        self.numbers: dict[bytes, int] = {}
        self._last = 0

    def number(self, content_hash: bytes) -> int:
        if not content_hash:
            return 0
        number = self.numbers.get(content_hash)
        if number is None:
            self._last += 1
            number = self.numbers[content_hash] = self._last
        return number

    def keep_only(self, hashes: set[bytes]) -> None:
        """Drop the numbers of all other contents."""
        self.numbers = {key: number for key, number in self.numbers.items() if key in hashes}


class StreamNumbers:
    """The numbers that an event stream has assigned."""

    def __init__(self, opened_at: float, earlier_requests: int):
        """`opened_at` is the time 0 of the stream, on the scheduler's clock. `earlier_requests` is
        the number of requests, such as those that warm an engine up, that have no name."""
        self.opened_at = opened_at
        self.earlier_requests = earlier_requests
        self.labels = Labels()
        self.contents = Contents()
        # Sequence.id -> why it waits: the values of the last line "waiting" about it
        self.reasons: dict[int, tuple[Any, ...]] = {}

    def name(self, seq: Sequence) -> int:
        """Return the number of a request in the order of arrival, from which the page names it."""
        return seq.rank[3] - self.earlier_requests

    def microseconds(self, moment: float) -> int:
        """Return a time of the scheduler's clock as a time of the stream."""
        return round(1e6 * (moment - self.opened_at))
