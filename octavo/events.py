"""Typed events of the engine. Counters for metrics, the event stream of the live page and of
recordings, the trace recorder, hang detection and benchmarks listen to them; the engine does not
depend on any of these. Parts of the core that measure step times (StepLimiter, TierIndex,
Speculation) listen too.

A part of the engine checks first whether an event has listeners, so that an event without any is
not built:

    if Preempted in events.listeners:
        events.emit(Preempted(seq, reason, beneficiary))

Every event has a `number`, which counts the events of the bus, and the `step` that was planned last
when it happened. Listeners are called at once, in the engine's thread, in the order of the numbers.
They must not change what they are given.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

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


class GuideStarted(NamedTuple):
    """The structured output of a request is being compiled. The request is queued afterwards."""

    request_id: str
    prompt_len: int
    number: int = 0
    step: int = 0


class RequestRefused(NamedTuple):
    """A request was refused: it can never run, or the server had no room for it."""

    request_id: str
    reason: str
    number: int = 0
    step: int = 0


class Admitted(NamedTuple):
    """A waiting sequence got a batch slot, for the first time or after a preemption."""

    seq: Sequence
    num_tokens: int  # known tokens
    cached_tokens: int  # how many of them were found in the prefix cache
    match_end: str  # why no more of them were found
    missing_hash: bytes  # content of the first block that was not found; empty: there is none
    number: int = 0
    step: int = 0


class NotAdmitted(NamedTuple):
    """A plan left a sequence waiting. It is emitted for each sequence that the plan tried and left
    waiting, and for the first that it did not try."""

    seq: Sequence
    reason: str
    needed_blocks: int  # blocks that its admission takes from the pool; 0: they were not counted
    waits_for: int  # Sequence.id of the sequence that computes its prefix; 0: none
    number: int = 0
    step: int = 0


class NotPlanned(NamedTuple):
    """A running sequence computes nothing in this step. It keeps its batch slot and blocks."""

    seq: Sequence
    reason: str
    needed_blocks: int  # blocks that its next chunk takes from the pool; 0: it lacks no blocks
    number: int = 0
    step: int = 0


class KVDiscarded(NamedTuple):
    """The KV cache is turned off: a sequence computes all of its tokens again in the next step."""

    seq: Sequence
    number: int = 0
    step: int = 0


class StepPlanned(NamedTuple):
    """A step is about to be launched."""

    plan: Plan
    token_budget: int  # tokens that the step may have
    number: int = 0
    step: int = 0


class StepLanded(NamedTuple):
    """The results of a step have arrived and are about to be committed."""

    plan: Plan
    result: StepResult
    seconds: float  # time since its plan began, or since the step before it landed
    number: int = 0
    step: int = 0


class StepTimestamps(NamedTuple):
    """When the host worked on a step, on the scheduler's clock. With several steps in flight, the
    host works on other steps between the launch and the wait."""

    started: float  # its plan began
    planned: float
    launched: float
    wait_began: float
    landed: float
    committed: float


class StepCommitted(NamedTuple):
    """The results of a step are in the scheduler's state."""

    plan: Plan
    result: StepResult
    times: StepTimestamps
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
    beneficiary: Sequence | None  # the sequence that it made room for, if it was one
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
    blocks: list[int]  # its block table; 0 for a block that is loaded from a lower tier
    number: int = 0
    step: int = 0


class BlocksAllocated(NamedTuple):
    """Blocks were taken from the pool: free ones, or cached ones whose contents were evicted."""

    seq: Sequence | None  # None: a content that comes from disk, or a withheld block
    first: int  # place of the first one in the block table; 0 without a sequence
    blocks: list[int]
    number: int = 0
    step: int = 0


class BlockCopied(NamedTuple):
    """A sequence must write to a shared block, and copies it first. It holds the copy from now on,
    and has released its reference to the source."""

    seq: Sequence
    source: int
    target: int
    number: int = 0
    step: int = 0


class BlockDropped(NamedTuple):
    """Bounded KV was full: a block left the block table of its sequence, and the blocks behind it
    move up."""

    seq: Sequence
    block: int
    number: int = 0
    step: int = 0


class BlocksReleased(NamedTuple):
    """A sequence gave up its references to blocks, the last block of its table first."""

    seq: Sequence | None  # None: as in BlocksAllocated
    blocks: list[int]
    number: int = 0
    step: int = 0


class BlockPublished(NamedTuple):
    """A full block can be found by its content: it was computed, or loaded from a lower tier."""

    block: int
    content_hash: bytes
    parent_hash: bytes  # hash of the block before it; empty for the first block of a prompt
    tokens: array[int]
    number: int = 0
    step: int = 0


class BlockEvicted(NamedTuple):
    """A content lost its device block: the block is needed, withheld or shifted by bounded KV, or
    the content is not valid."""

    block: int
    content_hash: bytes
    number: int = 0
    step: int = 0


class CacheCleared(NamedTuple):
    """The prefix cache of the device was cleared."""

    number: int = 0
    step: int = 0


class TierStored(NamedTuple):
    """A content goes to a lower tier. Emitted when a host store is planned, or when a disk save has
    finished."""

    tier: str  # host or disk
    content_hash: bytes
    block: int  # device block it is copied from; 0 for disk
    host_block: int  # -1 for disk
    number: int = 0
    step: int = 0


class TierRequested(NamedTuple):
    """A content was requested from disk."""

    content_hash: bytes
    host_block: int  # where it is read to
    number: int = 0
    step: int = 0


class TierLoaded(NamedTuple):
    """A content comes back from a lower tier. Emitted when a host load is planned, or when a disk
    fetch has finished."""

    tier: str  # host or disk
    content_hash: bytes
    host_block: int
    block: int  # device block it is copied to; 0 for disk
    number: int = 0
    step: int = 0


class TierReady(NamedTuple):
    """The content of a host block is complete and can be found."""

    content_hash: bytes
    host_block: int
    number: int = 0
    step: int = 0


class TierDropped(NamedTuple):
    """A lower tier no longer has a content: it was evicted, could not be stored or is not valid."""

    tier: str  # host or disk
    content_hash: bytes
    host_block: int  # -1 for disk
    number: int = 0
    step: int = 0


class DiskListed(NamedTuple):
    """The disk has listed its contents. The list replaces the index of the contents on disk."""

    num_contents: int
    number: int = 0
    step: int = 0


class DummyRunEnded(NamedTuple):
    """Steps were run to which nothing listened. A listener that keeps a copy of the engine's state
    must read it again."""

    number: int = 0
    step: int = 0


class SettingsChanged(NamedTuple):
    """Settings of the scheduler were changed while it runs."""

    settings: dict[str, Any]  # all that may be changed
    number: int = 0
    step: int = 0


Event = (
    Arrived
    | Forked
    | GuideStarted
    | RequestRefused
    | Admitted
    | NotAdmitted
    | NotPlanned
    | KVDiscarded
    | StepPlanned
    | StepLanded
    | StepCommitted
    | StepFailed
    | Preempted
    | Finished
    | Failed
    | BlocksShared
    | BlocksAllocated
    | BlockCopied
    | BlockDropped
    | BlocksReleased
    | BlockPublished
    | BlockEvicted
    | CacheCleared
    | TierStored
    | TierRequested
    | TierLoaded
    | TierReady
    | TierDropped
    | DiskListed
    | DummyRunEnded
    | SettingsChanged
)
Listener = Callable[[Event], None]


class EventBus:
    """Numbers events and passes them to listeners. It keeps none of them."""

    def __init__(self) -> None:
        self.listeners: dict[type[Event], list[Listener]] = {}  # by kind; no empty lists
        self.step = 0  # the scheduler's latest plan
        self.number = 0  # number of the last event

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
        # Like _replace(number=..., step=...), which takes three times as long.
        stamped = tuple.__new__(type(event), (*event[:-2], self.number, self.step))
        for listener in self.listeners.get(type(event), ()):
            listener(stamped)

    @contextmanager
    def muted(self) -> Iterator[None]:
        """Call no listener within this block, in which listeners must not change. DummyRunEnded is
        emitted at its end."""
        listeners = self.listeners
        self.listeners = {}
        try:
            yield
        finally:
            self.listeners = listeners
            if DummyRunEnded in listeners:
                self.emit(DummyRunEnded())
