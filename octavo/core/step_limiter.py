"""Decides the limits of the next step before anything is planned: its token budget, which sequences
pause, are preempted or may be admitted, and the share of the budget that short prompts may take.

Several mechanisms set limits: the cap after the device ran out of memory, the latency target,
offline piggybacking, urgent requests and short prompts. The scheduler fills the step within them.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.config import ScheduleConfig
from octavo.core.batching import Batches
from octavo.core.beam_search import has_reported
from octavo.core.chunk_costs import ChunkCosts
from octavo.core.prefix import PrefixCache
from octavo.core.queues import Queues
from octavo.core.step_budget import FullSteps, LatencyTarget, Piggyback, PromptBudget, StepTimes
from octavo.core.step_limits import StepLimits
from octavo.core.urgent_preemption import UrgentPreemption
from octavo.events import Event, StepLanded
from octavo.types import Plan, Sequence


class TokenCap:
    """The most tokens of a step. After the device ran out of memory, the cap is halved, and doubled
    again every RAISE_INTERVAL steps."""

    RAISE_INTERVAL = 200

    def __init__(self, maximum: int):
        self.maximum = maximum
        self.limit = maximum
        self.raise_at = 0  # step number

    def current(self, step: int) -> int:
        if step >= self.raise_at:
            self.limit = min(self.limit * 2, self.maximum)
            self.raise_at = step + self.RAISE_INTERVAL
        return self.limit

    def halve(self, failed_tokens: int, step: int) -> None:
        """Halve the cap after a step of `failed_tokens` tokens was too large."""
        self.limit = max(min(self.limit, failed_tokens or self.limit) // 2, 1)
        self.raise_at = step + self.RAISE_INTERVAL


class StepLimiter:
    def __init__(
        self,
        schedule: ScheduleConfig,
        queues: Queues,
        prefix: PrefixCache,
        chunk_costs: ChunkCosts,
    ):
        self.queues = queues
        self.prefix = prefix
        self.chunk_costs = chunk_costs
        self.batches = Batches(schedule)
        self.token_cap = TokenCap(schedule.max_num_batched_tokens)
        self.short_prompt_share = schedule.short_prompt_share
        self.choose_mechanisms(schedule)

    def choose_mechanisms(self, schedule: ScheduleConfig) -> None:
        """Choose the budget of prompts, and preemption for urgent requests, by the policy and the
        batching mode. live_settings.py calls this again after a change of the policy."""
        preempts = self.queues.policy.preempts_for_waiting
        events = self.prefix.pool.events
        events.unsubscribe(self.observe_step)
        if schedule.batching == "adaptive" or preempts:
            events.subscribe(self.observe_step, StepLanded)
        self.step_times = StepTimes()
        self.prompt_budget = choose_prompt_budget(schedule, self.step_times)
        self.preemption: UrgentPreemption | None = None
        if preempts:
            self.preemption = UrgentPreemption(
                queues=self.queues,
                prefix=self.prefix,
                chunk_costs=self.chunk_costs,
                step_times=self.step_times,
                depth=schedule.depth,
                may_admit=self.may_admit,
            )

    def observe_step(self, event: Event) -> None:
        """Record the time of a landed step. The size of the next steps depends on these times."""
        assert isinstance(event, StepLanded)
        self.step_times.observe(event.plan, event.seconds)

    def form_batch(
        self, sequences_by_request: dict[str, list[Sequence]], clock: Callable[[], float]
    ) -> None:
        """Let the next batch start, in modes that form batches."""
        if self.batches.choose_size is not None and self.queues.waiting:
            self.batches.form_next(self.queues.waiting, sequences_by_request, clock())

    def may_admit(self, seq: Sequence) -> bool:
        """Return whether a sequence may be admitted if there is room: its batch has formed, it is
        not a beam that waits for its siblings, and it does not wait for the disk."""
        return (
            self.batches.may_admit(seq)
            and not has_reported(seq)
            and not self.prefix.waits_for_disk(seq)
        )

    def decide(self, plan: Plan) -> StepLimits:
        """Decide the limits of a step whose plan is still empty. Disk reads for urgent prompts are
        added to the plan."""
        token_cap = self.token_cap.current(plan.step)
        if self.preemption is not None:
            return self.preemption.decide(
                plan, token_cap, self.prompt_budget, self.short_prompt_share
            )
        num_decoding = len(self.queues.decoding)
        allowance = self.prompt_budget.allow(token_cap - num_decoding, num_decoding, self.queues)
        share = 0.0 if allowance.delayed else self.short_prompt_share
        return StepLimits(num_decoding + allowance.tokens, share)

    def after_plan(self, plan: Plan, limits: StepLimits) -> None:
        """Record the facts about a complete plan on which the next limits depend."""
        if self.preemption is not None:
            self.preemption.after_plan(plan, limits)


def choose_prompt_budget(schedule: ScheduleConfig, step_times: StepTimes) -> PromptBudget:
    if schedule.batching == "adaptive":
        return LatencyTarget(schedule.latency_target, step_times)
    if piggybacks(schedule):
        return Piggyback(schedule.piggyback_tokens, schedule.max_num_seqs)
    return FullSteps()


def piggybacks(schedule: ScheduleConfig) -> bool:
    """Return whether offline prompts are delayed and start with the longest replies first. Another
    policy or batching mode decides the order itself."""
    return bool(
        schedule.piggyback_tokens
        and schedule.batching == "continuous"
        and schedule.policy == "fcfs"
    )
