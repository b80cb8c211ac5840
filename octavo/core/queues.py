"""The lists of waiting, prefilling and decoding sequences in rank order, and the free batch slots.

Queues moves sequences between the three lists. The scheduler decides when.

    enqueue         start_prefill                  move_to_decode
      |               |                              |
    waiting  ---->  prefilling  ------------------>  decoding    RUNNING: these two hold a slot
      ^               |    ^                         |  |  ^
      |               |    +- move_back_to_prefill --+  |  start_decode: a fork starts here
      +-- requeue ----+------------ remove -------------+
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from itertools import pairwise
from operator import attrgetter

from octavo.core.policy import Policy
from octavo.types import Sequence, Status

by_rank = attrgetter("rank")


class Queues:
    def __init__(self, policy: Policy, num_slots: int, longest_offline_first: bool = False):
        """`longest_offline_first`: offline requests that arrive together are an offline batch, and
        its requests are admitted in the order of their reply limits, longest first."""
        self.policy = policy
        self.num_slots = num_slots
        self.longest_offline_first = longest_offline_first
        self._batch_number = 0
        self._batch_arrival: float | None = None
        self.waiting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.free_slots = list(range(num_slots))

    @property
    def running(self) -> list[Sequence]:
        return self.decoding + self.prefilling

    def enqueue(self, seq: Sequence, arrival_number: int) -> None:
        policy_rank = self.policy.rank(seq) if self.policy.fixed_ranks else 0.0
        batch_number, place = self._place_in_batch(seq, arrival_number)
        seq.rank = (policy_rank, batch_number, place, arrival_number, 0)
        insort(self.waiting, seq, key=by_rank)

    def _place_in_batch(self, seq: Sequence, arrival_number: int) -> tuple[int, int]:
        """Return the number of a request's offline batch, and its place in that batch. A batch has
        the arrival number of its first request. A request that is not offline is a batch of its
        own."""
        request = seq.request
        if not (self.longest_offline_first and request.offline):
            self._batch_arrival = None
            return arrival_number, 0
        if request.arrival != self._batch_arrival:
            self._batch_arrival = request.arrival
            self._batch_number = arrival_number
        # The negative reply limit: longest first.
        return self._batch_number, seq.prompt_len - seq.token_limit

    def requeue(self, seq: Sequence) -> None:
        """Queue a preempted sequence, or a fork that found no slot.

        If the policy's ranks change over time, a preempted sequence gets rank -inf, so two
        sequences cannot preempt each other for ever."""
        if not self.policy.fixed_ranks:
            seq.rank = (-math.inf, *seq.rank[1:])
        seq.status = Status.WAITING
        insort(self.waiting, seq, key=by_rank)

    def rerank_waiting(self, count_cached_tokens: Callable[[Sequence], int]) -> None:
        """Update the ranks of waiting sequences that have not run yet."""
        self.policy.before_ranking(self.running, self.waiting, count_cached_tokens)
        for seq in self.waiting:
            if seq.rank[0] > -math.inf:
                seq.rank = (self.policy.rank(seq), *seq.rank[1:])
        self.waiting.sort(key=by_rank)

    def start_prefill(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        seq.status = Status.RUNNING
        seq.slot = self.free_slots.pop()
        insort(self.prefilling, seq, key=by_rank)

    def start_decode(self, seq: Sequence) -> None:
        seq.status = Status.RUNNING
        seq.slot = self.free_slots.pop()
        insort(self.decoding, seq, key=by_rank)

    def move_to_decode(self, seq: Sequence) -> None:
        """Move a sequence whose known tokens are all planned."""
        self.prefilling.remove(seq)
        insort(self.decoding, seq, key=by_rank)

    def move_back_to_prefill(self, seq: Sequence) -> None:
        """Move a sequence whose known tokens are to be computed again."""
        self.decoding.remove(seq)
        insort(self.prefilling, seq, key=by_rank)

    def remove(self, seq: Sequence) -> None:
        sequences = self.prefilling if seq in self.prefilling else self.decoding
        sequences.remove(seq)
        self.free_slots.append(seq.slot)
        seq.slot = -1

    def check(self) -> None:
        """Raise AssertionError unless each list is in order and each slot is in one place."""
        for sequences in (self.waiting, self.prefilling, self.decoding):
            in_order = all(first.rank < second.rank for first, second in pairwise(sequences))
            assert in_order, "a list of sequences is out of order"
        for seq in self.waiting:
            assert seq.status is Status.WAITING, f"{seq.id}: waits but has another status"
            holds_resources = seq.block_table or seq.slot != -1 or seq.steps_in_flight
            assert not holds_resources, f"{seq.id}: waits but holds a slot, blocks or a step"
        for seq in self.running:
            assert seq.status is Status.RUNNING, f"{seq.id}: runs but has another status"
        slots = sorted(self.free_slots + [seq.slot for seq in self.running])
        assert slots == list(range(self.num_slots)), "a batch slot is lost or used twice"
