"""The sequences of each request: one at first, more after forks (n > 1, best_of) or beam search.

This module forks sequences and lists the sequences of each request. beam_search.py decides which
beams continue, and the scheduler frees slots and blocks of sequences that end.

    n > 1    the prompt is computed except for its last token; then the parent and each child
             compute that token themselves; the children share the parent's blocks
    beams    when all have reported, a beam that continues twice is forked, and one that does not
             continue ends
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from octavo.core.beam_search import BeamSearch, Continuation, extend_beam, has_reported
from octavo.core.blocks import BlockPool
from octavo.core.queues import Queues
from octavo.core.slot_fills import build_slot_fill
from octavo.events import PRUNED, SEARCH_OVER, BlocksShared, Forked
from octavo.types import Output, Plan, Sequence, Status, TokenLogprobs, child_seed


class SequenceGroups:
    def __init__(self, queues: Queues, pool: BlockPool):
        self.queues = queues
        self.pool = pool
        self.live: dict[int, Sequence] = {}
        self.by_request: dict[str, list[Sequence]] = {}
        self.searches: dict[str, BeamSearch] = {}  # by request
        # Sequences whose batch slot the next plan must fill: forks, and beams that continue with a
        # token that the device did not sample.
        self.stale_slots: dict[int, Sequence] = {}
        self.ids = itertools.count(1)

    def add(self, seq: Sequence) -> None:
        self.live[seq.id] = seq
        self.by_request.setdefault(seq.request.id, []).append(seq)
        self.queues.policy.arrived(seq)
        if seq.beam is not None:
            self.searches[seq.request.id] = BeamSearch(seq)

    def remove(self, seq: Sequence) -> None:
        del self.live[seq.id]
        self.queues.policy.finished(seq)
        group = self.by_request[seq.request.id]
        group.remove(seq)
        if not group:
            del self.by_request[seq.request.id]
            self.searches.pop(seq.request.id, None)

    def unfinished_indices(self, request_id: str) -> list[int]:
        """Return the completions without a last output: live sequences, and children that are not
        forked yet."""
        group = self.by_request.get(request_id, [])
        if request_id in self.searches:
            return list(range(group[0].params.completions))
        return [
            index for seq in group for index in range(seq.index, seq.index + 1 + seq.pending_forks)
        ]

    def fork(self, seq: Sequence, index: int) -> Sequence:
        """Create a child with its parent's tokens, sharing its blocks.

        If no slot is free, or the parent does not run, the child waits like any other sequence,
        and its admission looks for its blocks in the prefix cache."""
        child = Sequence(
            id=next(self.ids),
            request=seq.request,
            index=index,
            tokens=seq.tokens[:],
            prompt_len=seq.prompt_len,
            token_limit=seq.token_limit,
            seed=child_seed(seq.seed, index),
            stop_ids=seq.stop_ids,
            rank=(*seq.rank[:4], index),
            guide=None if seq.guide is None else seq.guide.copy(),
            repetition=seq.repetition,
            block_hashes=list(seq.block_hashes),
            cached_tokens=seq.cached_tokens,
            drafter_has_kv=seq.drafter_has_kv,
            queued_at=seq.queued_at,
        )
        self.add(child)
        events = self.pool.events
        if Forked in events.listeners:
            events.emit(Forked(child, seq))
        if not self.queues.free_slots or seq.status is not Status.RUNNING:
            self.queues.requeue(child)
            return child
        child.computed = seq.computed
        child.planned = seq.computed
        child.published_blocks = seq.published_blocks
        child.block_table = [self.pool.acquire(block) for block in seq.block_table]
        if BlocksShared in events.listeners:
            events.emit(BlocksShared(child, list(child.block_table)))
        self.queues.start_decode(child)
        self.stale_slots[child.id] = child
        return child

    def fork_prompts(self) -> None:
        """Fork the prompts of which all tokens but the last are computed."""
        ready = [
            seq
            for seq in self.queues.prefilling
            if seq.pending_forks and not seq.steps_in_flight and seq.computed == len(seq.tokens) - 1
        ]
        for seq in ready:
            num_forks = seq.pending_forks
            seq.pending_forks = 0
            self.queues.move_to_decode(seq)
            for index in range(1, num_forks + 1):
                self.fork(seq, index).inherited_tokens = seq.prompt_len

    def fill_stale_slots(self, plan: Plan) -> None:
        """Fill the batch slots of forks and beams that have changed since the last plan."""
        for seq in self.stale_slots.values():
            if seq.status is Status.RUNNING:
                plan.slot_fills.append(build_slot_fill(seq))
        self.stale_slots.clear()

    # ---- beams -----------------------------------------------------------------------------------

    def blocking_beams(self) -> list[Sequence]:
        """Return beams that have reported and hold slots and blocks that their siblings need.

        A beam that has reported keeps its slot and blocks while every other sibling is decoding,
        because a decoding sibling can advance without them."""
        blocking: list[Sequence] = []
        for request_id in self.searches:
            group = self.by_request[request_id]
            sibling_stuck = any(
                seq.status is Status.WAITING or seq in self.queues.prefilling
                for seq in group
                if not has_reported(seq)
            )
            if sibling_stuck:
                blocking += [
                    seq for seq in group if seq.status is Status.RUNNING and has_reported(seq)
                ]
        return blocking

    def report_beam(
        self,
        seq: Sequence,
        candidates: TokenLogprobs,
        eos_ids: frozenset[int],
        end: Callable[[Sequence, str], None],
    ) -> list[Output]:
        """Record a beam's candidates. The last beam to report advances the search or ends it.

        `end(seq, reason)` ends a sequence."""
        assert seq.beam is not None
        seq.beam.report = candidates
        group = self.by_request[seq.request.id]
        search = self.searches[seq.request.id]
        if not all(map(has_reported, group)):
            return []
        chosen = search.advance(group)
        outputs = [] if chosen else search.outputs(eos_ids)
        best = {continuation.seq.id: continuation for continuation in reversed(chosen)}
        for member in list(group):
            if member.id not in best:
                end(member, PRUNED if chosen else SEARCH_OVER)
        self._extend_beams(search, group, chosen, best)
        return outputs

    def _extend_beams(
        self,
        search: BeamSearch,
        group: list[Sequence],
        chosen: list[Continuation],
        best: dict[int, Continuation],
    ) -> None:
        """Extend the beams, with the worst continuation first: a beam is forked for its other
        continuations before it is extended by its best one."""
        free_indices = set(range(search.width)) - {seq.index for seq in group}
        beams = []
        for continuation in reversed(chosen):
            seq = continuation.seq
            if best[seq.id] is not continuation:
                seq = self.fork(seq, free_indices.pop())
                seq.inherited_tokens = len(seq.tokens)
            elif not continuation.on_device:
                self.stale_slots[seq.id] = seq
            extend_beam(seq, continuation)
            beams.append(seq)
        group[:] = reversed(beams)
