"""The tiers below the device, as an index: which contents lie in which slot of host memory, and which are on disk.

Knows hashes and slots, no bytes: the runner moves those. A host slot is in exactly one state:

    free      nothing in it
    filling   a store of a step in flight, or the disk, is writing to it: it has a content nobody can find yet
    ready     its content can be found. The least recently used one gives way, unless a step in flight reads it (a pin)

    device block --evicted--> host slot --(written behind)--> disk         stores, saves
    device block <--admission-- host slot <--asked for-- disk              loads, fetches

A store counts once its step is committed, so a step that failed leaves nothing behind. A sequence asks the disk once in a
life, waits while that pays, and is then admitted with what has come: whatever the disk does, it gets on. What has come is
lifted to the device at once, into blocks that nobody uses: the link works beside the disk, and not after it, and bytes are
checked where that is fast. Nothing that came from disk is read by anybody before the step that lifted it found it whole.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import chain, count
from typing import NamedTuple

from octavo.core.blocks import BlockPool, Content
from octavo.core.offload_costs import DISK_RATE, LINK_RATE, OffloadCosts
from octavo.types import DiskEvent, DiskWait, Fetch, Plan, Save, Sequence, StepResult

TICKETS = count(1)  # of all engines: a runner outlives them


@dataclass(slots=True)
class TierCounters:
    """What happened so far, in blocks where nothing else is said."""

    stores: int = 0  # device -> host
    loads: int = 0  # host -> device
    saves: int = 0  # host -> disk
    fetches: int = 0  # disk -> host
    host_tokens: int = 0  # positions served by content that lay in host memory
    disk_tokens: int = 0  # likewise on disk
    evictions: int = 0  # contents that gave way in host memory
    dropped: int = 0  # contents that left the device and found no slot
    refused: int = 0  # times that a prompt was sooner computed than loaded
    load_seconds: float = field(default=0.0, repr=False)  # of the loads, where somebody measured
    fetch_seconds: float = field(default=0.0, repr=False)  # of the fetches, one after another
    # what the disk could not give or take, by reason
    misses: dict[str, int] = field(default_factory=dict)

    def miss(self, why: str) -> None:
        self.misses[why] = self.misses.get(why, 0) + 1


class Lift(NamedTuple):
    """A content on its way up, for nobody in particular."""

    content: Content
    slot: int
    owner: str  # the key of who asked for it


class TierIndex:
    def __init__(self, slots: int, block_size: int, block_bytes: int, disk: bool = False):
        self.slots, self.size, self.block_bytes, self.disk = slots, block_size, block_bytes, disk
        self.hash: list[bytes | None] = [None] * slots
        self.tokens: list[array[int] | None] = [None] * slots  # compared on a hit
        self.pins = [0] * slots  # who fills the slot, and loads in flight that read it
        self.free = list(range(slots))
        self.ready: OrderedDict[bytes, int] = OrderedDict()  # oldest first
        self.filling: dict[bytes, int] = {}
        self.fetching: dict[int, Fetch] = {}  # by ticket
        self.fetched: set[int] = set()  # slots whose content came from disk and was not lifted yet
        self.on_disk: set[bytes] = set()
        self.lifted: dict[int, list[Lift]] = {}  # by step in flight
        self.rising: dict[bytes, int] = {}  # of those that nothing forgot: the block
        self.settled = 1  # how often a slot was settled: who waits looks again when this has moved
        self.count = TierCounters()
        self.links = OffloadCosts(block_size, block_bytes / LINK_RATE, block_bytes / DISK_RATE)

    # ---- up: what admission finds ------------------------------------------------------------------

    def find(self, h: bytes, tokens: array[int]) -> int | None:
        """The slot whose content can be loaded. Tokens are compared, as in the pool."""
        slot = self.ready.get(h)
        return slot if slot is not None and self.tokens[slot] == tokens else None

    def extend(
        self,
        hits: list[int],
        hashes: list[bytes],
        tokens: array[int],
        pool: BlockPool,
        computing: dict[bytes, int],
    ) -> list[tuple[int, int]]:
        """Continue a match where the pool's own ended: a hit of 0 is to be loaded. (logical block, slot) of those."""
        size, loads = self.size, list[tuple[int, int]]()
        pays: bool | None = None
        for j in range(len(hits), len(hashes)):
            h, part = hashes[j], tokens[j * size : (j + 1) * size]
            block = pool.find(h, part)
            if not block:
                slot = self.find(h, part)
                # by another: it is in the pool soon
                if slot is None or h in computing or h in self.rising:
                    break
                if pays is None and not (pays := self.links.try_it()):
                    self.count.refused += 1
                if not pays:
                    break
                self.ready.move_to_end(h)
                loads.append((j, slot))
            hits.append(block)
        return loads

    def ask(
        self,
        seq: Sequence,
        hits: list[int],
        loads: list[tuple[int, int]],
        pool: BlockPool,
        plan: Plan,
        spare: int,
    ) -> bool:
        """Have the disk read what follows a match, once in a sequence's life. Whether it should wait for news."""
        if not self.disk:
            return False
        hashes, wanted, coming, rising, here = seq.block_hashes, list[int](), 0, 0, len(loads)
        for j in range(len(hits), (len(seq.tokens) - 1) // self.size):
            h = hashes[j]
            if h in self.rising:
                rising += 1
            elif h in self.ready or h in pool.index:
                here += 1
            elif h in self.filling:
                coming += 1
            elif seq.disk_wait is DiskWait.NOT_ASKED and h in self.on_disk:
                wanted.append(j)
            else:
                break
        if wanted:
            # never at the cost of its own blocks that are here already
            del wanted[max(self._room() - here, 0) :]
            del wanted[max(len(pool.free) - spare, 0) :]  # nor more than can be lifted
            if not self.links.try_it(disk=True):
                self.count.refused += 1
                wanted, coming = [], 0
        elif seq.disk_wait is DiskWait.WAITING and not self.links.pays(disk=True):
            coming = 0  # slower than it seemed: what has come is enough
        for j in wanted:
            slot = self._take()
            assert slot is not None
            fetch = Fetch(
                next(TICKETS), slot, hashes[j], seq.tokens[j * self.size : (j + 1) * self.size]
            )
            self._fill(slot, fetch.hash, fetch.tokens)
            self.fetching[fetch.fetch_id] = fetch
            plan.fetches.append(fetch)
            self.count.fetches += 1
        waits = bool(wanted or coming or rising)
        seq.disk_wait = DiskWait.WAITING if waits else DiskWait.OVER
        seq.disk_events_seen = self.settled
        return waits

    def load(self, slot: int, block: int, plan: Plan) -> None:
        """Nothing else may come into the slot before the step that reads it is over."""
        assert slot not in self.fetched, "a content that nobody has checked"
        self._load(slot, block, plan)
        self.count.host_tokens += self.size

    def _load(self, slot: int, block: int, plan: Plan) -> None:
        self.pins[slot] += 1
        plan.loads.append((slot, block))
        self.count.loads += 1

    def lift(self, seq: Sequence, pool: BlockPool, plan: Plan, spare: int) -> int:
        """What came from the disk of a sequence's text goes up, each block once and in whatever order, as long as so many `spare`
        ones are left to those who run. How many."""
        lifted, size = list[Lift](), self.size
        for j in range((len(seq.tokens) - 1) // size if self.fetched else 0):
            h, tokens = seq.block_hashes[j], seq.tokens[j * size : (j + 1) * size]
            slot = self.find(h, tokens)
            if slot in self.fetched and len(pool.free) > spare:
                self.fetched.remove(slot)
                self._load(slot, block := pool.take(), plan)
                self.rising[h] = block
                lifted.append(
                    Lift(
                        Content(block, h, tokens, seq.block_hashes[j - 1] if j else b""),
                        slot,
                        seq.request.tenant,
                    )
                )
        if lifted:
            self.lifted.setdefault(plan.step, []).extend(lifted)
            seq.disk_wait = DiskWait.WAITING
            seq.disk_events_seen = self.settled
        return len(lifted)

    def land(self, plan: Plan, pool: BlockPool, loaded: bool, spoilt: Collection[int] = ()) -> None:
        """What the step lifted is cached content now, if it was loaded whole and nothing was forgotten meanwhile. What was not
        is not tried again."""
        # tail first, as ever
        for (block, h, tokens, parent), slot, owner in reversed(self.lifted.pop(plan.step, [])):
            if self.rising.get(h) == block:
                del self.rising[h]
                if loaded and slot not in spoilt:
                    pool.publish(block, h, tokens, parent, owner)
                    self.count.disk_tokens += self.size
                else:
                    self._discard(slot)
            if slot in spoilt:
                self.count.miss("corrupt")
                self.on_disk.discard(h)
            pool.drop(block)
            self.settled += 1

    # ---- down: what leaves the device --------------------------------------------------------------

    def demote(self, pool: BlockPool, plan: Plan) -> None:
        """Contents that the plan evicts from the device move here, and from here to the disk as soon as it has time. On disk
        a block is of no use without those before it, which may never leave the device: they are copied with it."""
        for content in pool.evicted:
            if content.hash in self.ready:
                self.ready.move_to_end(content.hash)
            elif content.hash not in self.filling and self._store(content, plan) and self.disk:
                before = pool.content(content.parent)
                while before and not self._below(before.hash) and self._store(before, plan):
                    before = pool.content(before.parent)

    def flush(self, pool: BlockPool, plan: Plan) -> None:
        """At the end: what the device alone has goes to disk, the most recently used first, as much as fits in here."""
        for block in reversed(pool.free):
            content = pool.content(pool.hash[block] or b"")
            if content and not self._below(content.hash) and len(plan.stores) < self.slots:
                self._store(content, plan)

    def _below(self, h: bytes) -> bool:
        return h in self.ready or h in self.filling or h in self.on_disk

    def _store(self, content: Content, plan: Plan) -> bool:
        block, h, tokens, _ = content
        slot = self._take()
        if slot is None:
            self.count.dropped += 1
            return False
        self._fill(slot, h, tokens)
        plan.stores.append((block, slot))
        self.count.stores += 1
        if self.disk and h not in self.on_disk:
            plan.saves.append(Save(slot, h, tokens))
        return True

    # ---- what became of it -------------------------------------------------------------------------

    def commit(self, plan: Plan, result: StepResult) -> None:
        self._end(plan, True)
        self.links.learn(plan, result)
        self.count.load_seconds += result.load_seconds
        for news in result.disk_events:
            self._hear(news)

    def fail(self, plan: Plan) -> None:
        """The step may have done all of its moves, some or none."""
        self._end(plan, False)
        for fetch in plan.fetches:
            if self.fetching.pop(fetch.fetch_id, None):
                self._settle(fetch.host_block, False)

    def _end(self, plan: Plan, stored: bool) -> None:
        for _, slot in plan.stores:
            self._settle(slot, stored)
        for slot, _ in plan.loads:
            self.pins[slot] -= 1
            self._free_if_unused(slot)

    def _hear(self, news: DiskEvent) -> None:
        if news.kind == "listed":
            self.on_disk = set(news.listed_hashes)
        elif news.kind == "saved":
            self.on_disk.add(news.hash)
            self.count.saves += 1
        elif news.kind == "unsaved":
            self.count.miss(news.reason)
        elif fetch := self.fetching.pop(news.fetch_id, None):
            arrived = news.kind == "fetched"
            if news.seconds:
                self.links.learn_fetch(news.seconds)
                self.count.fetch_seconds += news.seconds
            if not arrived:
                self.count.miss(news.reason)
                self.on_disk.discard(fetch.hash)
            elif self.hash[fetch.host_block] is not None:
                self.fetched.add(fetch.host_block)
            self._settle(fetch.host_block, arrived)

    def disown(self, hashes: list[bytes]) -> None:
        """These contents are not what they should be. What is on disk, or on its way there, may come back: who meets it then
        says so again."""
        for h in hashes:
            self.on_disk.discard(h)
            self.rising.pop(h, None)
            if h in self.ready:
                self._discard(self.ready[h])
            elif (
                slot := self.filling.pop(h, None)
            ) is not None:  # given back when it has been filled
                self.hash[slot] = self.tokens[slot] = None

    def forget(self) -> None:
        """Nothing here is findable any more; what is being filled is given back when that is over. The disk keeps its own."""
        known = [*self.ready.values(), *self.filling.values()]
        self.ready.clear()
        self.filling.clear()
        self.fetched.clear()
        self.rising.clear()
        for slot in known:
            self.hash[slot] = self.tokens[slot] = None
            self._free_if_unused(slot)

    # ---- slots -------------------------------------------------------------------------------------

    def _room(self) -> int:
        return len(self.free) + sum(not self.pins[slot] for slot in self.ready.values())

    def _take(self) -> int | None:
        """A slot to fill: a free one, or that of the content unused for longest."""
        if self.free:
            return self.free.pop()
        for h, slot in self.ready.items():
            if not self.pins[slot]:
                del self.ready[h]
                self.fetched.discard(slot)
                self.count.evictions += 1
                return slot
        return None

    def _fill(self, slot: int, h: bytes, tokens: array[int]) -> None:
        self.hash[slot], self.tokens[slot], self.pins[slot] = h, tokens, 1
        self.filling[h] = slot

    def _settle(self, slot: int, filled: bool) -> None:
        """Whoever filled the slot is done with it."""
        self.pins[slot] -= 1
        self.settled += 1
        h = self.hash[slot]
        if h is not None:  # not forgotten meanwhile
            del self.filling[h]
            if filled:
                self.ready[h] = slot
            else:
                self.hash[slot] = self.tokens[slot] = None
        self._free_if_unused(slot)

    def _discard(self, slot: int) -> None:
        """Its content is not to be found any more."""
        h = self.hash[slot]
        if h is not None and self.ready.get(h) == slot:
            del self.ready[h]
            self.fetched.discard(slot)
            self.hash[slot] = self.tokens[slot] = None
            self._free_if_unused(slot)

    def _free_if_unused(self, slot: int) -> None:
        if self.hash[slot] is None and not self.pins[slot]:
            self.free.append(slot)

    def ups(self) -> Iterator[Lift]:
        """All that is on its way up."""
        return chain.from_iterable(self.lifted.values())

    def check(self) -> None:
        """Raise AssertionError unless every slot is in exactly one state."""
        for states in (self.ready, self.filling):
            assert all(self.hash[slot] == h for h, slot in states.items()), (
                "the index names a slot of another content"
            )
        ready, filling = list(self.ready.values()), list(self.filling.values())
        assert sorted([*ready, *filling]) == [
            s for s in range(self.slots) if self.hash[s] is not None
        ], "a slot in two states"
        unused = [s for s in range(self.slots) if self.hash[s] is None and not self.pins[s]]
        assert sorted(self.free) == unused, "a slot is lost, or free and in use"
        assert all(pins >= 0 for pins in self.pins), "a slot was let go twice"
        assert all(self.pins[slot] for slot in filling), "nobody fills a slot that is being filled"
        assert all(self.pins[f.host_block] for f in self.fetching.values()), (
            "a slot was given away while the disk fills it"
        )
        assert self.fetched <= set(ready), "a slot is said to come from disk and holds nothing"
        assert all((h is None) == (t is None) for h, t in zip(self.hash, self.tokens, strict=True))
        assert self.rising.items() <= {(up.content.hash, up.content.block) for up in self.ups()}, (
            "nothing lifts it"
        )
