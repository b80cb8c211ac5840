"""Load or recompute? Seconds for a block over each link against seconds to compute it, as measured while running. Knows plans and
what their steps took, no contents.
"""

from __future__ import annotations

from dataclasses import dataclass

from octavo.types import Plan, StepResult

# bytes a second, until something was measured: hope is put right by the first block, fear by none
LINK_RATE = DISK_RATE = 10e9
SMOOTH = 0.2  # weight of the newest measurement
PROBE = 32  # one time in so many, what does not seem to pay is tried: a link may have become faster


@dataclass(slots=True)
class OffloadCosts:
    """What each way to a block takes, in seconds."""

    size: int  # tokens in a block
    load: float  # a block, from host memory
    fetch: float  # from disk, before that
    tokens: float = 0.0  # of recent steps that computed prompts, later ones weighing more,
    seconds: float = 0.0  # and what those took
    refused: int = 0

    def pays(self, disk: bool = False) -> bool:
        return (
            not self.tokens
            or self.load + disk * self.fetch < self.size * self.seconds / self.tokens
        )

    def try_it(self, disk: bool = False) -> bool:
        if self.pays(disk):
            return True
        self.refused += 1
        return self.refused % PROBE == 0

    def in_tokens(self, loads: int) -> int:
        """How many tokens could be computed while these blocks are loaded."""
        return int(loads * self.load * self.tokens / self.seconds) if loads and self.seconds else 0

    def learn(self, plan: Plan, result: StepResult) -> None:
        if plan.loads and result.load_seconds:
            self.load += SMOOTH * (result.load_seconds / len(plan.loads) - self.load)
        if result.compute_seconds:
            prompt, total = (
                sum(item.num_tokens for item in plan.items if item.start is not None),
                plan.num_tokens,
            )
            # shorter ones tell what a step costs, not what a token does
            if prompt >= 2 * self.size and 2 * prompt > total:
                self.tokens = (1 - SMOOTH) * self.tokens + total
                self.seconds = (1 - SMOOTH) * self.seconds + result.compute_seconds

    def learn_fetch(self, seconds: float) -> None:
        self.fetch += SMOOTH * (seconds - self.fetch)
