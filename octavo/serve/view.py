"""What the live page shows of the engine: made from the scheduler's own state, between two steps, for whoever asks.

Exists only while somebody watches: then it keeps the latest plans in a few words, and nothing else. Reads lengths and states; no
token goes into a view. The engine's thread alone uses it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import compress, islice
from typing import Any

from octavo.core.engine import Engine
from octavo.serve.messages import Shown, Step, View
from octavo.types import Output, Plan, Sequence

CELLS = 1024  # of the picture of the pool
SEQUENCES, STEPS, ENDED, ENTRIES = 256, 128, 128, 8  # in a view; ENTRIES: in each list of a step
OWNERS = 8192  # entries of tables that are looked at to say whose a cell is: half a millisecond
FORGOTTEN = 3.0  # seconds after which nobody watches any more
MOVES = ("stores", "loads", "copies", "shifts", "saves", "fetches")


class Viewer:
    """`held`: requests that the scheduler does not have yet, since what they must match is being compiled."""

    def __init__(self, engine: Engine, held: Mapping[str, tuple[Any, Any]]):
        self.engine, self.scheduler, self.held = engine, engine.scheduler, held
        self.steps: deque[Step] = deque(maxlen=STEPS)
        self.ends: deque[tuple[str, int, str]] = deque(maxlen=ENDED)
        self.num_steps = self.num_ends = 0  # since the last view
        self.preemptions = self.scheduler.count.preemptions
        self.known = {seq.id: seq.preemptions for seq in self.scheduler.waiting}
        self.asked = time.monotonic()
        engine.observers.append(self.landed)

    def close(self) -> None:
        self.engine.observers.remove(self.landed)

    @property
    def forgotten(self) -> bool:
        return time.monotonic() - self.asked > FORGOTTEN

    # ---- what happens ------------------------------------------------------------------------------

    def planned(self, plan: Plan) -> None:
        live = self.scheduler.live
        chunks = [(item.seq, item.start, item.num) for item in plan.items if item.start is not None]
        begun = [(row.seq, live[row.seq].request.id, len(row.tokens), row.computed) for row in plan.rows if row.seq in live]
        preempted = self._preempted()
        self.steps.append(
            Step(
                plan.step,
                len(plan.items) - len(chunks),
                sum(num for _, _, num in chunks),
                chunks[:ENTRIES],
                begun[:ENTRIES],
                preempted[:ENTRIES],
                {name: count for name in MOVES if (count := len(getattr(plan, name)))},
                plan.urgent,
                sum(max(len(each) - ENTRIES, 0) for each in (chunks, begun, preempted)),
            )
        )
        self.num_steps += 1

    def _preempted(self) -> list[tuple[int, str, str]]:
        """Who lost its place since the last plan. Looked for only where the scheduler counted somebody."""
        if self.preemptions == self.scheduler.count.preemptions:
            return []
        self.preemptions = self.scheduler.count.preemptions
        before, waiting = self.known, [seq for seq in self.scheduler.live.values() if seq.preemptions]
        self.known = {seq.id: seq.preemptions for seq in waiting}
        return [(s.id, s.request.id, s.why) for s in waiting if s.preemptions > before.get(s.id, 0)]

    def landed(self, plan: Plan, seconds: float) -> None:
        for step in reversed(self.steps):
            if step.step == plan.step:
                step.seconds = seconds

    def ended(self, outputs: list[Output]) -> None:
        for out in outputs:
            if out.finish_reason is not None:
                self.ends.append((out.request_id, out.index, out.finish_reason))
                self.num_ends += 1

    # ---- a view ------------------------------------------------------------------------------------

    def view(self) -> View:
        begun, scheduler = time.perf_counter(), self.scheduler
        used, shared, cached, owner, blocks = self._cells()
        view = View(
            self._sequences(),
            len(scheduler.decoding),
            len(scheduler.prefilling),
            len(scheduler.waiting) + len(self.held),
            blocks, used, shared, cached, owner,
            list(self.steps), self.num_steps - len(self.steps), list(self.ends), self.num_ends - len(self.ends),
        )  # fmt: skip
        self.steps.clear()
        self.ends.clear()
        self.num_steps = self.num_ends = 0
        self.asked = time.monotonic()
        view.seconds = time.perf_counter() - begun
        return view

    def _sequences(self) -> list[Shown]:
        s = self.scheduler
        found = [
            Shown(
                seq.id, seq.request.id, seq.index, state, seq.prompt_len + seq.dropped,
                len(seq.tokens) - seq.prompt_len, seq.limit + seq.dropped, seq.computed, seq.cached, len(seq.table),
                seq.preemptions, self._why(seq) if state == "waiting" else "",
            )
            for state, queue in (("decode", s.decoding), ("prefill", s.prefilling), ("waiting", s.waiting))
            for seq in islice(queue, SEQUENCES)
        ][:SEQUENCES]  # fmt: skip
        compiling = [
            Shown(0, id, 0, "waiting", len(add.prompt), 0, 0, 0, 0, 0, 0, "what it must match is being compiled")
            for id, (add, _) in islice(self.held.items(), SEQUENCES - len(found))
        ]
        return found + compiling

    def _why(self, seq: Sequence) -> str:
        """What it waits for."""
        s = self.scheduler
        first = next((h for h in seq.hashes if h not in s.pool.index), None)
        if seq.preemptions:
            return f"preempted: {seq.why}"
        if s.tiers is not None and seq.asked == s.tiers.news:
            return "its prefix is being read from disk"
        if first is not None and first in s.computing:
            return "another computes a prefix that it shares"
        if s.form is not None and seq.request.id not in s.batch:
            return "its batch has not formed yet"
        if not s.rows:
            return "every row is in use"
        return "its turn: those before it take the step's tokens, or the free blocks"

    def _cells(self) -> tuple[list[int], list[int], list[int], list[int], int]:
        """Counts by slices, which are quick: 1 ms for 32K blocks."""
        pool = self.scheduler.pool
        per = -(-pool.num_blocks // CELLS)
        used, shared, cached = list[int](), list[int](), list[int]()
        for start in range(1, pool.num_blocks + 1, per):
            refs, hashes = pool.refs[start : start + per], pool.hash[start : start + per]
            held = len(refs) - refs.count(0)
            used.append(held)
            shared.append(held - refs.count(1))
            findable = len(hashes) - hashes.count(None)
            cached.append(findable - (held - list(compress(hashes, refs)).count(None)))
        owner, running = [0] * len(used), self.scheduler.running
        stride = 1 + sum(len(seq.table) for seq in running) // OWNERS
        for seq in reversed(running):  # of a shared block the first in the queue
            for block in seq.table[::stride]:
                owner[(block - 1) // per] = seq.id
        return used, shared, cached, owner, per
