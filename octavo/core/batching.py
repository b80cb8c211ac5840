"""When requests may begin: batching modes as small functions of the queue and the time, and the pace of prefill.

    continuous  whenever there is room: no function, nothing to ask
    adaptive    likewise, but a step computes no more of prompts than keeps the others' next token within a target (Pace)
    window      a batch forms of what came within some milliseconds, or of so many requests; it runs to its end, beside others
                as long as there are rows for a whole one
    static      a batch forms of so many requests; it runs to its end, alone
    none        one after another

The last three are what continuous batching is compared with. Knows sequences and times that it is given, reads no clock.
"""

from __future__ import annotations

from collections.abc import Callable

from octavo.config import ScheduleConfig
from octavo.errors import InvalidRequest
from octavo.types import Plan, Sequence

Form = Callable[[list[Sequence], float], int]  # who waits, now -> how many of the first make the next batch; 0: wait for more
MODES = ("continuous", "adaptive", "window", "static", "none")
LAST_CALL = 1.0  # seconds that a static batch waits to be full: the last one never would be


def one(waiting: list[Sequence], now: float) -> int:
    return 1


def collected(size: int, seconds: float) -> Form:
    """So many requests, or those that have come when the first of them has waited so long."""

    def form(waiting: list[Sequence], now: float) -> int:
        ready = len(waiting) >= size or now - min(s.request.arrival for s in waiting) >= seconds
        return size if ready else 0

    return form


def former(schedule: ScheduleConfig) -> Form | None:
    """The mode's function. None: batches do not form."""
    if schedule.batching not in MODES:
        raise InvalidRequest(f"unknown batching mode {schedule.batching!r}: use {', '.join(MODES)}", "batching")
    if schedule.batching == "window":
        return collected(schedule.max_batch, schedule.window)
    if schedule.batching == "static":
        return collected(schedule.max_batch, LAST_CALL)
    return one if schedule.batching == "none" else None


class Pace:
    """How many prompt tokens a step may compute beside those that decode, from the times that steps took.

    step = base + tokens * each        base: of steps without prompts; each: what a prompt's token adds
    """

    SMALLEST = 16
    NEWEST = 0.2  # weight of the newest measurement

    def __init__(self, target: float):
        self.target = target
        self.base: float | None = None
        self.each: float | None = None

    def observe(self, plan: Plan, seconds: float) -> None:
        tokens = sum(item.num for item in plan.items if item.start is not None)
        if tokens == 0:
            self.base = self._mean(self.base, seconds)
        else:
            self.each = self._mean(self.each, max(seconds - (self.base or 0.0), 0.0) / tokens)

    def _mean(self, old: float | None, new: float) -> float:
        return new if old is None else old + self.NEWEST * (new - old)

    def chunk(self, most: int) -> int:
        """Before anything was measured: little, which is soon made up for."""
        if not self.each:
            return min(self.SMALLEST if self.each is None else most, most)
        return max(min(int((self.target - (self.base or 0.0)) / self.each), most), min(self.SMALLEST, most))
