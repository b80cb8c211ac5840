"""The core gives the oracle's tokens whatever the chunks, the cache, the pool, the tiers, the
depth, the forks, the beams, the aborts, the steps that fail, the policy, the batching mode and the
mechanisms that are switched off."""

from __future__ import annotations

import pytest

from octavo.core.batching import MODES
from octavo.core.policy import POLICIES
from tests.workloads import trial

TRIALS, PARTS = 1200, 12


@pytest.mark.parametrize("part", range(PARTS))
def test_random_workloads_equal_the_oracle(part: int) -> None:
    total = [trial(seed) for seed in range(part, TRIALS, PARTS)]
    assert sum(t.sequences for t in total) > 500
    assert sum(t.preemptions for t in total) > 50, "the workloads no longer exercise preemption"
    assert sum(t.copies for t in total) > 30, "the workloads no longer exercise copy on write"
    assert sum(t.paused for t in total) > 100, "the workloads no longer pause sequences"
    assert sum(t.cached for t in total) > 1000, "the workloads no longer exercise the prefix cache"
    assert sum(t.host_tokens for t in total) > 100, "the workloads no longer exercise host memory"
    assert sum(t.disk_tokens for t in total) > 10, "the workloads no longer exercise the disk"
    assert sum(t.misses for t in total) > 5, "the workloads no longer exercise a disk that fails"


@pytest.mark.parametrize("batching", MODES)
@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_in_every_batching_mode_equals_the_oracle(policy: str, batching: str) -> None:
    total = [trial(seed, policy, batching, beams=seed % 4 == 0) for seed in range(20_000, 20_012)]
    assert {t.settings["depth"] for t in total} == {1, 2, 3} and sum(
        t.sequences for t in total
    ) > 60


@pytest.mark.parametrize("part", range(PARTS))
def test_guided_workloads_equal_the_oracle(part: int) -> None:
    total = [trial(seed, guided=True) for seed in range(part, TRIALS // 3, PARTS)]
    assert sum(t.guided for t in total) > 100
    assert sum(t.preemptions for t in total) > 5, "the workloads no longer exercise preemption"
    assert {t.settings["depth"] for t in total if t.guided} == {1, 2, 3}


@pytest.mark.parametrize("part", range(4))
def test_workloads_with_bounded_caches_equal_the_oracle(part: int) -> None:
    total = [
        trial(seed, guided=seed % 4 == 3, evict=True) for seed in range(part * 50, part * 50 + 50)
    ]
    assert sum(t.dropped for t in total) > 1000, "the workloads no longer exercise eviction"
    assert sum(t.preemptions for t in total) > 100, "the workloads no longer exercise preemption"
    assert sum(t.copies for t in total) > 30, "the workloads no longer exercise copy on write"
    assert {t.settings["depth"] for t in total} == {1, 2, 3}


@pytest.mark.parametrize("part", range(PARTS))
def test_workloads_with_beams_equal_the_oracle(part: int) -> None:
    total = [
        trial(seed, guided=seed % 5 == 0, beams=True) for seed in range(part, TRIALS // 3, PARTS)
    ]
    assert sum(t.beams for t in total) > 50
    assert sum(t.preemptions for t in total) > 50 and sum(t.copies for t in total) > 100
    assert {t.settings["depth"] for t in total if t.beams} == {1, 2, 3}


@pytest.mark.parametrize("part", range(PARTS))
def test_speculative_workloads_equal_the_oracle(part: int) -> None:
    total = [
        trial(seed, guided=seed % 3 == 0, beams=seed % 5 == 0, drafts=True)
        for seed in range(part, 1008, PARTS)
    ]
    assert sum(t.accepted for t in total) > 200, "the workloads no longer accept drafts"
    assert sum(t.drafted - t.accepted for t in total) > 200, "the workloads no longer reject drafts"
    assert sum(t.preemptions for t in total) > 50, "the workloads no longer exercise preemption"
    assert {t.settings["depth"] for t in total if t.accepted} == {1, 2, 3}


@pytest.mark.parametrize("part", range(4))
def test_workloads_with_mechanisms_switched_off_equal_the_oracle(part: int) -> None:
    total = [
        trial(seed, guided=seed % 4 == 0, beams=seed % 3 == 0, switches=True)
        for seed in range(60_000 + part, 60_100, 4)
    ]
    for switch in ("keeps_kv", "contiguous", "chunked_prefill"):
        assert {t.settings[switch] for t in total} == {True, False}
    without_kv = [t for t in total if not t.settings["keeps_kv"]]
    assert sum(t.recomputed for t in without_kv) > 500, "the workloads no longer recompute"
    assert sum(t.cached for t in without_kv) == 0


@pytest.mark.parametrize("part", range(2))
def test_workloads_with_pooling_equal_the_oracle(part: int) -> None:
    total = [
        trial(
            seed, guided=seed % 4 == 0, drafts=seed % 3 == 0, switches=seed % 5 == 0, pooling=True
        )
        for seed in range(part, 120, 2)
    ]
    assert sum(t.pooled for t in total) > 60
    assert sum(t.preemptions for t in total) > 20, "the workloads no longer exercise preemption"
    assert sum(t.cached for t in total) > 300, "the workloads no longer exercise the prefix cache"
    assert {t.settings["depth"] for t in total if t.pooled} == {1, 2, 3}


def test_workloads_on_several_ranks_equal_the_oracle() -> None:
    """Tensor parallelism: ranks that get nothing but the plans do what rank 0 does."""
    total = [
        trial(
            seed,
            guided=seed % 3 == 0,
            beams=seed % 5 == 0,
            drafts=seed % 2 == 0,
            ranks=2 + seed % 3,
        )
        for seed in range(40_000, 40_080)
    ]
    assert sum(t.preemptions for t in total) > 20, "the workloads no longer exercise preemption"
    assert sum(t.accepted for t in total) > 100, "the workloads no longer accept drafts"
    assert sum(t.host_tokens for t in total) > 20, "the workloads no longer exercise host memory"
    assert sum(t.disk_tokens for t in total) > 5, "the workloads no longer exercise the disk"
    assert sum(t.misses for t in total) > 5, "the workloads no longer exercise a disk that fails"
    assert {t.settings["depth"] for t in total} == {1, 2, 3}


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_more_workloads_on_several_ranks_equal_the_oracle(part: int) -> None:
    for seed in range(50_000 + part * 300, 50_000 + (part + 1) * 300):
        evict = seed % 7 == 6
        trial(
            seed,
            guided=seed % 3 == 0,
            beams=seed % 5 == 0 and not evict,
            evict=evict,
            drafts=seed % 2 == 0 and not evict,
            ranks=2 + seed % 3,
        )


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_more_speculative_workloads_equal_the_oracle(part: int) -> None:
    for seed in range(30_000 + part * 500, 30_000 + (part + 1) * 500):
        trial(seed, guided=seed % 3 == 0, beams=seed % 5 == 0, drafts=True)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(10))
def test_many_more_random_workloads_equal_the_oracle(part: int) -> None:
    for seed in range(10_000 + part * 1000, 10_000 + (part + 1) * 1000):
        trial(seed, guided=seed % 3 == 0, beams=seed % 5 < 2, evict=seed % 5 == 4)
