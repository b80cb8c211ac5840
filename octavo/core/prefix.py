"""The prefix cache: which blocks of a sequence are cached on the device, can be loaded from a lower
tier, or are being computed by another sequence.

    block_hashes  a b c d e f g    hash chain of the full blocks, one token left to compute
    pool          a b              shared at once
    tiers             c d          loaded into new blocks, unless that is slower than computing them
    computing             e f      another sequence computes them. This one waits if they are more
                                   than half of what it would otherwise compute

The scheduler decides which sequence starts, and when.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.config import CacheConfig
from octavo.core.blocks import BlockPool, FullBlock, chain_hash, root_hash
from octavo.core.tier_index import TierIndex
from octavo.events import BlocksAllocated, BlocksShared
from octavo.types import DiskWait, Plan, Sequence, StepResult


class Match(NamedTuple):
    """The longest prefix of a text that is on the device or can be loaded."""

    blocks: list[int]  # physical block of each logical block; 0: it is in `host_hits`
    host_hits: list[tuple[int, int]]  # (logical block, host block): to be loaded at the admission
    # If the sequence should wait for another one: the number of leading blocks that will then be
    # cached. Otherwise 0.
    awaited_blocks: int = 0
    loading_pays: bool = True  # False: the next host block was not matched, or is only a probe


class PrefixCache:
    def __init__(self, cache: CacheConfig, pool: BlockPool):
        self.enabled = cache.prefix_caching
        self.pool = pool
        self.block_size = pool.block_size
        self.tiers: TierIndex | None = None
        if self.enabled and cache.host_blocks:
            self.tiers = TierIndex(
                pool=pool,
                num_host_blocks=cache.host_blocks,
                block_bytes=cache.block_bytes,
                has_disk=cache.has_disk,
            )
        # Hash of a block that will be published -> Sequence.id of the sequence that computes or
        # loads it.
        self.computing: dict[bytes, int] = {}

    # ---- admission -------------------------------------------------------------------------------

    def extend_hashes(self, seq: Sequence, num_blocks: int) -> None:
        """Extend the hash chain to the first `num_blocks` blocks of the sequence."""
        hashes = seq.block_hashes
        for logical_block in range(len(hashes), num_blocks):
            parent = hashes[-1] if logical_block else root_hash(seq.request.cache_salt)
            start = logical_block * self.block_size
            hashes.append(chain_hash(parent, seq.tokens[start : start + self.block_size]))

    def count_cached_tokens(self, seq: Sequence) -> int:
        """Return how many prompt tokens are cached on the device or about to be."""
        num_blocks = 0
        while self.enabled and num_blocks < (len(seq.tokens) - 1) // self.block_size:
            self.extend_hashes(seq, num_blocks + 1)
            content_hash = seq.block_hashes[num_blocks]
            if content_hash not in self.pool.hash_index and content_hash not in self.computing:
                break
            num_blocks += 1
        return num_blocks * self.block_size

    def match(self, seq: Sequence) -> Match:
        """Return the longest prefix that is cached, and whether the sequence should wait because
        another one computes more than half of its other tokens."""
        if not self.may_match(seq):
            return Match(blocks=[], host_hits=[])
        num_full = (len(seq.tokens) - 1) // self.block_size  # always leave a token to compute
        self.extend_hashes(seq, num_full)
        hashes = seq.block_hashes[:num_full]
        blocks = self.pool.match(hashes, seq.tokens)
        host_hits: list[tuple[int, int]] = []
        loading_pays = True
        if self.tiers is not None:
            host_hits, loading_pays = self.tiers.extend_match(
                blocks, hashes, seq.tokens, self.computing
            )
        end = len(blocks)
        while end < num_full and hashes[end] in self.computing:
            end += 1
        being_computed = (end - len(blocks)) * self.block_size
        if 2 * being_computed > len(seq.tokens) - len(blocks) * self.block_size:
            return Match(blocks, host_hits, end, loading_pays)
        return Match(blocks, host_hits, 0, loading_pays)

    def begins_with(self, seq: Sequence, prefixes: dict[int, set[bytes]]) -> bool:
        """Return whether a sequence begins with one of these prefixes and could reuse it.
        `prefixes` maps a length in blocks to the hashes of the last block of each prefix of that
        length."""
        for num_blocks, last_hashes in prefixes.items():
            if num_blocks * self.block_size < len(seq.tokens) and self.may_match(seq):
                self.extend_hashes(seq, num_blocks)
                if seq.block_hashes[num_blocks - 1] in last_hashes:
                    return True
        return False

    def may_match(self, seq: Sequence) -> bool:
        return self.enabled and not seq.needs_all_positions

    def waits_for_disk(self, seq: Sequence) -> bool:
        """Return whether a sequence waits for blocks from disk and no transfer has ended since its
        last lookup."""
        return (
            self.tiers is not None
            and seq.disk_wait is DiskWait.WAITING
            and seq.transfers_ended_at_lookup == self.tiers.transfers_ended
        )

    def request_disk(self, seq: Sequence, match: Match, plan: Plan, keep_available: int) -> bool:
        """Fetch the blocks that follow a match from disk to host memory. Promote the blocks that
        have arrived: load them into device blocks, where their checksums are verified before a
        sequence may use them. Promotions keep `keep_available` device blocks available.

        Returns whether the sequence should wait for the disk."""
        if self.tiers is None or not self.may_match(seq):
            return False
        return self.tiers.request_disk(seq, match.blocks, match.host_hits, plan, keep_available)

    def usable_match(self, match: Match) -> Match:
        """Return a match up to the first block from disk that could not be promoted for lack of a
        device block. The sequence computes the rest."""
        for index, (logical_block, host_block) in enumerate(match.host_hits):
            if self.tiers is not None and host_block in self.tiers.unverified:
                blocks = match.blocks[:logical_block]
                return match._replace(blocks=blocks, host_hits=match.host_hits[:index])
        return match

    def load_cost_tokens(self, num_blocks: int) -> int:
        """Return how many tokens the device could compute while it loads this many blocks."""
        return self.tiers.costs.tokens_in_load_time(num_blocks) if self.tiers is not None else 0

    def attach(self, seq: Sequence, match: Match, plan: Plan) -> None:
        """Give a sequence the blocks of its match, and list the contents of the other blocks as
        being computed, so that other sequences may wait for them."""
        # References are taken before any allocation, so that nothing matched is evicted.
        seq.block_table = [self.pool.acquire(block) if block else 0 for block in match.blocks]
        events = self.pool.events
        if BlocksShared in events.listeners and any(match.blocks):
            events.emit(BlocksShared(seq, list(match.blocks)))
        if self.tiers is not None:
            self.tiers.count_decision(match.loading_pays, loads=bool(match.host_hits))
        for logical_block, host_block in match.host_hits:
            assert self.tiers is not None
            block = self.pool.allocate()
            seq.block_table[logical_block] = block
            if BlocksAllocated in events.listeners:
                events.emit(BlocksAllocated(seq, logical_block, [block]))
            self.tiers.load(host_block, block, plan)
        seq.planned = len(match.blocks) * self.block_size
        seq.computed = seq.planned
        # Loaded blocks are published when their step is committed.
        seq.published_blocks = match.host_hits[0][0] if match.host_hits else len(match.blocks)
        for content_hash in seq.block_hashes[seq.published_blocks :]:
            self.computing.setdefault(content_hash, seq.id)

    def stop_computing(self, seq: Sequence) -> None:
        """Remove the contents that a preempted or ended sequence has not published."""
        for content_hash in seq.block_hashes[seq.published_blocks :]:
            if self.computing.get(content_hash) == seq.id:
                del self.computing[content_hash]

    # ---- steps -----------------------------------------------------------------------------------

    def publish(self, seq: Sequence) -> None:
        """Publish newly full, committed blocks.

        Only the new blocks are visited: all blocks of 256 sequences take 2 ms per step."""
        num_full = seq.computed // self.block_size
        self.extend_hashes(seq, num_full)
        hashes = seq.block_hashes
        for logical_block in range(seq.published_blocks, num_full):
            start = logical_block * self.block_size
            full_block = FullBlock(
                block=seq.block_table[logical_block],
                hash=hashes[logical_block],
                tokens=seq.tokens[start : start + self.block_size],
                parent=hashes[logical_block - 1] if logical_block else b"",
            )
            self.pool.publish(full_block, seq.request.tenant)
            self.computing.pop(full_block.hash, None)
        seq.published_blocks = num_full

    def invalidate(self, seq: Sequence) -> None:
        """Remove all blocks of a sequence whose KV is wrong: no other sequence may reuse them."""
        for block in seq.block_table:
            self.pool.invalidate(block)
        if self.tiers is not None:
            self.tiers.invalidate(seq.block_hashes)

    def demote(self, plan: Plan) -> None:
        """Add stores to a complete plan for the contents that it evicts from the device."""
        if self.tiers is not None:
            self.tiers.demote(plan)
            plan.awaits_disk = bool(self.tiers.fetching or self.tiers.promoting)
        self.pool.unpublished_blocks.clear()

    def commit(self, plan: Plan, result: StepResult) -> None:
        if self.tiers is not None:
            self.tiers.commit(plan, result)
            self.tiers.finish_promotions(plan, corrupt=result.corrupt_host_blocks)

    def fail(self, plan: Plan) -> None:
        """Undo the moves between tiers of a step that failed."""
        if self.tiers is not None:
            self.tiers.fail(plan)
            self.tiers.finish_promotions(plan, failed=True)

    def flush(self, plan: Plan) -> None:
        """Store what only the device holds, if there is a disk to save it to."""
        if self.tiers is not None and self.tiers.has_disk:
            self.tiers.flush(plan)

    def clear(self) -> None:
        self.pool.clear()
        if self.tiers is not None:
            self.tiers.clear()
