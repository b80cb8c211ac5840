"""A pool of worker processes for input that is large, slow to process or not trusted.

    pool = WorkerPool(count=2, seconds=10.0)
    pool.start(setup)                          # `setup` is the first message to each process.
    result = await pool.run(job, list[int])    # This raises ApiError if the job fails.

Each worker process runs one job at a time. It is killed if a job takes too long, and replaced if it
crashes, is killed or uses too much memory. Only the job that it ran fails. Jobs wait in a bounded
queue until a worker process is idle. Heavy jobs never occupy the last worker process, so that a few
of them do not delay all other jobs.

This module handles processes, time limits and the order of jobs. handlers.py contains the jobs.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import socket
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec

from octavo.serve.api.api_errors import ApiError, draining
from octavo.serve.channel.jobs import JobDone, JobFailed, JobRefused, decode_reply, encode
from octavo.serve.channel.sockets import Pipe, frames

log = logging.getLogger(__name__)
WORKER = (sys.executable, "-m", "octavo.serve.workers.worker")
# Each process has one heap, and returns large blocks to the system as soon as they are freed. The
# tokenizer starts no threads, because the pool has one process for each core that it may use.
ENVIRONMENT = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_THRESHOLD_": "262144",
    "TOKENIZERS_PARALLELISM": "false",
}
START_SECONDS = 60.0  # A worker process has this time to become ready.
FIRST_BACKOFF = 0.1
LAST_BACKOFF = 10.0
MAX_QUEUED_JOBS = 256
QUEUE_SECONDS = 30.0  # A job may wait this long for a worker process.


@dataclass(eq=False)
class Task:
    """A job and the future of its reply. A timer limits its waiting time, then its run time."""

    job: msgspec.Struct
    payload: bytes | bytearray
    seconds: float
    heavy: bool
    result: asyncio.Future[msgspec.Raw]
    timer: asyncio.TimerHandle | None = None

    def fail(self, error: Exception) -> None:
        if self.timer is not None:
            self.timer.cancel()
        if not self.result.done():
            self.result.set_exception(error)


class Worker:
    """One worker process, and the pool's end of the socket to it."""

    def __init__(self, end: socket.socket, process: asyncio.subprocess.Process):
        self.pipe = Pipe(end)
        self.descriptor = end.fileno()
        self.process = process
        self.ready = False  # True means that the setup of the process is complete.
        self.task: Task | None = None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            self.process.kill()


class WorkerPool:
    def __init__(self, count: int, seconds: float, command: Sequence[str] = WORKER):
        """Create the pool. `seconds` limits the time of a job, unless `run` sets another limit."""
        self.count = count
        self.seconds = seconds
        self.command = command
        self.replaced: Counter[str] = Counter()  # The replaced worker processes, by reason.
        self._setup: msgspec.Struct | None = None
        self._keeper_tasks: list[asyncio.Task[None]] = []
        self._workers: set[Worker] = set()
        self._idle: list[Worker] = []
        self._queue: list[Task] = []
        self._closed = False

    # ---- methods for callers ---------------------------------------------------------------------

    def start(self, setup: msgspec.Struct) -> None:
        """Start the worker processes without waiting for them.

        Processes that run with another setup are restarted.
        """
        if setup == self._setup:
            return
        self._setup = setup
        for worker in self._workers:
            worker.kill()
        while len(self._keeper_tasks) < self.count:
            self._keeper_tasks.append(asyncio.create_task(self._keep_running()))

    async def run(
        self,
        job: msgspec.Struct,
        result_type: Any,
        *,
        payload: bytes | bytearray = b"",
        heavy: bool = False,
        seconds: float | None = None,
    ) -> Any:
        """Run a job and return its result, which has the type `kind`.

        `payload` is sent after the job without being copied, and becomes its `data`. A job is
        `heavy` if a client can make it slow on purpose. Raises the ApiError of the job, or
        ApiError 408 after `seconds`, 400 if the job ends its worker process, and 503 if too many
        jobs wait.
        """
        if self._closed:
            raise draining()
        if len(self._queue) >= MAX_QUEUED_JOBS:
            raise busy()
        loop = asyncio.get_running_loop()
        task = Task(job, payload, seconds or self.seconds, heavy, loop.create_future())
        self._queue.append(task)
        self._dispatch()
        if task.timer is None:
            task.timer = loop.call_later(QUEUE_SECONDS, self._on_queue_timeout, task)
        try:
            result = await task.result
        finally:
            if task in self._queue:  # The caller was cancelled.
                self._queue.remove(task)
        return decoder(result_type).decode(result)

    async def close(self) -> None:
        self._closed = True
        for task in self._queue:
            task.fail(draining())
        self._queue.clear()
        for keeper in self._keeper_tasks:
            keeper.cancel()
        await asyncio.gather(*self._keeper_tasks, return_exceptions=True)

    # ---- worker processes ------------------------------------------------------------------------

    async def _keep_running(self) -> None:
        """Keep one worker process running."""
        backoff = FIRST_BACKOFF
        while True:
            ready = False
            try:
                ready = await self._run_worker()
            except OSError as error:
                log.error("cannot start a worker process: %s", error.strerror)
            if ready:
                backoff = FIRST_BACKOFF
                continue
            log.error(
                "a worker process ended before it was ready: a new one starts in %g s", backoff
            )
            await asyncio.sleep(backoff)
            backoff = min(2 * backoff, LAST_BACKOFF)

    async def _run_worker(self) -> bool:
        """Run one worker process from its start to its end. Returns whether it became ready."""
        pool_end, worker_end = socket.socketpair()
        with pool_end:
            with worker_end:
                process = await asyncio.create_subprocess_exec(
                    *self.command,
                    str(worker_end.fileno()),
                    pass_fds=(worker_end.fileno(),),
                    stdin=asyncio.subprocess.DEVNULL,
                    start_new_session=True,
                    env={**os.environ, **ENVIRONMENT},
                )
            worker = Worker(pool_end, process)
            self._workers.add(worker)
            loop = asyncio.get_running_loop()
            loop.add_reader(worker.descriptor, self._readable, worker)
            assert self._setup is not None
            try:
                ready = loop.create_future()
                self._start_job(worker, Task(self._setup, b"", START_SECONDS, False, ready))
                await process.wait()
                while not worker.pipe.closed and self._readable(worker):
                    pass  # The socket may still contain its last reply.
            finally:
                worker.kill()
                self._remove_worker(worker)
                await process.wait()
        return worker.ready

    def _remove_worker(self, worker: Worker) -> None:
        loop = asyncio.get_running_loop()
        loop.remove_reader(worker.descriptor)
        loop.remove_writer(worker.descriptor)
        self._workers.discard(worker)
        if worker in self._idle:
            self._idle.remove(worker)
        if worker.task is None or not worker.ready:
            return
        if not self._closed and not worker.task.result.done():
            self.replaced["crash"] += 1
            log.error("a worker process ended during a job (exit %s)", worker.process.returncode)
        worker.task.fail(draining() if self._closed else crashed())

    # ---- jobs ------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give jobs to idle workers, the oldest first."""
        while self._idle and (task := self._next_task()) is not None:
            self._start_job(self._idle.pop(), task)

    def _next_task(self) -> Task | None:
        num_heavy = sum(
            1 for worker in self._workers if worker.task is not None and worker.task.heavy
        )
        may_start_heavy = num_heavy < max(1, self.count - 1)
        for index, task in enumerate(self._queue):
            if may_start_heavy or not task.heavy:
                return self._queue.pop(index)
        return None

    def _start_job(self, worker: Worker, task: Task) -> None:
        loop = asyncio.get_running_loop()
        worker.task = task
        if task.timer is not None:
            task.timer.cancel()
        task.timer = loop.call_later(task.seconds, self._on_timeout, worker, task)
        if not worker.pipe.send(*frames(encode(task.job), task.payload)):
            loop.add_writer(worker.descriptor, self._writable, worker)

    def _writable(self, worker: Worker) -> None:
        if worker.pipe.send():
            asyncio.get_running_loop().remove_writer(worker.descriptor)

    def _readable(self, worker: Worker) -> bool:
        """Read once and process the replies. Returns whether anything was read."""
        messages = worker.pipe.receive()
        for message in messages or ():
            self._finish_job(worker, message)
        if worker.pipe.closed:
            asyncio.get_running_loop().remove_reader(worker.descriptor)
            worker.kill()
        return messages is not None

    def _finish_job(self, worker: Worker, message: bytes | bytearray) -> None:
        task = worker.task
        assert task is not None and task.timer is not None
        worker.task = None
        task.timer.cancel()
        reply = decode_reply(message)
        if not worker.ready and not isinstance(reply, JobDone):
            log.error("cannot set up a worker process: %s", reply)
            worker.kill()
            return
        worker.ready = True
        if reply.retire:
            self.replaced["memory"] += 1
            worker.kill()
        else:
            self._idle.append(worker)
        pass_on_reply(task, reply)
        self._dispatch()

    def _on_timeout(self, worker: Worker, task: Task) -> None:
        log.error("a job ran for more than %g s: its worker process is replaced", task.seconds)
        self.replaced["timeout"] += 1
        task.fail(ApiError(408, "the input took too long to process: shorten it", "text_timeout"))
        worker.kill()

    def _on_queue_timeout(self, task: Task) -> None:
        if task in self._queue:
            self._queue.remove(task)
            task.fail(busy())


def pass_on_reply(task: Task, reply: JobDone | JobRefused | JobFailed) -> None:
    """Set the result or the error of a task from the reply of its worker process."""
    if isinstance(reply, JobRefused):
        task.fail(ApiError(reply.status, reply.message, reply.code, reply.param))
    elif isinstance(reply, JobFailed):
        task.fail(RuntimeError(f"in a worker process:\n{reply.traceback}"))
    elif not task.result.done():
        task.result.set_result(reply.value)


@functools.cache
def decoder(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    return msgspec.msgpack.Decoder(kind)


def busy() -> ApiError:
    return ApiError(
        503,
        "too many long inputs are waiting to be processed: try again soon",
        "text_workers_busy",
        retry_after=1.0,
    )


def crashed() -> ApiError:
    return ApiError(
        400,
        "the input crashed the process that parsed it: shorten or simplify it",
        "text_worker_crashed",
    )
