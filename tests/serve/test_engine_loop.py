"""The engine process's loop, without the process: messages in, messages out."""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import deque
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from octavo.config import CacheConfig, ScheduleConfig, SpeculativeConfig
from octavo.core.engine import Engine
from octavo.core.scheduler import Scheduler
from octavo.errors import InvalidRequest
from octavo.events import EventBus, StepFailed, StepPlanned
from octavo.params import SamplingParams, StructuredOutputs
from octavo.serve.channel.messages import (
    Abort,
    Accepted,
    Add,
    Heartbeat,
    Refused,
    Shutdown,
    StepOutputs,
    decode_to_engine,
    decode_to_front,
    encode,
)
from octavo.serve.engine.engine_process import DeviceLost, EngineLoop, smoke_test
from octavo.serve.engine.step_reports import LongSteps
from octavo.serve.front.metrics import Metrics
from octavo.serve.front.supervisor import Supervisor
from octavo.serve.serve_config import ServeConfig
from octavo.types import Item, Output, Plan, TokenLogprobs
from tests.fake_runner import FakeRunner
from tests.toy_guide import ToyGuide


class FakeLink:
    """Hands in one batch of messages a step, from a script; None stands for a step without any."""

    def __init__(self, script: list[Any]):
        self.script, self.sent = deque(script), []
        self.has_unsent = threading.Event()

    def receive(self, seconds: float | None) -> Any:
        while seconds is None and self.script and self.script[0] is None:
            self.script.popleft()  # an idle engine sleeps over those
        return self.script.popleft() if self.script else Shutdown()

    def send(self, message: Any) -> None:
        self.sent.append(message)


def run(script: list[Any], depth: int = 1, guides: Any = None) -> tuple[EngineLoop, list[Any]]:
    schedule = ScheduleConfig(
        max_num_seqs=4, max_num_batched_tokens=16, max_model_len=200, depth=depth
    )
    scheduler = Scheduler(CacheConfig(block_size=4, num_blocks=50), schedule, vocab_size=1000)
    link = FakeLink(script)
    loop = EngineLoop(Engine(scheduler, FakeRunner(50, 4)), link, guides)  # type: ignore[arg-type]
    loop.run()
    return loop, link.sent


def add(id: str, length: int = 5, **params: Any) -> Add:
    return Add(id, list(range(1, length + 1)), SamplingParams(ignore_eos=True, **params), 0.0, "")


def rendered(heartbeat: Heartbeat) -> str:
    """The metrics of a server whose engine has sent this heartbeat."""
    metrics = Metrics("octavo", "m")
    metrics.source.engine_client = SimpleNamespace(  # type: ignore[assignment]
        supervisor=SimpleNamespace(
            heartbeat=heartbeat, starts=1, recovery=0.0, loaded=None, sleep_level=0
        ),
        queue_bound=SimpleNamespace(waiting=[], tokens=0),
        open_requests={},
        engine_saturated=False,
        ready=True,
    )
    return metrics.render().decode()


def used(loop: EngineLoop) -> int:
    pool = loop.engine.scheduler.pool
    return pool.num_blocks - pool.num_available


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("steps", [0, 1, 2, 5])
@pytest.mark.parametrize("length", [5, 60], ids=["decoding", "prefilling"])
def test_an_abort_frees_every_block_before_the_next_step(
    steps: int, depth: int, length: int
) -> None:
    loop, _ = run([add("a", length, max_tokens=50), *[None] * steps, Abort(["a"])], depth)
    assert used(loop) == 0 and not loop.engine.scheduler.live
    loop.engine.scheduler.check()


def test_an_abort_leaves_others_alone() -> None:
    alone = run([add("b", 9, max_tokens=10, seed=1), *[None] * 12])[1]
    both = run(
        [
            add("a", 6, max_tokens=50),
            add("b", 9, max_tokens=10, seed=1),
            None,
            None,
            Abort(["a"]),
            *[None] * 12,
        ]
    )[1]

    def tokens(sent: list[Any]) -> list[int]:
        return [
            t
            for m in sent
            if isinstance(m, StepOutputs)
            for out in m.outputs
            if out.request_id == "b"
            for t in out.tokens
        ]

    assert tokens(both) == tokens(alone) and len(tokens(alone)) == 10


@pytest.mark.parametrize("depth", [1, 2])
def test_a_request_that_nobody_follows_is_told_of_when_it_begins_and_when_it_ends(
    depth: int,
) -> None:
    def told(send_at_end: bool) -> tuple[EngineLoop, list[Output], int]:
        m = add("a", 9, max_tokens=10, seed=1, n=2, temperature=1.0)
        m.send_at_end = send_at_end
        loop, sent = run([m, *[None] * 20], depth)
        news = [m for m in sent if isinstance(m, StepOutputs)]
        return loop, [out for m in news for out in m.outputs], sum(len(m.steps) for m in news)

    def said(outputs: list[Output], index: int) -> list[int]:
        return [t for out in outputs if out.index == index for t in out.tokens]

    (_, every, steps), (loop, few, same) = told(False), told(True)
    assert len(every) == 20 and len(few) == 4 and [len(out.tokens) for out in few[:2]] == [1, 1]
    assert all(said(few, i) == said(every, i) and len(said(few, i)) == 10 for i in (0, 1))
    assert [out.finish_reason for out in few[2:]] == ["length", "length"] and not loop.held_tokens
    assert steps == same, "no step is lost to the metrics"


def test_an_abort_forgets_what_was_kept_back() -> None:
    m = add("a", 9, max_tokens=50)
    m.send_at_end = True
    loop, sent = run([m, *[None] * 5, Abort(["a"])])
    told = sum(
        len(out.tokens) for news in sent if isinstance(news, StepOutputs) for out in news.outputs
    )
    assert not loop.held_tokens and told == 1
    assert (
        sum(news.discarded_tokens for news in sent if isinstance(news, StepOutputs)) >= 3
    )  # counted all the same


def test_a_request_is_said_to_have_begun_once() -> None:
    _, sent = run([add("a", 40, max_tokens=3), *[None] * 10])
    (begun,) = [m.admitted for m in sent if isinstance(m, StepOutputs) and m.admitted]
    assert [id for id, _ in begun] == ["a"] and 0 <= time.monotonic() - begun[0][1] < 60


def test_a_request_with_forks_and_a_preempted_one_start_once() -> None:
    loop, sent = run([add("a", 90, n=3, temperature=1.0, max_tokens=60), *[None] * 90])
    assert loop.engine.scheduler.counters.preemptions > 0
    started = [id for m in sent if isinstance(m, StepOutputs) for id, _ in m.admitted]
    assert started == ["a"]


def test_what_can_never_run_is_refused() -> None:
    _, sent = run([add("a", 300)])
    (refused,) = [m for m in sent if isinstance(m, Refused)]
    assert refused.id == "a" and refused.code == "context_length_exceeded"


class FakeGuides:
    """Compiles anything in so many looks at it; refuses "bad"."""

    compiled = hits = seconds = 0

    def __init__(self, looks: int):
        self.looks = looks

    def start(self, spec: StructuredOutputs) -> FakeGuides:
        self.spec = spec
        return self

    def poll(self) -> ToyGuide | None:
        self.looks -= 1
        if self.looks > 0:
            return None
        if self.spec.regex == "bad":
            raise InvalidRequest("no such thing", "structured_outputs", "invalid_structured_output")
        return ToyGuide(1)

    def around_reasoning(self, params: SamplingParams, guide: ToyGuide | None) -> ToyGuide | None:
        return guide


def guided(id: str, regex: str = "good") -> Add:
    return add(id, max_tokens=3, structured_outputs=StructuredOutputs(regex=regex))


def test_a_request_is_held_until_its_guide_is_there_and_others_are_not() -> None:
    script = [guided("g"), add("a", max_tokens=6), *[None] * 14]
    loop, sent = run(script, guides=FakeGuides(9))
    begun = [id for m in sent if isinstance(m, StepOutputs) for id, _ in m.admitted]
    ended = [
        out.request_id
        for m in sent
        if isinstance(m, StepOutputs)
        for out in m.outputs
        if out.finish_reason
    ]
    assert begun == ["a", "g"] and ended[0] == "a" and not loop.compiling
    taken = next(i for i, m in enumerate(sent) if isinstance(m, Accepted))
    assert taken < next(
        i
        for i, m in enumerate(sent)
        if isinstance(m, StepOutputs) and [id for id, _ in m.admitted] == ["g"]
    )


def test_a_held_request_keeps_an_idle_engine_awake_and_then_lets_it_sleep() -> None:
    _, sent = run([guided("g"), *[None] * 9], guides=FakeGuides(4))
    heartbeats = [m for m in sent if isinstance(m, Heartbeat)]
    assert len(heartbeats) == 2, "when work came and when it was done: not at every look"


def test_what_cannot_be_compiled_is_refused() -> None:
    loop, sent = run([guided("g", "bad"), *[None] * 6], guides=FakeGuides(3))
    assert [m for m in sent if isinstance(m, Refused)] == [
        Refused("g", "no such thing", "structured_outputs", "invalid_structured_output")
    ]
    assert not loop.compiling and not loop.engine.scheduler.live


def test_a_held_request_can_be_aborted() -> None:
    loop, sent = run([guided("g"), None, Abort(["g"]), *[None] * 5], guides=FakeGuides(20))
    assert not loop.compiling and not [m for m in sent if isinstance(m, (Accepted, StepOutputs))]


def test_a_heartbeat_tells_when_work_begins_and_when_it_ends() -> None:
    _, sent = run([add("a", 5, max_tokens=3), *[None] * 3])
    heartbeats = [m for m in sent if isinstance(m, Heartbeat)]
    assert [b.blocks_used > 0 for b in heartbeats] == [True, False]
    assert all(b.blocks_used + b.blocks_cached + b.blocks_free == 50 for b in heartbeats)
    assert heartbeats[-1].prefill_tokens == 5 and heartbeats[-1].decode_tokens == 2


def test_messages_cross_as_they_are() -> None:
    shape = StructuredOutputs(json={"type": "object", "properties": {"b": {}, "a": {}}})
    said = add("a", stop=["x"], logit_bias={3: 1.5}, seed=2**63 - 1, structured_outputs=shape)
    for message in (said, Abort(["a", "b"]), Shutdown()):
        assert decode_to_engine(encode(message)) == message
    out = Output(
        "a",
        1,
        [4],
        [TokenLogprobs(4, -0.5, 1, [(4, -0.5)])],
        "stop",
        "x",
        3,
        [None, TokenLogprobs(1, -1.0, 2, [])],
    )
    for message in (
        StepOutputs([out], [("a", 1.5)], [7], 9),
        Heartbeat(steps=3),
        Refused("a", "no", "prompt", None),
        Accepted("a"),
    ):
        assert decode_to_front(encode(message)) == message


def test_bad_parameters_do_not_cross() -> None:
    bad = add("a")
    bad.params.temperature = -1.0
    with pytest.raises(msgspec.ValidationError, match="temperature"):
        decode_to_engine(encode(bad))


def test_a_heartbeat_tells_of_the_tiers_and_the_metrics_of_all_of_it() -> None:
    schedule = ScheduleConfig(max_num_seqs=2, max_num_batched_tokens=32, max_model_len=40)
    cache = CacheConfig(block_size=4, num_blocks=8, host_blocks=20, block_bytes=1000)
    scheduler = Scheduler(cache, schedule, vocab_size=1000)
    script: list[Any] = []
    for name, first in (("a", 1), ("b", 100), ("c", 1)):
        prompt = list(range(first, first + 25))
        script += [
            Add(name, prompt, SamplingParams(max_tokens=2, ignore_eos=True), 0.0, ""),
            *[None] * 4,
        ]
    loop = EngineLoop(Engine(scheduler, FakeRunner(8, 4, 20)), FakeLink(script))  # type: ignore[arg-type]
    loop.run()
    heartbeat = loop.heartbeat
    assert {f"{name}_bytes" for name in ("store", "load", "save", "fetch")} | {
        "load_seconds",
        "fetch_seconds",
    } < set(heartbeat.tiers)
    assert (
        heartbeat.tiers["loads"] > 0
        and heartbeat.tiers["load_bytes"] == 1000 * heartbeat.tiers["loads"]
    )
    assert (
        heartbeat.tiers["host_tokens"] == 4 * heartbeat.tiers["loads"]
        and heartbeat.cached_tokens == 24
    )
    assert (
        sum(heartbeat.tiers[f"host_blocks_{state}"] for state in ("ready", "free", "filling")) == 20
    )
    assert decode_to_front(encode(heartbeat)) == heartbeat

    text = rendered(msgspec.structs.replace(heartbeat, tier_misses={"corrupt": 3}))
    assert f'octavo:kv_tier_loads_total{{model_name="m"}} {float(heartbeat.tiers["loads"])}' in text
    assert 'octavo:kv_disk_misses_total{model_name="m",reason="corrupt"} 3.0' in text
    assert (
        f'octavo:prefix_cache_tier_hits_total{{model_name="m",tier="host"}} {float(heartbeat.tiers["host_tokens"])}'
        in text
    )
    assert (
        f'octavo:kv_host_blocks_free{{model_name="m"}} {float(heartbeat.tiers["host_blocks_free"])}'
        in text
    )
    assert "kv_tier" not in rendered(Heartbeat()), "no tiers, nothing to tell"


def test_a_heartbeat_and_the_metrics_count_drafts() -> None:
    schedule = ScheduleConfig(
        max_num_seqs=2,
        max_num_batched_tokens=32,
        max_model_len=100,
        speculative=SpeculativeConfig("early_exit", num_tokens=3, adaptive=False, exit_layer=1),
    )
    scheduler = Scheduler(CacheConfig(block_size=4, num_blocks=50), schedule, vocab_size=1000)
    script = [add("a", 5, max_tokens=40), *[None] * 60]
    engine = Engine(scheduler, FakeRunner(50, 4))
    smoke_test(engine)
    assert scheduler.speculation is not None
    assert scheduler.speculation.counters.drafted == 0, "a dummy run counts nothing"
    loop = EngineLoop(engine, FakeLink(script))  # type: ignore[arg-type]
    loop.run()
    heartbeat = loop.heartbeat
    counters = scheduler.speculation.counters
    assert 0 < heartbeat.verifications == counters.verifications
    assert heartbeat.drafted_tokens == counters.drafted > heartbeat.accepted_tokens > 0
    assert heartbeat.accepted_tokens == sum(heartbeat.accepted_at)
    assert decode_to_front(encode(heartbeat)) == heartbeat

    text = rendered(heartbeat)
    label = 'model_name="m"'
    name = "octavo:spec_decode_num"
    assert f"{name}_drafts_total{{{label}}} {heartbeat.verifications:.1f}\n" in text
    assert f"{name}_draft_tokens_total{{{label}}} {heartbeat.drafted_tokens:.1f}\n" in text
    assert f"{name}_accepted_tokens_total{{{label}}} {heartbeat.accepted_tokens:.1f}\n" in text
    for place, count in enumerate(heartbeat.accepted_at):
        labels = f'{label},position="{place}"'
        assert f"{name}_accepted_tokens_per_pos_total{{{labels}}} {count:.1f}\n" in text
    assert len(heartbeat.accepted_at) == 3


def test_without_drafts_their_metrics_are_0() -> None:
    text = rendered(Heartbeat())
    for name in ("drafts", "draft_tokens", "accepted_tokens"):
        assert f'octavo:spec_decode_num_{name}_total{{model_name="m"}} 0.0\n' in text
    assert "position=" not in text


def test_violated_invariants_are_logged_and_counted_and_the_engine_continues(
    caplog: pytest.LogCaptureFixture,
) -> None:
    schedule = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=200)
    scheduler = Scheduler(CacheConfig(block_size=4, num_blocks=50), schedule, vocab_size=1000)
    script = [add("a", 5, max_tokens=8), *[None] * 20]
    loop = EngineLoop(Engine(scheduler, FakeRunner(50, 4)), FakeLink(script), check_interval=1e-9)  # type: ignore[arg-type]
    loop.run()
    sound = loop.checks
    assert sound >= 8 and loop.check_failures == 0
    scheduler.pool.ref_counts[50] += (
        1  # the planted bug: a block that nobody holds is counted as held
    )
    loop.link.script.extend([add("b", 5, max_tokens=3), *[None] * 20])  # type: ignore[attr-defined]
    loop.run()
    assert loop.check_failures == loop.checks - sound > 0
    dump = json.loads(caplog.records[0].message)
    assert dump["event"] == "invariant_broken" and "reference counts disagree" in dump["error"]
    assert dump["sequences"][0]["request"] == "b" and dump["scheduler"]["check_failures"] == 1
    outputs = [out for m in loop.link.sent if isinstance(m, StepOutputs) for out in m.outputs]  # type: ignore[attr-defined]
    assert sum(len(out.tokens) for out in outputs if out.request_id == "b") == 3


def test_a_step_that_fails_on_a_lost_device_ends_the_process_and_another_failure_does_not() -> None:
    for alive in (True, False):
        schedule = ScheduleConfig(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=200)
        scheduler = Scheduler(CacheConfig(block_size=4, num_blocks=50), schedule, vocab_size=1000)
        runner, link = FakeRunner(50, 4), FakeLink([add("a", 5, max_tokens=8), *[None] * 20])
        runner.failing, runner.failures = 1.0, 1
        loop = EngineLoop(Engine(scheduler, runner), link)  # type: ignore[arg-type]
        loop.alive = lambda alive=alive: alive  # type: ignore[method-assign, misc]
        if alive:
            loop.run()
            assert any(
                out.finish_reason == "error"
                for m in link.sent
                if isinstance(m, StepOutputs)
                for out in m.outputs
            )
        else:
            with pytest.raises(DeviceLost):
                loop.run()
            assert not any(isinstance(m, StepOutputs) for m in link.sent), (
                "the front says what became of them when it misses us"
            )


# ---- steps that may take long --------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_long_step_is_told_of_until_it_has_landed(
    depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt of 14 tokens, a second each: before it is launched, and in all news until its result
    is there."""
    step_seconds, landed = [0.0], []
    loop_of = EngineLoop.__init__

    def slow(self: EngineLoop, *args: Any) -> None:
        loop_of(self, *args, seconds_per_token=1.0)
        launch = self.engine.runner.launch

        def watched(plan: Any) -> Any:
            assert step_seconds[-1] >= (plan.num_tokens if plan.num_tokens > 5 else 0), (
                "told before"
            )
            return launch(plan)

        self.engine.runner.launch = watched  # type: ignore[method-assign]

    def send(self: FakeLink, message: Any) -> None:
        if isinstance(message, StepOutputs):
            step_seconds.append(message.step_seconds)
            if message.outputs:
                landed.append(message.step_seconds)
        self.sent.append(message)

    monkeypatch.setattr(EngineLoop, "__init__", slow)
    monkeypatch.setattr(FakeLink, "send", send)
    _, sent = run([add("a", 14, max_tokens=4), *[None] * 12], depth)
    assert max(step_seconds) == 14 and step_seconds[-1] == 0 and landed[0] == 0
    assert [id for m in sent if isinstance(m, StepOutputs) for id, _ in m.admitted] == ["a"], (
        "and that it has begun, once"
    )
    first = next(i for i, m in enumerate(sent) if isinstance(m, StepOutputs))
    assert sent[first].admitted and not sent[first].outputs and sent[first].step_seconds == 14


def test_a_long_step_that_fails_is_not_waited_for() -> None:
    announced: list[float] = []
    events = EventBus()
    long_steps = LongSteps(events, seconds_per_token=1.0, announce=announced.append)
    long_plan = Plan(1, items=[Item(1, 0, 0, 0, 14, True, 14)])
    short_plan = Plan(2, items=[Item(1, 0, 0, None, 1, True, 15)])
    for plan in (long_plan, short_plan):
        events.emit(StepPlanned(plan, token_budget=16))
    assert announced == [14.0] and long_steps.longest == 14.0
    events.emit(StepFailed(long_plan, RuntimeError()))
    assert long_steps.longest == 0.0


def test_an_engine_that_hangs_in_a_long_step_is_noticed_though_its_requests_have_left() -> None:
    work: dict[str, Any] = {"a": 1}
    config = ServeConfig(stall_dump=0.1, stall_kill=0.3, request_timeout=0.4)
    watched = Supervisor(config, lambda message: None, lambda: None, lambda: work)
    ended: list[float] = []

    async def nothing(*_: Any) -> None:
        pass

    async def hang() -> None:
        watched.phase, watched._dump, watched._kill = (
            "ready",
            nothing,
            lambda: ended.append(time.monotonic()),
        )  # type: ignore
        watch = asyncio.create_task(watched._watch(None))
        watched._receive(StepOutputs([], [("a", 0.0)], [], step_seconds=1e6))
        for steps in range(10):
            # the first leaves, another comes
            work.clear() if steps == 2 else work.setdefault("b", 1)
            watched._receive(Heartbeat(steps=1))
            await asyncio.sleep(0.2)
        watch.cancel()

    asyncio.run(hang())
    assert len(ended) == 1


def test_a_request_that_ends_with_its_first_step_has_begun_too() -> None:
    _, sent = run([add("a", max_tokens=1), *[None] * 3])
    (news,) = [m for m in sent if isinstance(m, StepOutputs) and m.outputs]
    assert [id for id, _ in news.admitted] == ["a"] and news.outputs[0].finish_reason == "length"


def test_the_steps_of_who_left_are_counted_when_the_engine_rests() -> None:
    m = add("a", max_tokens=50)
    m.send_at_end = True
    _, sent = run([m, *[None] * 8, Abort(["a"]), None], depth=2)
    assert sum(len(news.steps) for news in sent if isinstance(news, StepOutputs)) >= 8


def test_the_front_is_told_whether_there_is_room() -> None:
    """Four rows: the fifth waits for one, and the front need not hear of anything else meanwhile to
    know."""
    messages = [add(name, max_tokens=20) for name in "abcde"]
    for m in messages:
        m.send_at_end = True
    _, sent = run([*messages, *[None] * 60])
    told = [news.saturated for news in sent if isinstance(news, StepOutputs)]
    assert True in told and told[-1] is False


def test_requests_aborted_in_an_idle_engine_free_their_room() -> None:
    _, sent = run(
        [*[add(name, max_tokens=50) for name in "abcde"], None, None, Abort(list("abcde"))]
    )
    assert [news.saturated for news in sent if isinstance(news, StepOutputs)][-1] is False
