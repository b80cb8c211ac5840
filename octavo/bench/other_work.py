"""Detects other programs that compute during a measurement, and repeats the measurement.

A shared machine is rarely idle for minutes, but often for seconds. So a short measurement waits
until the machine is idle, and is repeated if other programs used much of the cores meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Generic, NamedTuple, TypeVar

from octavo.process_usage import cpu_time_of_cores, read_usage

Figure = TypeVar("Figure")
# A measurement is repeated if other programs used more than this share of the cores meanwhile.
MAX_OTHER_WORK = 0.08
SAMPLE_SECONDS = 0.3  # sample that shows whether other programs compute
MAX_WAIT_SECONDS = 10.0  # wait for other programs to pause, before each attempt
MAX_SECONDS = 20.0  # time after which a measurement is not repeated


class OtherWork:
    """The share of the cores that processes other than this one and `pids` use."""

    def __init__(self, *pids: int):
        self.pids = pids
        self.start = self._read()

    def _read(self) -> tuple[float, float]:
        """Return the CPU time of other programs, and the time of all cores, in seconds."""
        usages = [read_usage(pid) for pid in self.pids]
        own_seconds = time.process_time()
        own_seconds += sum(usage.cpu_seconds for usage in usages if usage is not None)
        busy, available = cpu_time_of_cores()
        return busy - own_seconds, available

    def share(self) -> float:
        """Return the share of the cores since the creation of this object."""
        other_seconds, available = self._read()
        passed = max(available - self.start[1], 1e-9)
        return min(max((other_seconds - self.start[0]) / passed, 0.0), 1.0)


class Measured(NamedTuple, Generic[Figure]):
    figure: Figure
    other_work: float  # the share of the cores that other programs used


def wait_for_others(pids: tuple[int, ...]) -> None:
    """Wait until other programs do not compute, or until the time limit."""
    end = time.monotonic() + MAX_WAIT_SECONDS
    while time.monotonic() < end:
        other_work = OtherWork(*pids)
        time.sleep(SAMPLE_SECONDS)
        if other_work.share() <= MAX_OTHER_WORK:
            return


def measure_undisturbed(
    measure: Callable[[], Figure], pids: tuple[int, ...] = (), attempts: int = 5
) -> Measured[Figure]:
    """Measure until other programs do not disturb, at most `attempts` times. Return the least
    disturbed measurement.

    `pids` are processes that belong to the measurement. With one attempt, the measurement starts
    without waiting for other programs to pause.
    """
    best: Measured[Figure] | None = None
    end = time.monotonic() + MAX_SECONDS
    for _ in range(attempts):
        if attempts > 1:
            wait_for_others(pids)
        other_work = OtherWork(*pids)
        measured = Measured(measure(), other_work.share())
        if best is None or measured.other_work < best.other_work:
            best = measured
        if best.other_work <= MAX_OTHER_WORK or time.monotonic() > end:
            break
    assert best is not None
    return best
