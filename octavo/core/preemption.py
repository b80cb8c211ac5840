"""Room for the urgent, under policies that pause what runs: who computes a prompt in the next step, who stands aside for it and
who gives way to it. Knows ranks, rows and blocks; the rules are the policy's.

    outranked    by a prompt in this step: stands aside. It keeps row and blocks, and goes on in the step after
    equal        and decoding: sits out one step, never two in a row
    paused       for lack of rows or blocks: back to the queue

All of that is decided before anything is planned, so nobody concerned is in the plan.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from heapq import merge

from octavo.core.batching import Pace
from octavo.core.prefix import PrefixCache
from octavo.core.queues import Queues, by_rank
from octavo.core.tables import admission_takes, chunk
from octavo.types import Plan, Rank, Sequence, Status

LAST: Rank = (math.inf, sys.maxsize, 0)


class Room:
    """What the next step is for."""

    def __init__(self, before: Rank, tokens: int, ahead: list[Sequence]):
        # the rank of the first that was paused or may not begin: nor may who ranks after it
        self.before = before
        self.tokens = tokens  # of the step; 0: not decided here
        self.ahead = ahead  # for whom others stand aside,
        self.stood = sum(seq.planned for seq in ahead)  # and positions that they had


class Urgency:
    def __init__(self, queues: Queues, prefix: PrefixCache, pace: Pace | None, depth: int):
        self.queues, self.policy, self.prefix, self.pool = (
            queues,
            queues.policy,
            prefix,
            prefix.pool,
        )
        self.pace, self.depth = pace, depth
        self.latest: Sequence | None = None  # that others stood aside for
        self.sat_out = False  # equals of an urgent prompt, in the last step
        self.vain = False  # the last time that some stood aside, nobody got on by it

    def make_room(
        self,
        cap: int,
        budget: Callable[[int], int],
        may_begin: Callable[[Sequence], bool],
        preempt: Callable[[Sequence, str], None],
    ) -> Room:
        """`cap`: tokens of a step, at most; `budget`: of one in which so many decode."""
        queues, policy, pool, before = self.queues, self.policy, self.pool, LAST
        if not policy.pausing:
            return Room(LAST, 0, [])
        rows, blocks, used, tokens = len(queues.rows), len(pool.free), 0, 0
        stay, begin, ahead = queues.decoding, list[Sequence](), list[Sequence]()
        for seq in merge(list(queues.prefilling), list(queues.waiting), key=by_rank):
            if seq.rank >= before:
                break
            if first := next((a for a in begin if policy.outranks(a, seq)), None):
                ahead += [first] if first not in ahead else []
                before = seq.rank if seq.status is Status.WAITING else before
                continue
            if seq.status is Status.WAITING and not may_begin(seq):
                continue
            weaker = {s.id for s in self._outranked(seq)} if not self.vain else ()
            kept = [s for s in stay if s.id not in weaker and s.status is Status.RUNNING]
            tokens = (
                cap
                if weaker
                else tokens
                or min(budget(len(kept)), len(kept) + self._polite(seq, cap - len(kept)))
            )
            if tokens <= len(kept) + used:
                break
            claim = self._claim(seq, tokens - len(kept) - used)
            if claim is None:
                continue
            rows, blocks, used = rows - claim[0], blocks - claim[1], used + claim[2]
            # by those who decode: theirs come first
            wanted = sum(s.planned % pool.size == 0 for s in kept)
            while rows < 0 or blocks < wanted:
                victims = [s for s in queues.running if s.rank > seq.rank and policy.pauses(seq, s)]
                if (
                    not victims
                    or blocks + sum(pool.refs[b] == 1 for s in victims for b in s.block_table)
                    < wanted
                ):
                    return Room(before, tokens, ahead)  # to pause them would not help
                victim, free = policy.victim(victims), len(pool.free)
                preempt(victim, "a more urgent request took its place")
                rows, blocks, before = (
                    rows + 1,
                    blocks + len(pool.free) - free,
                    min(before, victim.rank),
                )
            stay = kept
            if not self.vain:
                begin.append(seq)
            ahead += [seq] if weaker else []
        return Room(before, tokens, ahead)

    def _outranked(self, seq: Sequence) -> list[Sequence]:
        return [
            s for s in self.queues.running if s.rank > seq.rank and self.policy.outranks(seq, s)
        ]

    def _polite(self, prompt: Sequence, most: int) -> int:
        """Tokens of prompts: where an urgent request may come, as many as it may have to wait for."""
        assert self.pace is not None
        if self.latest is None or self.policy.outranks(self.latest, prompt):
            return self.pace.polite(most, self.depth)
        return most

    def _claim(self, seq: Sequence, left: int) -> tuple[int, int, int] | None:
        """Rows, blocks and tokens that its next chunk takes. None: it cannot begin yet, or has nothing left to begin."""
        size = self.pool.size
        if seq.status is Status.RUNNING:
            num = chunk(seq, seq.planned, left)
            return (
                (0, max(-(-(seq.planned + num) // size) - len(seq.block_table), 0), num)
                if num
                else None
            )
        found = self.prefix.match(seq)
        if found is None:
            return None
        num = chunk(seq, len(found.hits) * size, left)
        return 1, admission_takes(self.pool, found.hits, num), num

    def aside(self, room: Room) -> set[int]:
        """Who stands aside."""
        return {s.id for a in room.ahead for s in self._outranked(a)}

    def sit_out(self, room: Room) -> set[int]:
        """Equals of those for whom others stand aside, of those that decode: a prompt is computed alone, for one row more may
        cost much (on a GPU, the next larger graph), and they go on right after it."""
        outranks, equals = self.policy.outranks, set[int]()
        if room.ahead and not self.sat_out:
            equals = {
                s.id
                for s in self.queues.decoding
                if not any(outranks(s, a) or outranks(a, s) for a in room.ahead)
            }
        self.sat_out = bool(equals)
        return equals

    def settle(self, room: Room, plan: Plan) -> None:
        """The plan is complete: did anybody get on by it?"""
        if room.ahead:
            plan.urgent, self.latest = (
                sum(seq.planned for seq in room.ahead) > room.stood,
                room.ahead[-1],
            )
        self.vain = bool(room.ahead) and not plan.urgent
