"""Simulation: the same scheduler and engine with a runner that computes nothing and a clock that
only counts how long the steps would have taken.

    trace -> requests -> replay(engine) -> Report

The clock of the engine is real or a VirtualClock.

`replay` serves two purposes: a simulation plays a trace as fast as Python can, and a benchmark
plays it on a model in real time. The cost of a step is a linear function of a few features of its
plan (Costs), fitted to a real run by octavo/bench/calibrate.py.
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
from octavo.core.trace import TraceEntry, tokens_of_entry
from octavo.events import Event, StepLanded
from octavo.params import SamplingParams
from octavo.types import Output, Plan, Request, StepResult

VOCABULARY = 50_000
FEATURES = ("step", "prefill", "sampled", "kv", "pairs")


def features(plan: Plan) -> tuple[float, ...]:
    """Return what a step's time depends on, in the order of FEATURES: 1, the prompt tokens, the
    sequences that sample, the KV entries these read, and the pairs of prompt tokens and KV
    entries."""
    prefill = 0
    sampled = 0
    kv_entries = 0
    pairs = 0
    for item in plan.items:
        sampled += item.sample
        if item.start is None:
            kv_entries += item.max_kv_len
        else:
            prefill += item.num_tokens
            pairs += item.num_tokens * (item.start + item.max_kv_len) // 2
    return 1.0, prefill, sampled, kv_entries, pairs


@dataclass(frozen=True)
class Costs:
    """Seconds that one unit of each feature adds to a step."""

    step: float
    prefill: float
    sampled: float
    kv: float
    pairs: float

    def seconds(self, values: tuple[float, ...]) -> float:
        return sum(
            getattr(self, name) * value for name, value in zip(FEATURES, values, strict=True)
        )


# The embedded model on two cores of a server CPU with AVX-512, measured by
# `octavo simulate --calibrate smollm2 --max-num-seqs 16`.
EMBEDDED_CPU = Costs(step=3.8e-3, prefill=4.5e-4, sampled=4.9e-4, kv=2.4e-6, pairs=5.3e-7)


class VirtualClock:
    """A clock that advances only by sleep()."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@dataclass
class SimulatedStep:
    """A launched step that lands at a given time."""

    clock: VirtualClock
    lands_at: float
    result: StepResult

    def wait(self) -> StepResult:
        self.clock.now = max(self.clock.now, self.lands_at)
        return self.result


class CostRunner:
    """A runner whose steps take the time of the cost model, one after another. It samples the
    tokens of the trace."""

    def __init__(self, costs: Costs, clock: VirtualClock, tokens: list[list[int]]):
        self.costs = costs
        self.clock = clock
        self.tokens = tokens
        self.free_at = 0.0
        # batch slot -> (index of the trace's request, number of known tokens)
        self.slots: dict[int, tuple[int, int]] = {}

    def launch(self, plan: Plan) -> SimulatedStep:
        for fill in plan.slot_fills:
            self.slots[fill.slot] = fill.seed, len(fill.tokens)
        sampled: list[list[int]] = []
        for item in plan.items:
            request, num_known = self.slots[item.slot]
            sampled.append([self.tokens[request][num_known]] if item.sample else [])
            self.slots[item.slot] = request, num_known + item.sample
        self.free_at = max(self.free_at, self.clock.now) + self.costs.seconds(features(plan))
        return SimulatedStep(self.clock, self.free_at, StepResult(sampled))


# ---- playing a trace -----------------------------------------------------------------------------


@dataclass
class Report:
    """Times of a played trace, in seconds from each request's arrival."""

    seconds: float = 0.0
    first_token: dict[str, float] = field(default_factory=dict)  # by request
    finished: dict[str, float] = field(default_factory=dict)
    gaps: list[float] = field(default_factory=list)  # between consecutive tokens
    priorities: dict[str, int] = field(default_factory=dict)
    tokens: int = 0
    errors: int = 0
    counters: dict[str, float] = field(default_factory=dict)

    def summary(self) -> dict[str, Any]:
        summary: dict[str, Any] = {
            "requests": len(self.finished),
            "errors": self.errors,
            "seconds": self.seconds,
            "tok_s": self.tokens / max(self.seconds, 1e-9),
        }
        for name, values in (
            ("ttft", list(self.first_token.values())),
            ("itl", self.gaps),
            ("e2e", list(self.finished.values())),
        ):
            summary |= {f"{name}_p{q}_ms": 1e3 * percentile(values, q) for q in (50, 99)}
        if len(set(self.priorities.values())) > 1:
            summary["ttft_p99_ms_by_priority"] = self._first_token_by_priority()
        return summary | self.counters

    def _first_token_by_priority(self) -> dict[str, float]:
        times: dict[int, list[float]] = {level: [] for level in self.priorities.values()}
        for request_id, seconds in self.first_token.items():
            times[self.priorities[request_id]].append(seconds)
        return {str(level): 1e3 * percentile(times[level], 99) for level in sorted(times)}

    def add_output(self, output: Output, now: float, arrival: float, last_token: float) -> None:
        """Count an output. `last_token` is the time of the previous one; NaN if there was none."""
        self.tokens += len(output.tokens)
        self.errors += output.error is not None
        if output.tokens and math.isnan(last_token):
            self.first_token[output.request_id] = now - arrival
        elif output.tokens:
            self.gaps.append(now - last_token)
        if output.finish_reason is not None:
            self.finished[output.request_id] = now - arrival


def percentile(values: list[float], q: float) -> float:
    """Return the value that q percent of the values do not exceed."""
    if not values:
        return math.nan
    return sorted(values)[max(math.ceil(len(values) * q / 100) - 1, 0)]


def requests_of(trace: list[TraceEntry], vocab_size: int) -> tuple[list[Request], list[list[int]]]:
    """Return the requests of a trace, and all tokens of each. A request's seed is its index."""
    tokens = [tokens_of_entry(entry, index, vocab_size) for index, entry in enumerate(trace)]
    requests = [
        Request(
            id=str(index),
            prompt=tokens[index][: entry.prompt],
            params=SamplingParams(
                max_tokens=entry.output, ignore_eos=True, detokenize=False, seed=index
            ),
            arrival=entry.arrival,
            priority=entry.priority,
            deadline=entry.deadline,
            tenant=entry.tenant,
        )
        for index, entry in enumerate(trace)
    ]
    return requests, tokens


def replay(
    engine: Engine, requests: list[Request], sleep: Callable[[float], None] = time.sleep
) -> Report:
    """Play requests to the last token. Their arrival times count from now."""
    clock = engine.scheduler.clock
    report = Report()
    landed: list[Event] = []
    engine.events.subscribe(landed.append, StepLanded)
    start = clock()
    for request in requests:
        request.arrival += start
        if request.deadline is not None:
            request.deadline += start
        report.priorities[request.id] = request.priority
    arrivals = {request.id: request.arrival for request in requests}
    last_tokens: dict[str, float] = {}
    pending = deque(requests)
    while pending or not engine.idle:
        while pending and pending[0].arrival <= clock():
            engine.add(pending.popleft())
        if engine.idle:
            sleep(max(pending[0].arrival - clock(), 0.0))
            continue
        outputs = engine.step()
        now = clock()
        for output in outputs:
            request_id = output.request_id
            last_token = last_tokens.get(request_id, math.nan)
            report.add_output(output, now, arrivals[request_id], last_token)
            if output.tokens:
                last_tokens[request_id] = now
    report.seconds = clock() - start
    counters = engine.scheduler.counters
    report.counters = {
        "steps": len(landed),
        "preemptions": counters.preemptions,
        "recomputed_tokens": counters.recomputed_tokens,
        "paused": counters.paused,
        "cache_hits": counters.cached_tokens / max(counters.queried_tokens, 1),
    }
    return report


def simulate(
    trace: list[TraceEntry], costs: Costs, cache: CacheConfig, schedule: ScheduleConfig
) -> Report:
    clock = VirtualClock()
    requests, tokens = requests_of(trace, VOCABULARY)
    scheduler = Scheduler(cache, schedule, VOCABULARY, clock=clock)
    runner = CostRunner(costs, clock, tokens)
    return replay(Engine(scheduler, runner, clock.sleep), requests, clock.sleep)
