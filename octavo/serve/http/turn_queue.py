"""Limits the time that one iteration of the event loop spends on parsing the input of clients.

A connection parses a small slice of its input at a time. If it has more input, the connection joins
this queue. Each iteration serves the queue round robin for about a millisecond, so that no client
and no number of clients can delay the others for long.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from typing import Protocol

TURN_SECONDS = 0.001


class Parser(Protocol):
    queued: bool  # Whether the connection is in the queue.

    def parse_slice(self) -> bool:
        """Parse a small slice of the input. Returns whether more can be parsed now."""


class TurnQueue:
    def __init__(self) -> None:
        self._parsers: deque[Parser] = deque()

    def add(self, parser: Parser) -> None:
        if parser.queued:
            return
        parser.queued = True
        if not self._parsers:
            asyncio.get_running_loop().call_soon(self._run_turn)
        self._parsers.append(parser)

    def _run_turn(self) -> None:
        end = time.monotonic() + TURN_SECONDS
        while self._parsers:
            parser = self._parsers.popleft()
            parser.queued = False
            if parser.parse_slice():
                parser.queued = True
                self._parsers.append(parser)
            if time.monotonic() >= end:
                break
        if self._parsers:
            asyncio.get_running_loop().call_soon(self._run_turn)
