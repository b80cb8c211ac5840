"""When requests may begin: batching modes as small functions of the queue and the time, and the pace of prefill.

    continuous  whenever there is room: no function, nothing to ask
    adaptive    likewise, but a step computes no more of prompts than keeps the others' next token within a target (Pace)
    window      a batch forms of what came within some milliseconds, or of so many requests; it runs to its end, beside others
                as long as there are rows for a whole one
    static      a batch forms of so many requests; it runs to its end, alone
    none        one after another

The last three are what continuous batching is compared with. Where nobody waits for one reply before the others, prompts are
spread over the steps in which they cost least (Piggyback). Knows sequences and times that it is given, reads no clock.
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from collections.abc import Callable, Container, Iterable
from itertools import takewhile

from octavo.config import ScheduleConfig
from octavo.errors import InvalidRequest
from octavo.params import check_real, check_whole
from octavo.types import Plan, Sequence

# who waits, now -> how many of the first make the next batch; 0: wait for more
Form = Callable[[list[Sequence], float], int]
MODES = ("continuous", "adaptive", "window", "static", "none")
# by which modes
USED = {"max_batch": ("window", "static"), "window_ms": ("window",), "target_ms": ("adaptive",)}
LAST_CALL = 1.0  # seconds that a static batch waits to be full: the last one never would be


def one(waiting: list[Sequence], now: float) -> int:
    return 1


def collected(size: int, seconds: float) -> Form:
    """So many requests, or those that have come when the first of them has waited so long."""

    def form(waiting: list[Sequence], now: float) -> int:
        ready = len(waiting) >= size or now - min(s.request.arrival for s in waiting) >= seconds
        return size if ready else 0

    return form


def check_batching(modes: list[str], max_batch: int, window_ms: float, target_ms: float) -> None:
    """Raise InvalidRequest for what no schedule can be made of, and for what none of these modes would use."""
    for mode in modes:
        former(ScheduleConfig(batching=mode))
    check_whole("max_batch", max_batch, 1)
    check_real("window_ms", window_ms, 0, 60_000)
    check_real("target_ms", target_ms, 0, 60_000, open_low=True)
    usual = ScheduleConfig()
    changed = {
        "max_batch": max_batch != usual.max_batch,
        "window_ms": window_ms != usual.batch_window * 1e3,
        "target_ms": target_ms != usual.latency_target * 1e3,
    }
    for name, where in USED.items():
        if changed[name] and not any(mode in where for mode in modes):
            raise InvalidRequest(
                f"{name} has no effect here: it is for batching {' or '.join(where)}", name
            )


def former(schedule: ScheduleConfig) -> Form | None:
    """The mode's function. None: batches do not form."""
    if schedule.batching not in MODES:
        raise InvalidRequest(
            f"unknown batching mode {schedule.batching!r}: use {', '.join(MODES)}", "batching"
        )
    if schedule.batching == "window":
        return collected(schedule.max_batch, schedule.batch_window)
    if schedule.batching == "static":
        return collected(schedule.max_batch, LAST_CALL)
    return one if schedule.batching == "none" else None


class Batches:
    """Which requests may begin, where batches form: all, where they do not."""

    def __init__(self, schedule: ScheduleConfig):
        self.schedule, self.form = schedule, former(schedule)
        self.latest: set[str] = set()  # requests of the batches that may run

    def look(self, waiting: list[Sequence], live: Container[str], now: float) -> None:
        """Let the next batch begin if it is time: alone, or under `window` beside others that leave it rows."""
        assert self.form is not None
        running = {id for id in self.latest if id in live}
        beside = (
            self.schedule.batching == "window"
            and len(running) + self.schedule.max_batch <= self.schedule.max_num_seqs
        )
        if not running or beside:
            fresh = [seq for seq in waiting if seq.request.id not in running]
            self.latest = running | {
                seq.request.id for seq in fresh[: self.form(fresh, now) if fresh else 0]
            }

    def formed(self, seq: Sequence) -> bool:
        return self.form is None or seq.request.id in self.latest


class Pace:
    """How many prompt tokens a step may compute beside those that decode, from the times that steps took.

        prompt tokens   16   24   32   48   64   96   128   192   256 ...
        seconds          5    5    5    5    5    5   6.5   6.5     8      of the latest steps of each size
                                                  ^ the largest that is short enough, where 6 are allowed

    No formula: steps of some sizes cost the same (on a GPU, those that replay one graph), the next a jump more, and rows that
    decode cost what they cost. A size that was not measured lately is tried if the line through what was says that it will do,
    and never more than one size above what was measured: what is wrong is soon corrected, at the price of few steps.
    """

    SIZES = tuple(size << i for i in range(17) for size in (16, 24))
    # measurements of a size: their median counts, so that neither one slow step matters nor what
    # was long ago
    LATEST = 5
    FORGET = 100  # steps with prompts, after which a size must be measured again
    SHARE = 0.5  # of the time of an urgent prompt, for what it may have to wait for
    # times what others' steps take anyway: shorter ones would cost them more than an urgent one
    # could gain
    LEAST = 1.1
    NOMINAL = 128  # tokens, before there was an urgent prompt

    def __init__(self, target: float):
        self.target = target
        self.steps = 0  # with prompts
        # seconds of such steps
        self.latest = [deque[float](maxlen=self.LATEST) for _ in self.SIZES]
        self.typical = [0.0] * len(self.SIZES)
        self.forget = [0] * len(self.SIZES)  # at which step: so far none is known
        self.base = deque[float](maxlen=self.LATEST)  # seconds of steps without prompts
        self.urgent = deque[float](maxlen=self.LATEST)  # of steps for an urgent prompt

    def observe(self, plan: Plan, seconds: float) -> None:
        prompts = [item.num_tokens for item in plan.items if item.start is not None]
        if plan.urgent:
            self.urgent.append(seconds / max(len(prompts), 1))
        elif not prompts:
            self.base.append(seconds)
        elif (
            size := bisect(self.SIZES, sum(prompts)) - 1
        ) >= 0:  # a size stands for all up to the next
            if self.steps >= self.forget[size]:
                self.latest[size].clear()
            self.latest[size].append(seconds)
            self.typical[size] = median(self.latest[size])
            self.steps += 1
            self.forget[size] = self.steps + self.FORGET

    def chunk(self, most: int) -> int:
        """What fits the target. Before anything was measured: little, which is soon made up for."""
        return self._fits(self.target, most)

    def polite(self, most: int, depth: int) -> int:
        """What an urgent request may have to wait for, when so many steps are in flight: half of what its own prompt takes, or
        little more than what the others' steps take anyway."""
        if not self.urgent:
            return min(self.NOMINAL // depth, most)
        anyway = max(median(self.base), self.typical[0])
        return self._fits(max(self.SHARE * median(self.urgent) / depth, self.LEAST * anyway), most)

    def _fits(self, seconds: float, most: int) -> int:
        """The largest of the sizes that take no longer, or the next if that is worth a try."""
        sizes, typical, known = (
            self.SIZES,
            self.typical,
            [i for i, until in enumerate(self.forget) if self.steps < until],
        )
        short = list(takewhile(lambda i: typical[i] <= seconds, known))
        if not short:
            return min(sizes[0], most)
        first, best = short[0], short[-1]
        if best + 1 not in known and best + 1 < len(sizes):
            each = (typical[best] - typical[first]) / max(sizes[best] - sizes[first], 1)
            best += typical[best] + each * (sizes[best + 1] - sizes[best]) <= seconds
        return min(sizes[best], most)


class Piggyback:
    """How many prompt tokens a step computes where nobody waits for one reply, but for the last of all (Request.offline).

        tokens a step    16    64   128   192   256   320   512   1,024
        us a layer      121   126   137   160   195   218   330     579      Llama-8B on an H200: matrix products alone

    Up to some 300 tokens reading the weights decides, and those that decode pay for that anyway: each more costs 0.4 us, and in a
    step of prompts alone 0.57. So prompts ride along, a few in each step, as long as that makes nobody late: with replies of
    different lengths, the longest first, all can still end together.
    """

    def __init__(self, tokens: int, rows: int):
        self.tokens, self.rows = tokens, rows
        self.on = False  # in this step

    def chunk(
        self,
        most: int,
        decoding: list[Sequence],
        prefilling: list[Sequence],
        waiting: list[Sequence],
    ) -> int:
        """All of the budget where there are no rows for everybody: those that stand empty would cost more than is gained."""
        fits = (
            len(decoding) + len(prefilling) + len(waiting) <= self.rows
            and len(decoding) < self.tokens
        )
        to_come = [*prefilling, *waiting] if fits else []
        offline = bool(to_come) and all(seq.request.offline for seq in to_come)
        self.on = (
            offline and len(decoding) + sum(1 + seq.pending_forks for seq in to_come) <= self.rows
        )
        return (
            min(most, max(self.tokens - len(decoding), self._due(decoding, to_come)))
            if self.on
            else most
        )

    def _due(self, decoding: list[Sequence], to_come: list[Sequence]) -> int:
        """So many prompt tokens, or somebody is late: whose reply takes as long as the longest must begin now."""
        steps = max(seq.position_limit - len(seq.tokens) for seq in [*decoding, *to_come])
        ahead, due = 0, 0.0
        for seq in to_come:
            ahead += len(seq.tokens) - seq.planned
            due = max(due, ahead / max(steps - (seq.position_limit - len(seq.tokens)), 1))
        return math.ceil(due)


def median(values: Iterable[float]) -> float:
    """Of an even number the longer. 0: of none."""
    order = sorted(values)
    return order[len(order) // 2] if order else 0.0
