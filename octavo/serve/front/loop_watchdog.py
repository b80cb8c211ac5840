"""Watches the event loop: how late it runs, and what blocks it when it is very late."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
import time
import traceback
from collections.abc import Callable

from octavo.serve.front.metrics import Metrics

log = logging.getLogger(__name__)
INTERVAL = 0.1  # seconds
VERY_LATE = 1.0  # seconds
RECENT = 20  # intervals: the lag metric is the worst of the last two seconds


class LoopWatchdog:
    """A task that beats in the event loop, and a thread that logs where the loop is blocked when
    the beat is late."""

    def __init__(self, clients: Callable[[], int]):
        """`clients` counts the open connections: a loop that blocks while there are none, as it may
        during the start-up, keeps nobody waiting and is no reason for a warning."""
        self.last_beat = time.monotonic()
        self.clients = clients
        self._stopped = threading.Event()
        self._logged_beat = 0.0
        self._loop_thread = 0

    @property
    def late(self) -> float:
        """Seconds by which the loop is late."""
        return max(time.monotonic() - self.last_beat - INTERVAL, 0.0)

    async def run(self, metrics: Metrics) -> None:
        self._loop_thread = threading.get_ident()
        self.last_beat = time.monotonic()
        threading.Thread(target=self._watch, daemon=True, name="loop watchdog").start()
        recent: list[float] = []
        try:
            while True:
                before = time.monotonic()
                await asyncio.sleep(INTERVAL)
                self.last_beat = time.monotonic()
                recent = [*recent[1 - RECENT :], max(self.last_beat - before - INTERVAL, 0.0)]
                metrics.lag.set(max(recent))
        finally:
            self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(INTERVAL * 2):
            self.check()

    def check(self) -> None:
        """Log once for each time that the loop is blocked."""
        late = self.late
        if late <= VERY_LATE or self._logged_beat == self.last_beat:
            return
        self._logged_beat = self.last_beat
        clients = self.clients()
        log.log(
            logging.WARNING if clients else logging.INFO,
            "the event loop has been blocked for %.1f s while %d connections were open:\n%s",
            late,
            clients,
            self._stacks(),
        )

    def _stacks(self) -> str:
        """The stacks of all threads but this one, the loop's first. Another thread may be the one
        that blocks: native code that does not release the interpreter lock stops every thread, and
        the loop's own stack then shows nothing."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)
        parts: list[str] = []
        for thread in sorted(frames, key=lambda ident: ident != self._loop_thread):
            name = "event loop" if thread == self._loop_thread else names.get(thread, "unknown")
            parts.append(f"thread {name}:\n" + "".join(traceback.format_stack(frames[thread])))
        return "\n".join(parts)
