"""The simulation of a cluster agrees with the simulation of one engine, and policies and failures
have the effects that they must have."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from octavo.bench.cluster import (
    Cluster,
    ClusterOptions,
    Histogram,
    requests_of_entries,
    synthetic_requests,
)
from octavo.bench.cluster_replica import ReplicaOptions
from octavo.bench.cluster_router import ROUTERS
from octavo.config import CacheConfig, ScheduleConfig
from octavo.core.simulate import EMBEDDED_CPU, simulate
from octavo.core.trace import SyntheticTrace, read

REPLICA = ReplicaOptions(
    costs=EMBEDDED_CPU, max_num_seqs=4, max_num_batched_tokens=256, kv_tokens=4096, block_size=16
)
SCHEDULE = ScheduleConfig(4, 256, 2048, 1, short_prompt_share=0.0)
SHARED = "poisson:rate=8,n=400,prompt=16-64,output=8-32,shared=256,groups=40,seed=1"


def run(spec: str, **options: Any) -> dict[str, Any]:
    cluster = Cluster(ClusterOptions(replica=REPLICA, **options))
    return cluster.run(synthetic_requests(SyntheticTrace.parse(spec)))


@pytest.mark.parametrize(
    ("spec", "tolerance"),
    [
        # Without cached prefixes the times are those of the engine itself.
        ("poisson:rate=3,n=40,prompt=4-300,output=4-40", 1e-6),
        ("poisson:rate=12,n=40,prompt=4-100,output=1-40", 1e-6),
        ("poisson:rate=4,n=60,prompt=4-100,output=4-30,shared=128,groups=4", 1e-6),
        # The cache is too small for the prefixes, and replies are reserved in full.
        ("poisson:rate=4,n=60,prompt=4-100,output=4-30,shared=256,groups=20,skew=1", 0.10),
    ],
)
def test_one_replica_agrees_with_the_real_scheduler(spec: str, tolerance: float) -> None:
    entries = read(spec)
    exact = simulate(entries, EMBEDDED_CPU, CacheConfig(16, 256), SCHEDULE).summary()
    fast = Cluster(ClusterOptions(replica=REPLICA)).run(requests_of_entries(entries))
    for name in ("requests", "seconds", "tok_s", "ttft_p99_ms", "e2e_p99_ms"):
        assert fast[name] == pytest.approx(exact[name], rel=tolerance), name
    if tolerance < 0.01:
        assert fast["ttft_p50_ms"] == pytest.approx(exact["ttft_p50_ms"], rel=tolerance)
        assert fast["e2e_p50_ms"] == pytest.approx(exact["e2e_p50_ms"], rel=tolerance)
    for name in ("itl_p50_ms", "itl_p99_ms"):  # a bin of the histogram is 1% wide
        assert fast[name] == pytest.approx(exact[name], rel=tolerance + 0.02), name
    assert fast["cache_hits"] == pytest.approx(exact["cache_hits"], abs=tolerance)


def test_made_requests_have_the_lengths_and_groups_of_the_trace() -> None:
    spec = "poisson:rate=5,n=3000,prompt=10-30,output=5-9,shared=64,groups=10,skew=1"
    made = list(synthetic_requests(SyntheticTrace.parse(spec)))
    entries = read(spec)
    assert len(made) == len(entries) == 3000
    assert made[-1].arrival == pytest.approx(600, rel=0.1)
    assert {request.prompt for request in made} == {entry.prompt for entry in entries}
    assert {request.output for request in made} == set(range(5, 10))
    groups = [request.segments[0][0] for request in made]
    assert len(set(groups)) == 10
    share = groups.count(-1) / 3000
    assert share == pytest.approx(1 / sum(1 / n for n in range(1, 11)), abs=0.04)


def test_every_request_ends_once_and_has_all_its_tokens() -> None:
    for routing in ROUTERS:
        result = run(SHARED, replicas=4, routing=routing)
        assert result["requests"] == 400 and result["failed"] == 0
        outputs = [request.output for request in synthetic_requests(SyntheticTrace.parse(SHARED))]
        assert result["tok_s"] * result["seconds"] == pytest.approx(sum(outputs))


def test_policies_differ_as_they_should() -> None:
    results = {routing: run(SHARED, replicas=8, routing=routing) for routing in ROUTERS}
    hits = {routing: result["cache_hits"] for routing, result in results.items()}
    assert hits["prefix_affinity"] > 2 * hits["round_robin"]
    assert hits["prefix_affinity"] > 2 * hits["least_loaded"]
    waits = {routing: result["ttft_p99_ms"] for routing, result in results.items()}
    assert waits["prefix_affinity"] < waits["round_robin"]
    assert waits["least_loaded"] < waits["power_of_two"], "two choices see less than all"
    busiest = {routing: result["busiest"] for routing, result in results.items()}
    assert all(1 <= value < 2 for value in busiest.values())


def test_a_popular_prefix_does_not_overload_one_replica() -> None:
    spec = "poisson:rate=60,n=800,prompt=16-64,output=8-32,shared=256,groups=40,skew=3"
    result = run(spec, replicas=8, routing="prefix_affinity")
    assert result["busiest"] < 2 and result["cache_hits"] > 0.6


def test_crashes_lose_what_had_started_and_nothing_else() -> None:
    options = {"replicas": 8, "routing": "prefix_affinity"}
    healthy = run(SHARED, **options)
    result = run(SHARED, **options, mean_time_between_failures=40.0, restart_seconds=5.0)
    assert result["crashes"] > 3 and healthy["crashes"] == 0
    assert result["requests"] == 400, "every request ends: with a reply or with an error"
    assert 0 < result["failed"] <= result["crashes"] * REPLICA.max_num_seqs
    assert result["cache_hits"] < healthy["cache_hits"], "a crash empties a cache"
    assert result["goodput"] < healthy["goodput"]


def test_a_cluster_that_is_all_down_serves_again() -> None:
    result = run(
        "poisson:rate=2,n=30,prompt=8,output=4",
        replicas=1,
        mean_time_between_failures=3.0,
        restart_seconds=4.0,
    )
    assert result["requests"] == 30 and result["crashes"] > 1


def test_a_transfer_takes_as_long_as_its_bytes() -> None:
    spec = "poisson:rate=0.05,n=20,prompt=128,output=10"
    options = {"replicas": 2, "prefill_replicas": 1, "kv_bytes_per_token": 1000.0}
    slow = run(spec, **options, link_bytes_per_second=128_000.0)
    fast = run(spec, **options, link_bytes_per_second=math.inf)
    assert slow["ttft_p50_ms"] == pytest.approx(fast["ttft_p50_ms"]), (
        "the first token needs no transfer"
    )
    assert slow["e2e_p50_ms"] - fast["e2e_p50_ms"] == pytest.approx(1000.0), (
        "128 tokens of 1000 bytes"
    )
    assert slow["itl_p99_ms"] > 1000.0 > 100 * fast["itl_p99_ms"]
    together = run(spec, replicas=2)
    assert fast["e2e_p50_ms"] == pytest.approx(together["e2e_p50_ms"], rel=1e-6)


def test_disaggregated_prefill_keeps_prompts_out_of_decode_steps() -> None:
    spec = "poisson:rate=20,n=300,prompt=100-150,output=40-80"
    together = run(spec, replicas=4, routing="least_loaded")
    apart = run(
        spec,
        replicas=4,
        routing="least_loaded",
        prefill_replicas=2,
        link_bytes_per_second=1e9,
        kv_bytes_per_token=23_040,
    )
    assert apart["requests"] == together["requests"] == 300
    assert apart["itl_p99_ms"] < together["itl_p99_ms"]


def test_the_histogram_is_exact_to_a_percent() -> None:
    histogram = Histogram()
    histogram.add_range(0.010, 0.010, 900)
    histogram.add_range(0.100, 0.300, 100)
    assert histogram.percentile(50) == pytest.approx(0.010, rel=0.01)
    assert histogram.percentile(95) == pytest.approx(0.200, rel=0.1)
    assert math.isnan(Histogram().percentile(50))


@pytest.mark.slow
def test_a_million_requests_on_a_thousand_replicas() -> None:
    spec = "poisson:rate=600,n=1e6,prompt=16-256,output=16-128,shared=1024,groups=8000,skew=0.6"
    replica = replace(REPLICA, max_num_seqs=16, max_num_batched_tokens=2048, kv_tokens=32_768)
    options = ClusterOptions(replica=replica, replicas=1000, routing="prefix_affinity")
    result = Cluster(options).run(synthetic_requests(SyntheticTrace.parse(spec)))
    assert result["requests"] == 1_000_000 and result["cache_hits"] > 0.7
