"""Limits the time that one iteration of the event loop spends on parsing the input of clients.

A connection parses a small part of its input at a time. If more is left, the connection joins this
queue. Each iteration serves the queue round robin for about a millisecond, so that no client and
no number of clients can delay the others for long.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

TURN_SECONDS = 0.001


class Parser(Protocol):
    queued: bool  # Whether the connection is in the queue.

    def parse_some(self) -> bool:
        """Parse a small part of the input. Returns True if more can be parsed now."""


class TurnQueue:
    def __init__(self) -> None:
        self._waiting: deque[Parser] = deque()

    def add(self, parser: Parser) -> None:
        if parser.queued:
            return
        parser.queued = True
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
        self._waiting.append(parser)

    def _turn(self) -> None:
        end = time.monotonic() + TURN_SECONDS
        while self._waiting:
            parser = self._waiting.popleft()
            parser.queued = False
            if parser.parse_some():
                parser.queued = True
                self._waiting.append(parser)
            if time.monotonic() >= end:
                break
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._turn)
