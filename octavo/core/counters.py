"""Counters of the scheduler, and the time that the host spends in each part of the loop."""

from __future__ import annotations

from dataclasses import dataclass, field

from octavo.core.tier_index import TierCounters


@dataclass(slots=True)
class Counters:
    """Totals since the start."""

    plans: int = 0  # calls of plan(), also those that found nothing to do
    queried_tokens: int = 0  # prompt positions admitted, also those that the cache cannot serve
    cached_tokens: int = 0  # queried tokens that were found
    computed_tokens: int = 0
    generated_tokens: int = 0
    copies: int = 0  # blocks copied on write
    dropped_blocks: int = 0  # blocks that left a sequence with bounded KV
    preemptions: int = 0
    oom_steps: int = 0  # steps that were too large for the device's memory
    recomputed_tokens: int = 0  # tokens computed again after a preemption or without a KV cache
    # Sum over all steps of the sequences that paused for an urgent request.
    paused: int = field(default=0, repr=False)
    tiers: TierCounters = field(default_factory=TierCounters, repr=False)


@dataclass(slots=True)
class HostTime:
    """The seconds that the host spent in each part of the loop.

    All parts except `wait` should overlap with the work of the device."""

    plans: int = 0  # calls of Scheduler.plan(), also those that found nothing to do
    plan: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    commit: float = 0.0
