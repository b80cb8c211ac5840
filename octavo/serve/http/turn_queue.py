"""Bounds how long one turn of the event loop spends on parsing the input of clients.

A connection parses a small part of its input at once. If more is left, it waits here. Each turn
serves the waiting connections round robin for about a millisecond, so that no client, and no number
of clients, holds up the others.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

TURN_SECONDS = 0.001


class Parser(Protocol):
    queued: bool  # it waits in the queue

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
