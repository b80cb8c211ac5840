"""Each policy alone: the order of requests, which sequences are paused or preempted, and that every
request ends."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count
from typing import Any

import pytest

from octavo.core import reasons
from octavo.core.engine import Engine
from octavo.core.policy import POLICIES, Policy, find_policy
from octavo.errors import InvalidRequest
from octavo.events import Admitted, NotAdmitted, Preempted
from octavo.params import SamplingParams
from octavo.types import Plan, Request, Sequence
from tests import oracle
from tests.fake_runner import FakeDisk
from tests.workloads import Clock, make_engine


def add_request(
    engine: Engine,
    name: str,
    length: int = 4,
    max_tokens: int = 4,
    prompt: list[int] | None = None,
    **fields: Any,
) -> Request:
    """Queue a request that arrives now."""
    g = random.Random(name)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1)
    request = Request(
        name, prompt or [g.randrange(1, oracle.VOCAB) for _ in range(length)], params, **fields
    )
    request.arrival = engine.scheduler.clock()
    engine.add(request)
    return request


def drain(engine: Engine, limit: int = 2000) -> list[str]:
    """Run all requests and return their names in the order in which they began. Every token is
    compared with the oracle's."""
    begun: list[str] = []
    requests = {
        r[0].request.id: r[0].request for r in engine.scheduler.sequences_by_request.values()
    }
    got: dict[str, list[int]] = {}
    while not engine.idle:
        for out in engine.step():
            got.setdefault(out.request_id, []).extend(out.tokens)
        engine.scheduler.check()
        for seq in engine.scheduler.running:
            if seq.request.id not in begun:
                begun.append(seq.request.id)
        limit -= 1
        assert limit > 0, "no progress"
    for name, request in requests.items():
        assert got[name] == oracle.generate(request.prompt, request.params, 1)[-len(got[name]) :]
    return begun


def one_slot_engine(policy: str, clock: Clock | None = None, **options: Any) -> Engine:
    return make_engine(
        100, 4, slots=1, budget=64, depth=1, max_len=200, clock=clock, policy=policy, **options
    )


# ---- orders --------------------------------------------------------------------------------------


def test_first_come_first_served_ignores_priority_length_and_deadline() -> None:
    engine = one_slot_engine("fcfs")
    add_request(engine, "long", 40, priority=9)
    add_request(engine, "short", 2, priority=-9, deadline=1.0)
    assert drain(engine) == ["long", "short"]


def test_lower_priorities_come_first_and_equal_ones_by_arrival() -> None:
    engine = one_slot_engine("priority")
    for name, priority in (("c", 5), ("b", 0), ("d", 5), ("a", -1)):
        add_request(engine, name, priority=priority)
    assert drain(engine) == ["a", "b", "c", "d"]


def test_a_request_that_waited_long_enough_is_not_overtaken() -> None:
    clock = Clock()
    engine = one_slot_engine("priority", clock)
    add_request(engine, "old", priority=1)
    clock.sleep(9.9)
    add_request(engine, "just in time")
    clock.sleep(0.2)
    add_request(engine, "too late")
    assert drain(engine) == ["just in time", "old", "too late"]


def test_short_prompts_come_first_unless_a_long_one_has_waited() -> None:
    clock = Clock()
    engine = one_slot_engine("shortest", clock)
    add_request(engine, "100", 100)
    add_request(engine, "50", 50)
    add_request(engine, "5", 5)
    clock.sleep(2.0)  # 100 tokens are worth one second
    add_request(engine, "later", 5)
    assert drain(engine) == ["5", "50", "100", "later"]


def test_the_earliest_deadline_comes_first_and_no_deadline_means_one_minute() -> None:
    engine = one_slot_engine("deadline")
    for name, deadline in (
        ("none", None),
        ("late", 100.0),
        ("soon", 5.0),
        ("sooner", 1.0),
        ("past", -7.0),
    ):
        add_request(engine, name, deadline=deadline)
    assert drain(engine) == ["past", "sooner", "soon", "none", "late"]


def test_tenants_take_turns_whoever_sends_more() -> None:
    engine = one_slot_engine("fair")
    for i in range(6):
        add_request(engine, f"greedy {i}", tenant="greedy")
    for i in range(2):
        add_request(engine, f"modest {i}", tenant="modest")
    order = drain(engine)
    assert order[:4] in (
        ["greedy 0", "modest 0", "greedy 1", "modest 1"],
        ["modest 0", "greedy 0", "modest 1", "greedy 1"],
    ), order


def test_fair_shares_count_tokens_and_not_requests() -> None:
    engine = one_slot_engine("fair")
    for i in range(8):
        add_request(engine, f"long {i}", 60, max_tokens=20, tenant="long")
        add_request(engine, f"short {i}", 6, max_tokens=2, tenant="short")
    order = drain(engine)
    assert order.index("short 7") <= order.index("long 2"), (
        "eight short requests have fewer tokens than one long request"
    )


def test_idle_time_earns_a_tenant_nothing() -> None:
    engine = one_slot_engine("fair")
    for i in range(5):
        add_request(engine, f"busy {i}", tenant="busy")
    drain(engine)
    for i in range(3):
        add_request(engine, f"busy again {i}", tenant="busy")
    for i in range(3):
        add_request(engine, f"newcomer {i}", tenant="new")
    order = drain(engine)
    assert order.index("busy again 0") <= 1 and order.index("busy again 1") <= 3, (
        "a tenant does not wait for the tokens it was served before"
    )


def test_a_tenant_is_charged_for_computed_tokens_and_for_a_shared_prompt_once() -> None:
    engine = one_slot_engine("fair")
    add_request(engine, "busy", 10, max_tokens=5, tenant="a")
    add_request(engine, "gave up waiting", 50, tenant="b")
    engine.step()
    engine.abort("gave up waiting")
    drain(engine)
    assert engine.scheduler.policy.served == {"a": 15, "b": 0}  # type: ignore[attr-defined]
    engine.add(
        Request(
            "three",
            [1] * 20,
            SamplingParams(n=3, max_tokens=4, ignore_eos=True, seed=1),
            tenant="c",
        )
    )
    while not engine.idle:
        engine.step()
    assert engine.scheduler.policy.served["c"] - 15 == 20 + 3 * 4  # type: ignore[attr-defined]


def test_the_served_tokens_of_idle_tenants_are_forgotten() -> None:
    engine = one_slot_engine("fair")
    for i in range(50):
        add_request(engine, f"{i}", tenant=f"key {i}")
        drain(engine)
    assert len(engine.scheduler.policy.served) < 5  # type: ignore[attr-defined]


numbers = count()


def test_a_served_tenant_does_not_wait_for_ever_behind_new_tenants() -> None:
    """There are always requests of a tenant that was served nothing yet. A tenant that was served
    comes next all the same, in time."""
    engine = make_engine(60, 4, 2, 16, 1, policy="fair")
    scheduler = engine.scheduler

    def ended_after(name: str, max_steps: int) -> int:
        for step in range(max_steps):
            while len(scheduler.sequences_by_request) < 5:
                i = next(numbers)
                add_request(engine, f"guest {i}", 3, max_tokens=2 + i % 5, tenant=f"guest {i}")
            if name in [out.request_id for out in engine.step() if out.finish_reason is not None]:
                return step
        raise AssertionError(f"{name} has not ended in {max_steps} steps")

    add_request(engine, "long", 9, max_tokens=50, tenant="K")
    ended_after("long", 500)
    add_request(engine, "again", 2, max_tokens=1, tenant="K")
    ended_after("again", 200)
    assert len(scheduler.policy.served) < 20  # type: ignore[attr-defined]


def keep_queued(engine: Engine, steps: int, **tenants: int) -> list[str]:
    """Keep this many requests of each tenant queued or running for `steps` steps. Return the names
    of the requests that ended."""
    ended = []
    for _ in range(steps):
        live = Counter(
            family[0].request.tenant for family in engine.scheduler.sequences_by_request.values()
        )
        for tenant, num_requests in tenants.items():
            for _ in range(num_requests - live[tenant]):
                i = next(numbers)
                add_request(engine, f"{tenant} {i}", 3, max_tokens=4 + i % 9, tenant=tenant)
        ended += [out.request_id for out in engine.step() if out.finish_reason is not None]
    return ended


@pytest.mark.parametrize("history", [100, 801, 1600, 1607])
def test_tokens_that_a_tenant_left_to_others_earn_it_nothing(history: int) -> None:
    """The tenant `much` uses what `little` leaves, for however long. Then `little` sends a batch,
    and a new tenant sends one request."""
    engine = make_engine(200, 4, 8, 64, 1, policy="fair")
    keep_queued(engine, history, much=6, little=2)
    for i in range(500):
        add_request(engine, f"batch {i}", 3, max_tokens=8, tenant="little")
    add_request(engine, "new", 3, max_tokens=8, tenant="new")
    assert "new" in keep_queued(engine, 40)


@pytest.mark.parametrize("history", [100, 801, 1600, 1607])
def test_tokens_taken_while_no_other_tenant_waited_do_not_count(history: int) -> None:
    """The tenant `quiet` has one long reply, and is the least served tenant all the time."""
    engine = make_engine(2000, 4, 16, 64, 1, policy="fair", max_len=3000)
    add_request(engine, "long", 3, max_tokens=2900, tenant="quiet")
    keep_queued(engine, history, much=10, little=2)
    for i in range(1000):
        add_request(engine, f"batch {i}", 3, max_tokens=8, tenant="little")
    add_request(engine, "one", 3, max_tokens=8, tenant="much")
    assert "one" in keep_queued(engine, 30)


@pytest.mark.parametrize("preempted", [False, True])
def test_a_preempted_tenant_keeps_its_served_tokens(preempted: bool) -> None:
    engine = make_engine(700, 4, 4, 64, 1, policy="fair", max_len=2500)
    add_request(engine, "long", 3, max_tokens=2400, tenant="P")
    keep_queued(engine, 1500, A=4, B=4)
    if preempted:
        engine.scheduler._preempt(
            engine.scheduler.sequences_by_request["long"][0], "no block was available"
        )
    for i in range(300):
        add_request(engine, f"P {i}", 3, max_tokens=8, tenant="P")
    ended = Counter(name[0] for name in keep_queued(engine, 200, A=4, B=4))
    assert min(ended["A"], ended["B"]) > ended["P"] > 5, "P has one more slot all the time"


def test_the_longest_cached_prefix_comes_first() -> None:
    engine = one_slot_engine("prefix")
    known = add_request(engine, "known", 40).prompt
    drain(engine)
    add_request(engine, "stranger", 40)
    add_request(engine, "half", prompt=known[:20] + [1] * 20)
    add_request(engine, "same", prompt=[*known[:39], 1])
    assert drain(engine) == ["same", "half", "stranger"]


def test_requests_that_share_a_prompt_come_together() -> None:
    """The requests of two groups arrive in turns. All of one group are served before the other
    group, whose blocks evict those of the first."""
    engine = make_engine(14, 4, slots=1, budget=64, depth=1, max_len=50, policy="prefix")
    groups = {name: [random.Random(name).randrange(1, 50) for _ in range(40)] for name in "AB"}
    for i in range(3):
        for name, prompt in groups.items():
            add_request(engine, f"{name}{i}", prompt=[*prompt, 1 + i], max_tokens=2)
    assert [name[0] for name in drain(engine)] == list("AAABBB")
    cached = engine.scheduler.counters.cached_tokens
    engine = make_engine(14, 4, slots=1, budget=64, depth=1, max_len=50)
    for i in range(3):
        for name, prompt in groups.items():
            add_request(engine, f"{name}{i}", prompt=[*prompt, 1 + i], max_tokens=2)
    drain(engine)
    assert cached > engine.scheduler.counters.cached_tokens, (
        "in order of arrival the groups evict each other's blocks"
    )


# ---- preemption ----------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_high_priority_request_preempts_for_a_slot(depth: int) -> None:
    engine = make_engine(100, 4, slots=2, budget=64, depth=depth, policy="priority")
    add_request(engine, "low", max_tokens=40, priority=3)
    add_request(engine, "lower", max_tokens=40, priority=4)
    for _ in range(5):
        engine.step()
    add_request(engine, "high", max_tokens=3)
    plan = engine.scheduler.plan()
    assert {s.request.id for s in engine.scheduler.running} == {"low", "high"}
    assert [row.seq_id for row in plan.slot_fills] == [3] and len(plan.items) == 1, (
        "the request begins in the plan that preempts for it"
    )
    assert engine.scheduler.counters.preemptions == 1
    engine.scheduler.check()


def test_a_high_priority_request_preempts_no_more_than_it_needs() -> None:
    engine = make_engine(16, 4, slots=8, budget=64, depth=1, policy="priority")
    for name in "abcd":
        add_request(engine, name, 12, max_tokens=4, priority=1)
    engine.step()
    assert not engine.scheduler.waiting
    add_request(engine, "high", 20, max_tokens=2)
    engine.step()
    assert "high" in {s.request.id for s in engine.scheduler.running}
    assert engine.scheduler.counters.preemptions == 1, (
        "five blocks are needed, four are free; the others pause"
    )
    drain(engine)


def test_the_victim_is_the_cheapest_to_recompute_of_the_lowest_priority() -> None:
    engine = make_engine(100, 4, slots=3, budget=64, depth=1, max_len=200, policy="priority")
    add_request(engine, "low and long", 40, max_tokens=20, priority=2)
    add_request(engine, "low and short", 5, max_tokens=20, priority=2)
    add_request(engine, "shortest", 2, max_tokens=20, priority=1)
    engine.step()
    engine.step()
    add_request(engine, "high")
    engine.step()
    assert [s.request.id for s in engine.scheduler.waiting] == ["low and short"]


def test_equal_priorities_do_not_preempt_each_other() -> None:
    engine = one_slot_engine("priority")
    add_request(engine, "first", max_tokens=10)
    engine.step()
    add_request(engine, "second", max_tokens=1)
    drain(engine)
    assert engine.scheduler.counters.preemptions == 0


def test_no_sequence_pauses_where_it_would_not_help() -> None:
    engine = make_engine(15, 4, slots=8, budget=64, depth=1, policy="priority")
    add_request(engine, "first", 36, max_tokens=9)  # keeps 9 of 15 blocks, then more
    add_request(engine, "low", 8, max_tokens=3, priority=1)
    engine.step()
    add_request(engine, "high", 30, max_tokens=2)
    engine.step()
    assert engine.scheduler.counters.preemptions == 0, (
        "without the blocks of `first` there is no room for `high`"
    )
    drain(engine)


def test_an_urgent_prompt_does_not_wait_for_a_long_one_being_computed() -> None:
    engine = make_engine(100, 4, slots=4, budget=8, depth=1, max_len=200, policy="priority")
    add_request(engine, "long", 150, priority=1)
    engine.step()
    add_request(engine, "urgent", 8)
    plan = engine.scheduler.plan()
    assert [(item.num_tokens, item.sample) for item in plan.items] == [(8, True)], (
        "the urgent prompt gets the whole budget"
    )
    assert engine.scheduler.counters.preemptions == 0, (
        "there was room: no sequence had to be preempted"
    )


def test_a_deadline_preempts_a_request_without_one_but_not_the_reverse() -> None:
    engine = one_slot_engine("deadline")
    add_request(engine, "patient", max_tokens=30)
    engine.step()
    add_request(engine, "also patient")
    engine.step()
    assert engine.scheduler.counters.preemptions == 0
    add_request(engine, "hurried", deadline=3.0)
    engine.step()
    assert [s.request.id for s in engine.scheduler.running] == ["hurried"]
    drain(engine)


def test_recomputed_tokens_are_counted() -> None:
    engine = one_slot_engine("priority")
    add_request(engine, "low", 10, max_tokens=20, priority=1)
    for _ in range(4):
        engine.step()  # 10 of the prompt, and 3 more positions
    add_request(engine, "high", 4, max_tokens=1)
    drain(engine)
    count = engine.scheduler.counters
    assert count.preemptions == 1 and count.recomputed_tokens == 1, (
        "13 positions, of which three blocks of four stay in the prefix cache"
    )
    assert count.computed_tokens == 10 + 19 + 4 + 1


# ---- pausing -------------------------------------------------------------------------------------


def names(engine: Engine, plan: Plan) -> list[str]:
    return [engine.scheduler.live[item.seq_id].request.id for item in plan.items]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_urgent_prompt_is_computed_alone_and_the_others_go_on_where_they_were(
    depth: int,
) -> None:
    engine = make_engine(100, 4, slots=8, budget=32, depth=depth, max_len=200, policy="priority")
    plans: list[Plan] = []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan: plans.append(plan) or launch(plan)  # type: ignore[method-assign,func-returns-value]
    add_request(engine, "talks", 4, max_tokens=20, priority=1)
    add_request(engine, "reads", 100, priority=1)
    engine.step()
    add_request(engine, "waits", priority=1)
    add_request(engine, "urgent", 40)
    name = {s[0].id: id for id, s in engine.scheduler.sequences_by_request.items()}
    drain(engine)  # compares tokens with the oracle's
    steps = [[name[item.seq_id] for item in plan.items] for plan in plans]
    assert steps[:4] == [
        ["talks", "reads"],
        ["urgent"],
        ["urgent"],
        ["urgent", "talks", "waits", "reads"],
    ]
    assert [plan.urgent for plan in plans[:4]] == [False, True, True, False]
    assert engine.scheduler.counters.preemptions == 0 and engine.scheduler.counters.paused == 4


@pytest.mark.parametrize("slots", [1, 4])
def test_nothing_is_preempted_for_an_urgent_prompt_while_it_is_read_from_disk(slots: int) -> None:
    disk = FakeDisk(slowest=4, lists=0.0)

    def engine_with_disk() -> Engine:
        return make_engine(
            30, 4, slots=slots, budget=64, depth=1, policy="priority", host=30, disk=disk
        )

    first = engine_with_disk()
    prompt = add_request(first, "urgent", 33, max_tokens=1).prompt
    drain(first)
    for plan in (first.scheduler.flush(), Plan(99), Plan(100), Plan(101), Plan(102)):
        first.scheduler.commit(plan, first.runner.launch(plan).wait())
    assert len(disk.records) == 8
    engine = engine_with_disk()
    add_request(engine, "low", 40, max_tokens=15, priority=1)
    if slots > 1:
        add_request(engine, "also low", 40, max_tokens=15, priority=1)
    for _ in range(2):
        engine.step()
    preempted_in: list[int] = []
    admitted_in: list[int] = []
    waited_in: list[int] = []
    events = engine.events
    events.subscribe(lambda event: preempted_in.append(event.step), Preempted)
    events.subscribe(
        lambda event: event.reason == reasons.DISK_READ and waited_in.append(event.step),
        NotAdmitted,
    )
    add_request(engine, "urgent", prompt=prompt)
    events.subscribe(
        lambda event: event.seq.request.id == "urgent" and admitted_in.append(event.step), Admitted
    )
    computed = engine.scheduler.counters.computed_tokens
    while not admitted_in:
        running = len(engine.scheduler.running)
        engine.step()
        engine.scheduler.check()
        if not admitted_in:
            assert len(engine.scheduler.running) == running, "they decode while the disk reads"
    assert engine.scheduler.counters.computed_tokens > computed
    assert engine.scheduler.counters.tiers.fetches > 0
    assert len(preempted_in) <= 1 and set(preempted_in) <= set(admitted_in)
    if slots > 1:
        assert waited_in
    drain(engine)


def test_an_urgent_request_takes_blocks_that_several_victims_share() -> None:
    engine = make_engine(14, 4, slots=8, budget=64, depth=1, policy="priority")
    params = SamplingParams(n=3, max_tokens=9, ignore_eos=True)
    engine.add(Request("low", list(range(1, 34)), params, priority=1))
    for _ in range(3):
        engine.step()
    assert len(engine.scheduler.decoding) == 3
    add_request(engine, "urgent", 40, max_tokens=1)
    plan = engine.scheduler.plan()
    assert names(engine, plan) == ["urgent"]
    assert engine.scheduler.counters.preemptions == 3


def test_prompts_are_not_limited_before_the_first_urgent_request() -> None:
    engine = make_engine(200, 4, slots=8, budget=400, depth=1, max_len=600, policy="priority")
    add_request(engine, "long", 500)
    assert engine.scheduler.plan().num_tokens == 400


def test_equal_priorities_do_not_pause_each_other() -> None:
    engine = make_engine(100, 4, slots=8, budget=32, depth=1, policy="priority")
    add_request(engine, "first", priority=-1, max_tokens=20)
    engine.step()
    add_request(engine, "second", priority=-1)
    plan = engine.scheduler.plan()
    assert names(engine, plan) == ["first", "second"] and not plan.urgent


def test_a_sequence_that_has_waited_long_enough_does_not_pause() -> None:
    clock = Clock()
    engine = make_engine(100, 4, slots=8, budget=32, depth=1, clock=clock, policy="priority")
    add_request(engine, "old", priority=1, max_tokens=20)
    clock.sleep(9)
    add_request(engine, "young", priority=1, max_tokens=20)
    engine.step()
    clock.sleep(2)
    add_request(engine, "urgent")
    assert names(engine, engine.scheduler.plan()) == ["old", "urgent"], "a level is ten seconds"


def test_decoding_equals_pause_one_step_for_an_urgent_prompt_and_not_two() -> None:
    engine = make_engine(100, 4, slots=8, budget=32, depth=1, max_len=200, policy="priority")
    add_request(engine, "low", priority=1, max_tokens=30)
    add_request(engine, "first", max_tokens=30)
    for _ in range(2):
        engine.step()
    add_request(engine, "second", 120)
    steps = []
    for _ in range(5):
        steps.append(names(engine, plan := engine.scheduler.plan()))
        engine.scheduler.commit(plan, engine.runner.launch(plan).wait())
    assert steps[:4] == [["second"], ["first", "second"], ["second"], ["first", "second"]]
    assert steps[4] == ["first", "second", "low"]


def test_a_prompt_with_a_deadline_pauses_only_requests_without_one() -> None:
    engine = make_engine(100, 4, slots=8, budget=32, depth=1, policy="deadline")
    add_request(engine, "patient", max_tokens=20)
    add_request(engine, "late", max_tokens=20, deadline=50.0)
    for _ in range(2):
        engine.step()
    add_request(engine, "soon", 40, deadline=5.0)
    assert [names(engine, engine.scheduler.plan()) for _ in range(2)] == [
        ["soon"],
        ["late", "soon"],
    ]


def test_no_sequence_pauses_for_a_prompt_that_cannot_start() -> None:
    engine = make_engine(15, 4, slots=8, budget=64, depth=1, policy="priority")
    add_request(engine, "first", 36, max_tokens=9)
    engine.step()
    add_request(engine, "low", 4, max_tokens=9, priority=1)
    engine.step()
    add_request(engine, "high", 30, max_tokens=2)  # there are no blocks for it
    assert names(engine, engine.scheduler.plan()) == ["first", "low"]


def test_an_urgent_request_that_waits_for_a_lower_ones_prefix_stops_nothing() -> None:
    """`like` waits for the prefix that `low` computes, and `other`, which begins the same way,
    waits behind `like`. If `low` paused for `other`, none of them would ever go on."""
    engine = make_engine(100, 4, slots=8, budget=8, depth=1, max_len=200, policy="priority")
    prompt = add_request(engine, "low", 80, priority=1).prompt
    engine.step()
    add_request(engine, "like", prompt=[*prompt[:70], 1])
    add_request(engine, "other", prompt=[*prompt[:12], *[2] * 40])
    assert set(drain(engine)) == {"low", "like", "other"}


# ---- starvation and livelock ---------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("blocks", [16, 40], ids=["one sequence's worth", "room"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_least_favoured_request_ends_though_favoured_ones_keep_coming(
    policy: str, blocks: int, depth: int
) -> None:
    clock = Clock()
    engine = make_engine(blocks, 4, slots=3, budget=16, depth=depth, clock=clock, policy=policy)
    names, alive = iter(range(100_000)), 0
    favoured = random.Random("warm").choices(range(1, 50), k=16)
    add_request(engine, "warm", prompt=favoured)
    drain(engine)
    add_request(engine, "unloved", 50, max_tokens=10, priority=1, tenant="greedy")
    for step in range(4000):
        while alive < 6:
            add_request(
                engine,
                f"{next(names)}",
                prompt=favoured,
                max_tokens=5,
                deadline=clock.now + 1,
                tenant=f"new {step}",
            )
            alive += 1
        for out in engine.step():
            alive -= out.finish_reason is not None
            if out.request_id == "unloved" and out.finish_reason is not None:
                return
        engine.scheduler.check()
        clock.sleep(0.05)  # so that a minute is 1,200 steps
    pytest.fail("it starved")


class Inverted(Policy):
    """Makes the worst choices that the interface allows: the latest request first, the most
    expensive victim, and every sequence preempts and pauses every other."""

    preempts_for_waiting = True

    def rank(self, seq: Sequence) -> float:
        return -seq.id

    def preempts(self, seq: Sequence, other: Sequence) -> bool:
        return True

    pauses = preempts

    def victim(self, weaker: list[Sequence]) -> Sequence:
        return max(weaker, key=lambda s: s.planned)


class Fickle(Inverted):
    """Ranks change with every call."""

    fixed_ranks = False

    def __init__(self) -> None:
        self.random = random.Random(1)

    def rank(self, seq: Sequence) -> float:
        return self.random.random()


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("name", ["Inverted", "Fickle"])
def test_any_policy_gets_through_a_finite_workload(name: str, depth: int) -> None:
    for seed in range(30):
        g = random.Random(seed)
        engine = make_engine(
            g.choice([15, 17, 30]), 4, g.choice([2, 4]), 4, depth, policy=f"{__name__}:{name}"
        )
        for i in range(12):
            add_request(engine, f"{i}", g.randrange(1, 40), g.randrange(1, 20))
            if i % 4 == 0:
                engine.step()
        drain(engine, limit=5000)


# ---- names ---------------------------------------------------------------------------------------


def test_a_policy_of_your_own_is_found_by_its_path() -> None:
    assert type(find_policy(f"{__name__}:Inverted")) is Inverted


@pytest.mark.parametrize(
    "name,message",
    [
        ("best", "unknown scheduling policy 'best': use fcfs, priority"),
        ("", "unknown scheduling policy"),
        ("no.such.module:P", "No module named 'no'"),
        ("octavo.core.policy:Nobody", "has no attribute 'Nobody'"),
        ("octavo.core.policy:POLICIES", "not a subclass"),
        (":x", "unknown scheduling policy"),
    ],
)
def test_a_name_that_is_no_policy_is_refused(name: str, message: str) -> None:
    with pytest.raises(InvalidRequest, match=message):
        find_policy(name)


@pytest.mark.parametrize(
    "fields",
    [{"priority": 2**31}, {"priority": 1.5}, {"priority": True}, {"deadline": float("nan")}],
)
def test_bad_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(fields))):
        add_request(one_slot_engine("priority"), "x", **fields)
