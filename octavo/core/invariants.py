"""The invariants that hold between two steps. An AssertionError names the one that is broken.

These functions read the scheduler's state and do not change it. docs/core.md gives the reason for
each invariant.
"""

from __future__ import annotations

from octavo.config import CacheConfig, ScheduleConfig
from octavo.core.beam_search import has_reported
from octavo.core.blocks import BlockPool
from octavo.core.bounded_kv import max_kv_positions
from octavo.core.forks import SequenceGroups
from octavo.core.prefix import PrefixCache
from octavo.core.queues import Queues
from octavo.core.tables import NEVER_PUBLISH
from octavo.types import Sequence


def check_invariants(
    queues: Queues,
    groups: SequenceGroups,
    prefix: PrefixCache,
    cache: CacheConfig,
    schedule: ScheduleConfig,
) -> None:
    pool = prefix.pool
    tiers = prefix.tiers
    running = queues.running
    queues.check()
    promoted: list[int] = []
    if tiers is not None:
        promoted = [promotion.full_block.block for promotion in tiers.all_promotions()]
        tiers.check()
    pool.check([promoted, *(seq.block_table for seq in running)])
    for seq in running:
        check_positions(seq, pool.block_size, schedule.depth)
        check_blocks(seq, pool, cache)
    running_ids = {seq.id for seq in running}
    queued_ids = running_ids | {seq.id for seq in queues.waiting}
    assert queued_ids == set(groups.live), "a sequence is in no queue"
    check_groups(groups)
    assert all(seq_id in running_ids for seq_id in prefix.computing.values()), (
        "a sequence waits for content that no running sequence computes"
    )


def check_groups(groups: SequenceGroups) -> None:
    members = sorted(seq.id for group in groups.by_request.values() for seq in group)
    assert members == sorted(groups.live), "a sequence is in no group"
    for request_id, search in groups.searches.items():
        beams = groups.by_request[request_id]
        assert len(beams) <= search.width, f"{request_id}: more beams than its width"
        assert not all(map(has_reported, beams)), f"{request_id}: its beams do not advance"
        for seq in beams:
            if has_reported(seq) and seq.slot >= 0:
                assert seq.planned == len(seq.tokens), f"{seq.id}: planned beyond its report"
                assert not seq.steps_in_flight, f"{seq.id}: in flight after its report"


def check_positions(seq: Sequence, block_size: int, depth: int) -> None:
    in_order = seq.computed <= seq.planned <= len(seq.block_table) * block_size
    assert in_order, f"{seq.id}: positions out of order"
    agree = seq.steps_in_flight or seq.planned == seq.computed
    assert agree, f"{seq.id}: planned differs from computed with no step in flight"
    assert 0 <= seq.steps_in_flight <= depth, f"{seq.id}: {seq.steps_in_flight} steps in flight"
    assert seq.planned < seq.token_limit, f"{seq.id}: planned beyond its limit"
    assert 0 <= seq.drafts_in_flight <= seq.planned - seq.computed, f"{seq.id}: drafts are lost"
    if seq.guide is not None or seq.beam is not None:
        decided = seq.planned - seq.drafts_in_flight <= len(seq.tokens)
        assert decided, f"{seq.id}: planned beyond the tokens decided"


def check_blocks(seq: Sequence, pool: BlockPool, cache: CacheConfig) -> None:
    block_size = pool.block_size
    kept_positions = max_kv_positions(cache)
    published_ok = (
        seq.published_blocks <= seq.computed // block_size or seq.published_blocks == NEVER_PUBLISH
    )
    assert published_ok, f"{seq.id}: published a block that is not computed"
    for block in seq.block_table[seq.planned // block_size :]:
        assert pool.hashes[block] is None, f"{seq.id}: would write to a published block"
    within_budget = len(seq.block_table) * block_size <= kept_positions
    assert within_budget and seq.dropped_tokens % block_size == 0, (
        f"{seq.id}: more blocks than its budget"
    )
    assert seq.dropped_tokens == 0 or len(seq.tokens) <= kept_positions + 1, (
        f"{seq.id}: keeps more tokens than its budget"
    )
    if seq.published_blocks == NEVER_PUBLISH and cache.kv_eviction == "sinks":
        for block in seq.block_table[cache.kv_sinks :]:
            is_private = pool.ref_counts[block] == 1 and pool.hashes[block] is None
            assert is_private, f"{seq.id}: shares a block that was shifted"
