"""The offload cost model: decides whether loading a block from a lower tier is faster than
recomputing it.

It compares measured seconds per block of each tier with the measured prefill speed. It uses plans
and the times of their steps, not contents.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.types import Plan, StepResult

# Bytes per second that are assumed before the first measurement. The rates are optimistic on
# purpose: too high is corrected by the first measurement; too low would prevent every measurement.
HOST_RATE = 10e9
DISK_RATE = 10e9
SMOOTHING = 0.2  # weight of the newest measurement
# One in this many loads that seem too slow is tried anyway, because the tier may be faster now.
PROBE_INTERVAL = 32


@dataclass(slots=True)
class OffloadCosts:
    block_size: int
    load_seconds: float  # per block, from host memory to the device
    fetch_seconds: float  # per block, from disk to host memory
    prefill_tokens: float = 0.0  # tokens of prefill steps, exponentially decayed
    prefill_seconds: float = 0.0  # device time of the same steps
    refusals: int = 0  # loads that seemed too slow

    def loading_pays(self, disk: bool = False) -> bool:
        """Return whether loading a block from disk or host memory is faster than recomputing it."""
        if not self.prefill_tokens:
            return True
        recompute_seconds = self.block_size * self.prefill_seconds / self.prefill_tokens
        return self.load_seconds + disk * self.fetch_seconds < recompute_seconds

    @property
    def probe_is_due(self) -> bool:
        """True if the next load that seems too slow is tried anyway."""
        return (self.refusals + 1) % PROBE_INTERVAL == 0

    def count_refusal(self) -> None:
        """Count a load that seemed too slow, whether it was tried as a probe or not."""
        self.refusals += 1

    def tokens_in_load_time(self, num_blocks: int) -> int:
        """Return how many tokens the device could compute while it loads this many blocks."""
        if not num_blocks or not self.prefill_seconds:
            return 0
        return int(num_blocks * self.load_seconds * self.prefill_tokens / self.prefill_seconds)

    def observe_step(self, plan: Plan, result: StepResult) -> None:
        if plan.loads and result.load_seconds:
            measured = result.load_seconds / len(plan.loads)
            self.load_seconds += SMOOTHING * (measured - self.load_seconds)
        if result.compute_seconds:
            num_tokens = plan.num_tokens
            prompt_tokens = sum(item.num_tokens for item in plan.items if item.start is not None)
            # With fewer prompt tokens, the fixed cost of a step outweighs the cost of a token.
            if prompt_tokens >= 2 * self.block_size and 2 * prompt_tokens > num_tokens:
                keep = 1 - SMOOTHING
                self.prefill_tokens = keep * self.prefill_tokens + num_tokens
                self.prefill_seconds = keep * self.prefill_seconds + result.compute_seconds

    def observe_fetch(self, seconds: float) -> None:
        self.fetch_seconds += SMOOTHING * (seconds - self.fetch_seconds)
