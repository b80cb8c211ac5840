"""The whole state of an engine as plain values, with which an event stream begins.

Everything here is read from the scheduler. The live page derives the same state from events
(octavo/web/state.js) and compares the two whenever a stream repeats its snapshot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

from octavo.core.decision_sources import decision_sources
from octavo.core.engine import Engine
from octavo.core.live_settings import describe_settings
from octavo.core.stream_numbers import StreamNumbers
from octavo.core.tier_index import TierIndex
from octavo.types import Plan, Sequence

FORMAT = 1  # version of the stream's format


def describe_engine(engine: Engine) -> dict[str, Any]:
    """Return the facts that do not change while the engine runs."""
    scheduler = engine.scheduler
    schedule = scheduler.schedule
    tiers = scheduler.tiers
    return {
        "format": FORMAT,
        "num_blocks": scheduler.pool.num_blocks,
        "block_size": scheduler.pool.block_size,
        "host_blocks": 0 if tiers is None else tiers.num_host_blocks,
        "has_disk": tiers is not None and tiers.has_disk,
        "prefix_caching": scheduler.prefix.enabled,
        "max_num_seqs": schedule.max_num_seqs,
        "max_num_batched_tokens": schedule.max_num_batched_tokens,
        "max_model_len": schedule.max_model_len,
        "depth": engine.depth,
        "batching": schedule.batching,
        "speculative": schedule.speculative is not None,
        "sources": {
            reason: [source._asdict() for source in sources]
            for reason, sources in decision_sources().items()
        },
    }


def describe_state(engine: Engine, numbers: StreamNumbers) -> dict[str, Any]:
    """Return the state of an engine between two steps, with the numbers of a stream."""
    scheduler = engine.scheduler
    pool = scheduler.pool
    tiers = scheduler.tiers
    content_number = numbers.contents.number
    states = {
        "decode": scheduler.decoding,
        "prefill": scheduler.prefilling,
        "waiting": scheduler.waiting,
    }
    return {
        "settings": describe_settings(scheduler),
        "sequences": [
            describe_sequence(numbers, seq, state)
            for state, sequences in states.items()
            for seq in sequences
        ],
        # (block, its content, the content before it)
        "contents": [
            (block, content_number(content_hash), content_number(pool.parent_hashes[block]))
            for content_hash, block in pool.hash_index.items()
        ],
        "free": ranges(pool.available_blocks),
        "host": [] if tiers is None else describe_host(tiers, content_number),
        "disk": 0 if tiers is None else len(tiers.on_disk),
        "promoted": [] if tiers is None else [p.full_block.block for p in tiers.all_promotions()],
        "withheld": pool.withheld,
        "in_flight": [describe_plan(step.plan) for step in engine.in_flight],
        "counters": {
            name: value
            for name, value in asdict(scheduler.counters).items()
            if isinstance(value, int)
        },
    }


def describe_sequence(numbers: StreamNumbers, seq: Sequence, state: str) -> dict[str, Any]:
    request = seq.request
    deadline = None if request.deadline is None else numbers.microseconds(request.deadline)
    first_token = None if seq.first_token_at is None else numbers.microseconds(seq.first_token_at)
    return {
        "seq": seq.id,
        "label": numbers.labels.by_sequence.get(seq.id, -1),
        "name": numbers.name(seq),
        "request": request.id,
        "index": seq.index,
        "state": state,
        "prompt": seq.prompt_len,
        "generated": seq.num_generated,
        "limit": seq.token_limit + seq.dropped_tokens,
        "dropped": seq.dropped_tokens,
        "computed": seq.computed,
        "planned": seq.planned,
        "cached": seq.cached_tokens,
        "preemptions": seq.preemptions,
        "priority": request.priority,
        "tenant": request.tenant,
        "deadline": deadline,
        "arrival": numbers.microseconds(request.arrival or seq.queued_at),
        "first_token": first_token,
        "epoch": seq.epoch,
        "inherited": seq.inherited_tokens,
        "table": seq.block_table,
        "waits": numbers.reasons.get(seq.id),
    }


def describe_host(
    tiers: TierIndex, content_number: Callable[[bytes], int]
) -> list[tuple[int, int, str]]:
    """Return (host block, content, state) of the host blocks with a content."""
    contents = ((tiers.ready, "ready"), (tiers.filling, "filling"))
    return [
        (host_block, content_number(content_hash), state)
        for blocks, state in contents
        for content_hash, host_block in blocks.items()
    ]


def describe_plan(plan: Plan) -> dict[str, Any]:
    """Return what a step in flight computes: (sequence, epoch, tokens, drafts) of each item."""
    items = [(item.seq_id, item.epoch, item.num_tokens, item.num_drafts) for item in plan.items]
    sampled = [int(item.sample) for item in plan.items]
    return {"step": plan.step, "items": items, "sampled": sampled}


def ranges(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Return the numbers in their order as runs of consecutive numbers: (first, count)."""
    runs: list[tuple[int, int]] = []
    first = count = 0
    for number in numbers:
        if count and number == first + count:
            count += 1
            continue
        if count:
            runs.append((first, count))
        first = number
        count = 1
    if count:
        runs.append((first, count))
    return runs
