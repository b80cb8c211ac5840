"""Block tables: how a sequence gets blocks for the positions that it writes next.

A position is written only to a block that no other sequence holds. There are three ways to get
such a block:

    allocate  a block is free, or cached and least recently used     table 5 2      ->  5 2 7
    copy      the last block is shared: the writer copies it               5 2(x2)  ->  5 7
    drop      bounded KV is full: one of the sequence's blocks leaves      5 2 7    ->  5 7 3
"""

from __future__ import annotations

import sys

from octavo.config import CacheConfig
from octavo.core.blocks import BlockPool
from octavo.core.bounded_kv import drop_block_tokens, pick_block
from octavo.events import BlockCopied, BlockDropped, BlocksAllocated
from octavo.types import Plan, Sequence

# Value of `published_blocks` that stops publishing: the KV no longer belongs to a contiguous text.
NEVER_PUBLISH = sys.maxsize


def tokens_to_prefill(seq: Sequence, start: int) -> int:
    """Return how many known tokens from `start` on have to be computed.

    The last token of a prompt that is about to be forked does not count: each child computes it."""
    return len(seq.tokens) - (seq.pending_forks > 0) - start


def shared_blocks(pool: BlockPool, seq: Sequence, num_blocks: int) -> list[int]:
    """Return the logical blocks, of the first `num_blocks`, that a sequence must copy to write its
    next positions."""
    table = seq.block_table
    return [
        index
        for index in range(seq.planned // pool.block_size, min(num_blocks, len(table)))
        if pool.ref_counts[table[index]] > 1
    ]


def blocks_to_grow(pool: BlockPool, seq: Sequence, num_tokens: int) -> int:
    """Return how many blocks reserve() takes from the pool."""
    num_blocks = -(-(seq.planned + num_tokens) // pool.block_size)
    num_new = max(num_blocks - len(seq.block_table), 0)
    return len(shared_blocks(pool, seq, num_blocks)) + num_new


def reserve(pool: BlockPool, seq: Sequence, num_tokens: int, plan: Plan) -> bool:
    """Give a sequence blocks of its own for its next `num_tokens` positions: shared blocks are
    copied, and new ones appended. If the pool has too few, returns False and changes nothing."""
    table = seq.block_table
    if blocks_to_grow(pool, seq, num_tokens) > pool.num_available:
        return False
    num_blocks = -(-(seq.planned + num_tokens) // pool.block_size)
    for index in shared_blocks(pool, seq, num_blocks):  # copy on write
        source = table[index]
        table[index] = pool.allocate()
        plan.copies.append((source, table[index]))
        plan.table_updates.append((seq.slot, index, table[index]))
        pool.release(source)
        if BlockCopied in pool.events.listeners:
            pool.events.emit(BlockCopied(seq, source, table[index]))
    first_new = len(table)
    for index, block in enumerate(grow_table(pool, seq, num_blocks), first_new):
        plan.table_updates.append((seq.slot, index, block))
    return True


def grow_table(pool: BlockPool, seq: Sequence, num_blocks: int) -> list[int]:
    """Allocate blocks until the table has `num_blocks`. Returns the new ones."""
    first = len(seq.block_table)
    new_blocks = [pool.allocate() for _ in range(first, num_blocks)]
    seq.block_table += new_blocks
    if new_blocks and BlocksAllocated in pool.events.listeners:
        pool.events.emit(BlocksAllocated(seq, first, new_blocks))
    return new_blocks


def drop_block(pool: BlockPool, cache: CacheConfig, seq: Sequence, plan: Plan) -> bool:
    """Drop one block of a sequence whose bounded KV is full and append a new one.

    The blocks behind it move up by one block. Blocks that are shared are copied first, and
    published blocks are unpublished, because their keys are about to be shifted. The caller must
    write the batch slot again. If the pool has too few blocks, returns False and changes nothing.
    """
    table = seq.block_table
    dropped = pick_block(seq, cache)
    num_shared = sum(pool.ref_counts[block] > 1 for block in table[dropped + 1 :])
    freed = pool.ref_counts[table[dropped]] == 1
    if num_shared + 1 > pool.num_available + freed:
        return False
    dropped_block = table.pop(dropped)
    pool.release(dropped_block)
    if BlockDropped in pool.events.listeners:
        pool.events.emit(BlockDropped(seq, dropped_block))
    for index in range(dropped, len(table)):
        source = table[index]
        if pool.ref_counts[source] > 1:
            table[index] = pool.allocate()
            plan.copies.append((source, table[index]))
            pool.release(source)
            if BlockCopied in pool.events.listeners:
                pool.events.emit(BlockCopied(seq, source, table[index]))
        pool.unpublish(table[index])
        plan.shifts.append((table[index], pool.block_size))
    grow_table(pool, seq, len(table) + 1)
    drop_block_tokens(seq, dropped, pool.block_size)
    seq.planned -= pool.block_size
    seq.computed = seq.planned
    # Until the next admission, which computes the KV again (PrefixCache.attach).
    seq.published_blocks = NEVER_PUBLISH
    return True
