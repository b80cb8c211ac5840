"""Watches the front's own loop: how late it is, and where it stands when it is very late."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback

from octavo.serve.metrics import Metrics

log = logging.getLogger(__name__)
INTERVAL = 0.1
VERY_LATE = 1.0  # seconds


async def watch_loop(metrics: Metrics, seen: Seen) -> None:
    """Sets the lag gauge to the worst of the last two seconds."""
    watcher = threading.Thread(
        target=seen.watch, args=(threading.get_ident(),), daemon=True, name="lag"
    )
    watcher.start()
    recent: list[float] = []
    try:
        while True:
            before = time.monotonic()
            await asyncio.sleep(INTERVAL)
            seen.last = time.monotonic()
            recent = [*recent[-19:], max(seen.last - before - INTERVAL, 0.0)]
            metrics.lag.set(max(recent))
    finally:
        seen.over.set()


class Seen:
    """When the loop was last seen running, for a thread that can say so when it is not."""

    def __init__(self) -> None:
        self.last = time.monotonic()
        self.over = threading.Event()

    def watch(self, thread: int) -> None:
        told = 0.0
        while not self.over.wait(INTERVAL * 2):
            late = time.monotonic() - self.last
            if late > VERY_LATE and told != self.last:
                told = self.last
                frame = sys._current_frames().get(thread)
                stack = "".join(traceback.format_stack(frame)) if frame else ""
                log.warning("the event loop has been blocked for %.1f s:\n%s", late, stack)
