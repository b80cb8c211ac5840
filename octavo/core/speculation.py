"""Speculative decoding guesses the next tokens of a sequence cheaply, and verifies several at once.

A decode step reads all weights of the model to compute one token per sequence. While memory
bandwidth is the limit, a few more tokens per sequence cost little.

    tokens known       the quick brown
    drafts                             fox  jumps  over        guessed by a drafter
    sampled by the model          fox  jumps  onto  a          after "brown", "fox", "jumps", "over"
    kept                          fox  jumps  onto             up to the first that differs

The model samples at every position with its own parameters and its own noise, which depends on seed
and position alone. A kept token is therefore, up to rounding, the token that decoding without
drafts would have given: drafts change the speed and nothing else. The sequence does not advance
over rejected drafts, and the next step computes their positions again.

    plan     a decoding sequence gets 1 + k positions; `planned` counts all of them
    commit   `computed` advances by the tokens kept, and `planned` and the block table shrink

The number of drafts follows from measured step times and from the fraction of earlier drafts that
were accepted.

A drafter on the device has its own KV. In each step it computes the KV of the step's tokens, to be
able to draft later (`draft_extend`, as in SGLang). This costs time. A step skips it if the step has
so many sequences that drafts do not pay, if the last steps had no drafts, or if the step computes a
long prompt or the prompt of a short reply. The device then no longer drafts for the sequences of
that step.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

from octavo.config import SpeculativeConfig
from octavo.core.drafters import HostDrafter, NgramDrafter, SuffixDrafter
from octavo.events import Event, StepLanded
from octavo.types import Guide, Plan, Sequence

FIRST_ACCEPTANCE = 0.6  # the acceptance that is assumed before it is measured
SEQUENCE_WEIGHT = 0.1  # the weight of one draft in the running mean of its sequence
GLOBAL_WEIGHT = 0.01  # the weight of one draft in the running mean of all sequences
RETRY_WEIGHT = 0.01  # how fast a sequence without drafts returns to the mean of all
# A step with prompts has a draft extend only if the step has at most MAX_EXTENDED_PROMPT prompt
# tokens, and each of their sequences may generate at min_seconds MIN_EXTENDED_REPLY tokens.
MAX_EXTENDED_PROMPT = 256
MIN_EXTENDED_REPLY = 32
# The number of steps in a row that have a draft extend although the device does not draft.
MAX_UNDRAFTED_EXTENDS = 8
MIN_EXTEND_GAIN = 1.2  # the expected speed-up by drafts below which steps have no draft extend
MIN_GAIN = 1.05  # the expected speed-up of a step below which the device does not draft in it
MAX_GROWTH = 2.0  # measured times are capped at this multiple of the mean
MAX_DRAFTED_STEPS = 32  # after this many steps with drafts in a row, one without drafts is measured


@dataclass(slots=True)
class DraftCounters:
    """Totals since the start."""

    accepted_at: list[int]  # accepted drafts, by their index among a sequence's drafts in a step
    verifications: int = 0  # one for each sequence with drafts in each step
    drafted: int = 0  # drafts that were verified
    accepted: int = 0  # drafts that became tokens

    def discard_accepted(self, first: int, count: int) -> None:
        """Uncount accepted drafts of a step from the place `first` on: their sequence had ended."""
        self.accepted -= count
        for place in range(first, first + count):
            self.accepted_at[place] -= 1


class Speculation:
    def __init__(self, config: SpeculativeConfig):
        self.max_drafts = config.num_tokens
        self.adaptive = config.adaptive
        self.drafter = host_drafter(config)
        self.drafts_on_device = config.drafts_on_device
        self.costs = StepCosts()
        self.acceptance = FIRST_ACCEPTANCE
        self.lookup_acceptance = FIRST_ACCEPTANCE
        self.undrafted_extends = 0  # steps in a row with a draft extend and no drafts of the device
        self.drafted_steps = 0  # decode steps with drafts in a row
        self.counters = DraftCounters([0] * config.num_tokens)

    @property
    def waits_for_tokens(self) -> bool:
        """True if only the host drafts: a sequence then waits until all of its tokens are
        committed. If the device drafts too, the host drafts only for sequences without a token in
        flight."""
        return not self.drafts_on_device

    @contextmanager
    def fixed(self, num_drafts: int) -> Iterator[None]:
        """Verify this many drafts of every sequence inside this context, or as many as have room,
        and do not count them. This is for measurements."""
        saved = (self.max_drafts, self.adaptive, self.acceptance, self.counters)
        saved_drafter = self.drafter
        if self.drafts_on_device:
            self.drafter = None
        self.max_drafts = num_drafts
        self.adaptive = False
        self.counters = DraftCounters([0] * num_drafts)
        try:
            yield
        finally:
            self.max_drafts, self.adaptive, self.acceptance, self.counters = saved
            self.drafter = saved_drafter

    def begin_step(self, num_decoding: int, max_rows: int) -> StepDrafts:
        return StepDrafts(self, num_decoding, max_rows)

    def observe_step(self, event: Event) -> None:
        """Record the time of a landed step. The number of drafts depends on these times."""
        assert isinstance(event, StepLanded)
        plan = event.plan
        if any(item.start is not None for item in plan.items) or not plan.items:
            return
        passes = NO_PASSES
        if plan.num_drafts and self.drafts_on_device:
            drafted = [item.num_drafts for i, item in enumerate(plan.items) if i not in plan.drafts]
            passes = Passes(max(drafted, default=0), sum(count > 0 for count in drafted))
        self.drafted_steps = self.drafted_steps + 1 if plan.num_drafts else 0
        self.costs.observe(plan.num_tokens, event.seconds, passes)

    def choose_draft_extend(self, plan: Plan, sequences: Mapping[int, Sequence]) -> None:
        """Decide whether a planned step has a draft extend."""
        if not self.drafts_on_device:
            return
        if self.max_drafts == 0:
            plan.draft_extend = False
        if not self.adaptive:
            return
        planned = [sequences[item.seq_id] for item in plan.items]
        plan.draft_extend = (
            any(seq.drafter_has_kv for seq in planned)
            and self._extends_prompts(plan, planned)
            and self._drafts_may_pay(len(planned))
            and self._drafted_lately(plan)
        )
        if not plan.draft_extend:
            self.undrafted_extends = 0
            for seq in planned:
                seq.drafter_has_kv = False

    def _drafted_lately(self, plan: Plan) -> bool:
        """Return whether the device has drafted in one of the last steps."""
        has_drafts = plan.num_drafts > sum(map(len, plan.drafts.values()))
        has_prompts = any(item.start is not None for item in plan.items)
        self.undrafted_extends = 0 if has_drafts or has_prompts else self.undrafted_extends + 1
        return self.undrafted_extends <= MAX_UNDRAFTED_EXTENDS

    def _extends_prompts(self, plan: Plan, planned: list[Sequence]) -> bool:
        num_prompt_tokens = 0
        for item, seq in zip(plan.items, planned, strict=True):
            if item.start is None:
                continue
            num_prompt_tokens += item.num_tokens
            if seq.token_limit - len(seq.tokens) < MIN_EXTENDED_REPLY:
                return False
        return num_prompt_tokens <= MAX_EXTENDED_PROMPT

    def _drafts_may_pay(self, num_sequences: int) -> bool:
        """Return whether drafts for this many sequences are expected to pay."""
        costs = self.costs
        plain_seconds = costs.seconds(num_sequences)
        expected = 1.0
        chance = 1.0
        for count in range(1, self.max_drafts + 1):
            chance *= self.acceptance
            expected += chance
            passes = Passes(count, num_sequences)
            seconds = costs.seconds((1 + count) * num_sequences, passes)
            if expected * plain_seconds > MIN_EXTEND_GAIN * seconds:
                return True
        costs.passes.forget()
        return False

    def observe_drafts(
        self, seq: Sequence, num_drafts: int, num_accepted: int, by_host: bool = False
    ) -> None:
        """Record how many drafts of a sequence were accepted. `by_host`: the host made them."""
        counters = self.counters
        counters.verifications += 1
        counters.drafted += num_drafts
        counters.accepted += num_accepted
        for position in range(num_accepted):
            counters.accepted_at[position] += 1
        outcomes = [1.0] * num_accepted + [0.0] * (num_accepted < num_drafts)
        for outcome in outcomes:
            if by_host and self.drafts_on_device:
                seq.lookup_acceptance += SEQUENCE_WEIGHT * (outcome - seq.lookup_acceptance)
                self.lookup_acceptance += GLOBAL_WEIGHT * (outcome - self.lookup_acceptance)
            else:
                seq.draft_acceptance += SEQUENCE_WEIGHT * (outcome - seq.draft_acceptance)
                self.acceptance += GLOBAL_WEIGHT * (outcome - self.acceptance)


class StepDrafts:
    """Chooses how many drafts each sequence of one step verifies: as many as raise the number of
    tokens that the step is expected to give per second."""

    def __init__(self, speculation: Speculation, num_decoding: int, max_rows: int):
        self.speculation = speculation
        self.waits_for_tokens = speculation.waits_for_tokens
        self.rows = num_decoding  # tokens that the step computes
        self.max_rows = max_rows
        self.expected_tokens = float(num_decoding)  # how many tokens the step should give
        self.passes = NO_PASSES  # passes of the device's drafter
        # expected_tokens with 0, 1, 2... drafts of the sequence of the last propose()
        self._expected_by_count: list[float] = []
        self._on_device = False  # whether the device makes these drafts
        # The gain by drafts is known only if a step without drafts was measured recently.
        self._must_measure = self._lacks_baseline(num_decoding)

    def _lacks_baseline(self, num_decoding: int) -> bool:
        speculation = self.speculation
        steps = speculation.costs.steps
        if not speculation.adaptive or not steps.rows:
            return False
        return speculation.drafted_steps >= MAX_DRAFTED_STEPS or not steps.covers(num_decoding)

    def propose(self, seq: Sequence, room: int) -> tuple[array[int] | None, int]:
        """Return the drafts of a sequence and the number that is worth verifying, at most `room`.
        The drafts are None if the device makes them."""
        speculation = self.speculation
        max_count = min(room, speculation.max_drafts, self.max_rows - self.rows)
        self._expected_by_count = [self.expected_tokens]
        self._on_device = False
        if self._must_measure or max_count < 1:
            return None, 0
        knows_tokens = self.waits_for_tokens or seq.planned < len(seq.tokens)
        if speculation.drafter is not None and knows_tokens:
            drafts = self._find_in_text(seq, max_count)
            if drafts or not speculation.drafts_on_device:
                return drafts, len(drafts)
        # The host cannot compute token masks after drafts of the device.
        if not speculation.drafts_on_device or seq.guide is not None or not seq.drafter_has_kv:
            return None, 0
        self._on_device = True
        if seq.draft_acceptance == 0.0:
            seq.draft_acceptance = speculation.acceptance
        count = self._count_worthwhile(seq.draft_acceptance, max_count)
        if count == 0:
            missing = speculation.acceptance - seq.draft_acceptance
            seq.draft_acceptance += RETRY_WEIGHT * missing
        return None, count

    def _find_in_text(self, seq: Sequence, max_count: int) -> array[int]:
        """Return drafts that the host finds in known text."""
        speculation = self.speculation
        assert speculation.drafter is not None
        if speculation.drafts_on_device:
            mean = speculation.lookup_acceptance
            acceptance = seq.lookup_acceptance or mean
        else:
            mean = speculation.acceptance
            acceptance = seq.draft_acceptance or mean
        count = self._count_worthwhile(acceptance, max_count)
        if count == 0:
            acceptance += RETRY_WEIGHT * (mean - acceptance)
        if speculation.drafts_on_device:
            seq.lookup_acceptance = acceptance
        else:
            seq.draft_acceptance = acceptance
        return speculation.drafter.propose(seq, count) if count else array("i")

    def add(self, count: int) -> None:
        """Count drafts that the step verifies for the sequence of the last propose()."""
        self.rows += count
        self.passes = self._passes_with(count)
        if self.speculation.adaptive:
            self.expected_tokens = self._expected_by_count[count]

    def _passes_with(self, count: int) -> Passes:
        """Return the passes of the step with `count` drafts of one more sequence."""
        if not count or not self._on_device:
            return self.passes
        return Passes(max(self.passes.number, count), self.passes.num_sequences + 1)

    def _count_worthwhile(self, acceptance: float, available: int) -> int:
        """Return how many of `available` drafts are worth verifying."""
        speculation = self.speculation
        if not speculation.adaptive:
            return available
        costs = speculation.costs
        expected = self.expected_tokens
        self._expected_by_count = [expected]
        best_count = 0
        best_rate = expected / costs.seconds(self.rows, self.passes)
        if self._on_device:
            best_rate *= MIN_GAIN
        chance = 1.0
        for count in range(1, available + 1):
            chance *= acceptance
            expected += chance
            self._expected_by_count.append(expected)
            seconds = costs.seconds(self.rows + count, self._passes_with(count))
            rate = expected / seconds
            if rate > best_rate:
                best_count = count
                best_rate = rate
        return best_count


class Passes(NamedTuple):
    """The forward passes of the device's drafter in a step."""

    number: int  # passes that run one after another
    num_sequences: int  # sequences that it drafts for


NO_PASSES = Passes(0, 0)


class StepCosts:
    """Measured seconds of a decode step by its number of rows (tokens computed), and of one pass of
    the device's drafter by its number of sequences. A pass includes its share of the draft extend.

    Other programs may slow the machine down for some seconds. So the time of each step is divided
    by `slowdown`: the ratio of measured to expected times of the last steps."""

    MIN_PASS_SHARE = 0.005  # a pass counts as at min_seconds this fraction of the time of its step
    SLOWDOWN_WEIGHT = 0.2  # the weight of one step in the running mean of the slowdown

    def __init__(self) -> None:
        self.steps = CostTable()
        self.passes = CostTable()
        self.slowdown = 1.0  # running mean: measured / expected time of a step

    def record(self, num_rows: int, seconds: float, passes: Passes = NO_PASSES) -> None:
        """Store a measurement that was taken while the machine was otherwise idle."""
        if seconds <= 0.0:  # the clock is too coarse for the step
            return
        if passes.number:
            self.passes.record(passes.num_sequences, self._pass_seconds(num_rows, seconds, passes))
        else:
            self.steps.record(num_rows, seconds)

    def observe(self, num_rows: int, seconds: float, passes: Passes = NO_PASSES) -> None:
        """Count a step of a running engine."""
        if seconds <= 0.0:
            return
        if self.steps.rows:
            ratio = min(seconds / self.seconds(num_rows, passes), MAX_GROWTH * self.slowdown)
            self.slowdown += self.SLOWDOWN_WEIGHT * (ratio - self.slowdown)
        usual_seconds = seconds / self.slowdown
        if passes.number:
            pass_seconds = self._pass_seconds(num_rows, usual_seconds, passes)
            self.passes.observe(passes.num_sequences, pass_seconds)
        else:
            self.steps.observe(num_rows, usual_seconds)

    def _pass_seconds(self, num_rows: int, seconds: float, passes: Passes) -> float:
        """Return the seconds of one pass in a step that took `seconds`."""
        min_seconds = self.MIN_PASS_SHARE * seconds
        return max((seconds - self.steps.estimate(num_rows)) / passes.number, min_seconds)

    def seconds(self, num_rows: int, passes: Passes = NO_PASSES) -> float:
        """Return the expected seconds of a step without the slowdown, or 1 if none was measured."""
        seconds = self.steps.estimate(num_rows) or 1.0
        if passes.number:
            seconds += passes.number * self.passes.estimate(passes.num_sequences)
        return seconds


class CostTable:
    """Measured seconds by a number of rows.

    The costs rise with the size: where the means fall, neighbouring sizes get their common mean,
    weighted by the number of measurements (isotonic regression). Otherwise a size whose first step
    was disturbed would seem too expensive to be used and measured again."""

    MAX_COUNT = 20  # the most measurements that count in a running mean
    RECORDED_COUNT = 5  # a measurement of record() counts as this many
    FORGETTING = 0.002

    def __init__(self) -> None:
        self.rows: list[int] = []  # measured, in order
        self.means: list[float] = []
        self.counts: list[int] = []  # measurements in each mean
        self.costs: list[float] = []  # the means, so that they never fall

    def forget(self) -> None:
        """Lower all means a little, so that a size that seemed too expensive is tried again."""
        factor = 1.0 - self.FORGETTING
        self.means = [mean * factor for mean in self.means]
        self.costs = [cost * factor for cost in self.costs]

    def record(self, num_rows: int, seconds: float) -> None:
        """Store a measurement of a size that was taken while the machine was otherwise idle."""
        index = self._index_of(num_rows, seconds)
        self.means[index] = seconds
        self.counts[index] = self.RECORDED_COUNT
        self._update_costs()

    def observe(self, num_rows: int, seconds: float) -> None:
        """Count a step. The mean of a new size begins with its expected time."""
        index = self._index_of(num_rows, self.estimate(num_rows) or seconds)
        mean = self.means[index]
        self.counts[index] = min(self.counts[index] + 1, self.MAX_COUNT)
        self.means[index] += (min(seconds, MAX_GROWTH * mean) - mean) / self.counts[index]
        self._update_costs()

    def _index_of(self, num_rows: int, seconds: float) -> int:
        """Return the index of a size. A new size is inserted."""
        num_rows = rounded_size(num_rows)
        index = bisect_left(self.rows, num_rows)
        if index == len(self.rows) or self.rows[index] != num_rows:
            self.rows.insert(index, num_rows)
            self.means.insert(index, seconds)
            self.counts.insert(index, 1)
        return index

    def _update_costs(self) -> None:
        """Join neighbouring sizes to groups until the means of the groups rise."""
        groups: list[tuple[float, int, int]] = []  # mean, measurements, sizes
        for mean, count in zip(self.means, self.counts, strict=True):
            size = 1
            while groups and groups[-1][0] > mean:
                other_mean, other_count, other_size = groups.pop()
                mean = (mean * count + other_mean * other_count) / (count + other_count)
                count += other_count
                size += other_size
            groups.append((mean, count, size))
        self.costs = [mean for mean, _, size in groups for _ in range(size)]

    def covers(self, num_rows: int) -> bool:
        """Return whether a size near this one has been measured."""
        index = bisect_left(self.rows, num_rows)
        return index < len(self.rows) and (index > 0 or self.rows[0] <= 1.25 * num_rows)

    def estimate(self, num_rows: int) -> float:
        """Return the interpolated seconds of a size, or 0 if no size was measured."""
        if not self.rows:
            return 0.0
        index = bisect_left(self.rows, num_rows)
        if index == 0:
            return self.costs[0]
        if index == len(self.rows):
            return self._extrapolate(num_rows)
        rows_below = self.rows[index - 1]
        share = (num_rows - rows_below) / (self.rows[index] - rows_below)
        below = self.costs[index - 1]
        return below + share * (self.costs[index] - below)

    def _extrapolate(self, num_rows: int) -> float:
        """Extrapolate from the two largest measured sizes. With a single measured size, a larger
        size is expected to take the same time, so that it is tried."""
        if len(self.rows) == 1:
            return self.costs[0]
        rows_between = self.rows[-1] - self.rows[-2]
        slope = (self.costs[-1] - self.costs[-2]) / rows_between
        return self.costs[-1] + slope * (num_rows - self.rows[-1])


def rounded_size(num_rows: int) -> int:
    """Round a size up to four binary digits, so that a table has few sizes."""
    step = 1 << max(num_rows.bit_length() - 4, 0)
    return -(-num_rows // step) * step


def host_drafter(config: SpeculativeConfig) -> HostDrafter | None:
    """Return the drafter that runs in the scheduler, or None if only the runner drafts."""
    if config.method == "ngram" or config.lookup:
        return NgramDrafter(config.ngram_min, config.ngram_max)
    if config.method == "suffix":
        return SuffixDrafter(config.ngram_min, config.ngram_max)
    return None


def drafts_before_stop(seq: Sequence, drafts: array[int]) -> array[int]:
    """Return the drafts before the first stop token."""
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
