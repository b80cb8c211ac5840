"""Moves KV between the device and the tiers below it: blocks in host memory, and records on disk.

    plan.stores   device block -> host block   before the step overwrites the block   } copies, in
    plan.loads    host block -> device block   before the step reads it               } plan order
    plan.saves    host block -> disk           by a thread, later, if the content is still the same
    plan.fetches  disk -> host block           by threads; a DiskEvent reports success or failure

On a GPU a store continues after its step (staging.py). When a host block gets a new content, its
generation is raised under the block's lock. A thread reads or writes a host block only under that
lock, and only if the generation is still the one of the thread's job.

Host memory has one buffer per host block, and one spare buffer per reader thread. A record is read
into a spare buffer, which is then exchanged with the buffer of the host block. So nothing is
copied, and a read that never returns blocks no host block. Threads never call CUDA, because that
would break a graph that is being captured. Therefore a thread gets a host block only after the
block's store has ended. On a GPU the readers compute no checksums, because loads compute them
(checksums.py). This module works on host blocks and hashes. The core decides which are needed.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from octavo.ops.huge_pages import allocate_huge
from octavo.runner.checksums import Checksums, Verification
from octavo.runner.disk import PAGE_BYTES, Disk, DiskMiss, Record
from octavo.runner.kvstore import KVStore
from octavo.runner.staging import StoreStaging, page_lock, page_unlock
from octavo.types import DiskEvent, Fetch, Plan, Save

log = logging.getLogger(__name__)

MAX_READERS = 16  # The largest number of reader threads.
# A reader reads this many bytes of a record at a time. If each reader read whole records, several
# records would be complete at the same time, and the link to the device would be idle in between.
PART_BYTES = 4 << 20
# With a reader on every core, the engine's thread would get disk events late.
READERS_PER_CORE = 0.75
DISK_TIMEOUT = 2.0  # After this time without progress, the pending fetches count as missed.
# A reader waits this long for another reader to open a file. If opening a file hangs, it blocks one
# reader, and delays the readers of its other parts by this time.
OPEN_TIMEOUT = DISK_TIMEOUT / 10
# Disk events are collected for this time while no item can run. A step for each event would take
# the interpreter lock from the readers.
EVENT_WAIT = 0.001
SWEEP_INTERVAL = 60.0  # The interval of the sweeps, which find the records of other servers.
WRITE_PAUSE = 10.0  # After a failed write, nothing is written for this time.
WARNING_INTERVAL = 60.0  # The shortest time between two warnings of one kind.


class RecordRead:
    """A record that is being read into a buffer.

    Readers take its parts in order, and the reader that takes the first part opens the file. All
    parts of a record are taken before the parts of the next one, so at most one record that is
    being read has parts without a reader. There are never more such records than readers.
    """

    def __init__(self, fetch: Fetch, generation: int, num_parts: int):
        self.fetch = fetch
        self.generation = generation
        self.unread_parts = num_parts
        self.lock = threading.Lock()
        self.has_reader = False
        self.opened = threading.Event()
        self.buffer = -1
        self.record: Record | None = None
        self.miss_reason = ""  # It is empty unless the read is a miss.
        self.started_at = 0.0
        self.reader_seconds = 0.0  # The total time of all readers.


class TimedEvent(NamedTuple):
    """A disk event from a thread."""

    time: float
    event: DiskEvent
    reader_seconds: float


class PendingFetch(NamedTuple):
    fetch: Fetch
    generation: int


class TierStore:
    def __init__(
        self,
        kv: KVStore,
        num_host_blocks: int,
        disk: Disk | None = None,
        staging_bytes: int = 0,
        verify_on_load: bool | None = None,
    ):
        """Allocate host memory and start the threads.

        `staging_bytes` is the device memory for stores that have not reached the host. At least two
        blocks are allocated. With `verify_on_load`, records are verified when they are loaded and
        not when they are read. This is the default on a GPU.
        """
        self.kv = kv.tensor
        self.disk = disk
        self.num_host_blocks = num_host_blocks
        self.block_bytes = kv.tensor[0].nbytes
        on_gpu = kv.tensor.is_cuda
        num_readers = 0
        if disk is not None:
            num_readers = min(MAX_READERS, math.ceil(READERS_PER_CORE * (os.cpu_count() or 1)))
        num_buffers = num_host_blocks + num_readers
        memory = allocate_huge(num_buffers * self.block_bytes)
        self.buffers = memory.view(kv.tensor.dtype).view(-1, *kv.tensor.shape[1:])
        if on_gpu:
            page_lock(memory)
        self._bytes = memory.view(-1, self.block_bytes).numpy()
        self.buffer_of = list(range(num_host_blocks))  # host block -> index of its buffer
        self._spare_buffers = list(range(num_host_blocks, num_buffers))
        self._generations = [0] * num_host_blocks
        self._locks = [threading.Lock() for _ in range(num_host_blocks)]
        self._last_generation = 0
        self._staging: StoreStaging | None = None
        if on_gpu:
            self._staging = StoreStaging(self.kv, self.buffers, self.buffer_of, staging_bytes)
        if verify_on_load is None:
            verify_on_load = on_gpu
        self.checksums: Checksums | None = None
        if verify_on_load and self.block_bytes % PAGE_BYTES == 0:
            self.checksums = Checksums(self.kv)
        self._verification: Verification | None = None  # The verification of the last load.
        self._events: deque[TimedEvent] = deque()
        self._event_arrived = threading.Event()
        self._pending: dict[int, PendingFetch] = {}  # The fetches without a disk event, by id.
        # The time when the disk last finished a fetch, or got one while it had none.
        self._last_progress = 0.0
        self.read_seconds = 0.0  # The total time that readers have spent on successful fetches.
        self.fetch_ids = itertools.count(1)  # All schedulers that use this store share the ids.
        # A job is a part of a record to read, with its first byte, or the hash of a record to
        # remove. None ends a reader.
        self._read_jobs: queue.SimpleQueue[tuple[RecordRead, int] | bytes | None]
        self._read_jobs = queue.SimpleQueue()
        self._save_jobs: queue.SimpleQueue[tuple[Save, int] | None] = queue.SimpleQueue()
        # The actions that wait for a CUDA event, in order.
        self._deferred: deque[tuple[Any, Callable[[], None]]] = deque()
        self._last_warning: dict[str, float] = {}
        self._threads: list[threading.Thread] = []
        if disk is not None:
            self._start_threads(num_readers)

    def _start_threads(self, num_readers: int) -> None:
        self._threads = [threading.Thread(target=self._save_loop, daemon=True, name="kv-save")]
        for _ in range(num_readers):
            reader = threading.Thread(target=self._read_loop, daemon=True, name="kv-fetch")
            self._threads.append(reader)
        for thread in self._threads:
            thread.start()

    # ---- a step ----------------------------------------------------------------------------------

    def begin(self, plan: Plan) -> None:
        """Start the stores, saves and fetches of a step. Call this before the rest of the step."""
        for _, host_block in plan.stores:
            self._new_generation(host_block)
        if self._staging is not None:
            self._staging.store(plan.stores)
        else:
            for block, host_block in plan.stores:
                self.buffers[self.buffer_of[host_block]].copy_(self.kv[block])
        for save in plan.saves:
            if self._save_jobs.qsize() + len(self._deferred) < self.num_host_blocks:
                job = (save, self._generations[save.host_block])
                self._when_stored(save.host_block, partial(self._save_jobs.put, job))
            else:  # The host block would be overwritten before the thread reaches this save.
                self._report(DiskEvent("unsaved", save.hash, reason="behind"))
        if plan.fetches and not self._pending:
            self._last_progress = time.monotonic()
        for fetch in plan.fetches:
            generation = self._new_generation(fetch.host_block)
            self._pending[fetch.fetch_id] = PendingFetch(fetch, generation)
            self._when_stored(fetch.host_block, partial(self._start_read, fetch, generation))

    def _start_read(self, fetch: Fetch, generation: int) -> None:
        starts = range(0, self.block_bytes, PART_BYTES)
        read = RecordRead(fetch, generation, len(starts))
        for start in starts:
            self._read_jobs.put((read, start))

    def load(self, loads: list[tuple[int, int]]) -> None:
        """Copy (host block, device block) pairs to the device."""
        if self._staging is not None:
            self._staging.wait_for_stores([host_block for host_block, _ in loads])
        if loads:
            # All blocks are copied in one call, because each call releases the interpreter lock,
            # and readers then hold it for a while.
            sources = [self.buffers[self.buffer_of[host_block]] for host_block, _ in loads]
            targets = [self.kv[block] for _, block in loads]
            torch._foreach_copy_(targets, sources, non_blocking=True)
        if self.checksums is not None:
            self._verification = self.checksums.verify(loads)

    def take_verification(self) -> Verification | None:
        """Return the verification of the step just launched, if it loaded records from disk."""
        verification = self._verification
        self._verification = None
        return verification

    def corrupt_blocks(self, verification: Verification) -> set[int]:
        """Return the host blocks whose records were corrupt, and remove those records.

        Call this after the end of the step.
        """
        corrupt = verification.corrupt()
        for content_hash in corrupt.values():
            self._warn("corrupt", "KV on disk: corrupt: checksum of KV")
            self._read_jobs.put(content_hash)
        return set(corrupt)

    def collect_events(self, wait: bool) -> list[DiskEvent]:
        """Return the disk events since the last call, one for each fetch.

        With `wait`, wait until every fetch has an event, for at most EVENT_WAIT seconds.
        """
        while self._deferred and self._deferred[0][0].query():
            _, action = self._deferred.popleft()
            action()
        if wait:
            self._wait_for_events()
        events: list[DiskEvent] = []
        while self._events:
            finished_at, event, reader_seconds = self._events.popleft()
            if event.fetch_id and self._pending.pop(event.fetch_id, None) is None:
                continue  # _give_up() has reported this fetch as missed.
            if event.kind == "fetched":
                self.read_seconds += reader_seconds
                # Fetches run at the same time, so only the time since the last progress is counted.
                started_at = max(self._last_progress, finished_at - event.seconds)
                event = event._replace(seconds=max(finished_at - started_at, 1e-9))
            if event.fetch_id:
                self._last_progress = finished_at
            events.append(event)
        if self._pending and time.monotonic() - self._last_progress > DISK_TIMEOUT:
            events += self._give_up()
        return events

    def _wait_for_events(self) -> None:
        deadline = time.monotonic() + EVENT_WAIT
        while (remaining := deadline - time.monotonic()) > 0:
            self._event_arrived.clear()
            if len(self._events) >= len(self._pending):
                break
            self._event_arrived.wait(remaining)

    def _give_up(self) -> list[DiskEvent]:
        """Return events that report all pending fetches as missed."""
        self._warn(
            "late",
            f"the disk has not answered for {DISK_TIMEOUT:g} s: {len(self._pending)} blocks are "
            "computed instead",
        )
        events = []
        for fetch, generation in self._pending.values():
            if self._generations[fetch.host_block] == generation:
                # With the new generation, readers skip fetches that they have not started.
                self._new_generation(fetch.host_block)
            events.append(DiskEvent("missed", fetch.hash, fetch.fetch_id, "late", DISK_TIMEOUT))
        self._pending.clear()
        return events

    def _when_stored(self, host_block: int, action: Callable[[], None]) -> None:
        """Call `action` after the last store of the host block, at once or in collect_events()."""
        event = self._staging.stored.get(host_block) if self._staging is not None else None
        if event is None or event.query():
            action()
        else:
            self._deferred.append((event, action))

    def _new_generation(self, host_block: int) -> int:
        """Return a new generation for a host block that gets a new content.

        If a thread is copying the old content, this waits for about a millisecond.
        """
        with self._locks[host_block]:
            if self.checksums is not None:
                self.checksums.forget(host_block)
            self._last_generation += 1
            self._generations[host_block] = self._last_generation
            return self._last_generation

    # ---- threads ---------------------------------------------------------------------------------

    def _read_loop(self) -> None:
        assert self.disk is not None
        while (job := self._read_jobs.get()) is not None:
            if isinstance(job, bytes):
                self.disk.remove(job)
            else:
                self._read_part(*job)

    def _read_part(self, read: RecordRead, start: int) -> None:
        started_at = time.monotonic()
        with read.lock:
            is_first = not read.has_reader
            read.has_reader = True
        if is_first:
            self._open_record(read, started_at)
        miss_reason = read.miss_reason
        if not miss_reason and not read.opened.wait(OPEN_TIMEOUT):
            miss_reason = "late"
        miss_reason = miss_reason or read.miss_reason
        if not miss_reason and self._generations[read.fetch.host_block] != read.generation:
            miss_reason = "overtaken"
        if not miss_reason:
            assert read.record is not None
            target = self._bytes[read.buffer].data[start : start + PART_BYTES]
            miss_reason, _ = self._attempt(read.record.read, target, start)
        with read.lock:
            read.miss_reason = read.miss_reason or miss_reason
            read.reader_seconds += time.monotonic() - started_at
            read.unread_parts -= 1
            is_last = not read.unread_parts
        if is_last:
            self._finish_read(read)

    def _open_record(self, read: RecordRead, started_at: float) -> None:
        read.started_at = started_at
        read.buffer = self._spare_buffers.pop()
        reason = "overtaken"
        if self._generations[read.fetch.host_block] == read.generation:
            reason, read.record = self._attempt(
                Record, self.disk, read.fetch.hash, read.fetch.tokens
            )
        with read.lock:
            # The reader of another part may have set a reason already.
            read.miss_reason = read.miss_reason or reason
        read.opened.set()

    def _finish_read(self, read: RecordRead) -> None:
        """End a read after all its parts were read, or were skipped after a miss."""
        fetch = read.fetch
        buffer = read.buffer
        record = read.record
        if not read.miss_reason and record is not None and self.checksums is None:
            read.miss_reason, _ = self._attempt(record.verify, self._bytes[buffer].data)
        if not read.miss_reason and record is not None:
            with self._locks[fetch.host_block]:
                if self._generations[fetch.host_block] == read.generation:
                    own_buffer = self.buffer_of[fetch.host_block]
                    self.buffer_of[fetch.host_block], buffer = buffer, own_buffer
                    if self.checksums is not None:
                        self.checksums.expect(fetch.host_block, fetch.hash, record.kv_checksum)
        self._spare_buffers.append(buffer)
        if read.miss_reason:
            event = DiskEvent("missed", fetch.hash, fetch.fetch_id, read.miss_reason)
        else:
            seconds = time.monotonic() - read.started_at
            event = DiskEvent("fetched", fetch.hash, fetch.fetch_id, seconds=seconds)
        self._report(event, read.reader_seconds)
        if record is not None:
            # The file is closed after the report, because nothing waits for that.
            record.close(used=not read.miss_reason)

    def _save_loop(self) -> None:
        assert self.disk is not None
        buffer = np.empty(self.block_bytes, dtype=np.uint8)
        last_sweep = time.monotonic()
        paused_until = 0.0
        while (job := self._save_jobs.get()) is not None:
            save, generation = job
            now = time.monotonic()
            if now - last_sweep > SWEEP_INTERVAL:
                last_sweep = now
                self._report(DiskEvent("listed", listed_hashes=self.disk.sweep()))
            reason = "paused"
            if now >= paused_until:
                reason, _ = self._attempt(self._save, save, generation, buffer)
            if reason in ("full", "io", "error"):
                paused_until = time.monotonic() + WRITE_PAUSE
            kind = "unsaved" if reason else "saved"
            self._report(DiskEvent(kind, save.hash, reason=reason))

    def _save(self, save: Save, generation: int, buffer: np.ndarray) -> None:
        assert self.disk is not None
        with self._locks[save.host_block]:
            if self._generations[save.host_block] != generation:
                raise DiskMiss("overtaken")
            buffer[:] = self._bytes[self.buffer_of[save.host_block]]
        self.disk.write(save.hash, save.tokens, buffer.data)

    def _attempt(self, work: Callable[..., Any], *arguments: object) -> tuple[str, Any]:
        """Call a function. Returns ("", its result), or (the reason of a failure, None)."""
        try:
            return "", work(*arguments)
        except DiskMiss as miss:
            # These reasons are normal if several servers share a directory, or if a disk is slow.
            if miss.reason not in ("gone", "overtaken"):
                self._warn(miss.reason, f"KV on disk: {miss}")
            return miss.reason, None
        except Exception as error:
            self._warn("error", f"KV on disk: {type(error).__name__}: {error}")
            return "error", None

    def _report(self, event: DiskEvent, reader_seconds: float = 0.0) -> None:
        """Pass an event to the engine's thread.

        That thread is woken only when every fetch has an event, because a reader must wait for the
        interpreter lock each time it wakes.
        """
        self._events.append(TimedEvent(time.monotonic(), event, reader_seconds))
        if len(self._events) >= len(self._pending):
            self._event_arrived.set()

    def _warn(self, kind: str, message: str) -> None:
        now = time.monotonic()
        if now - self._last_warning.get(kind, -WARNING_INTERVAL) >= WARNING_INTERVAL:
            self._last_warning[kind] = now
            log.warning("%s", message)

    def close(self, timeout: float = 10.0) -> None:
        """Write the pending saves, and end the threads. This takes at most `timeout` seconds."""
        for event, action in self._deferred:
            event.synchronize()
            action()
        self._deferred.clear()
        for _ in self._threads[1:]:
            self._read_jobs.put(None)
        self._save_jobs.put(None)
        deadline = time.monotonic() + timeout
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self._threads = []
        if self._staging is not None and self.buffers.numel():
            page_unlock(self.buffers)
            self.buffers = self.buffers[:0]
