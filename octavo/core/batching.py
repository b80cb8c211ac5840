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

    step = fixed + tokens * each       a line through steps with prompts; steps without any pull at its beginning

    Both ends are needed. Where all chunks are alike, only steps without prompts tell what a token adds. Where these are of
    another kind (on a GPU, replayed graphs), a line from them makes small chunks look dear: there they count for little.
    """

    SMALLEST = 16
    NEWEST = 0.1  # weight of the newest measurement
    PULL = 0.05  # weight of steps without prompts in the line
    SHARE = 0.7  # of the time of an urgent prompt, for what it may have to wait for
    LEAST = 1.25  # times what a step takes anyway: shorter chunks would cost the others more than it could gain
    NOMINAL = 256  # tokens of an urgent prompt, before there was one

    def __init__(self, target: float):
        self.target = target
        self.base = 0.0  # seconds of steps without prompts
        self.urgent = 0.0  # of steps for an urgent prompt
        self.tokens = self.seconds = self.var = self.cov = 0.0  # of steps with prompts: means, and how they vary
        self.latest, self.largest = 0, 0.0  # chunk; of the latest, the largest: none is much larger than what was measured
        self.each: float | None = None
        self.fixed, self.sure = 0.0, False

    def observe(self, plan: Plan, seconds: float) -> None:
        prompts = [item.num for item in plan.items if item.start is not None]
        if plan.urgent:
            self.urgent = self._mean(self.urgent, seconds / max(len(prompts), 1))
        elif not prompts:
            self.base = self._mean(self.base, seconds)
        else:
            new = self.NEWEST if self.each is not None else 1.0
            self.latest = sum(prompts)
            self.largest = max(self.latest, (1 - new) * self.largest)
            more, longer = self.latest - self.tokens, seconds - self.seconds
            self.tokens, self.seconds = self.tokens + new * more, self.seconds + new * longer
            self.var, self.cov = (1 - new) * (self.var + new * more**2), (1 - new) * (self.cov + new * more * longer)
        if self.tokens:
            pull, base = self.PULL * self.tokens, self.base or self.seconds / 2  # half, if all steps had prompts
            each = (self.cov + pull * (self.seconds - base)) / (self.var + pull * self.tokens)
            self.each = max(each, 0.0)
            self.fixed = max(self.seconds - self.each * self.tokens, self.base)
            self.sure = self.base > 0 or self.var > pull * self.tokens

    def _mean(self, old: float, new: float) -> float:
        return old + self.NEWEST * (new - old) if old else new

    def chunk(self, most: int) -> int:
        """What fits the target. Before anything was measured: little, which is soon made up for."""
        return self._fits(self.target, most) if self.each is not None else min(self.SMALLEST, most)

    def polite(self, most: int, depth: int) -> int:
        """What an urgent request may have to wait for, when so many steps are in flight: less than its own prompt takes, if
        the others' steps can be that short."""
        if self.each is None or not self.sure:  # two sizes in turn: chunks that are all alike tell nothing
            size = self.NOMINAL // depth
            return min(size if self.latest < size else size // 2, most)
        own = self.urgent or self.fixed + self.NOMINAL * self.each
        return self._fits(max(self.SHARE * own / depth, self.LEAST * self.fixed), most)

    def _fits(self, seconds: float, most: int) -> int:
        assert self.each is not None
        room, far = seconds - self.fixed, 4 * self.largest
        if self.each > 0 or room < 0:
            far = min(far, room / max(self.each, 1e-9))
        return min(max(int(far), self.SMALLEST), most) if far < most else most
