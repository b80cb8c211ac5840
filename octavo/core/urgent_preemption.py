"""Pauses and preempts sequences for urgent requests, under policies with `preempts_for_waiting`.

This module decides which prompts the next step computes, which running sequences pause for them,
and which are preempted. It works on ranks, batch slots and blocks; the policy has the rules. While
an urgent prompt is computed, a running sequence is one of these:

    paused       less urgent (Policy.pauses): it keeps its slot and blocks, unless blocks run out
                 and it is preempted, and continues when the urgent prompt is computed, which may
                 take several steps
    same class   equally urgent: if it decodes, it skips one step, never two in a row
    a victim     it may be preempted (Policy.preempts), and slots or blocks do not suffice

All of this is decided before the step is planned, so victims and paused sequences are not in the
plan.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import merge

from octavo.core.chunk_costs import ChunkCost, ChunkCosts
from octavo.core.prefix import PrefixCache
from octavo.core.queues import Queues, by_rank
from octavo.core.step_budget import PromptBudget, StepTimes
from octavo.core.step_limits import LAST_RANK, StepLimits
from octavo.core.tables import blocks_to_grow
from octavo.types import Plan, Rank, Sequence, Status


@dataclass(slots=True)
class UrgentStep:
    """The decisions about the next step so far."""

    plan: Plan  # gets the disk reads of prompts that cannot start without them
    free_slots: int
    available_blocks: int
    decoding: list[Sequence]  # sequences that decode in this step
    token_budget: int | None = None  # None: no prompt has been considered
    prompt_tokens: int = 0  # tokens of the prompts considered so far
    # The lowest rank among preempted sequences and held-back prompts. Waiting sequences with this
    # rank or a later one are not admitted.
    first_rank_not_admitted: Rank = LAST_RANK
    prompts: list[Sequence] = field(default_factory=list)  # computed in this step
    # Prompts that other sequences pause for.
    urgent_prompts: list[Sequence] = field(default_factory=list)
    victims: list[Sequence] = field(default_factory=list)
    # For each victim, the prompt that it makes room for.
    beneficiaries: list[Sequence] = field(default_factory=list)
    released: Counter[int] = field(default_factory=Counter)  # block -> references of the victims


class UrgentPreemption:
    def __init__(
        self,
        queues: Queues,
        prefix: PrefixCache,
        chunk_costs: ChunkCosts,
        step_times: StepTimes,
        depth: int,
        may_admit: Callable[[Sequence], bool],
    ):
        self.queues = queues
        self.policy = queues.policy
        self.prefix = prefix
        self.pool = prefix.pool
        self.chunk_costs = chunk_costs
        self.step_times = step_times
        self.depth = depth
        self.may_admit = may_admit
        self.last_urgent: Sequence | None = None  # the latest prompt that others paused for
        self.same_class_skipped = False  # sequences of the urgent class skipped the last step
        # True if sequences paused in the last step, and no prompt advanced.
        self.paused_without_progress = False

    # ---- before a step ---------------------------------------------------------------------------

    def decide(
        self, plan: Plan, token_cap: int, prompt_budget: PromptBudget, short_prompt_share: float
    ) -> StepLimits:
        """Decide the limits of a step, which has at most `token_cap` tokens. If no other sequence
        pauses, `prompt_budget` and `short_prompt_share` apply as without urgent requests."""
        step = UrgentStep(
            plan=plan,
            free_slots=len(self.queues.free_slots),
            available_blocks=self.pool.num_available,
            decoding=list(self.queues.decoding),
        )
        for seq in merge(list(self.queues.prefilling), list(self.queues.waiting), key=by_rank):
            if seq.rank >= step.first_rank_not_admitted:
                break
            if not self._reserve_for(seq, step, token_cap, prompt_budget):
                break
        if step.token_budget is None:  # there are no prompts
            num_decoding = len(self.queues.decoding)
            limit = token_cap - num_decoding
            allowance = prompt_budget.allow(limit, num_decoding, self.queues)
            step.token_budget = num_decoding + allowance.tokens
        paused = self._paused(step)
        return StepLimits(
            token_budget=step.token_budget,
            short_prompt_share=0.0 if step.urgent_prompts else short_prompt_share,
            first_rank_not_admitted=step.first_rank_not_admitted,
            to_preempt=tuple(zip(step.victims, step.beneficiaries, strict=True)),
            urgent_prompts=tuple(step.urgent_prompts),
            urgent_positions=sum(seq.planned for seq in step.urgent_prompts),
            paused=paused,
            not_decoding=paused | self._skipping_same_class(step),
        )

    def _reserve_for(
        self, seq: Sequence, step: UrgentStep, token_cap: int, prompt_budget: PromptBudget
    ) -> bool:
        """Reserve the resources of a prompt in the step, if there are enough. Returns whether
        tokens are left."""
        urgent = next((p for p in step.prompts if self.policy.pauses(p, seq)), None)
        if urgent is not None:
            if urgent not in step.urgent_prompts:
                step.urgent_prompts.append(urgent)
            if seq.status is Status.WAITING:
                step.first_rank_not_admitted = seq.rank
            return True
        if seq.status is Status.WAITING and not self.may_admit(seq):
            return True
        paused = set() if self.paused_without_progress else self._paused_for(seq, step.victims)
        decoding = [other for other in step.decoding if other.id not in paused]
        num_decoding = len(decoding)
        if paused:
            step.token_budget = token_cap
        elif step.token_budget is None:
            limit = token_cap - num_decoding
            allowed = prompt_budget.allow(limit, num_decoding, self.queues).tokens
            step.token_budget = num_decoding + min(allowed, self._background_limit(seq, limit))
        tokens_left = step.token_budget - num_decoding - step.prompt_tokens
        if tokens_left <= 0:
            return False
        cost = self._chunk_cost(seq, tokens_left, step, nothing_decodes=not num_decoding)
        if cost is None:
            return True
        step.free_slots -= seq.status is Status.WAITING
        step.available_blocks -= cost.blocks
        step.prompt_tokens += cost.tokens
        if not self._find_victims(seq, step, decoding):
            return False
        victim_ids = {victim.id for victim in step.victims}
        step.decoding = [other for other in decoding if other.id not in victim_ids]
        if not self.paused_without_progress:
            step.prompts.append(seq)
        if paused:
            step.urgent_prompts.append(seq)
        return True

    def _paused_for(self, seq: Sequence, victims: list[Sequence]) -> set[int]:
        """Return the running sequences, by id, that pause while `seq`'s prompt is computed."""
        return {
            other.id
            for other in self.queues.running
            if other.rank > seq.rank and self.policy.pauses(seq, other) and other not in victims
        }

    def _background_limit(self, prompt: Sequence, limit: int) -> int:
        """Return the limit of prompt tokens for a step without urgent prompts, so that an urgent
        request that arrives during it waits only briefly. There is no limit before the first urgent
        request: it would cost throughput where all requests are alike."""
        if self.last_urgent is not None and self.policy.pauses(self.last_urgent, prompt):
            return self.step_times.background_chunk(limit, self.depth)
        return limit

    def _chunk_cost(
        self, seq: Sequence, token_budget: int, step: UrgentStep, nothing_decodes: bool
    ) -> ChunkCost | None:
        """Return the cost of the next chunk of a prompt, or None if the prompt is done or cannot be
        computed. A prompt that waits for the disk makes no room for itself before its blocks have
        been read."""
        step_is_empty = nothing_decodes and not step.prompt_tokens
        if seq.status is Status.RUNNING:
            cost = self.chunk_costs.of_next_chunk(seq, token_budget, step_is_empty)
            return cost if cost.tokens else None
        match = self.prefix.match(seq)
        num_running = len(self.queues.running)
        if match.awaited_blocks or self.prefix.request_disk(
            seq, match, step.plan, keep_available=num_running
        ):
            return None
        match = self.prefix.usable_match(match)
        cost = self.chunk_costs.of_admission(seq, match, token_budget, step_is_empty=step_is_empty)
        return None if cost.lacks_tokens else cost

    def _find_victims(self, seq: Sequence, step: UrgentStep, decoding: list[Sequence]) -> bool:
        """Choose victims until slots and blocks suffice for the prompt and for the decoding
        sequences, whose new blocks come first. Returns False, and chooses nobody, if the candidates
        cannot release enough."""
        decode_blocks = sum(blocks_to_grow(self.pool, other, 1) for other in decoding)
        while step.free_slots < 0 or step.available_blocks < decode_blocks:
            candidates = [
                other
                for other in self.queues.running
                if other.rank > seq.rank
                and self.policy.preempts(seq, other)
                and other not in step.victims
            ]
            references = Counter(block for other in candidates for block in other.block_table)
            possible = sum(
                self.pool.ref_counts[block] == step.released[block] + count
                for block, count in references.items()
            )
            if not candidates or step.available_blocks + possible < decode_blocks:
                return False
            victim = self.policy.victim(candidates)
            step.victims.append(victim)
            step.beneficiaries.append(seq)
            step.first_rank_not_admitted = min(step.first_rank_not_admitted, victim.rank)
            step.free_slots += 1
            for block in victim.block_table:
                step.released[block] += 1
                step.available_blocks += self.pool.ref_counts[block] == step.released[block]
        return True

    def _paused(self, step: UrgentStep) -> frozenset[int]:
        """Return the running sequences, by id, that pause in this step."""
        return frozenset(
            other_id
            for seq in step.urgent_prompts
            for other_id in self._paused_for(seq, step.victims)
        )

    def _skipping_same_class(self, step: UrgentStep) -> frozenset[int]:
        """Return the decoding sequences of the urgent class, by id, that skip this step.

        An urgent prompt is computed alone, because one more sequence may cost much (on a GPU, the
        next larger graph). The others of its class continue in the step after."""
        pauses = self.policy.pauses
        skipping: frozenset[int] = frozenset()
        if step.urgent_prompts and not self.same_class_skipped:
            skipping = frozenset(
                other.id
                for other in self.queues.decoding
                if other not in step.victims
                and not any(pauses(other, seq) or pauses(seq, other) for seq in step.urgent_prompts)
            )
        self.same_class_skipped = bool(skipping)
        return skipping

    # ---- after a step ----------------------------------------------------------------------------

    def after_plan(self, plan: Plan, limits: StepLimits) -> None:
        """Record whether an urgent prompt advanced in the complete plan. If none did, no sequence
        pauses in the next step."""
        urgent = limits.urgent_prompts
        plan.urgent = sum(seq.planned for seq in urgent) > limits.urgent_positions
        if urgent:
            self.last_urgent = urgent[-1]
        self.paused_without_progress = bool(urgent) and not plan.urgent
