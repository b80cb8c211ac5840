"""Block tables: a sequence writes only to blocks that no other holds, and a reservation that does
not fit changes nothing."""

from __future__ import annotations

from array import array

from octavo.config import CacheConfig, ScheduleConfig
from octavo.core.blocks import BlockPool, FullBlock, chain_hash
from octavo.core.chunk_costs import ChunkCosts
from octavo.core.prefix import Match
from octavo.core.tables import (
    NEVER_PUBLISH,
    blocks_to_grow,
    drop_block,
    reserve,
    tokens_to_prefill,
)
from octavo.params import SamplingParams
from octavo.types import Plan, Request, Sequence

SIZE = 4


def sequence(pool: BlockPool, tokens: int, blocks: int) -> Sequence:
    """Return a sequence all of whose tokens are planned and computed."""
    ids = list(range(1, tokens + 1))
    seq = Sequence(
        1, Request("r", ids, SamplingParams()), 0, array("i", ids), tokens, 100, 0, frozenset()
    )
    seq.block_table, seq.computed, seq.planned, seq.slot = (
        [pool.allocate() for _ in range(blocks)],
        tokens,
        tokens,
        0,
    )
    return seq


def test_fresh_blocks_are_appended() -> None:
    pool, plan = BlockPool(4, SIZE), Plan(1)
    seq = sequence(pool, 3, 1)
    assert reserve(pool, seq, 6, plan) and seq.block_table == [1, 2, 3], "positions 3 to 8"
    assert plan.table_updates == [(0, 1, 2), (0, 2, 3)] and not plan.copies
    pool.check([seq.block_table])


def test_a_shared_block_is_copied_before_it_is_written() -> None:
    pool, plan = BlockPool(4, SIZE), Plan(1)
    seq = sequence(pool, 6, 2)
    other = [pool.acquire(b) for b in seq.block_table]
    assert reserve(pool, seq, 1, plan) and seq.block_table == [1, 3], "a full block stays shared"
    assert plan.copies == [(2, 3)] and plan.table_updates == [(0, 1, 3)]
    pool.check([seq.block_table, other])


def test_a_reservation_that_does_not_fit_changes_nothing() -> None:
    pool, plan = BlockPool(3, SIZE), Plan(1)
    seq = sequence(pool, 6, 2)
    other = [pool.acquire(b) for b in seq.block_table]
    assert blocks_to_grow(pool, seq, 4) == 2
    assert not reserve(pool, seq, 4, plan), (
        "a copy and a new block are needed, and one block is free"
    )
    assert seq.block_table == other == [1, 2] and not plan.copies and not plan.table_updates
    pool.check([seq.block_table, other])


def test_blocks_that_an_admission_needs() -> None:
    pool = BlockPool(6, SIZE)
    held = pool.allocate()
    cached = pool.allocate()
    pool.publish(FullBlock(cached, b"h", array("i", [1] * SIZE), b""))
    pool.release(cached)

    def blocks_to_admit(matched: list[int], **options: bool) -> int:
        """The sequence computes five tokens after its match."""
        cache = CacheConfig(SIZE, 6, contiguous=options.get("contiguous", False))
        costs = ChunkCosts(cache, ScheduleConfig(chunked_prefill=False), pool)
        prompt_len = SIZE * len(matched) + 5
        seq = sequence(BlockPool(9, SIZE), prompt_len, 4)
        cost = costs.of_admission(seq, Match(matched, []), 5, step_is_empty=False)
        assert cost.tokens == 5 and not cost.lacks_tokens
        assert costs.of_admission(seq, Match(matched, []), 4, step_is_empty=False).lacks_tokens
        assert costs.of_admission(seq, Match(matched, []), 4, step_is_empty=True).tokens == 4
        return cost.blocks

    assert blocks_to_admit([]) == 2
    assert blocks_to_admit([held]) == 2, "a block that others hold is not allocated"
    assert blocks_to_admit([held, cached]) == 3, "a cached block is available no longer"
    assert blocks_to_admit([held, cached, 0]) == 4, "0 stands for a block to load into"
    assert blocks_to_admit([], contiguous=True) == 25, "99 positions"


def test_forks_stop_one_token_short() -> None:
    seq = sequence(BlockPool(4, SIZE), 10, 3)
    assert tokens_to_prefill(seq, 0) == 10 and tokens_to_prefill(seq, 4) == 6
    seq.pending_forks = 2
    assert tokens_to_prefill(seq, 0) == 9 and tokens_to_prefill(seq, 9) == 0


def full(spare: int) -> tuple[BlockPool, CacheConfig, Sequence]:
    """Return a pool, its configuration and a sequence whose bounded cache of three blocks is full;
    `spare` other blocks are free."""
    pool = BlockPool(3 + spare, SIZE)
    return (
        pool,
        CacheConfig(SIZE, 3 + spare, kv_eviction="sinks", kv_sinks=1, kv_budget=12),
        sequence(pool, 13, 3),
    )


def test_a_dropped_block_moves_those_behind_it_up() -> None:
    pool, cache, seq = full(spare=0)
    seq.planned = seq.computed = 12
    plan = Plan(1)
    assert drop_block(pool, cache, seq, plan)
    assert seq.block_table == [1, 3, 2] and plan.shifts == [(3, SIZE)], (
        "block 2 was dropped, and is the block to write to"
    )
    assert (
        seq.planned == seq.computed == 8
        and list(seq.tokens) == [1, 2, 3, 4, 9, 10, 11, 12, 13]
        and seq.published_blocks == NEVER_PUBLISH
    )
    pool.check([seq.block_table])


def test_shared_blocks_are_copied_and_published_ones_unpublished() -> None:
    pool, cache, seq = full(spare=1)
    seq.planned = seq.computed = 12
    h = chain_hash(b"", seq.tokens[8:12])
    pool.publish(FullBlock(3, h, seq.tokens[8:12], b""))
    plan = Plan(1)
    assert drop_block(pool, cache, seq, plan) and h not in pool.hash_index, (
        "moved in place: no request may find it"
    )
    pool, cache, seq = full(spare=1)
    seq.planned = seq.computed = 12
    other, plan = [pool.acquire(3)], Plan(1)
    assert drop_block(pool, cache, seq, plan) and plan.copies[0][0] == 3 and other == [3]
    pool.check([seq.block_table, other])


def test_without_room_for_the_copies_no_block_is_dropped() -> None:
    pool, cache, seq = full(spare=0)
    seq.planned = seq.computed = 12
    other = [pool.acquire(b) for b in seq.block_table]
    assert (
        not drop_block(pool, cache, seq, plan := Plan(1))
        and seq.block_table == [1, 2, 3]
        and not plan.shifts
    )
    pool.check([seq.block_table, other])
