"""The numbers that LLM.get_metrics returns. Names, classes and units are those of vLLM."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from octavo.core.engine import Engine
from octavo.outputs import RequestOutput

# Upper bounds of the buckets, in seconds.
TTFT_BOUNDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 40.0)
LATENCY_BOUNDS = (0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0, 60.0, 120.0, 240.0)


@dataclass
class Metric:
    name: str
    labels: dict[str, str]


@dataclass
class Counter(Metric):
    value: int


@dataclass
class Gauge(Metric):
    value: float


@dataclass
class Vector(Metric):
    """Several counters that are numbered from 0."""

    values: list[int]


@dataclass
class HistogramMetric(Metric):
    """`buckets` counts the values up to each bound, "+Inf" included."""

    count: int
    sum: float
    buckets: dict[str, int]


@dataclass
class Durations:
    """A histogram that is being filled."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, seconds: float | None) -> None:
        if seconds is not None:
            self.counts[bisect_left(self.bounds, seconds)] += 1
            self.sum += seconds

    def histogram(self, name: str) -> HistogramMetric:
        buckets: dict[str, int] = {}
        count = 0
        for bound, bucket_count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            count += bucket_count
            buckets[bound] = count
        return HistogramMetric(name, {}, count, self.sum, buckets)


class RequestTotals:
    """Totals over the requests that have ended."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.finished: dict[str, int] = {}  # completions by finish_reason
        self.first_token = Durations(TTFT_BOUNDS)
        self.latency = Durations(LATENCY_BOUNDS)

    def add(self, output: RequestOutput) -> None:
        self.prompt_tokens += len(output.prompt_token_ids)
        for completion in output.outputs:
            reason = completion.finish_reason or "abort"
            self.finished[reason] = self.finished.get(reason, 0) + 1
        self.first_token.add(output.metrics.time_to_first_token)
        self.latency.add(output.metrics.latency)

    def metrics(self, engine: Engine) -> list[Metric]:
        return [
            *self._request_metrics(),
            *scheduler_metrics(engine),
            *draft_metrics(engine),
        ]

    def _request_metrics(self) -> list[Metric]:
        ended: list[Metric] = [
            Counter("vllm:request_success", {"finished_reason": reason}, count)
            for reason, count in sorted(self.finished.items())
        ]
        return [
            Counter("vllm:prompt_tokens", {}, self.prompt_tokens),
            *ended,
            self.first_token.histogram("vllm:time_to_first_token_seconds"),
            self.latency.histogram("vllm:e2e_request_latency_seconds"),
        ]


def scheduler_metrics(engine: Engine) -> list[Metric]:
    scheduler = engine.scheduler
    counters = scheduler.counters
    pool = scheduler.pool
    used = pool.num_blocks - pool.num_available
    return [
        Gauge("vllm:num_requests_running", {}, len(scheduler.running)),
        Gauge("vllm:num_requests_waiting", {}, len(scheduler.waiting)),
        Gauge("vllm:kv_cache_usage_perc", {}, used / max(pool.num_blocks, 1)),
        Counter("vllm:prefix_cache_queries", {}, counters.queried_tokens),
        Counter("vllm:prefix_cache_hits", {}, counters.cached_tokens),
        Counter("vllm:num_preemptions", {}, counters.preemptions),
        Counter("vllm:generation_tokens", {}, counters.generated_tokens),
    ]


def draft_metrics(engine: Engine) -> list[Metric]:
    speculation = engine.scheduler.speculation
    if speculation is None:
        return []
    counters = speculation.counters
    return [
        Counter("vllm:spec_decode_num_drafts", {}, counters.verifications),
        Counter("vllm:spec_decode_num_draft_tokens", {}, counters.drafted),
        Counter("vllm:spec_decode_num_accepted_tokens", {}, counters.accepted),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", {}, list(counters.accepted_at)),
    ]
