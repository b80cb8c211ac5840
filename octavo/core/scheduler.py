"""The scheduler decides what the next step computes, and applies its results to its own state.

It works on sequences and blocks, not on tensors. A live sequence is in one of three places:

    waiting      not on the device; its published blocks, if any, are only in the prefix cache
    prefilling   no plan has covered all of its known tokens yet   } RUNNING: it holds a slot
    decoding     each step computes the last sampled token and     } and blocks
                 samples the next one

plan() fills a token budget: decoding sequences first, then prompts in rank order. A fraction of the
budget that is left after decoding may go to short prompts first. Several plans may be in flight, so
plan() looks at `planned` (where a sequence will be after them) and commit() advances `computed`
(where it is).

This file admits, plans, commits, preempts and finishes sequences. It relies on

    request_checks  a request becomes a sequence     queues      sequences in rank order, slots
    step_limiter    budget, pauses and victims       forks       forks and beams of a request
    chunk_costs     tokens and blocks of a chunk
    prefix          which prefix is cached           tables      exclusive blocks to write to
    policy          ranks and victims                invariants  what always holds
    speculation     drafts that a step verifies
"""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from heapq import merge

from octavo.config import CacheConfig, ScheduleConfig
from octavo.core import reasons
from octavo.core.blocks import BlockPool
from octavo.core.bounded_kv import (
    add_attention_sample,
    check_kv_eviction,
    drop_block_tokens,
    max_kv_positions,
    pick_block,
    samples_attention,
)
from octavo.core.chunk_costs import ChunkCosts
from octavo.core.counters import Counters
from octavo.core.forks import SequenceGroups
from octavo.core.invariants import check_invariants
from octavo.core.policy import find_policy
from octavo.core.prefix import Match, PrefixCache
from octavo.core.prompt_results import add_states, pooled_output, store_prompt_logprobs
from octavo.core.queues import Queues, by_rank
from octavo.core.repetition import REPETITION_DETECTED, is_repeating
from octavo.core.request_checks import new_sequence
from octavo.core.sampled_tokens import advance_guide, may_stop, only_appends
from octavo.core.scheduler_reports import SchedulerReports
from octavo.core.slot_fills import build_slot_fill
from octavo.core.speculation import Speculation, StepDrafts, allowed_drafts, drafts_before_stop
from octavo.core.step_limiter import StepLimiter, piggybacks
from octavo.core.step_limits import StepLimits
from octavo.core.tables import drop_block, grow_table, reserve
from octavo.errors import GuideError, InvalidRequest, NotANumber
from octavo.events import EventBus, StepLanded
from octavo.types import (
    DiskWait,
    DraftCount,
    Item,
    Output,
    Plan,
    Request,
    Sequence,
    Status,
    StepResult,
    TokenLogprobs,
    child_seed,
)


@dataclass(slots=True)
class PlanBuilder:
    """A plan under construction, and the part of its token budget that is left."""

    plan: Plan
    limits: StepLimits
    tokens_left: int
    # Why this plan admits no further sequence; "": it may. A victim must not return in the plan.
    closed_because: str = ""


class Scheduler:
    def __init__(
        self,
        cache: CacheConfig,
        schedule: ScheduleConfig,
        vocab_size: int,
        eos_ids: tuple[int, ...] = (),
        seed: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ):
        if schedule.max_num_batched_tokens < schedule.max_num_seqs:
            raise InvalidRequest(
                f"max_num_batched_tokens ({schedule.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({schedule.max_num_seqs}): every running sequence needs one token "
                "of the budget",
                "max_num_batched_tokens",
            )
        check_kv_eviction(cache, schedule.max_model_len)
        self.cache = cache
        self.schedule = schedule
        self.vocab_size = vocab_size
        self.eos_ids = frozenset(eos_ids)
        self.seed = seed
        self.clock = clock
        self.max_kv_positions = max_kv_positions(cache)
        self.events = EventBus()
        self.policy = find_policy(schedule.policy)
        self.pool = BlockPool(cache.num_blocks, cache.block_size, self.events)
        self.prefix = PrefixCache(cache, self.pool)
        self.queues = Queues(
            self.policy, schedule.max_num_seqs, longest_offline_first=piggybacks(schedule)
        )
        self.groups = SequenceGroups(self.queues, self.pool)
        self.chunk_costs = ChunkCosts(cache, schedule, self.pool)
        self.limiter = StepLimiter(schedule, self.queues, self.prefix, self.chunk_costs)
        self.reports = SchedulerReports(self.events, self.queues, self.prefix, self.limiter)
        self.speculation: Speculation | None = None
        if schedule.speculative is not None:
            self.speculation = Speculation(schedule.speculative)
            self.events.subscribe(self.speculation.observe_step, StepLanded)
        self.arrivals = 0
        self.token_budget = schedule.max_num_batched_tokens  # budget of the latest plan
        # True if waiting sequences lack batch slots or blocks, or wait for a request batch. A
        # sequence that only waits for the next step does not count.
        self.saturated = False
        self.counters = Counters()
        # Short names for parts of the objects above. They are never replaced.
        self.waiting = self.queues.waiting
        self.prefilling = self.queues.prefilling
        self.decoding = self.queues.decoding
        self.live = self.groups.live
        self.sequences_by_request = self.groups.by_request
        self.tiers = self.prefix.tiers
        if self.tiers is not None:
            self.counters.tiers = self.tiers.counters

    @property
    def running(self) -> list[Sequence]:
        return self.queues.running

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds that can be seen between two steps."""
        check_invariants(self.queues, self.groups, self.prefix, self.cache, self.schedule)

    # ---- requests --------------------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request. Raises InvalidRequest if it can never run, or if its id is in use."""
        arrival_number = self.arrivals + 1
        try:
            if request.id in self.sequences_by_request:
                raise InvalidRequest(f"request id {request.id!r} is already running", "request_id")
            seq = new_sequence(
                request=request,
                id=next(self.groups.ids),
                seed=child_seed(self.seed, arrival_number),
                cache=self.cache,
                schedule=self.schedule,
                vocab_size=self.vocab_size,
                eos_ids=self.eos_ids,
            )
        except InvalidRequest as error:
            self.reports.refused(request, error)
            raise
        self.arrivals = arrival_number
        seq.queued_at = self.clock()
        self.queues.enqueue(seq, arrival_number)
        self.groups.add(seq)
        self.reports.arrived(seq)

    def abort(
        self,
        request_id: str,
        reason: str = "abort",
        error: str | None = None,
        code: str | None = None,
    ) -> list[Output]:
        """End the live sequences of a request at once. Returns their last outputs, or none if the
        request is not live."""
        group = list(self.sequences_by_request.get(request_id, ()))
        outputs = [
            Output(
                request_id=request_id,
                index=index,
                tokens=[],
                finish_reason=reason,
                cached_tokens=group[0].cached_tokens,
                error=error,
                code=code,
            )
            for index in self.groups.unfinished_indices(request_id)
        ]
        for seq in group:
            self._finish(seq, reason, error)
        return outputs

    def stop(self, request_id: str, index: int) -> None:
        """End one sequence, without an output. The caller has found a stop string or a complete
        tool call in its text."""
        for seq in list(self.sequences_by_request.get(request_id, ())):
            if seq.index == index:
                self._finish(seq, "stop")

    def fail(self, plan: Plan, error: str) -> list[Output]:
        """End every request in a step that failed. Other requests do not depend on its results."""
        request_ids = {seq.request.id: None for seq in self._end_failed_step(plan)}
        return [
            output
            for request_id in request_ids
            for output in self.abort(request_id, "error", error)
        ]

    def retry_smaller(self, plan: Plan, error: str, code: str) -> list[Output]:
        """Preempt the sequences of a step that exceeded the device's memory. They are computed
        again in steps half as large. A request that fails again, alone or at one token per step,
        ends with an error."""
        affected = self._end_failed_step(plan)
        self.counters.oom_steps += 1
        token_cap = self.limiter.token_cap
        token_cap.halve(plan.num_tokens, self.counters.plans)
        for seq in affected:
            self._preempt(seq, reasons.OUT_OF_MEMORY)
        if token_cap.limit > 1 and len({seq.request.id for seq in affected}) > 1:
            return []
        failed_again = {seq.request.id: None for seq in affected if seq.retried_after_oom}
        for seq in affected:
            seq.retried_after_oom = True
        return [
            output
            for request_id in failed_again
            for output in self.abort(request_id, "error", error, code)
        ]

    def _end_failed_step(self, plan: Plan) -> list[Sequence]:
        """Undo a step's moves between tiers. Returns the live sequences that were in the step."""
        self.prefix.fail(plan)
        planned = [(fill.seq_id, fill.epoch) for fill in plan.slot_fills]
        planned += [(item.seq_id, item.epoch) for item in plan.items]
        affected = {}
        for seq_id, epoch in planned:
            seq = self.live.get(seq_id)
            if seq is not None and seq.epoch == epoch:
                affected[seq_id] = seq
        return list(affected.values())

    def flush(self) -> Plan:
        """Return the last step of an idle engine: it saves to disk what only the device holds."""
        self.counters.plans += 1
        plan = Plan(self.counters.plans)
        self.prefix.flush(plan)
        return plan

    def clear_cache(self) -> None:
        """Empty the prefix cache in every tier but the disk."""
        self.prefix.clear()

    # ---- plan ------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """Decide the next step."""
        self.counters.plans += 1
        self.events.step = self.counters.plans
        for seq in self.groups.blocking_beams():
            self._preempt(seq, reasons.SIBLING_BEAMS)
        if not self.policy.fixed_ranks and self.queues.free_slots and self.waiting:
            self.queues.rerank_waiting(self.prefix.count_cached_tokens)
        self.limiter.form_batch(self.sequences_by_request, self.clock)
        self.groups.fork_prompts()
        if not self.cache.keeps_kv:
            self._discard_kv()
        plan = Plan(self.counters.plans)
        limits = self.limiter.decide(plan)
        self.token_budget = limits.token_budget
        for victim, beneficiary in limits.to_preempt:
            self._preempt(victim, reasons.URGENT_REQUEST, beneficiary)
        self.reports.begin_plan(limits)
        self.groups.fill_stale_slots(plan)
        promotion_cost = self.prefix.load_cost_tokens(len(plan.loads))
        builder = PlanBuilder(plan, limits, limits.token_budget - promotion_cost)
        self._plan_decoding(builder)
        self._admit_short_prompts(builder)
        self._plan_prompts(builder)
        if self.speculation is not None:
            self.speculation.choose_draft_extend(plan, self.live)
        self.reports.not_tried(limits, builder.closed_because)
        forms_batches = self.limiter.batches.choose_size is not None
        has_room = self.queues.free_slots and not builder.closed_because
        self.saturated = bool(self.waiting) and (forms_batches or not has_room)
        self.limiter.after_plan(plan, limits)
        self.prefix.demote(plan)
        self.counters.paused += len(limits.paused)
        self.counters.copies += len(plan.copies)
        return plan

    def _discard_kv(self) -> None:
        """With `kv_cache=False`, which exists for comparisons, let each decoding sequence compute
        all of its tokens again. The sequence keeps its batch slot and its blocks."""
        for seq in list(self.decoding):
            if seq.planned < len(seq.tokens):  # not a beam that waits for its siblings
                self.reports.discarded_kv(seq)
                self.counters.recomputed_tokens += seq.computed
                seq.computed = 0
                seq.planned = 0
                self.queues.move_back_to_prefill(seq)
                self.groups.stale_slots[seq.id] = seq  # resets the slot on the device

    def _plan_decoding(self, builder: PlanBuilder) -> None:
        """Plan one token, and drafts if there are any, for every decoding sequence in rank order.

        Most sequences own the block of their next position and need no allocation. A guided
        sequence, a beam, or a sequence for which the host drafts waits until its last token is
        committed."""
        plan = builder.plan
        items = plan.items
        skip = builder.limits.not_decoding
        block_size = self.pool.block_size
        ref_counts = self.pool.ref_counts
        max_positions = self.max_kv_positions
        needs_attention = self.cache.kv_eviction == "heavy"
        decoding = self.decoding
        drafts = self._begin_drafts(builder)
        waits_to_draft = drafts is not None and drafts.waits_for_tokens
        num_drafts = 0
        # A preemption in this loop removes later entries of `decoding`, so iteration stays valid.
        for next_index, seq in enumerate(decoding, start=1):
            position = seq.planned
            # The steps in flight may already reach the limit.
            if position + 1 >= seq.token_limit or (skip and seq.id in skip):
                continue
            if position >= len(seq.tokens) and (
                seq.guide is not None or seq.beam is not None or waits_to_draft
            ):
                continue
            # Bounded KV drops a block only while no step in flight writes to the sequence.
            if position >= max_positions and seq.steps_in_flight:
                continue
            block = position // block_size
            if block >= len(seq.block_table) or ref_counts[seq.block_table[block]] > 1:
                if not self._reserve_or_preempt(seq, next_index, builder):
                    break
                position = seq.planned
            if seq.guide is not None:
                plan.token_masks[len(items)] = [seq.guide.mask]
            if drafts is not None:
                num_drafts = self._plan_drafts(seq, drafts, plan)
            count = 1 + num_drafts
            end = position + count
            seq.planned = end
            seq.steps_in_flight += 1
            wants_mass = needs_attention and samples_attention(seq, position, self.cache)
            # By position, because keywords would double the cost of the loop's only allocation:
            # seq_id, epoch, slot, start, num_tokens, sample, max_kv_len, prompt_logprobs,
            # wants_attention_mass, num_drafts
            item = Item(
                seq.id, seq.epoch, seq.slot, None, count, True, end, None, wants_mass, num_drafts
            )
            items.append(item)
        # Drafts need no budget: a step that verifies drafts computes no prompt (_begin_drafts).
        builder.tokens_left -= len(items)

    def _begin_drafts(self, builder: PlanBuilder) -> StepDrafts | None:
        """Return the chooser of this step's drafts, or None if the step verifies none. A step that
        may compute prompts verifies none, because prompts use the device better than drafts."""
        if self.speculation is None or not self.decoding:
            return None
        if self.prefilling or (self.waiting and self.queues.free_slots):
            return None
        return self.speculation.begin_step(len(self.decoding), self.limiter.token_cap.limit)

    def _plan_drafts(self, seq: Sequence, drafts: StepDrafts, plan: Plan) -> int:
        """Choose the drafts that the step verifies after a sequence's next token, and reserve
        blocks for them. No sequence is preempted for drafts. Returns the number of drafts."""
        item = len(plan.items)
        # The step computes the next token and the drafts. The last token is never computed.
        room = seq.token_limit - seq.planned - 2
        if seq.beam is not None or room < 1:
            return 0
        tokens, count = drafts.propose(seq, room)
        masks: list[bytes] = []
        if tokens is not None:
            tokens = drafts_before_stop(seq, tokens)
            if seq.guide is not None and tokens:
                tokens, masks = allowed_drafts(seq.guide, tokens)
            count = len(tokens)
        if count and not reserve(self.pool, seq, 1 + count, plan):
            count = 0
        if count and tokens is not None:
            plan.drafts[item] = tokens
        if count and masks:
            plan.token_masks[item] = masks
        drafts.add(count)
        plan.num_drafts += count
        seq.drafts_in_flight += count
        return count

    def _reserve_or_preempt(self, seq: Sequence, next_index: int, builder: PlanBuilder) -> bool:
        """Reserve a block for a decoding sequence, preempting others for it. Returns False if there
        was no other candidate, so the sequence was preempted itself."""
        while not self._reserve(seq, 1, builder.plan):
            # Plans are never edited, so a sequence that is in this plan is not a candidate.
            candidates = self.decoding[next_index:]
            candidates += [other for other in self.prefilling if other.rank > seq.rank]
            victim = self.policy.victim(candidates) if candidates else seq
            self._preempt(victim, reasons.NO_BLOCK_AVAILABLE, beneficiary=seq)
            builder.closed_because = reasons.AFTER_PREEMPTION
            if victim is seq:
                return False
        return True

    def _admit_short_prompts(self, builder: PlanBuilder) -> None:
        """Admit waiting short prompts before continuing long ones. A short prompt must fit
        completely into the share, and enough blocks must remain for the long prompts."""
        fraction = builder.limits.short_prompt_share
        share = min(int(builder.tokens_left * fraction), builder.tokens_left - 1)
        if not self.waiting or share < 1:
            return
        unplanned = [len(seq.tokens) - seq.planned for seq in self.prefilling]
        if sum(unplanned) <= builder.tokens_left - share:
            return  # everything fits
        num_blocks = sum(-(-num_tokens // self.pool.block_size) for num_tokens in unplanned)
        # A prompt takes at most one block per token that it computes, so the short prompts take at
        # most `share` blocks, besides cached ones that they reuse.
        if self.pool.num_available - num_blocks < share + len(self.decoding):
            return
        awaited: dict[int, set[bytes]] = {}
        for seq in self._admissible(builder):
            if share <= 0:
                break
            if not seq.pending_forks and len(seq.tokens) <= share:
                tokens_before = builder.tokens_left
                self._try_admit(seq, share, builder, awaited)
                share -= tokens_before - builder.tokens_left

    def _plan_prompts(self, builder: PlanBuilder) -> None:
        """Plan chunks of prompts that have started and admit waiting ones, merged in rank order."""
        awaited: dict[int, set[bytes]] = {}
        for seq in merge(list(self.prefilling), self._admissible(builder), key=by_rank):
            if builder.tokens_left <= 0:
                break
            if seq.status is Status.WAITING:
                if not builder.closed_because and self.queues.free_slots:
                    self._try_admit(seq, builder.tokens_left, builder, awaited)
            elif seq.id not in builder.limits.paused and not self._plan_chunk(seq, builder):
                break

    def _admissible(self, builder: PlanBuilder) -> Iterator[Sequence]:
        """Yield waiting sequences in rank order, until no more may be admitted."""
        for seq in list(self.waiting) if self.queues.free_slots else ():
            if builder.closed_because or not self.queues.free_slots:
                return
            if seq.rank >= builder.limits.first_rank_not_admitted:
                return
            yield seq

    def _plan_chunk(self, seq: Sequence, builder: PlanBuilder) -> bool:
        """Plan the next chunk of a prompt that has started.

        Returns False if the prompt must wait; the caller then plans no later prompt. It waits if no
        prefilling sequence with a later rank can give blocks or, without chunked prefill, if the
        whole prompt does not fit into this step."""
        cost = self.chunk_costs.of_next_chunk(seq, builder.tokens_left, not builder.plan.items)
        if cost.lacks_tokens:
            builder.closed_because = builder.closed_because or reasons.BEHIND_ANOTHER
            return False
        if not cost.tokens:
            return True
        while not self._reserve(seq, cost.tokens, builder.plan):
            candidates = self.prefilling[self.prefilling.index(seq) + 1 :]
            if not candidates:
                builder.closed_because = builder.closed_because or reasons.BEHIND_ANOTHER
                self.reports.lacks_blocks(seq, cost.blocks)
                return False
            victim = self.policy.victim(candidates)
            self._preempt(victim, reasons.NO_BLOCK_AVAILABLE, beneficiary=seq)
            builder.closed_because = reasons.AFTER_PREEMPTION
        self._schedule_chunk(seq, cost.tokens, builder.plan)
        builder.tokens_left -= cost.tokens
        return True

    def _reserve(self, seq: Sequence, num_tokens: int, plan: Plan) -> bool:
        """Reserve blocks for the next positions, dropping one if the sequence's bounded KV is full.
        If the pool has too few, returns False and changes nothing."""
        if seq.planned + num_tokens <= self.max_kv_positions:
            return reserve(self.pool, seq, num_tokens, plan)
        if not drop_block(self.pool, self.cache, seq, plan):
            return False
        self.counters.dropped_blocks += 1
        plan.slot_fills.append(build_slot_fill(seq))
        return True

    def _schedule_chunk(self, seq: Sequence, num_tokens: int, plan: Plan) -> None:
        """Add a chunk of known tokens to the plan. With the last of them the sequence decodes."""
        start = seq.planned
        seq.planned += num_tokens
        seq.steps_in_flight += 1
        is_last = seq.planned == len(seq.tokens)
        if is_last and seq.guide is not None:
            plan.token_masks[len(plan.items)] = [seq.guide.mask]
        plan.items.append(
            Item(
                seq_id=seq.id,
                epoch=seq.epoch,
                slot=seq.slot,
                start=start,
                num_tokens=num_tokens,
                sample=is_last and seq.request.pooling is None,
                max_kv_len=seq.planned,
                prompt_logprobs=seq.params.prompt_logprobs if seq.lacks_prompt_logprobs else None,
                pooling=seq.request.pooling,
            )
        )
        if is_last:
            self.queues.move_to_decode(seq)

    # ---- admission -------------------------------------------------------------------------------

    def _try_admit(
        self, seq: Sequence, token_budget: int, builder: PlanBuilder, awaited: dict[int, set[bytes]]
    ) -> None:
        """Admit a waiting sequence if it is admissible and there is room.

        A sequence waits for another one that computes or loads more than half of its tokens that
        are not cached. It also waits while its next blocks are read from disk. Sequences behind it
        need not wait, unless they begin with the same prefix. `awaited` collects the prefixes that
        skipped sequences wait for, in the format of begins_with(). Calling match() for every later
        sequence instead would be too slow."""
        if not self.limiter.may_admit(seq):
            self.reports.not_ready(seq)
            return
        if self.prefix.begins_with(seq, awaited):
            self.reports.not_admitted(seq, reasons.SHARED_PREFIX)
            return
        match = self.prefix.match(seq)
        if match.awaited_blocks:
            last_hash = seq.block_hashes[match.awaited_blocks - 1]
            awaited.setdefault(match.awaited_blocks, set()).add(last_hash)
            self.reports.not_admitted(seq, reasons.SHARED_PREFIX)
            return
        num_loads = len(builder.plan.loads)
        # Promotions keep a block available for the next token of each running sequence.
        num_running = self.schedule.max_num_seqs - len(self.queues.free_slots)
        if self.prefix.request_disk(seq, match, builder.plan, keep_available=num_running):
            self.reports.not_admitted(seq, reasons.DISK_READ)
        else:
            self._admit(seq, self.prefix.usable_match(match), token_budget, builder)
        # A load counts as many tokens as could be computed in its time.
        num_loads = len(builder.plan.loads) - num_loads
        builder.tokens_left -= self.prefix.load_cost_tokens(num_loads)

    def _admit(self, seq: Sequence, match: Match, token_budget: int, builder: PlanBuilder) -> None:
        """Give a sequence a slot, its cached blocks, blocks to load into and blocks for its first
        chunk. If there are too few blocks or tokens, the plan admits no further sequence."""
        plan = builder.plan
        cost = self.chunk_costs.of_admission(seq, match, token_budget, step_is_empty=not plan.items)
        lacks_blocks = cost.blocks > self.pool.num_available
        if cost.lacks_tokens or lacks_blocks:
            builder.closed_because = reasons.BEHIND_ANOTHER
            if cost.lacks_tokens:
                self.reports.not_admitted(seq, reasons.NO_ROOM_FOR_PROMPT)
            else:
                self.reports.not_admitted(seq, reasons.NOT_ENOUGH_BLOCKS, cost.blocks)
            return
        self.queues.start_prefill(seq)
        self.reports.admitted(seq, match)
        self.prefix.attach(seq, match, plan)
        grow_table(self.pool, seq, cost.table_length)
        num_cached = len(match.blocks) * self.pool.block_size
        if seq.preemptions == 0 and not seq.inherited_tokens:
            seq.cached_tokens = num_cached
            self.counters.queried_tokens += len(seq.tokens)
            self.counters.cached_tokens += num_cached
        else:
            self.counters.recomputed_tokens += max(seq.preempted_positions - num_cached, 0)
        plan.slot_fills.append(build_slot_fill(seq))
        if cost.tokens > 0:
            self._schedule_chunk(seq, cost.tokens, plan)
        builder.tokens_left -= max(cost.tokens, 1)

    # ---- commit ----------------------------------------------------------------------------------

    def commit(self, plan: Plan, result: StepResult) -> list[Output]:
        """Apply the results of a step. Results of a sequence that was preempted or has ended since
        the step was planned are dropped."""
        self.prefix.commit(plan, result)
        outputs: list[Output] = []
        live = self.live
        block_size = self.pool.block_size
        caching = self.prefix.enabled
        all_logprobs = result.logprobs
        is_plain_step = all_logprobs is None and self.speculation is None
        computed_tokens = 0
        generated_tokens = 0
        for index, (item, tokens) in enumerate(zip(plan.items, result.tokens, strict=True)):
            seq = live.get(item.seq_id)
            if seq is None or item.epoch != seq.epoch:
                continue
            num_tokens = item.num_tokens
            num_drafts = item.num_drafts
            seq.steps_in_flight -= 1
            seq.retried_after_oom = False
            seq.computed += num_tokens - num_drafts
            computed_tokens += num_tokens
            if item.prompt_logprobs is not None and result.prompt_logprobs is not None:
                store_prompt_logprobs(seq, item, result.prompt_logprobs[index])
            if item.wants_attention_mass:
                add_attention_sample(seq, result.attention_mass[index])
            if tokens and tokens[-1] < 0:  # no logit was finite
                outputs += self._fail_not_a_number(seq)
                continue
            if caching and seq.computed >= (seq.published_blocks + 1) * block_size:
                self.prefix.publish(seq)
            if num_drafts:
                self._commit_drafts(seq, num_drafts, len(tokens) - 1, index in plan.drafts)
            if tokens and is_plain_step and only_appends(seq, tokens[0]):
                seq.tokens.append(tokens[0])
                outputs.append(Output(seq.request.id, seq.index, tokens))
                generated_tokens += 1
            elif tokens:
                logprobs = None if all_logprobs is None else all_logprobs[index]
                generated_tokens += self._commit_tokens(seq, tokens, logprobs, outputs)
            elif item.pooling is not None:
                outputs += self._commit_pooled(seq, item, result.pooled[index])
        self.counters.computed_tokens += computed_tokens
        self.counters.generated_tokens += generated_tokens
        return outputs

    def _commit_pooled(self, seq: Sequence, item: Item, states: array[float]) -> list[Output]:
        """Keep the hidden states of a chunk. A sequence whose prompt is computed ends with them."""
        if not add_states(seq, item, states):
            return self._fail_not_a_number(seq)
        if seq.computed < len(seq.tokens):
            return []
        self._finish(seq, "stop")
        return [pooled_output(seq)]

    def _commit_drafts(
        self, seq: Sequence, num_drafts: int, num_accepted: int, by_host: bool
    ) -> None:
        """Advance a sequence over the accepted drafts, and give back the blocks of the rejected
        ones. The KV of rejected drafts is not erased: the next step writes these positions before
        it reads them. The blocks that accepted drafts fill are published with the next step: their
        tokens are not in `seq.tokens` yet."""
        assert self.speculation is not None
        self.speculation.observe_drafts(seq, num_drafts, num_accepted, by_host)
        seq.accepted_drafts += num_accepted
        seq.rejected_drafts += num_drafts - num_accepted
        seq.computed += num_accepted
        seq.planned -= num_drafts - num_accepted
        seq.drafts_in_flight -= num_drafts
        num_blocks = -(-seq.planned // self.pool.block_size)
        if len(seq.block_table) > num_blocks:
            self._release_blocks(seq, num_blocks)

    def _commit_tokens(
        self,
        seq: Sequence,
        tokens: list[int],
        logprobs: list[TokenLogprobs] | None,
        outputs: list[Output],
    ) -> int:
        """Append sampled tokens to a sequence and to `outputs`, and end the sequence if one of them
        does. `tokens` are the accepted drafts and the token sampled after them. Returns how many
        were kept."""
        if seq.beam is not None:
            assert logprobs is not None
            outputs += self.groups.report_beam(seq, logprobs[0], self.eos_ids, self._finish)
            return 1
        all_tokens = seq.tokens
        reason: str | None = None
        repeating = False
        num_kept = 0
        for token in tokens:
            num_kept += 1
            all_tokens.append(token)
            if token in seq.stop_ids and may_stop(seq):
                reason = "stop"
            elif len(all_tokens) >= seq.token_limit:
                reason = "length"
            elif seq.repetition is not None and is_repeating(seq):
                repeating = True
                reason = "length"
            if seq.guide is not None:
                try:
                    advance_guide(seq.guide, token, ended=reason is not None)
                except GuideError as error:
                    outputs += self.abort(seq.request.id, "error", str(error), error.code)
                    return 0
            if reason is not None:
                break
        if reason is not None and num_kept < len(tokens):  # an accepted draft ends the sequence
            num_unused = len(tokens) - 1 - num_kept
            assert self.speculation is not None
            self.speculation.counters.discard_accepted(num_kept, num_unused)
            seq.accepted_drafts -= num_unused
            seq.rejected_drafts += num_unused
            tokens = tokens[:num_kept]
            logprobs = logprobs and logprobs[:num_kept]
        output = Output(seq.request.id, seq.index, tokens, logprobs or None, reason)
        outputs.append(output)
        if self.speculation is not None:
            output.drafts = DraftCount(seq.accepted_drafts, seq.rejected_drafts)
        if seq.first_token_at is None:
            seq.first_token_at = self.clock()
            output.cached_tokens = seq.cached_tokens
            output.prompt_logprobs = seq.prompt_logprobs
        if reason is not None:
            output.cached_tokens = seq.cached_tokens
            if repeating:
                output.stop_reason = REPETITION_DETECTED
            elif reason == "stop" and tokens[-1] not in self.eos_ids:
                output.stop_reason = tokens[-1]
            self._finish(seq, reason)
        return num_kept

    def _fail_not_a_number(self, seq: Sequence) -> list[Output]:
        """End a request with infinite or undefined results. None of its KV may be reused."""
        for member in self.sequences_by_request[seq.request.id]:
            self.prefix.invalidate(member)
        return self.abort(seq.request.id, "error", reasons.NOT_A_NUMBER, NotANumber.code)

    # ---- preempt and finish ----------------------------------------------------------------------

    def _release(self, seq: Sequence) -> None:
        """Free the slot and the blocks. Steps in flight may still write to the blocks. The device
        runs steps in order, so a new owner writes each position before it reads it."""
        self._release_blocks(seq, 0)
        self.prefix.stop_computing(seq)
        self.queues.remove(seq)
        seq.steps_in_flight = 0
        seq.drafts_in_flight = 0
        seq.computed = 0
        seq.planned = 0

    def _release_blocks(self, seq: Sequence, num_kept: int) -> None:
        """Release all blocks of a sequence but the first `num_kept`."""
        released = seq.block_table[num_kept:]
        released.reverse()  # prefixes outlive suffixes in the cache
        del seq.block_table[num_kept:]
        for block in released:
            self.pool.release(block)
        self.reports.released(seq, released)

    def _preempt(self, seq: Sequence, reason: str, beneficiary: Sequence | None = None) -> None:
        """Put a running sequence back into the queue. Its published blocks stay in the prefix
        cache until their memory is needed."""
        self.reports.preempted(seq, reason, beneficiary)
        seq.preempted_positions = seq.planned - seq.drafts_in_flight
        seq.disk_wait = DiskWait.NOT_STARTED
        seq.preempt_reason = reason
        self._release(seq)
        if len(seq.tokens) > self.max_kv_positions:  # the next block to drop is not recomputed
            drop_block_tokens(seq, pick_block(seq, self.cache), self.pool.block_size)
        seq.epoch += 1
        seq.preemptions += 1
        self.counters.preemptions += 1
        self.queues.requeue(seq)

    def _finish(self, seq: Sequence, reason: str, error: str | None = None) -> None:
        """Remove a sequence from the scheduler. Its last output, if any, is made by the caller."""
        self.reports.ended(seq, reason, error)
        if seq.status is Status.RUNNING:
            self._release(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        seq.status = Status.FINISHED
        seq.epoch += 1
        self.groups.remove(seq)
        if self.speculation is not None and self.speculation.drafter is not None:
            self.speculation.drafter.finished(seq)
