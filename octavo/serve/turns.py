"""Requests that come at once are read a few at a time, where there are cores for the engine besides the front's.

Of many that arrive in the same millisecond all would be read in step, and all would reach the engine when the last was read. In
groups the first are on their way when the last are begun, and each group is large enough for what the processor has just learnt
of one request to serve the next (tokenize.py). On few cores an engine that begins with the first group takes them from the
front, which then reads the others half as fast, and they wait for that step: there all go together (docs/LOG.md, "The way in,
in step").

Knows turns of the event loop, nothing of requests.
"""

from __future__ import annotations

import asyncio
import os
from collections import deque

FEW = 4  # cores
GROUP = 8 if (os.cpu_count() or 1) > FEW else 2**20
TURNS = 2  # of the loop that a group has before the next comes: up to its texts, and the texts; the third is shared


class Turnstile:
    def __init__(self) -> None:
        self._inside = 0  # of the group that is under way
        self._waiting: deque[asyncio.Future[None]] = deque()

    @property
    def crowded(self) -> bool:
        """More come soon."""
        return bool(self._waiting)

    async def enter(self) -> None:
        loop = asyncio.get_running_loop()
        if self._inside < GROUP and not self._waiting:
            self._inside += 1
            if self._inside == 1:
                loop.call_soon(self._turn, TURNS)
            return
        self._waiting.append(loop.create_future())
        await self._waiting[-1]

    def _turn(self, left: int) -> None:
        loop = asyncio.get_running_loop()
        if left:
            loop.call_soon(self._turn, left - 1)
            return
        self._inside = 0
        while self._waiting and self._inside < GROUP:
            first = self._waiting.popleft()
            if not first.done():  # whoever waits may have given up
                first.set_result(None)
                self._inside += 1
        if self._inside:
            loop.call_soon(self._turn, TURNS)
