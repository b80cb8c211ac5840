"""Decides what the next step computes, and folds its results back in. Knows sequences and blocks, no tensors.

A sequence is in one of three places while it lives:

    waiting      not on the device; its blocks, if any were published, are only in the prefix cache
    prefilling   some known tokens are still to be computed           } RUNNING: it has a row and a block table
    decoding     every known token is computed or about to be         }

plan() fills a token budget: decoding first, then prefilling, then whoever waits; but a share of it is for short prompts that
would wait for a long one. Several plans may be in flight, so a plan looks at `planned` (where the sequence will be once they
land) and commit() moves `computed` (where it is).

This file is the loop: admit, plan, commit, preempt, finish. What it asks and tells others to do:

    intake     a request becomes a sequence             queues      who is where, in the order of ranks (policy.py); rows
    batching   which may begin, and how much at once    families    forks and beams of a request
    prefix     what of a text is known already          tables      the blocks that a sequence writes to are its own
    urgency    who stands aside for whom                invariants  what always holds
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.config import CacheConfig, ScheduleConfig
from octavo.core import repetition
from octavo.core.admission import new_sequence
from octavo.core.batching import Batches, Pace, Piggyback
from octavo.core.beam_search import reported
from octavo.core.blocks import BlockPool
from octavo.core.bounded_kv import check_eviction, drop, looks, most_positions, pick, weigh
from octavo.core.forks import SequenceGroups
from octavo.core.invariants import check
from octavo.core.policy import find_policy
from octavo.core.preemption import Room, Urgency
from octavo.core.prefix import Match, PrefixCache
from octavo.core.queues import Queues, new_slot
from octavo.core.tables import admission_takes, chunk, evict, reserve
from octavo.core.tier_index import TierCounters
from octavo.core.trace import Recorder
from octavo.errors import GuideError, InvalidRequest, NotANumber
from octavo.types import (
    DiskWait,
    Guide,
    Item,
    Output,
    Plan,
    Rank,
    Request,
    Sequence,
    Status,
    StepResult,
    TokenLogprobs,
    child_seed,
)

RELAX = 200  # steps after which larger ones are tried again, when the device was short of memory
NO_BLOCK = "no block was free"
NO_NUMBER = "the model computed no finite number to choose a token by: its weights are damaged, or its dtype too narrow for it"


@dataclass(slots=True)
class Counters:
    """What happened so far."""

    steps: int = 0
    queried_tokens: int = 0  # prompt positions looked up in the prefix cache
    cached_tokens: int = 0  # of those, how many it had
    computed_tokens: int = 0
    generated_tokens: int = 0
    copies: int = 0
    dropped_blocks: int = 0  # that left a full cache
    preemptions: int = 0
    shrunk: int = 0  # steps that were too large for the device's memory
    recomputed_tokens: int = 0  # computed again by those who were preempted
    # steps that running sequences sat out, for somebody more urgent
    aside: int = field(default=0, repr=False)
    tiers: TierCounters = field(default_factory=TierCounters, repr=False)


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
                f"max_num_batched_tokens ({schedule.max_num_batched_tokens}) must be at least max_num_seqs "
                f"({schedule.max_num_seqs}): every running sequence needs one token of the budget",
                "max_num_batched_tokens",
            )
        check_eviction(cache, schedule.max_model_len)
        self.cache, self.schedule, self.most = cache, schedule, most_positions(cache)
        self.vocab_size, self.eos_ids, self.seed, self.clock = (
            vocab_size,
            frozenset(eos_ids),
            seed,
            clock,
        )
        self.policy, self.batches = find_policy(schedule.policy), Batches(schedule)
        self.pool = BlockPool(cache.num_blocks, cache.block_size)
        self.prefix = PrefixCache(cache, self.pool)
        self.queues = Queues(self.policy, schedule.max_num_seqs)
        self.families = SequenceGroups(self.queues, self.pool)
        self.adaptive = schedule.batching == "adaptive"
        self.pace = Pace(schedule.latency_target) if self.adaptive or self.policy.pausing else None
        piggybacks = (
            schedule.piggyback_tokens
            and schedule.batching == "continuous"
            and not self.policy.pausing
        )
        self.piggyback = (
            Piggyback(schedule.piggyback_tokens, schedule.max_num_seqs) if piggybacks else None
        )
        self.urgency = Urgency(self.queues, self.prefix, self.pace, schedule.depth)
        self.cap = schedule.max_num_batched_tokens  # lower while the device is short of memory,
        self.relaxed = 0  # until this step
        self.gave_way = False  # somebody did, in this plan
        self.stuck = False  # somebody had no blocks, in this plan
        self.full = False  # who waits does so for rows, blocks or a batch, not just for a turn
        self.arrivals = 0
        self.count = Counters()
        self.recorder: Recorder | None = None
        # The same objects, by the names that others read: never replaced.
        self.waiting, self.prefilling, self.decoding = (
            self.queues.waiting,
            self.queues.prefilling,
            self.queues.decoding,
        )
        self.live, self.requests = self.families.live, self.families.requests
        self.tiers = self.prefix.tiers
        if self.tiers is not None:
            self.count.tiers = self.tiers.count

    @property
    def running(self) -> list[Sequence]:
        return self.queues.running

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds that can be seen between two steps."""
        check(self.queues, self.families, self.prefix, self.cache, self.schedule)

    # ---- requests in and out -----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request, or raise InvalidRequest for what can never run."""
        if request.id in self.requests:
            raise InvalidRequest(f"request id {request.id!r} is already running", "request_id")
        id, number = next(self.families.ids), self.arrivals + 1
        seed = child_seed(self.seed, request.number or number)
        seq = new_sequence(
            request, id, seed, self.cache, self.schedule, self.vocab_size, self.eos_ids
        )
        self.arrivals, seq.queued_at = number, self.clock()
        self.queues.arrive(seq, number)
        self.families.enter(seq)

    def abort(
        self,
        request_id: str,
        reason: str = "abort",
        error: str | None = None,
        code: str | None = None,
    ) -> list[Output]:
        """End what is left of a request, at once. Returns its terminal outputs; an unknown id is nothing to do."""
        family, missing = list(self.requests.get(request_id, ())), self.families.missing(request_id)
        out = [
            Output(
                request_id,
                index,
                [],
                None,
                reason,
                None,
                family[0].cached_tokens,
                None,
                error,
                code,
            )
            for index in missing
        ]
        for seq in family:
            self._end(seq)
        return out

    def stop(self, request_id: str, index: int) -> None:
        """End one sequence whose text met a stop string. The caller, who read the text, reports it."""
        for seq in list(self.requests.get(request_id, ())):
            if seq.index == index:
                self._end(seq)

    def fail(self, plan: Plan, error: str) -> list[Output]:
        """A step went wrong on the device: end every request it touched. Others never shared its writes."""
        ids = {seq.request.id: None for seq in self._undo(plan)}
        return [out for request_id in ids for out in self.abort(request_id, "error", error)]

    def shrink(self, plan: Plan, error: str, code: str) -> list[Output]:
        """A step was too large for the device's memory: what it touched is computed again in steps half as large. Who is alone in
        such a step for the second time ends."""
        touched = self._undo(plan)
        self.count.shrunk += 1
        self.cap, self.relaxed = (
            max(min(self.cap, plan.num_tokens or self.cap) // 2, 1),
            self.count.steps + RELAX,
        )
        for seq in touched:
            self._preempt(seq, "the device ran out of memory")
        if self.cap > 1 and len({seq.request.id for seq in touched}) > 1:
            return []
        again = {seq.request.id: None for seq in touched if seq.retried_after_oom}
        for seq in touched:
            seq.retried_after_oom = True
        return [out for request_id in again for out in self.abort(request_id, "error", error, code)]

    def _undo(self, plan: Plan) -> list[Sequence]:
        """Nothing that a step was to bring is there. Returns the sequences that it was for, those that still wait for it."""
        self.prefix.fail(plan)
        touched = [(row.seq_id, row.epoch) for row in plan.new_slots] + [
            (item.seq_id, item.epoch) for item in plan.items
        ]
        return list(
            {
                seq: s for seq, epoch in touched if (s := self.live.get(seq)) and s.epoch == epoch
            }.values()
        )

    def flush(self) -> Plan:
        """A last step, for an engine that is idle: what only the device has goes to disk, where there is one."""
        self.count.steps += 1
        plan = Plan(self.count.steps)
        self.prefix.flush(plan)
        return plan

    def forget(self) -> None:
        """Empty the cache in every tier but the disk: as if the engine had just started."""
        self.prefix.forget()

    # ---- plan --------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        self.count.steps += 1
        plan = Plan(self.count.steps)
        if self.count.steps >= self.relaxed:
            self.cap, self.relaxed = (
                min(self.cap * 2, self.schedule.max_num_batched_tokens),
                self.count.steps + RELAX,
            )
        for seq in self.families.in_the_way():
            self._preempt(seq, "its sibling beams need the room")
        if not self.policy.fixed and self.queues.rows and self.waiting:
            self.queues.rank_waiting(self.prefix.cached_tokens)
        if self.batches.form is not None and self.waiting:
            self.batches.look(self.waiting, self.requests, self.clock())
        room = self.urgency.make_room(self.cap, self._budget, self._may_begin, self._preempt)
        self.gave_way = self.stuck = False
        self.families.split(plan)
        aside = self.urgency.aside(room)
        left = room.tokens or self._budget(len(self.decoding))
        left -= self._plan_decoding(plan, aside | self.urgency.sit_out(room))
        left -= self._plan_short(plan, left, room)
        left = self._plan_prefilling(plan, left, room.before, aside)
        self._plan_waiting(plan, left, room.before)
        self.full = bool(self.waiting) and (
            self.stuck or self.gave_way or not self.queues.rows or self.batches.form is not None
        )
        self.urgency.settle(room, plan)
        self.prefix.demote(plan)
        self.count.aside += len(aside)
        self.count.copies += len(plan.copies)
        return plan

    def _budget(self, decoding: int) -> int:
        """Tokens of a step in which so many decode. Where it adapts to a target: as many of prompts as let those have their
        next in time. Where nobody waits: as many as ride along."""
        most = self.cap - decoding
        if self.piggyback is not None:
            return decoding + self.piggyback.chunk(
                most, self.decoding, self.prefilling, self.waiting
            )
        return decoding + (
            self.pace.chunk(most) if self.pace is not None and self.adaptive and decoding else most
        )

    def _plan_decoding(self, plan: Plan, aside: set[int]) -> int:
        """One token for every decoding sequence but those that stand aside, the oldest first. Most own the block they write to:
        nothing to decide. What a guided one may say, and what a beam does say, the host decides: until it has, it sits out."""
        size, refs, items, heavy = (
            self.pool.size,
            self.pool.refs,
            plan.items,
            self.cache.kv_eviction == "heavy",
        )
        i = 0
        while i < len(self.decoding):
            seq = self.decoding[i]
            i += 1
            at = seq.planned
            # The steps in flight already reach the limit.
            if at + 1 >= seq.position_limit or seq.id in aside:
                continue
            if at >= len(seq.tokens) and (seq.guide is not None or seq.beam is not None):
                continue
            # a block will leave its cache: when all that stands there has landed
            if at >= self.most and seq.steps_in_flight:
                continue
            j = at // size
            if j >= len(seq.block_table) or refs[seq.block_table[j]] > 1:
                while not self._reserve(seq, 1, plan):
                    weaker = self.decoding[i:] + [s for s in self.prefilling if s.rank > seq.rank]
                    # not in this plan yet: plans are never edited
                    victim = self.policy.victim(weaker) if weaker else seq
                    self._preempt(victim, NO_BLOCK)
                    if victim is seq:
                        return len(items)
                at = seq.planned
            seq.planned = at + 1
            seq.steps_in_flight += 1
            if seq.guide is not None:
                plan.token_masks[len(items)] = seq.guide.mask
            look = heavy and looks(seq, at, self.cache)
            items.append(Item(seq.id, seq.epoch, seq.slot, None, 1, True, at + 1, None, look))
        return len(items)

    def _plan_short(self, plan: Plan, left: int, room: Room) -> int:
        """Short prompts do not wait for long ones that are being computed: those that fit whole into a share of the step come
        first. Not where the long ones may need the memory. Returns the tokens they take."""
        share = min(int(left * self.schedule.short_prompt_share), left - 1)
        todo = [len(seq.tokens) - seq.planned for seq in self.prefilling]
        if (
            (self.piggyback is not None and self.piggyback.on)
            or room.ahead
            or not self.waiting
            or share < 1
            or sum(todo) <= left - share
        ):
            return 0  # nobody is in a hurry, or all fit
        if len(self.pool.free) - sum(-(-num // self.pool.size) for num in todo) < share + len(
            self.decoding
        ):
            return 0
        return share - self._plan_waiting(plan, share, room.before, whole=True)

    def _plan_prefilling(self, plan: Plan, left: int, before: Rank, aside: set[int]) -> int:
        """Prompts that have begun, each after those that wait and rank before it. Returns what is left of the budget."""
        for seq in list(self.prefilling):
            left = self._plan_waiting(plan, left, min(before, seq.rank))
            num = chunk(seq, seq.planned, left)
            if num <= 0 or seq.status is not Status.RUNNING or seq.id in aside:
                continue
            while not self._reserve(seq, num, plan):
                weaker = self.prefilling[self.prefilling.index(seq) + 1 :]
                if not weaker:
                    self.stuck = True
                    # it waits for older work to finish, and nobody younger may take what it waits
                    # for
                    return 0
                self._preempt(self.policy.victim(weaker), NO_BLOCK)
            self._schedule(seq, num, plan)
            left -= num
        return left

    def _reserve(self, seq: Sequence, num: int, plan: Plan) -> bool:
        """Own what its next positions will be written to, or nothing more than before."""
        if seq.planned + num <= self.most:
            return reserve(self.pool, seq, num, plan)
        if not evict(self.pool, self.cache, seq, plan):
            return False
        self.count.dropped_blocks += 1
        plan.new_slots.append(new_slot(seq))
        return True

    def _schedule(self, seq: Sequence, num: int, plan: Plan) -> None:
        """A chunk of known tokens. With the last of them the sequence starts to decode."""
        start, seq.planned = seq.planned, seq.planned + num
        seq.steps_in_flight += 1
        sample = seq.planned == len(seq.tokens)
        logprobs = seq.params.prompt_logprobs if seq.owes_prompt_logprobs else None
        if sample and seq.guide is not None:
            plan.token_masks[len(plan.items)] = seq.guide.mask
        plan.items.append(
            Item(seq.id, seq.epoch, seq.slot, start, num, sample, seq.planned, logprobs)
        )
        if sample:
            self.queues.decode(seq)

    def _may_begin(self, seq: Sequence) -> bool:
        """Its batch has formed, and it need not wait: for the disk, or as a beam that has reported for its siblings."""
        return self.batches.formed(seq) and not reported(seq) and not self.prefix.waits(seq)

    def _plan_waiting(self, plan: Plan, left: int, before: Rank, whole: bool = False) -> int:
        """Admit in order, up to this rank; of those that can be computed at once if `whole`. Who shares most of a prompt with one
        that is being computed waits for that instead of computing it again, and who has much of its prompt on disk waits for the
        disk; those behind need not wait for it. Where somebody gave way nobody begins: a victim does not come straight back.
        Returns what is left of the budget."""
        # first blocks of those who wait: the like of them are not looked at again
        held: set[bytes] = set()
        i = 0
        while i < len(self.waiting) and self.queues.rows and left > 0 and not self.gave_way:
            seq = self.waiting[i]
            if seq.rank >= before:
                break
            if not self._may_begin(seq) or (
                whole and (seq.pending_forks or len(seq.tokens) > left)
            ):
                i += 1
                continue
            if held and self.pool.size < len(seq.tokens):
                self.prefix.extend_hashes(seq, 1)
            if seq.block_hashes and seq.block_hashes[0] in held:
                i += 1
                continue
            found = self.prefix.match(seq)
            if found is None:
                held.add(seq.block_hashes[0])
                i += 1
                continue
            loading = self.prefix.ask_disk(
                seq, found, plan, self.schedule.max_num_seqs - len(self.queues.rows)
            )
            if loading is not None:
                left -= loading
                i += 1
                continue
            used = self._admit(seq, found, left, plan)
            if used == 0:
                self.stuck = True
                break
            left -= used
        return left

    def _admit(self, seq: Sequence, found: Match, left: int, plan: Plan) -> int:
        """Give the sequence a row, the blocks the prefix cache has, those to load into and those its first chunk needs.
        Tokens of the budget that it takes; loads take as many as could be computed in their time. 0: no room."""
        cached = len(found.hits) * self.pool.size
        num = chunk(seq, cached, left)
        if admission_takes(self.pool, found.hits, num) > len(self.pool.free):
            return 0
        self.queues.begin(seq)
        self.prefix.give(seq, found, plan)
        seq.block_table += [
            self.pool.take()
            for _ in range(len(seq.block_table), -(-(cached + num) // self.pool.size))
        ]
        if seq.preemptions == 0 and not seq.inherited_tokens:
            seq.cached_tokens = cached
            self.count.queried_tokens += len(seq.tokens)
            self.count.cached_tokens += cached
        else:
            self.count.recomputed_tokens += max(seq.preempted_positions - cached, 0)
        plan.new_slots.append(new_slot(seq))
        if num > 0:
            self._schedule(seq, num, plan)
        return max(num, 1) + self.prefix.load_tokens(len(found.loads))

    # ---- commit ------------------------------------------------------------------------------------

    def commit(self, plan: Plan, result: StepResult) -> list[Output]:
        """Fold in what a step produced. Results for a sequence that was preempted or ended meanwhile are dropped."""
        self.prefix.commit(plan, result)
        out: list[Output] = []
        live, size, count, caching = self.live, self.pool.size, self.count, self.prefix.on
        for i, (item, new) in enumerate(zip(plan.items, result.tokens, strict=True)):
            seq = live.get(item.seq_id)
            if seq is None or item.epoch != seq.epoch:
                continue
            seq.steps_in_flight -= 1
            seq.retried_after_oom = False
            seq.computed += item.num_tokens
            count.computed_tokens += item.num_tokens
            if item.prompt_logprobs is not None and result.prompt_logprobs is not None:
                take_prompt_logprobs(seq, item, result.prompt_logprobs[i])
            if item.wants_attention_mass:
                weigh(seq, result.attention_mass[i])
            if new and new[0] < 0:
                for one in self.requests[seq.request.id]:
                    self.prefix.disown(one)
                out += self.abort(seq.request.id, "error", NO_NUMBER, NotANumber.code)
                continue
            if caching and seq.computed >= (seq.published_blocks + 1) * size:
                self.prefix.publish(seq)
            if new and seq.beam is not None:
                assert result.logprobs is not None
                count.generated_tokens += 1
                out += self.families.report(seq, result.logprobs[i][0], self.eos_ids, self._end)
                continue
            reason: str | None = None
            for t in new:
                seq.tokens.append(t)
                length = len(seq.tokens)
                if t in seq.stop_ids and (
                    seq.num_generated >= seq.params.min_tokens or seq.guide is not None
                ):
                    reason = "stop"
                elif length >= seq.position_limit:
                    reason = "length"
            stuck = new and reason is None and is_stuck(seq)
            if stuck:
                reason = "length"
            if new and seq.guide is not None:
                try:
                    follow(seq.guide, new[-1], ended=reason is not None)
                except GuideError as e:
                    out += self.abort(seq.request.id, "error", str(e), e.code)
                    continue
            if new:
                count.generated_tokens += len(new)
                news = Output(seq.request.id, seq.index, new, None, reason)
                if result.logprobs is not None and result.logprobs[i]:
                    news.logprobs = result.logprobs[i]
                if seq.first_token_at is None:
                    news.cached_tokens, news.prompt_logprobs = (
                        seq.cached_tokens,
                        seq.prompt_logprobs,
                    )
                    seq.first_token_at = self.clock()
                if reason is not None:
                    news.cached_tokens = seq.cached_tokens
                    if stuck:
                        news.stop_reason = repetition.STOP_REASON
                    elif reason == "stop" and new[-1] not in self.eos_ids:
                        news.stop_reason = new[-1]
                    self._end(seq)
                out.append(news)
        return out

    # ---- preempt and finish ------------------------------------------------------------------------

    def _release(self, seq: Sequence) -> None:
        """Give back row and blocks. Steps in flight may still write there: the device does things in order."""
        for b in reversed(seq.block_table):  # tail first: prefixes outlive suffixes in the cache
            self.pool.drop(b)
        self.prefix.give_up(seq)
        self.queues.leave(seq)
        seq.block_table, seq.steps_in_flight, seq.computed, seq.planned = [], 0, 0, 0

    def _preempt(self, seq: Sequence, why: str) -> None:
        """Back to the queue. Its full blocks stay findable until their memory is needed."""
        seq.preempted_positions = seq.planned
        seq.disk_wait = DiskWait.NOT_ASKED
        seq.preempt_reason = why
        self._release(seq)
        if len(seq.tokens) > self.most:  # what would leave next is not computed again
            drop(seq, pick(seq, self.cache), self.pool.size)
        seq.epoch, seq.preemptions, self.gave_way = seq.epoch + 1, seq.preemptions + 1, True
        self.count.preemptions += 1
        self.queues.come_back(seq)

    def _end(self, seq: Sequence, pruned: bool = False) -> None:
        if seq.status is Status.RUNNING:
            self._release(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        seq.status, seq.epoch = Status.FINISHED, seq.epoch + 1
        self.families.leave(seq)
        if self.recorder is not None and not pruned:
            self.recorder.ended(seq)


def take_prompt_logprobs(seq: Sequence, item: Item, found: list[TokenLogprobs]) -> None:
    assert item.start is not None and seq.prompt_logprobs is not None
    for p, logprobs in enumerate(found, item.start + 1):
        if p < seq.prompt_len:
            seq.prompt_logprobs[p] = logprobs


def is_stuck(seq: Sequence) -> bool:
    """Whether the sequence repeats itself and its request wants it ended."""
    params = seq.params.repetition
    if params is None or seq.num_generated < seq.params.min_tokens:
        return False
    # bounded KV drops tokens from the middle: the last ones stay in a row
    generated = len(seq.tokens) - seq.kept_prompt_tokens
    return repetition.repeats(seq.tokens, generated, params)


def follow(guide: Guide, token: int, ended: bool) -> None:
    """The sequence went on with a token that its guide allowed: raises GuideError if it did not."""
    if not guide.mask[token >> 3] >> (token & 7) & 1:
        raise GuideError(
            f"the model gave token {token}, which structured_outputs do not allow here"
        )
    if not ended:
        guide.accept(token)
