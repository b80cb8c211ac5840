"""Simulates a cluster of replicas behind a router, with the cost model of one engine.

    requests -> router -> replicas (cluster_replica.py) -> ClusterReport

The simulation is driven by events: an arrival, the end of a run of steps, a crash, a restart, or
the end of a transfer. A million requests on a thousand replicas take minutes on one core. Beyond
the simplifications of a replica, the router knows the load of every replica at once, and the times
of the network, the API server and the router itself are not counted.

With `prefill_replicas`, prompts are computed on these replicas only, and their KV is sent over a
link to the others, which decode (disaggregated prefill).
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.bench.cluster_replica import ClusterReplica, ClusterRequest, ReplicaOptions
from octavo.bench.cluster_router import ROUTERS, Router
from octavo.core.trace import BLOCK, SyntheticTrace, TraceEntry

BINS_PER_FACTOR = 100  # bins of the histogram of times, for each factor of e
SHORTEST = 1e-5  # the time of the first bin, in seconds
NUM_BINS = 2400
MAX_PIECES = 8  # A run of steps is divided into at most this many pieces for the histogram.


# ---- requests ------------------------------------------------------------------------------------


def requests_of_entries(entries: Iterable[TraceEntry]) -> Iterator[ClusterRequest]:
    """Return the requests of a trace. Each full block is a segment of the prefix cache."""
    for entry in entries:
        segments = [(number, BLOCK) for number in entry.blocks]
        yield ClusterRequest(entry.arrival, entry.prompt, entry.output, segments)


def synthetic_requests(trace: SyntheticTrace) -> Iterator[ClusterRequest]:
    """Make the requests of a synthetic trace one by one, so that a million need little memory.

    A prompt consists of a segment that its group shares and a unique segment. The random numbers
    are drawn in another order than for TraceEntry, so the requests are others with the same
    distribution.
    """
    generator = np.random.default_rng(trace.seed)
    weights = np.array(trace.group_weights())
    edges = np.cumsum(weights) / weights.sum()
    shared = trace.shared // BLOCK * BLOCK
    arrival = 0.0
    num_made = 0
    while num_made < trace.num_requests:
        count = min(trace.num_requests - num_made, 65_536)
        gaps = generator.exponential(1 / trace.rate, count)
        prompts = generator.integers(trace.prompt[0], trace.prompt[1] + 1, count)
        outputs = generator.integers(trace.output[0], trace.output[1] + 1, count)
        groups = np.searchsorted(edges, generator.random(count), side="right")
        drawn = zip(gaps.tolist(), prompts.tolist(), outputs.tolist(), groups.tolist(), strict=True)
        for gap, own_prompt, output, group in drawn:
            arrival += gap
            num_made += 1
            prompt = trace.shared + own_prompt
            own_tokens = (prompt + output) // BLOCK * BLOCK - shared
            segments = [(num_made, own_tokens)]
            if shared:
                segments.insert(0, (-1 - group, shared))
            yield ClusterRequest(arrival, prompt, output, segments)


# ---- the cluster ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class ClusterOptions:
    replica: ReplicaOptions
    replicas: int = 1
    routing: str = "round_robin"
    # Seconds between two crashes of one replica, on average. Infinity: none crashes.
    mean_time_between_failures: float = math.inf
    restart_seconds: float = 60.0
    # Disaggregated prefill: how many of the replicas compute prompts, and the link of each.
    prefill_replicas: int = 0
    link_bytes_per_second: float = math.inf
    kv_bytes_per_token: float = 0.0
    # A reply within both limits counts as goodput. The second is of the average over a reply.
    ttft_limit: float = 2.0
    itl_limit: float = 0.1
    seed: int = 0


class Histogram:
    """Counts times in bins whose width is 1% of the time."""

    def __init__(self) -> None:
        self.counts = [0] * NUM_BINS

    def add_range(self, first: float, last: float, count: int) -> None:
        """Count times that lie evenly between two times."""
        if last < 1.02 * first or count < MAX_PIECES:
            self._add((first + last) / 2, count)
            return
        for piece in range(MAX_PIECES):
            time = first + (last - first) * (piece + 0.5) / MAX_PIECES
            self._add(time, count * (piece + 1) // MAX_PIECES - count * piece // MAX_PIECES)

    def _add(self, time: float, count: int) -> None:
        position = int(BINS_PER_FACTOR * math.log(max(time, SHORTEST) / SHORTEST))
        self.counts[min(position, NUM_BINS - 1)] += count

    def percentile(self, q: float) -> float:
        target_count = math.ceil(sum(self.counts) * q / 100)
        seen = 0
        for position, count in enumerate(self.counts):
            seen += count
            if seen >= target_count > 0:
                return SHORTEST * math.exp((position + 0.5) / BINS_PER_FACTOR)
        return math.nan


@dataclass
class ClusterReport:
    """The counts of a simulation. Times are seconds from a request's arrival."""

    ttft: list[float]
    e2e: list[float]
    gaps: Histogram
    seconds: float = 0.0
    output_tokens: int = 0
    good_replies: int = 0
    good_tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    crashes: int = 0
    failed: int = 0  # requests that had started on a replica that crashed
    retried: int = 0  # requests that had not started, and were sent to another replica
    transferred_tokens: int = 0

    def summary(self, busy_seconds: list[float]) -> dict[str, Any]:
        mean_busy = sum(busy_seconds) / len(busy_seconds)
        seconds = max(self.seconds, 1e-9)
        replies = len(self.e2e)
        summary: dict[str, Any] = {
            "requests": replies + self.failed,
            "failed": self.failed,
            "retried": self.retried,
            "crashes": self.crashes,
            "seconds": self.seconds,
            "tok_s": self.output_tokens / seconds,
            "cache_hits": self.cached_tokens / max(self.prompt_tokens, 1),
            "utilisation": mean_busy / seconds,
            "busiest": max(busy_seconds) / max(mean_busy, 1e-9),
            "goodput": self.good_replies / max(replies + self.failed, 1),
            "goodput_tok_s": self.good_tokens / seconds,
        }
        for name, values in (("ttft", self.ttft), ("e2e", self.e2e)):
            for q in (50, 99):
                summary[f"{name}_p{q}_ms"] = 1e3 * array_percentile(values, q)
        for q in (50, 99):
            summary[f"itl_p{q}_ms"] = 1e3 * self.gaps.percentile(q)
        return summary


def array_percentile(values: list[float], q: float) -> float:
    """Return the value that q percent of the values do not exceed."""
    return float(np.percentile(values, q, method="inverted_cdf")) if values else math.nan


class Cluster:
    def __init__(self, options: ClusterOptions):
        self.options = options
        self.report = ClusterReport([], [], Histogram())
        self.random = random.Random(options.seed)
        self.replicas = [
            ClusterReplica(
                options=options.replica,
                add_gaps=self.report.gaps.add_range,
                on_first_token=self._on_first_token(index),
                on_finish=self._on_finish(index),
            )
            for index in range(options.replicas)
        ]
        decoders = range(options.prefill_replicas, options.replicas)
        prefillers = range(options.prefill_replicas) if options.prefill_replicas else decoders
        self.router: Router = ROUTERS[options.routing](prefillers, self.random)
        self.decode_router: Router = ROUTERS["least_loaded"](decoders, self.random)
        self.link_free_at = [0.0] * options.replicas
        # (time, number, handler of the event)
        self.events: list[tuple[float, int, Callable[[float], None]]] = []
        self.num_events = 0
        self.num_open = 0
        self.now = 0.0

    # ---- the loop ------------------------------------------------------------------------------

    def run(self, requests: Iterable[ClusterRequest]) -> dict[str, Any]:
        """Play the requests to the last token and return a summary."""
        if math.isfinite(self.options.mean_time_between_failures):
            for index in range(len(self.replicas)):
                self._schedule_crash(index, 0.0)
        for request in requests:
            self._play_until(request.arrival)
            self.now = request.arrival
            self.num_open += 1
            self.report.prompt_tokens += request.prompt
            self._route(request, request.arrival)
        while self.num_open:
            self._play_until(self.events[0][0])
        self.report.seconds = self.now
        return self.report.summary([replica.busy_seconds for replica in self.replicas])

    def _play_until(self, time: float) -> None:
        events = self.events
        while events and events[0][0] <= time:
            now, _, act = heapq.heappop(events)
            self.now = now
            act(now)

    def _schedule(self, time: float, act: Callable[[float], None]) -> None:
        self.num_events += 1
        heapq.heappush(self.events, (time, self.num_events, act))

    def _schedule_run_end(self, index: int) -> None:
        """Wait for the end of the run of a replica, unless it is cut or the replica crashes."""
        replica = self.replicas[index]
        if not replica.run_steps:
            return
        run = replica.num_runs

        def end(now: float) -> None:
            if replica.num_runs == run:
                replica.end_run()
                self._schedule_run_end(index)

        self._schedule(replica.ends_at, end)

    # ---- requests ------------------------------------------------------------------------------

    def _route(self, request: ClusterRequest, now: float) -> None:
        index = self.router.choose(request)
        if index is None:  # every replica is down
            self._schedule(now + 1.0, lambda later: self._route(request, later))
            return
        self._send(index, self.router, request, now)

    def _send(self, index: int, router: Router, request: ClusterRequest, now: float) -> None:
        replica = self.replicas[index]
        run = replica.num_runs
        router.add_load(index, 1)
        replica.arrive(request, now)
        if replica.num_runs != run:
            self._schedule_run_end(index)

    def _on_first_token(self, index: int) -> Callable[[ClusterRequest, float], bool]:
        def handle(request: ClusterRequest, now: float) -> bool:
            self.report.ttft.append(now - request.arrival)
            self.report.cached_tokens += request.cached
            if index >= self.options.prefill_replicas:
                return True
            if request.output > 1:
                self._transfer(index, request, now)
            return False

        return handle

    def _on_finish(self, index: int) -> Callable[[ClusterRequest, float], None]:
        def handle(request: ClusterRequest, now: float) -> None:
            is_prefiller = index < self.options.prefill_replicas
            router = self.decode_router if request.is_transferred else self.router
            router.add_load(index, -1)
            if not is_prefiller or request.output == 1:
                self._record_reply(request, now)

        return handle

    def _record_reply(self, request: ClusterRequest, now: float) -> None:
        report = self.report
        self.num_open -= 1
        report.e2e.append(now - request.arrival)
        report.output_tokens += request.output
        mean_gap = (now - request.first_token_at) / max(request.output - 1, 1)
        first_token = request.first_token_at - request.arrival
        if first_token <= self.options.ttft_limit and mean_gap <= self.options.itl_limit:
            report.good_replies += 1
            report.good_tokens += request.output

    def _transfer(self, index: int, request: ClusterRequest, now: float) -> None:
        """Send the KV of a prompt to a replica that decodes. A link sends one prompt at a time."""
        size = request.prompt * self.options.kv_bytes_per_token
        start = max(now, self.link_free_at[index])
        end = start + size / self.options.link_bytes_per_second
        self.link_free_at[index] = end
        self.report.transferred_tokens += request.prompt
        request_to_decode = ClusterRequest(
            arrival=request.arrival,
            prompt=request.prompt,
            output=request.output,
            segments=[],
            computed=request.prompt,
            first_token_at=request.first_token_at,
            is_transferred=True,
        )
        self._schedule(end, lambda later: self._decode_elsewhere(request_to_decode, later))

    def _decode_elsewhere(self, request: ClusterRequest, now: float) -> None:
        target = self.decode_router.choose(request)
        if target is None:
            self._schedule(now + 1.0, lambda later: self._decode_elsewhere(request, later))
            return
        self._send(target, self.decode_router, request, now)

    # ---- failures ------------------------------------------------------------------------------

    def _schedule_crash(self, index: int, now: float) -> None:
        seconds = self.random.expovariate(1 / self.options.mean_time_between_failures)
        self._schedule(now + seconds, lambda later: self._crash(index, later))

    def _crash(self, index: int, now: float) -> None:
        """Drop the requests that a replica has started. Its waiting requests go to other
        replicas."""
        replica = self.replicas[index]
        self.report.crashes += 1
        started = replica.started
        waiting = list(replica.waiting)
        replica.clear()
        for router in (self.router, self.decode_router):
            router.remove(index)
        self.report.failed += len(started)
        self.num_open -= len(started)
        self._schedule(
            now + self.options.restart_seconds, lambda later: self._restart(index, later)
        )
        self.report.retried += len(waiting)
        for request in waiting:
            if request.is_transferred:
                self._decode_elsewhere(request, now)
            else:
                self._route(request, now)

    def _restart(self, index: int, now: float) -> None:
        for router in (self.router, self.decode_router):
            router.restore(index)
        self._schedule_crash(index, now)
