"""Settings of a scheduler that may be changed while it runs, for demonstrations on the live page.

    policy        the order of the queue: one of the built-in policies
    token_budget  tokens of a step, at most max_num_batched_tokens
    chunk         prompt tokens of a step, at most token_budget
    block_limit   blocks that may be used; the others are withheld

A limit below the needs of a live request is refused, so no change can leave a request waiting for
ever. The tokens of a request do not depend on any of these settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from octavo.core.policy import POLICIES
from octavo.core.queues import Queues, by_rank
from octavo.core.scheduler import Scheduler
from octavo.core.step_budget import Allowance, PromptBudget
from octavo.core.step_limiter import piggybacks
from octavo.errors import InvalidRequest
from octavo.events import BlocksAllocated, BlocksReleased, SettingsChanged
from octavo.params import check_integer
from octavo.types import Sequence


class CappedPrompts:
    """Limits the prompt tokens of a step to `cap`, besides the limits of another budget."""

    def __init__(self, budget: PromptBudget, cap: int):
        self.budget = budget
        self.cap = cap

    def allow(self, limit: int, num_decoding: int, queues: Queues) -> Allowance:
        return self.budget.allow(min(limit, self.cap), num_decoding, queues)


def describe_settings(scheduler: Scheduler) -> dict[str, Any]:
    token_budget = scheduler.limiter.token_cap.maximum
    budget = scheduler.limiter.prompt_budget
    return {
        "policy": scheduler.schedule.policy,
        "token_budget": token_budget,
        "chunk": min(budget.cap, token_budget)
        if isinstance(budget, CappedPrompts)
        else token_budget,
        "block_limit": scheduler.pool.num_blocks - len(scheduler.pool.withheld),
    }


def change_settings(scheduler: Scheduler, changes: dict[str, Any]) -> None:
    """Change settings between two steps. Raises InvalidRequest at an invalid setting, after the
    settings before it have been changed."""
    for name, value in changes.items():
        if name not in CHANGES:
            raise InvalidRequest(f"{name} cannot be changed: use {', '.join(CHANGES)}", name)
        CHANGES[name](scheduler, value)
    if SettingsChanged in scheduler.events.listeners:
        scheduler.events.emit(SettingsChanged(describe_settings(scheduler)))


def change_token_budget(scheduler: Scheduler, tokens: int) -> None:
    schedule = scheduler.schedule
    check_integer("token_budget", tokens, schedule.max_num_seqs, schedule.max_num_batched_tokens)
    token_cap = scheduler.limiter.token_cap
    token_cap.maximum = tokens
    token_cap.limit = tokens


def change_chunk(scheduler: Scheduler, tokens: int) -> None:
    check_integer("chunk", tokens, 1, scheduler.schedule.max_num_batched_tokens)
    limiter = scheduler.limiter
    budget = limiter.prompt_budget
    inner = budget.budget if isinstance(budget, CappedPrompts) else budget
    limiter.prompt_budget = CappedPrompts(inner, tokens)


def change_block_limit(scheduler: Scheduler, num_blocks: int) -> None:
    """Withhold available blocks, or give withheld blocks back to the pool."""
    pool = scheduler.pool
    needed = max((_most_blocks(scheduler, seq) for seq in scheduler.live.values()), default=1)
    check_integer("block_limit", num_blocks, 1, pool.num_blocks)
    if num_blocks < needed:
        raise InvalidRequest(
            f"a live request may need {needed} blocks: choose at least that many, or wait until it "
            "has finished",
            "block_limit",
        )
    to_withhold = pool.num_blocks - num_blocks - len(pool.withheld)
    newly_withheld = [pool.allocate() for _ in range(min(to_withhold, pool.num_available))]
    pool.withheld += newly_withheld
    if newly_withheld and BlocksAllocated in scheduler.events.listeners:
        scheduler.events.emit(BlocksAllocated(None, 0, newly_withheld))
    returned = [pool.withheld.pop() for _ in range(-to_withhold)]
    for block in returned:
        pool.release(block)
    if returned and BlocksReleased in scheduler.events.listeners:
        scheduler.events.emit(BlocksReleased(None, returned))
    pool.unpublished_blocks.clear()  # These contents are not stored in a lower tier.
    # A request that needs more blocks can never run and is refused when it arrives.
    limit = pool.num_blocks - len(pool.withheld)
    scheduler.cache = replace(scheduler.cache, num_blocks=limit)


def _most_blocks(scheduler: Scheduler, seq: Sequence) -> int:
    """Return how many blocks a sequence may hold at its end."""
    positions = min(seq.token_limit - 1, scheduler.max_kv_positions)
    return math.ceil(positions / scheduler.pool.block_size)


def change_policy(scheduler: Scheduler, name: str) -> None:
    """Rank all sequences again. Under a policy with changing ranks, sequences that have started
    come first, in the order of arrival."""
    if name not in POLICIES:
        raise InvalidRequest(f"unknown policy {name!r}: use {', '.join(POLICIES)}", "policy")
    if scheduler.schedule.depth > 1 and POLICIES[name].preempts_for_waiting:
        raise InvalidRequest(
            f"the policy {name} needs an engine with one step in flight: start it with --depth 1",
            "policy",
        )
    policy = POLICIES[name]()
    queues = scheduler.queues
    scheduler.schedule = replace(scheduler.schedule, policy=name)
    scheduler.policy = policy
    queues.policy = policy
    queues.longest_offline_first = piggybacks(scheduler.schedule)
    for seq in scheduler.live.values():
        policy.arrived(seq)
        has_started = seq.preemptions > 0 or seq.slot >= 0
        policy_rank = policy.rank(seq) if policy.fixed_ranks else -math.inf if has_started else 0.0
        seq.rank = (policy_rank, *seq.rank[1:])
    for sequences in (queues.waiting, queues.prefilling, queues.decoding):
        sequences.sort(key=by_rank)
    limiter = scheduler.limiter
    budget_before = limiter.prompt_budget
    limiter.choose_mechanisms(scheduler.schedule)
    if isinstance(budget_before, CappedPrompts):
        limiter.prompt_budget = CappedPrompts(limiter.prompt_budget, budget_before.cap)


CHANGES: dict[str, Callable[[Scheduler, Any], None]] = {
    "policy": change_policy,
    "token_budget": change_token_budget,
    "chunk": change_chunk,
    "block_limit": change_block_limit,
}
