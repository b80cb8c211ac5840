"""A few threads for work that must not hold up the event loop. One that hangs is replaced, so that the others' work goes on.

A thread cannot be ended from outside: who waits for one that hangs gets an error, and a new thread takes its place. Should the
lost one ever come back, it ends. Knows nothing of what it runs.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from octavo.serve.errors import ApiError

log = logging.getLogger(__name__)
MOST_LOST = 64  # threads that hang; beyond that nothing is begun any more


@dataclass(eq=False)
class Job:
    work: Callable[[], Any]
    loop: asyncio.AbstractEventLoop
    done: asyncio.Future[Any]
    thread: threading.Thread | None = None  # whose it is, since it began
    timer: asyncio.TimerHandle | None = None


class Threads:
    def __init__(self, count: int, seconds: float, name: str):
        """`seconds`: how long one piece of work may take, not counting how long it waits for a thread."""
        self.count = count
        self.seconds = seconds
        self.name = name
        self.lost = 0
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._members: set[threading.Thread] = set()
        self._closed = False

    async def run(self, work: Callable[[], Any]) -> Any:
        """What `work` returns or raises. 408 if it takes too long, 503 if so much hangs that nothing can be begun."""
        if self.lost >= MOST_LOST:
            raise ApiError(
                503,
                "too much work on texts hangs: the server has to be restarted",
                "text_workers_lost",
            )
        loop = asyncio.get_running_loop()
        job = Job(work, loop, loop.create_future())
        while len(self._members) < self.count:
            self._start()
        self._jobs.put(job)
        return await job.done

    def close(self) -> None:
        self._closed = True
        for _ in self._members:
            self._jobs.put(None)

    def _start(self) -> None:
        # one that hangs does not keep the process
        thread = threading.Thread(target=self._live, name=self.name, daemon=True)
        self._members.add(thread)
        thread.start()

    def _live(self) -> None:
        me = threading.current_thread()
        while me in self._members and (job := self._jobs.get()) is not None:
            if job.done.cancelled():
                continue
            job.thread = me
            if not self._tell(job, self._begun, job):
                return
            try:
                found = job.work()
                error = None
            except BaseException as e:  # a panic in a library's native code is no Exception
                found = None
                error = e
            if not self._tell(job, self._ended, job, found, error):
                return

    @staticmethod
    def _tell(job: Job, what: Callable[..., None], *args: Any) -> bool:
        try:
            job.loop.call_soon_threadsafe(what, *args)
        except RuntimeError:  # the loop is closed: nobody waits any more
            return False
        return True

    # ---- in the loop -----------------------------------------------------------------------------------

    def _begun(self, job: Job) -> None:
        job.timer = job.loop.call_later(self.seconds, self._late, job)

    def _ended(self, job: Job, found: Any, error: BaseException | None) -> None:
        if job.timer is not None:
            job.timer.cancel()
        if job.thread not in self._members:
            self.lost -= 1  # given up, and back after all
        if job.done.done():
            return
        if error is None:
            job.done.set_result(found)
        elif isinstance(error, Exception):
            job.done.set_exception(error)
        else:
            job.done.set_exception(RuntimeError(f"{type(error).__name__}: {error}"))

    def _late(self, job: Job) -> None:
        assert job.thread is not None
        log.error("work on a text has taken %g s: its thread is given up", self.seconds)
        self._members.discard(job.thread)
        self.lost += 1
        if not self._closed:
            self._start()
        if not job.done.done():
            job.done.set_exception(
                ApiError(408, "the text took too long to be read: shorten it", "text_timeout")
            )
