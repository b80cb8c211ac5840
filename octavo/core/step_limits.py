"""The limits of a step, which are decided before anything is planned (step_limiter.py)."""

from __future__ import annotations

import math
import sys
from typing import NamedTuple

from octavo.types import Rank, Sequence

LAST_RANK: Rank = (math.inf, sys.maxsize, 0, sys.maxsize, 0)
NO_IDS: frozenset[int] = frozenset()


class StepLimits(NamedTuple):
    token_budget: int
    short_prompt_share: float  # fraction of the remaining budget that short prompts may take first
    # Waiting sequences with this rank or a later one are not admitted.
    first_rank_not_admitted: Rank = LAST_RANK
    # (sequence to be preempted before the step is filled, the prompt that it makes room for)
    to_preempt: tuple[tuple[Sequence, Sequence], ...] = ()
    urgent_prompts: tuple[Sequence, ...] = ()  # prompts that other sequences pause for
    # Sum of `planned` of the urgent prompts before this step. after_plan() detects progress by it.
    urgent_positions: int = 0
    paused: frozenset[int] = NO_IDS  # Sequence.id: neither prefill nor decode in this step
    not_decoding: frozenset[int] = NO_IDS  # Sequence.id: do not decode in this step
