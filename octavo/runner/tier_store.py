"""The bytes of the tiers below the device: slots in host memory, and records on disk behind them.

    plan.stores   block -> slot     before the step overwrites the block      } copies, in plan order
    plan.loads    slot -> block     before the step reads it                  }
    plan.saves    slot -> disk      by a thread, some time later, if the slot still holds the same
    plan.fetches  disk -> slot      by threads; news says when it is there, or that it will not be

On a GPU a store goes on after its step (staging.py). A slot changes owner with everything that comes into it, under the slot's
lock; a thread touches a slot only under that lock and only if its owner is the one it was asked for. A slot's bytes lie in one
row of host memory, and there are as many rows besides as readers: a record is read into one of those, which then changes places
with the slot's, so nothing is copied, and a read that never returns keeps no slot. Threads never call CUDA, which would break a
graph that is being captured: they are told of a slot once its store is over. On a GPU they do not add up what they read: loads
do (checksums.py). Knows slots and hashes; who wants them, core knows.
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
from typing import Any

import numpy as np
import torch

from octavo.ops.huge_pages import area
from octavo.runner.checksums import Check, Checksums
from octavo.runner.disk import PAGE, Disk, Miss, Record
from octavo.runner.kvstore import KVStore
from octavo.runner.staging import Stage, page_lock, page_unlock
from octavo.types import DiskEvent, Fetch, Plan, Save

log = logging.getLogger(__name__)

READERS = 16  # threads at most
# bytes of a record that a reader takes at a time: whole ones come in rounds, and the link waits
# between those
PART = 4 << 20
# of the cores: with a reader on every one the engine's own thread hears late of what came, and
# loads it late
BUSY = 0.75
PATIENCE = 2.0  # seconds without an answer from the disk, after which nobody waits for it
# for a file to be opened: one that hangs keeps who opens it, and those with its other parts no
# longer
OPENING = PATIENCE / 10
# seconds to gather news when there is nothing else to do: a step for each would take the readers'
# interpreter
LISTEN = 0.001
SWEEP = 60.0  # seconds between looks at what others put into the directory
PAUSE = 10.0  # seconds without writing after a write failed
QUIET = 60.0  # seconds between two warnings of one kind


class Read:
    """A record on its way into a row, in parts that any reader takes, in order: who takes the first opens it. So of all that are
    under way at most one has parts that nobody has taken, and there are never more than readers."""

    def __init__(self, fetch: Fetch, owner: int, parts: int):
        self.fetch = fetch
        self.owner = owner
        self.left = parts
        self.lock = threading.Lock()
        self.taken = False
        self.opened = threading.Event()
        self.row = -1
        self.record: Record | None = None
        self.why = ""  # it is a miss
        # when it was begun, and what readers took for it, each for itself
        self.start = self.seconds = 0.0


class TierStore:
    def __init__(
        self,
        kv: KVStore,
        slots: int,
        disk: Disk | None = None,
        staging: int = 0,
        sealed: bool | None = None,
    ):
        """`staging`: bytes of device memory for stores on their way; a block each way is the least. `sealed`: what comes from
        the disk is checked when it is loaded, and not by who reads it; as a rule on a GPU."""
        self.kv = kv.tensor
        self.disk = disk
        self.slots = slots
        self.block_bytes = kv.tensor[0].nbytes
        cuda = kv.tensor.is_cuda
        readers = min(READERS, math.ceil(BUSY * (os.cpu_count() or 1))) if disk is not None else 0
        plain = area((slots + readers) * self.block_bytes)
        # [slots + readers, ...]: rows
        self.host = plain.view(kv.tensor.dtype).view(-1, *kv.tensor.shape[1:])
        if cuda:
            page_lock(plain)
        self._bytes = plain.view(-1, self.block_bytes).numpy()
        self.row = list(range(slots))  # of each slot
        self._spare = list(range(slots, slots + readers))
        self._owner = [0] * slots
        self._locks = [threading.Lock() for _ in range(slots)]
        self._owners = 0
        self._stage = Stage(self.kv, self.host, self.row, staging) if cuda else None
        sealed = cuda if sealed is None else sealed
        self.seals = Checksums(self.kv) if sealed and self.block_bytes % PAGE == 0 else None
        self._check: Check | None = None  # of what was loaded last
        # (when, what, readers' seconds), from the threads
        self._news: deque[tuple[float, DiskEvent, float]] = deque()
        self._bell = threading.Event()
        # fetches that have no news yet, and who owns their slots
        self._pending: dict[int, tuple[Fetch, int]] = {}
        self._progress = 0.0  # when the disk last gave something, or was first asked
        self.reading = 0.0  # seconds that readers took for what was fetched, each for itself
        # from where on; or what to remove
        self._reads: queue.SimpleQueue[tuple[Read, int] | bytes | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[tuple[Save, int] | None] = queue.SimpleQueue()
        # CUDA events, and what to do after each
        self._held: deque[tuple[Any, Callable[[], None]]] = deque()
        self.fetch_ids = itertools.count(1)  # of every scheduler that uses this store
        self._warned: dict[str, float] = {}
        self._threads: list[threading.Thread] = []
        if disk is not None:
            self._threads = [threading.Thread(target=self._save_all, daemon=True, name="kv-save")]
            for _ in range(readers):
                self._threads.append(
                    threading.Thread(target=self._fetch_all, daemon=True, name="kv-fetch")
                )
            for thread in self._threads:
                thread.start()

    # ---- a step ------------------------------------------------------------------------------------

    def begin(self, plan: Plan) -> None:
        """What leaves the device, and what the disk is asked. Before anything else of the step."""
        for _, slot in plan.stores:
            self._own(slot)
        if self._stage is not None:
            self._stage.store(plan.stores)
        else:
            for block, slot in plan.stores:
                self.host[self.row[slot]].copy_(self.kv[block])
        for save in plan.saves:
            if self._saves.qsize() + len(self._held) < self.slots:
                self._when_stored(
                    save.host_block, partial(self._saves.put, (save, self._owner[save.host_block]))
                )
            else:  # it could not still be there when its turn comes
                self._tell(DiskEvent("unsaved", save.hash, reason="behind"))
        if plan.fetches and not self._pending:
            self._progress = time.monotonic()
        for fetch in plan.fetches:
            self._pending[fetch.fetch_id] = fetch, (owner := self._own(fetch.host_block))
            self._when_stored(fetch.host_block, partial(self._ask, fetch, owner))

    def _ask(self, fetch: Fetch, owner: int) -> None:
        parts = range(0, self.block_bytes, PART)
        read = Read(fetch, owner, len(parts))
        for at in parts:
            self._reads.put((read, at))

    def load(self, loads: list[tuple[int, int]]) -> None:
        if self._stage is not None:
            self._stage.await_stores([slot for slot, _ in loads])
        # in one call: each gives up the interpreter, readers take it, and it is a while until
        # they give it back
        if loads:
            rows = [self.host[self.row[slot]] for slot, _ in loads]
            blocks = [self.kv[block] for _, block in loads]
            torch._foreach_copy_(blocks, rows, non_blocking=True)
        if self.seals is not None:
            self._check = self.seals.check(loads)

    def take_check(self) -> Check | None:
        """Of the step that was just launched, if it loaded what came from disk."""
        check = self._check
        self._check = None
        return check

    def spoilt(self, check: Check) -> set[int]:
        """Slots whose records were not what they once were. They are removed. The step must be over."""
        found = check.spoilt()
        for h in found.values():
            self._warn("corrupt", "KV on disk: corrupt: checksum of KV")
            self._reads.put(h)
        return set(found)

    def news(self, wait: bool) -> list[DiskEvent]:
        """What the disk did since the last call, each fetch once. `wait`: a moment, unless all that was asked is answered."""
        while self._held and self._held[0][0].query():
            self._held.popleft()[1]()
        until = time.monotonic() + LISTEN
        while wait and (left := until - time.monotonic()) > 0:
            self._bell.clear()
            if len(self._news) >= len(self._pending):
                break
            self._bell.wait(left)
        out: list[DiskEvent] = []
        while self._news:
            when, news, seconds = self._news.popleft()
            if news.fetch_id and self._pending.pop(news.fetch_id, None) is None:
                continue  # it was late, and nobody waits any more
            if news.kind == "fetched":
                self.reading += seconds
                # beside others: what it added to their time
                news = news._replace(
                    seconds=max(when - max(self._progress, when - news.seconds), 1e-9)
                )
            if news.fetch_id:
                self._progress = when
            out.append(news)
        if self._pending and time.monotonic() - self._progress > PATIENCE:
            self._warn(
                "late",
                f"the disk has not answered for {PATIENCE:g} s: {len(self._pending)} blocks are computed instead",
            )
            for fetch, owner in self._pending.values():
                if self._owner[fetch.host_block] == owner:
                    self._own(fetch.host_block)  # who has not begun to read it need not
                out.append(DiskEvent("missed", fetch.hash, fetch.fetch_id, "late", PATIENCE))
            self._pending.clear()
        return out

    def _when_stored(self, slot: int, then: Callable[[], None]) -> None:
        """At once, or after the next step that finds the latest store into this slot done."""
        event = self._stage.stored.get(slot) if self._stage is not None else None
        if event is None or event.query():
            then()
        else:
            self._held.append((event, then))

    def _own(self, slot: int) -> int:
        """Something new comes into the slot. Waits for a thread that is copying out of it: a millisecond."""
        with self._locks[slot]:
            if self.seals is not None:
                self.seals.drop(slot)
            self._owners += 1
            self._owner[slot] = self._owners
            return self._owners

    # ---- the disk's threads --------------------------------------------------------------------------

    def _fetch_all(self) -> None:
        assert self.disk is not None
        while (job := self._reads.get()) is not None:
            if isinstance(job, bytes):
                self.disk.remove(job)
                continue
            read, at = job
            start = time.monotonic()
            with read.lock:
                first = not read.taken
                read.taken = True
            if first:
                self._open(read, start)
            why = read.why or ("late" if not read.opened.wait(OPENING) else "")
            why = (
                why
                or read.why
                or ("overtaken" if self._owner[read.fetch.host_block] != read.owner else "")
            )
            if not why:
                assert read.record is not None
                why, _ = self._tried(
                    read.record.read, self._bytes[read.row].data[at : at + PART], at
                )
            with read.lock:
                read.why = read.why or why
                read.seconds += time.monotonic() - start
                read.left -= 1
                last = not read.left
            if last:
                self._close(read)

    def _open(self, read: Read, start: float) -> None:
        read.start = start
        read.row = self._spare.pop()
        why = "overtaken"
        if self._owner[read.fetch.host_block] == read.owner:
            why, read.record = self._tried(Record, self.disk, read.fetch.hash, read.fetch.tokens)
        with read.lock:
            read.why = read.why or why  # of the others some may have given up
        read.opened.set()

    def _close(self, read: Read) -> None:
        """All of its parts are over."""
        fetch = read.fetch
        row = read.row
        record = read.record
        if not read.why and record is not None and self.seals is None:
            read.why, _ = self._tried(record.compare, self._bytes[row].data)
        if not read.why and record is not None:
            with self._locks[fetch.host_block]:
                if self._owner[fetch.host_block] == read.owner:
                    self.row[fetch.host_block], row = row, self.row[fetch.host_block]
                    if self.seals is not None:
                        self.seals.put(fetch.host_block, fetch.hash, record.seal)
        self._spare.append(row)
        kind, seconds = ("missed", 0.0) if read.why else ("fetched", time.monotonic() - read.start)
        self._tell(DiskEvent(kind, fetch.hash, fetch.fetch_id, read.why, seconds), read.seconds)
        if record is not None:
            record.close(used=not read.why)  # nobody waits for this

    def _save_all(self) -> None:
        assert self.disk is not None
        buffer = np.empty(self.block_bytes, dtype=np.uint8)
        swept = time.monotonic()
        paused = 0.0
        while (job := self._saves.get()) is not None:
            save, owner = job
            now = time.monotonic()
            if now - swept > SWEEP:
                swept = now
                self._tell(DiskEvent("listed", listed_hashes=self.disk.sweep()))
            why = "paused" if now < paused else self._tried(self._save, save, owner, buffer)[0]
            if why in ("full", "io", "error"):
                paused = time.monotonic() + PAUSE
            self._tell(DiskEvent("unsaved" if why else "saved", save.hash, reason=why))

    def _save(self, save: Save, owner: int, buffer: np.ndarray) -> None:
        assert self.disk is not None
        with self._locks[save.host_block]:
            if self._owner[save.host_block] != owner:
                raise Miss("overtaken")
            buffer[:] = self._bytes[self.row[save.host_block]]
        self.disk.write(save.hash, save.tokens, buffer.data)

    def _tried(self, work: Callable[..., Any], *arguments: object) -> tuple[str, Any]:
        """In a word why the work failed, empty if it did not; and what it gave."""
        try:
            return "", work(*arguments)
        except Miss as miss:
            # those happen where several servers share a directory, or a slow disk
            if miss.why not in ("gone", "overtaken"):
                self._warn(miss.why, f"KV on disk: {miss}")
            return miss.why, None
        except Exception as error:
            self._warn("error", f"KV on disk: {type(error).__name__}: {error}")
            return "error", None

    def _tell(self, news: DiskEvent, seconds: float = 0.0) -> None:
        """The engine's thread is not woken for each: every time it is, a reader waits for the interpreter."""
        self._news.append((time.monotonic(), news, seconds))
        if len(self._news) >= len(self._pending):
            self._bell.set()

    def _warn(self, kind: str, message: str) -> None:
        now = time.monotonic()
        if now - self._warned.get(kind, -QUIET) >= QUIET:
            self._warned[kind] = now
            log.warning("%s", message)

    def close(self, patience: float = 10.0) -> None:
        """Write what is waiting to be written, within reason, and end the threads."""
        for event, then in self._held:
            event.synchronize()
            then()
        self._held.clear()
        for _ in self._threads[1:]:
            self._reads.put(None)
        self._saves.put(None)
        deadline = time.monotonic() + patience
        for thread in self._threads:
            thread.join(max(deadline - time.monotonic(), 0.0))
        self._threads = []
        if self._stage is not None and self.host.numel():
            page_unlock(self.host)
            self.host = self.host[:0]
