"""Where each living sequence is, in the order of ranks, and who has which device row. Moves them; decides nothing.

arrive          begin               decode
  |               |                   |
waiting  ---->  prefilling  ------->  decoding          RUNNING: these two have a row
  ^               |                   |
  +-- come_back --+------ leave ------+                 join: a fork begins among those that decode
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable
from itertools import pairwise
from operator import attrgetter

from octavo.core.beam_search import candidates
from octavo.core.policy import Policy
from octavo.types import NewSlot, Sequence, Status

by_rank = attrgetter("rank")


class Queues:
    def __init__(self, policy: Policy, rows: int):
        self.policy, self.num_rows = policy, rows
        self.waiting: list[Sequence] = []
        self.prefilling: list[Sequence] = []
        self.decoding: list[Sequence] = []
        self.rows = list(range(rows))  # that nobody uses

    @property
    def running(self) -> list[Sequence]:
        return self.decoding + self.prefilling

    def arrive(self, seq: Sequence, number: int) -> None:
        seq.rank = (self.policy.rank(seq) if self.policy.fixed else 0.0, number, 0)
        insort(self.waiting, seq, key=by_rank)

    def come_back(self, seq: Sequence) -> None:
        """To its place in the queue, which for what has begun once is mostly the head."""
        if not self.policy.fixed:
            seq.rank = (-math.inf, *seq.rank[1:])
        seq.status = Status.WAITING
        insort(self.waiting, seq, key=by_rank)

    def rank_waiting(self, cached: Callable[[Sequence], int]) -> None:
        """Ranks that change are asked for. What has begun once comes first, in any case."""
        self.policy.look(self.running, self.waiting, cached)
        for seq in self.waiting:
            if seq.rank[0] > -math.inf:
                seq.rank = (self.policy.rank(seq), *seq.rank[1:])
        self.waiting.sort(key=by_rank)

    def begin(self, seq: Sequence) -> None:
        self.waiting.remove(seq)
        seq.status, seq.slot = Status.RUNNING, self.rows.pop()
        insort(self.prefilling, seq, key=by_rank)

    def join(self, seq: Sequence) -> None:
        seq.status, seq.slot = Status.RUNNING, self.rows.pop()
        insort(self.decoding, seq, key=by_rank)

    def decode(self, seq: Sequence) -> None:
        """All that it knows is planned."""
        self.prefilling.remove(seq)
        insort(self.decoding, seq, key=by_rank)

    def leave(self, seq: Sequence) -> None:
        (self.prefilling if seq in self.prefilling else self.decoding).remove(seq)
        self.rows.append(seq.slot)
        seq.slot = -1

    def check(self) -> None:
        """Raise AssertionError unless each queue is in order and each row in one place."""
        for queue in (self.waiting, self.prefilling, self.decoding):
            assert all(a.rank < b.rank for a, b in pairwise(queue)), "a queue is out of order"
        for seq in self.waiting:
            waits = (
                seq.status is Status.WAITING
                and not seq.block_table
                and seq.slot == -1
                and not seq.steps_in_flight
            )
            assert waits, f"{seq.id}: waits with what only those have that run"
        assert all(seq.status is Status.RUNNING for seq in self.running), (
            "somebody runs and is not said to"
        )
        rows = sorted(self.rows + [seq.slot for seq in self.running])
        assert rows == list(range(self.num_rows)), "rows lost or used twice"


def new_slot(seq: Sequence) -> NewSlot:
    """Everything the device must know of a sequence that runs."""
    p, logprobs = seq.params, seq.params.logprobs
    if p.ranked:
        logprobs = max(logprobs or 0, candidates(seq) if p.use_beam_search else 0)
    tokens, table, said = (
        seq.tokens[:],
        list(seq.block_table),
        seq.dropped_tokens - seq.dropped_prompt_tokens,
    )
    return NewSlot(
        seq.id, seq.epoch, seq.slot, tokens, seq.computed, table, seq.kept_prompt_tokens, seq.seed, seq.stop_ids, p, logprobs,
        seq.dropped_tokens, said,
    )  # fmt: skip
