"""Runs the requests of batches through the application, a bounded number at a time.

    LineRunner    sends one request to its route, and tries again while the server is busy
    run_lines     runs the requests of a file, each once, and collects the lines of their replies
    BatchRunner   runs the batches of /v1/batches, one after the other

`octavo run-batch` uses the first two. A request of a batch takes the path of a request from a
client: limits, queue, tools and structured output are the same.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from starlette.types import ASGIApp

from octavo.serve.api.api_errors import ApiError
from octavo.serve.api.batch_lines import (
    BatchLine,
    LineError,
    completed_ids,
    error_line,
    lines_of,
    output_line,
    read_line,
)
from octavo.serve.front.batch_store import BatchStore, StoredBatch
from octavo.serve.front.front import Caller, Front
from octavo.serve.front.keys import Key
from octavo.serve.http.internal_request import InternalRequest

log = logging.getLogger(__name__)
# These errors mean that the server is busy or restarts. The request is sent again later.
BUSY = frozenset(
    {"queue_full", "queue_timeout", "rate_limit_exceeded", "engine_starting", "engine_restarting"}
)
MAX_DELAY_SECONDS = 10.0  # The longest time between two attempts of a request.
READY_POLL_SECONDS = 0.1  # The interval of the checks whether the engine is ready.
SAVE_SECONDS = 2.0  # The shortest time between two records of a batch's progress.
LINE_ATTEMPTS = 3  # A request that was in the engine when it failed is sent this many times.
WriteLine = Callable[[bytes, bool], None]  # It takes a line, and whether the request succeeded.


class LineRunner:
    def __init__(self, front: Front, app: ASGIApp, concurrency: int):
        self.front = front
        self.app = app
        self.slots = asyncio.Semaphore(concurrency)

    async def run(self, line: BatchLine, key: Key | None) -> tuple[bytes, bool]:
        """Return the line of the reply, and whether the request succeeded."""
        delay = 0.1
        failures = 0
        while True:
            await self.wait_ready()
            caller = Caller(key=key)
            request = InternalRequest(line.body)
            error = await request.run(self.app, line.url, caller)
            if error is None:
                reply = output_line(line.custom_id, request.status, caller.id, request.reply)
                return reply, request.status < 400
            failures += error.code == "engine_restarting"
            if error.code not in BUSY or failures >= LINE_ATTEMPTS:
                encoded_error = error.encode()
                return output_line(line.custom_id, error.status, caller.id, encoded_error), False
            await asyncio.sleep(error.retry_after or delay)
            delay = min(2 * delay, MAX_DELAY_SECONDS)

    async def wait_ready(self) -> None:
        while not self.front.engine_client.ready:
            await asyncio.sleep(READY_POLL_SECONDS)


def requests_of(
    path: Path, url: str | None, done: set[str], on_error: Callable[[LineError], None]
) -> Iterator[BatchLine]:
    """Yield the requests of a file whose ids are not in `done`."""
    for number, text in lines_of(path):
        try:
            line = read_line(number, text, url)
        except LineError as error:
            if error.custom_id not in done:
                on_error(error)
            continue
        if line.custom_id not in done:
            yield line


async def run_lines(
    runner: LineRunner, lines: Iterator[BatchLine], key: Key | None, write: WriteLine
) -> None:
    """Run requests, as many at a time as the runner has slots, and write each reply at once."""

    async def run_one(line: BatchLine) -> None:
        try:
            write(*await runner.run(line, key))
        finally:
            runner.slots.release()

    async with asyncio.TaskGroup() as group:
        for line in lines:
            await runner.slots.acquire()
            group.create_task(run_one(line))


class BatchRunner:
    def __init__(self, front: Front, app: ASGIApp):
        self.front = front
        self.store: BatchStore = front.batches
        self.runner = LineRunner(front, app, front.config.batch_concurrency)
        self._work = asyncio.Event()
        self._running: tuple[StoredBatch, asyncio.Task[None]] | None = None

    def wake(self) -> None:
        """Report that there may be a new batch to run."""
        self._work.set()

    def cancel(self, batch: StoredBatch) -> None:
        """End a batch. Its output file contains the replies so far."""
        if not batch.is_open:
            return
        batch.move("cancelling")
        if self._running is not None and self._running[0] is batch:
            self._running[1].cancel()
        else:
            self._finish(batch, "cancelled")

    async def run(self) -> None:
        """Run the open batches one after the other, the oldest first. This never returns."""
        while True:
            waiting = [batch for batch in self.store.batches.values() if batch.is_open]
            if not waiting:
                self._work.clear()
                await self._work.wait()
                continue
            batch = min(waiting, key=lambda batch: (batch.created_at, batch.id))
            task = asyncio.create_task(self._run_batch(batch))
            self._running = batch, task
            try:
                await task
            except asyncio.CancelledError:
                if batch.status != "cancelling":  # The server shuts down.
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError):
                        await task
                    raise
                self._finish(batch, "cancelled")
            except Exception as error:
                self._fail(batch, error)
            finally:
                self._running = None

    def _fail(self, batch: StoredBatch, error: Exception) -> None:
        causes = [error]
        if isinstance(error, ExceptionGroup):
            causes = [cause for cause in error.exceptions if isinstance(cause, ApiError)] or [error]
        cause = causes[0]
        if isinstance(cause, ApiError):
            batch.refuse(cause.code or "batch_failed", cause.message)
        else:
            log.error("batch %s failed", batch.id, exc_info=error)
            batch.refuse("server_error", "the server failed to run the batch: see its log")
        self._finish(batch, "failed")

    async def _run_batch(self, batch: StoredBatch) -> None:
        source = self.store.files.content_path(batch.input_file_id)
        key = self._key_of(batch)
        if batch.status == "validating":
            batch.total = await asyncio.to_thread(self._validate, source)
            batch.move("in_progress")
        replies = ReplyFiles(self.store, batch)
        lines = requests_of(source, batch.endpoint, replies.done, replies.refuse)
        lines = self._until_expiry(batch, lines, replies)
        try:
            await run_lines(self.runner, lines, key, replies.write)
        finally:
            replies.close()
        self._finish(batch, "expired" if time.time() > batch.expires_at else "completed")

    def _until_expiry(
        self, batch: StoredBatch, lines: Iterator[BatchLine], replies: ReplyFiles
    ) -> Iterator[BatchLine]:
        for line in lines:
            if time.time() <= batch.expires_at:
                yield line
            else:
                message = "the batch expired before this request was sent"
                replies.write(error_line(line.custom_id, "batch_expired", message), False)

    def _key_of(self, batch: StoredBatch) -> Key | None:
        if not batch.owner:
            return None
        keys = [key for key in self.front.keys.keys if key.name == batch.owner]
        if not keys:
            raise ApiError(401, "the API key of this batch no longer exists", "key_not_found")
        return keys[0]

    def _validate(self, source: Path) -> int:
        """Return the number of requests in a file. Raises ApiError if the file is not a batch."""
        limit = self.front.config.limits.batch_lines
        custom_ids: set[str] = set()
        count = 0
        for number, text in lines_of(source):
            count += 1
            if count > limit:
                raise ApiError(400, f"a batch can have at most {limit} requests", "too_many_lines")
            with contextlib.suppress(LineError):
                custom_id = read_line(number, text, None).custom_id
                if custom_id in custom_ids:
                    message = f"line {number}: the custom_id {custom_id!r:.80} occurs twice"
                    raise ApiError(400, message, "duplicate_custom_id")
                custom_ids.add(custom_id)
        if not count:
            raise ApiError(400, "the input file has no requests", "empty_file")
        return count

    def _finish(self, batch: StoredBatch, status: str) -> None:
        """Turn the files with replies into stored files, and end the batch."""
        files = self.store.files
        if batch.status != "failed":
            batch.move("finalizing")
        for kind in ("output", "error"):
            path = self.store.lines_path(batch, kind)
            if path.exists() and path.stat().st_size:
                purpose = "batch_output"
                record = files.adopt(path, batch.owner, f"{batch.id}_{kind}.jsonl", purpose)
                setattr(batch, f"{kind}_file_id", record.id)
            path.unlink(missing_ok=True)
        if batch.status != "failed":
            batch.move(status)
        self.store.save(batch)


class ReplyFiles:
    """The files with the replies of a batch. A line is on disk before it is counted."""

    def __init__(self, store: BatchStore, batch: StoredBatch):
        self.store = store
        self.batch = batch
        paths = {kind: store.lines_path(batch, kind) for kind in ("output", "error")}
        batch.completed = len(completed_ids(paths["output"]))
        self.done = completed_ids(*paths.values())
        batch.failed = len(self.done) - batch.completed
        self._files = {kind: path.open("ab", buffering=0) for kind, path in paths.items()}
        self._bytes = sum(file.tell() for file in self._files.values())
        self._saved_at = 0.0

    def write(self, line: bytes, succeeded: bool) -> None:
        self._bytes += len(line)
        self.store.files.check_room(self._bytes)
        self._files["output" if succeeded else "error"].write(line)
        self.batch.completed += succeeded
        self.batch.failed += not succeeded
        if time.monotonic() - self._saved_at > SAVE_SECONDS:
            self._saved_at = time.monotonic()
            self.store.save(self.batch)

    def refuse(self, error: LineError) -> None:
        """Write the line of a request that cannot be read."""
        message = f"line {error.number}: {error}"
        self.write(
            error_line(error.custom_id or f"line-{error.number}", "invalid_line", message), False
        )

    def close(self) -> None:
        for file in self._files.values():
            file.close()
        self.store.save(self.batch)
