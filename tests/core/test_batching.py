"""When requests may begin: each batching mode alone, under a clock that the test moves; and the pace of prefill."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.core.batching import LAST_CALL, Pace
from octavo.core.engine import Engine
from octavo.errors import InvalidRequest
from octavo.types import Item, Plan
from tests.core.test_policy import ask, drain
from tests.workloads import Clock, make_engine


def make(batching: str, **options: Any) -> tuple[Engine, Clock]:
    clock = Clock()
    return make_engine(
        200, 4, rows=16, budget=64, depth=1, clock=clock, batching=batching, **options
    ), clock


def running(engine: Engine) -> set[str]:
    return {seq.request.id for seq in engine.scheduler.running}


def finish(engine: Engine) -> int:
    """Steps until all that has begun has ended."""
    for steps in range(1, 1000):
        engine.step()
        engine.scheduler.check()
        if not engine.scheduler.running:
            return steps
    raise AssertionError("no progress")


def test_one_after_another() -> None:
    engine, _ = make("none")
    for name in "abc":
        ask(engine, name)
    seen = []
    while not engine.idle:
        engine.step()
        assert len(running(engine)) <= 1
        seen += [name for name in running(engine) if name not in seen]
    assert seen == ["a", "b", "c"]


def test_a_window_closes_after_its_time() -> None:
    engine, clock = make("window", batch_window=0.02)
    ask(engine, "a")
    clock.sleep(0.010)
    ask(engine, "b")
    engine.step()
    assert not running(engine)
    clock.sleep(0.010)
    engine.step()
    assert running(engine) == {"a", "b"}


def test_a_window_closes_when_it_is_full() -> None:
    engine, _ = make("window", max_batch=3)
    for name in "abcde":
        ask(engine, name)
    engine.step()
    assert running(engine) == {"a", "b", "c"}


def test_the_next_batch_waits_for_rows_for_all_of_it() -> None:
    clock = Clock()
    engine = make_engine(
        200,
        4,
        rows=2,
        budget=64,
        depth=1,
        clock=clock,
        batching="window",
        max_batch=2,
        batch_window=0.02,
    )
    ask(engine, "short", max_tokens=2)
    ask(engine, "long", max_tokens=20)
    engine.step()
    for name in "abc":
        ask(engine, name)
    clock.sleep(1)
    for _ in range(5):
        engine.step()
        assert running(engine) <= {"short", "long"}, "the row of the one that ended stays empty"
    finish(engine)
    engine.step()
    assert running(engine) == {"a", "b"}, "their window is long over: they begin at once"


def test_windows_run_beside_each_other_where_there_are_rows() -> None:
    engine, _ = make("window", max_batch=3)
    for name in "abcdefg":
        ask(engine, name, max_tokens=10)
    engine.step()
    assert running(engine) == set("abc")
    engine.step()
    assert running(engine) == set("abcdef"), "g's batch is neither full nor old"


def test_a_static_batch_waits_to_be_full_but_not_for_ever() -> None:
    engine, clock = make("static", max_batch=3)
    ask(engine, "a")
    ask(engine, "b")
    clock.sleep(LAST_CALL / 2)
    engine.step()
    assert not running(engine)
    ask(engine, "c")
    engine.step()
    assert running(engine) == {"a", "b", "c"}
    finish(engine)
    ask(engine, "last")
    engine.step()
    assert not running(engine)
    clock.sleep(LAST_CALL)
    engine.step()
    assert running(engine) == {"last"}


def test_a_batch_that_does_not_fit_at_once_begins_as_there_is_room() -> None:
    clock = Clock()
    engine = make_engine(
        200, 4, rows=16, budget=16, depth=1, clock=clock, batching="static", max_batch=4
    )
    for name in "abcd":
        ask(engine, name, 12, max_tokens=12)
    engine.step()
    assert running(engine) < {"a", "b", "c", "d"}
    ask(engine, "next")
    for _ in range(3):
        engine.step()
    assert running(engine) == {"a", "b", "c", "d"}


def test_waiting_for_a_batch_costs_no_processor() -> None:
    engine, clock = make("static", max_batch=2)
    ask(engine, "a", max_tokens=1)
    while not engine.idle:
        engine.step()
    assert LAST_CALL <= clock.now < LAST_CALL + 0.01, "the engine slept until the batch was due"


def test_an_aborted_batch_makes_way_for_the_next() -> None:
    engine, _ = make("static", max_batch=2)
    for name in "abcd":
        ask(engine, name, max_tokens=30)
    engine.step()
    engine.abort("a")
    engine.abort("b")
    engine.step()
    assert running(engine) == {"c", "d"}


def test_batches_form_in_the_policys_order() -> None:
    engine, _ = make("static", max_batch=2, policy="priority")
    for name, priority in (("a", 3), ("b", 2), ("c", 1), ("d", 0)):
        ask(engine, name, priority=priority)
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


# ---- adaptive -----------------------------------------------------------------------------------------------


def step_of(prefill: int, decode: int) -> Plan:
    items = [Item(i, 0, i, None, 1, True, 10) for i in range(decode)]
    return Plan(1, items=items + ([Item(99, 0, 99, 0, prefill, True, prefill)] if prefill else []))


def settle(
    pace: Pace, choose: Callable[[], int], cost: Callable[[int], float], steps: int = 60
) -> list[int]:
    """The sizes that it comes to, if steps take what `cost` says of their prompt tokens."""
    sizes = []
    for _ in range(steps):
        sizes.append(choose())
        pace.observe(step_of(0, 8), cost(0))
        pace.observe(step_of(sizes[-1], 8), cost(sizes[-1]))
    return sizes


def test_the_chunk_is_what_fits_the_target() -> None:
    pace = Pace(target=0.050)
    sizes = settle(pace, lambda: pace.chunk(1000), lambda n: 0.010 + 0.0002 * n)
    assert sizes[:4] == [16, 24, 32, 48], (
        "little, as long as nothing is known, and one size more each time"
    )
    assert max(sizes) == sizes[-1] == 192, "10 ms, and 0.2 ms for each token: 200 would fit"
    assert pace.chunk(64) == 64
    assert settle(pace, lambda: pace.chunk(1000), lambda n: 0.060)[-1] == 16, (
        "the target is out of reach, but prompts get on"
    )


def test_the_pace_follows_a_machine_that_changes() -> None:
    pace = Pace(target=0.050)
    for each, size in ((0.0001, 384), (0.001, 32), (0.0001, 384)):
        assert (
            settle(pace, lambda: pace.chunk(1000), lambda n, each=each: 0.010 + each * n, 300)[-1]
            == size
        )  # type: ignore[misc]


def test_one_slow_step_changes_nothing() -> None:
    pace = Pace(target=0.050)
    size = settle(pace, lambda: pace.chunk(1000), lambda n: 0.010 + 0.0002 * n)[-1]
    pace.observe(step_of(size, 8), 1.0)
    assert pace.chunk(1000) == size


@pytest.mark.parametrize("depth", [1, 2])
def test_token_to_token_times_stay_below_the_target(depth: int) -> None:
    """A runner that takes 5 ms a step, 1 ms a row and 1 ms a prompt token; the budget alone would allow steps of 250 ms."""
    clock = Clock()
    engine = make_engine(
        500,
        4,
        rows=16,
        budget=256,
        depth=depth,
        max_len=400,
        clock=clock,
        batching="adaptive",
        latency_target=0.060,
    )
    launch, free = engine.runner.launch, 0.0

    def timed(plan: Plan) -> Any:
        nonlocal free
        handle = launch(plan)
        free = max(free, clock.now) + 0.005 + 0.001 * plan.num_tokens
        due, wait = free, handle.wait

        def land() -> Any:
            clock.now = max(clock.now, due)
            return wait()

        handle.wait = land  # type: ignore[method-assign]
        return handle

    engine.runner.launch = timed  # type: ignore[method-assign]
    ask(engine, "talker", 4, max_tokens=100)
    gaps, last = [], 0.0
    for step in range(100):
        if step in (10, 20):
            ask(engine, f"long {step}", 300)
        for out in engine.step():
            if out.request_id == "talker":
                gaps.append(clock.now - last)
                last = clock.now
    assert engine.idle or len(gaps) > 90
    assert max(gaps[1:]) <= 0.060 and max(gaps) > 0.040, "below the target, and not by far"


# ---- urgent requests ----------------------------------------------------------------------------------------


def paced(seconds: float) -> Pace:
    """Urgent prompts of 256 tokens take so long."""
    pace, urgent = Pace(target=0.050), step_of(256, 0)
    urgent.urgent = True
    pace.observe(urgent, seconds)
    return pace


def test_before_anything_is_known_chunks_are_half_of_a_usual_prompt() -> None:
    pace = Pace(target=0.050)
    assert (
        pace.polite(1000, 1) == Pace.NOMINAL
        and pace.polite(1000, 2) == Pace.NOMINAL // 2
        and pace.polite(50, 1) == 50
    )


def test_a_chunk_is_what_an_urgent_request_may_wait_for() -> None:
    pace = paced(0.060)
    sizes = settle(pace, lambda: pace.polite(1000, 1), lambda n: 0.010 + 0.0002 * n)
    assert max(sizes) == sizes[-1] == 96, (
        "half of what it takes itself: 30 ms, in which 100 tokens are computed"
    )
    assert pace.polite(1000, 2) == 24, "less when two steps are in flight: 15 ms, in which 25 are"


def test_steps_are_not_cut_for_less_than_a_tenth() -> None:
    pace = paced(0.001)
    sizes = settle(pace, lambda: pace.polite(1000, 1), lambda n: 0.010 + 0.0001 * n)
    assert sizes[-1] == 24, "16 tokens make 11.6 ms, and a tenth more is 12.8"


def test_where_tokens_cost_nothing_chunks_do_not_shrink_to_nothing() -> None:
    """Steps with prompts take 8 ms whatever is in them, those without 4."""
    pace = paced(0.009)
    assert settle(pace, lambda: pace.polite(1000, 1), lambda n: 0.008 if n else 0.004)[-1] == 1000


def test_a_size_that_costs_a_jump_more_is_tried_again_but_rarely() -> None:
    pace = paced(0.010)
    sizes = settle(pace, lambda: pace.polite(1000, 1), lambda n: 0.005 if n <= 128 else 0.009, 1000)
    assert sizes[-1] == 128 and 5 <= sizes.count(192) <= 12 and max(sizes) == 192


# ---- riding along ---------------------------------------------------------------------------------------


def run_offline(
    replies: list[int], prompt: int = 8, offline: bool = True, rows: int = 64, **options: Any
) -> tuple[Engine, list[int]]:
    """All of them at once, run to their end: tokens of each step."""
    engine = make_engine(
        2000, 4, rows=rows, budget=256, depth=1, max_len=300, **{"piggyback_tokens": 24, **options}
    )
    for i, reply in enumerate(replies):
        ask(engine, f"r{i}", length=prompt, max_tokens=reply, offline=offline)
    launch, sizes = engine.runner.launch, list[int]()

    def counted(plan: Plan) -> Any:
        sizes.append(plan.num_tokens)
        return launch(plan)

    engine.runner.launch = counted  # type: ignore[method-assign]
    drain(engine)
    return engine, [n for n in sizes if n]


def test_prompts_ride_along_and_all_end_with_the_longest() -> None:
    replies = list(range(200, 8, -4))
    _, hurried = run_offline(replies, offline=False)
    _, spread = run_offline(replies, piggyback_tokens=56)
    # a prompt that is due comes whole
    assert max(hurried) == 256 and spread[:10] == [56] * 10 and max(spread) <= 56 + 8
    assert len(spread) <= 202
    assert sum(spread) == sum(hurried) == sum(8 + n - 1 for n in replies)


def test_where_all_replies_are_as_long_nobody_waits() -> None:
    for prompt in (8, 30):
        assert run_offline([40] * 32, prompt)[1] == run_offline([40] * 32, prompt, offline=False)[1]


def test_one_who_is_in_a_hurry_hurries_all() -> None:
    engine = make_engine(2000, 4, rows=64, budget=256, depth=1, max_len=300, piggyback_tokens=24)
    for i in range(40):
        ask(engine, f"r{i}", length=8, max_tokens=200 - 4 * i, offline=True)
    assert engine.scheduler.plan().num_tokens == 24
    ask(engine, "now", length=8, max_tokens=4)
    assert engine.scheduler.plan().num_tokens == 256


def test_the_longest_last_is_not_late() -> None:
    """In whatever order they come: what is due is computed at once."""
    replies = list(range(12, 204, 4))
    assert len(run_offline(replies)[1]) <= len(run_offline(replies, offline=False)[1]) + 4


def test_with_fewer_rows_than_requests_nobody_is_held_back() -> None:
    replies = sorted((n % 37 + 20 for n in range(300)), reverse=True)
    offline, hurried = (
        run_offline(replies, offline=p, rows=16, piggyback_tokens=24)[1] for p in (True, False)
    )
    assert offline[:200] == hurried[:200] and len(offline) <= len(hurried) + 1


def test_where_more_decode_than_ride_nobody_is_held_back() -> None:
    replies = [200] * 30 + list(range(190, 100, -10))
    assert max(run_offline(replies)[1]) >= 30 * 8


@pytest.mark.parametrize(
    "options",
    [
        {"piggyback_tokens": 0},
        {"policy": "priority"},
        {"batching": "static"},
        {"batching": "adaptive"},
    ],
)
def test_prompts_ride_along_only_where_batching_is_continuous(options: dict[str, Any]) -> None:
    engine = make_engine(200, 4, rows=16, budget=64, depth=1, **{"piggyback_tokens": 8, **options})
    assert engine.scheduler.piggyback is None
