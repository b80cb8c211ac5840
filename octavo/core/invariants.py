"""What holds between two steps, whatever was asked: an AssertionError tells what does not. Sees all of the scheduler's state and
changes none of it. docs/core.md says why each must hold.
"""

from __future__ import annotations

from octavo.config import CacheConfig, ScheduleConfig
from octavo.core.beam_search import reported
from octavo.core.blocks import BlockPool
from octavo.core.bounded_kv import most_positions
from octavo.core.forks import SequenceGroups
from octavo.core.prefix import PrefixCache
from octavo.core.queues import Queues
from octavo.core.tables import NEVER
from octavo.types import Sequence


def check(
    queues: Queues,
    families: SequenceGroups,
    prefix: PrefixCache,
    cache: CacheConfig,
    schedule: ScheduleConfig,
) -> None:
    pool, tiers, running = prefix.pool, prefix.tiers, queues.running
    queues.check()
    lifted = [up.content.block for up in tiers.ups()] if tiers is not None else []
    pool.check([lifted, *(seq.block_table for seq in running)])
    if tiers is not None:
        tiers.check()
    for seq in running:
        check_positions(seq, pool.size, schedule.depth)
        check_blocks(seq, pool, cache)
    alive = {seq.id for seq in running}
    assert alive | {seq.id for seq in queues.waiting} == set(families.live), (
        "a sequence is in no queue"
    )
    members = sorted(seq.id for family in families.requests.values() for seq in family)
    assert members == sorted(families.live), "a sequence is in no family"
    for id, search in families.searches.items():
        beams = families.requests[id]
        assert len(beams) <= search.width and not all(map(reported, beams)), (
            f"{id}: its beams stand still"
        )
        assert all(
            seq.planned == len(seq.tokens) and not seq.steps_in_flight
            for seq in beams
            if reported(seq) and seq.slot >= 0
        )
    assert all(owner in alive for owner in prefix.computing.values()), (
        "somebody waits for content that nobody computes"
    )


def check_positions(seq: Sequence, size: int, depth: int) -> None:
    assert seq.computed <= seq.planned <= len(seq.block_table) * size, (
        f"{seq.id}: positions out of order"
    )
    assert seq.steps_in_flight or seq.planned == seq.computed, (
        f"{seq.id}: planned drifted from computed"
    )
    assert 0 <= seq.steps_in_flight <= depth, f"{seq.id}: {seq.steps_in_flight} steps in flight"
    assert seq.planned < seq.position_limit, f"{seq.id}: planned beyond its limit"
    led = seq.guide is not None or seq.beam is not None
    assert not led or seq.planned <= len(seq.tokens), f"{seq.id}: planned beyond what was decided"


def check_blocks(seq: Sequence, pool: BlockPool, cache: CacheConfig) -> None:
    size, most = pool.size, most_positions(cache)
    assert seq.published_blocks <= seq.computed // size or seq.published_blocks == NEVER, (
        f"{seq.id}: published what is not computed"
    )
    for block in seq.block_table[seq.planned // size :]:
        assert pool.hash[block] is None, f"{seq.id}: would write to a published block"
    assert len(seq.block_table) * size <= most and seq.dropped_tokens % size == 0, (
        f"{seq.id}: more blocks than its budget"
    )
    assert seq.dropped_tokens == 0 or len(seq.tokens) <= most + 1, (
        f"{seq.id}: keeps more tokens than its budget"
    )
    if seq.published_blocks == NEVER and cache.kv_eviction == "sinks":
        moved = seq.block_table[cache.kv_sinks :]
        assert all(pool.refs[b] == 1 and pool.hash[b] is None for b in moved), (
            f"{seq.id}: shares what was moved"
        )
