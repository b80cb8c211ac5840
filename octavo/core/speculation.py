"""Speculative decoding guesses the next tokens of a sequence cheaply, and verifies several at once.

A step that computes one token of a sequence reads all weights of the model. Computing a few more
tokens beside it costs little, as long as the memory and not the arithmetic is the limit.

    tokens known       the quick brown
    drafts                             fox  jumps  over        guessed by a drafter
    sampled by the model          fox  jumps  onto  a          after "brown", "fox", "jumps", "over"
    kept                          fox  jumps  onto             up to the first that differs

The model samples at every position with its own parameters and its own noise, which depends on seed
and position alone. A kept token is therefore the token that decoding without drafts would have
given: drafts change the speed and nothing else. Positions of rejected drafts are computed again by
the next step: the sequence does not advance over them.

    plan     a decoding sequence gets 1 + k positions; `planned` counts all of them
    commit   `computed` advances by the tokens kept, and `planned` and the block table shrink

How many drafts are verified follows from measured step times and from how many drafts were accepted
so far.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from octavo.config import SpeculativeConfig
from octavo.core.drafters import HostDrafter, NgramDrafter, SuffixDrafter
from octavo.events import Event, StepLanded
from octavo.types import Guide, Sequence

FIRST_ACCEPTANCE = 0.6  # assumed of a drafter before it is measured
SEQUENCE_WEIGHT = 0.1  # of one draft in the running mean of its sequence
GLOBAL_WEIGHT = 0.01  # of one draft in the running mean of all sequences
RETRY_WEIGHT = 0.01  # how fast a sequence without drafts returns to the mean of all


@dataclass(slots=True)
class DraftCounters:
    """Totals since the start."""

    accepted_at: list[int]  # accepted drafts, by their place among the drafts of a step
    verifications: int = 0  # of at least one draft of one sequence
    drafted: int = 0  # drafts that were verified
    accepted: int = 0  # drafts that became tokens


class Speculation:
    def __init__(self, config: SpeculativeConfig):
        self.max_drafts = config.num_tokens
        self.adaptive = config.adaptive
        self.drafter = host_drafter(config)
        self.costs = StepCosts()
        self.acceptance = FIRST_ACCEPTANCE
        self.counters = DraftCounters([0] * config.num_tokens)

    @property
    def on_host(self) -> bool:
        """Whether the host makes the drafts: it must then know all tokens of a sequence."""
        return self.drafter is not None

    @contextmanager
    def fixed(self, num_drafts: int) -> Iterator[None]:
        """Verify this many drafts of every sequence, as far as there is room, and count none of
        them. For measurements."""
        kept = (self.max_drafts, self.adaptive, self.acceptance, self.counters)
        self.max_drafts = num_drafts
        self.adaptive = False
        self.counters = DraftCounters([0] * num_drafts)
        try:
            yield
        finally:
            self.max_drafts, self.adaptive, self.acceptance, self.counters = kept

    def begin_step(self, num_decoding: int, max_rows: int) -> StepDrafts:
        return StepDrafts(self, num_decoding, max_rows)

    def learn(self, event: Event) -> None:
        """Listen to steps that have landed: what drafts cost decides how many are verified."""
        assert isinstance(event, StepLanded)
        plan = event.plan
        if any(item.start is not None for item in plan.items) or not plan.items:
            return
        num_passes = 0
        if plan.num_drafts and not self.on_host:
            num_passes = max(item.num_drafts for item in plan.items)
        self.costs.observe(plan.num_tokens, event.seconds, num_passes)

    def observe(self, seq: Sequence, num_drafts: int, num_accepted: int) -> None:
        """Learn how many drafts of a sequence were accepted."""
        counters = self.counters
        counters.verifications += 1
        counters.drafted += num_drafts
        counters.accepted += num_accepted
        for place in range(num_accepted):
            counters.accepted_at[place] += 1
        outcomes = [1.0] * num_accepted + [0.0] * (num_accepted < num_drafts)
        for outcome in outcomes:
            seq.draft_acceptance += SEQUENCE_WEIGHT * (outcome - seq.draft_acceptance)
            self.acceptance += GLOBAL_WEIGHT * (outcome - self.acceptance)


class StepDrafts:
    """Chooses how many drafts each sequence of one step verifies: as many as raise the number of
    tokens that the step is expected to give per second."""

    def __init__(self, speculation: Speculation, num_decoding: int, max_rows: int):
        self.speculation = speculation
        self.on_host = speculation.on_host
        self.rows = num_decoding  # tokens that the step computes
        self.max_rows = max_rows
        self.expected_tokens = float(num_decoding)  # that the step gives
        self.passes = 0  # of the device's drafter
        self._expected_with: list[
            float
        ] = []  # the same with 0, 1, 2... drafts of one more sequence

    def propose(self, seq: Sequence, room: int) -> tuple[array[int] | None, int]:
        """Return drafts for a sequence and how many are worth verifying, at most `room`. The drafts
        are None if only the device knows them."""
        most = min(room, self.speculation.max_drafts, self.max_rows - self.rows)
        drafter = self.speculation.drafter
        if drafter is None and seq.guide is not None:
            most = 0  # the masks behind drafts are unknown where the drafts are
        count = self._count_worthwhile(seq, most)
        if drafter is None or count < 1:
            return None, count
        drafts = drafter.propose(seq, count)
        return drafts, len(drafts)

    def add(self, count: int) -> None:
        """The step verifies so many drafts of the sequence that propose() was called for."""
        self.rows += count
        self.passes = max(self.passes, 0 if self.on_host else count)
        if self.speculation.adaptive:
            self.expected_tokens = self._expected_with[count]

    def _count_worthwhile(self, seq: Sequence, available: int) -> int:
        """Return how many of `available` drafts are worth verifying."""
        speculation = self.speculation
        if not speculation.adaptive:
            return max(available, 0)
        if seq.draft_acceptance == 0.0:
            seq.draft_acceptance = speculation.acceptance
        costs = speculation.costs
        expected = self.expected_tokens
        self._expected_with = [expected]
        best_count = 0
        best_rate = expected / costs.seconds(self.rows, self.passes)
        chance = 1.0
        for count in range(1, available + 1):
            chance *= seq.draft_acceptance
            expected += chance
            self._expected_with.append(expected)
            passes = max(self.passes, 0 if self.on_host else count)
            rate = expected / costs.seconds(self.rows + count, passes)
            if rate > best_rate:
                best_count = count
                best_rate = rate
        if best_count == 0:
            missing = speculation.acceptance - seq.draft_acceptance
            seq.draft_acceptance += RETRY_WEIGHT * missing
        return best_count


class StepCosts:
    """Seconds of a decode step by its number of rows (tokens computed), and of one pass of the
    device's drafter, measured."""

    WEIGHT = 0.1  # of a new measurement in a running mean

    def __init__(self) -> None:
        self.rows: list[int] = []  # measured, in order
        self.means: list[float] = []
        self.pass_seconds = 0.0

    def observe(self, num_rows: int, seconds: float, num_passes: int = 0) -> None:
        if seconds <= 0.0:  # the clock is too coarse for the step
            return
        if num_passes:
            measured = max(seconds - self.seconds(num_rows), 0.0) / num_passes
            weight = self.WEIGHT if self.pass_seconds else 1.0
            self.pass_seconds += weight * (measured - self.pass_seconds)
            return
        index = bisect_left(self.rows, num_rows)
        if index < len(self.rows) and self.rows[index] == num_rows:
            self.means[index] += self.WEIGHT * (seconds - self.means[index])
        else:
            self.rows.insert(index, num_rows)
            self.means.insert(index, seconds)

    def seconds(self, num_rows: int, num_passes: int = 0) -> float:
        """Estimate a step: on the line between its measured neighbours. Nothing measured: 1."""
        if not self.rows:
            return 1.0
        draft_seconds = num_passes * self.pass_seconds
        index = bisect_left(self.rows, num_rows)
        if index == 0:
            return self.means[0] + draft_seconds
        if index == len(self.rows):
            return self.means[-1] * num_rows / self.rows[-1] + draft_seconds
        rows_below = self.rows[index - 1]
        share = (num_rows - rows_below) / (self.rows[index] - rows_below)
        below = self.means[index - 1]
        return below + share * (self.means[index] - below) + draft_seconds


def host_drafter(config: SpeculativeConfig) -> HostDrafter | None:
    """Return the drafter that runs in the scheduler, or None if the runner drafts."""
    if config.method == "ngram":
        return NgramDrafter(config.ngram_min, config.ngram_max)
    if config.method == "suffix":
        return SuffixDrafter(config.ngram_min, config.ngram_max)
    return None


def useful_drafts(seq: Sequence, drafts: array[int]) -> array[int]:
    """Return the drafts before the first stop token: nothing after one is needed."""
    for count, token in enumerate(drafts):
        if token in seq.stop_ids:
            return drafts[:count]
    return drafts


def allowed_drafts(guide: Guide, drafts: array[int]) -> tuple[array[int], list[bytes]]:
    """Return the leading drafts that a guide allows, and its masks at each position to sample."""
    follower = guide.copy()
    masks = [follower.mask]
    for count, token in enumerate(drafts):
        mask = masks[-1]
        if not mask[token >> 3] >> (token & 7) & 1:
            return drafts[:count], masks
        follower.accept(token)
        masks.append(follower.mask)
    return drafts, masks
