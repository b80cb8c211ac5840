"""What happens in an engine, as typed events. Counters for metrics, the live page, the trace
recorder, hang detection and benchmarks listen to them; the engine knows none of these. Parts of the
core that measure step times (StepShaper, TierIndex, Speculation) listen too.

A part of the engine that has something to report asks first whether anything listens, so that an
event nobody wants is not even built:

    if Preempted in events.listeners:
        events.emit(Preempted(seq, reason))

Every event has a `number`, which counts the events of the log, and the `step` that was planned last
when it happened. Listeners are called at once, in the engine's thread, in the order of the numbers.
They must not change what they are given.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

from octavo.types import Plan, Sequence, StepResult

# Reasons why a beam ends (Finished.reason).
PRUNED = "pruned"  # it lost before its search was over
SEARCH_OVER = "search_over"


class Arrived(NamedTuple):
    """A request was queued."""

    seq: Sequence
    number: int = 0
    step: int = 0


class Forked(NamedTuple):
    """A sequence was forked: `n`, `best_of` or a beam that continues twice."""

    seq: Sequence  # the child
    parent: Sequence
    number: int = 0
    step: int = 0


class Admitted(NamedTuple):
    """A waiting sequence got a batch slot, for the first time or after a preemption."""

    seq: Sequence
    num_tokens: int  # known tokens
    cached_tokens: int  # of these, found in the prefix cache
    number: int = 0
    step: int = 0


class NotAdmitted(NamedTuple):
    """A plan left a sequence waiting. It is emitted for each sequence that the plan tried and left
    waiting, and for the first that it did not try."""

    seq: Sequence
    reason: str
    number: int = 0
    step: int = 0


class StepPlanned(NamedTuple):
    """A step is about to be launched."""

    plan: Plan
    number: int = 0
    step: int = 0


class StepLanded(NamedTuple):
    """The results of a step have arrived and are about to be committed."""

    plan: Plan
    result: StepResult
    seconds: float  # since its plan began, or since the step before it landed
    number: int = 0
    step: int = 0


class StepFailed(NamedTuple):
    """A step raised an error. Its requests fail, or are tried again in smaller steps."""

    plan: Plan
    error: BaseException
    number: int = 0
    step: int = 0


class Preempted(NamedTuple):
    """A running sequence lost its batch slot and its blocks and waits again."""

    seq: Sequence
    reason: str
    number: int = 0
    step: int = 0


class Finished(NamedTuple):
    """A sequence ended without an error."""

    seq: Sequence
    reason: str  # stop, length, abort, PRUNED or SEARCH_OVER
    number: int = 0
    step: int = 0


class Failed(NamedTuple):
    """A sequence ended with an error."""

    seq: Sequence
    error: str
    number: int = 0
    step: int = 0


class BlocksShared(NamedTuple):
    """A sequence took references to existing blocks: cached ones, or those of its parent."""

    seq: Sequence
    blocks: list[int]
    number: int = 0
    step: int = 0


class BlockCopied(NamedTuple):
    """A sequence must write to a shared block, and copies it first."""

    seq: Sequence
    source: int
    target: int
    number: int = 0
    step: int = 0


class BlockPublished(NamedTuple):
    """A full block can be found by its content: it was computed, or loaded from a lower tier."""

    block: int
    content_hash: bytes
    parent_hash: bytes  # of the block before it; empty for the first block of a prompt
    tokens: array[int]
    number: int = 0
    step: int = 0


class BlockEvicted(NamedTuple):
    """A content lost its device block: a sequence needed memory, or the content is not valid."""

    block: int
    content_hash: bytes
    number: int = 0
    step: int = 0


class CacheCleared(NamedTuple):
    """All contents of the device were forgotten at once."""

    number: int = 0
    step: int = 0


class TierStored(NamedTuple):
    """A content goes to a lower tier: planned for host memory, done for disk."""

    tier: str  # host or disk
    content_hash: bytes
    number: int = 0
    step: int = 0


class TierLoaded(NamedTuple):
    """A content comes back from a lower tier: planned from host memory, done from disk."""

    tier: str  # host or disk
    content_hash: bytes
    number: int = 0
    step: int = 0


Event = (
    Arrived
    | Forked
    | Admitted
    | NotAdmitted
    | StepPlanned
    | StepLanded
    | StepFailed
    | Preempted
    | Finished
    | Failed
    | BlocksShared
    | BlockCopied
    | BlockPublished
    | BlockEvicted
    | CacheCleared
    | TierStored
    | TierLoaded
)
Listener = Callable[[Event], None]


class EventLog:
    """Numbers events and passes them to listeners. It keeps none of them."""

    def __init__(self) -> None:
        self.listeners: dict[type[Event], list[Listener]] = {}  # by kind; no empty lists
        self.step = 0  # the scheduler's latest plan
        self.number = 0  # of the last event

    def subscribe(self, listener: Listener, *kinds: type[Event]) -> None:
        """Call `listener` with every event of these kinds."""
        for kind in kinds:
            self.listeners.setdefault(kind, []).append(listener)

    def unsubscribe(self, listener: Listener) -> None:
        for kind, listeners in list(self.listeners.items()):
            remaining = [other for other in listeners if other != listener]
            if remaining:
                self.listeners[kind] = remaining
            else:
                del self.listeners[kind]

    def emit(self, event: Event) -> None:
        self.number += 1
        stamped = event._replace(number=self.number, step=self.step)
        for listener in self.listeners.get(type(event), ()):
            listener(stamped)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Nothing listens within this block. Listeners must not change meanwhile."""
        listeners = self.listeners
        self.listeners = {}
        try:
            yield
        finally:
            self.listeners = listeners
