"""A solution of exercises/batching.py."""

from __future__ import annotations

import heapq


def static_steps(replies: list[int], slots: int) -> int:
    return sum(max(replies[at : at + slots]) for at in range(0, len(replies), slots))


def continuous_steps(replies: list[int], slots: int) -> int:
    ends = [0] * slots  # the step in which each slot becomes free
    for reply in replies:
        heapq.heapreplace(ends, ends[0] + reply)
    return max(ends)
