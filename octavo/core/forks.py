"""A request's sequences: one at first, more where it is forked (n > 1, best_of) or searched by beams. Forks them and counts them
in and out; which beams go on is decided by beam_search.py, what becomes of rows and blocks of those that end by the scheduler.

    n > 1    the prompt is computed but for its last token; then each child shares the table and computes that token itself
    beams    all have reported; who goes on twice is forked, who does not go on ends
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from octavo.core.beam_search import BeamSearch, go_on, reported
from octavo.core.blocks import BlockPool
from octavo.core.queues import Queues, new_slot
from octavo.types import Output, Plan, Sequence, Status, TokenLogprobs, child_seed


class SequenceGroups:
    def __init__(self, queues: Queues, pool: BlockPool):
        self.queues, self.pool = queues, pool
        self.live: dict[int, Sequence] = {}
        self.requests: dict[str, list[Sequence]] = {}
        self.searches: dict[str, BeamSearch] = {}  # by request
        # whose row the next plan must write: forks, and beams that were told a token
        self.rewritten: dict[int, Sequence] = {}
        self.ids = itertools.count(1)

    def enter(self, seq: Sequence) -> None:
        self.live[seq.id] = seq
        self.requests.setdefault(seq.request.id, []).append(seq)
        self.queues.policy.arrived(seq)
        if seq.beam is not None:
            self.searches[seq.request.id] = BeamSearch(seq)

    def leave(self, seq: Sequence) -> None:
        del self.live[seq.id]
        self.queues.policy.ended(seq)
        family = self.requests[seq.request.id]
        family.remove(seq)
        if not family:
            del self.requests[seq.request.id]
            self.searches.pop(seq.request.id, None)

    def missing(self, request_id: str) -> list[int]:
        """Completions that the request has not been told the end of: of those that run, and of children never born."""
        family = self.requests.get(request_id, [])
        if request_id in self.searches:
            return list(range(family[0].params.completions))
        return [
            index for seq in family for index in range(seq.index, seq.index + 1 + seq.pending_forks)
        ]

    def fork(self, seq: Sequence, index: int) -> Sequence:
        """A child has its parent's tokens and shares its blocks. Without a row, or if the parent has no blocks, it waits like any
        other sequence, and finds in the cache what is there."""
        seed = child_seed(seq.seed, index)
        child = Sequence(
            next(self.ids),
            seq.request,
            index,
            seq.tokens[:],
            seq.prompt_len,
            seq.position_limit,
            seed,
            seq.stop_ids,
        )
        child.block_hashes, child.cached_tokens, child.rank = (
            list(seq.block_hashes),
            seq.cached_tokens,
            (*seq.rank[:2], index),
        )
        child.guide, child.queued_at = (
            None if seq.guide is None else seq.guide.copy(),
            seq.queued_at,
        )
        self.enter(child)
        if not self.queues.rows or seq.status is not Status.RUNNING:
            self.queues.come_back(child)
            return child
        child.computed = child.planned = seq.computed
        child.published_blocks = seq.published_blocks
        child.block_table = [self.pool.share(b) for b in seq.block_table]
        self.queues.join(child)
        self.rewritten[child.id] = child
        return child

    def split(self, plan: Plan) -> None:
        """Prompts that are computed but for their last token fork; the rows of all forks since the last plan are written."""
        prefilling = self.queues.prefilling
        for seq in [
            q
            for q in prefilling
            if q.pending_forks and not q.steps_in_flight and q.computed == len(q.tokens) - 1
        ]:
            forks, seq.pending_forks = seq.pending_forks, 0
            self.queues.decode(seq)
            for index in range(1, forks + 1):
                self.fork(seq, index).inherited_tokens = seq.prompt_len
        for seq in self.rewritten.values():
            if seq.status is Status.RUNNING:
                plan.new_slots.append(new_slot(seq))
        self.rewritten.clear()

    # ---- beams -------------------------------------------------------------------------------------

    def in_the_way(self) -> list[Sequence]:
        """A beam that has reported keeps its room as long as all that have not are decoding: those get on. Otherwise it is in
        the way of its siblings, which it waits for."""
        found = []
        for id in self.searches:
            todo = [s for s in self.requests[id] if not reported(s)]
            if any(s.status is Status.WAITING or s in self.queues.prefilling for s in todo):
                found += [
                    s for s in self.requests[id] if s.status is Status.RUNNING and reported(s)
                ]
        return found

    def report(
        self,
        seq: Sequence,
        found: TokenLogprobs,
        eos_ids: frozenset[int],
        end: Callable[[Sequence, bool], None],
    ) -> list[Output]:
        """A beam says what it may go on with. The last of a search to do so lets all go on, or ends the search."""
        assert seq.beam is not None
        seq.beam.report = found
        family, search = self.requests[seq.request.id], self.searches[seq.request.id]
        if not all(map(reported, family)):
            return []
        steps = search.step(family)
        best = {step.seq.id: step for step in reversed(steps)}  # of each parent
        out = [] if steps else search.outputs(eos_ids)
        for seq in list(family):
            if seq.id not in best:
                end(seq, bool(steps))
        free = set(range(search.width)) - {seq.index for seq in family}
        beams = []
        # a parent takes its best step itself, after its forks have begun where it stood
        for step in reversed(steps):
            seq = step.seq
            if best[seq.id] is not step:
                seq = self.fork(seq, free.pop())
                seq.inherited_tokens = len(seq.tokens)
            elif not step.entered:
                self.rewritten[seq.id] = seq
            go_on(seq, step)
            beams.append(seq)
        family[:] = reversed(beams)
        return out
