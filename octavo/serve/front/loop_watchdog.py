"""Measures how late the event loop runs, and logs what blocks it when it is very late."""

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
INTERVAL_SECONDS = 0.1  # The periodic task runs at this interval.
WARNING_SECONDS = 1.0  # A longer delay of the periodic task is logged.
RECENT_INTERVALS = 20  # The lag metric is the longest delay in this many intervals (two seconds).


class LoopWatchdog:
    """Runs a periodic task in the event loop, and a thread that checks the task.

    If the task is late, the thread logs where the event loop is blocked.
    """

    def __init__(self, clients: Callable[[], int]):
        """Create the watchdog. `clients` returns the number of open connections.

        A blocked loop without connections, such as during the start, delays no client, so the
        watchdog does not warn.
        """
        self.last_tick = time.monotonic()
        self.clients = clients
        self._stopped = threading.Event()
        self._logged_tick = 0.0
        self._loop_thread = 0

    @property
    def lateness(self) -> float:
        """Return the seconds by which the event loop is late."""
        return max(time.monotonic() - self.last_tick - INTERVAL_SECONDS, 0.0)

    async def run(self, metrics: Metrics) -> None:
        self._loop_thread = threading.get_ident()
        self.last_tick = time.monotonic()
        threading.Thread(target=self._watch, daemon=True, name="loop watchdog").start()
        recent_lags: list[float] = []
        try:
            while True:
                before = time.monotonic()
                await asyncio.sleep(INTERVAL_SECONDS)
                self.last_tick = time.monotonic()
                lag = max(self.last_tick - before - INTERVAL_SECONDS, 0.0)
                recent_lags = [*recent_lags[1 - RECENT_INTERVALS :], lag]
                metrics.lag.set(max(recent_lags))
        finally:
            self._stopped.set()

    def _watch(self) -> None:
        while not self._stopped.wait(INTERVAL_SECONDS * 2):
            self.check()

    def check(self) -> None:
        """Log a warning, once for each time that the loop is blocked."""
        lateness = self.lateness
        if lateness <= WARNING_SECONDS or self._logged_tick == self.last_tick:
            return
        self._logged_tick = self.last_tick
        clients = self.clients()
        log.log(
            logging.WARNING if clients else logging.INFO,
            "the event loop has been blocked for %.1f s while %d connections were open "
            "(--log-level info shows where)",
            lateness,
            clients,
        )
        log.info("the threads of the server while the event loop is blocked:\n%s", self._stacks())

    def _stacks(self) -> str:
        """Return the stacks of all threads except this one. The event loop comes first.

        Another thread may be the cause: native code that does not release the interpreter lock
        stops every thread, and the stack of the event loop then does not show the reason.
        """
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        frames = sys._current_frames()
        frames.pop(threading.get_ident(), None)
        stacks: list[str] = []
        for thread in sorted(frames, key=lambda ident: ident != self._loop_thread):
            name = "event loop" if thread == self._loop_thread else names.get(thread, "unknown")
            stacks.append(f"thread {name}:\n" + "".join(traceback.format_stack(frames[thread])))
        return "\n".join(stacks)
