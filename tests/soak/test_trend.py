"""A leak is told from noise, and from memory that is taken and given back."""

from __future__ import annotations

import random

import pytest

from tests.soak.trend import fit

SECONDS = [2.0 * i for i in range(1800)]


def noise(seed: int) -> list[float]:
    generator = random.Random(seed)
    return [200 + abs(generator.gauss(0, 5)) + 300 * (generator.random() < 0.2) for _ in SECONDS]


@pytest.mark.parametrize("seed", range(5))
def test_noise_and_peaks_are_no_growth(seed: int) -> None:
    trend = fit(SECONDS, noise(seed))
    assert trend.growth < 1
    assert trend.mean == pytest.approx(200, abs=2)


@pytest.mark.parametrize("seed", range(5))
def test_a_leak_is_seen_through_noise_and_peaks(seed: int) -> None:
    leaking = [value + 20 * at / 3600 for at, value in zip(SECONDS, noise(seed), strict=True)]
    trend = fit(SECONDS, leaking)
    assert trend.per_hour == pytest.approx(20, abs=1)
    assert trend.growth > 16


def test_a_trend_needs_samples() -> None:
    with pytest.raises(ValueError, match="four"):
        fit([0.0, 1.0], [1.0, 2.0])
