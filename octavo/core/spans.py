"""Builds the spans of sequences from the engine's events.

A span is an interval of a sequence. The spans of a sequence follow each other:

    queued     it waits for its first admission
    prefill    one chunk of known tokens, so one step
    decode     consecutive steps that sample, at most MAX_STEPS of them
    preempted  it waits again, and recomputes or finds its blocks on the device
    swapped    it waits again, and its next admission loads blocks from a lower tier

The trace recorder (trace.py) and the tracer of the engine process use SequenceSpans. It reads the
clock once per step. Only sequences whose spans are collected cost time.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass, field

from octavo.events import (
    Admitted,
    Arrived,
    Event,
    EventBus,
    Failed,
    Finished,
    Forked,
    Preempted,
    StepFailed,
    StepLanded,
    StepPlanned,
)
from octavo.types import Sequence

MAX_STEPS = 128  # OpenTelemetry keeps this many events of a span


@dataclass(slots=True)
class TimeSpan:
    name: str
    start: float  # on the scheduler's clock
    end: float
    tokens: int = 0  # computed in a prefill, sampled in a decode
    # The steps of a prefill or decode, and when each of them landed. Arrays take 16 bytes per step.
    steps: array[int] = field(default_factory=lambda: array("q"))
    landings: array[float] = field(default_factory=lambda: array("d"))


@dataclass(slots=True)
class FollowedSequence:
    """A live sequence whose spans are collected."""

    seq: Sequence
    waits_since: float
    waits_as: str = "queued"  # the name of the span that is open, or "" while the sequence runs
    spans: list[TimeSpan] = field(default_factory=list)

    def end_wait(self, now: float) -> None:
        if self.waits_as:
            self.spans.append(TimeSpan(self.waits_as, self.waits_since, now))
            self.waits_as = ""

    def add_step(self, name: str, step: int, planned_at: float, landed_at: float) -> TimeSpan:
        """Add a step to the last span, or begin a new one. Returns the span."""
        span = self.spans[-1] if self.spans else None
        if span is None or name != span.name or name == "prefill" or len(span.steps) == MAX_STEPS:
            start = planned_at if span is None else max(planned_at, span.end)
            span = TimeSpan(name, start, landed_at)
            self.spans.append(span)
        span.end = landed_at
        span.steps.append(step)
        span.landings.append(landed_at)
        return span


def rounded(seconds: float) -> float:
    """Return a time with the precision of a microsecond, which makes lines of a trace shorter."""
    return round(seconds, 6)


OnEnd = Callable[[Sequence, list[TimeSpan], Event], None]


class SequenceSpans:
    """Collects the spans of sequences and passes them on when a sequence has ended."""

    def __init__(
        self,
        events: EventBus,
        clock: Callable[[], float],
        on_end: OnEnd,
        follows: Callable[[str], bool] = lambda request_id: True,
    ):
        """Subscribe to the events of an engine.

        `follows` is called with the id of each request that arrives. `on_end` is called with each
        followed sequence, its spans and the event of its end."""
        self.clock = clock
        self.on_end = on_end
        self.follows = follows
        self.followed: dict[int, FollowedSequence] = {}  # by Sequence.id
        self.planned_at: dict[int, float] = {}  # step -> time, of steps in flight
        self.handlers: dict[type[Event], Callable[..., None]] = {
            Arrived: self._on_arrival,
            Forked: self._on_fork,
            Admitted: self._on_admission,
            Preempted: self._on_preemption,
            StepPlanned: self._on_plan,
            StepLanded: self._on_landing,
            StepFailed: self._on_step_failure,
            Finished: self._on_end,
            Failed: self._on_end,
        }
        events.subscribe(self.on_event, *self.handlers)

    def on_event(self, event: Event) -> None:
        if self.followed or isinstance(event, Arrived):
            self.handlers[type(event)](event)

    def _on_arrival(self, event: Arrived) -> None:
        if self.follows(event.seq.request.id):
            self.followed[event.seq.id] = FollowedSequence(event.seq, self.clock())

    def _on_fork(self, event: Forked) -> None:
        if event.parent.id in self.followed:
            self.followed[event.seq.id] = FollowedSequence(event.seq, self.clock())

    def _on_admission(self, event: Admitted) -> None:
        followed = self.followed.get(event.seq.id)
        if followed is not None:
            followed.end_wait(self.clock())

    def _on_preemption(self, event: Preempted) -> None:
        followed = self.followed.get(event.seq.id)
        if followed is not None:
            followed.waits_as = "preempted"
            followed.waits_since = self.clock()

    def _on_plan(self, event: StepPlanned) -> None:
        plan = event.plan
        self.planned_at[plan.step] = self.clock()
        loaded_blocks = {block for _, block in plan.loads}
        if not loaded_blocks:
            return
        for fill in plan.slot_fills:
            followed = self.followed.get(fill.seq_id)
            if followed is not None and loaded_blocks.intersection(fill.block_table):
                last = followed.spans[-1]
                last.name = "swapped" if last.name == "preempted" else last.name

    def _on_landing(self, event: StepLanded) -> None:
        plan = event.plan
        landed_at = self.clock()
        planned_at = self.planned_at.pop(plan.step, landed_at)
        for item, sampled in zip(plan.items, event.result.tokens, strict=False):
            followed = self.followed.get(item.seq_id)
            if followed is None or item.epoch != followed.seq.epoch:
                continue
            followed.end_wait(planned_at)  # a fork is not admitted by itself
            if item.start is None:
                span = followed.add_step("decode", plan.step, planned_at, landed_at)
                span.tokens += len(sampled)
            else:
                span = followed.add_step("prefill", plan.step, planned_at, landed_at)
                span.tokens += item.num_tokens

    def _on_step_failure(self, event: StepFailed) -> None:
        self.planned_at.pop(event.plan.step, None)

    def _on_end(self, event: Finished | Failed) -> None:
        followed = self.followed.pop(event.seq.id, None)
        if followed is not None:
            followed.end_wait(self.clock())
            self.on_end(event.seq, followed.spans, event)
        if not self.followed:
            self.planned_at.clear()
