"""Measures several sides in turn, so that slow drift of the machine affects all of them equally.

Each round runs every side once, and every second round runs them in the opposite order. The
figures of one round are compared with each other, and medians are taken over the rounds.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from typing import TypeVar

from octavo.bench.other_work import measure_undisturbed

Figure = TypeVar("Figure")
MAX_VARIATION = 1.25  # largest over smallest figure of one side on an otherwise idle machine


def interleave(
    sides: Mapping[str, Callable[[], Figure]],
    rounds: int,
    advance: Callable[[], None] = lambda: None,
    attempts: int = 1,
) -> dict[str, list[Figure]]:
    """Return the figure of each side in each round. `advance` is called after each call.

    With several `attempts`, a call that other programs disturb is repeated. The sides must then
    compute in this process.
    """
    figures: dict[str, list[Figure]] = {name: [] for name in sides}
    for round_index in range(rounds):
        names = list(sides) if round_index % 2 == 0 else list(sides)[::-1]
        for name in names:
            figures[name].append(measure_undisturbed(sides[name], attempts=attempts).figure)
            advance()
    return figures


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def ratios(numerators: list[float], denominators: list[float]) -> dict[str, float]:
    """Return the spread of the ratios of the rounds."""
    return spread([above / below for above, below in zip(numerators, denominators, strict=True)])


def is_noisy(ratio: dict[str, float]) -> bool:
    """Return whether ratios vary so much between rounds that the median says little."""
    return ratio["max"] > MAX_VARIATION * ratio["min"]
