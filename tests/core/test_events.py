"""Events are emitted in the order in which things happen, and only if something listens."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import get_args

import pytest

from octavo import events
from octavo.core import reasons
from octavo.core.dummy_run import dummy_run
from octavo.core.engine import Engine
from octavo.events import (
    Admitted,
    BlockCopied,
    BlockEvicted,
    BlockPublished,
    BlocksShared,
    CacheCleared,
    Event,
    EventBus,
    Failed,
    Finished,
    NotAdmitted,
    Preempted,
    StepLanded,
    TierLoaded,
    TierStored,
)
from octavo.params import SamplingParams
from octavo.types import Request
from tests.fake_runner import FakeDisk, FakeRunner
from tests.workloads import make_engine

KINDS: tuple[type[Event], ...] = get_args(events.Event)


def listen(engine: Engine, *kinds: type[Event]) -> list[Event]:
    received: list[Event] = []
    engine.events.subscribe(received.append, *kinds or KINDS)
    return received


def add(engine: Engine, name: str, first: int, length: int, max_tokens: int, n: int = 1) -> None:
    params = SamplingParams(n=n, max_tokens=max_tokens, ignore_eos=True, seed=1)
    engine.add(Request(name, list(range(first, first + length)), params))


def run(engine: Engine) -> None:
    while not engine.idle:
        engine.step()


def tiered_engine(disk: FakeDisk) -> Engine:
    """Eight blocks of four positions, three batch slots, host memory and a disk."""
    return make_engine(8, 4, slots=3, budget=16, depth=1, host=20, disk=disk)


def scripted(engine: Engine) -> None:
    """A fork and copies on write; then a preemption, while host memory and disk take what is
    evicted; then a prompt that comes back from host memory."""
    add(engine, "a", 1, 10, max_tokens=4, n=2)
    run(engine)
    add(engine, "b", 20, 12, max_tokens=12)
    add(engine, "c", 40, 9, max_tokens=12)
    run(engine)
    add(engine, "d", 1, 10, max_tokens=1)
    run(engine)


def describe(event: Event) -> str:
    words = [type(event).__name__]
    if getattr(event, "seq", None) is not None:
        words.append(f"{event.seq.request.id}{event.seq.index}")
    for name in ("reason", "tier"):
        if hasattr(event, name):
            words.append(f"({getattr(event, name)})")
    return " ".join(words)


def by_step(received: list[Event]) -> dict[int, list[str]]:
    """Return the descriptions of each step with more than its plan, landing and commit, repeats
    once."""
    steps: dict[int, list[str]] = {}
    for event in received:
        described = steps.setdefault(event.step, [])
        if described[-1:] != [describe(event)]:
            described.append(describe(event))
    return {
        step: described
        for step, described in steps.items()
        if described != ["StepPlanned", "StepLanded", "StepCommitted"]
    }


def test_a_scripted_workload_emits_its_events_in_order() -> None:
    engine = tiered_engine(FakeDisk(slowest=1, lists=0.0))
    received = listen(engine, *(kind for kind in KINDS if kind is not BlockPublished))
    scripted(engine)
    assert [event.number for event in received] == list(range(1, len(received) + 1))
    assert all(before.step <= after.step for before, after in pairwise(received))
    lacks_blocks = "NotAdmitted c0 (too few blocks are available for it)"
    step = ["StepPlanned", "StepLanded"]
    committed = "StepCommitted"
    disk = ["TierReady", "TierStored (disk)", committed]
    assert by_step(received) == {
        0: ["Arrived a0"],
        1: ["Admitted a0", "BlocksAllocated a0", *step, committed],
        2: ["Forked a1", "BlocksShared a1", "BlockCopied a0", *step, committed],
        5: [
            *("BlocksAllocated a0", "BlocksAllocated a1", *step),
            *("Finished a0 (length)", "BlocksReleased a0"),
            *("Finished a1 (length)", "BlocksReleased a1", committed),
            *("Arrived b0", "Arrived c0"),
        ],
        6: [
            *("Admitted b0", "BlocksAllocated b0"),
            *("Admitted c0", "BlocksAllocated c0", *step, committed),
        ],
        7: [
            *("BlockEvicted", "BlocksAllocated b0", "BlockEvicted", "BlocksAllocated c0"),
            *("TierStored (host)", *step, *disk),
        ],
        11: [
            *("BlockEvicted", "BlocksAllocated b0"),
            *("Preempted c0 (no block was available)", "BlocksReleased c0"),
            *("NotAdmitted c0 (a sequence was preempted in this step)", *step, committed),
        ],
        **{number: [lacks_blocks, *step, committed] for number in (12, 13, 14, 16)},
        15: [
            *("BlockEvicted", "BlocksAllocated b0"),
            *(lacks_blocks, "TierStored (host)", *step, *disk),
        ],
        17: [lacks_blocks, *step, "Finished b0 (length)", "BlocksReleased b0", committed],
        18: [
            *("Admitted c0", "BlocksShared c0", "BlocksAllocated c0", "TierLoaded (host)"),
            *("BlockEvicted", "BlocksAllocated c0", "TierStored (host)", *step, *disk),
        ],
        22: ["BlockEvicted", "BlocksAllocated c0", *step, committed],
        25: [*step, "Finished c0 (length)", "BlocksReleased c0", committed, "Arrived d0"],
        26: [
            "Admitted d0",
            *("BlockEvicted", "BlocksAllocated d0", "TierLoaded (host)") * 2,
            *("BlockEvicted", "BlocksAllocated d0", *step),
            *("Finished d0 (length)", "BlocksReleased d0", committed),
        ],
    }


@pytest.mark.parametrize("keep", [None, (1, 4)], ids=["whole KV", "bounded KV"])
def test_published_minus_evicted_blocks_are_the_cache(keep: tuple[int, int] | None) -> None:
    engine = make_engine(8, 4, slots=3, budget=16, depth=1, keep=keep)
    known: dict[bytes, tuple[bytes, list[int]]] = {}

    def mirror(event: Event) -> None:
        if isinstance(event, BlockPublished):
            known[event.content_hash] = event.parent_hash, list(event.tokens)
        elif isinstance(event, BlockEvicted):
            del known[event.content_hash]
        else:
            known.clear()

    engine.events.subscribe(mirror, BlockPublished, BlockEvicted, CacheCleared)
    pool = engine.scheduler.pool
    for name, first in (("a", 1), ("b", 20), ("c", 40)):
        add(engine, name, first, 10, max_tokens=9)
        run(engine)
        cached = {
            full: (pool.parent_hashes[block], list(pool.block_tokens[block] or []))
            for full, block in pool.hash_index.items()
        }
        assert known == cached != {}
    engine.scheduler.clear_cache()
    assert known == {}


def test_events_and_counters_agree() -> None:
    engine = tiered_engine(FakeDisk(slowest=1, lists=0.0))
    received = listen(engine)
    scripted(engine)
    counts = Counter(type(event) for event in received)
    tiers = Counter(event for event in map(describe, received) if event.startswith("Tier"))
    counters = engine.scheduler.counters
    assert counts[Preempted] == counters.preemptions > 0
    assert counts[BlockCopied] == counters.copies > 0
    assert counts[BlockEvicted] == engine.scheduler.pool.evictions > 0
    assert tiers["TierStored (host)"] == counters.tiers.stores > 0
    assert tiers["TierLoaded (host)"] == counters.tiers.loads > 0
    assert tiers["TierStored (disk)"] == counters.tiers.saves > 0
    cached = sum(
        e.cached_tokens for e in received if isinstance(e, Admitted) and not e.seq.preemptions
    )
    assert cached == counters.cached_tokens > 0
    assert counts[Finished] == 5 and counts[Failed] == 0
    assert sum(len(event.blocks) for event in received if isinstance(event, BlocksShared)) > 0


def test_blocks_that_a_restarted_engine_reads_from_disk_are_reported() -> None:
    disk = FakeDisk(slowest=1, lists=0.0)
    scripted(tiered_engine(disk))
    engine = tiered_engine(disk)
    received = listen(engine)
    add(engine, "d", 1, 10, max_tokens=1)
    run(engine)
    described = [describe(event) for event in received]
    waits = "NotAdmitted d0 (its prefix is being read from disk)"
    in_order = ["Arrived d0", waits, "TierLoaded (disk)", "TierLoaded (host)", "Admitted d0"]
    assert [described.index(one) for one in in_order] == sorted(map(described.index, in_order))


def test_a_request_behind_one_that_lacks_room_has_a_reason_of_its_own() -> None:
    """Blocks are missing for the first request only; the second would fit and is not tried."""
    engine = make_engine(8, 4, slots=4, budget=64, depth=1)
    received = listen(engine, NotAdmitted)
    add(engine, "a", 1, 20, max_tokens=2)
    engine.step()
    add(engine, "b", 23, 20, max_tokens=2)
    add(engine, "c", 45, 3, max_tokens=2)
    engine.step()
    assert [describe(event) for event in received] == [
        f"NotAdmitted b0 ({reasons.NOT_ENOUGH_BLOCKS})",
        f"NotAdmitted c0 ({reasons.BEHIND_ANOTHER})",
    ]


def test_a_whole_prompt_that_does_not_fit_into_a_step_is_not_reported_as_lacking_blocks() -> None:
    engine = make_engine(80, 4, slots=4, budget=16, depth=1, chunked_prefill=False)
    received = listen(engine, NotAdmitted)
    add(engine, "a", 1, 10, max_tokens=2)
    add(engine, "b", 30, 10, max_tokens=2)
    add(engine, "c", 45, 3, max_tokens=2)
    engine.step()
    assert [describe(event) for event in received] == [
        f"NotAdmitted b0 ({reasons.NO_ROOM_FOR_PROMPT})",
        f"NotAdmitted c0 ({reasons.BEHIND_ANOTHER})",
    ]


def test_a_step_that_fails_is_reported_before_its_requests() -> None:
    engine = make_engine(20, 4, slots=2, budget=16, depth=1)
    assert isinstance(engine.runner, FakeRunner)
    engine.runner.failing = 1.0
    engine.runner.failures = 1
    received = listen(engine)
    add(engine, "a", 1, 5, max_tokens=3)
    run(engine)
    described = list(map(describe, received))
    assert described.count("StepFailed") == 1
    ends = ["StepFailed", "Failed a0", "BlocksReleased a0"]
    assert described[-3:] == ends


def test_every_kind_has_a_number_and_a_step() -> None:
    assert all(kind._field_defaults == {"number": 0, "step": 0} for kind in KINDS)


def test_no_event_is_built_if_nothing_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[str] = []
    for kind in KINDS:
        new = kind.__new__

        def counted(cls, *fields, new=new, **named):  # type: ignore[no-untyped-def]
            built.append(cls.__name__)
            return new(cls, *fields, **named)

        monkeypatch.setattr(kind, "__new__", counted)
    engine = make_engine(8, 4, slots=3, budget=16, depth=1)
    scripted(engine)
    assert not built
    engine.events.subscribe(lambda event: None, Finished)
    scripted(engine)
    assert set(built) == {"Finished"}


def test_warm_up_steps_reach_no_listener_and_no_prompt_counter() -> None:
    engine = make_engine(20, 4, slots=2, budget=16, depth=1)
    received = listen(engine)
    with dummy_run(engine):
        add(engine, "a", 1, 9, max_tokens=2)
        run(engine)
    assert list(map(describe, received)) == ["DummyRunEnded"]
    assert engine.scheduler.counters.queried_tokens == 0
    add(engine, "b", 20, 9, max_tokens=2)
    run(engine)
    assert describe(received[1]) == "Arrived b0" and received[1].number == 2


def test_listeners_return_although_a_muted_block_raises() -> None:
    log = EventBus()
    received: list[Event] = []
    log.subscribe(received.append, TierStored)
    with pytest.raises(KeyError), log.muted():
        log.emit(TierStored("host", b"", block=1, host_block=0))
        raise KeyError
    log.emit(TierStored("disk", b"", block=0, host_block=-1))
    assert [describe(event) for event in received] == ["TierStored (disk)"]


def test_a_listener_that_unsubscribes_hears_no_more_and_others_do() -> None:
    log = EventBus()
    first: list[Event] = []
    second: list[Event] = []
    log.subscribe(first.append, TierStored, TierLoaded)
    log.subscribe(second.append, TierStored)
    log.unsubscribe(first.append)
    log.emit(TierStored("host", b"", block=1, host_block=0))
    log.emit(TierLoaded("host", b"", host_block=0, block=1))
    assert not first and len(second) == 1 and StepLanded not in log.listeners
    assert TierLoaded not in log.listeners, "so that it is not built any more"
