"""How many prompt tokens a step computes: the latency target, urgent requests, piggybacking."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from octavo.core.engine import Engine
from octavo.core.step_budget import Piggyback, StepTimes
from octavo.types import Item, Plan
from tests.core.test_policy import add_request, drain
from tests.workloads import Clock, make_engine

# ---- latency target ------------------------------------------------------------------------------


def step_of(prefill: int, decode: int) -> Plan:
    items = [Item(i, 0, i, None, 1, True, 10) for i in range(decode)]
    return Plan(1, items=items + ([Item(99, 0, 99, 0, prefill, True, prefill)] if prefill else []))


def settle(
    times: StepTimes, choose: Callable[[], int], cost: Callable[[int], float], steps: int = 60
) -> list[int]:
    """The sizes that it comes to, if steps take what `cost` says of their prompt tokens."""
    sizes = []
    for _ in range(steps):
        sizes.append(choose())
        times.observe(step_of(0, 8), cost(0))
        times.observe(step_of(sizes[-1], 8), cost(sizes[-1]))
    return sizes


def test_the_chunk_is_what_fits_the_target() -> None:
    times = StepTimes()
    sizes = settle(times, lambda: times.chunk_within(0.050, 1000), lambda n: 0.010 + 0.0002 * n)
    assert sizes[:4] == [16, 24, 32, 48], (
        "little, as long as nothing is known, and one size more each time"
    )
    assert max(sizes) == sizes[-1] == 192, "10 ms, and 0.2 ms for each token: 200 would fit"
    assert times.chunk_within(0.050, 64) == 64
    assert settle(times, lambda: times.chunk_within(0.050, 1000), lambda n: 0.060)[-1] == 16, (
        "the target is out of reach, but prompts get on"
    )


def test_the_chunk_follows_a_machine_that_changes() -> None:
    times = StepTimes()
    for each, size in ((0.0001, 384), (0.001, 32), (0.0001, 384)):
        assert (
            settle(
                times,
                lambda: times.chunk_within(0.050, 1000),
                lambda n, each=each: 0.010 + each * n,
                300,
            )[-1]
            == size
        )  # type: ignore[misc]


def test_one_slow_step_changes_nothing() -> None:
    times = StepTimes()
    size = settle(times, lambda: times.chunk_within(0.050, 1000), lambda n: 0.010 + 0.0002 * n)[-1]
    times.observe(step_of(size, 8), 1.0)
    assert times.chunk_within(0.050, 1000) == size


@pytest.mark.parametrize("depth", [1, 2])
def test_token_to_token_times_stay_below_the_target(depth: int) -> None:
    """A runner that takes 5 ms a step, 1 ms a sequence and 1 ms a prompt token; the budget alone would
    allow steps of 250 ms."""
    clock = Clock()
    engine = make_engine(
        500,
        4,
        slots=16,
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
    add_request(engine, "talker", 4, max_tokens=100)
    gaps, last = [], 0.0
    for step in range(100):
        if step in (10, 20):
            add_request(engine, f"long {step}", 300)
        for out in engine.step():
            if out.request_id == "talker":
                gaps.append(clock.now - last)
                last = clock.now
    assert engine.idle or len(gaps) > 90
    assert max(gaps[1:]) <= 0.060 and max(gaps) > 0.040, "below the target, and not by far"


# ---- urgent requests -----------------------------------------------------------------------------


def with_urgent_prompts(seconds: float) -> StepTimes:
    """Urgent prompts of 256 tokens take so long."""
    times, urgent = StepTimes(), step_of(256, 0)
    urgent.urgent = True
    times.observe(urgent, seconds)
    return times


def test_before_anything_is_known_chunks_are_half_of_a_usual_prompt() -> None:
    times = StepTimes()
    assert (
        times.background_chunk(1000, 1) == StepTimes.DEFAULT_BACKGROUND_TOKENS
        and times.background_chunk(1000, 2) == StepTimes.DEFAULT_BACKGROUND_TOKENS // 2
        and times.background_chunk(50, 1) == 50
    )


def test_a_chunk_is_what_an_urgent_request_may_wait_for() -> None:
    times = with_urgent_prompts(0.060)
    sizes = settle(times, lambda: times.background_chunk(1000, 1), lambda n: 0.010 + 0.0002 * n)
    assert max(sizes) == sizes[-1] == 96, (
        "half of what it takes itself: 30 ms, in which 100 tokens are computed"
    )
    assert times.background_chunk(1000, 2) == 24, (
        "less when two steps are in flight: 15 ms, in which 25 are"
    )


def test_steps_are_not_cut_for_less_than_a_tenth() -> None:
    times = with_urgent_prompts(0.001)
    sizes = settle(times, lambda: times.background_chunk(1000, 1), lambda n: 0.010 + 0.0001 * n)
    assert sizes[-1] == 24, "16 tokens make 11.6 ms, and a tenth more is 12.8"


def test_where_tokens_cost_nothing_chunks_do_not_shrink_to_nothing() -> None:
    """Steps with prompts take 8 ms whatever is in them, those without 4."""
    times = with_urgent_prompts(0.009)
    assert (
        settle(times, lambda: times.background_chunk(1000, 1), lambda n: 0.008 if n else 0.004)[-1]
        == 1000
    )


def test_a_size_that_costs_a_jump_more_is_tried_again_but_rarely() -> None:
    times = with_urgent_prompts(0.010)
    sizes = settle(
        times, lambda: times.background_chunk(1000, 1), lambda n: 0.005 if n <= 128 else 0.009, 1000
    )
    assert sizes[-1] == 128 and 5 <= sizes.count(192) <= 12 and max(sizes) == 192


# ---- piggybacking --------------------------------------------------------------------------------


def run_offline(
    replies: list[int], prompt: int = 8, offline: bool = True, slots: int = 64, **options: Any
) -> tuple[Engine, list[int]]:
    """All of them at once, run to their end: tokens of each step."""
    engine = make_engine(
        2000,
        4,
        slots=slots,
        budget=256,
        depth=1,
        max_len=300,
        **{"piggyback_tokens": 24, **options},
    )
    for i, reply in enumerate(replies):
        add_request(engine, f"r{i}", length=prompt, max_tokens=reply, offline=offline)
    launch, sizes = engine.runner.launch, list[int]()

    def counted(plan: Plan) -> Any:
        sizes.append(plan.num_tokens)
        return launch(plan)

    engine.runner.launch = counted  # type: ignore[method-assign]
    drain(engine)
    return engine, [n for n in sizes if n]


def test_offline_prompts_piggyback_and_all_replies_end_with_the_longest() -> None:
    replies = list(range(200, 8, -4))
    _, hurried = run_offline(replies, offline=False)
    _, spread = run_offline(replies, piggyback_tokens=56)
    # a prompt that is due comes whole
    assert max(hurried) == 256 and spread[:10] == [56] * 10 and max(spread) <= 56 + 8
    assert len(spread) <= 202
    assert sum(spread) == sum(hurried) == sum(8 + n - 1 for n in replies)


def test_no_prompt_is_delayed_if_all_replies_have_one_length() -> None:
    for prompt in (8, 30):
        assert run_offline([40] * 32, prompt)[1] == run_offline([40] * 32, prompt, offline=False)[1]


def test_an_online_request_ends_the_delay_of_all() -> None:
    engine = make_engine(2000, 4, slots=64, budget=256, depth=1, max_len=300, piggyback_tokens=24)
    for i in range(40):
        add_request(engine, f"r{i}", length=8, max_tokens=200 - 4 * i, offline=True)
    assert engine.scheduler.plan().num_tokens == 24
    add_request(engine, "now", length=8, max_tokens=4)
    assert engine.scheduler.plan().num_tokens == 256


def test_the_longest_last_is_not_late() -> None:
    """In whatever order they come: what is due is computed at once."""
    replies = list(range(12, 204, 4))
    assert len(run_offline(replies)[1]) <= len(run_offline(replies, offline=False)[1]) + 4


def test_no_prompt_is_delayed_if_there_are_fewer_slots_than_requests() -> None:
    replies = sorted((n % 37 + 20 for n in range(300)), reverse=True)
    offline, hurried = (
        run_offline(replies, offline=p, slots=16, piggyback_tokens=24)[1] for p in (True, False)
    )
    assert offline[:200] == hurried[:200] and len(offline) <= len(hurried) + 1


def test_no_prompt_is_delayed_if_more_sequences_decode_than_the_piggyback_limit() -> None:
    replies = [200] * 30 + list(range(190, 100, -10))
    assert max(run_offline(replies)[1]) >= 30 * 8


@pytest.mark.parametrize(
    "options",
    [
        {"piggyback_tokens": 0},
        {"policy": "priority"},
        {"policy": "shortest"},
        {"batching": "static"},
        {"batching": "adaptive"},
    ],
)
def test_offline_prompts_piggyback_only_under_fcfs_and_continuous_batching(
    options: dict[str, Any],
) -> None:
    engine = make_engine(200, 4, slots=16, budget=64, depth=1, **{"piggyback_tokens": 8, **options})
    assert not isinstance(engine.scheduler.limiter.prompt_budget, Piggyback)


def test_offline_requests_that_arrive_together_start_with_the_longest_reply() -> None:
    clock = Clock()
    engine = make_engine(200, 4, slots=16, budget=64, depth=1, clock=clock, piggyback_tokens=8)
    add_request(engine, "online", max_tokens=1)
    for name, reply in (("short", 2), ("long", 9), ("middle", 5), ("as long", 9)):
        add_request(engine, name, max_tokens=reply, offline=True)
    clock.sleep(1.0)
    add_request(engine, "another list", max_tokens=20, offline=True)
    order = [seq.request.id for seq in engine.scheduler.waiting]
    assert order == ["online", "long", "as long", "middle", "short", "another list"]


def test_offline_requests_start_in_the_order_of_arrival_without_piggybacking() -> None:
    engine = make_engine(200, 4, slots=16, budget=64, depth=1)
    for name, reply in (("short", 2), ("long", 9)):
        add_request(engine, name, max_tokens=reply, offline=True)
    assert [seq.request.id for seq in engine.scheduler.waiting] == ["short", "long"]
