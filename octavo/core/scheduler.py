"""Decides what the next step computes, and folds its results back in. Knows sequences and blocks, no tensors.

A sequence is in one of three places while it lives:

    waiting      not on the device; its blocks, if any were published, are only in the prefix cache
    prefilling   some known tokens are still to be computed           } RUNNING: it has a row and a block table
    decoding     every known token is computed or about to be         }

plan() fills a token budget: decoding first, then prefilling, then whoever waits; but a share of it is for short prompts that
would wait for a long one. Several plans may be in flight, so a plan looks at `planned` (where the sequence will be once they
land) and commit() moves `computed` (where it is).

All three are in the order of `Sequence.rank`, which the policy gives (policy.py); batching.py says when requests may begin.
"""

from __future__ import annotations

import math
import sys
import time
from array import array
from bisect import insort
from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import merge
from itertools import pairwise
from operator import attrgetter

from octavo.config import CacheConfig, ScheduleConfig
from octavo.core.batching import Form, Pace, former
from octavo.core.blocks import BlockPool, chain, root
from octavo.core.eviction import check_eviction, drop, looks, pick, weigh
from octavo.core.groups import BeamSearch, go_on
from octavo.core.policy import find_policy
from octavo.core.tiers import TierCounters, Tiers
from octavo.core.trace import Recorder
from octavo.errors import ContextLengthExceeded, GuideError, InvalidRequest, KVCapacityExceeded
from octavo.types import (
    Beam,
    Guide,
    Item,
    NewRow,
    Output,
    Plan,
    Rank,
    Request,
    Sequence,
    Status,
    StepResult,
    TokenLogprobs,
    check_real,
    check_whole,
    child_seed,
)

by_rank = attrgetter("rank")
RELAX = 200  # steps after which larger ones are tried again, when the device was short of memory
LAST: Rank = (math.inf, sys.maxsize, 0)
NO_BLOCK = "no block was free"
NEVER = sys.maxsize  # `published` of a sequence whose content is no longer that of a text


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
    aside: int = field(default=0, repr=False)  # steps that running sequences sat out, for somebody more urgent
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
        self.pool, self.cache = BlockPool(cache.num_blocks, cache.block_size), cache
        self.most = sys.maxsize if cache.eviction == "none" else cache.budget  # positions of one sequence
        self.heavy = cache.eviction == "heavy"
        self.caching, self.schedule = cache.prefix_caching, schedule
        self.vocab_size, self.eos_ids, self.seed = vocab_size, frozenset(eos_ids), seed
        self.policy, self.clock, self.form = find_policy(schedule.policy), clock, former(schedule)
        self.adaptive = schedule.batching == "adaptive"
        self.pace = Pace(schedule.target) if self.adaptive or self.policy.pausing else None
        self.urgent: Sequence | None = None  # the latest that others stood aside for
        self.sat_out = False  # equals of an urgent prompt, in the last step
        self.vain = False  # the last time that some did, nobody got on by it
        self.cap = schedule.max_num_batched_tokens  # lower while the device is short of memory,
        self.relaxed = 0  # until this step
        self.batch: set[str] = set()  # requests that may begin, where batches form
        self.waiting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.rows = list(range(schedule.max_num_seqs))  # device rows nobody uses
        self.live: dict[int, Sequence] = {}
        self.requests: dict[str, list[Sequence]] = {}
        self.searches: dict[str, BeamSearch] = {}  # by request
        self.rewritten: dict[int, Sequence] = {}  # whose row the next plan must write: forks, and beams that were told a token
        self.computing: dict[bytes, int] = {}  # content of blocks on their way into the cache -> whose sequence computes it
        self.count = Counters()
        self.recorder: Recorder | None = None
        self.tiers: Tiers | None = None
        if self.caching and cache.host_slots:
            self.tiers = Tiers(cache.host_slots, cache.block_size, cache.block_bytes, cache.disk)
            self.count.tiers = self.tiers.count
        self._ids = self._arrivals = 0

    @property
    def running(self) -> list[Sequence]:
        return self.decoding + self.prefilling

    # ---- requests in and out -----------------------------------------------------------------------

    def add(self, request: Request) -> None:
        """Queue a request, or raise InvalidRequest for what can never run."""
        prompt, params = request.prompt, request.params
        if request.id in self.requests:
            raise InvalidRequest(f"request id {request.id!r} is already running", "request_id")
        if not prompt:
            raise InvalidRequest("the prompt is empty: at least one token is needed", "prompt")
        if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= self.vocab_size:
            bad = next(t for t in prompt if type(t) is not int or not 0 <= t < self.vocab_size)
            raise InvalidRequest(f"prompt holds token id {bad!r}, but ids are integers in 0..{self.vocab_size - 1}", "prompt")
        check_whole("priority", request.priority, -(2**31), 2**31 - 1)
        if request.deadline is not None:
            check_real("deadline", request.deadline, -math.inf, math.inf)
        params.check_vocabulary(self.vocab_size)
        guide = None if request.guide is None else request.guide.copy()
        if params.structured_outputs is not None and guide is None:
            raise InvalidRequest("structured_outputs come with a guide: compile them first (octavo/text/guide.py)")
        endless = params.ignore_eos and guide is None  # what a guide leads to its end has ended
        stop_ids = frozenset(params.stop_token_ids or ()) | (frozenset() if endless else self.eos_ids)
        if params.min_tokens and params.allowed_token_ids is not None and stop_ids.issuperset(params.allowed_token_ids):
            raise InvalidRequest(
                "allowed_token_ids are all stop tokens, which min_tokens forbids: nothing could be said", "min_tokens"
            )
        room = self.schedule.max_model_len - len(prompt)
        if room < 1:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens, but the context holds {self.schedule.max_model_len} and one "
                "must be left to generate: shorten the prompt or raise max_model_len"
            )
        if len(prompt) > self.most:
            raise ContextLengthExceeded(
                f"the prompt has {len(prompt)} tokens, but a sequence keeps {self.most}: shorten the prompt or raise kv_budget"
            )
        if self.most < sys.maxsize and params.use_beam_search:
            raise InvalidRequest("beams cannot go on in bounded caches: use kv_eviction none, or no beams", "use_beam_search")
        wanted = params.max_tokens or room
        limit = len(prompt) + (min(room, wanted) if self.most == sys.maxsize else wanted)
        need = -(-min(limit - 1, self.most) // self.pool.size)  # the last token is sampled and never computed
        if need > self.pool.num_blocks:
            raise KVCapacityExceeded(
                f"request {request.id!r} needs {need} KV blocks of {self.pool.size} for {len(prompt)} prompt and "
                f"{limit - len(prompt)} new tokens, but the pool has {self.pool.num_blocks}: lower max_tokens to "
                f"{max(self.pool.num_blocks * self.pool.size + 1 - len(prompt), 0)} or enlarge the pool"
            )
        if params.use_beam_search and (guide is not None or params.width + len(stop_ids) > self.vocab_size):
            why = "a guide" if guide is not None else f"{len(stop_ids)} stop tokens in a vocabulary of {self.vocab_size}"
            raise InvalidRequest(f"{params.width} beams are not possible with {why}", "use_beam_search", "unsupported_parameter")
        self._arrivals += 1
        seed = params.seed if params.seed is not None else child_seed(self.seed, self._arrivals)
        seq = Sequence(self._next_id(), request, 0, array("i", prompt), len(prompt), limit, seed, stop_ids)
        seq.guide, seq.queued = guide, self.clock()
        if params.use_beam_search:
            seq.beam, self.searches[request.id] = Beam(), BeamSearch(seq)
        else:
            seq.forks = params.width - 1
        if params.prompt_logprobs is not None:
            seq.prompt_logprobs = [None] * len(prompt)
        seq.rank = (self.policy.rank(seq) if self.policy.fixed else 0.0, self._arrivals, 0)
        self.policy.arrived(seq)
        self.live[seq.id] = seq
        self.requests[request.id] = [seq]
        insort(self.waiting, seq, key=by_rank)

    def abort(self, request_id: str, reason: str = "abort", error: str | None = None, code: str | None = None) -> list[Output]:
        """End what is left of a request, at once. Returns its terminal outputs; an unknown id is nothing to do."""
        family = list(self.requests.get(request_id, ()))
        missing = [index for seq in family for index in range(seq.index, seq.index + 1 + seq.forks)]  # and children never born
        if request_id in self.searches:
            missing = list(range(family[0].params.completions))
        out = [Output(request_id, index, [], None, reason, None, family[0].cached, None, error, code) for index in missing]
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
        self.cap, self.relaxed = max(min(self.cap, plan.num_tokens or self.cap) // 2, 1), self.count.steps + RELAX
        for seq in touched:
            self._preempt(seq, "the device ran out of memory")
        if self.cap > 1 and len({seq.request.id for seq in touched}) > 1:
            return []
        again = {seq.request.id: None for seq in touched if seq.shrunk}
        for seq in touched:
            seq.shrunk = True
        return [out for request_id in again for out in self.abort(request_id, "error", error, code)]

    def _undo(self, plan: Plan) -> list[Sequence]:
        """Nothing that a step was to bring is there. Returns the sequences that it was for, those that still wait for it."""
        if self.tiers is not None:
            self.tiers.fail(plan)
            self.tiers.land(plan, self.pool, loaded=False)
        touched = [(row.seq, row.epoch) for row in plan.rows] + [(item.seq, item.epoch) for item in plan.items]
        return list({seq: s for seq, epoch in touched if (s := self.live.get(seq)) and s.epoch == epoch}.values())

    # ---- plan --------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        self.count.steps += 1
        plan = Plan(self.count.steps)
        if self.count.steps >= self.relaxed:
            self.cap, self.relaxed = min(self.cap * 2, self.schedule.max_num_batched_tokens), self.count.steps + RELAX
        if self.searches:
            self._make_way()
        if not self.policy.fixed and self.rows and self.waiting:
            self._rank_waiting()
        if self.form is not None and self.waiting:
            self._form_batch(self.form)
        before, left, ahead = LAST, 0, list[Sequence]()
        if self.policy.pausing and (self.waiting or self.prefilling):
            before, left, ahead = self._make_room()
        preemptions, stood = self.count.preemptions, sum(s.planned for s in ahead)
        self._fork(plan)
        aside = {s.id for a in ahead for s in self.running if s.rank > a.rank and self.policy.outranks(a, s)}
        left = (left or self._budget(len(self.decoding))) - self._plan_decoding(plan, aside | self._sit_out(ahead))
        if self.prefilling and self.waiting and not ahead and self.count.preemptions == preemptions:
            left -= self._plan_short(plan, left, before)
        stuck = False
        for seq in list(self.prefilling):
            if self.count.preemptions == preemptions:
                left = self._plan_waiting(plan, left, min(before, seq.rank))  # who ranks before it
            num = min(len(seq.tokens) - (seq.forks > 0) - seq.planned, left)
            if num <= 0 or seq.status is not Status.RUNNING or seq.id in aside:
                continue
            while not self._reserve(seq, num, plan):
                weaker = self.prefilling[self.prefilling.index(seq) + 1 :]
                if not weaker:
                    break
                self._preempt(self.policy.victim(weaker), NO_BLOCK)
            else:
                self._schedule(seq, num, plan)
                left -= num
                continue
            stuck = True  # it waits for older work to finish, and nobody younger may take what it waits for
            break
        if not stuck and self.count.preemptions == preemptions:  # a victim does not come straight back
            self._plan_waiting(plan, left, before)
        if ahead:
            plan.urgent, self.urgent = sum(s.planned for s in ahead) > stood, ahead[-1]
            self.count.aside += len(aside)
        self.vain = bool(ahead) and not plan.urgent
        self.count.copies += len(plan.copies)
        if self.tiers is not None:
            self.tiers.demote(self.pool, plan)
            plan.waits = bool(self.tiers.fetching or self.tiers.rising)
        self.pool.evicted.clear()
        return plan

    def _sit_out(self, ahead: list[Sequence]) -> set[int]:
        """Equals of those for whom others stand aside, of those that decode: a prompt is computed alone, for one row more may
        cost much (on a GPU, the next larger graph), and they go on right after it. Never in two steps in a row."""
        outranks, equals = self.policy.outranks, set[int]()
        if ahead and not self.sat_out:
            equals = {s.id for s in self.decoding if not any(outranks(s, a) or outranks(a, s) for a in ahead)}
        self.sat_out = bool(equals)
        return equals

    def _form_batch(self, form: Form) -> None:
        """Let the next batch begin if it is time: alone, or under `window` beside others that leave it rows."""
        running = {id for id in self.batch if id in self.requests}
        beside = self.schedule.batching == "window" and len(running) + self.schedule.max_batch <= self.schedule.max_num_seqs
        if not running or beside:
            fresh = [seq for seq in self.waiting if seq.request.id not in running]
            self.batch = running | {seq.request.id for seq in fresh[: form(fresh, self.clock()) if fresh else 0]}

    def _budget(self, decoding: int, prompt: Sequence | None = None) -> int:
        """Tokens of a step in which so many decode. Where it adapts to a target: as many of prompts as let those have their
        next in time. Where an urgent request may come: as many as it may have to wait for."""
        chunk = most = self.cap - decoding
        if self.pace is not None and self.adaptive and decoding:
            chunk = self.pace.chunk(most)
        if self.pace is not None and prompt is not None and (self.urgent is None or self.policy.outranks(self.urgent, prompt)):
            chunk = min(chunk, self.pace.polite(most, self.schedule.depth))
        return decoding + chunk

    def _make_way(self) -> None:
        """A beam that has reported keeps its room as long as all that have not are decoding: those get on. Otherwise it gives
        way, for it is its siblings that it waits for."""
        for id in self.searches:
            todo = [s for s in self.requests[id] if not reported(s)]
            if any(s.status is Status.WAITING or s in self.prefilling for s in todo):
                for seq in self.requests[id]:
                    if seq.status is Status.RUNNING and reported(seq):
                        self._preempt(seq, "its sibling beams need the room")

    def _make_room(self) -> tuple[Rank, int, list[Sequence]]:
        """Before anything is planned, so that nobody concerned is in the plan: who computes a prompt in this step, who stands
        aside for it (outranked: keeps row and blocks), and who gives way to it (paused: back to the queue), for lack of room.

        Returns the rank of the first that was paused or may not begin: it does not come straight back, nor does who ranks
        after it; the step's tokens; and those for whom others stand aside."""
        pool, before, most = self.pool, LAST, self.cap
        rows, blocks, used, budget = len(self.rows), len(pool.free), 0, 0
        stay, begin, ahead = self.decoding, list[Sequence](), list[Sequence]()
        for seq in merge(list(self.prefilling), list(self.waiting), key=by_rank):
            if seq.rank >= before:
                break
            if first := next((a for a in begin if self.policy.outranks(a, seq)), None):
                ahead += [first] if first not in ahead else []
                before = seq.rank if seq.status is Status.WAITING else before
                continue
            if seq.status is Status.WAITING and not self._may_begin(seq):
                continue
            weaker = {s.id for s in self.running if s.rank > seq.rank and self.policy.outranks(seq, s)} if not self.vain else ()
            kept = [s for s in stay if s.id not in weaker and s.status is Status.RUNNING]
            budget = most if weaker else budget or self._budget(len(kept), seq)
            if budget <= len(kept) + used:
                break
            claim = self._claim(seq, budget - len(kept) - used)
            if claim is None or (seq.status is Status.RUNNING and not claim[2]):
                continue
            rows, blocks, used = rows - claim[0], blocks - claim[1], used + claim[2]
            wanted = sum(s.planned % pool.size == 0 for s in kept)  # by those who decode: theirs come first
            while rows < 0 or blocks < wanted:
                victims = [s for s in self.running if s.rank > seq.rank and self.policy.pauses(seq, s)]
                if not victims or blocks + sum(pool.refs[b] == 1 for s in victims for b in s.table) < wanted:
                    return before, budget, ahead  # to pause them would not help
                victim, free = self.policy.victim(victims), len(pool.free)
                self._preempt(victim, "a more urgent request took its place")
                rows, blocks, before = rows + 1, blocks + len(pool.free) - free, min(before, victim.rank)
            stay = kept
            if not self.vain:
                begin.append(seq)
            ahead += [seq] if weaker else []
        return before, budget, ahead

    def _claim(self, seq: Sequence, left: int) -> tuple[int, int, int] | None:
        """Rows, blocks and tokens that its next chunk takes. None: it cannot begin yet."""
        size, known = self.pool.size, len(seq.tokens) - (seq.forks > 0)
        if seq.status is Status.RUNNING:
            num = min(known - seq.planned, left)
            return 0, max(-(-(seq.planned + num) // size) - len(seq.table), 0), num
        found = self._match(seq)
        if found is None:
            return None
        hits, _ = found  # what is to be loaded needs a block as what is to be computed does
        num = min(known - len(hits) * size, left)
        return 1, -(-(len(hits) * size + num) // size) - sum(self.pool.refs[b] > 0 for b in hits if b), num

    def _plan_decoding(self, plan: Plan, aside: set[int]) -> int:
        """One token for every decoding sequence but those that stand aside, the oldest first. Most own the block they write to:
        nothing to decide. What a guided one may say, and what a beam does say, the host decides: until it has, it sits out."""
        size, refs, items = self.pool.size, self.pool.refs, plan.items
        i = 0
        while i < len(self.decoding):
            seq = self.decoding[i]
            i += 1
            at = seq.planned
            if at + 1 >= seq.limit or seq.id in aside:  # what is in flight reaches the limit
                continue
            if at >= len(seq.tokens) and (seq.guide is not None or seq.beam is not None):
                continue
            if at >= self.most and seq.inflight:  # a block will leave its cache: when all that stands there has landed
                continue
            j = at // size
            if j >= len(seq.table) or refs[seq.table[j]] > 1:
                while not self._reserve(seq, 1, plan):
                    weaker = self.decoding[i:] + [s for s in self.prefilling if s.rank > seq.rank]
                    victim = self.policy.victim(weaker) if weaker else seq  # not in this plan yet: plans are never edited
                    self._preempt(victim, NO_BLOCK)
                    if victim is seq:
                        return len(items)
                at = seq.planned
            seq.planned = at + 1
            seq.inflight += 1
            if seq.guide is not None:
                plan.masks[len(items)] = seq.guide.mask
            look = self.heavy and looks(seq, at, self.cache)
            items.append(Item(seq.id, seq.epoch, seq.row, None, 1, True, at + 1, None, look))
        return len(items)

    def _reserve(self, seq: Sequence, num: int, plan: Plan) -> bool:
        """Own every block that positions [planned, planned + num) will be written to. All of them or none."""
        if seq.planned + num > self.most:
            return self._evict(seq, plan)
        size, pool, table = self.pool.size, self.pool, seq.table
        first, last = seq.planned // size, (seq.planned + num - 1) // size
        shared = [j for j in range(first, min(last + 1, len(table))) if pool.refs[table[j]] > 1]
        fresh = max(last + 1 - len(table), 0)
        if len(shared) + fresh > len(pool.free):
            return False
        for j in shared:  # copy on write
            old, table[j] = table[j], pool.take()
            plan.copies.append((old, table[j]))
            plan.appends.append((seq.row, j, table[j]))
            pool.drop(old)
        for j in range(len(table), last + 1):
            table.append(pool.take())
            plan.appends.append((seq.row, j, table[j]))
        return True

    def _evict(self, seq: Sequence, plan: Plan) -> bool:
        """A block leaves a full cache, those behind it move up, and there is one to write to. All of that or nothing. What
        others hold or could find is not touched: it is copied, or taken out of the index."""
        size, pool, table, j = self.pool.size, self.pool, seq.table, pick(seq, self.cache)
        shared = sum(pool.refs[b] > 1 for b in table[j + 1 :])
        if shared + 1 > len(pool.free) + (pool.refs[table[j]] == 1):
            return False
        pool.drop(table.pop(j))
        for k in range(j, len(table)):
            if pool.refs[old := table[k]] > 1:
                table[k] = pool.take()
                plan.copies.append((old, table[k]))
                pool.drop(old)
            pool.withdraw(table[k])
            plan.shifts.append((table[k], size))
        table.append(pool.take())
        drop(seq, j, size)
        seq.computed = seq.planned = seq.planned - size
        seq.published = NEVER  # until it is computed anew, from the tokens that it kept
        self.count.dropped_blocks += 1
        plan.rows.append(self._new_row(seq))
        return True

    def _schedule(self, seq: Sequence, num: int, plan: Plan) -> None:
        """A chunk of known tokens. With the last of them the sequence starts to decode."""
        start, seq.planned = seq.planned, seq.planned + num
        seq.inflight += 1
        sample = seq.planned == len(seq.tokens)
        logprobs = seq.params.prompt_logprobs if self._missing_prompt_logprobs(seq) else None
        if sample and seq.guide is not None:
            plan.masks[len(plan.items)] = seq.guide.mask
        plan.items.append(Item(seq.id, seq.epoch, seq.row, start, num, sample, seq.planned, logprobs))
        if sample:
            self.prefilling.remove(seq)
            insort(self.decoding, seq, key=by_rank)

    def _rank_waiting(self) -> None:
        """Ranks that change are asked for. What has begun once comes first, in any case."""
        self.policy.look(self)
        for seq in self.waiting:
            if seq.rank[0] > -math.inf:
                seq.rank = (self.policy.rank(seq), *seq.rank[1:])
        self.waiting.sort(key=by_rank)

    def _return(self, seq: Sequence) -> None:
        """To its place in the queue, which for what has begun once is mostly the head."""
        if not self.policy.fixed:
            seq.rank = (-math.inf, *seq.rank[1:])
        insort(self.waiting, seq, key=by_rank)

    def _may_begin(self, seq: Sequence) -> bool:
        """Its batch has formed, and the disk has brought something since it looked, if it waits for the disk. A beam that has
        reported does not come back before its siblings have."""
        formed = self.form is None or seq.request.id in self.batch
        return formed and not reported(seq) and (self.tiers is None or seq.asked != self.tiers.news)

    def _plan_short(self, plan: Plan, left: int, before: Rank) -> int:
        """Short prompts do not wait for long ones that are being computed: those that fit whole into a share of the step come
        first. Not where the long ones may need the memory. Returns the tokens they take."""
        share = min(int(left * self.schedule.short_share), left - 1)
        todo = [len(seq.tokens) - seq.planned for seq in self.prefilling]
        if share < 1 or sum(todo) <= left - share:
            return 0  # all fit
        if len(self.pool.free) - sum(-(-num // self.pool.size) for num in todo) < share + len(self.decoding):
            return 0
        return share - self._plan_waiting(plan, share, before, whole=True)

    def _plan_waiting(self, plan: Plan, left: int, before: Rank, whole: bool = False) -> int:
        """Admit in order, up to this rank; of those that can be computed at once if `whole`. Who shares most of a prompt with one
        that is being computed waits for that instead of computing it again, and who has much of its prompt on disk waits for the
        disk; those behind need not wait for it. Returns what is left of the budget."""
        held: set[bytes] = set()  # first blocks of those who wait: the like of them are not looked at again
        i = 0
        while i < len(self.waiting) and self.rows and left > 0:
            seq = self.waiting[i]
            if seq.rank >= before:
                break
            if not self._may_begin(seq) or (whole and (seq.forks or len(seq.tokens) > left)):
                i += 1
                continue
            if held and self.pool.size < len(seq.tokens):
                self._extend_hashes(seq, 1)
            if seq.hashes and seq.hashes[0] in held:
                i += 1
                continue
            found = self._match(seq)
            if found is None:
                held.add(seq.hashes[0])
                i += 1
                continue
            if self.tiers is not None and self._may_match(seq) and self.tiers.ask(seq, *found, self.pool, plan):
                lifted = self.tiers.lift(seq, found[1], self.pool, plan, self.schedule.max_num_seqs - len(self.rows))
                left -= self.tiers.costs.in_tokens(lifted)
                i += 1
                continue
            used = self._admit(seq, *found, left, plan)
            if used == 0:
                break
            left -= used
        return left

    def cached_tokens(self, seq: Sequence) -> int:
        """How much of its prompt the prefix cache has, or is about to have."""
        if not self.caching:
            return 0
        size, found = self.pool.size, 0
        while found < (len(seq.tokens) - 1) // size:
            self._extend_hashes(seq, found + 1)
            if seq.hashes[found] not in self.pool.index and seq.hashes[found] not in self.computing:
                break
            found += 1
        return found * size

    def _may_match(self, seq: Sequence) -> bool:
        return self.caching and not self._missing_prompt_logprobs(seq)

    def _match(self, seq: Sequence) -> tuple[list[int], list[tuple[int, int]]] | None:
        """Blocks of its prompt that the prefix cache has, 0 for one that a lower tier has, and (logical block, host slot) of
        those. None: most of the rest will be there soon."""
        if not self._may_match(seq):
            return [], []
        size = self.pool.size
        full = (len(seq.tokens) - 1) // size  # always leave a token to compute
        self._extend_hashes(seq, full)
        hits, loads = self.pool.match(seq.hashes[:full], seq.tokens), list[tuple[int, int]]()
        if self.tiers is not None:
            loads = self.tiers.extend(hits, seq.hashes[:full], seq.tokens, self.pool, self.computing)
        soon = len(hits)
        while soon < full and seq.hashes[soon] in self.computing:
            soon += 1
        return None if 2 * (soon - len(hits)) * size > len(seq.tokens) - len(hits) * size else (hits, loads)

    def _admit(self, seq: Sequence, hits: list[int], loads: list[tuple[int, int]], left: int, plan: Plan) -> int:
        """Give the sequence a row, the blocks the prefix cache has, those to load into and those its first chunk needs.
        Tokens of the budget that it takes; loads take as many as could be computed in their time. 0: no room."""
        size, pool = self.pool.size, self.pool
        known = len(seq.tokens) - (seq.forks > 0)  # forks stop one short: each child computes the last token itself
        cached = len(hits) * size
        num = min(known - cached, left)
        need = -(-(cached + num) // size) - len(hits)
        if need + len(loads) > len(pool.free) - sum(pool.refs[b] == 0 for b in hits if b):
            return 0
        self.waiting.remove(seq)
        seq.table = [pool.share(b) if b else 0 for b in hits]  # pinned before anything is evicted
        for j, slot in loads:
            assert self.tiers is not None
            self.tiers.load(slot, block := pool.take(), plan)
            seq.table[j] = block
        seq.table += [pool.take() for _ in range(need)]
        seq.status, seq.row = Status.RUNNING, self.rows.pop()
        seq.computed = seq.planned = cached
        seq.published = loads[0][0] if loads else len(hits)  # what is loaded counts when the step is committed
        insort(self.prefilling, seq, key=by_rank)
        for h in seq.hashes[seq.published :]:
            self.computing.setdefault(h, seq.id)
        if seq.preemptions == 0:
            seq.cached = cached
            self.count.queried_tokens += len(seq.tokens)
            self.count.cached_tokens += cached
        else:
            self.count.recomputed_tokens += max(seq.lost - cached, 0)
        plan.rows.append(self._new_row(seq))
        if num > 0:
            self._schedule(seq, num, plan)
        return max(num, 1) + (self.tiers.costs.in_tokens(len(loads)) if self.tiers is not None else 0)

    def _fork(self, plan: Plan) -> None:
        """A prompt computed but for its last token splits: each child shares the table and goes its own way."""
        ready = [q for q in self.prefilling if q.forks and not q.inflight and q.computed == len(q.tokens) - 1]
        for seq in ready:
            forks, seq.forks = seq.forks, 0
            self.prefilling.remove(seq)
            insort(self.decoding, seq, key=by_rank)
            for index in range(1, forks + 1):
                self._child(seq, index).shared = seq.prompt_len
        for seq in self.rewritten.values():
            if seq.status is Status.RUNNING:
                plan.rows.append(self._new_row(seq))
        self.rewritten.clear()

    def _child(self, seq: Sequence, index: int) -> Sequence:
        """A fork: it has its parent's tokens and shares its blocks. Without a row, or if the parent has no blocks, it waits like
        any other request, and finds in the cache what is there."""
        seed = child_seed(seq.seed, index)
        child = Sequence(self._next_id(), seq.request, index, seq.tokens[:], seq.prompt_len, seq.limit, seed, seq.stop_ids)
        child.hashes, child.cached, child.rank = list(seq.hashes), seq.cached, (*seq.rank[:2], index)
        child.guide, child.queued = None if seq.guide is None else seq.guide.copy(), seq.queued
        self.live[child.id] = child
        self.policy.arrived(child)
        self.requests[seq.request.id].append(child)
        if not self.rows or seq.status is not Status.RUNNING:
            self._return(child)
            return child
        child.status, child.row = Status.RUNNING, self.rows.pop()
        child.computed = child.planned = seq.computed
        child.published = seq.published
        child.table = [self.pool.share(b) for b in seq.table]
        insort(self.decoding, child, key=by_rank)
        self.rewritten[child.id] = child
        return child

    # ---- commit ------------------------------------------------------------------------------------

    def commit(self, plan: Plan, result: StepResult) -> list[Output]:
        """Fold in what a step produced. Results for a sequence that was preempted or ended meanwhile are dropped."""
        if self.tiers is not None:
            self.tiers.commit(plan, result)
            self.tiers.land(plan, self.pool, loaded=True)
        out: list[Output] = []
        live, size, count, caching = self.live, self.pool.size, self.count, self.caching
        for i, (item, new) in enumerate(zip(plan.items, result.tokens, strict=True)):
            seq = live.get(item.seq)
            if seq is None or item.epoch != seq.epoch:
                continue
            seq.inflight -= 1
            seq.shrunk = False
            seq.computed += item.num
            count.computed_tokens += item.num
            if item.prompt_logprobs is not None and result.prompt_logprobs is not None:
                self._take_prompt_logprobs(seq, item, result.prompt_logprobs[i])
            if item.mass:
                weigh(seq, result.mass[i])
            if caching and seq.computed >= (seq.published + 1) * size:
                self._publish(seq)
            if new and seq.beam is not None:
                assert result.logprobs is not None
                seq.beam.report = result.logprobs[i][0]
                count.generated_tokens += 1
                if all(map(reported, self.requests[seq.request.id])):
                    out += self._step_beams(self.searches[seq.request.id])
                continue
            reason: str | None = None
            for t in new:
                seq.tokens.append(t)
                length = len(seq.tokens)
                if t in seq.stop_ids and (length - seq.prompt_len >= seq.params.min_tokens or seq.guide is not None):
                    reason = "stop"
                elif length >= seq.limit:
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
                if len(seq.tokens) == seq.prompt_len + len(new):
                    news.cached_tokens, news.prompt_logprobs = seq.cached, seq.prompt_logprobs
                    seq.first = self.clock()
                if reason is not None:
                    news.cached_tokens = seq.cached
                    news.stop_reason = new[-1] if reason == "stop" and new[-1] not in self.eos_ids else None
                    self._end(seq)
                out.append(news)
        return out

    def _step_beams(self, search: BeamSearch) -> list[Output]:
        """All beams of a request have reported. Who goes on gets its token, once more as a fork; who does not ends quietly."""
        family = self.requests[search.root.request.id]
        steps = search.step(family)
        best = {step.seq.id: step for step in reversed(steps)}  # of each parent
        out = [] if steps else search.outputs(self.eos_ids)
        for seq in list(family):
            if seq.id not in best:
                self._end(seq, pruned=bool(steps))
        free = set(range(search.width)) - {seq.index for seq in family}
        beams = []
        for step in reversed(steps):  # a parent takes its best step itself, after its forks have begun where it stood
            seq = step.seq
            if best[seq.id] is not step:
                seq = self._child(seq, free.pop())
                seq.shared = len(seq.tokens)
            elif not step.entered:
                self.rewritten[seq.id] = seq
            go_on(seq, step)
            beams.append(seq)
        family[:] = reversed(beams)
        return out

    def _take_prompt_logprobs(self, seq: Sequence, item: Item, found: list[TokenLogprobs]) -> None:
        assert item.start is not None and seq.prompt_logprobs is not None
        for p, logprobs in enumerate(found, item.start + 1):
            if p < seq.prompt_len:
                seq.prompt_logprobs[p] = logprobs

    def _publish(self, seq: Sequence) -> None:
        """Make newly full, committed blocks findable. Only the new ones: a walk from zero costs 2 ms a step at 256 rows."""
        size = self.pool.size
        full = seq.computed // size
        self._extend_hashes(seq, full)
        for j in range(seq.published, full):
            parent = seq.hashes[j - 1] if j else b""
            tokens = seq.tokens[j * size : (j + 1) * size]
            self.pool.publish(seq.table[j], seq.hashes[j], tokens, parent, seq.request.key)
            self.computing.pop(seq.hashes[j], None)
        seq.published = full

    # ---- helpers -----------------------------------------------------------------------------------

    def _next_id(self) -> int:
        self._ids += 1
        return self._ids

    def _extend_hashes(self, seq: Sequence, full: int) -> None:
        size, hashes = self.pool.size, seq.hashes
        for j in range(len(hashes), full):
            parent = hashes[-1] if j else root(seq.request.cache_salt)
            hashes.append(chain(parent, seq.tokens[j * size : (j + 1) * size]))

    def _missing_prompt_logprobs(self, seq: Sequence) -> bool:
        """Asked for and not all there: every prompt position but the last must be computed, not found in the cache."""
        wanted = seq.prompt_logprobs
        return wanted is not None and len(wanted) > 1 and wanted[-1] is None

    def _new_row(self, seq: Sequence) -> NewRow:
        p, logprobs = seq.params, seq.params.logprobs
        if p.ranked:
            logprobs = max(logprobs or 0, self.searches[seq.request.id].candidates if p.use_beam_search else 0)
        tokens, table, said = seq.tokens[:], list(seq.table), seq.dropped - seq.dropped_prompt
        return NewRow(
            seq.id, seq.epoch, seq.row, tokens, seq.computed, table, seq.prompt_kept, seq.seed, seq.stop_ids, p, logprobs,
            seq.dropped, said,
        )  # fmt: skip

    def flush(self) -> Plan:
        """A last step, for an engine that is idle: what only the device has goes to disk, where there is one."""
        self.count.steps += 1
        plan = Plan(self.count.steps)
        if self.tiers is not None and self.tiers.disk:
            self.tiers.flush(self.pool, plan)
        return plan

    def forget(self) -> None:
        """Empty the cache in every tier but the disk: as if the engine had just started."""
        self.pool.forget()
        if self.tiers is not None:
            self.tiers.forget()

    def _release(self, seq: Sequence) -> None:
        """Give back row and blocks. Steps in flight may still write there: the device does things in order."""
        for b in reversed(seq.table):  # tail first: prefixes outlive suffixes in the cache
            self.pool.drop(b)
        for h in seq.hashes[seq.published :]:
            if self.computing.get(h) == seq.id:
                del self.computing[h]
        (self.prefilling if seq in self.prefilling else self.decoding).remove(seq)
        self.rows.append(seq.row)
        seq.table, seq.row, seq.inflight, seq.computed, seq.planned = [], -1, 0, 0, 0

    def _preempt(self, seq: Sequence, why: str) -> None:
        """Back to the queue. Its full blocks stay findable until their memory is needed."""
        seq.lost, seq.asked, seq.why = seq.planned, -1, why
        self._release(seq)
        if len(seq.tokens) > self.most:  # what would leave next is not computed again
            drop(seq, pick(seq, self.cache), self.pool.size)
        if seq.published == NEVER:  # the tokens that it kept are an ordinary text from here
            seq.published = 0
        seq.status, seq.epoch, seq.preemptions = Status.WAITING, seq.epoch + 1, seq.preemptions + 1
        self.count.preemptions += 1
        self._return(seq)

    def _end(self, seq: Sequence, pruned: bool = False) -> None:
        if seq.status is Status.RUNNING:
            self._release(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
        seq.status, seq.epoch = Status.FINISHED, seq.epoch + 1
        del self.live[seq.id]
        self.policy.ended(seq)
        if self.recorder is not None and not pruned:
            self.recorder.ended(seq)
        family = self.requests[seq.request.id]
        family.remove(seq)
        if not family:
            del self.requests[seq.request.id]
            self.searches.pop(seq.request.id, None)

    def check(self) -> None:
        """Raise AssertionError unless every invariant holds that can be seen between two steps."""
        size, running = self.pool.size, self.running
        lifted = [c.block for each in self.tiers.lifted.values() for c, _ in each] if self.tiers is not None else []
        self.pool.check([lifted, *(s.table for s in running)])
        for s in running:
            assert s.status is Status.RUNNING and s.computed <= s.planned <= len(s.table) * size, (
                f"{s.id}: positions out of order"
            )
            assert s.inflight or s.planned == s.computed, f"{s.id}: planned drifted from computed"
            assert 0 <= s.inflight <= self.schedule.depth, f"{s.id}: {s.inflight} steps in flight"
            assert s.planned < s.limit, f"{s.id}: planned beyond its limit"
            assert (s.guide is None and s.beam is None) or s.planned <= len(s.tokens), f"{s.id}: planned beyond what was decided"
            assert s.published <= s.computed // size or s.published == NEVER, f"{s.id}: published blocks that are not computed"
            assert len(s.table) * size <= self.most and s.dropped % size == 0, f"{s.id}: more blocks than its budget"
            assert s.dropped == 0 or len(s.tokens) <= self.most + 1, f"{s.id}: keeps more tokens than its budget"
            if s.published == NEVER and self.cache.eviction == "sinks":
                moved = s.table[self.cache.sinks :]
                assert all(self.pool.refs[b] == 1 and self.pool.hash[b] is None for b in moved), f"{s.id}: shares what was moved"
            for j in range(s.planned // size, len(s.table)):
                assert self.pool.hash[s.table[j]] is None, f"{s.id}: would write to a published block"
        for queue in (self.waiting, self.prefilling, self.decoding):
            assert all(a.rank < b.rank for a, b in pairwise(queue)), "a queue is out of order"
        for s in self.waiting:
            assert s.status is Status.WAITING and not s.table and s.row == -1 and not s.inflight
        rows = sorted(self.rows + [s.row for s in running])
        assert rows == list(range(self.schedule.max_num_seqs)), "rows lost or used twice"
        assert {s.id for s in running} | {s.id for s in self.waiting} == set(self.live), "a sequence is in no queue"
        assert sorted(s.id for f in self.requests.values() for s in f) == sorted(self.live)
        for id, search in self.searches.items():
            beams = self.requests[id]
            assert len(beams) <= search.width and not all(map(reported, beams)), f"{id}: its beams stand still"
            assert all(s.planned == len(s.tokens) and not s.inflight for s in beams if reported(s) and s.row >= 0)
        alive = {s.id for s in running}
        assert all(owner in alive for owner in self.computing.values()), "somebody waits for content that nobody computes"
        if self.tiers is not None:
            self.tiers.check()
        used = sum(r > 0 for r in self.pool.refs)
        assert used + len(self.pool.free) == self.pool.num_blocks


def reported(seq: Sequence) -> bool:
    """A beam that has said what it may go on with, and waits for its siblings to have done so."""
    return seq.beam is not None and seq.beam.report is not None


def follow(guide: Guide, token: int, ended: bool) -> None:
    """The sequence went on with a token that its guide allowed: raises GuideError if it did not."""
    if not guide.mask[token >> 3] >> (token & 7) & 1:
        raise GuideError(f"the model gave token {token}, which structured_outputs do not allow here")
    if not ended:
        guide.accept(token)
