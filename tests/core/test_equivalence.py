"""The core gives the oracle's tokens whatever the chunks, the cache, the pool, the tiers, the depth, the forks, the aborts and
the steps that fail."""

from __future__ import annotations

import pytest

from tests.workloads import trial

TRIALS, PARTS = 1200, 12


@pytest.mark.parametrize("part", range(PARTS))
def test_random_workloads_equal_the_oracle(part: int) -> None:
    total = [trial(seed) for seed in range(part, TRIALS, PARTS)]
    assert sum(t.sequences for t in total) > 500
    assert sum(t.preemptions for t in total) > 50, "the workloads no longer exercise preemption"
    assert sum(t.copies for t in total) > 30, "the workloads no longer exercise copy on write"
    assert sum(t.cached for t in total) > 1000, "the workloads no longer exercise the prefix cache"
    assert sum(t.host_tokens for t in total) > 100, "the workloads no longer exercise host memory"
    assert sum(t.disk_tokens for t in total) > 10, "the workloads no longer exercise the disk"
    assert sum(t.misses for t in total) > 5, "the workloads no longer exercise a disk that fails"


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_more_random_workloads_equal_the_oracle(part: int) -> None:
    for seed in range(10_000 + part * 1000, 10_000 + (part + 1) * 1000):
        trial(seed)
