"""Batching modes: when requests may start, under a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.core.batching import STATIC_TIMEOUT
from octavo.core.engine import Engine
from octavo.errors import InvalidRequest
from tests.core.test_policy import add_request
from tests.workloads import Clock, make_engine


def make(batching: str, **options: Any) -> tuple[Engine, Clock]:
    clock = Clock()
    return make_engine(
        200, 4, slots=16, budget=64, depth=1, clock=clock, batching=batching, **options
    ), clock


def running(engine: Engine) -> set[str]:
    return {seq.request.id for seq in engine.scheduler.running}


def finish(engine: Engine) -> int:
    """Step until no sequence runs, and return the number of steps."""
    for steps in range(1, 1000):
        engine.step()
        engine.scheduler.check()
        if not engine.scheduler.running:
            return steps
    raise AssertionError("no progress")


def test_one_after_another() -> None:
    engine, _ = make("none")
    for name in "abc":
        add_request(engine, name)
    seen = []
    while not engine.idle:
        engine.step()
        assert len(running(engine)) <= 1
        seen += [name for name in running(engine) if name not in seen]
    assert seen == ["a", "b", "c"]


def test_a_window_closes_after_its_time() -> None:
    engine, clock = make("window", batch_window=0.02)
    add_request(engine, "a")
    clock.sleep(0.010)
    add_request(engine, "b")
    engine.step()
    assert not running(engine)
    clock.sleep(0.010)
    engine.step()
    assert running(engine) == {"a", "b"}


def test_a_window_closes_when_it_is_full() -> None:
    engine, _ = make("window", max_batch=3)
    for name in "abcde":
        add_request(engine, name)
    engine.step()
    assert running(engine) == {"a", "b", "c"}


def test_the_next_batch_waits_for_slots_for_all_of_it() -> None:
    clock = Clock()
    engine = make_engine(
        200,
        4,
        slots=2,
        budget=64,
        depth=1,
        clock=clock,
        batching="window",
        max_batch=2,
        batch_window=0.02,
    )
    add_request(engine, "short", max_tokens=2)
    add_request(engine, "long", max_tokens=20)
    engine.step()
    for name in "abc":
        add_request(engine, name)
    clock.sleep(1)
    for _ in range(5):
        engine.step()
        assert running(engine) <= {"short", "long"}, "the slot of the request that ended stays free"
    finish(engine)
    engine.step()
    assert running(engine) == {"a", "b"}, "their window is long over: they begin at once"


def test_windows_run_beside_each_other_where_there_are_slots() -> None:
    engine, _ = make("window", max_batch=3)
    for name in "abcdefg":
        add_request(engine, name, max_tokens=10)
    engine.step()
    assert running(engine) == set("abc")
    engine.step()
    assert running(engine) == set("abcdef"), "g's batch is neither full nor old"


def test_a_static_batch_waits_to_be_full_but_not_for_ever() -> None:
    engine, clock = make("static", max_batch=3)
    add_request(engine, "a")
    add_request(engine, "b")
    clock.sleep(STATIC_TIMEOUT / 2)
    engine.step()
    assert not running(engine)
    add_request(engine, "c")
    engine.step()
    assert running(engine) == {"a", "b", "c"}
    finish(engine)
    add_request(engine, "last")
    engine.step()
    assert not running(engine)
    clock.sleep(STATIC_TIMEOUT)
    engine.step()
    assert running(engine) == {"last"}


def test_a_batch_that_does_not_fit_at_once_begins_as_there_is_room() -> None:
    clock = Clock()
    engine = make_engine(
        200, 4, slots=16, budget=16, depth=1, clock=clock, batching="static", max_batch=4
    )
    for name in "abcd":
        add_request(engine, name, 12, max_tokens=12)
    engine.step()
    assert running(engine) < {"a", "b", "c", "d"}
    add_request(engine, "next")
    for _ in range(3):
        engine.step()
    assert running(engine) == {"a", "b", "c", "d"}


def test_waiting_for_a_batch_costs_no_processor() -> None:
    engine, clock = make("static", max_batch=2)
    add_request(engine, "a", max_tokens=1)
    while not engine.idle:
        engine.step()
    assert STATIC_TIMEOUT <= clock.now < STATIC_TIMEOUT + 0.01, (
        "the engine slept until the batch was due"
    )


def test_an_aborted_batch_makes_way_for_the_next() -> None:
    engine, _ = make("static", max_batch=2)
    for name in "abcd":
        add_request(engine, name, max_tokens=30)
    engine.step()
    engine.abort("a")
    engine.abort("b")
    engine.step()
    assert running(engine) == {"c", "d"}


def test_batches_form_in_the_policys_order() -> None:
    engine, _ = make("static", max_batch=2, policy="priority")
    for name, priority in (("a", 3), ("b", 2), ("c", 1), ("d", 0)):
        add_request(engine, name, priority=priority)
    engine.step()
    assert running(engine) == {"d"}, "a more urgent prompt has its step alone"
    engine.step()
    assert running(engine) == {"c", "d"}


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(
        InvalidRequest,
        match="unknown batching mode 'magic': use continuous, adaptive, window, static, none",
    ):
        make("magic")
