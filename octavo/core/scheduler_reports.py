"""Emits events that say what the scheduler has decided, and why.

    Admitted      a sequence is admitted; the reason why no more of its prompt was cached
    NotAdmitted   a plan could not admit a waiting sequence, or did not try the first of the others
    NotPlanned    a running sequence computes nothing in a step
    others        arrivals, refusals, preemptions, ends, and blocks that are released

Each method reports. No method changes the scheduler.
"""

from __future__ import annotations

from octavo.core import reasons
from octavo.core.prefix import Match, PrefixCache
from octavo.core.queues import Queues
from octavo.core.step_limiter import StepLimiter
from octavo.core.step_limits import StepLimits
from octavo.events import (
    Admitted,
    Arrived,
    BlocksReleased,
    EventBus,
    Failed,
    Finished,
    KVDiscarded,
    NotAdmitted,
    NotPlanned,
    Preempted,
    RequestRefused,
)
from octavo.types import Request, Sequence


class SchedulerReports:
    def __init__(self, events: EventBus, queues: Queues, prefix: PrefixCache, limiter: StepLimiter):
        self.events = events
        self.queues = queues
        self.prefix = prefix
        self.limiter = limiter
        self.not_admitted_ids: set[int] = set()  # sequences with a NotAdmitted event in this plan

    # ---- requests --------------------------------------------------------------------------------

    def arrived(self, seq: Sequence) -> None:
        if Arrived in self.events.listeners:
            self.events.emit(Arrived(seq))

    def refused(self, request: Request, error: Exception) -> None:
        if RequestRefused in self.events.listeners:
            self.events.emit(RequestRefused(request.id, str(error)))

    def preempted(self, seq: Sequence, reason: str, beneficiary: Sequence | None) -> None:
        if Preempted in self.events.listeners:
            self.events.emit(Preempted(seq, reason, beneficiary))

    def ended(self, seq: Sequence, reason: str, error: str | None) -> None:
        if error is not None:
            if Failed in self.events.listeners:
                self.events.emit(Failed(seq, error))
        elif Finished in self.events.listeners:
            self.events.emit(Finished(seq, reason))

    def released(self, seq: Sequence, blocks: list[int]) -> None:
        if blocks and BlocksReleased in self.events.listeners:
            self.events.emit(BlocksReleased(seq, blocks))

    def discarded_kv(self, seq: Sequence) -> None:
        if KVDiscarded in self.events.listeners:
            self.events.emit(KVDiscarded(seq))

    # ---- plans -----------------------------------------------------------------------------------

    def begin_plan(self, limits: StepLimits) -> None:
        """Report the running sequences that the step leaves out for an urgent prompt."""
        self.not_admitted_ids.clear()
        if not limits.not_decoding or NotPlanned not in self.events.listeners:
            return
        for seq in self.queues.running:
            if seq.id in limits.paused:
                self.events.emit(NotPlanned(seq, reasons.PAUSED, needed_blocks=0))
            elif seq.id in limits.not_decoding:
                self.events.emit(NotPlanned(seq, reasons.SKIPS_STEP, needed_blocks=0))

    def not_admitted(self, seq: Sequence, reason: str, needed_blocks: int = 0) -> None:
        """Report that this plan does not admit a sequence, once per plan."""
        if NotAdmitted in self.events.listeners and seq.id not in self.not_admitted_ids:
            self.not_admitted_ids.add(seq.id)
            computing = self._computed_by(seq) if reason == reasons.SHARED_PREFIX else 0
            self.events.emit(NotAdmitted(seq, reason, needed_blocks, computing))

    def not_ready(self, seq: Sequence) -> None:
        """Report a sequence that must wait although there may be room for it."""
        if self.prefix.waits_for_disk(seq):
            reason = reasons.DISK_READ
        elif self.limiter.batches.may_admit(seq):
            reason = reasons.OTHER_BEAMS
        else:
            reason = reasons.BATCH_FORMING
        self.not_admitted(seq, reason)

    def not_tried(self, limits: StepLimits, closed_because: str) -> None:
        """Report the first sequence that this plan did not try to admit, and the reason.
        `closed_because`: why the plan admitted no further sequence; empty if it might have."""
        if NotAdmitted not in self.events.listeners:
            return
        untried = (seq for seq in self.queues.waiting if seq.id not in self.not_admitted_ids)
        seq = next(untried, None)
        if seq is None:
            return
        if not self.queues.free_slots:
            reason = reasons.NO_FREE_SLOT
        elif closed_because:
            reason = closed_because
        elif seq.rank >= limits.first_rank_not_admitted:
            reason = reasons.AFTER_URGENT
        else:
            reason = reasons.NO_TOKENS_LEFT
        self.not_admitted(seq, reason)

    def lacks_blocks(self, seq: Sequence, needed_blocks: int) -> None:
        """Report a prompt whose next chunk has to wait for blocks."""
        if NotPlanned in self.events.listeners:
            self.events.emit(NotPlanned(seq, reasons.CHUNK_LACKS_BLOCKS, needed_blocks))

    def admitted(self, seq: Sequence, match: Match) -> None:
        if Admitted in self.events.listeners:
            num_cached = len(match.blocks) * self.prefix.block_size
            match_end, missing_hash = self._explain_match_end(seq, match)
            self.events.emit(Admitted(seq, len(seq.tokens), num_cached, match_end, missing_hash))

    def _explain_match_end(self, seq: Sequence, match: Match) -> tuple[str, bytes]:
        """Return why a match is not longer, and the content of the first block that it lacks."""
        prefix = self.prefix
        if not prefix.enabled:
            return reasons.CACHING_OFF, b""
        if not prefix.may_match(seq):
            return reasons.ALL_COMPUTED, b""
        num_matched = len(match.blocks)
        if num_matched == (len(seq.tokens) - 1) // prefix.block_size:
            return reasons.ALL_FOUND, b""
        content_hash = seq.block_hashes[num_matched]
        if content_hash in prefix.computing:
            return reasons.BEING_COMPUTED, content_hash
        if prefix.tiers is not None and content_hash in prefix.tiers.ready:
            # A match that loading pays for ends at a host block only in PrefixCache.usable_match().
            reason = reasons.NO_BLOCK_TO_LOAD if match.loading_pays else reasons.LOADING_SLOWER
            return reason, content_hash
        return reasons.NOT_CACHED, content_hash

    def _computed_by(self, seq: Sequence) -> int:
        """Return the Sequence.id of the sequence that computes the first block `seq` lacks."""
        computing = self.prefix.computing
        return next(
            (
                computing[content_hash]
                for content_hash in seq.block_hashes
                if content_hash in computing
            ),
            0,
        )
