"""The prefix cache: which blocks of a sequence's text are known, in the pool or in the tiers below it, or are about to be.

    hashes      a b c d e f g        the content chain of its full blocks, but always with a token left to compute
    pool        a b                  shared at once
    tiers           c d              loaded into blocks of its own
    computing           e f          by another sequence: worth waiting for, if that is most of the rest

Knows sequences, blocks and hashes; who is admitted, and when, is the scheduler's business.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.config import CacheConfig
from octavo.core.blocks import BlockPool, chain, root
from octavo.core.tier_index import TierIndex
from octavo.types import DiskWait, Plan, Sequence, StepResult


class Match(NamedTuple):
    """What is known of a text, from its beginning on."""

    hits: list[int]  # blocks; 0 for one that a lower tier has
    loads: list[tuple[int, int]]  # (logical block, host slot) of those


class PrefixCache:
    def __init__(self, cache: CacheConfig, pool: BlockPool):
        self.on, self.pool, self.size = cache.prefix_caching, pool, pool.size
        self.tiers: TierIndex | None = None
        if self.on and cache.host_blocks:
            self.tiers = TierIndex(
                cache.host_blocks, cache.block_size, cache.block_bytes, cache.has_disk
            )
        # content of blocks on their way into the cache -> whose sequence computes it
        self.computing: dict[bytes, int] = {}

    # ---- admission ---------------------------------------------------------------------------------

    def extend_hashes(self, seq: Sequence, full: int) -> None:
        size, hashes = self.size, seq.block_hashes
        for j in range(len(hashes), full):
            parent = hashes[-1] if j else root(seq.request.cache_salt)
            hashes.append(chain(parent, seq.tokens[j * size : (j + 1) * size]))

    def cached_tokens(self, seq: Sequence) -> int:
        """How much of its prompt the prefix cache has, or is about to have."""
        found = 0
        while self.on and found < (len(seq.tokens) - 1) // self.size:
            self.extend_hashes(seq, found + 1)
            if (
                seq.block_hashes[found] not in self.pool.index
                and seq.block_hashes[found] not in self.computing
            ):
                break
            found += 1
        return found * self.size

    def match(self, seq: Sequence) -> Match | None:
        """What there is of its text. None: most of the rest will be there soon."""
        if not self._may_match(seq):
            return Match([], [])
        full = (len(seq.tokens) - 1) // self.size  # always leave a token to compute
        self.extend_hashes(seq, full)
        hits, loads = self.pool.match(seq.block_hashes[:full], seq.tokens), list[tuple[int, int]]()
        if self.tiers is not None:
            loads = self.tiers.extend(
                hits, seq.block_hashes[:full], seq.tokens, self.pool, self.computing
            )
        soon = len(hits)
        while soon < full and seq.block_hashes[soon] in self.computing:
            soon += 1
        return (
            None
            if 2 * (soon - len(hits)) * self.size > len(seq.tokens) - len(hits) * self.size
            else Match(hits, loads)
        )

    def _may_match(self, seq: Sequence) -> bool:
        # those of a position are had by computing it
        return self.on and not seq.owes_prompt_logprobs

    def waits(self, seq: Sequence) -> bool:
        """For the disk, which has brought nothing since it looked."""
        return (
            self.tiers is not None
            and seq.disk_wait is DiskWait.WAITING
            and seq.disk_events_seen == self.tiers.settled
        )

    def ask_disk(self, seq: Sequence, found: Match, plan: Plan, spare: int) -> int | None:
        """None: it need not wait for the disk. Otherwise what has come is lifted, as long as so many `spare` blocks are left:
        as many tokens as could be computed in the time."""
        tiers = self.tiers
        if tiers is None or not self._may_match(seq):
            return None
        waits, lifted = (
            tiers.ask(seq, *found, self.pool, plan, spare),
            tiers.lift(seq, self.pool, plan, spare),
        )
        if waits or lifted:
            return self.load_tokens(lifted)
        for k, (j, slot) in enumerate(found.loads):
            if slot in tiers.fetched:  # there is no room to lift it: it does without
                del found.hits[j:], found.loads[k:]
                break
        return None

    def load_tokens(self, loads: int) -> int:
        """How many tokens could be computed while so many blocks are loaded."""
        return self.tiers.links.in_tokens(loads) if self.tiers is not None else 0

    def give(self, seq: Sequence, found: Match, plan: Plan) -> None:
        """The sequence begins with what was found. The rest of its text is on its way into the cache from now on."""
        # pinned before anything is evicted
        seq.block_table = [self.pool.share(b) if b else 0 for b in found.hits]
        for j, slot in found.loads:
            assert self.tiers is not None
            self.tiers.load(slot, block := self.pool.take(), plan)
            seq.block_table[j] = block
        seq.computed = seq.planned = len(found.hits) * self.size
        # what is loaded counts once it is committed
        seq.published_blocks = found.loads[0][0] if found.loads else len(found.hits)
        for h in seq.block_hashes[seq.published_blocks :]:
            self.computing.setdefault(h, seq.id)

    def give_up(self, seq: Sequence) -> None:
        """It computes nothing any more."""
        for h in seq.block_hashes[seq.published_blocks :]:
            if self.computing.get(h) == seq.id:
                del self.computing[h]

    # ---- what steps change -------------------------------------------------------------------------

    def publish(self, seq: Sequence) -> None:
        """Make newly full, committed blocks findable. Only the new ones: a walk from zero costs 2 ms a step at 256 rows."""
        size = self.size
        full = seq.computed // size
        self.extend_hashes(seq, full)
        for j in range(seq.published_blocks, full):
            parent = seq.block_hashes[j - 1] if j else b""
            tokens = seq.tokens[j * size : (j + 1) * size]
            self.pool.publish(
                seq.block_table[j], seq.block_hashes[j], tokens, parent, seq.request.tenant
            )
            self.computing.pop(seq.block_hashes[j], None)
        seq.published_blocks = full

    def disown(self, seq: Sequence) -> None:
        """What this sequence has computed is no good, or what it was given: nobody is to find any of it."""
        for block in seq.block_table:
            self.pool.disown(block)
        if self.tiers is not None:
            self.tiers.disown(seq.block_hashes)

    def demote(self, plan: Plan) -> None:
        """The plan is complete: what it evicts goes to the tiers."""
        if self.tiers is not None:
            self.tiers.demote(self.pool, plan)
            plan.awaits_disk = bool(self.tiers.fetching or self.tiers.rising)
        self.pool.evicted.clear()

    def commit(self, plan: Plan, result: StepResult) -> None:
        if self.tiers is not None:
            self.tiers.commit(plan, result)
            self.tiers.land(plan, self.pool, True, result.corrupt_host_blocks)

    def fail(self, plan: Plan) -> None:
        """Nothing that the step was to move is where it was to be."""
        if self.tiers is not None:
            self.tiers.fail(plan)
            self.tiers.land(plan, self.pool, loaded=False)

    def flush(self, plan: Plan) -> None:
        """What only the device has goes to disk, where there is one."""
        if self.tiers is not None and self.tiers.disk:
            self.tiers.flush(self.pool, plan)

    def forget(self) -> None:
        self.pool.forget()
        if self.tiers is not None:
            self.tiers.forget()
