"""Each policy alone: who comes first, who gives way, that nobody starves and nothing goes round in
circles."""

from __future__ import annotations

import random
from collections import Counter
from itertools import count
from typing import Any

import pytest

from octavo.core.engine import Engine
from octavo.core.policy import POLICIES, Policy, find_policy
from octavo.errors import InvalidRequest
from octavo.params import SamplingParams
from octavo.types import Plan, Request, Sequence
from tests import oracle
from tests.workloads import Clock, make_engine


def ask(
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
    """Who began, in order. Every token is compared with the oracle's."""
    begun: list[str] = []
    asked = {r[0].request.id: r[0].request for r in engine.scheduler.sequences_by_request.values()}
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
    for name, request in asked.items():
        assert got[name] == oracle.generate(request.prompt, request.params, 1)[-len(got[name]) :]
    return begun


def one_row(policy: str, clock: Clock | None = None, **options: Any) -> Engine:
    return make_engine(
        100, 4, rows=1, budget=64, depth=1, max_len=200, clock=clock, policy=policy, **options
    )


# ---- orders --------------------------------------------------------------------------------------


def test_first_come_first_served_looks_at_nothing_else() -> None:
    engine = one_row("fcfs")
    ask(engine, "long", 40, priority=9)
    ask(engine, "short", 2, priority=-9, deadline=1.0)
    assert drain(engine) == ["long", "short"]


def test_lower_priorities_come_first_and_equal_ones_by_arrival() -> None:
    engine = one_row("priority")
    for name, priority in (("c", 5), ("b", 0), ("d", 5), ("a", -1)):
        ask(engine, name, priority=priority)
    assert drain(engine) == ["a", "b", "c", "d"]


def test_a_request_that_waited_long_enough_is_not_overtaken() -> None:
    clock = Clock()
    engine = one_row("priority", clock)
    ask(engine, "old", priority=1)
    clock.sleep(9.9)
    ask(engine, "just in time")
    clock.sleep(0.2)
    ask(engine, "too late")
    assert drain(engine) == ["just in time", "old", "too late"]


def test_short_prompts_come_first_unless_a_long_one_has_waited() -> None:
    clock = Clock()
    engine = one_row("shortest", clock)
    ask(engine, "100", 100)
    ask(engine, "50", 50)
    ask(engine, "5", 5)
    clock.sleep(2.0)  # 100 tokens are worth one second
    ask(engine, "later", 5)
    assert drain(engine) == ["5", "50", "100", "later"]


def test_the_earliest_deadline_comes_first_and_none_is_a_minute_away() -> None:
    engine = one_row("deadline")
    for name, deadline in (
        ("none", None),
        ("late", 100.0),
        ("soon", 5.0),
        ("sooner", 1.0),
        ("past", -7.0),
    ):
        ask(engine, name, deadline=deadline)
    assert drain(engine) == ["past", "sooner", "soon", "none", "late"]


def test_tenants_take_turns_whoever_sends_more() -> None:
    engine = one_row("fair")
    for i in range(6):
        ask(engine, f"greedy {i}", tenant="greedy")
    for i in range(2):
        ask(engine, f"modest {i}", tenant="modest")
    order = drain(engine)
    assert order[:4] in (
        ["greedy 0", "modest 0", "greedy 1", "modest 1"],
        ["modest 0", "greedy 0", "modest 1", "greedy 1"],
    ), order


def test_fair_shares_count_tokens_and_not_requests() -> None:
    engine = one_row("fair")
    for i in range(8):
        ask(engine, f"long {i}", 60, max_tokens=20, tenant="long")
        ask(engine, f"short {i}", 6, max_tokens=2, tenant="short")
    order = drain(engine)
    assert order.index("short 7") <= order.index("long 2"), (
        "eight short ones are less than one long one"
    )


def test_idle_time_earns_a_key_nothing() -> None:
    engine = one_row("fair")
    for i in range(5):
        ask(engine, f"busy {i}", tenant="busy")
    drain(engine)
    for i in range(3):
        ask(engine, f"busy again {i}", tenant="busy")
    for i in range(3):
        ask(engine, f"newcomer {i}", tenant="new")
    order = drain(engine)
    assert order.index("busy again 0") <= 1 and order.index("busy again 1") <= 3, (
        "it is not made to wait for what it had before"
    )


def test_a_key_pays_for_what_it_was_given_and_for_a_shared_prompt_once() -> None:
    engine = one_row("fair")
    ask(engine, "busy", 10, max_tokens=5, tenant="a")
    ask(engine, "gave up waiting", 50, tenant="b")
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


def test_what_a_key_had_is_forgotten_once_it_no_longer_matters() -> None:
    engine = one_row("fair")
    for i in range(50):
        ask(engine, f"{i}", tenant=f"key {i}")
        drain(engine)
    assert len(engine.scheduler.policy.served) < 5  # type: ignore[attr-defined]


numbers = count()


def test_a_served_tenant_does_not_wait_for_ever_behind_new_tenants() -> None:
    """Somebody who has had nothing yet is always there; whoever had something comes next all the
    same, in time."""
    engine = make_engine(60, 4, 2, 16, 1, policy="fair")
    scheduler = engine.scheduler

    def ended_after(name: str, most: int) -> int:
        for step in range(most):
            while len(scheduler.sequences_by_request) < 5:
                i = next(numbers)
                ask(engine, f"guest {i}", 3, max_tokens=2 + i % 5, tenant=f"guest {i}")
            if name in [out.request_id for out in engine.step() if out.finish_reason is not None]:
                return step
        raise AssertionError(f"{name} has not ended in {most} steps")

    ask(engine, "long", 9, max_tokens=50, tenant="K")
    ended_after("long", 500)
    ask(engine, "again", 2, max_tokens=1, tenant="K")
    ended_after("again", 200)
    assert len(scheduler.policy.served) < 20  # type: ignore[attr-defined]


def keep_asking(engine: Engine, steps: int, **tenants: int) -> list[str]:
    """Each tenant keeps this many requests queued or running. Returns those that ended."""
    ended = []
    for _ in range(steps):
        there = Counter(
            family[0].request.tenant for family in engine.scheduler.sequences_by_request.values()
        )
        for tenant, most in tenants.items():
            for _ in range(most - there[tenant]):
                i = next(numbers)
                ask(engine, f"{tenant} {i}", 3, max_tokens=4 + i % 9, tenant=tenant)
        ended += [out.request_id for out in engine.step() if out.finish_reason is not None]
    return ended


@pytest.mark.parametrize("history", [100, 801, 1600, 1607])
def test_what_a_key_left_to_others_earns_it_nothing(history: int) -> None:
    """One takes what the other leaves, for however long; then that one sends a batch, and somebody
    new asks one thing."""
    engine = make_engine(200, 4, 8, 64, 1, policy="fair")
    keep_asking(engine, history, much=6, little=2)
    for i in range(500):
        ask(engine, f"batch {i}", 3, max_tokens=8, tenant="little")
    ask(engine, "new", 3, max_tokens=8, tenant="new")
    assert "new" in keep_asking(engine, 40)


@pytest.mark.parametrize("history", [100, 801, 1600, 1607])
def test_tokens_taken_while_no_other_tenant_waited_do_not_count(history: int) -> None:
    """Beside one that has a long reply, which is the least served all the time."""
    engine = make_engine(2000, 4, 16, 64, 1, policy="fair", max_len=3000)
    ask(engine, "long", 3, max_tokens=2900, tenant="quiet")
    keep_asking(engine, history, much=10, little=2)
    for i in range(1000):
        ask(engine, f"batch {i}", 3, max_tokens=8, tenant="little")
    ask(engine, "one", 3, max_tokens=8, tenant="much")
    assert "one" in keep_asking(engine, 30)


@pytest.mark.parametrize("preempted", [False, True])
def test_a_key_that_was_preempted_comes_back_where_it_stood(preempted: bool) -> None:
    engine = make_engine(700, 4, 4, 64, 1, policy="fair", max_len=2500)
    ask(engine, "long", 3, max_tokens=2400, tenant="P")
    keep_asking(engine, 1500, A=4, B=4)
    if preempted:
        engine.scheduler._preempt(
            engine.scheduler.sequences_by_request["long"][0], "no block was free"
        )
    for i in range(300):
        ask(engine, f"P {i}", 3, max_tokens=8, tenant="P")
    ended = Counter(name[0] for name in keep_asking(engine, 200, A=4, B=4))
    assert min(ended["A"], ended["B"]) > ended["P"] > 5, "it has one more row all the time"


def test_what_the_cache_has_comes_before_what_it_has_not() -> None:
    engine = one_row("prefix")
    known = ask(engine, "known", 40).prompt
    drain(engine)
    ask(engine, "stranger", 40)
    ask(engine, "half", prompt=known[:20] + [1] * 20)
    ask(engine, "same", prompt=[*known[:39], 1])
    assert drain(engine) == ["same", "half", "stranger"]


def test_requests_that_share_a_prompt_come_together() -> None:
    """Two groups arrive mixed: one is served before the other, whose blocks would push the first
    one's out."""
    engine = make_engine(14, 4, rows=1, budget=64, depth=1, max_len=50, policy="prefix")
    groups = {name: [random.Random(name).randrange(1, 50) for _ in range(40)] for name in "AB"}
    for i in range(3):
        for name, prompt in groups.items():
            ask(engine, f"{name}{i}", prompt=[*prompt, 1 + i], max_tokens=2)
    assert [name[0] for name in drain(engine)] == list("AAABBB")
    cached = engine.scheduler.counters.cached_tokens
    engine = make_engine(14, 4, rows=1, budget=64, depth=1, max_len=50)
    for i in range(3):
        for name, prompt in groups.items():
            ask(engine, f"{name}{i}", prompt=[*prompt, 1 + i], max_tokens=2)
    drain(engine)
    assert cached > engine.scheduler.counters.cached_tokens, (
        "in order of arrival they push each other out"
    )


# ---- pausing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_high_priority_request_takes_a_row(depth: int) -> None:
    engine = make_engine(100, 4, rows=2, budget=64, depth=depth, policy="priority")
    ask(engine, "low", max_tokens=40, priority=3)
    ask(engine, "lower", max_tokens=40, priority=4)
    for _ in range(5):
        engine.step()
    ask(engine, "high", max_tokens=3)
    plan = engine.scheduler.plan()
    assert {s.request.id for s in engine.scheduler.running} == {"low", "high"}
    assert [row.seq_id for row in plan.slot_fills] == [3] and len(plan.items) == 1, (
        "it begins in the very plan that made room for it"
    )
    assert engine.scheduler.counters.preemptions == 1
    engine.scheduler.check()


def test_a_high_priority_request_takes_blocks_and_no_more_than_it_needs() -> None:
    engine = make_engine(16, 4, rows=8, budget=64, depth=1, policy="priority")
    for name in "abcd":
        ask(engine, name, 12, max_tokens=4, priority=1)
    engine.step()
    assert not engine.scheduler.waiting
    ask(engine, "high", 20, max_tokens=2)
    engine.step()
    assert "high" in {s.request.id for s in engine.scheduler.running}
    assert engine.scheduler.counters.preemptions == 1, (
        "five blocks are needed, four are free; the others stand aside"
    )
    drain(engine)


def test_the_victim_is_the_cheapest_to_bring_back_of_the_lowest_priority() -> None:
    engine = make_engine(100, 4, rows=3, budget=64, depth=1, max_len=200, policy="priority")
    ask(engine, "low and long", 40, max_tokens=20, priority=2)
    ask(engine, "low and short", 5, max_tokens=20, priority=2)
    ask(engine, "shortest", 2, max_tokens=20, priority=1)
    engine.step()
    engine.step()
    ask(engine, "high")
    engine.step()
    assert [s.request.id for s in engine.scheduler.waiting] == ["low and short"]


def test_equals_wait_for_each_other() -> None:
    engine = one_row("priority")
    ask(engine, "first", max_tokens=10)
    engine.step()
    ask(engine, "second", max_tokens=1)
    drain(engine)
    assert engine.scheduler.counters.preemptions == 0


def test_no_sequence_pauses_where_it_would_not_help() -> None:
    engine = make_engine(15, 4, rows=8, budget=64, depth=1, policy="priority")
    ask(engine, "first", 36, max_tokens=9)  # keeps 9 of 15 blocks, then more
    ask(engine, "low", 8, max_tokens=3, priority=1)
    engine.step()
    ask(engine, "high", 30, max_tokens=2)
    engine.step()
    assert engine.scheduler.counters.preemptions == 0, (
        "without the first one's blocks there is no room for it"
    )
    drain(engine)


def test_an_urgent_prompt_does_not_wait_for_a_long_one_being_computed() -> None:
    engine = make_engine(100, 4, rows=4, budget=8, depth=1, max_len=200, policy="priority")
    ask(engine, "long", 150, priority=1)
    engine.step()
    ask(engine, "urgent", 8)
    plan = engine.scheduler.plan()
    assert [(item.num_tokens, item.sample) for item in plan.items] == [(8, True)], (
        "the whole budget is the urgent one's"
    )
    assert engine.scheduler.counters.preemptions == 0, "there was room: nobody had to be paused"


def test_a_deadline_pauses_what_has_more_time_but_its_absence_does_not() -> None:
    engine = one_row("deadline")
    ask(engine, "patient", max_tokens=30)
    engine.step()
    ask(engine, "also patient")
    engine.step()
    assert engine.scheduler.counters.preemptions == 0
    ask(engine, "hurried", deadline=3.0)
    engine.step()
    assert [s.request.id for s in engine.scheduler.running] == ["hurried"]
    drain(engine)


def test_what_is_computed_again_is_counted() -> None:
    engine = one_row("priority")
    ask(engine, "low", 10, max_tokens=20, priority=1)
    for _ in range(4):
        engine.step()  # 10 of the prompt, and 3 more positions
    ask(engine, "high", 4, max_tokens=1)
    drain(engine)
    count = engine.scheduler.counters
    assert count.preemptions == 1 and count.recomputed_tokens == 1, (
        "13 positions, of which three blocks of four stay findable"
    )
    assert count.computed_tokens == 10 + 19 + 4 + 1


# ---- standing aside ------------------------------------------------------------------------------


def names(engine: Engine, plan: Plan) -> list[str]:
    return [engine.scheduler.live[item.seq_id].request.id for item in plan.items]


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_an_urgent_prompt_is_computed_alone_and_the_others_go_on_where_they_were(
    depth: int,
) -> None:
    engine = make_engine(100, 4, rows=8, budget=32, depth=depth, max_len=200, policy="priority")
    plans: list[Plan] = []
    launch = engine.runner.launch
    engine.runner.launch = lambda plan: plans.append(plan) or launch(plan)  # type: ignore[method-assign,func-returns-value]
    ask(engine, "talks", 4, max_tokens=20, priority=1)
    ask(engine, "reads", 100, priority=1)
    engine.step()
    ask(engine, "waits", priority=1)
    ask(engine, "urgent", 40)
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


def test_equals_do_not_stand_aside() -> None:
    engine = make_engine(100, 4, rows=8, budget=32, depth=1, policy="priority")
    ask(engine, "first", priority=-1, max_tokens=20)
    engine.step()
    ask(engine, "second", priority=-1)
    plan = engine.scheduler.plan()
    assert names(engine, plan) == ["first", "second"] and not plan.urgent


def test_a_sequence_that_has_waited_long_enough_does_not_pause() -> None:
    clock = Clock()
    engine = make_engine(100, 4, rows=8, budget=32, depth=1, clock=clock, policy="priority")
    ask(engine, "old", priority=1, max_tokens=20)
    clock.sleep(9)
    ask(engine, "young", priority=1, max_tokens=20)
    engine.step()
    clock.sleep(2)
    ask(engine, "urgent")
    assert names(engine, engine.scheduler.plan()) == ["old", "urgent"], "a level is ten seconds"


def test_equals_that_decode_sit_out_one_step_for_an_urgent_prompt_and_not_two() -> None:
    engine = make_engine(100, 4, rows=8, budget=32, depth=1, max_len=200, policy="priority")
    ask(engine, "low", priority=1, max_tokens=30)
    ask(engine, "first", max_tokens=30)
    for _ in range(2):
        engine.step()
    ask(engine, "second", 120)
    steps = []
    for _ in range(5):
        steps.append(names(engine, plan := engine.scheduler.plan()))
        engine.scheduler.commit(plan, engine.runner.launch(plan).wait())
    assert steps[:4] == [["second"], ["first", "second"], ["second"], ["first", "second"]]
    assert steps[4] == ["first", "second", "low"]


def test_what_has_a_deadline_is_ahead_of_what_has_none_and_not_of_others_that_have() -> None:
    engine = make_engine(100, 4, rows=8, budget=32, depth=1, policy="deadline")
    ask(engine, "patient", max_tokens=20)
    ask(engine, "late", max_tokens=20, deadline=50.0)
    for _ in range(2):
        engine.step()
    ask(engine, "soon", 40, deadline=5.0)
    assert [names(engine, engine.scheduler.plan()) for _ in range(2)] == [
        ["soon"],
        ["late", "soon"],
    ]


def test_no_sequence_pauses_for_a_prompt_that_cannot_start() -> None:
    engine = make_engine(15, 4, rows=8, budget=64, depth=1, policy="priority")
    ask(engine, "first", 36, max_tokens=9)
    engine.step()
    ask(engine, "low", 4, max_tokens=9, priority=1)
    engine.step()
    ask(engine, "high", 30, max_tokens=2)  # there are no blocks for it
    assert names(engine, engine.scheduler.plan()) == ["first", "low"]


def test_an_urgent_request_that_waits_for_one_that_stands_aside_stops_nothing() -> None:
    """`like` waits for what `low` computes, and `other`, which begins like it, behind it: were
    `low` to stand aside for `other`, nobody would ever move."""
    engine = make_engine(100, 4, rows=8, budget=8, depth=1, max_len=200, policy="priority")
    prompt = ask(engine, "low", 80, priority=1).prompt
    engine.step()
    ask(engine, "like", prompt=[*prompt[:70], 1])
    ask(engine, "other", prompt=[*prompt[:12], *[2] * 40])
    assert set(drain(engine)) == {"low", "like", "other"}


# ---- nobody starves, nothing goes round in circles -----------------------------------------------


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("blocks", [16, 40], ids=["one sequence's worth", "room"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_least_favoured_request_ends_though_favoured_ones_keep_coming(
    policy: str, blocks: int, depth: int
) -> None:
    clock = Clock()
    engine = make_engine(blocks, 4, rows=3, budget=16, depth=depth, clock=clock, policy=policy)
    names, alive = iter(range(100_000)), 0
    favoured = random.Random("warm").choices(range(1, 50), k=16)
    ask(engine, "warm", prompt=favoured)
    drain(engine)
    ask(engine, "unloved", 50, max_tokens=10, priority=1, tenant="greedy")
    for step in range(4000):
        while alive < 6:
            ask(
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
    """The worst choices that the interface allows: the last to come first, the dearest victims,
    pausing whoever can be."""

    preempts_for_waiting = True

    def rank(self, seq: Sequence) -> float:
        return -seq.id

    def preempts(self, seq: Sequence, other: Sequence) -> bool:
        return True

    pauses = preempts

    def victim(self, weaker: list[Sequence]) -> Sequence:
        return max(weaker, key=lambda s: s.planned)


class Fickle(Inverted):
    """Ranks that change with every look."""

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
            ask(engine, f"{i}", g.randrange(1, 40), g.randrange(1, 20))
            if i % 4 == 0:
                engine.step()
        drain(engine, limit=5000)


# ---- names ---------------------------------------------------------------------------------------


def test_a_policy_of_your_own_is_found_by_its_path() -> None:
    assert type(find_policy(f"{__name__}:Inverted")) is Inverted


@pytest.mark.parametrize(
    "name,says",
    [
        ("best", "unknown scheduling policy 'best': use fcfs, priority"),
        ("", "unknown scheduling policy"),
        ("no.such.module:P", "No module named 'no'"),
        ("octavo.core.policy:Nobody", "has no attribute 'Nobody'"),
        ("octavo.core.policy:POLICIES", "not a subclass"),
        (":x", "unknown scheduling policy"),
    ],
)
def test_what_is_no_policy_is_said_to_be_none(name: str, says: str) -> None:
    with pytest.raises(InvalidRequest, match=says):
        find_policy(name)


@pytest.mark.parametrize(
    "fields",
    [{"priority": 2**31}, {"priority": 1.5}, {"priority": True}, {"deadline": float("nan")}],
)
def test_bad_fields_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest, match=next(iter(fields))):
        ask(one_row("priority"), "x", **fields)
