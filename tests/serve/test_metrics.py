"""The histograms are Prometheus's own, only quicker to count."""

from __future__ import annotations

import random

from prometheus_client import CollectorRegistry, Histogram, generate_latest

from octavo.serve.front.metrics import PER_TOKEN, Tally


def lines(registry: CollectorRegistry) -> list[str]:
    return [
        line for line in generate_latest(registry).decode().splitlines() if "_created" not in line
    ]


def test_a_tally_shows_what_the_librarys_histogram_shows() -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    tally = Tally("octavo:x_seconds", "Seconds.", PER_TOKEN, {"model_name": "m"})
    ours.register(tally)
    histogram = Histogram(
        "octavo:x_seconds", "Seconds.", ["model_name"], registry=theirs, buckets=PER_TOKEN
    ).labels("m")
    dice = random.Random(0)
    for value in [*(dice.expovariate(20) for _ in range(1000)), *PER_TOKEN, 0.0, 99.0]:
        tally.observe(value)
        histogram.observe(value)
    assert lines(ours) == lines(theirs)
