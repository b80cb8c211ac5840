"""The same scheduler and engine with a runner that computes nothing and a clock that is only told how long it would have taken.

    trace -> requests -> replay(engine) -> Report        the engine's clock is real, or a VirtualClock

`replay` serves both: a simulation plays a trace as fast as Python can, a benchmark plays it on a model in real time. What a step
costs is a straight line through a few features of its plan (Costs), fitted to a real run by octavo/bench/calibrate.py.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.config import CacheConfig, ScheduleConfig
from octavo.core.engine import Engine
from octavo.core.scheduler import Scheduler
from octavo.core.trace import Entry, tokens
from octavo.params import SamplingParams
from octavo.types import Plan, Request, StepResult

VOCABULARY = 50_000
FEATURES = ("step", "prefill", "row", "kv", "pairs")


def features(plan: Plan) -> tuple[float, ...]:
    """What a step's time goes by, in FEATURES' order: 1; prompt tokens; rows that sample; KV entries that these read; and what
    prompt tokens read, all pairs of them."""
    prefill = rows = kv = pairs = 0
    for item in plan.items:
        rows += item.sample
        if item.start is None:
            kv += item.max_kv_len
        else:
            prefill += item.num_tokens
            pairs += item.num_tokens * (item.start + item.max_kv_len) // 2
    return 1.0, prefill, rows, kv, pairs


@dataclass(frozen=True)
class Costs:
    """Seconds that each feature adds to a step."""

    step: float
    prefill: float
    row: float
    kv: float
    pairs: float

    def seconds(self, found: tuple[float, ...]) -> float:
        return sum(getattr(self, name) * value for name, value in zip(FEATURES, found, strict=True))


# The embedded model on two cores of a server CPU with AVX-512, by `octavo simulate --calibrate smollm2 --max-num-seqs 16`.
EMBEDDED_CPU = Costs(step=3.8e-3, prefill=4.5e-4, row=4.9e-4, kv=2.4e-6, pairs=5.3e-7)


class VirtualClock:
    """Time that passes when somebody waits."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class _Landing:
    clock: VirtualClock
    due: float
    result: StepResult

    def wait(self) -> StepResult:
        self.clock.now = max(self.clock.now, self.due)
        return self.result


class CostRunner:
    """Takes as long as the costs say, one step after the other, and says what the trace says was said."""

    def __init__(self, costs: Costs, clock: VirtualClock, said: list[list[int]]):
        self.costs, self.clock, self.said, self.free = costs, clock, said, 0.0
        # row -> which of the trace's requests, tokens known
        self.rows: dict[int, tuple[int, int]] = {}

    def launch(self, plan: Plan) -> _Landing:
        for new in plan.new_slots:
            self.rows[new.slot] = new.seed, len(new.tokens)
        sampled: list[list[int]] = []
        for item in plan.items:
            which, known = self.rows[item.slot]
            sampled.append([self.said[which][known]] if item.sample else [])
            self.rows[item.slot] = which, known + item.sample
        self.free = max(self.free, self.clock.now) + self.costs.seconds(features(plan))
        return _Landing(self.clock, self.free, StepResult(sampled))


# ---- playing a trace --------------------------------------------------------------------------------------


@dataclass
class Report:
    """Times of what was played, in seconds from each request's arrival."""

    seconds: float = 0.0
    first: dict[str, float] = field(default_factory=dict)  # request -> time of its first token
    last: dict[str, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)  # from token to token
    level: dict[str, int] = field(default_factory=dict)  # request -> priority
    tokens: int = 0
    errors: int = 0
    counters: dict[str, float] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        found: dict[str, Any] = {"requests": len(self.last), "errors": self.errors, "seconds": self.seconds,
                                 "tok_s": self.tokens / max(self.seconds, 1e-9)}  # fmt: skip
        for name, values in (
            ("ttft", self.first.values()),
            ("itl", self.gaps),
            ("e2e", self.last.values()),
        ):
            found |= {f"{name}_p{q}_ms": 1e3 * percentile(list(values), q) for q in (50, 99)}
        levels = sorted(set(self.level.values()))
        if len(levels) > 1:
            first = {
                level: [t for name, t in self.first.items() if self.level[name] == level]
                for level in levels
            }
            found["ttft_p99_ms_by_priority"] = {
                str(level): 1e3 * percentile(times, 99) for level, times in first.items()
            }
        return found | self.counters


def percentile(values: list[float], q: float) -> float:
    """The value that q percent do not exceed."""
    return sorted(values)[max(math.ceil(len(values) * q / 100) - 1, 0)] if values else math.nan


def requests_of(trace: list[Entry], vocab_size: int) -> tuple[list[Request], list[list[int]]]:
    """What to ask, and all tokens of each. The seed tells which it is."""
    said = [tokens(entry, i, vocab_size) for i, entry in enumerate(trace)]
    asked = [
        Request(
            f"{i}",
            ids[: e.prompt],
            SamplingParams(max_tokens=e.output, ignore_eos=True, detokenize=False, seed=i),
            e.arrival,
            priority=e.priority,
            deadline=e.deadline,
            tenant=e.tenant,
        )
        for i, (e, ids) in enumerate(zip(trace, said, strict=True))
    ]
    return asked, said


def replay(
    engine: Engine, asked: list[Request], sleep: Callable[[float], None] = time.sleep
) -> Report:
    """Play requests at their times, which count from now, to the last token."""
    clock, count, report, steps = (
        engine.scheduler.clock,
        engine.scheduler.count,
        Report(),
        list[float](),
    )
    engine.observers.append(lambda plan, seconds: steps.append(seconds))
    start, todo, latest = clock(), deque(asked), dict[str, float]()
    for request in asked:
        request.arrival += start
        request.deadline = None if request.deadline is None else request.deadline + start
        report.level[request.id] = request.priority
    arrival = {request.id: request.arrival for request in asked}
    while todo or not engine.idle:
        while todo and todo[0].arrival <= clock():
            engine.add(todo.popleft())
        if engine.idle:
            sleep(max(todo[0].arrival - clock(), 0.0))
            continue
        outputs, now = engine.step(), clock()
        for out in outputs:
            name = out.request_id
            report.tokens += len(out.tokens)
            report.errors += out.error is not None
            if out.tokens:
                if name in latest:
                    report.gaps.append(now - latest[name])
                else:
                    report.first[name] = now - arrival[name]
                latest[name] = now
            if out.finish_reason is not None:
                report.last[name] = now - arrival[name]
    report.seconds = clock() - start
    report.counters = {
        "steps": len(steps),
        "preemptions": count.preemptions,
        "recomputed_tokens": count.recomputed_tokens,
        "aside": count.aside,
        "cache_hits": count.cached_tokens / max(count.queried_tokens, 1),
    }
    return report


def simulate(
    trace: list[Entry], costs: Costs, cache: CacheConfig, schedule: ScheduleConfig
) -> Report:
    clock = VirtualClock()
    asked, said = requests_of(trace, VOCABULARY)
    scheduler = Scheduler(cache, schedule, VOCABULARY, clock=clock)
    return replay(
        Engine(scheduler, CostRunner(costs, clock, said), clock.sleep), asked, clock.sleep
    )
