"""The index of the tiers below the device: which contents are in host memory, and which on disk.

It works on hashes and host blocks; the runner moves the bytes (runner/tier_store.py). A host block
is in exactly one state:

    free      it holds nothing
    filling   a store in flight, or the disk, writes to it: its content cannot be found yet
    ready     its content can be found. The least recently used one is evicted, unless a step in
              flight reads it (a pin)

    device block ---stores---> host block ---saves----> disk
    device block <--loads----- host block <--fetches--- disk

A store counts once its step is committed, so a failed step leaves nothing behind. The blocks of a
sequence are fetched from disk at most once between two preemptions. The sequence waits while this
is expected to be faster than computing, and is then admitted with the blocks that have arrived.
Blocks that arrive are promoted at once to available device blocks: copies to the device overlap
with disk reads, and checksums are verified on the device, where that is fast. No sequence uses a
block from disk before its checksum is verified.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from typing import NamedTuple

from octavo.core.blocks import BlockPool, FullBlock
from octavo.core.offload_costs import DISK_RATE, HOST_RATE, OffloadCosts
from octavo.events import (
    BlocksAllocated,
    BlocksReleased,
    DiskListed,
    Event,
    StepLanded,
    TierDropped,
    TierLoaded,
    TierReady,
    TierRequested,
    TierStored,
)
from octavo.types import DiskEvent, DiskWait, Fetch, Plan, Save, Sequence, StepResult


@dataclass(slots=True)
class TierCounters:
    """Totals since the start, in blocks unless the name says otherwise."""

    stores: int = 0  # device -> host
    loads: int = 0  # host -> device
    saves: int = 0  # host -> disk
    fetches: int = 0  # disk -> host
    host_tokens: int = 0  # positions served from host memory
    disk_tokens: int = 0  # positions served from disk
    evictions: int = 0  # contents evicted from host memory
    dropped: int = 0  # contents that left the device and found no host block
    refused: int = 0  # admissions and lookups on disk that chose recomputing over loading
    load_seconds: float = field(default=0.0, repr=False)  # total, where it was measured
    fetch_seconds: float = field(default=0.0, repr=False)  # sum over fetches, although they overlap
    misses: dict[str, int] = field(default_factory=dict)  # failed disk operations by reason

    def add_miss(self, reason: str) -> None:
        self.misses[reason] = self.misses.get(reason, 0) + 1


class Promotion(NamedTuple):
    """A content from disk on its way to the device, not yet owned by any sequence."""

    full_block: FullBlock
    host_block: int
    tenant: str  # tenant of the request that asked for it


class TierIndex:
    def __init__(
        self, pool: BlockPool, num_host_blocks: int, block_bytes: int, has_disk: bool = False
    ):
        self.pool = pool
        self.num_host_blocks = num_host_blocks
        self.block_size = pool.block_size
        self.block_bytes = block_bytes
        self.has_disk = has_disk
        # The lists below are indexed by host block.
        self.hashes: list[bytes | None] = [None] * num_host_blocks
        self.block_tokens: list[array[int] | None] = [None] * num_host_blocks  # compared on a hit
        self.pin_counts = [0] * num_host_blocks  # fills and loads in flight that use the block
        self.free_blocks = list(range(num_host_blocks))
        self.ready: OrderedDict[bytes, int] = OrderedDict()  # oldest first
        self.filling: dict[bytes, int] = {}
        self.fetching: dict[int, Fetch] = {}  # by fetch_id
        self.unverified: set[int] = set()  # host blocks read from disk and not promoted yet
        self.on_disk: set[bytes] = set()
        self.promotions: dict[int, list[Promotion]] = {}  # by step in flight
        self.promoting: dict[bytes, int] = {}  # hash -> device block, unless invalidated since
        # The number of fills and promotions that have ended. After it has changed, sequences that
        # wait for the disk are looked up again.
        self.transfers_ended = 1
        self.counters = TierCounters()
        self.costs = OffloadCosts(pool.block_size, block_bytes / HOST_RATE, block_bytes / DISK_RATE)
        self.fetch_ids: Iterator[int] = count(1)
        self.events = pool.events
        self.events.subscribe(self.observe_step, StepLanded)

    def observe_step(self, event: Event) -> None:
        """Record the time of a landed step, to decide whether loading pays."""
        assert isinstance(event, StepLanded)
        self.costs.observe_step(event.plan, event.result)

    def attach_store(self, on_disk: Collection[bytes], fetch_ids: Iterator[int]) -> None:
        """Continue with the contents of the runner's tier store. The store outlives a scheduler and
        owns the counter, so that an answer to an earlier scheduler's fetch matches no new fetch."""
        self.on_disk = set(on_disk)
        self.fetch_ids = fetch_ids

    # ---- up: host memory and disk to device ------------------------------------------------------

    def find(self, content_hash: bytes, tokens: array[int]) -> int | None:
        """Return the host block with this content, ready to load. Tokens are compared."""
        host_block = self.ready.get(content_hash)
        if host_block is None or self.block_tokens[host_block] != tokens:
            return None
        return host_block

    def extend_match(
        self,
        blocks: list[int],
        hashes: list[bytes],
        tokens: array[int],
        computing: dict[bytes, int],
    ) -> tuple[list[tuple[int, int]], bool]:
        """Continue a match where the pool's own match ended.

        Appends to `blocks`: a device block, or 0 for a block to load. Returns (logical block, host
        block) of the blocks to load, and False if loading does not pay. It stops at a block that
        another sequence computes or that is being promoted, because that block will be in the pool
        soon."""
        host_hits: list[tuple[int, int]] = []
        pays = True
        for index in range(len(blocks), len(hashes)):
            content_hash = hashes[index]
            start = index * self.block_size
            block_tokens = tokens[start : start + self.block_size]
            block = self.pool.find(content_hash, block_tokens)
            if block is None:
                host_block = self.find(content_hash, block_tokens)
                arrives_soon = content_hash in computing or content_hash in self.promoting
                if host_block is None or arrives_soon:
                    break
                pays = self.costs.loading_pays()
                if not pays and not self.costs.probe_is_due:
                    break
                host_hits.append((index, host_block))
            blocks.append(block or 0)
        return host_hits, pays

    def count_decision(self, loading_pays: bool, loads: bool) -> None:
        """Count an admission for which loading did not pay. It `loads` nevertheless as a probe."""
        if not loading_pays:
            self.costs.count_refusal()
            self.counters.refused += not loads

    def request_disk(
        self,
        seq: Sequence,
        blocks: list[int],
        host_hits: list[tuple[int, int]],
        plan: Plan,
        keep_available: int,
    ) -> bool:
        """Fetch the blocks that follow a match, and promote those that have arrived. Returns
        whether the sequence should wait for them.

        A sequence that need not wait does not wait later either, unless a transfer ends: room that
        is made for it within a plan is for its own blocks."""
        nothing_changed = seq.transfers_ended_at_lookup == self.transfers_ended
        if seq.disk_wait is DiskWait.DONE and nothing_changed:
            return False
        waits = self.request_fetches(seq, blocks, host_hits, plan, keep_available)
        return self.promote(seq, plan, keep_available) > 0 or waits

    def request_fetches(
        self,
        seq: Sequence,
        blocks: list[int],
        host_hits: list[tuple[int, int]],
        plan: Plan,
        keep_available: int,
    ) -> bool:
        """Fetch the blocks that follow a match from disk, once between two preemptions. Returns
        whether the sequence should wait for disk events."""
        if not self.has_disk:
            return False
        missing: list[int] = []
        num_filling = 0
        num_promoting = 0
        num_present = len(host_hits)
        for index in range(len(blocks), (len(seq.tokens) - 1) // self.block_size):
            content_hash = seq.block_hashes[index]
            if content_hash in self.promoting:
                num_promoting += 1
            elif content_hash in self.ready or content_hash in self.pool.hash_index:
                num_present += 1
            elif content_hash in self.filling:
                num_filling += 1
            elif seq.disk_wait is DiskWait.NOT_STARTED and content_hash in self.on_disk:
                missing.append(index)
            else:
                break
        if missing:
            # Fetches must not evict the sequence's own blocks, and at most as many are started as
            # can be promoted.
            del missing[max(self._num_available() - num_present, 0) :]
            del missing[max(self.pool.num_available - keep_available, 0) :]
            if not self._should_fetch():
                missing = []
                num_filling = 0
        elif seq.disk_wait is DiskWait.WAITING and not self.costs.loading_pays(disk=True):
            num_filling = 0  # the disk is slower than expected: do not wait for further blocks
        if missing:
            for logical_block, _ in host_hits:
                self.ready.move_to_end(seq.block_hashes[logical_block])
        for index in missing:
            self._start_fetch(seq, index, plan)
        waits = bool(missing or num_filling or num_promoting)
        seq.disk_wait = DiskWait.WAITING if waits else DiskWait.DONE
        seq.transfers_ended_at_lookup = self.transfers_ended
        return waits

    def _should_fetch(self) -> bool:
        """Return whether to fetch from disk, because it pays or as a probe. Counts a refusal."""
        if self.costs.loading_pays(disk=True):
            return True
        probes = self.costs.probe_is_due
        self.costs.count_refusal()
        self.counters.refused += not probes
        return probes

    def _start_fetch(self, seq: Sequence, index: int, plan: Plan) -> None:
        host_block = self._allocate()
        assert host_block is not None
        start = index * self.block_size
        fetch = Fetch(
            fetch_id=next(self.fetch_ids),
            host_block=host_block,
            hash=seq.block_hashes[index],
            tokens=seq.tokens[start : start + self.block_size],
        )
        self._start_filling(host_block, fetch.hash, fetch.tokens)
        self.fetching[fetch.fetch_id] = fetch
        plan.fetches.append(fetch)
        self.counters.fetches += 1
        if TierRequested in self.events.listeners:
            self.events.emit(TierRequested(fetch.hash, host_block))

    def load(self, host_block: int, block: int, plan: Plan) -> None:
        """Copy a verified host block to the device. It is pinned until the step has ended."""
        assert host_block not in self.unverified, "the content has not been verified"
        content_hash = self.hashes[host_block]
        assert content_hash is not None
        self.ready.move_to_end(content_hash)
        self._load(host_block, block, plan)
        self.counters.host_tokens += self.block_size

    def _load(self, host_block: int, block: int, plan: Plan) -> None:
        self.pin_counts[host_block] += 1
        plan.loads.append((host_block, block))
        self.counters.loads += 1
        content_hash = self.hashes[host_block]
        if TierLoaded in self.events.listeners and content_hash is not None:
            self.events.emit(TierLoaded("host", content_hash, host_block, block))

    def promote(self, seq: Sequence, plan: Plan, keep_available: int) -> int:
        """Copy blocks of a sequence's text that have arrived from disk to the device, in any order.

        At least `keep_available` device blocks stay available for running sequences. Returns how
        many blocks were promoted."""
        if not self.unverified:
            return 0
        promotions: list[Promotion] = []
        hashes = seq.block_hashes
        for index in range((len(seq.tokens) - 1) // self.block_size):
            start = index * self.block_size
            tokens = seq.tokens[start : start + self.block_size]
            host_block = self.find(hashes[index], tokens)
            has_room = self.pool.num_available > keep_available
            if host_block in self.unverified and has_room:
                self.unverified.remove(host_block)
                block = self.pool.allocate()
                if BlocksAllocated in self.events.listeners:
                    self.events.emit(BlocksAllocated(None, 0, [block]))
                self._load(host_block, block, plan)
                self.promoting[hashes[index]] = block
                parent = hashes[index - 1] if index else b""
                full_block = FullBlock(block, hashes[index], tokens, parent)
                promotions.append(Promotion(full_block, host_block, seq.request.tenant))
        if promotions:
            self.promotions.setdefault(plan.step, []).extend(promotions)
            seq.disk_wait = DiskWait.WAITING
            seq.transfers_ended_at_lookup = self.transfers_ended
        return len(promotions)

    def finish_promotions(
        self, plan: Plan, failed: bool = False, corrupt: Collection[int] = ()
    ) -> None:
        """Publish the contents that a step promoted. A content is discarded instead if the step
        failed, or if it is corrupt or was invalidated meanwhile."""
        # Tail first, so that prefixes outlive suffixes in the cache.
        for full_block, host_block, tenant in reversed(self.promotions.pop(plan.step, [])):
            if self.promoting.get(full_block.hash) == full_block.block:
                del self.promoting[full_block.hash]
                if not failed and host_block not in corrupt:
                    self.pool.publish(full_block, tenant)
                    self.counters.disk_tokens += self.block_size
                else:
                    self._discard(host_block)
            if host_block in corrupt:
                self.counters.add_miss("corrupt")
                self._forget_on_disk(full_block.hash)
            self.pool.release(full_block.block)
            if BlocksReleased in self.events.listeners:
                self.events.emit(BlocksReleased(None, [full_block.block]))
            self.transfers_ended += 1

    # ---- down: device to host memory and disk ----------------------------------------------------

    def demote(self, plan: Plan) -> None:
        """Store the contents that the plan evicts from the device, and save them to disk later.

        A block on disk is useless without the blocks before it. Those may stay on the device for
        ever, so they are stored along with it."""
        pool = self.pool
        for removed in pool.unpublished_blocks:
            if removed.hash in self.ready:
                self.ready.move_to_end(removed.hash)
            elif removed.hash not in self.filling and self._store(removed, plan) and self.has_disk:
                parent = pool.full_block(removed.parent)
                while parent and not self._has(parent.hash) and self._store(parent, plan):
                    parent = pool.full_block(parent.parent)

    def flush(self, plan: Plan) -> None:
        """Store contents that are only on the device, most recently used first, while they fit."""
        pool = self.pool
        for block in reversed(pool.available_blocks):
            full_block = pool.full_block(pool.hashes[block] or b"")
            has_room = len(plan.stores) < self.num_host_blocks
            if full_block and not self._has(full_block.hash) and has_room:
                self._store(full_block, plan)

    def _has(self, content_hash: bytes) -> bool:
        return (
            content_hash in self.ready
            or content_hash in self.filling
            or content_hash in self.on_disk
        )

    def _store(self, full_block: FullBlock, plan: Plan) -> bool:
        host_block = self._allocate()
        if host_block is None:
            self.counters.dropped += 1
            return False
        self._start_filling(host_block, full_block.hash, full_block.tokens)
        plan.stores.append((full_block.block, host_block))
        self.counters.stores += 1
        if TierStored in self.events.listeners:
            self.events.emit(TierStored("host", full_block.hash, full_block.block, host_block))
        if self.has_disk and full_block.hash not in self.on_disk:
            plan.saves.append(Save(host_block, full_block.hash, full_block.tokens))
        return True

    # ---- results ---------------------------------------------------------------------------------

    def commit(self, plan: Plan, result: StepResult) -> None:
        self._end_step(plan, True)
        self.counters.load_seconds += result.load_seconds
        for event in result.disk_events:
            self._handle(event)

    def fail(self, plan: Plan) -> None:
        """Undo the moves of a step that failed. It may have done all of them, some or none."""
        self._end_step(plan, False)
        for fetch in plan.fetches:
            if self.fetching.pop(fetch.fetch_id, None):
                self._finish_filling(fetch.host_block, False)

    def _end_step(self, plan: Plan, stored: bool) -> None:
        for _, host_block in plan.stores:
            self._finish_filling(host_block, stored)
        for host_block, _ in plan.loads:
            self.pin_counts[host_block] -= 1
            self._free_if_unused(host_block)

    def _handle(self, event: DiskEvent) -> None:
        if event.kind == "listed":
            self.on_disk = set(event.listed_hashes)
            if DiskListed in self.events.listeners:
                self.events.emit(DiskListed(len(self.on_disk)))
        elif event.kind == "saved":
            self.on_disk.add(event.hash)
            self.counters.saves += 1
            if TierStored in self.events.listeners:
                self.events.emit(TierStored("disk", event.hash, block=0, host_block=-1))
        elif event.kind == "unsaved":
            self.counters.add_miss(event.reason)
        elif fetch := self.fetching.pop(event.fetch_id, None):
            self._handle_fetch(event, fetch)

    def _handle_fetch(self, event: DiskEvent, fetch: Fetch) -> None:
        arrived = event.kind == "fetched"
        if arrived and TierLoaded in self.events.listeners:
            self.events.emit(TierLoaded("disk", fetch.hash, fetch.host_block, block=0))
        if event.seconds:
            self.costs.observe_fetch(event.seconds)
            self.counters.fetch_seconds += event.seconds
        if not arrived:
            self.counters.add_miss(event.reason)
            self._forget_on_disk(fetch.hash)
        elif self.hashes[fetch.host_block] is not None:
            self.unverified.add(fetch.host_block)
        self._finish_filling(fetch.host_block, arrived)

    def invalidate(self, hashes: list[bytes]) -> None:
        """Drop bad contents. A copy that is being saved to disk may be fetched later; the sequence
        that reads it then invalidates it again."""
        for content_hash in hashes:
            self._forget_on_disk(content_hash)
            self.promoting.pop(content_hash, None)
            if content_hash in self.ready:
                self._discard(self.ready[content_hash])
            elif (host_block := self.filling.pop(content_hash, None)) is not None:
                self._forget_content(host_block)  # _finish_filling frees it

    def _forget_on_disk(self, content_hash: bytes) -> None:
        if content_hash in self.on_disk:
            self.on_disk.remove(content_hash)
            if TierDropped in self.events.listeners:
                self.events.emit(TierDropped("disk", content_hash, host_block=-1))

    def clear(self) -> None:
        """Forget everything in host memory. Blocks being filled are freed afterwards; the disk
        keeps its records."""
        host_blocks = [*self.ready.values(), *self.filling.values()]
        self.ready.clear()
        self.filling.clear()
        self.unverified.clear()
        self.promoting.clear()
        for host_block in host_blocks:
            self._forget_content(host_block)
            self._free_if_unused(host_block)

    # ---- host blocks -----------------------------------------------------------------------------

    def _num_available(self) -> int:
        num_evictable = sum(not self.pin_counts[block] for block in self.ready.values())
        return len(self.free_blocks) + num_evictable

    def _allocate(self) -> int | None:
        """Return a host block to fill: a free one, or the least recently used unpinned one."""
        if self.free_blocks:
            return self.free_blocks.pop()
        for content_hash, host_block in self.ready.items():
            if not self.pin_counts[host_block]:
                del self.ready[content_hash]
                self.unverified.discard(host_block)
                self.counters.evictions += 1
                self._forget_content(host_block)
                return host_block
        return None

    def _start_filling(self, host_block: int, content_hash: bytes, tokens: array[int]) -> None:
        self.hashes[host_block] = content_hash
        self.block_tokens[host_block] = tokens
        self.pin_counts[host_block] = 1
        self.filling[content_hash] = host_block

    def _finish_filling(self, host_block: int, filled: bool) -> None:
        self.pin_counts[host_block] -= 1
        self.transfers_ended += 1
        content_hash = self.hashes[host_block]
        if content_hash is not None:  # it was not invalidated meanwhile
            del self.filling[content_hash]
            if filled:
                self.ready[content_hash] = host_block
                if TierReady in self.events.listeners:
                    self.events.emit(TierReady(content_hash, host_block))
            else:
                self._forget_content(host_block)
        self._free_if_unused(host_block)

    def _discard(self, host_block: int) -> None:
        """Make a ready host block unfindable."""
        content_hash = self.hashes[host_block]
        if content_hash is not None and self.ready.get(content_hash) == host_block:
            del self.ready[content_hash]
            self.unverified.discard(host_block)
            self._forget_content(host_block)
            self._free_if_unused(host_block)

    def _forget_content(self, host_block: int) -> None:
        content_hash = self.hashes[host_block]
        if content_hash is not None and TierDropped in self.events.listeners:
            self.events.emit(TierDropped("host", content_hash, host_block))
        self.hashes[host_block] = None
        self.block_tokens[host_block] = None

    def _free_if_unused(self, host_block: int) -> None:
        if self.hashes[host_block] is None and not self.pin_counts[host_block]:
            self.free_blocks.append(host_block)

    def all_promotions(self) -> Iterator[Promotion]:
        return chain.from_iterable(self.promotions.values())

    def check(self) -> None:
        """Raise AssertionError unless every host block is in exactly one state."""
        for contents in (self.ready, self.filling):
            assert all(
                self.hashes[block] == content_hash for content_hash, block in contents.items()
            ), "the index names a host block with another content"
        ready = list(self.ready.values())
        filling = list(self.filling.values())
        all_blocks = range(self.num_host_blocks)
        named = [block for block in all_blocks if self.hashes[block] is not None]
        assert sorted(ready + filling) == named, "a host block is in two states"
        unused = [
            block
            for block in all_blocks
            if self.hashes[block] is None and not self.pin_counts[block]
        ]
        assert sorted(self.free_blocks) == unused, "a host block is lost, or free and in use"
        assert all(pins >= 0 for pins in self.pin_counts), "a host block was unpinned twice"
        assert all(self.pin_counts[block] for block in filling), "a block being filled has no pin"
        assert all(self.pin_counts[fetch.host_block] for fetch in self.fetching.values()), (
            "a host block was reused while the disk fills it"
        )
        assert self.unverified <= set(ready), "an unverified host block holds nothing"
        assert all(
            (content_hash is None) == (tokens is None)
            for content_hash, tokens in zip(self.hashes, self.block_tokens, strict=True)
        )
        promoted = {
            (promotion.full_block.hash, promotion.full_block.block)
            for promotion in self.all_promotions()
        }
        assert self.promoting.items() <= promoted, "no step promotes this content"
