"""Decides the shape of the next step before anything is planned: its token budget, which sequences
pause, are preempted or may be admitted, and the share of the budget that short prompts may take.

Several mechanisms set the shape: the cap after the device ran out of memory, the latency target,
offline piggybacking, urgent requests and short prompts. The scheduler fills the step within it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from octavo.config import ScheduleConfig
from octavo.core.batching import Batches
from octavo.core.beam_search import has_reported
from octavo.core.prefix import PrefixCache
from octavo.core.queues import Queues
from octavo.core.step_budget import FullSteps, LatencyTarget, Piggyback, PromptBudget, StepTimes
from octavo.core.urgent_preemption import LAST_RANK, UrgentPreemption
from octavo.events import Event, StepLanded
from octavo.types import Plan, Rank, Sequence

NO_IDS: frozenset[int] = frozenset()


class StepShape(NamedTuple):
    token_budget: int
    short_prompt_share: float  # fraction of the remaining budget that short prompts may take first
    admit_before: Rank = LAST_RANK  # waiting sequences of this or a later rank are not admitted
    # (sequence to be preempted before the step is filled, the prompt that it makes room for)
    victims: tuple[tuple[Sequence, Sequence], ...] = ()
    urgent: tuple[Sequence, ...] = ()  # prompts that other sequences pause for
    urgent_positions: int = 0  # positions planned for the urgent prompts so far
    paused: frozenset[int] = NO_IDS  # Sequence.id: neither prefill nor decode in this step
    skip_decode: frozenset[int] = NO_IDS  # Sequence.id: do not decode in this step


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


class StepShaper:
    def __init__(self, schedule: ScheduleConfig, queues: Queues, prefix: PrefixCache):
        self.queues = queues
        self.prefix = prefix
        self.batches = Batches(schedule)
        self.token_cap = TokenCap(schedule.max_num_batched_tokens)
        self.short_prompt_share = schedule.short_prompt_share
        self.step_times: StepTimes | None = None  # None: nothing depends on measured times
        self.preemption: UrgentPreemption | None = None
        if schedule.batching == "adaptive" or queues.policy.preempts_for_waiting:
            self.step_times = StepTimes()
            prefix.pool.events.subscribe(self._learn, StepLanded)
        if self.step_times is not None and queues.policy.preempts_for_waiting:
            self.preemption = UrgentPreemption(
                queues=queues,
                prefix=prefix,
                step_times=self.step_times,
                depth=schedule.depth,
                may_admit=self.may_admit,
            )
        self.prompt_budget = choose_prompt_budget(schedule, self.step_times)

    def _learn(self, event: Event) -> None:
        """Record the time of a landed step. The size of the next steps depends on these times."""
        assert isinstance(event, StepLanded) and self.step_times is not None
        self.step_times.observe(event.plan, event.seconds)

    def form_batch(
        self, sequences_by_request: dict[str, list[Sequence]], clock: Callable[[], float]
    ) -> None:
        """Let the next batch start, in modes that form batches."""
        if self.batches.form_batch is not None and self.queues.waiting:
            self.batches.form_next(self.queues.waiting, sequences_by_request, clock())

    def may_admit(self, seq: Sequence) -> bool:
        """Return whether a sequence may be admitted if there is room: its batch has formed, it is
        not a beam that waits for its siblings, and it does not wait for the disk."""
        return (
            self.batches.may_admit(seq)
            and not has_reported(seq)
            and not self.prefix.waits_for_disk(seq)
        )

    def shape(self, plan: Plan) -> StepShape:
        """Decide the shape of a step whose plan is still empty. Disk reads for urgent prompts are
        added to the plan."""
        token_cap = self.token_cap.current(plan.step)
        if self.preemption is None:
            num_decoding = len(self.queues.decoding)
            allowance = self.prompt_budget.allow(
                token_cap - num_decoding, num_decoding, self.queues
            )
            share = 0.0 if allowance.delayed else self.short_prompt_share
            return StepShape(num_decoding + allowance.tokens, share)
        return self._shape_with_urgent(self.preemption, token_cap, plan)

    def _shape_with_urgent(
        self, preemption: UrgentPreemption, token_cap: int, plan: Plan
    ) -> StepShape:
        step = preemption.shape(token_cap, self.prompt_budget, plan)
        token_budget = step.token_budget
        if token_budget is None:  # there are no prompts
            num_decoding = len(self.queues.decoding)
            limit = token_cap - num_decoding
            allowance = self.prompt_budget.allow(limit, num_decoding, self.queues)
            token_budget = num_decoding + allowance.tokens
        paused = preemption.paused(step)
        return StepShape(
            token_budget=token_budget,
            short_prompt_share=0.0 if step.urgent else self.short_prompt_share,
            admit_before=step.admit_before,
            victims=tuple(zip(step.victims, step.beneficiaries, strict=True)),
            urgent=tuple(step.urgent),
            urgent_positions=sum(seq.planned for seq in step.urgent),
            paused=paused,
            skip_decode=paused | preemption.skipping_same_class(step),
        )

    def after_plan(self, plan: Plan, shape: StepShape) -> None:
        """Record the facts about a complete plan on which the next shape depends."""
        if self.preemption is not None:
            self.preemption.after_plan(plan, shape.urgent, shape.urgent_positions)


def choose_prompt_budget(schedule: ScheduleConfig, step_times: StepTimes | None) -> PromptBudget:
    if schedule.batching == "adaptive":
        assert step_times is not None
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
