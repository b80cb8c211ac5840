"""Decides how many prompt tokens a step computes beside its decoding sequences.

    FullSteps       as many as fit
    LatencyTarget   as many as keep the time between tokens below a target (batching "adaptive")
    Piggyback       offline prompts are spread over the steps in which they cost least

StepLimiter chooses one of them at its start; live_settings.py may limit it further. StepTimes
measures the times of steps of different sizes, for the latency target and for urgent requests
(urgent_preemption.py).
"""

from __future__ import annotations

import math
from bisect import bisect
from collections import deque
from collections.abc import Iterable
from itertools import takewhile
from typing import NamedTuple, Protocol

from octavo.core.queues import Queues
from octavo.types import Plan, Sequence


class Allowance(NamedTuple):
    """The number of prompt tokens that the next step may compute."""

    tokens: int
    delayed: bool = False  # True: offline prompts are delayed, and short prompts get no share


class PromptBudget(Protocol):
    def allow(self, limit: int, num_decoding: int, queues: Queues) -> Allowance:
        """Return how many prompt tokens a step may compute beside `num_decoding` sequences that
        decode, at most `limit`."""


class FullSteps:
    """Steps are filled with prompt tokens."""

    def allow(self, limit: int, num_decoding: int, queues: Queues) -> Allowance:
        return Allowance(limit)


class StepTimes:
    """The number of prompt tokens that a step can compute in a given time, by measurement.

        prompt tokens   16   24   32   48   64   96   128   192   256 ...
        seconds          5    5    5    5    5    5   6.5   6.5     8    medians of recent steps
                                                  ^ the largest size within 6 seconds

    There is no formula, because the time is constant over a range of sizes and then jumps (on a
    GPU, steps of several sizes replay one graph). A size that was not measured recently is tried
    if the line through the measured sizes says that it will fit, and never more than one size above
    the largest measured one. A wrong guess costs a few steps and is then corrected.
    """

    SIZES = tuple(size << shift for shift in range(17) for size in (16, 24))
    # Measurements per size. Their median counts, so that one slow step and old times do not matter.
    SAMPLES = 5
    MAX_AGE = 100  # steps with prompts after which a size must be measured again
    # An urgent prompt may wait for a step that takes this fraction of the time of its own step.
    URGENT_SHARE = 0.5
    # Background steps may always take this much longer than a step with few prompt tokens: shorter
    # steps would cost the background more than the urgent prompt gains.
    BACKGROUND_SLACK = 1.1
    DEFAULT_BACKGROUND_TOKENS = 128  # used until an urgent prompt has been measured

    def __init__(self) -> None:
        self.num_steps = 0  # steps with prompts
        self.samples = [deque[float](maxlen=self.SAMPLES) for _ in self.SIZES]
        self.medians = [0.0] * len(self.SIZES)
        self.expires_at = [0] * len(self.SIZES)  # step number; 0: never measured
        self.decode_samples = deque[float](maxlen=self.SAMPLES)  # steps without prompts
        self.urgent_samples = deque[float](maxlen=self.SAMPLES)  # steps for urgent prompts

    def observe(self, plan: Plan, seconds: float) -> None:
        """Record how long a step took."""
        chunks = [item.num_tokens for item in plan.items if item.start is not None]
        if plan.urgent:
            self.urgent_samples.append(seconds / max(len(chunks), 1))
            return
        if not chunks:
            self.decode_samples.append(seconds)
            return
        # Each size stands for all sizes up to the next one.
        size = bisect(self.SIZES, sum(chunks)) - 1
        if size < 0:
            return
        if self.num_steps >= self.expires_at[size]:
            self.samples[size].clear()
        self.samples[size].append(seconds)
        self.medians[size] = median(self.samples[size])
        self.num_steps += 1
        self.expires_at[size] = self.num_steps + self.MAX_AGE

    def chunk_within(self, seconds: float, limit: int) -> int:
        """Return the largest size that takes no longer than `seconds`, or the next size if that is
        worth a try. The smallest size is returned even if it takes longer."""
        measured = [size for size, step in enumerate(self.expires_at) if self.num_steps < step]
        short_enough = list(takewhile(lambda size: self.medians[size] <= seconds, measured))
        if not short_enough:
            return min(self.SIZES[0], limit)
        first = short_enough[0]
        best = short_enough[-1]
        following = best + 1
        if following not in measured and following < len(self.SIZES):
            num_tokens = max(self.SIZES[best] - self.SIZES[first], 1)
            seconds_per_token = (self.medians[best] - self.medians[first]) / num_tokens
            more_tokens = self.SIZES[following] - self.SIZES[best]
            if self.medians[best] + seconds_per_token * more_tokens <= seconds:
                best = following
        return min(self.SIZES[best], limit)

    def background_chunk(self, limit: int, depth: int) -> int:
        """Return the prompt tokens of a step that an urgent request may have to wait for.

        With `depth` steps in flight, all of them together may take half as long as a step with one
        chunk of an urgent prompt, or each a little longer than a step that decodes or has the
        fewest prompt tokens."""
        if not self.urgent_samples:
            return min(self.DEFAULT_BACKGROUND_TOKENS // depth, limit)
        shortest = max(median(self.decode_samples), self.medians[0])
        allowed = self.URGENT_SHARE * median(self.urgent_samples) / depth
        return self.chunk_within(max(allowed, self.BACKGROUND_SLACK * shortest), limit)


class LatencyTarget:
    """Steps that decode compute only as many prompt tokens as fit into `seconds`."""

    def __init__(self, seconds: float, step_times: StepTimes):
        self.seconds = seconds
        self.step_times = step_times

    def allow(self, limit: int, num_decoding: int, queues: Queues) -> Allowance:
        if not num_decoding:
            return Allowance(limit)
        return Allowance(self.step_times.chunk_within(self.seconds, limit))


class Piggyback:
    """Offline prefill piggybacks on decode, while only the completion of all requests counts.

        tokens per step   16    64   128   192   256   320   512   1,024
        us per layer     121   126   137   160   195   218   330     579    Llama-8B on an H200,
                                                                            matrix products alone

    Up to some 300 tokens, a step spends most of its time on reading the weights, which decoding
    needs anyway: a further token costs 0.4 us, against 0.57 us in a step of prompts alone. So each
    step that decodes also computes a few prompt tokens, as long as no request ends late: if the
    requests with the longest replies start first, all can still end together.
    """

    def __init__(self, step_tokens: int, num_slots: int):
        self.step_tokens = step_tokens
        self.num_slots = num_slots

    def allow(self, limit: int, num_decoding: int, queues: Queues) -> Allowance:
        prompts = self._offline_prompts(num_decoding, queues)
        if not prompts:
            return Allowance(limit)
        due = tokens_due(queues.decoding, prompts)
        return Allowance(min(limit, max(self.step_tokens - num_decoding, due)), delayed=True)

    def _offline_prompts(self, num_decoding: int, queues: Queues) -> list[Sequence]:
        """Return the prompts to hold back: all of them, if all are offline and every sequence has a
        batch slot. With fewer slots than sequences, empty slots would cost more than piggybacking
        gains."""
        num_prompts = len(queues.prefilling) + len(queues.waiting)
        fits = num_decoding + num_prompts <= self.num_slots
        if not num_prompts or not fits or num_decoding >= self.step_tokens:
            return []
        prompts = [*queues.prefilling, *queues.waiting]
        num_forks = sum(seq.pending_forks for seq in prompts)
        all_offline = all(seq.request.offline for seq in prompts)
        if not all_offline or num_decoding + num_prompts + num_forks > self.num_slots:
            return []
        return prompts


def tokens_due(decoding: list[Sequence], prompts: list[Sequence]) -> int:
    """Return how many prompt tokens the next step must compute so that no reply ends after the
    longest one: a prompt whose reply is the longest must start now."""
    longest = max(seq.token_limit - len(seq.tokens) for seq in [*decoding, *prompts])
    tokens_before = 0
    due = 0.0
    for seq in prompts:
        tokens_before += len(seq.tokens) - seq.planned
        steps_left = longest - (seq.token_limit - len(seq.tokens))
        due = max(due, tokens_before / max(steps_left, 1))
    return math.ceil(due)


def median(values: Iterable[float]) -> float:
    """Return the median: the upper middle value for an even count, 0 for no values."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0
