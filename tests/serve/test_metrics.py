"""The histograms are Prometheus's own, only quicker to count."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from octavo.serve.channel.messages import Heartbeat
from octavo.serve.front.metrics import OLD_NAMES, PER_TOKEN, Metrics, UnlockedHistogram


def lines(registry: CollectorRegistry) -> list[str]:
    return [
        line for line in generate_latest(registry).decode().splitlines() if "_created" not in line
    ]


def test_a_tally_shows_what_the_librarys_histogram_shows() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = UnlockedHistogram("octavo:x_seconds", "Seconds.", PER_TOKEN, {"model_name": "m"})
    ours.register(tally)
    histogram = Histogram(
        "octavo:x_seconds", "Seconds.", ["model_name"], registry=theirs, buckets=PER_TOKEN
    ).labels("m")
    dice = random.Random(0)
    for value in [*(dice.expovariate(20) for _ in range(1000)), *PER_TOKEN, 0.0, 99.0]:
        tally.observe(value)
        histogram.observe(value)
    assert lines(ours) == lines(theirs)


@pytest.mark.parametrize("prefix", ["vllm", "octavo"])
def test_metrics_that_vllm_has_renamed_have_both_names_under_its_prefix(prefix: str) -> None:
    heartbeat = Heartbeat(blocks_used=1, blocks_free=3, queried_tokens=7, cached_tokens=5)
    metrics = Metrics(prefix, "m")
    metrics.itl.observe(0.5)
    metrics.source.engine_client = SimpleNamespace(  # type: ignore[assignment]
        supervisor=SimpleNamespace(
            heartbeat=heartbeat, starts=1, recovery=0.0, loaded=None, sleep_level=0
        ),
        queue_bound=SimpleNamespace(waiting=[], tokens=0),
        open_requests={},
        ready=True,
        engine_saturated=False,
    )
    samples = {}
    for line in metrics.render().decode().splitlines():
        name, _, rest = line.partition("{")
        samples[name] = float(rest.rpartition(" ")[2]) if rest else None
    assert samples[f"{prefix}:kv_cache_usage_perc"] == 0.25
    assert samples[f"{prefix}:prefix_cache_hits_total"] == 5
    assert samples[f"{prefix}:inter_token_latency_seconds_sum"] == 0.5
    for old, name in OLD_NAMES.items():
        for ending in ("", "_total", "_sum", "_count"):
            value = samples.get(f"{prefix}:{name}{ending}") if prefix == "vllm" else None
            assert samples.get(f"{prefix}:{old}{ending}") == value
