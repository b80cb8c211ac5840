"""The scheduler's check notices each broken invariant and names it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from octavo.core.blocks import FullBlock
from octavo.core.scheduler import Scheduler
from octavo.params import SamplingParams
from octavo.types import Request, Status
from tests.toy_guide import ToyGuide
from tests.workloads import make_engine


def busy(keep: tuple[int, int] | None = None) -> Scheduler:
    """Return a scheduler with two decoding sequences, of which the second is guided, one that
    prefills and one that waits. No step is in flight."""
    engine = make_engine(40, 4, slots=3, budget=8, depth=1, keep=keep)
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=1)
    engine.add(Request("a", [1, 2, 3, 4, 5], params))
    engine.add(Request("b", [6], params, guide=ToyGuide(1)))
    engine.step()
    engine.add(Request("c", list(range(1, 21)), params))
    engine.add(Request("d", [7, 8], params))
    engine.step()
    scheduler = engine.scheduler
    assert (len(scheduler.decoding), len(scheduler.prefilling), len(scheduler.waiting)) == (2, 1, 1)
    scheduler.check()
    return scheduler


def share_a_block(s: Scheduler) -> None:
    s.decoding[1].block_table[0] = s.decoding[0].block_table[0]


def hash_what_is_written(s: Scheduler) -> None:
    seq = s.decoding[0]
    s.pool.publish(FullBlock(seq.block_table[seq.planned // 4], b"h", seq.tokens[:4], b""))


def set_first(**values: object) -> Callable[[Scheduler], None]:
    def broken(s: Scheduler) -> None:
        for name, value in values.items():
            setattr(s.decoding[0], name, value)

    return broken


BROKEN: dict[str, tuple[Callable[[Scheduler], None], str]] = {
    "computed beyond planned": (set_first(computed=7), "out of order"),
    "planned beyond the table": (set_first(planned=99), "out of order"),
    "planned and nothing in flight": (set_first(computed=2), "no step in flight"),
    "too much in flight": (set_first(steps_in_flight=2), "in flight"),
    "beyond its limit": (set_first(token_limit=6), "limit"),
    "ahead of a guide": (set_first(guide=ToyGuide(1), tokens=[1]), "decided"),
    "published and not computed": (set_first(published_blocks=2), "not computed"),
    "a block in two tables": (share_a_block, "reference counts"),
    "a hash on what is written": (hash_what_is_written, "published block"),
    "ranks out of order": (lambda s: s.decoding.reverse(), "out of order"),
    "waiting with a slot": (lambda s: setattr(s.waiting[0], "slot", 0), "holds a slot"),
    "running with another status": (set_first(status=Status.WAITING), "another status"),
    "a slot used twice": (lambda s: s.queues.free_slots.append(0), "slot is lost or used twice"),
    "alive in no queue": (lambda s: s.waiting.clear(), "no queue"),
    "alive in no group": (lambda s: s.sequences_by_request.pop("d"), "no group"),
    "awaited but not computed": (
        lambda s: s.prefix.computing.update({b"h": 99}),
        "no running sequence computes",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_invariant_is_noticed(name: str) -> None:
    scheduler = busy()
    break_invariant, message = BROKEN[name]
    break_invariant(scheduler)
    with pytest.raises(AssertionError, match=message):
        scheduler.check()


@pytest.mark.parametrize(
    "values",
    [dict(block_table=[1] * 6), dict(dropped_tokens=3), dict(dropped_tokens=4, tokens=[1] * 30)],
)
def test_a_cache_above_its_budget_is_noticed(values: dict[str, object]) -> None:
    scheduler = busy(keep=(1, 5))
    if "block_table" in values:
        extra = [scheduler.pool.allocate() for _ in range(4)]
        values = dict(block_table=scheduler.decoding[0].block_table + extra)
    set_first(**values)(scheduler)
    with pytest.raises(AssertionError, match="budget"):
        scheduler.check()
