"""What the live page shows of the engine: made from the scheduler's own state, between two steps, for whoever asks.

Exists only while somebody watches: then it keeps the latest plans in a few words, and nothing else. Reads lengths and states; no
token goes into a view. The engine's thread alone uses it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from itertools import chain, compress, islice, repeat
from typing import Any

from octavo.core.blocks import BlockPool
from octavo.core.engine import Engine
from octavo.core.scheduler import Scheduler
from octavo.events import Event, StepLanded
from octavo.serve.messages import Shown, Step, View
from octavo.types import Output, Plan, Sequence

CELLS = 1024  # of the picture of the pool
# in a view; ENTRIES: in each list of a step
SEQUENCES = 256
STEPS = 128
ENDED = 128
ENTRIES = 8
LOOKED = 256  # blocks of who waits, at which it is looked for what it waits for
OWNERS = 8192  # entries of tables that are looked at to say whose a cell is: half a millisecond
FORGOTTEN = 30.0  # seconds after which nobody watches any more: longer than a step takes
MOVES = ("stores", "loads", "copies", "shifts", "saves", "fetches")


class Viewer:
    """`held`: requests that the scheduler does not have yet, since what they must match is being compiled."""

    def __init__(self, engine: Engine, held: Mapping[str, tuple[Any, Any]]):
        self.engine = engine
        self.scheduler = engine.scheduler
        self.held = held
        self.steps: deque[Step] = deque(maxlen=STEPS)
        self.ends: deque[tuple[str, int, str]] = deque(maxlen=ENDED)
        self.num_steps = self.num_ends = 0  # since the last view
        self.preemptions = {seq.id: seq.preemptions for seq in self.scheduler.live.values()}
        self.preempted = self.scheduler.counters.preemptions
        self.asked = time.monotonic()
        engine.events.subscribe(self.landed, StepLanded)

    @property
    def forgotten(self) -> bool:
        return time.monotonic() - self.asked > FORGOTTEN

    def close(self) -> None:
        self.engine.events.unsubscribe(self.landed)

    def planned(self, plan: Plan) -> None:
        live = self.scheduler.live
        chunks = [
            (item.seq_id, item.start, item.num_tokens)
            for item in plan.items
            if item.start is not None
        ]
        begun = [
            (row.seq_id, live[row.seq_id].request.id, len(row.tokens), row.computed)
            for row in plan.new_slots
        ]
        lost = [(seq.id, seq.request.id, seq.preempt_reason) for seq in self._preempted()]
        moves = {name: count for name in MOVES if (count := len(getattr(plan, name)))}
        more = sum(max(len(each) - ENTRIES, 0) for each in (chunks, begun, lost))
        decode = len(plan.items) - len(chunks)
        prefill = sum(num for _, _, num in chunks)
        entries = chunks[:ENTRIES], begun[:ENTRIES], lost[:ENTRIES]
        self.steps.append(Step(plan.step, decode, prefill, *entries, moves, plan.urgent, more))
        self.num_steps += 1

    def _preempted(self) -> list[Sequence]:
        """Who lost its place since the last plan; looked for only where the scheduler counted somebody."""
        if self.preempted == self.scheduler.counters.preemptions:
            return []
        before = self.preemptions
        live = self.scheduler.live.values()
        self.preempted = self.scheduler.counters.preemptions
        self.preemptions = {seq.id: seq.preemptions for seq in live}
        return [seq for seq in live if seq.preemptions > before.get(seq.id, 0)]

    def landed(self, event: Event) -> None:
        assert isinstance(event, StepLanded)
        for step in islice(reversed(self.steps), self.engine.depth + 1):
            if step.step == event.plan.step:
                step.seconds = event.seconds

    def ended(self, outputs: list[Output]) -> None:
        ends = [
            (out.request_id, out.index, out.finish_reason)
            for out in outputs
            if out.finish_reason is not None
        ]
        self.ends += ends
        self.num_ends += len(ends)

    def view(self) -> View:
        s = self.scheduler
        self.asked = time.monotonic()
        queues = chain(
            zip(repeat("decode"), s.decoding),
            zip(repeat("prefill"), s.prefilling),
            zip(repeat("waiting"), s.waiting),
        )
        sequences = [shown(seq, state, s) for state, seq in islice(queues, SEQUENCES)]
        for id, (add, _) in islice(self.held.items(), SEQUENCES - len(sequences)):
            sequences.append(
                Shown(
                    0,
                    id,
                    0,
                    "waiting",
                    len(add.prompt),
                    0,
                    0,
                    0,
                    0,
                    0,
                    0,
                    "what it must match is being compiled",
                )
            )
        view = View(
            sequences, len(s.decoding), len(s.prefilling), len(s.waiting) + len(self.held),
            *cells(s.pool, s.running),
            list(self.steps), self.num_steps - len(self.steps), list(self.ends), self.num_ends - len(self.ends),
        )  # fmt: skip
        self.steps.clear()
        self.ends.clear()
        self.num_steps = self.num_ends = 0
        return view


def shown(seq: Sequence, state: str, scheduler: Scheduler) -> Shown:
    why = (
        ""
        if state != "waiting"
        else f"preempted: {seq.preempt_reason}"
        if seq.preemptions
        else waits_for(seq, scheduler)
    )
    said = seq.num_generated
    prompt = seq.prompt_len
    limit = seq.position_limit + seq.dropped_tokens
    return Shown(seq.id, seq.request.id, seq.index, state, prompt, said, limit, seq.computed + seq.dropped_tokens, seq.cached_tokens,
                 len(seq.block_table), seq.preemptions, why)  # fmt: skip


def waits_for(seq: Sequence, s: Scheduler) -> str:
    first = (
        next((h for h in islice(seq.block_hashes, LOOKED) if h not in s.pool.hash_index), None)
        if s.prefix.computing
        else None
    )
    if s.prefix.waits_for_disk(seq):
        return "its prefix is being read from disk"
    if first is not None and first in s.prefix.computing:
        return "another computes a prefix that it shares"
    if not s.shaper.batches.may_start(seq):
        return "its batch has not formed yet"
    return (
        "no step since it came had tokens and blocks for it"
        if s.queues.free_slots
        else "every row is in use"
    )


def cells(
    pool: BlockPool, running: list[Sequence]
) -> tuple[int, list[int], list[int], list[int], list[int]]:
    """Blocks in each cell; used, shared, cached and owner of each. Counted by slices, which is quick: 2 ms for 32K blocks."""
    per = -(-pool.num_blocks // CELLS)
    used = list[int]()
    shared = list[int]()
    cached = list[int]()
    for start in range(1, pool.num_blocks + 1, per):
        refs = pool.ref_counts[start : start + per]
        hashes = pool.hashes[start : start + per]
        used.append(len(refs) - refs.count(0))
        shared.append(used[-1] - refs.count(1))
        of_used = list(compress(hashes, refs))
        cached.append((len(hashes) - hashes.count(None)) - (len(of_used) - of_used.count(None)))
    owner = [0] * len(used)
    stride = 1 + sum(len(seq.block_table) for seq in running) // OWNERS
    for seq in reversed(running):  # of a shared block the first in the queue
        for block in seq.block_table[::stride]:
            owner[(block - 1) // per] = seq.id
    return per, used, shared, cached, owner
