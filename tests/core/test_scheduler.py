"""What the scheduler decides, plan by plan."""

from __future__ import annotations

import random

import pytest

from octavo.core.engine import Engine
from octavo.errors import ContextLengthExceeded, InvalidRequest, KVCapacityExceeded
from octavo.params import SamplingParams
from octavo.types import Output, Plan, Request, StepResult
from tests import oracle
from tests.workloads import make_engine


def request(name: str, length: int, max_tokens: int = 8, **options: object) -> Request:
    g = random.Random(name)
    params = SamplingParams(max_tokens=max_tokens, ignore_eos=True, seed=1, **options)  # type: ignore[arg-type]
    return Request(name, [g.randrange(1, oracle.VOCAB) for _ in range(length)], params)


def drain(engine: Engine, limit: int = 1000) -> dict[tuple[str, int], list[int]]:
    got: dict[tuple[str, int], list[int]] = {}
    while not engine.idle:
        for out in engine.step():
            got.setdefault((out.request_id, out.index), []).extend(out.tokens)
        engine.scheduler.check()
        limit -= 1
        assert limit > 0, "no progress"
    return got


def test_decoding_comes_first_and_a_long_prompt_gets_the_remaining_budget() -> None:
    engine = make_engine(50, 4, slots=4, budget=10, depth=1, max_len=100)
    engine.add(request("short", 3, max_tokens=20))
    engine.step()
    engine.add(request("long", 40))
    plan = engine.scheduler.plan()
    assert [(i.num_tokens, i.sample) for i in plan.items] == [(1, True), (9, False)]


def test_the_budget_is_never_exceeded_and_chunks_meet_exactly() -> None:
    engine = make_engine(50, 4, slots=4, budget=7, depth=1, max_len=100)
    for name in "abc":
        engine.add(request(name, 23))
    starts: dict[int, int] = {}
    launch = engine.runner.launch

    def watched(plan: Plan) -> object:
        assert plan.num_tokens <= 7
        for item in plan.items:
            if item.start is not None:
                assert item.start == starts.get(item.seq_id, 0)
                starts[item.seq_id] = item.start + item.num_tokens
        return launch(plan)

    engine.runner.launch = watched  # type: ignore[method-assign, assignment]
    drain(engine)
    assert list(starts.values()) == [23, 23, 23]


@pytest.mark.parametrize(
    "refused,error,message",
    [
        (request("x", 60), ContextLengthExceeded, "60 tokens, but the context holds 60"),
        (
            request("x", 50, max_tokens=10),
            KVCapacityExceeded,
            "'x' needs 15 KV blocks of 4.*pool has 10.*lower max_tokens to 0",
        ),
        (request("x", 30, max_tokens=20), KVCapacityExceeded, "lower max_tokens to 11"),
        (Request("x", [], SamplingParams()), InvalidRequest, "empty"),
        (Request("x", [oracle.VOCAB], SamplingParams()), InvalidRequest, "token id 50"),
        (Request("x", [True], SamplingParams()), InvalidRequest, "token id True"),
    ],
)
def test_a_request_that_can_never_run_is_refused_at_once(
    refused: Request, error: type, message: str
) -> None:
    engine = make_engine(10, 4, slots=2, budget=8, depth=1)
    engine.add(request("good", 10))
    with pytest.raises(error, match=message):
        engine.add(refused)
    assert list(drain(engine)) == [("good", 0)]


def test_a_running_id_cannot_be_used_again() -> None:
    engine = make_engine(10, 4, slots=2, budget=8, depth=1)
    engine.add(request("a", 3))
    with pytest.raises(InvalidRequest, match="already running"):
        engine.add(request("a", 3))
    drain(engine)
    engine.add(request("a", 3))
    drain(engine)


def test_a_pool_of_exactly_the_needed_blocks_is_enough() -> None:
    # 17 tokens, the last never computed: 16 positions in 4 blocks of 4
    exact = request("x", 9, max_tokens=8)
    for depth in (1, 2, 3):
        engine = make_engine(4, 4, slots=2, budget=8, depth=depth)
        engine.add(exact)
        assert drain(engine)[("x", 0)] == oracle.generate(exact.prompt, exact.params, 1)


def test_forks_compute_the_prompt_once_and_copy_one_block_each_but_the_last() -> None:
    engine = make_engine(50, 4, slots=8, budget=32, depth=1)
    engine.add(request("x", 11, max_tokens=1, n=4))
    drain(engine)
    count = engine.scheduler.counters
    assert count.computed_tokens == 10 + 4, "all but the last token once, the last by each"
    assert count.copies == 3


def test_a_finished_request_serves_the_next_one() -> None:
    engine = make_engine(50, 4, slots=8, budget=32, depth=1)
    first = request("x", 16, max_tokens=4)
    for name in "xy":
        engine.add(Request(name, first.prompt, first.params))
        drain(engine)
    assert engine.scheduler.counters.cached_tokens == 12, (
        "three of four blocks: one token must be computed"
    )
    engine.add(Request("z", first.prompt, first.params, cache_salt="somebody else"))
    drain(engine)
    assert engine.scheduler.counters.cached_tokens == 12


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_prompt_that_several_ask_for_at_once_is_computed_once(depth: int) -> None:
    engine = make_engine(100, 4, slots=8, budget=64, depth=depth, max_len=100)
    shared = request("x", 40, max_tokens=4)
    for i in range(5):
        engine.add(Request(f"x{i}", shared.prompt, shared.params))
    engine.add(other := request("other", 30, max_tokens=4))
    first = engine.step()
    running = {seq.request.id for seq in engine.scheduler.running}
    assert running == {"x0", "other"}, (
        "x1 to x4 wait for x0, and other requests do not wait for them"
    )
    got = drain(engine)
    for out in first:
        got[out.request_id, 0] = out.tokens + got[out.request_id, 0]
    assert engine.scheduler.counters.computed_tokens == 40 + 4 * 4 + 30 + 6 * 3, (
        "x1 to x4 computed only their last block"
    )
    assert {tuple(t) for (name, _), t in got.items() if name != "other"} == {
        tuple(oracle.generate(shared.prompt, shared.params, 1))
    }
    assert got["other", 0] == oracle.generate(other.prompt, other.params, 1)
    assert not engine.scheduler.prefix.computing


def test_short_requests_do_not_starve_a_long_prompt() -> None:
    """A long prompt, partly computed, waits for blocks: later requests must not get them."""
    engine = make_engine(20, 16, slots=16, budget=128, depth=1, caching=False, max_len=300)
    names = iter(range(10_000))

    def short() -> None:
        name = next(names)
        engine.add(request(f"short {name}", 8, max_tokens=4 + name % 4))

    for _ in range(10):
        short()
    engine.step()
    engine.add(request("long", 280, max_tokens=2))
    for _ in range(200):
        while len(engine.scheduler.waiting) < 4:
            short()
        if any(out.request_id == "long" and out.finish_reason for out in engine.step()):
            return
    pytest.fail("the long prompt starved")


def test_every_completion_of_an_aborted_request_ends() -> None:
    engine = make_engine(50, 4, slots=8, budget=8, depth=2)
    engine.add(request("x", 20, n=3))
    engine.step()
    out = engine.abort("x")
    assert [(o.index, o.finish_reason) for o in out] == [(0, "abort"), (1, "abort"), (2, "abort")]
    assert engine.abort("x") == [] and drain(engine) == {}
    engine.scheduler.check()


class Failing:
    """A runner that fails on chosen steps, at launch or when its result is read."""

    def __init__(self, runner: object, at_launch: set[int], at_wait: set[int]):
        self.runner, self.at_launch, self.at_wait, self.step = runner, at_launch, at_wait, 0

    def launch(self, plan: Plan) -> object:
        self.step += 1
        if self.step in self.at_launch:
            raise RuntimeError("launch")
        handle = self.runner.launch(plan)  # type: ignore[attr-defined]
        if self.step in self.at_wait:
            handle.wait = self._fail
        return handle

    def _fail(self) -> StepResult:
        raise RuntimeError("wait")


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("when", ["at_launch", "at_wait"])
def test_a_failing_step_ends_its_requests_and_the_rest_go_on(
    depth: int, when: str, caplog: pytest.LogCaptureFixture
) -> None:
    requests = [request(f"r{i}", 12, max_tokens=6, n=1 + i % 2) for i in range(6)]
    for step in range(1, 14):
        engine = make_engine(30, 4, slots=2, budget=12, depth=depth)
        engine.runner = Failing(
            engine.runner, **{"at_launch": set(), "at_wait": set(), when: {step}}
        )  # type: ignore[assignment]
        for r in requests:
            engine.add(r)
        ends: dict[tuple[str, int], Output] = {}
        got: dict[tuple[str, int], list[int]] = {}
        for _ in range(500):
            for out in engine.step():
                got.setdefault((out.request_id, out.index), []).extend(out.tokens)
                if out.finish_reason:
                    assert (out.request_id, out.index) not in ends
                    ends[out.request_id, out.index] = out
            engine.scheduler.check()
            if engine.idle:
                break
        assert len(ends) == 9 and engine.idle
        failed = {key for key, out in ends.items() if out.finish_reason == "error"}
        assert failed and len(failed) < 9
        for (name, index), tokens in got.items():
            want = oracle.generate(
                requests[int(name[1:])].prompt, requests[int(name[1:])].params, 1, index
            )
            assert tokens == (want if (name, index) not in failed else want[: len(tokens)])


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_step_too_large_for_the_device_is_computed_in_smaller_ones(depth: int) -> None:
    """No request fails, every token is right, and larger steps are tried again later."""
    engine = make_engine(60, 4, slots=8, budget=40, depth=depth)
    engine.runner.memory = 12  # type: ignore[attr-defined]
    requests = [request(f"r{i}", 20, max_tokens=30, n=1 + i % 2) for i in range(6)]
    for r in requests:
        engine.add(r)
    got = drain(engine)
    assert got == {
        (r.id, k): oracle.generate(r.prompt, r.params, 1, k)
        for r in requests
        for k in range(r.params.width)
    }
    count = engine.scheduler.counters
    assert 0 < count.oom_steps < 10 and engine.scheduler.limiter.token_cap.limit <= 12
    engine.runner.memory = 1000  # type: ignore[attr-defined]
    for i in range(80):
        engine.add(request(f"later{i}", 3, max_tokens=40))
    drain(engine, 10_000)
    assert engine.scheduler.limiter.token_cap.limit == 40


def test_a_request_too_large_alone_is_retried_once_and_then_ends() -> None:
    engine = make_engine(60, 4, slots=4, budget=16, depth=1)
    engine.runner.memory = 3  # type: ignore[attr-defined]
    engine.add(request("large", 20))
    assert engine.step() == [] and engine.scheduler.counters.oom_steps == 1, "tried again"
    (out,) = engine.step()
    assert out.finish_reason == "error" and out.code == "out_of_memory"
    assert engine.idle and engine.scheduler.pool.num_available == 60
    engine.add(request("small", 2, max_tokens=5))
    assert drain(engine) == {
        ("small", 0): oracle.generate(request("small", 2).prompt, request("small", 2, 5).params, 1)
    }


def steps_to_first_token(share: float, shorts: int = 200) -> tuple[list[int], list[int]]:
    """Return the steps to the first token of short prompts, of which one with one token arrives per
    step, and of three long prompts of 1,000 tokens that are computed meanwhile."""
    engine = make_engine(
        600, 16, slots=16, budget=32, depth=2, max_len=2000, short_prompt_share=share
    )
    for i in range(3):
        engine.add(request(f"long{i}", 1000, max_tokens=1))
    arrivals: dict[str, int] = {f"long{i}": 0 for i in range(3)}
    first: dict[str, int] = {}
    for step in range(2000):
        if step < shorts:
            arrivals[f"short{step}"] = step
            engine.add(request(f"short{step}", 1, max_tokens=2))
        for out in engine.step():
            first.setdefault(out.request_id, step)
        engine.scheduler.check()
        if engine.idle:
            break
    took = {name: first[name] - arrival for name, arrival in arrivals.items()}
    return sorted(t for n, t in took.items() if n.startswith("short")), [
        took[f"long{i}"] for i in range(3)
    ]


def test_short_prompts_do_not_wait_for_long_ones() -> None:
    """The 99th percentile of the short prompts' first tokens is a few steps, and the long prompts
    lose no more than the share."""
    quick, slowed = steps_to_first_token(0.25)
    starved, alone = steps_to_first_token(0.0)
    assert quick[int(0.99 * len(quick))] <= 3, quick
    assert starved[int(0.99 * len(starved))] > 80, "the wait without a share"
    assert max(slowed) <= 1.4 * max(alone), (slowed, alone)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("host", [0, 20])
def test_when_all_hashes_collide_every_token_is_right(
    depth: int, host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are compared, so a block of another prompt with the same hash is a miss."""
    monkeypatch.setattr("octavo.core.prefix.chain_hash", lambda parent, tokens: b"the same for all")
    engine = make_engine(20, 4, slots=3, budget=24, depth=depth, host=host)
    requests = [request(f"r{i % 5}", 14, max_tokens=6) for i in range(15)]
    for i, r in enumerate(requests):
        engine.add(Request(f"{r.id} {i}", r.prompt, r.params))
    got = drain(engine)
    assert [got[f"{r.id} {i}", 0] for i, r in enumerate(requests)] == [
        oracle.generate(r.prompt, r.params, 1) for r in requests
    ]
    assert engine.scheduler.counters.cached_tokens < 15 * 4, "next to nothing can be found"


@pytest.mark.parametrize("slots", [3, 1])
def test_a_request_does_not_count_its_own_prompt_as_cached(slots: int) -> None:
    """With one slot, the second completion begins when the first has ended, and finds the prompt."""
    engine = make_engine(60, 4, slots, 64, 1)
    engine.add(
        Request("r", list(range(1, 42)), SamplingParams(n=3, max_tokens=3, ignore_eos=True, seed=1))
    )
    cached = 0
    while not engine.idle:
        cached = max([cached, *(out.cached_tokens for out in engine.step())])
    count = engine.scheduler.counters
    assert (cached, count.queried_tokens, count.cached_tokens) == (0, 41, 0)


def test_a_salt_that_cannot_be_hashed_is_refused_before_anything_changes() -> None:
    engine = make_engine(20, 4, 2, 16, 1)
    with pytest.raises(InvalidRequest, match="cache_salt"):
        engine.add(Request("r", [1, 2], SamplingParams(), cache_salt="\ud800"))
    assert engine.idle


def test_logits_that_are_not_finite_end_only_their_own_request() -> None:
    engine = make_engine(20, 4, 2, 16, 1)
    for name in "ab":
        engine.add(Request(name, [1, 2], SamplingParams(max_tokens=3, ignore_eos=True, seed=1)))
    plan = engine.scheduler.plan()
    first = engine.scheduler.commit(plan, StepResult([[-1], [7]]))
    assert [(o.request_id, o.tokens, o.finish_reason, o.code) for o in first] == [
        ("a", [], "error", "not_a_number"), ("b", [7], None, None)
    ]  # fmt: skip
    engine.scheduler.check()
    assert list(engine.scheduler.sequences_by_request) == ["b"]


@pytest.mark.parametrize("host", [0, 20])
def test_blocks_of_a_request_with_nan_logits_are_not_reused(host: int) -> None:
    engine = make_engine(40, 4, 2, 16, 1, host=host)
    scheduler, prompt = engine.scheduler, list(range(1, 31))
    engine.add(Request("a", prompt, SamplingParams(max_tokens=3, ignore_eos=True, seed=1)))
    scheduler.commit(scheduler.plan(), StepResult([[]]))  # half of it
    assert scheduler.pool.hash_index
    scheduler.commit(scheduler.plan(), StepResult([[-1]]))
    engine.add(Request("b", prompt, SamplingParams(max_tokens=3, ignore_eos=True, seed=1)))
    assert not scheduler.pool.hash_index and scheduler.plan().slot_fills[0].computed == 0
    scheduler.check()


def test_saturated_means_waiting_for_more_than_the_budget() -> None:
    engine = make_engine(8, 4, 4, 16, 1)
    for name in "abc":
        engine.add(
            Request(
                name, [ord(name) - 96] * 12, SamplingParams(max_tokens=4, ignore_eos=True, seed=1)
            )
        )
    states = []
    for _ in range(3):
        engine.step()
        states.append((len(engine.scheduler.waiting), engine.scheduler.saturated))
    assert states == [(1, False), (1, True), (1, True)], "it waits for budget, then for blocks"


def test_a_sequence_that_waits_for_a_prefix_delays_only_those_that_begin_with_it() -> None:
    """All begin with the same block, as chats with one system message do. S3 shares the whole
    prefix and waits like S1. S2 shares a block, and S4 needs the logprobs of its whole prompt."""
    engine = make_engine(60, 4, slots=8, budget=200, depth=1, max_len=100)
    shared = list(range(1, 33))
    params = SamplingParams(max_tokens=2, ignore_eos=True, seed=1)
    whole = SamplingParams(max_tokens=2, ignore_eos=True, seed=1, prompt_logprobs=0)
    engine.add(Request("S0", [*shared, 40], params))
    engine.add(Request("S1", [*shared, 41], params))
    engine.add(Request("S2", [*shared[:4], *range(35, 45)], params))
    engine.add(Request("S3", [*shared, 42], params))
    engine.add(Request("S4", [*shared, 43], whole))
    plan = engine.scheduler.plan()
    names = {seq.id: seq.request.id for seq in engine.scheduler.live.values()}
    assert [names[item.seq_id] for item in plan.items] == ["S0", "S2", "S4"]
    assert [seq.request.id for seq in engine.scheduler.waiting] == ["S1", "S3"]
    engine.scheduler.commit(plan, engine.runner.launch(plan).wait())
    plan = engine.scheduler.plan()
    starts = {names[item.seq_id]: item.start for item in plan.items}
    assert starts["S1"] == starts["S3"] == 32
