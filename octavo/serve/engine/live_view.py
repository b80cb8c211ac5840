"""Builds the view of the engine that the live page shows.

The engine builds a view between two steps when the front process requests one. A viewer exists only
while a page is open. It listens to the engine's events and keeps the latest ones in a short form.
It reads states and lengths from the scheduler when a view is requested. A view contains no tokens.
Only the main thread of the engine process uses it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import chain, compress, islice, repeat
from typing import Any, NamedTuple

from octavo.core.blocks import BlockPool
from octavo.core.engine import Engine
from octavo.events import (
    Admitted,
    Arrived,
    Event,
    Failed,
    Finished,
    Forked,
    NotAdmitted,
    Preempted,
    StepLanded,
    StepPlanned,
)
from octavo.serve.channel.messages import Shown, ShownEvent, Step, View
from octavo.types import Sequence

MAX_CELLS = 1024  # The number of cells that show the block pool.
# The most entries of a view.
MAX_SEQUENCES = 256
MAX_STEPS = 128
MAX_EVENTS = 256
MAX_ENDED = 128
MAX_STEP_ENTRIES = 8  # The most entries in each list of a step.
# The owners of cells are found by reading this many block table entries, in half a millisecond.
MAX_OWNERS = 8192
IDLE_SECONDS = 30.0  # A viewer is closed after this time without a request for a view.
MOVES = ("stores", "loads", "copies", "shifts", "saves", "fetches")
KINDS: tuple[type[Event], ...] = (
    Arrived, Forked, Admitted, NotAdmitted, Preempted, Finished, Failed, StepPlanned, StepLanded,
)  # fmt: skip
COMPILING = "its structured output is being compiled"
NEXT_STEP = "it waits for the next step"


class Viewer:
    def __init__(self, engine: Engine, held: Mapping[str, tuple[Any, Any]]):
        """Subscribe to the events of the engine.

        `held` are requests that the scheduler does not have yet, because their structured output is
        being compiled.
        """
        self.engine = engine
        self.scheduler = engine.scheduler
        self.held = held
        self.steps: deque[Step] = deque(maxlen=MAX_STEPS)
        self.events: deque[ShownEvent] = deque(maxlen=MAX_EVENTS)
        self.ended: deque[tuple[str, int, str]] = deque(maxlen=MAX_ENDED)
        # These count since the last view.
        self.num_steps = 0
        self.num_events = 0
        self.num_ended = 0
        self.preempted: list[tuple[int, str, str]] = []  # Preemptions since the last plan.
        self.reasons: dict[int, str] = {}  # Sequence.id -> the reason why it waits
        self.queue_reason = ""  # The reason why the last plan admitted no more sequences.
        self.requested_at = time.monotonic()
        engine.events.subscribe(self.on_event, *KINDS)

    @property
    def forgotten(self) -> bool:
        return time.monotonic() - self.requested_at > IDLE_SECONDS

    def close(self) -> None:
        self.engine.events.unsubscribe(self.on_event)

    # ---- events ----------------------------------------------------------------------------------

    def on_event(self, event: Event) -> None:
        if isinstance(event, StepPlanned):
            self._add_step(event)
        elif isinstance(event, StepLanded):
            self._add_step_time(event)
        elif isinstance(event, Arrived):
            self._show(event, "arrived", event.seq, tokens=len(event.seq.tokens))
        elif isinstance(event, Forked):
            self._show(event, "forked", event.seq, tokens=len(event.seq.tokens))
        elif isinstance(event, Admitted):
            self.reasons.pop(event.seq.id, None)
            self._show(
                event, "admitted", event.seq, tokens=event.num_tokens, cached=event.cached_tokens
            )
        elif isinstance(event, NotAdmitted):
            self.queue_reason = event.reason
            if self.reasons.get(event.seq.id) != event.reason:
                self.reasons[event.seq.id] = event.reason
                self._show(event, "waiting", event.seq, reason=event.reason)
        elif isinstance(event, Preempted):
            seq = event.seq
            self.reasons.pop(seq.id, None)
            self.preempted.append((seq.id, seq.request.id, event.reason))
            self._show(event, "preempted", seq, reason=event.reason)
        elif isinstance(event, Finished):
            self._end(event, event.seq, "done", event.reason)
        elif isinstance(event, Failed):
            self._end(event, event.seq, "failed", "error")

    def _show(self, event: Event, kind: str, seq: Sequence, **fields: Any) -> None:
        self.num_events += 1
        self.events.append(
            ShownEvent(
                number=event.number,
                step=event.step,
                kind=kind,
                request=seq.request.id,
                index=seq.index,
                **fields,
            )
        )

    def _end(self, event: Event, seq: Sequence, kind: str, reason: str) -> None:
        self.reasons.pop(seq.id, None)
        self._show(event, kind, seq, reason=reason)
        self.ended.append((seq.request.id, seq.index, reason))
        self.num_ended += 1

    def _add_step(self, event: StepPlanned) -> None:
        plan = event.plan
        chunks = [
            (item.seq_id, item.start, item.num_tokens)
            for item in plan.items
            if item.start is not None
        ]
        preempted = self.preempted
        self.preempted = []
        moves = {name: len(getattr(plan, name)) for name in MOVES if getattr(plan, name)}
        if moves:
            self._add_moves(event, moves)
        self.steps.append(
            Step(
                step=plan.step,
                decode=len(plan.items) - len(chunks),
                prefill=sum(num_tokens for _, _, num_tokens in chunks),
                chunks=chunks[:MAX_STEP_ENTRIES],
                preempted=preempted[:MAX_STEP_ENTRIES],
                moves=moves,
                urgent=plan.urgent,
                more=sum(max(len(each) - MAX_STEP_ENTRIES, 0) for each in (chunks, preempted)),
            )
        )
        self.num_steps += 1

    def _add_moves(self, event: Event, moves: dict[str, int]) -> None:
        """Add an event with the number of moved blocks, or add to the previous such event."""
        last = self.events[-1] if self.events else None
        if last is not None and last.kind == "blocks":
            for name, count in moves.items():
                last.moves[name] = last.moves.get(name, 0) + count
            return
        self.num_events += 1
        self.events.append(
            ShownEvent(number=event.number, step=event.step, kind="blocks", moves=dict(moves))
        )

    def _add_step_time(self, event: StepLanded) -> None:
        for step in islice(reversed(self.steps), self.engine.depth + 1):
            if step.step == event.plan.step:
                step.seconds = event.seconds

    # ---- views -----------------------------------------------------------------------------------

    def view(self) -> View:
        """Return the state of the engine, and what has happened since the last view."""
        scheduler = self.scheduler
        self.requested_at = time.monotonic()
        queues = chain(
            zip(repeat("decode"), scheduler.decoding),
            zip(repeat("prefill"), scheduler.prefilling),
            zip(repeat("waiting"), scheduler.waiting),
        )
        sequences = [self._shown(seq, state) for state, seq in islice(queues, MAX_SEQUENCES)]
        for request_id, (message, _) in islice(self.held.items(), MAX_SEQUENCES - len(sequences)):
            sequences.append(shown_held(request_id, len(message.prompt)))
        pool = pool_cells(scheduler.pool, scheduler.running)
        view = View(
            sequences=sequences,
            decoding=len(scheduler.decoding),
            prefilling=len(scheduler.prefilling),
            waiting=len(scheduler.waiting) + len(self.held),
            blocks=pool.blocks_per_cell,
            used=pool.used,
            shared=pool.shared,
            cached=pool.cached,
            owner=pool.owner,
            steps=list(self.steps),
            steps_missed=self.num_steps - len(self.steps),
            ended=list(self.ended),
            ended_missed=self.num_ended - len(self.ended),
            events=list(self.events),
            events_missed=self.num_events - len(self.events),
        )
        self.steps.clear()
        self.events.clear()
        self.ended.clear()
        self.num_steps = 0
        self.num_events = 0
        self.num_ended = 0
        return view

    def _shown(self, seq: Sequence, state: str) -> Shown:
        return Shown(
            id=seq.id,
            request=seq.request.id,
            index=seq.index,
            state=state,
            prompt=seq.prompt_len,
            generated=seq.num_generated,
            limit=seq.position_limit + seq.dropped_tokens,
            computed=seq.computed + seq.dropped_tokens,
            cached=seq.cached_tokens,
            blocks=len(seq.block_table),
            preemptions=seq.preemptions,
            reason=self._why_waiting(seq) if state == "waiting" else "",
        )

    def _why_waiting(self, seq: Sequence) -> str:
        reason = self.reasons.get(seq.id)
        if reason is None:
            # A plan gives the reason only for the first sequence that it does not admit.
            reason = f"behind others: {self.queue_reason}" if self.queue_reason else NEXT_STEP
        if seq.preemptions:
            return f"preempted: {seq.preempt_reason}; {reason}"
        return reason


def shown_held(request_id: str, prompt_len: int) -> Shown:
    return Shown(
        id=0,
        request=request_id,
        index=0,
        state="waiting",
        prompt=prompt_len,
        generated=0,
        limit=0,
        computed=0,
        cached=0,
        blocks=0,
        preemptions=0,
        reason=COMPILING,
    )


class PoolCells(NamedTuple):
    """The block pool as a row of cells. Each list has an entry for each cell."""

    blocks_per_cell: int
    used: list[int]  # Blocks that a sequence holds.
    shared: list[int]  # Blocks that several sequences hold.
    cached: list[int]  # Blocks that no sequence holds and whose content is known.
    owner: list[int]  # The Sequence.id of a sequence that holds a block of the cell, or 0.


def pool_cells(pool: BlockPool, running: list[Sequence]) -> PoolCells:
    """Count the blocks of each cell. Counting by slices takes 2 ms for 32K blocks."""
    blocks_per_cell = -(-pool.num_blocks // MAX_CELLS)
    used: list[int] = []
    shared: list[int] = []
    cached: list[int] = []
    for start in range(1, pool.num_blocks + 1, blocks_per_cell):
        ref_counts = pool.ref_counts[start : start + blocks_per_cell]
        hashes = pool.hashes[start : start + blocks_per_cell]
        num_used = len(ref_counts) - ref_counts.count(0)
        used.append(num_used)
        shared.append(num_used - ref_counts.count(1))
        used_hashes = list(compress(hashes, ref_counts))
        num_hashed = len(hashes) - hashes.count(None)
        cached.append(num_hashed - (len(used_hashes) - used_hashes.count(None)))
    owner = [0] * len(used)
    stride = 1 + sum(len(seq.block_table) for seq in running) // MAX_OWNERS
    for seq in reversed(running):  # The first sequence is shown as the owner of a shared block.
        for block in seq.block_table[::stride]:
            owner[(block - 1) // blocks_per_cell] = seq.id
    return PoolCells(blocks_per_cell, used, shared, cached, owner)
