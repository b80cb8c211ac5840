"""A sequence's block table grows: what its next positions take of the pool, and how they come to be its own. No queues.

A position is written only to a block that nobody else holds. Three ways to have one:

    take     a block is free, or cached and unused for longest          table 5 2      ->  5 2 7
    copy     the block is shared: the writer takes a copy                     5 2(x2)  ->  5 7      copy 2 -> 7
    evict    its cache is bounded and full: one of its own leaves             5 2 7    ->  5 7 3    2 leaves, 7 moves up
"""

from __future__ import annotations

import sys

from octavo.config import CacheConfig
from octavo.core.blocks import BlockPool
from octavo.core.bounded_kv import drop, pick
from octavo.types import Plan, Sequence

NEVER = sys.maxsize  # `published` of a sequence whose content is no longer that of a text


def chunk(seq: Sequence, start: int, left: int) -> int:
    """Known tokens that it computes next, of so many that are left of the step."""
    # forks stop one short: each child computes the last itself
    return min(len(seq.tokens) - (seq.pending_forks > 0) - start, left)


def admission_takes(pool: BlockPool, hits: list[int], num: int) -> int:
    """Blocks off the free list for who begins with these hits and so many more tokens. What is to be loaded needs a block as
    what is to be computed does; a hit that somebody else holds takes none."""
    return -(-(len(hits) * pool.size + num) // pool.size) - sum(pool.refs[b] > 0 for b in hits if b)


def reserve(pool: BlockPool, seq: Sequence, num: int, plan: Plan) -> bool:
    """Own every block that positions [planned, planned + num) will be written to. All of them or none."""
    size, table = pool.size, seq.block_table
    first, last = seq.planned // size, (seq.planned + num - 1) // size
    shared = [j for j in range(first, min(last + 1, len(table))) if pool.refs[table[j]] > 1]
    fresh = max(last + 1 - len(table), 0)
    if len(shared) + fresh > len(pool.free):
        return False
    for j in shared:  # copy on write
        old, table[j] = table[j], pool.take()
        plan.copies.append((old, table[j]))
        plan.block_appends.append((seq.slot, j, table[j]))
        pool.drop(old)
    for j in range(len(table), last + 1):
        table.append(pool.take())
        plan.block_appends.append((seq.slot, j, table[j]))
    return True


def evict(pool: BlockPool, cache: CacheConfig, seq: Sequence, plan: Plan) -> bool:
    """A block leaves a full cache, those behind it move up, and there is one to write to. All of that or nothing. What others
    hold or could find is not touched: it is copied, or taken out of the index. The row must be written anew."""
    size, table, j = pool.size, seq.block_table, pick(seq, cache)
    shared = sum(pool.refs[b] > 1 for b in table[j + 1 :])
    if shared + 1 > len(pool.free) + (pool.refs[table[j]] == 1):
        return False
    pool.drop(table.pop(j))
    for k in range(j, len(table)):
        if pool.refs[old := table[k]] > 1:
            table[k] = pool.take()
            plan.copies.append((old, table[k]))
            pool.drop(old)
        pool.withdraw(table[k])
        plan.shifts.append((table[k], size))
    table.append(pool.take())
    drop(seq, j, size)
    seq.computed = seq.planned = seq.planned - size
    seq.published_blocks = NEVER  # until it is computed anew, from the tokens that it kept
    return True
